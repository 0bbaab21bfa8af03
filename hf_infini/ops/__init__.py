"""Functions on tensors: the reference (naive.py), what a call of attention is made of (state.py),
where its tokens go (layout/), the softmax in the window and the memory (equations.py) with its
update rules (rules/), what is kept (keeping/), and attention.py, which passes a call on to what
computes it (backends/). Nothing here knows a model."""
