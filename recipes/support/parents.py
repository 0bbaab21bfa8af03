"""Processes that do not outlive the program that started them."""

import ctypes
import os
import signal
import sys

_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Has the system send this process a signal when its parent ends, however that happens (Linux;
    elsewhere nothing).

    Args:
        parent: the process that has started this one. Where that is gone already, this one ends.
        number: the signal. A rank of a distributed run may be waiting for the others, inside a call
            where Python handles no signal: only SIGKILL ends it then."""
    if _LIBC is None:
        return
    _LIBC.prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(1)
