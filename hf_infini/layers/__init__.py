"""Attention layers with a memory: the parameters and one call of any of them, and the swap of a
decoder's own attention."""
