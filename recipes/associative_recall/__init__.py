"""Multi-query associative recall (MQAR) as zoology measures it: rows, a model around a mixer of
ours, training."""
