"""Peak memory of one piece of work: in a fresh process on a CPU, by the allocator's own count on a GPU.

A process's peak remembers everything that it ever held, so on a CPU every measurement gets a process of its own, which ends
with it. They are forked from a server that has imported the libraries and computed nothing: an import takes seconds.
"""

import ctypes
import multiprocessing
import signal
import sys
import time
from collections.abc import Callable

import psutil
import torch

from support.measurement import give_back_freed_memory
from support.stages import peak_memory_bytes

from . import contestants, models
from .timing import give_back_memory

START_SECONDS = 600  # for the server's imports, on a busy machine
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
    return _measure_in_process(spec, threads, limit_seconds)


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


def _context():
    """Processes forked from a server that has the libraries; fresh interpreters where there is no fork."""
    if "forkserver" in multiprocessing.get_all_start_methods():
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        return context
    return multiprocessing.get_context("spawn")


def _measure_in_process(spec: dict, threads: int | None, limit_seconds: float) -> dict:
    context = _context()
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(sender, spec, threads), daemon=True)
    process.start()
    sender.close()
    try:
        if not receiver.poll(START_SECONDS) or receiver.recv() != "started":
            return {"failed": "no process could be started"}
        if not receiver.poll(limit_seconds):
            return {"failed": f"more than {limit_seconds:g} s"}
        return receiver.recv()
    except EOFError:  # it ended without an answer
        process.join()
        killed = process.exitcode == -signal.SIGKILL
        return {"failed": "ended by the system, for want of memory" if killed else f"exit status {process.exitcode}"}
    finally:
        process.kill()
        process.join()
        receiver.close()


def _child(sender, spec: dict, threads: int | None) -> None:
    """What runs in a process of its own: one spec."""
    give_back_freed_memory()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: ends with the server, which ends with the benchmark
    if threads:
        torch.set_num_threads(threads)
    sender.send("started")
    try:
        result = KINDS[spec["kind"]](spec, lambda run: peak_of(run, "cpu"))
    except Exception as error:  # a package of somebody else's that does not run here is no reason to stop
        short = isinstance(error, MemoryError) or "allocate memory" in str(error)
        result = {"failed": "not enough memory" if short else f"{type(error).__name__}: {str(error).splitlines()[0]}"}
    sender.send(result)
