"""Which token of a call is in which segment and slot: one interface and its form for a grid of
segments (base.py), and what makes it once a forward (build.py). The form for one more token for
every row is in step.py, beside what it is for."""
