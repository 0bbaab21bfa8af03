"""Fits the learned `keep_score` of a model in closed form: one pass over a few rows, no gradient.

What is worth keeping is what later tokens will look at. So the plain model, which still sees everything, is asked: the
target of a token is the largest attention that any query at least `distance` tokens later gives it, over those queries and
the query heads of its group. `keep_weight`, one vector for each key/value head, is the ridge regression of that on the input
of the layer's projections. The attention itself and not its logarithm is the target: it is near zero for most tokens, and
the few that are looked at from far away decide the fit.
"""

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from tqdm.auto import tqdm

from ..layers.memory_layer import MemoryLayerMixin, in_evaluation, memory_layers
from ..models.structure import decoder_of
from ..ops.attention import attend_grid, forced_backend
from ..ops.checks import check_kinds
from ..ops.state import Attended, AttentionCall
from ..ops.window import masked_scores
from ..options import check_number

QUERIES = 256  # of which the attention is held at a time


class Regression:
    """Sums from which a ridge regression with an intercept follows, of inputs `[tokens, width]` on targets `[tokens,
    heads]`, in float64."""

    def __init__(self, width: int, heads: int):
        self.products = torch.zeros(width + 1, width + 1, dtype=torch.double)
        self.with_target = torch.zeros(width + 1, heads, dtype=torch.double)

    def add(self, inputs: Tensor, targets: Tensor) -> None:
        inputs = torch.cat([inputs.double(), torch.ones(len(inputs), 1, dtype=torch.double)], 1)
        self.products += inputs.T @ inputs
        self.with_target += inputs.T @ targets.double()

    def solved(self, ridge: float) -> Tensor:
        """`[heads, width]`, without the intercept, which changes no order, and scaled to scores of standard deviation 1;
        `ridge`: as a share of the inputs' mean square."""
        count, means = self.products[-1, -1], self.products[-1, :-1] / self.products[-1, -1]
        penalty = torch.zeros_like(self.products)
        penalty.diagonal()[:-1] = ridge * self.products.diagonal()[:-1].mean()
        weight = torch.linalg.solve(self.products + penalty, self.with_target)[:-1].T
        covariance = self.products[:-1, :-1] / count - torch.outer(means, means)
        spread = ((weight @ covariance) * weight).sum(1, keepdim=True).sqrt()
        return weight / spread.clamp(min=torch.finfo(spread.dtype).tiny)


@torch.no_grad()
@check_kinds
def fit_keep_score(
    model, rows: Sequence, *, distance: int = 256, ridge: float = 1e-3, progress: bool = True
) -> None:
    """Sets the `keep_weight` of all layers of a model that was patched with `kept_tokens` and a learned `keep_score`;
    nothing else of the model changes.

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
    config = decoder_of(model).config
    layers = {name: layer for name, layer in memory_layers(model).items() if hasattr(layer, "keep_weight")}
    if not layers:
        raise ValueError(
            'this model keeps no tokens by a learned score: patch it with kept_tokens, such as 256, and keep_score="half" '
            'or "learned".'
        )
    rows = [torch.as_tensor(row).flatten() for row in rows]
    shortest = distance + config.sink_tokens + 1
    if not rows or (short := min(map(len, rows))) <= shortest:
        given = f"one of {short:,}" if rows else "none"
        raise ValueError(
            f"rows must have more than {shortest:,} tokens, as only queries {distance:,} tokens later count; got {given}. "
            "Give longer rows, or a smaller distance."
        )
    if any(row.is_floating_point() for row in rows):
        raise ValueError("rows must be token ids, which are whole numbers; got numbers of floating point.")
    sums = {name: Regression(layer.keep_weight.shape[1], layer.keep_weight.shape[0]) for name, layer in layers.items()}
    device = layers[next(iter(layers))].keep_weight.device
    with _whole_rows_in_one_segment(model, max(map(len, rows))), _observed(layers, sums, config.sink_tokens, distance):
        for row in tqdm(rows, desc="fitting the score", unit="row", disable=not progress):
            model(input_ids=row[None].to(device), use_cache=False, logits_to_keep=1)
    for name, layer in layers.items():
        layer.keep_weight.copy_(sums[name].solved(ridge))


@contextlib.contextmanager
def _whole_rows_in_one_segment(model, tokens: int) -> Iterator[None]:
    """Within it, the softmax of a patched model sees all of a row, as that of the plain model does."""
    config = decoder_of(model).config
    before = {name: getattr(config, name) for name in ("segment_length", "n_segments") if hasattr(config, name)}
    try:
        vars(config).update(dict.fromkeys(before), segment_length=tokens)
        with in_evaluation(model):
            yield
    finally:
        vars(config).update(before)


@contextlib.contextmanager
def _observed(
    layers: dict[str, MemoryLayerMixin], sums: dict[str, Regression], sinks: int, distance: int
) -> Iterator[None]:
    """Within it, every call of the layers adds its tokens to the sums."""
    running: list[tuple[str, Tensor]] = []  # the layer's name, and the input of its projections

    def observe(name: str, layer: MemoryLayerMixin):
        def scores(hidden_states: Tensor) -> Tensor | None:
            running[:] = [(name, hidden_states)]
            return type(layer).learned_score(layer, hidden_states)

        return scores

    def run(call: AttentionCall) -> Attended:
        name, inputs = running.pop()
        counted = slice(sinks, inputs.shape[1] - distance)  # the others are seen by no query that counts, or are sinks
        sums[name].add(inputs[0, counted].cpu(), largest_attention(call, distance)[0, :, counted].T.cpu())
        return attend_grid(call)

    try:
        for name, layer in layers.items():
            layer.learned_score = observe(name, layer)
        with forced_backend(run):
            yield
    finally:
        for layer in layers.values():
            vars(layer).pop("learned_score", None)


def largest_attention(call: AttentionCall, distance: int) -> Tensor:
    """`[batch, kv_heads, tokens]`: the largest weight that a query at least so many tokens later gives each token, over
    these queries and the heads of its group; 0 for the last tokens, which no such query sees.

    Args:
        call: of rows that one segment holds whole, without padding.
    """
    places, softmax = call.layout.query_places, call.softmax
    query, key = softmax.compared_queries(call.tokens.query, places), softmax.compared_keys(call.tokens.key, places)
    batch, kv_heads, tokens = key.shape[:3]
    query, numbers = query.unflatten(1, (kv_heads, -1)), torch.arange(tokens, device=key.device)
    wide = torch.promote_types(key.dtype, torch.float32)
    found = torch.full((batch, kv_heads, tokens), -torch.inf, dtype=wide, device=key.device)
    for begin in range(distance, tokens, QUERIES):
        asking = numbers[begin : begin + QUERIES, None]
        end = begin + len(asking)
        far = end - distance  # the first that no query of these may count
        scores = masked_scores(query[:, :, :, begin:end], key[:, :, None, :end], numbers[:end] <= asking, softmax).to(wide)
        weights = scores[..., :far] - scores.logsumexp(-1, keepdim=True)
        weights = weights.masked_fill_(numbers[:far] > asking - distance, -torch.inf).amax((2, 3))
        found[..., :far] = torch.maximum(found[..., :far], weights)
    return found.exp()
