"""Which token of a call is in which segment and slot: one interface (base.py), what makes it once a forward (build.py),
and its forms: a grid of segments (grid.py), and one more token for every row (step.py)."""
