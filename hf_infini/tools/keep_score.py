"""Fits the learned `keep_score` of a model in closed form: one pass over a few rows, no gradient.

What is worth keeping is what later tokens will look at. So the plain model, which still sees
everything, is asked: the target of a token is the largest attention that any query that counts
gives it, over those queries and the query heads of its group. Passages are read twice, and the
queries of the second reading count, for what a model looks at to read a passage again is what it
needs to know of it (KVzip, arXiv:2505.23416, does so for every text; here a score learns it). Rows
that ask for what they said are read once, and queries at least `distance` tokens later count.
`keep_weight`, a vector for each key/value head, is a ridge regression on the layer's input; with
`keep_score="two_learned"` that of the rows, and `passage_keep_weight` that of the passages. Few
layers look far back at single tokens, and the others have little use for kept ones: a layer's share
of the places is about in proportion to the root mean square of its targets, in the head in which
that is largest; of two scores to the geometric mean of both.
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
from ..models.adapter import renew_saved
from ..models.structure import decoder_of, trained_places
from ..models.transaction import unchanged_on_error
from ..ops.backends import forced_backend
from ..ops.backends.grid import attend_grid
from ..ops.checks import Model, check_ids, check_types
from ..ops.state import Attended, AttentionCall
from ..options import check_number, one_segment

# What the shares of layers are rounded to, times the largest: each size that differs takes a layout
# for every call
LEVELS = (1, 1 / 2, 1 / 4, 1 / 8)
ALIKE = (
    1e-5  # of inputs that differ by the rounding of float32 sums: their variance to their square
)
LEAST = torch.finfo(torch.double).tiny  # what has no logarithm counts as this
REMEDY = "Give text, such as that of hf_infini.asking_rows or hf_infini.text_rows"


@check_types
@unchanged_on_error
@torch.no_grad()
def fit_keep_score(
    model: Model,
    rows: Sequence | Tensor = (),
    *,
    passages: Sequence | Tensor = (),
    distance: int = 256,
    ridge: float = 1e-3,
    share_out: bool = True,
    progress: bool = True,
) -> None:
    """Sets the `kept_shares` of a model that was patched with `kept_tokens`, and, with a learned
    `keep_score`, the `keep_weight` of all layers, and `passage_keep_weight`, where they have one;
    nothing else. A layer's weights for a row, heads · tokens² numbers, are held at a time.

    Args:
        model: a patched model, on any device; of quantized weights too.
        rows: lists or tensors of token ids that ask at their end for what they said far before,
            such as 24 of 1,700 tokens ([`hf_infini.asking_rows`]).
        passages: likewise, of any running text, such as 24 of 850 tokens
            ([`hf_infini.text_rows`]); each is read twice, its sinks once. A single score is fitted
            on rows and passages together; keep_score="two_learned" needs both.
        distance: in tokens, from a token of `rows` to the nearest query that counts; about as many
            as a window has.
        ridge: penalty of the regression, as a share of the mean square of the inputs.
        share_out: whether layers that look far back at single tokens get more of the places, and
            the others fewer; together as many, but for rounding down. None gets more places than
            the model's rotary positions were trained for.
        progress: whether a bar is shown.

    Raises:
        ValueError: the model keeps no tokens; there are neither rows nor passages, or only one of
            them for two scores; a row is not longer than `distance` and its sinks, or a passage
            than its sinks; they have no ids of the model's; all their tokens are the same to a
            layer; `distance` is below 1, or `ridge` negative. After this or any other error, also
            Ctrl-C, the model is as it was.
    """
    check_number("distance", distance, {"at_least": 1})
    check_number("ridge", ridge, {"at_least": 0})
    layers, config = memory_layers(model), decoder_of(model).config
    learns = next(iter(layers.values())).keep_weights if layers else {}
    if not (layers and config.kept_tokens and (share_out or learns)):
        raise ValueError(
            "there is nothing to fit: patch the model with kept_tokens, such as 256, and for "
            'share_out=False with a learned keep_score, such as "learned" or "two_learned".'
        )
    readings = _readings(rows, passages, distance, config)
    if len(learns) > 1 and len(readings) == 1:
        raise ValueError(
            f"keep_score={config.keep_score!r} fits a score on rows and another on passages: give "
            f"both; got no {'rows' if readings[0][1] is None else 'passages'}."
        )
    observed = _sums_of(model, layers, readings, len(learns) > 1, progress)
    kinds = ["rows" if far is not None else "passages" for _, far in readings]
    kinds = kinds if len(learns) > 1 else [" and ".join(kinds)]
    for sums, name, kind in zip(observed, learns, kinds, strict=False):
        for key, layer in layers.items():
            parameter = layer.keep_weights[name]
            weight = ridge_regression(sums[key], len(parameter), ridge)
            if not bool(weight.isfinite().all()):
                raise ValueError(
                    f"the {kind} teach no score: the inputs of layer {layer.layer_idx} are the "
                    f"same at all of their tokens, as in {kind} of one repeated token. {REMEDY}."
                )
            parameter.copy_(weight)
    if share_out:
        peaks = {
            layer.layer_idx: statistics.geometric_mean(
                max(_peak_of(sums[key], layer), LEAST) for sums in observed
            )
            for key, layer in layers.items()
        }
        for sizes in range(len(LEVELS), 0, -1):
            config.kept_shares = shares_of_layers(peaks, config.num_hidden_layers, LEVELS[:sizes])
            # else the model would see distances that it was not trained for
            if config.places <= trained_places(config):
                break
    renew_saved(model)


def _nothing_of(layer: MemoryLayerMixin) -> Tensor:
    """The sum of products of a layer, [`_sums_of`], of no token."""
    width = max((weight.shape[1] for weight in layer.keep_weights.values()), default=0)
    size = width + 1 + layer.head_counts[1]
    return torch.zeros(size, size).double()


def _peak_of(sums: Tensor, layer: MemoryLayerMixin) -> float:
    """The root of the sum of squares of a layer's targets, in the head in which it is largest;
    `sums`: as of [`_sums_of`]."""
    return float(sums.diagonal()[-layer.head_counts[1] :].max()) ** 0.5


def _sums_of(
    model, layers: dict[str, MemoryLayerMixin], readings: list, apart: bool, progress: bool
) -> list[dict[str, Tensor]]:
    """Of each of the `readings`, as of [`_readings`], or, unless `apart`, of all together, and of
    each layer the sum over the tokens of the products of [input, 1, targets]; without a learned
    score of [1, targets]. ValueError where they are not finite."""
    device, count = device_of(layers[next(iter(layers))]), sum(len(read) for read, _ in readings)
    observed: list[dict[str, Tensor]] = []
    with tqdm(total=count, desc="fitting the score", unit="row", disable=not progress) as bar:
        for read, far in readings:
            if apart or not observed:
                observed.append({name: _nothing_of(layer) for name, layer in layers.items()})
            with _observed(model, layers, observed[-1], max(map(len, read)), far):
                for row in read:
                    model(input_ids=row[None].to(device), use_cache=False, logits_to_keep=1)
                    bar.update()
    if not all(bool(each.isfinite().all()) for sums in observed for each in sums.values()):
        raise ValueError(
            f"the model, in {model.dtype}, computes numbers that are not finite: "
            "load it in another dtype."
        )
    return observed


def _readings(
    rows: Sequence | Tensor, passages: Sequence | Tensor, distance: int, config
) -> list[tuple[list[Tensor], int | None]]:
    """What the model reads, and from what distance on queries count; `None`: texts with a second
    reading, whose queries count. Errors as of [`fit_keep_score`]."""
    asking = _ids_of("rows", rows, distance, config)
    once = _ids_of("passages", passages, None, config)
    if not (asking or once):
        raise ValueError(
            "there is nothing to fit on: give rows, such as those of hf_infini.asking_rows, "
            "passages, such as those of hf_infini.text_rows, or both."
        )
    twice = [torch.cat([passage, passage[config.sink_tokens :]]) for passage in once]
    return [(read, far) for read, far in ((asking, distance), (twice, None)) if read]


def _ids_of(name: str, rows: Sequence | Tensor, distance: int | None, config) -> list[Tensor]:
    """The rows or passages, as `name` says, as tensors of token ids; `distance`: `None` of
    passages; errors as of [`fit_keep_score`]."""
    try:
        found = [torch.as_tensor(row).flatten() for row in rows]
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{name} must be lists or tensors of token ids: {error}") from None
    if not found:
        return []
    shortest = (distance or 0) + config.sink_tokens + 1
    if (short := min(map(len, found))) <= shortest:
        why, remedy = "their sinks are not scored", ""
        if distance is not None:
            why, remedy = f"only queries {distance:,} tokens later count", ", or a smaller distance"
        raise ValueError(
            f"{name} must have more than {shortest:,} tokens, as {why}; got one of {short:,}. Give "
            f"longer {name}{remedy}."
        )
    for row in found:
        check_ids(name, row, config.vocab_size)
    if all(bool((row == row[0]).all()) for row in found):
        raise ValueError(f"the {name} teach no score: each is one repeated token. {REMEDY}.")
    return found


@contextlib.contextmanager
def _observed(
    model,
    layers: dict[str, MemoryLayerMixin],
    sums: dict[str, Tensor],
    longest: int,
    distance: int | None,
) -> Iterator[None]:
    """Within it, the softmax of a patched model sees all of a row, of at most `longest` tokens, as
    that of the plain model; and every call of the layers adds its tokens to the sums. `distance`:
    `None` where a row is a passage that is read twice, of which the first reading's are added."""
    config = decoder_of(model).config
    names = {layer.layer_idx: name for name, layer in layers.items()}

    def run(call: AttentionCall) -> Attended:
        name, inputs = names[call.layer], call.inputs
        assert inputs is not None  # a layer gives it
        found: Any = attend_grid(call._replace(softmax=replace(call.softmax, written_out=True)))
        tokens, (output, _, weights) = inputs.shape[1], found
        # of each query its own segment, which is the row
        far = weights[0, :, :, -longest:][..., :tokens]
        if distance is None:
            end = (tokens + config.sink_tokens) // 2
            far = far[:, end:]
        else:
            end = tokens - distance
            far = far.tril(-distance)
        targets = far.unflatten(0, (call.tokens.key.shape[1], -1)).amax((1, 2))
        # The others are sinks, or seen by no query that counts
        counted = slice(config.sink_tokens, end)
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
    """How much each of `count` layers keeps, beside the mean of those with a memory: `peaks`, the
    root mean squares of their targets, rounded to the `levels`, shares of the largest."""
    largest = max(*peaks.values(), LEAST)
    near = {layer: math.log(max(peak, LEAST) / largest) for layer, peak in peaks.items()}
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
