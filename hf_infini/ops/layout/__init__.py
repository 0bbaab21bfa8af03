"""Which token of a call is in which segment and slot: one interface and its form for a grid of
segments (base.py), its form for one more token for every row (step.py), and what makes one of them
once a forward (build.py)."""
