"""What recipes/batch_probe.py measures: the memory of a training step, and by it the largest batch that fits."""

import contextlib
import json
import math
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from cli import UserError, option

RECIPE = Path(__file__).parents[1] / "batch_probe.py"
TOO_MUCH = 17  # exit status of a process that would need more than the budget or the machine has
GIB = 2**30
PRECISION = 50  # a larger batch is found to one part in so many: two processes' peaks differ by more


@dataclass
class Options:
    model: str = field(metadata={"help": "Folder with the model's config.json.", "group": "step"})
    budget_gib: float = field(metadata={"help": "Memory that the step may take, GiB.", "group": "memory"})
    context: int = option(1024, "Tokens per row.", group="step")
    rows: int | None = option(None, "Measure this many rows; default: find the most that fit.")
    precision: Literal["bf16", "float32"] = option("bf16", "bf16 autocast, or float32.")
    gradient_checkpointing: bool = option(False, "Compute activations twice to save memory.")
    device: Literal["auto", "cpu", "cuda"] = option("auto", "auto: a GPU where there is one.")


def uses_gpu(options: Options) -> bool:
    import torch

    return options.device == "cuda" or options.device == "auto" and torch.cuda.is_available()


# --- the search -------------------------------------------------------------------------------------------------------


def largest_batch(options: Options) -> dict:
    """What [`search`] finds with real steps, each in a process of its own.

    Raises UserError where the budget is more than the machine has free: the search would crowd out what else runs there.
    """
    import psutil

    free = psutil.virtual_memory().available / GIB
    if not uses_gpu(options) and free < options.budget_gib:
        raise UserError(f"a budget of {options.budget_gib:g} GiB, but {free:.1f} GiB of memory are free: give less")
    return search(lambda rows: measure_in_process(options, rows), options.budget_gib * GIB)


def search(measure: Callable[[int], int | None], budget: float) -> dict:
    """The most rows whose peak is within the budget, found with few measurements.

    After 4 and 16 rows, the line through the last two numbers that fitted says what to try next, at most 16 times as much:
    memory grows linearly with the rows, once they take more than the libraries did when they were loaded. After a number
    that did not fit, the middle is tried.

    Args:
        measure: the peak in bytes of a step of so many rows, or None where it did not come to an end for want of memory.
        budget: bytes.

    Returns `{"rows", "peak_bytes", "measured"}`: the most rows (0 when not even one fits), their peak (None for 0), and
    every measurement in its order, `[rows, peak or None]`. One row more than the result has been measured and did not fit;
    from 100 rows on, 2 % more.
    """
    measured: list[tuple[int, int | None]] = []
    fitting = [(0, 0)]  # rows and peaks, ascending; the empty batch is no measurement
    too_many = None
    while too_many is None or too_many - fitting[-1][0] > max(1, fitting[-1][0] // PRECISION):
        low, peak = fitting[-1]
        if too_many is not None and (measured[-1][0] == too_many or len(fitting) <= 2):
            rows = (low + too_many) // 2
        elif len(fitting) <= 2:
            rows = 4 * low or 4
        else:
            per_row = (peak - fitting[-2][1]) / (low - fitting[-2][0])
            rows = low + int((budget - peak) / per_row) if per_row > 0 else 16 * low
            rows = max(low + 1, min(rows, 16 * low if too_many is None else too_many - 1))
        peak = measure(rows)
        measured.append((rows, peak))
        if peak is not None and peak <= budget:
            fitting.append((rows, peak))
        else:
            too_many = rows
    rows, peak = fitting[-1]
    return {"rows": rows, "peak_bytes": peak if rows else None, "measured": measured}


def measure_in_process(options: Options, rows: int) -> int | None:
    """The peak of a step of so many rows in a process of its own; None where memory was not enough."""
    command = [sys.executable, str(RECIPE), "--rows", str(rows)]
    for name, value in vars(options).items():
        command += [] if name == "rows" else [f"--{name}", str(value)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode in (TOO_MUCH, -9):  # -9: the system's own way to end what takes too much memory
        return None
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or ["no output"]
        raise UserError(f"a training step of {rows} rows failed: {lines[-1].removeprefix('error: ')}")
    return json.loads(done.stdout.splitlines()[-1])["peak_bytes"]


# --- one step ---------------------------------------------------------------------------------------------------------


def measure_step(options: Options) -> int:
    """Takes one training step in this process and returns its peak in bytes; ends it with TOO_MUCH where memory is not
    enough."""
    import torch

    from support.stages import peak_memory_bytes

    on_gpu = uses_gpu(options)
    budget = math.inf if on_gpu else options.budget_gib * GIB
    try:
        with _ended_beyond(budget):
            train_step(options, on_gpu)
    except torch.OutOfMemoryError:
        raise SystemExit(TOO_MUCH) from None
    except RuntimeError as error:  # what the allocator of the CPU raises
        if "allocate memory" not in str(error):
            raise
        raise SystemExit(TOO_MUCH) from None
    return torch.cuda.max_memory_allocated() if on_gpu else peak_memory_bytes()


def train_step(options: Options, on_gpu: bool) -> None:
    """A step of one row, which makes the optimiser's state, and then the one that counts."""
    import torch
    from accelerate import Accelerator
    from transformers import AutoConfig

    from cli.model_options import build_model
    from hf_infini.training import parameter_groups

    try:
        config = AutoConfig.from_pretrained(options.model)
    except (OSError, ValueError) as error:
        raise UserError(f"--model: cannot read {options.model}: {str(error).splitlines()[0]}") from error
    accelerator = Accelerator(mixed_precision="bf16" if options.precision == "bf16" else "no", cpu=not on_gpu)
    model = build_model(config, None)
    if options.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(parameter_groups(model, 1e-3, 1e-3, 0.1), fused=True)
    model, optimizer = accelerator.prepare(model.train(), optimizer)
    for rows in (1, options.rows):
        ids = torch.randint(config.vocab_size, (rows, options.context), device=accelerator.device)
        accelerator.backward(model(input_ids=ids, labels=ids, use_cache=False).loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


@contextlib.contextmanager
def _ended_beyond(budget: float) -> Iterator[None]:
    """Inside, this process ends as soon as its resident set has grown beyond so many bytes: more cannot be learned."""
    from support.stages import peak_memory_bytes

    if peak_memory_bytes() > budget:  # a step that fails at once would be quicker than the watch
        raise SystemExit(TOO_MUCH)
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.01):
            if peak_memory_bytes() > budget:
                os._exit(TOO_MUCH)

    watcher = threading.Thread(target=watch, name="memory watch", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()
