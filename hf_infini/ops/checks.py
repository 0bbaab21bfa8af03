"""What is refused before anything is computed: arguments of another type, or that do not fit
together, each by name, with what is allowed."""

import functools
import inspect
import operator
import re
from collections.abc import Callable, Sequence
from numbers import Integral
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

import torch
from huggingface_hub.dataclasses import type_validator
from torch import Tensor, nn

from ..options import Window, check_number

Function = TypeVar("Function", bound=Callable)
Model = Annotated[Any, nn.Module]  # for a type checker anything, as its class is made when it runs
LIMITS = {
    "scaling": {"greater_than": 0},
    "softcap": {"greater_than": 0},
    "dropout": {"at_least": 0, "below": 1},
    "eps": {"greater_than": 0},
}


def check_types(function: Function) -> Function:
    """Decorator of a `function`: a TypeError names the first argument that is not of its
    annotated type, before anything is computed. Numbers of other libraries are numbers, True
    is none. Not in a graph of torch.compile."""
    signature, own = inspect.signature(function), function.__qualname__.removesuffix(".__init__")
    called = own.rpartition(".")[2]  # a class is called by its own name
    wanted = {name: _checkable(each.annotation) for name, each in signature.parameters.items()}

    @functools.wraps(function)
    def checked(*args, **kwargs):
        try:
            compiling = torch.compiler.is_compiling()
            given = {} if compiling else signature.bind(*args, **kwargs).arguments
        except TypeError:
            given = {}  # the function says which are missing or unknown
        for name, value in given.items():
            whole = isinstance(value, Integral) and not isinstance(value, bool)
            try:
                type_validator(name, operator.index(value) if whole else value, wanted[name])
            except TypeError:
                shown = "" if value is None else f" ({type(value).__name__})"
                allowed = re.sub(r"[\w.]+\.", "", inspect.formatannotation(wanted[name]))
                raise TypeError(
                    f"{name} of {called} must be of type {allowed}; got {repr(value):.60}{shown}."
                ) from None
        return function(*args, **kwargs)

    result: Any = checked
    return result


def _checkable(annotation: Any) -> Any:
    """An annotation as `type_validator` takes it; whole numbers are numbers of floating point."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        return functools.reduce(operator.or_, map(_checkable, parts))
    if origin is Annotated:
        return parts[1]
    if annotation in (inspect.Parameter.empty, float):
        return Any if annotation is inspect.Parameter.empty else float | int
    return annotation if origin in (None, Sequence) else origin


def check_arguments(
    query, tokens, gate, rule, score, window, rotary, far_rotary, **numbers
) -> None:
    """ValueError unless these arguments of [`infini_attention`] fit each other, and `numbers`
    are within [`LIMITS`]: query, gate, rotary and far_rotary as of it; `tokens`, `rule`,
    `score` and `window` are what it makes of others."""
    key, value, log_weight, learned_score, _ = tokens
    check_window(window, rotary)
    if far_rotary is not None:
        if rotary is None or len(far_rotary[0]) != len(rotary):
            raise ValueError("far_rotary takes as many tables as rotary has, and goes with it.")
        check_window(window, far_rotary[0])
    for name, number in numbers.items():
        check_number(name, number, LIMITS[name])
    shapes = [list(tensor.shape) for tensor in (query, key, value)]
    if {*map(len, shapes)} != {4} or 0 in shapes[0]:
        raise ValueError(
            "query, key and value must be [batch, heads, tokens, head_dim] with a row and a token "
            f"at least, got {', '.join(map(str, shapes))}."
        )
    (batch, heads, count, head_dim), kv_heads = query.shape, key.shape[1]
    dtypes = [tensor.dtype for tensor in (query, key, value)]
    same = len({*dtypes}) == 1 or torch.is_autocast_enabled(query.device.type)
    if not same or not all(dtype.is_floating_point for dtype in dtypes):
        raise ValueError(
            "query, key and value must be of one floating-point dtype, got "
            f"{', '.join(map(str, dtypes))}."
        )
    if (gate is None) != (rule is None):
        update_rule = "none" if rule is None else rule.update_rule
        raise ValueError(
            "a gate, [heads], is the share of a memory: give one with a memory, and None with "
            f"update_rule='none'; got {'none' if gate is None else 'one'} with "
            f"update_rule={update_rule!r}."
        )
    if log_weight is not None and rule is None:
        raise ValueError("log_weight is for what a memory takes in: leave it out.")
    if heads % kv_heads:
        raise ValueError(f"the {kv_heads} key/value heads must divide the {heads} query heads.")
    if (learned_score is None) == (window.kept_tokens > 0 and bool(score.learns)):
        raise ValueError(
            "learned_score goes with kept_tokens and a keep_score that is learned, such as 'half', "
            f"and with nothing else; got {'none' if learned_score is None else 'one'} with "
            f"kept_tokens={window.kept_tokens} and keep_score={score.keep_score!r}."
        )
    rates = 0 if rule is None else rule.rates
    for name, tensor, wanted in (
        ("key", key, (batch, kv_heads, count, head_dim)),
        ("value", value, (batch, kv_heads, count, value.shape[3])),
        ("gate", gate, (heads,)),
        ("log_weight", log_weight, (batch, kv_heads, count, rates)),
        ("learned_score", learned_score, (batch, kv_heads, count, len(score.learns))),
    ):
        if tensor is not None and tensor.shape != wanted:
            raise ValueError(
                f"{name} must be {list(wanted)} beside this query, got {list(tensor.shape)}."
            )


def check_window(window: Window, rotary: Sequence[Tensor] | None) -> None:
    """ValueError unless there can be a window of these sizes, with these tables of rotary
    positions, `[places, …]` each."""
    window.check()
    if rotary is not None and any(len(table) != window.places for table in rotary):
        raise ValueError(
            f"rotary has {len(rotary[0])} places, and a window of these segments and "
            f"sinks has {window.places}."
        )


def check_ids(name: str, ids: Tensor, vocabulary: int) -> None:
    """ValueError unless `ids`, the argument `name`, are ids of a `vocabulary` of so many tokens,
    one at least."""
    whole = not (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool)
    found = f"{list(ids.shape)} of {ids.dtype} on {ids.device}"
    if whole and ids.numel() and not ids.is_meta:
        least, largest = int(ids.min()), int(ids.max())
        if 0 <= least and largest < vocabulary:
            return
        found = f"{least} to {largest}"
    raise ValueError(
        f"{name} must hold token ids, whole numbers from 0 to {vocabulary - 1}; got {found}."
    )
