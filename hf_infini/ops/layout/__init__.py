"""Which token of a call is in which segment and slot: a grid of segments, and what makes the layout
of a call (grid.py); and the form for one more token for every row (step.py)."""
