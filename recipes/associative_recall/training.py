"""The training of one model, in zoology's way, resumable; and how well it answers.

Batches come in the order of the parts, the same in every epoch; AdamW without warm-up, at a
learning rate that falls from epoch to epoch as a cosine; after each epoch the tests, until their
mean accuracy is above a threshold.

Source: HazyResearch/zoology, `zoology/train.py`.
"""

import math
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from cli import UserError
from recall.tasks import wilson_interval
from support.stages import new_file
from training.console import duration
from training.run_folder import say

from .model import Recaller
from .rows import Part, Rows

WEIGHT_DECAY = 0.1
TEST_BATCH = {"cpu": 32, "cuda": 128}


def train(
    model: Recaller,
    training: Sequence[Rows],
    tests: Sequence[tuple[Part, Rows]],
    options,
    rate: float,
    file: Path,
):
    """Trains to the end, from the state in `file` where there is one, with the options of
    recipes/mqar.py and `rate`, the learning rate of the first epoch. Returns a dict for each epoch:
    `epoch`, `loss` (the mean over its steps, None where it is not finite: the run ends), `tokens`
    and `seconds` so far, and what [`evaluate`] finds."""
    device = model.embedding.weight.device
    batches = [batch for rows in training for batch in rows.batches(options.batch_size)]
    tokens = sum(batch.inputs.numel() for batch in batches)
    dtype = torch.bfloat16 if options.precision == "bf16" else torch.float32
    optimizer = torch.optim.AdamW(model.parameter_groups(WEIGHT_DECAY), lr=rate, fused=True)
    history = _restore(model, optimizer, file) if file.exists() else []
    if history:
        say(f"  from epoch {len(history) + 1}")
    model.train()
    while not _has_ended(history, options):
        epoch, clock = len(history), time.perf_counter()
        total = torch.zeros((), dtype=torch.float64, device=device)
        now = rate * (1 + math.cos(math.pi * epoch / options.epochs)) / 2
        for group in optimizer.param_groups:  # perhaps restored from a state with CUDA graphs
            group.update(lr=now, capturable=False)
        name = f"epoch {epoch + 1}/{options.epochs}"
        for place, batch in enumerate(tqdm(batches, name, unit="step", leave=False)):
            # dropout is the same after a restart
            torch.manual_seed(options.seed + epoch * len(batches) + place)
            optimizer.zero_grad()
            loss = model.loss(batch.to(device), dtype)
            loss.backward()
            optimizer.step()
            total += loss.detach()
        mean, found = total.item() / len(batches), evaluate(model, tests)
        seconds = (history[-1]["seconds"] if history else 0.0) + time.perf_counter() - clock
        line = {"epoch": epoch + 1, "loss": mean if math.isfinite(mean) else None, **found}
        history.append(line | {"tokens": (epoch + 1) * tokens, "seconds": round(seconds, 3)})
        content = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        # an open file says what is wrong with its disk, torch's own does not
        with new_file(file) as part, part.open("wb") as state:
            torch.save(content | {"history": history}, state)
        say(f"  {name}: loss {mean:.4f}, accuracy {found['accuracy']:.3f}, {duration(seconds)}")
    return history


def _has_ended(history: list[dict], options) -> bool:
    last = history[-1] if history else {"epoch": 0, "loss": 0.0, "accuracy": 0.0}
    ended = last["epoch"] == options.epochs or last["loss"] is None
    return ended or last["accuracy"] > options.stop_above


def _restore(model: Recaller, optimizer, file: Path) -> list[dict]:
    try:
        if changed := zipfile.ZipFile(file).testzip():  # torch does not look at the checksums
            raise UserError(f"{changed} has changed since it was written")
        saved = torch.load(file, map_location=model.embedding.weight.device, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        return saved["history"]
    except Exception as error:  # torch raises errors of many kinds for damaged files
        raise UserError(
            f"cannot read {file}: {' '.join(str(error).split())[:200]}; delete it to train again"
        ) from error


def evaluate(model: Recaller, tests: Sequence[tuple[Part, Rows]]) -> dict:
    """Accuracy over all rows, as [`summarize`] has it, and `tests`, the same for each of them with
    its `length` and `pairs`. Always in float32."""
    device, was_training = model.embedding.weight.device, model.training
    model.eval()
    shares, found = [], []
    for part, rows in tests:
        batches = rows.batches(TEST_BATCH[device.type])
        correct = torch.cat([model.correct(batch.to(device)) for batch in batches])
        shares.append(correct.double().cpu() / part.pairs)
        of_part = {"length": part.length, "pairs": part.pairs, "questions": part.rows * part.pairs}
        found.append(of_part | summarize(shares[-1]))
    model.train(was_training)
    return {**summarize(torch.cat(shares)), "tests": found}


def summarize(shares: Tensor) -> dict:
    """`rows`, their mean `accuracy`, and its 95 % interval, `low` to `high`, of the share of right
    answers in each row.

    The answers of a row depend on each other: it is Wilson's interval of as many independent
    answers as would vary as much, or, where rows do not vary, of one answer for each."""
    rows, accuracy = len(shares), shares.mean().item()
    variance = shares.var(correction=0).item() / rows
    count = accuracy * (1 - accuracy) / variance if variance else rows
    low, high = wilson_interval(accuracy * count, count)
    return {"rows": rows, "accuracy": accuracy, "low": low, "high": high}
