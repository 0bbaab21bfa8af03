"""Fused kernels: attend.py runs them, and agreement.py tries them on a device before that."""
