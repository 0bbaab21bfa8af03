"""What a conversion has reached: cross-entropy beyond the window in four conditions, and what each layer's memory gives."""

from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from evaluation.bootstrap import difference_interval, mean_interval
from support.markdown import markdown_table

from .teacher import full_attention
from .trainers import gates_closed, unexplained, without_lora

PLAIN, UNTRAINED, OFF, ON = "plain model", "window and sinks, untrained", "trained, memory off", "trained, memory on"


@torch.no_grad()
def evaluate(model, rows: Tensor, window: int) -> dict:
    """`cross_entropy`: by condition the mean over tokens beyond the window, in nats, with its 95 % interval; how much higher
    it is than with the memory on, paired; and the share of the gap between window and plain model that is closed.
    `unexplained`: by layer, what [`trainers.unexplained`] finds.

    Args:
        rows: `[rows, tokens]`; window: tokens that a model's softmax sees at most.
    """
    model.eval()
    losses = {name: [] for name in (PLAIN, UNTRAINED, OFF, ON)}
    for row in rows:
        with full_attention(model, len(row)), without_lora(model):
            losses[PLAIN].append(_loss(model, row, window))
        with gates_closed(model):
            losses[OFF].append(_loss(model, row, window))
            with without_lora(model):
                losses[UNTRAINED].append(_loss(model, row, window))
        losses[ON].append(_loss(model, row, window))
    counts, found = [rows.shape[1] - window] * len(rows), {}
    for name, values in losses.items():
        mean, above = mean_interval(values, counts), difference_interval(values, counts, losses[ON], counts)
        found[name] = {"nats": vars(mean), "above_memory_on": vars(above)}
    gap = found[UNTRAINED]["nats"]["value"] - found[PLAIN]["nats"]["value"]
    closed = {name: (found[UNTRAINED]["nats"]["value"] - found[name]["nats"]["value"]) / gap for name in (OFF, ON)}
    with without_lora(model):
        by_layer = unexplained(model, rows[:4])
    return {"cross_entropy": found, "gap_closed": closed, "tokens": sum(counts), "unexplained": by_layer}


def table(found: dict) -> str:
    """The conditions as a Markdown table."""
    rows = []
    for name, values in found.items():
        numbers = [[f"{values[kind][end]:.4f}" for end in ("value", "low", "high")] for kind in values]
        rows.append([name, *(f"{middle} ({low} to {high})" for middle, low, high in numbers)])
    return markdown_table(["", "nats beyond the window", "above the memory on"], rows, left=1)


def plot_layers(found: dict, file: Path) -> None:
    """What the memory of each layer leaves unexplained of what the window misses, after each stage."""
    from plots.run import figure_with_axes

    figure, axes = figure_with_axes("What the memory does not supply", "layer", "share of what the window misses")
    stages = {f"after {name}": found[name]["unexplained"] for name in ("transfer", "together") if name in found}
    for name, values in (stages or {"calibrated": found["unexplained"]}).items():
        axes.plot([int(layer) for layer in values], list(values.values()), marker="o", label=name)
    axes.axhline(1, color="gray", linestyle="--", label="window only")
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.savefig(file)


def _loss(model, row: Tensor, window: int) -> float:
    logits = model(input_ids=row[None], use_cache=False, logits_to_keep=len(row) - window + 1).logits[0, :-1]
    return float(F.cross_entropy(logits.float(), row[window:], reduction="sum"))
