"""Seconds of things that do the same work, measured in turn in one process, and a GPU's peak
memory.

A machine's speed drifts: by its clock, its temperature and what else runs on it. What is measured
in the same round meets the same machine, so a ratio is taken within each round, and the figure is
the median over the rounds with its extremes.
"""

import gc
import math
import random
import statistics
import time
from collections.abc import Callable, Mapping

import torch

Work = Callable[[], object]


def wait_for(device: str) -> None:
    """Returns when the device has done what was asked of it: work on a GPU is only queued by the
    calls that ask for it."""
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
    runs: Mapping[str, Work], rounds: int, device: str, seed: int = 0, sample_seconds: float = 0.0
) -> dict[str, list[float]]:
    """Seconds per run of each contestant by its name, a value for each round.

    Every round takes all of them in a new random order. Before the first they run twice to warm up.
    Quick runs are repeated until a value stands for about `sample_seconds` (0: never repeated)."""
    for run in runs.values():
        run()
    repeats = {
        name: max(1, math.ceil(sample_seconds / max(seconds_of(run, device), 1e-4)))
        for name, run in runs.items()
    }
    times: dict[str, list[float]] = {name: [] for name in runs}
    draw = random.Random(seed)
    for _ in range(rounds):
        for name in draw.sample(list(runs), len(runs)):
            times[name].append(seconds_of(runs[name], device, repeats[name]))
    return times


def spread(values: list[float], name: str) -> dict[str, float]:
    """Median, smallest and largest: `{name, name_lowest, name_highest}`."""
    found = (statistics.median(values), min(values), max(values))
    return dict(zip((name, f"{name}_lowest", f"{name}_highest"), found, strict=True))


def in_graph(run: Work) -> Work:
    """The run as one CUDA graph: what it takes without the time in which the GPU waits for its next
    kernel."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = run()
    return lambda: (graph.replay(), kept)


def tried(work: Callable[[], object], device: str) -> dict:
    """Runs it: `{"peak_bytes"}`, the most that it held of a GPU's memory beyond what was held
    before, or `{"skipped": reason}`."""
    give_back_memory()
    on_gpu = device.startswith("cuda")
    before = torch.cuda.memory_allocated(device) if on_gpu else 0
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    try:
        work()
    except Exception as error:  # what does not run here is no reason to stop
        short = isinstance(error, MemoryError | torch.OutOfMemoryError)
        if short or "allocate memory" in str(error):
            return {"skipped": "not enough memory"}
        return {"skipped": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
    return {"peak_bytes": torch.cuda.max_memory_allocated(device) - before} if on_gpu else {}


def give_back_memory() -> None:
    """Returns freed memory to the system, for what is measured next."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
