"""The parts `attention` and `scaling`: one layer forward and backward, beside others and over its length.

A cell is what is measured together and kept together in the JSON: a dict that describes it. Rows are the results.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import psutil
import torch

from . import contestants, probe, timing, work
from .contestants import BASE, CONTESTANTS, Problem
from .work import Shape


@dataclass(frozen=True)
class How:
    """How things are measured, the same for all parts.

    Attributes:
        rounds: values of each contestant; see [`timing.alternate`], also for `once_above` (seconds).
        skip_above: a run that takes more seconds in its own process (CPU) is not timed at all.
        threads: on the CPU; `None`: torch's choice.
        say: is told what is being measured.
    """

    device: str = "cpu"
    rounds: int = 5
    once_above: float = 10.0
    skip_above: float = 60.0
    threads: int | None = None
    seed: int = 0
    say: Callable[[str], object] = lambda text: None

    def alternate(self, runs: dict, **options) -> dict[str, list[float]]:
        """[`timing.alternate`] in this way."""
        return timing.alternate(runs, rounds=self.rounds, device=self.device, seed=self.seed, say=self.say, **options)

    def probe(self, spec: dict, limit_seconds: float | None = None) -> dict:
        """[`probe.measure`] in this way, by default within `skip_above` seconds."""
        return probe.measure(spec, self.device, self.threads, limit_seconds or self.skip_above)


def memory_of(how: How, name: str, shape: Shape) -> dict:
    """`peak_bytes` and `extra` of one contestant, or `{"failed": reason}` where it cannot run or takes too long.

    `extra` is what the peak holds beyond query, key, value, output and their gradients, in units of those.
    """
    how.say(f"{name}, memory")
    reason = contestants.missing(name)
    needed, free = contestants.bytes_needed(name, shape, how.device), free_bytes(how.device)
    if reason is None and needed > free:
        reason = f"needs about {needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free"
    if reason:
        return {"failed": reason}
    found = how.probe({"kind": "layer", "contestant": name, "shape": asdict(shape), "device": how.device})
    if "failed" in found:
        return found
    own = work.bytes_moved(shape)
    return {"peak_bytes": found["peak_bytes"], "extra": found["peak_bytes"] / own - 1}


def free_bytes(device: str) -> int:
    """Memory that is free for more tensors."""
    if device.startswith("cuda"):
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available


def attention_rows(how: How, shape: Shape, names: list[str]) -> list[dict]:
    """A row for each contestant on one shape: seconds and memory with their ratios to `infini`, operations and bytes.

    What cannot run has the reason in `skipped`, in place of the rest. A row with a single value in `samples` ran once.
    """
    memory = {name: memory_of(how, name, shape) for name in names}
    timing.give_back_memory()
    running = [name for name in names if "failed" not in memory[name]]
    problem = Problem.random(shape, how.device, how.seed)
    runs = {name: contestants.run_of(name, problem) for name in running}
    times = how.alternate(runs, once_above=how.once_above, sample_seconds=0.05)
    rows, timed = [], timing.summary(times, BASE)
    for name in names:
        row = {"contestant": name} | asdict(shape)
        if name not in timed:
            rows.append(row | {"skipped": memory[name]["failed"]})
            continue
        row |= timed[name] | memory[name]
        row |= _memory_ratio(row, memory.get(BASE, {}))
        rows.append(row | {"operations": CONTESTANTS[name].operations(shape), "bytes": work.bytes_moved(shape)})
    return rows


def shares(row: dict, peaks: dict[str, float]) -> dict[str, float]:
    """Which part of the machine's peaks a row reaches: products in its dtype, and the copy bandwidth."""
    seconds = row["seconds"]
    return {
        "share_of_products": row["operations"] / seconds / peaks[row["dtype"]],
        "share_of_copy": row["bytes"] / seconds / peaks["copy"],
    }


def scaling_rows(how: How, shapes: list[Shape], name: str) -> list[dict]:
    """Seconds and memory of one contestant on lengths that double; `ratio` and `memory_ratio` are to the row before.

    The lengths are timed in turn, so that a ratio's two values come from the same round.
    """
    memory = {shape.tokens: memory_of(how, name, shape) for shape in shapes}
    timing.give_back_memory()
    runs = {
        shape.tokens: contestants.run_of(name, Problem.random(shape, how.device, how.seed))
        for shape in shapes
        if "failed" not in memory[shape.tokens]
    }
    labelled = replace(how, say=lambda tokens: how.say(f"{name}, {tokens:,} tokens"))
    times = labelled.alternate(runs, once_above=how.once_above, sample_seconds=0.05)
    rows = []
    for number, shape in enumerate(shapes):
        row, tokens = {"contestant": name} | asdict(shape), shape.tokens
        if tokens not in times:
            rows.append(row | {"skipped": memory[tokens]["failed"]})
            continue
        row |= timing.spread(times[tokens]) | {"samples": times[tokens]} | memory[tokens]
        before = shapes[number - 1].tokens if number else None
        if before in times:
            row |= timing.spread(timing.ratios(times[tokens], times[before]), "ratio") | _memory_ratio(row, memory[before])
        rows.append(row)
    return rows


def _memory_ratio(row: dict, base: dict) -> dict[str, float]:
    """`{"memory_ratio"}` of two peaks; nothing where the base has none, or one too small to be seen."""
    return {"memory_ratio": row["peak_bytes"] / base["peak_bytes"]} if base.get("peak_bytes") else {}


def memory_rows(how: How, shape: Shape, name: str) -> list[dict]:
    """A row with the memory alone, of one contestant on one shape."""
    found = memory_of(how, name, shape)
    result = {"skipped": found["failed"]} if "failed" in found else found
    return [{"contestant": name} | asdict(shape) | result]
