"""What the machine itself reaches: products of matrices, and copies, as a scale for what the attention reaches."""

import torch

from . import timing

COPY_BYTES = 2**28


def measure(device: str, size: int | None, rounds: int, seed: int = 0) -> list[dict]:
    """Rows of `{"what", "unit", "rate", "rate_lowest", "rate_highest"}`: products in operations/s, the copy in bytes/s.

    Args:
        size: of the square matrices; `None`: 2,048 on a CPU, 8,192 on a GPU.
        rounds: the three are measured in turn; the highest rate is the peak.
    """
    on_gpu = device.startswith("cuda")
    size = size or (8192 if on_gpu else 2048)
    runs, amounts = {}, {}
    for dtype in ("float32", "bfloat16"):
        left, right = (torch.randn(size, size, device=device).to(getattr(torch, dtype)) for _ in range(2))
        out = torch.empty_like(left)
        runs[dtype] = lambda left=left, right=right, out=out: torch.mm(left, right, out=out)
        amounts[dtype] = 2 * size**3
    source = torch.ones(COPY_BYTES // 4, device=device)
    target = torch.empty_like(source)
    runs["copy"], amounts["copy"] = lambda: target.copy_(source), 2 * COPY_BYTES  # read and written
    times = timing.alternate(runs, rounds=rounds, device=device, seed=seed, sample_seconds=0.1)
    return [
        {
            "what": what,
            "unit": "bytes/s" if what == "copy" else "operations/s",
            "size": COPY_BYTES if what == "copy" else size,
            **timing.spread([amounts[what] / seconds for seconds in times[what]], "rate"),
        }
        for what in runs
    ]


def peaks(rows: list[dict]) -> dict[str, float]:
    """The highest rate of each: `{"float32", "bfloat16", "copy"}`."""
    return {row["what"]: row["rate_highest"] for row in rows}
