"""Functions on tensors: the reference (naive.py), the layout of a call (layout/), softmax in the
window (window.py), the memory and its update rules (memory.py, rules/), what is kept (keeping/),
and attention.py, which passes a call on to what computes it (backends/). Nothing here knows a
model."""
