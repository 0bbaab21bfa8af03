"""Peak memory of one piece of work: in a fresh process on a CPU, by the allocator's own count on a GPU.

A process's peak remembers everything that it ever held, so on a CPU every measurement gets a process of its own, which ends
with it. They are forked from a server that has imported the libraries and computed nothing: an import takes seconds.
"""

import math
import multiprocessing
import signal
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

import psutil
import torch

from support.measurement import give_back_freed_memory
from support.stages import peak_memory_bytes

from . import contestants, models
from .timing import give_back_memory

# kind → function of a spec and of [`peak_of`] bound to the device; the keys are what a spec's "kind" may be
KINDS = {"layer": contestants.probe, "training": models.probe_training, "prefill": models.probe_prefill}


def measure(spec: dict, device: str, threads: int | None, limit_seconds: float) -> dict:
    """Runs a spec and returns `{"peak_bytes", "seconds", …}`, or `{"failed": reason}`.

    Args:
        spec: `{"kind": …}` with the arguments of that kind's function.
        threads: of a process on the CPU; `None` leaves torch's choice.
        limit_seconds: a process on the CPU is ended when it takes longer.
    """
    if device.startswith("cuda"):
        try:
            return KINDS[spec["kind"]](spec, lambda run: peak_of(run, device))
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            return {"failed": "not enough memory on the GPU"}
    method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
    context = multiprocessing.get_context(method)
    if method == "forkserver":
        context.set_forkserver_preload([__name__])
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        try:
            return pool.submit(_measure_here, spec, threads, limit_seconds).result()
        except BrokenProcessPool:
            return {"failed": f"ended after {limit_seconds:g} s, or by the system for want of memory"}


def peak_of(run: Callable[[], object], device: str) -> dict:
    """Bytes at the peak of `run()` beyond those held when it began, and its seconds."""
    on_gpu = device.startswith("cuda")
    give_back_memory()
    if on_gpu:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    else:
        before = _forget_peak()
    begin = time.perf_counter()
    run()
    if on_gpu:
        torch.cuda.synchronize(device)
    seconds = time.perf_counter() - begin
    peak = torch.cuda.max_memory_allocated(device) if on_gpu else peak_memory_bytes()
    return {"peak_bytes": max(0, peak - before), "seconds": seconds}


def _forget_peak() -> int:
    """Sets this process's peak to what it holds now, where the system can (Linux), and returns it in bytes."""
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    except OSError:
        return peak_memory_bytes()  # the peak of the imports: what comes beyond it is still counted
    return psutil.Process().memory_info().rss


def _measure_here(spec: dict, threads: int | None, limit_seconds: float) -> dict:
    """What runs in a process of its own: one spec."""
    if hasattr(signal, "alarm"):  # not on Windows, where nothing ends it
        signal.alarm(math.ceil(limit_seconds))
    give_back_freed_memory()
    if threads:
        torch.set_num_threads(threads)
    try:
        return KINDS[spec["kind"]](spec, lambda run: peak_of(run, "cpu"))
    except Exception as error:  # a package of somebody else's that does not run here is no reason to stop
        short = isinstance(error, MemoryError) or "allocate memory" in str(error)
        return {"failed": "not enough memory" if short else f"{type(error).__name__}: {str(error).splitlines()[0]}"}
