"""Pure functions on tensors: the reference (naive.py), the layout of a call (layout/), softmax in
the window (window.py), the memory and its update rules (memory.py, rules/), and attention.py, which
mixes them. Nothing here knows a model."""
