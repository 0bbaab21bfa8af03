"""Fits the learned `keep_score` of a model in closed form: one pass over a few rows, no gradient.

What is worth keeping is what later tokens will look at. So the plain model, which still sees everything, is asked: the
target of a token is the largest attention that any query at least `distance` tokens later gives it, over those queries and
the query heads of its group. `keep_weight`, a vector for each key/value head, is its ridge regression on the layer's input.
"""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from ..layers.memory_layer import MemoryLayerMixin, in_evaluation, memory_layers
from ..models.structure import decoder_of
from ..ops.attention import attend_grid, forced_backend
from ..ops.checks import check_kinds
from ..ops.state import Attended, AttentionCall
from ..options import check_number


@torch.no_grad()
@check_kinds
def fit_keep_score(model, rows: Sequence, *, distance: int = 256, ridge: float = 1e-3, progress: bool = True) -> None:
    """Sets the `keep_weight` of all layers of a model that was patched with `kept_tokens` and a learned `keep_score`;
    nothing else of the model changes. What is held at a time are the weights of a layer for a row: heads · tokens² numbers.

    Args:
        model: a patched model, on any device; of quantized weights too.
        rows: lists or tensors of token ids, one document each, such as 24 of 1,700 tokens. Rows that ask at their end for
            what was said far before teach most; plain text without questions teaches less.
        distance: in tokens, from a token to the nearest query that counts; about as many as a window has.
        ridge: penalty of the regression, as a share of the mean square of the inputs.
        progress: whether a bar is shown.

    Raises:
        ValueError: the model keeps no tokens by a learned score; a row is not longer than `distance` and its sinks, or has
            no whole numbers; `distance` is below 1, or `ridge` negative.
    """
    check_number("distance", distance, {"at_least": 1})
    check_number("ridge", ridge, {"at_least": 0})
    layers = {name: layer for name, layer in memory_layers(model).items() if hasattr(layer, "keep_weight")}
    if not layers:
        raise ValueError(
            'this model keeps no tokens by a learned score: patch it with kept_tokens, such as 256, and keep_score="half" '
            'or "learned".'
        )
    rows = [torch.as_tensor(row).flatten() for row in rows]
    shortest = distance + decoder_of(model).config.sink_tokens + 1
    if not rows or (short := min(map(len, rows))) <= shortest:
        given = f"one of {short:,}" if rows else "none"
        raise ValueError(
            f"rows must have more than {shortest:,} tokens, as only queries {distance:,} tokens later count; got {given}. "
            "Give longer rows, or a smaller distance."
        )
    if any(row.is_floating_point() for row in rows):
        raise ValueError("rows must be token ids, which are whole numbers; got numbers of floating point.")
    # Of each layer the sums of products of all tokens' [input, 1, targets]
    sums = {name: torch.zeros([sum(layer.keep_weight.shape) + 1] * 2).double() for name, layer in layers.items()}
    device = layers[next(iter(layers))].keep_weight.device
    with _observed(model, layers, sums, max(map(len, rows)), distance):
        for row in tqdm(rows, desc="fitting the score", unit="row", disable=not progress):
            model(input_ids=row[None].to(device), use_cache=False, logits_to_keep=1)
    for name, layer in layers.items():
        layer.keep_weight.copy_(ridge_regression(sums[name], len(layer.keep_weight), ridge))


@contextlib.contextmanager
def _observed(
    model, layers: dict[str, MemoryLayerMixin], sums: dict[str, Tensor], longest: int, distance: int
) -> Iterator[None]:
    """Within it, the softmax of a patched model sees all of a row, of at most `longest` tokens, as that of the plain model;
    and every call of the layers adds its tokens to the sums."""
    config = decoder_of(model).config
    before = {name: getattr(config, name) for name in ("segment_length", "local_segments")}
    running: list[tuple[str, Tensor]] = []  # the layer's name, and the input of its projections

    def learned_score(name: str, layer: MemoryLayerMixin, hidden_states: Tensor) -> Tensor | None:
        running[:] = [(name, hidden_states)]
        return type(layer).learned_score(layer, hidden_states)

    def run(call: AttentionCall) -> Attended:
        name, inputs = running.pop()
        found: Any = attend_grid(call._replace(softmax=replace(call.softmax, written_out=True)))
        tokens, (output, _, weights) = inputs.shape[1], found
        far = weights[0, :, :, -longest:][..., :tokens].tril(-distance)  # of each query its own segment, which is the row
        targets = far.unflatten(0, (call.tokens.key.shape[1], -1)).amax((1, 2))
        # The others are sinks, or seen by no query that counts
        counted = slice(config.sink_tokens, tokens - distance)
        inputs, targets = inputs[0, counted].cpu(), targets[:, counted].T.cpu()
        together = torch.cat([inputs, inputs.new_ones(len(inputs), 1), targets.to(inputs)], 1).double()
        sums[name] += together.T @ together
        return output, None, None

    try:
        vars(config).update(segment_length=longest, local_segments=0)
        for name, layer in layers.items():
            layer.learned_score = functools.partial(learned_score, name, layer)
        with in_evaluation(model), forced_backend(run):
            yield
    finally:
        vars(config).update(before)
        for layer in layers.values():
            vars(layer).pop("learned_score", None)


def ridge_regression(sums: Tensor, heads: int, ridge: float) -> Tensor:
    """The weights, `[heads, width]`, of a ridge regression with an intercept, which is left out; scaled to scores of
    standard deviation 1. `sums`: over tokens, of the products of [input, 1, targets], float64, `[width + 1 + heads, width +
    1 + heads]`; `ridge`: as a share of the inputs' mean square."""
    products, with_target = sums[:-heads, :-heads], sums[:-heads, -heads:]
    count, means = products[-1, -1], products[-1, :-1] / products[-1, -1]
    penalty = torch.zeros_like(products)
    penalty.diagonal()[:-1] = ridge * products.diagonal()[:-1].mean()
    weight = torch.linalg.solve(products + penalty, with_target)[:-1].T
    covariance = products[:-1, :-1] / count - torch.outer(means, means)
    spread = ((weight @ covariance) * weight).sum(1, keepdim=True).sqrt()
    return weight / spread.clamp(min=torch.finfo(spread.dtype).tiny)
