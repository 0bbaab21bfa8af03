"""What the machine itself reaches: products of matrices, and copies, as a scale for what the attention reaches."""

from collections.abc import Callable

import torch

from . import timing

COPY_BYTES = 2**28
PROBE_SIZE = 256  # rows
PRODUCT_SECONDS = 1.0  # that a product may take on a CPU


def measure(device: str, size: int | None, rounds: int, seed: int = 0) -> list[dict]:
    """Rows of `{"what", "unit", "rate", "rate_lowest", "rate_highest"}`: products in operations/s, the copy in bytes/s.

    Args:
        size: of the square matrices; `None`: 8,192 on a GPU, and on a CPU 2,048, or less where a product would take too
            long, as those of bfloat16 do on a CPU that only emulates it.
        rounds: the three are measured in turn; the highest rate is the peak.
    """
    on_gpu = device.startswith("cuda")
    sizes = {"copy": COPY_BYTES}
    runs, amounts = {}, {}
    for dtype in ("float32", "bfloat16"):
        sizes[dtype] = rows = size or (8192 if on_gpu else affordable(2048, probed_seconds(dtype)))
        runs[dtype] = product(rows, device, dtype)
        amounts[dtype] = 2 * rows**3
    source = torch.ones(COPY_BYTES // 4, device=device)
    target = torch.empty_like(source)
    runs["copy"], amounts["copy"] = lambda: target.copy_(source), 2 * COPY_BYTES  # read and written
    times = timing.alternate(runs, rounds=rounds, device=device, seed=seed, sample_seconds=0.1)
    return [
        {
            "what": what,
            "unit": "bytes/s" if what == "copy" else "operations/s",
            "size": sizes[what],
            **timing.spread([amounts[what] / seconds for seconds in times[what]], "rate"),
        }
        for what in runs
    ]


def product(size: int, device: str, dtype: str) -> Callable[[], object]:
    """A product of two random square matrices, ready to run."""
    left, right = (torch.randn(size, size, device=device).to(getattr(torch, dtype)) for _ in range(2))
    out = torch.empty_like(left)
    return lambda: torch.mm(left, right, out=out)


def probed_seconds(dtype: str) -> float:
    """Seconds that a product of `PROBE_SIZE` rows takes on the CPU: the fastest of five, the first pays for setting up."""
    probe = product(PROBE_SIZE, "cpu", dtype)
    return min(timing.seconds_of(probe, "cpu") for _ in range(5))


def affordable(size: int, seconds: float) -> int:
    """`size` or its first half, quarter, … (`PROBE_SIZE` at least) whose product takes less than `PRODUCT_SECONDS`.

    Args:
        seconds: what a product of `PROBE_SIZE` rows takes; at more rows the rate is no lower.
    """
    while size > PROBE_SIZE and seconds * (size / PROBE_SIZE) ** 3 > PRODUCT_SECONDS:
        size //= 2
    return size


def peaks(rows: list[dict]) -> dict[str, float]:
    """The highest rate of each: `{"float32", "bfloat16", "copy"}`."""
    return {row["what"]: row["rate_highest"] for row in rows}
