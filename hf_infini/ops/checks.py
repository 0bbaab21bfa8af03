"""What is refused before anything is computed: arguments that do not fit together, each by name, with what is allowed."""

import functools
import inspect
import os
import re
from collections.abc import Callable, Mapping, Sequence, Set
from numbers import Integral, Real
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from ..options import check_number, places_of
from .window import Rotary

Function = TypeVar("Function", bound=Callable)
LIMITS = {"scaling": {}, "softcap": {"greater_than": 0}, "dropout": {"at_least": 0, "below": 1}, "eps": {"at_least": 0}}
FITTING = set()  # functions, names and types of arguments that were right
ACCEPTED: dict[Any, type] = {int: Integral, float: Real, Path: os.PathLike, Any: object}  # for these annotations


def check_kinds(function: Function) -> Function:
    """Decorator: arguments that are not of their annotated types are refused by name, with a ValueError, before anything is
    computed. Not in a graph of torch.compile."""

    @functools.wraps(function)
    def checked(*args, **kwargs):
        if not torch.compiler.is_compiling():
            _check_kinds(function, args, kwargs)
        return function(*args, **kwargs)

    result: Any = checked
    return result


def _check_kinds(function: Callable, args: tuple, kwargs: dict) -> None:
    types = _types(function)
    for name, value in (*zip(types, args, strict=False), *kwargs.items()):
        if (function, name, type(value)) in FITTING:
            continue
        wanted = types.get(name, Any)
        if not _fits(value, wanted):
            kind = type(value).__name__
            shown = f"{value!r:.60} ({kind})" if isinstance(value, (str, int, float)) else kind
            allowed = re.sub(r"[\w.]+\.", "", inspect.formatannotation(wanted))
            raise ValueError(f"{name} must be of type {allowed}; got {'None' if value is None else shown}.")
        if not isinstance(value, (Mapping, Sequence, Set)):  # what is in one is looked at each time
            FITTING.add((function, name, type(value)))


@functools.cache
def _types(function: Callable) -> dict[str, Any]:
    """The annotated type of each parameter, in order."""
    hints = get_type_hints(function)
    return {name: hints.get(name, Any) for name in inspect.signature(function).parameters}


def _fits(value, wanted) -> bool:
    """Whether a value is of an annotated type; True is no number."""
    kind, parts = get_origin(wanted) or wanted, get_args(wanted)
    if kind in (Union, UnionType):
        return any(_fits(value, part) for part in parts)
    if isinstance(value, bool):
        return kind in (bool, Any)
    if not isinstance(value, ACCEPTED.get(kind, kind)):
        return False
    if kind is tuple:
        return len(value) == len(parts) and all(map(_fits, value, parts))
    values = value.values() if isinstance(value, Mapping) else value
    return not parts or all(_fits(part, parts[-1]) for part in values)


def check_arguments(
    query, key, value, gate, log_weight, learned_score, query_weight, feature_maps, rule, window, rotary, **numbers
) -> None:
    """ValueError unless these arguments of [`infini_attention`] have the shapes that it says, and go with the update rule
    and the window, and `numbers` are within [`LIMITS`]."""
    check_window(*window, rotary=rotary)
    for name, number in numbers.items():
        check_number(name, number, LIMITS[name])
    if query.dim() != 4 or key.dim() != 4 or value.dim() != 4:
        shapes = ", ".join(str(list(tensor.shape)) for tensor in (query, key, value))
        raise ValueError(f"query, key and value must be [batch, heads, tokens, head_dim], got {shapes}.")
    batch, heads, tokens, head_dim = query.shape
    if key.shape[0] != batch or key.shape[2:] != (tokens, head_dim) or value.shape[:3] != key.shape[:3]:
        raise ValueError(
            f"key {list(key.shape)} and value {list(value.shape)} must agree with query {list(query.shape)} in batch, "
            "tokens and head_dim, and with each other in heads."
        )
    dtypes = [tensor.dtype for tensor in (query, key, value)]
    same = len({*dtypes}) == 1 or torch.is_autocast_enabled(query.device.type)
    if not same or not all(dtype.is_floating_point for dtype in dtypes):
        raise ValueError(f"query, key and value must be of one floating-point dtype, got {', '.join(map(str, dtypes))}.")
    if heads % key.shape[1]:
        raise ValueError(f"the {key.shape[1]} key/value heads must divide the {heads} query heads.")
    if gate.shape != (heads,):
        raise ValueError(f"gate must be [heads] = [{heads}], got {list(gate.shape)}.")
    if (learned_score is None) == (window[3] > 0 and rule.keep_score != "attention"):
        raise ValueError(
            "learned_score goes with kept_tokens and a keep_score of 'learned' or 'half', and with nothing else; got "
            f"{'none' if learned_score is None else 'one'} with kept_tokens={window[3]} and keep_score={rule.keep_score!r}."
        )
    query_map, key_map = feature_maps or (None, None)
    for name, tensor, wanted in (
        ("log_weight", log_weight, (*key.shape[:3], rule.rates)),
        ("learned_score", learned_score, key.shape[:3]),
        ("query_weight", query_weight, (heads, head_dim, head_dim)),
        ("feature_maps[0]", query_map, (heads, head_dim, head_dim)),
        ("feature_maps[1]", key_map, (key.shape[1], head_dim, head_dim)),
    ):
        if tensor is not None and tensor.shape != wanted:
            raise ValueError(f"{name} must be {list(wanted)}, got {list(tensor.shape)}.")


def check_window(
    segment_length: int, local_segments: int, sink_tokens: int, kept_tokens: int = 0, rotary: Rotary | None = None
) -> None:
    """ValueError unless there can be such segments, sinks and kept tokens, with these rotary positions."""
    if segment_length < 1 or local_segments < 0 or not 0 <= sink_tokens < segment_length or kept_tokens < 0:
        raise ValueError(
            f"segment_length must be ≥ 1, local_segments ≥ 0, sink_tokens from 0 to segment_length - 1 and kept_tokens ≥ 0, "
            f"got {segment_length}, {local_segments}, {sink_tokens} and {kept_tokens}."
        )
    places = places_of(segment_length, local_segments, sink_tokens, kept_tokens)
    if rotary is not None and any(len(table) != places for table in rotary.tables):
        raise ValueError(
            f"rotary has {len(rotary.tables[0])} places, and a window of these segments and sinks has {places}."
        )


def check_shapes(
    batch: int, tokens: int, attention_mask: Tensor | None, memory_mask: Tensor | None, position_ids: Tensor | None
) -> None:
    """ValueError unless these are `[batch, tokens]`, positions perhaps `[1, tokens]`, or `None`."""
    for name, mask in (("attention_mask", attention_mask), ("memory_mask", memory_mask)):
        if mask is not None and mask.shape != (batch, tokens):
            raise ValueError(
                f"{name} must be [batch, tokens] = [{batch}, {tokens}], got {list(mask.shape)}. "
                "With a state it covers only the new tokens."
            )
    if position_ids is None:
        return
    whole = not (position_ids.is_floating_point() or position_ids.is_complex())
    if not whole or tuple(position_ids.shape) not in ((batch, tokens), (1, tokens)):
        raise ValueError(
            f"position_ids must be whole numbers, [batch, tokens] = [{batch}, {tokens}]; got {list(position_ids.shape)}, "
            f"{position_ids.dtype}."
        )


def bool_mask(name: str, mask: Tensor | None, read_back: bool) -> Tensor | None:
    """A mask of 0 and 1 as bool; read_back: whether its values may be read back from the device now."""
    if mask is None or mask.dtype == torch.bool:
        return mask
    wrong = ((mask != 0) & (mask != 1)).any()
    message = (
        f"{name} must hold 1 for tokens that count and 0 for those that do not; this one of dtype {mask.dtype} has other "
        "values. A mask that is added to scores (0 and -inf) is not taken: pass mask == 0."
    )
    if not read_back:
        torch._assert_async(~wrong, message)
    elif wrong:
        raise ValueError(message)
    return mask.to(torch.bool)
