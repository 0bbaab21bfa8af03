"""Seconds of things that do the same work, measured in turn in one process, the ratios between them, and peak memory.

A machine's speed drifts: by its clock, its temperature and what else runs on it. What is measured in the same round meets
the same machine, so a ratio is taken within each round, and the figure is the median over the rounds with its extremes.

A process's peak remembers everything that it ever held, so on a CPU every measurement of memory gets a process of its own,
which ends with it. They are forked from a server that has imported the libraries and computed nothing: an import takes
seconds.
"""

import contextlib
import ctypes
import gc
import math
import multiprocessing
import os
import platform
import random
import signal
import statistics
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import psutil
import torch

from support.measurement import give_back_freed_memory
from support.stages import peak_memory_bytes

Work = Callable[[], object]


def wait_for(device: str) -> None:
    """Returns when the device has done what was asked of it: work on a GPU is only queued by the calls that ask for it."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def seconds_of(run: Work, device: str, repeats: int = 1) -> float:
    """Seconds that one of `repeats` runs takes."""
    wait_for(device)
    begin = time.perf_counter()
    for _ in range(repeats):
        run()
    wait_for(device)
    return (time.perf_counter() - begin) / repeats


def alternate(
    runs: Mapping[str, Work], *, rounds: int, device: str, seed: int = 0, sample_seconds: float = 0.0
) -> dict[str, list[float]]:
    """Seconds per run of each contestant, a value for each round.

    Every round takes all of them in a new random order. Before the first they run once to warm up.

    Args:
        runs: name → one run.
        rounds: at least 1.
        sample_seconds: quick runs are repeated until a value stands for about so much time (0: never repeated).
    """
    repeats = {name: math.ceil(sample_seconds / max(seconds_of(run, device), 1e-4)) for name, run in runs.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    draw = random.Random(seed)
    for _ in range(rounds):
        for name in draw.sample(list(runs), len(runs)):
            times[name].append(seconds_of(runs[name], device, max(1, repeats[name])))
    return times


def spread(values: list[float], name: str) -> dict[str, float]:
    """Median, smallest and largest: `{name, name_lowest, name_highest}`."""
    return {name: statistics.median(values), f"{name}_lowest": min(values), f"{name}_highest": max(values)}


def peak_of(prepare: Callable[..., Work], *settings, device: str, threads: int | None, limit_seconds: float) -> dict:
    """`{"peak_bytes"}`, the most that the work returned by `prepare(*settings)` holds beyond what is held before it, or
    `{"skipped": reason}`.

    Args:
        prepare: a function of a module; `settings` can be pickled.
        threads: of the process on a CPU; `None` leaves torch's choice.
        limit_seconds: the process on a CPU is ended when it takes longer.
    """
    if device.startswith("cuda"):
        return _peak_here(prepare, settings, device)
    method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
    context = multiprocessing.get_context(method)
    if method == "forkserver":
        # Of what is installed: the server of Python 3.11 and 3.12 does not see the folder of a script
        context.set_forkserver_preload(["hf_infini.tools.training"])
    with ProcessPoolExecutor(1, mp_context=context, initializer=_begin, initargs=(threads, limit_seconds)) as pool:
        try:
            return pool.submit(_peak_here, prepare, settings, "cpu").result()
        except BrokenProcessPool:
            return {"skipped": f"ended after {limit_seconds:g} s, or by the system for want of memory"}


def _begin(threads: int | None, limit_seconds: float) -> None:
    """Limits a process on a CPU to its time and to the memory that there is: what needs more shall fail there, and not push
    other programs out."""
    if os.name == "posix":
        import resource

        signal.alarm(math.ceil(limit_seconds))
        resource.setrlimit(resource.RLIMIT_DATA, (psutil.virtual_memory().available, resource.RLIM_INFINITY))
    give_back_freed_memory()
    if threads:
        torch.set_num_threads(threads)


def _peak_here(prepare: Callable[..., Work], settings: tuple, device: str) -> dict:
    try:
        return {"peak_bytes": _peak(prepare(*settings), device)}
    except ModuleNotFoundError as error:
        return {"skipped": f"not installed: pip install {error.name.replace('_', '-')}"}
    except Exception as error:  # a package of somebody else's that does not run here is no reason to stop
        short = isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate memory" in str(error)
        return {"skipped": "not enough memory" if short else f"{type(error).__name__}: {str(error).splitlines()[0]}"}


def _peak(work: Work, device: str) -> int:
    give_back_memory()
    if device.startswith("cuda"):
        wait_for(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        return torch.cuda.max_memory_allocated(device) - before
    with contextlib.suppress(OSError):  # sets the peak to what is held now (Linux); elsewhere it is that of the imports
        Path("/proc/self/clear_refs").write_text("5")
    before = peak_memory_bytes()
    work()
    return peak_memory_bytes() - before


def held_bytes(device: str) -> int:
    """What is held now: by tensors on a GPU; on a CPU the process's resident set, without freed memory that the C library
    keeps for what comes next."""
    if device.startswith("cuda"):
        return torch.cuda.memory_allocated(device)
    _trim()
    return psutil.Process().memory_info().rss


def give_back_memory() -> None:
    """Returns freed memory to the system, for the processes measured next (glibc; elsewhere it only collects garbage)."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    _trim()


def _trim() -> None:
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)
