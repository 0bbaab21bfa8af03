"""Seconds of things that do the same work, measured in turn in one process, and the ratios between them.

A machine's speed drifts: by its clock, its temperature and what else runs on it. What is measured in the same round meets
the same machine, so a ratio is taken within each round, and the figure is the median over the rounds with its extremes.
"""

import ctypes
import gc
import math
import platform
import random
import statistics
import time
from collections.abc import Callable, Mapping

import torch


def wait_for(device: str) -> None:
    """Returns when the device has done what was asked of it: work on a GPU is only queued by the calls that ask for it."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def seconds_of(run: Callable[[], object], device: str, repeats: int = 1) -> float:
    """Seconds that one of `repeats` runs takes."""
    wait_for(device)
    begin = time.perf_counter()
    for _ in range(repeats):
        run()
    wait_for(device)
    return (time.perf_counter() - begin) / repeats


def alternate(
    runs: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    device: str,
    seed: int = 0,
    once_above: float = math.inf,
    sample_seconds: float = 0.0,
    say: Callable[[str], object] = lambda name: None,
) -> dict[str, list[float]]:
    """Seconds per run of each contestant, a value for each round.

    Every round takes all of them in a new random order. Before the first they run once to warm up.

    Args:
        runs: name → one run.
        rounds: at least 1.
        once_above: a contestant whose warm-up takes more seconds runs once more, and that is its one value.
        sample_seconds: quick runs are repeated until a value stands for about so much time (0: never repeated).
        say: is told the name of what runs next.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    repeats = {}
    for name, run in runs.items():
        say(name)
        seconds = seconds_of(run, device)
        if seconds > once_above:
            times[name] = [seconds_of(run, device)]  # the first run takes new memory, which can cost more than the work
        else:
            repeats[name] = 1 if sample_seconds <= 0 else max(1, min(1000, math.ceil(sample_seconds / max(seconds, 1e-6))))
    order = list(repeats)
    shuffle = random.Random(seed).shuffle
    for _ in range(rounds):
        shuffle(order)
        for name in order:
            say(name)
            times[name].append(seconds_of(runs[name], device, repeats[name]))
    return times


def spread(values: list[float], name: str = "seconds") -> dict[str, float]:
    """Median, smallest and largest: `{name, name_lowest, name_highest}`."""
    return {name: statistics.median(values), f"{name}_lowest": min(values), f"{name}_highest": max(values)}


def ratios(values: list[float], base: list[float]) -> list[float]:
    """`values / base` round by round; where one of them ran once, against the other's median."""
    if len(values) == len(base):
        return [value / other for value, other in zip(values, base, strict=True)]
    if len(values) == 1:
        return [values[0] / statistics.median(base)]
    return [statistics.median(values) / statistics.median(base)]


def summary(times: Mapping[str, list[float]], base: str) -> dict[str, dict]:
    """For each name the seconds and their ratio to those of `base` (see [`spread`]), and every value, `samples`.

    Without `base` among the times there are no ratios.
    """
    rows = {}
    for name, values in times.items():
        rows[name] = spread(values) | {"samples": values}
        if base in times:
            rows[name] |= spread(ratios(values, times[base]), "ratio")
    return rows


def give_back_memory() -> None:
    """Returns freed memory to the system, for the processes measured next (glibc; elsewhere it only collects garbage)."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)
