"""Fused kernels, each a row of the table [`BACKENDS`] in ops/attention.py."""
