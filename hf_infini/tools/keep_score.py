"""Fits the learned `keep_score` of a model in closed form: one pass over a few rows, no gradient.

What is worth keeping is what later tokens will look at. So the plain model, which still sees
everything, is asked: the target of a token is the largest attention that any query at least
`distance` tokens later gives it, over those queries and the query heads of its group.
`keep_weight`, a vector for each key/value head, is its ridge regression on the layer's input. Few
layers look far back at single tokens, and the others have little use for kept ones: a layer's share
of the places is about in proportion to the root mean square of its targets, in the head in which
that is largest, to the power of `SHARPNESS`.
"""

import contextlib
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from ..compat.execution_device import device_of
from ..layers.memory_layer import MemoryLayerMixin, in_evaluation, memory_layers
from ..models.structure import decoder_of, trained_places
from ..models.transaction import unchanged_on_error
from ..ops.backends import forced_backend
from ..ops.backends.grid import attend_grid
from ..ops.checks import Model, check_ids, check_types
from ..ops.state import Attended, AttentionCall
from ..options import check_number, one_segment

# What the shares of layers are rounded to, times the largest: each size that differs takes a layout
# for every call
LEVELS = (1, 1 / 2, 1 / 4, 1 / 8, 1 / 16)
# The power by which shares grow: 1.5 answers a little better than 1 (docs/notes/documents.md)
SHARPNESS = 1.5
ALIKE = (
    1e-5  # of inputs that differ by the rounding of float32 sums: their variance to their square
)


@check_types
@unchanged_on_error
@torch.no_grad()
def fit_keep_score(
    model: Model,
    rows: Sequence | Tensor,
    *,
    distance: int = 256,
    ridge: float = 1e-3,
    share_out: bool = True,
    progress: bool = True,
) -> None:
    """Sets the `kept_shares` of a model that was patched with `kept_tokens`, and, with a learned
    `keep_score`, the `keep_weight` of all layers; nothing else. A layer's weights for a row, heads
    · tokens² numbers, are held at a time.

    Args:
        model: a patched model, on any device; of quantized weights too.
        rows: lists or tensors of token ids, one document each, such as 24 of 1,700 tokens. Rows
            that ask at their end for what was said far before teach most; plain text without
            questions teaches less.
        distance: in tokens, from a token to the nearest query that counts; about as many as a
            window has.
        ridge: penalty of the regression, as a share of the mean square of the inputs.
        share_out: whether layers that look far back at single tokens get more of the places, and
            the others fewer; together as many, but for rounding down. None gets more places than
            the model's rotary positions were trained for.
        progress: whether a bar is shown.

    Raises:
        ValueError: the model keeps no tokens; a row is not longer than `distance` and its sinks, or
            has no ids of the model's; all their tokens are the same to a layer; `distance` is below
            1, or `ridge` negative. After this or any other error, also Ctrl-C, the model is as it
            was.
    """
    check_number("distance", distance, {"at_least": 1})
    check_number("ridge", ridge, {"at_least": 0})
    layers = memory_layers(model)
    fitted = share_out or any(hasattr(layer, "keep_weight") for layer in layers.values())
    if not (layers and decoder_of(model).config.kept_tokens and fitted):
        raise ValueError(
            "there is nothing to fit: patch the model with kept_tokens, such as 256, and for "
            'share_out=False with keep_score="half" or "learned".'
        )
    config = decoder_of(model).config
    rows = _ids_of(rows, distance, config)
    # Of each layer the sums of products of all tokens' [input, 1, targets]; without a learned score
    # of [1, targets]
    widths = {
        name: layer.keep_weight.shape[1] if hasattr(layer, "keep_weight") else 0
        for name, layer in layers.items()
    }
    sizes = {name: widths[name] + 1 + layer.head_counts[1] for name, layer in layers.items()}
    sums = {name: torch.zeros(size, size).double() for name, size in sizes.items()}
    device = device_of(layers[next(iter(layers))])
    with _observed(model, layers, sums, max(map(len, rows)), distance):
        for row in tqdm(rows, desc="fitting the score", unit="row", disable=not progress):
            model(input_ids=row[None].to(device), use_cache=False, logits_to_keep=1)
    if not all(bool(products.isfinite().all()) for products in sums.values()):
        raise ValueError(
            f"the model, in {model.dtype}, computes numbers that are not finite: "
            "load it in another dtype."
        )
    for name, layer in layers.items():
        if hasattr(layer, "keep_weight"):
            weight = ridge_regression(sums[name], len(layer.keep_weight), ridge)
            if not bool(weight.isfinite().all()):
                raise ValueError(
                    f"the rows teach no score: the inputs of layer {layer.layer_idx} are the same "
                    "at all of their tokens, as in rows of one repeated token. Give rows of text, "
                    "such as those of hf_infini.asking_rows."
                )
            layer.keep_weight.copy_(weight)
    if share_out:
        squares = {
            each.layer_idx: sums[name].diagonal()[-each.head_counts[1] :]
            for name, each in layers.items()
        }
        peaks = {layer: float(square.max()) ** (SHARPNESS / 2) for layer, square in squares.items()}
        for sizes in range(len(LEVELS), 0, -1):
            config.kept_shares = shares_of_layers(peaks, config.num_hidden_layers, LEVELS[:sizes])
            # else the model would see distances that it was not trained for
            if config.places <= trained_places(config):
                break


def _ids_of(rows: Sequence | Tensor, distance: int, config) -> list[Tensor]:
    """The rows as tensors of token ids; errors as of [`fit_keep_score`]."""
    try:
        found = [torch.as_tensor(row).flatten() for row in rows]
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"rows must be lists or tensors of token ids: {error}") from None
    shortest = distance + config.sink_tokens + 1
    if not found or (short := min(map(len, found))) <= shortest:
        given = f"one of {short:,}" if found else "none"
        raise ValueError(
            f"rows must have more than {shortest:,} tokens, as only queries {distance:,} tokens "
            f"later count; got {given}. Give longer rows, or a smaller distance."
        )
    for row in found:
        check_ids("rows", row, config.vocab_size)
    if all(bool((row == row[0]).all()) for row in found):
        raise ValueError(
            "the rows teach no score: each is one repeated token. Give rows of text, such as those "
            "of hf_infini.asking_rows."
        )
    return found


@contextlib.contextmanager
def _observed(
    model, layers: dict[str, MemoryLayerMixin], sums: dict[str, Tensor], longest: int, distance: int
) -> Iterator[None]:
    """Within it, the softmax of a patched model sees all of a row, of at most `longest` tokens, as
    that of the plain model; and every call of the layers adds its tokens to the sums."""
    config = decoder_of(model).config
    names = {layer.layer_idx: name for name, layer in layers.items()}

    def run(call: AttentionCall) -> Attended:
        name, inputs = names[call.layer], call.inputs
        assert inputs is not None  # a layer gives it
        found: Any = attend_grid(call._replace(softmax=replace(call.softmax, written_out=True)))
        tokens, (output, _, weights) = inputs.shape[1], found
        # of each query its own segment, which is the row
        far = weights[0, :, :, -longest:][..., :tokens].tril(-distance)
        targets = far.unflatten(0, (call.tokens.key.shape[1], -1)).amax((1, 2))
        # The others are sinks, or seen by no query that counts
        counted = slice(config.sink_tokens, tokens - distance)
        width = len(sums[name]) - 1 - len(targets)
        inputs, targets = inputs[0, counted, :width], targets[:, counted].T
        together = torch.cat([inputs, inputs.new_ones(len(inputs), 1), targets.to(inputs)], 1)
        together = together.to(torch.promote_types(together.dtype, torch.float32))
        # where the model is, of one row; rows add up in float64
        with torch.autocast(together.device.type, enabled=False):
            sums[name] += (together.T @ together).cpu()
        return output, None, None

    with in_evaluation(model), forced_backend(run), one_segment(longest):
        yield


def shares_of_layers(
    peaks: dict[int, float], count: int, levels: Sequence[float] = LEVELS
) -> list[float]:
    """How much each of `count` layers keeps, beside the mean of those with a memory: `peaks`, what
    their targets come to, rounded to the `levels`, shares of the largest."""
    largest, least = max(peaks.values()), torch.finfo(torch.double).tiny
    near = {
        layer: math.log(max(peak, least) / max(largest, least)) for layer, peak in peaks.items()
    }
    found = {
        layer: min(levels, key=lambda level: abs(math.log(level) - log))
        for layer, log in near.items()
    }
    mean = statistics.fmean(found.values())
    return [round(found.get(layer, 0) / mean, 4) for layer in range(count)]


def ridge_regression(sums: Tensor, heads: int, ridge: float) -> Tensor:
    """The weights, `[heads, width]`, of a ridge regression with an intercept, which is left out;
    scaled to scores of standard deviation 1. `sums`: over tokens, of the products of [input, 1,
    targets], float64, `[width + 1 + heads, width + 1 + heads]`; `ridge`: as a share of the inputs'
    mean square. NaN where the inputs are all alike."""
    products, with_target = sums[:-heads, :-heads], sums[:-heads, -heads:]
    count, means = products[-1, -1], products[-1, :-1] / products[-1, -1]
    penalty = torch.zeros_like(products)
    penalty.diagonal()[:-1] = ridge * products.diagonal()[:-1].mean()
    covariance = products[:-1, :-1] / count - torch.outer(means, means)
    if covariance.trace() <= ALIKE * products[:-1, :-1].trace() / count:
        return torch.full_like(with_target[:-1].T, math.nan)
    weight = torch.linalg.solve(products + penalty, with_target)[:-1].T
    spread = ((weight @ covariance) * weight).sum(1, keepdim=True).sqrt()
    return weight / spread.clamp(min=torch.finfo(spread.dtype).tiny)
