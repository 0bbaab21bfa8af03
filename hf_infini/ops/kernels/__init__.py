"""Fused kernels, each a row of the table of backends ([`Backend`] in ops/backends.py), the fastest first; none so far.

A kernel's module is imported only where its compiler is installed, and never travels with a saved model.
"""

from ..backends import Backend

KERNELS: tuple[Backend, ...] = ()
