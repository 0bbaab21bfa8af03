"""What computes window, read and mixture of a call: the one seam where a fused kernel can take the place of plain torch.

A kernel's module is imported only where its compiler is installed, and never travels with a saved model.
"""

import contextlib
import importlib
import importlib.util
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .layout.base import GridLayout
from .memory import MemoryRule
from .state import InfiniState, Projections
from .window import ScoreOptions


class AttentionCall(NamedTuple):
    """What [`attend`] computes: [`infini_attention`] on a layout that is already made.

    Attributes:
        tokens: with the `learned_score` for the score.
        layout: [`segment_layout`] of the tokens.
        state: that they continue.
        return_state: whether the state after them is wanted.
        in_place: a single token may overwrite the given state.
        scored: the scores of tokens and state are those after this call, of more than a single token.
    """

    tokens: Projections
    gate: Tensor
    layout: Any  # a StepLayout or a GridLayout, as `fits` has found
    rule: MemoryRule
    softmax: ScoreOptions
    state: InfiniState
    return_state: bool = False
    in_place: bool = False
    scored: bool = False


# What [`attend`] returns: the output; the state, and the local weights, which may be `None` where they are not asked for
Attended = tuple[Tensor, InfiniState | None, Tensor | None]


class Backend(NamedTuple):
    """A way to compute a call.

    Attributes:
        name: by which it can be forced.
        fits: whether it can compute the call, and why, or why not.
        run: computes it.
    """

    name: str
    fits: Callable[[AttentionCall], tuple[bool, str]]
    run: Callable[[AttentionCall], Attended]


WIDTHS = (16, 32, 64, 128)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_forced: list[str | Backend] = []


@contextlib.contextmanager
def forced_backend(backend: str | Backend) -> Iterator[None]:
    """Within it, calls run by this backend, of the table (by its name) or not, or raise a ValueError that says why they
    cannot."""
    _forced.append(backend)
    try:
        yield
    finally:
        _forced.pop()


def choose(call: AttentionCall, backends: Iterable[Backend]) -> tuple[Backend, str]:
    """The first backend that fits, and what each says of the call up to that one.

    Raises:
        ValueError: a backend is forced that does not fit, or that there is not.
    """
    forced = _forced[-1] if _forced else None
    reasons, names = [], []
    for backend in (forced,) if isinstance(forced, Backend) else backends:
        names.append(backend.name)
        if forced not in (None, backend.name, backend):
            continue
        fits, reason = backend.fits(call)
        reasons.append(f"{backend.name}: {reason}")
        if fits:
            return backend, "; ".join(reasons)
    raise ValueError(f"no backend of {', '.join(names)} computes this call{': ' * bool(reasons)}{'; '.join(reasons)}.")


def _fits_linear(call: AttentionCall) -> tuple[bool, str]:
    """Whether the kernels of linear.py compute the call; the first reason against it."""
    if torch.compiler.is_compiling():  # before anything that a graph would have to follow
        return False, "a graph of torch.compile, which fuses plain torch itself"
    query, key, value = call.tokens[:3]
    # These two at once, for every layer asks at every new token
    if query.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return False, "not on a CUDA device"
    if not isinstance(call.layout, GridLayout):
        return False, "one token for every row"
    rule, softmax = call.rule, call.softmax
    refused = {
        "triton is not installed": importlib.util.find_spec("triton") is None,
        "code that came with a model has no kernels": not __name__.endswith(".ops.backends"),
        f"no kernel for update_rule={rule.update_rule!r}": rule.update_rule != "linear",
        f"no kernel for denominator={rule.denominator!r}": rule.denominator != "separate",
        "local weights are returned": softmax.written_out,
        "no kernel for kept tokens": call.layout.kept_tokens > 0,
        "no kernel for dropout": softmax.dropout > 0,
        "no kernel for softcap": softmax.softcap is not None,
        "no kernel for query weights beside rotary positions": None not in (softmax.query_weight, softmax.rotary),
        f"no kernel for {query.dtype}": not {query.dtype, key.dtype, value.dtype} <= set(DTYPES),
        f"heads are {query.shape[3]} and {value.shape[3]} wide, not one of {', '.join(map(str, WIDTHS))}": (
            not {query.shape[3], value.shape[3]} <= set(WIDTHS)
        ),
        "a tensor of more numbers than 32 bits count": max(query.numel(), key.numel(), value.numel()) >= 2**31,
    }
    for reason, holds in refused.items():
        if holds:
            return False, reason
    if softmax.rotary is not None:
        width = softmax.rotary.tables[0].shape[-1]
        if width != query.shape[3] or _module("rotary").halves_of(softmax.rotary) is None:
            return False, "no kernel for this way of turning by rotary positions"
    return True, "Triton kernels"


def _module(name: str) -> Any:
    """A module of kernels/, by its name: so that it does not travel with a saved model."""
    return importlib.import_module(f".kernels.{name}", __package__)


TRITON = Backend("triton", _fits_linear, lambda call: _module("linear").run(call))
