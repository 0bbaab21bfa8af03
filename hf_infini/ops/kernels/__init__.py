"""Fused kernels, each a row of the table of backends ([`Backend`] in ops/attention.py)."""
