"""What a conversion has reached: cross-entropy beyond the window in several conditions."""

import torch
from torch import Tensor
from torch.nn import functional as F
from tqdm.auto import tqdm

from evaluation.bootstrap import difference_interval, mean_interval
from hf_infini.models.structure import decoder_of
from recall.rows import NOT_COUNTED
from support.markdown import markdown_table

from .teacher import full_attention
from .trainers import gates_closed, window_untrained

PLAIN, SOME = "plain model", "full attention in the layers with a memory"
UNTRAINED, OFF, ON = "window and sinks, untrained", "trained, memory off", "trained, memory on"
KEPT = "window, sinks and kept tokens, otherwise untrained"


def loss_beyond(model, row: Tensor, window: int) -> Tensor:
    """The summed cross-entropy, in nats, of the labels of a row `[2, tokens]` that come after the first `window`."""
    ids, labels = row
    logits = model(input_ids=ids[None], use_cache=False, logits_to_keep=len(ids) - window + 1).logits[0, :-1]
    return F.cross_entropy(logits.float(), labels[window:], reduction="sum", ignore_index=NOT_COUNTED)


def counted_beyond(rows: Tensor, window: int) -> list[int]:
    """How many labels [`loss_beyond`] sums, by row."""
    return (rows[:, 1, window:] != NOT_COUNTED).sum(1).tolist()


@torch.no_grad()
def losses_of(model, rows: Tensor, window: int) -> list[float]:
    """[`loss_beyond`] of each row."""
    return [float(loss_beyond(model, row, window)) for row in tqdm(rows, desc="evaluation", unit="row", leave=False)]


def losses_with_full_attention(model, rows: Tensor, window: int, layers: list[int] | None) -> list[float]:
    """[`losses_of`] with full attention in `layers` (`None`: all), and closed memories in the others."""
    with gates_closed(model), full_attention(model, rows.shape[2], layers=layers):
        return losses_of(model, rows, window)


@torch.no_grad()
def evaluate(model, rows: Tensor, window: int, layers: list[int]) -> dict:
    """`cross_entropy`: by condition the mean over tokens beyond the window, in nats, with its 95 % interval; how much higher
    it is than with the memory on, paired; and the share of the gap between window and plain model that is closed.

    Args:
        rows: `[rows, 2, tokens]`, ids and labels; those without a label beyond the window are left out.
        window: tokens that a model's softmax sees at most.
        layers: those whose memory was trained. Where they are some, what full attention in them would give is one more
            condition: no memory in these layers can be expected to do better.
    """
    model.eval()
    rows = rows[torch.tensor(counted_beyond(rows, window), device=rows.device) > 0]
    counts = counted_beyond(rows, window)
    plain = {PLAIN: None, SOME: layers, UNTRAINED: []}
    if set(layers) in (set(), set(decoder_of(model).config.infini_layers)):
        del plain[SOME]
    losses, config = {}, decoder_of(model).config
    with window_untrained(model):
        kept_tokens, config.kept_tokens = config.kept_tokens, 0
        try:
            for name, full in plain.items():
                losses[name] = losses_with_full_attention(model, rows, window, full)
        finally:
            config.kept_tokens = kept_tokens
        if kept_tokens:
            losses[KEPT] = losses_with_full_attention(model, rows, window, [])
    with gates_closed(model):
        losses[OFF] = losses_of(model, rows, window)
    losses[ON] = losses_of(model, rows, window)
    found = {}
    for name, values in losses.items():
        mean, above = mean_interval(values, counts), difference_interval(values, counts, losses[ON], counts)
        found[name] = {"nats": vars(mean), "above_memory_on": vars(above)}
    gap = found[UNTRAINED]["nats"]["value"] - found[PLAIN]["nats"]["value"]
    closed = {name: (found[UNTRAINED]["nats"]["value"] - found[name]["nats"]["value"]) / gap for name in losses}
    return {"cross_entropy": found, "gap_closed": closed, "tokens": sum(counts)}


def table(found: dict) -> str:
    """The conditions as a Markdown table."""
    rows = []
    for name, values in found.items():
        numbers = [[f"{values[kind][end]:.4f}" for end in ("value", "low", "high")] for kind in values]
        rows.append([name, *(f"{middle} ({low} to {high})" for middle, low, high in numbers)])
    return markdown_table(["", "nats beyond the window", "above the memory on"], rows, left=1)
