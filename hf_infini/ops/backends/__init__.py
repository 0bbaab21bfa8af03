"""What computes a call of attention: plain torch for one more token (step.py), for any other call
(grid.py), or fused kernels (triton/); and which of them does, the first of [`BACKENDS`] that
fits."""

import importlib.util
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from importlib import import_module

import torch

from ...options import set_here
from ..equations import MemoryRule
from ..layout.grid import GridLayout
from ..layout.step import StepLayout
from ..state import Attended, AttentionCall
from .grid import attend_grid
from .step import attend_step

Run = Callable[[AttentionCall], Attended]
CLOSED = -1000.0  # a gate's logit: its sigmoid is 0
# What is forced here, in this thread or task
_forced: ContextVar[str | Run | None] = ContextVar("forced backend", default=None)
# An entry for each of [`forced_backend`] that is open anywhere in the process: while there is none,
# a graph of torch.compile, which cannot read the above, need not
_open: list[None] = []


def forced_backend(backend: str | Run) -> AbstractContextManager[None]:
    """Within it, calls of this thread or task are computed by this function, or by the backend of
    this name; ValueError where it does not fit. In a graph of torch.compile it is a break."""
    return set_here(_forced, backend, _open)


def attend(call: AttentionCall) -> Attended:
    """What a model's layers call: output, state and, where `softmax.written_out`, local weights,
    `[batch, heads, tokens, places]`: column `c` is place `c` of the query's window, first the
    sinks, seen once they have left its segments, then kept tokens, then the segments, the query's
    own last."""
    call, forced = call.prepared(), _forced.get() if _open else None
    return forced(call) if callable(forced) else choose(call, forced)[0](call)


def choose(call: AttentionCall, forced: str | None = None) -> tuple[Run, str]:
    """What computes the call, the first of [`BACKENDS`] that fits, or the one whose name is forced;
    and what each says of it up to that one. ValueError where a backend is forced that does not fit,
    or that there is not."""
    reasons = []
    for name, (fits, run) in BACKENDS.items():
        if forced in (None, name):
            fitting, reason = fits(call)
            reasons.append(f"{name}: {reason}")
            if fitting:
                return run, "; ".join(reasons)
    names = ", ".join(BACKENDS)
    raise ValueError(
        f"no backend of {names} computes this call{': ' * bool(reasons)}{'; '.join(reasons)}."
    )


def _fits_kernels(call: AttentionCall) -> tuple[bool, str]:
    """Whether the kernels compute the call; the first reason against it."""
    if torch.compiler.is_compiling():  # before anything that a graph would have to follow
        return False, "a graph of torch.compile, which fuses plain torch itself"
    query, key, value = call.query, *call.tokens[:2]
    # These two at once, for every layer asks at every new token
    if query.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return False, "not on a CUDA device"
    if not isinstance(call.layout, GridLayout):
        return False, "one token for every row"
    softmax, update_rule = call.softmax, call.rule and call.rule.update_rule
    refused = {
        f"no kernel for the update rule {update_rule!r}": update_rule not in ("linear", None),
        "triton is not installed": importlib.util.find_spec("triton") is None,
        "code that came with a model has no kernels": not __name__.endswith(".ops.backends"),
        "local weights are returned": softmax.written_out,
        "no kernel for dropout": softmax.dropout > 0,
        "no kernel for softcap": softmax.softcap is not None,
        f"no kernel for {query.dtype}": not {query.dtype, key.dtype, value.dtype}
        <= {torch.bfloat16, torch.float16, torch.float32},
        "no kernel for positions that are scaled by the length of a text": (
            softmax.far_rotary is not None
        ),
        "no kernel for this way of turning by rotary positions": softmax.rotary is not None
        and (len(softmax.rotary) != 2 or softmax.rotary[0].shape[-1] != query.shape[3]),
        f"heads are {query.shape[3]} and {value.shape[3]} wide, not one of 16, 32, 64, 128": (
            not {query.shape[3], value.shape[3]} <= {16, 32, 64, 128}
        ),
    }
    for reason, holds in refused.items():
        if holds:
            return False, reason
    if (reason := _kernels("agreement").disagreement(_with_closed_memory(call))) is not None:
        return False, reason
    return True, "Triton kernels"


def _with_closed_memory(call: AttentionCall) -> AttentionCall:
    """The call as the kernels know it: without a memory it is one whose memory nobody reads."""
    if call.rule is not None:
        return call
    query, (key, value), state = call.query, call.tokens[:2], call.state
    memory = state.memory.new_zeros(*key.shape[:2], key.shape[3], value.shape[3])
    state = state.having(memory=memory, normaliser=memory[..., 0])
    gate = query.new_full((query.shape[1],), CLOSED, dtype=torch.float32)
    return call._replace(rule=MemoryRule(), gate=gate, state=state)


def _run_kernels(call: AttentionCall) -> Attended:
    output, after, weights = _kernels("attend").run(_with_closed_memory(call))
    if after is not None and call.rule is None:
        after = after.having(memory=call.state.memory, normaliser=call.state.normaliser)
    return output, after, weights


def _kernels(name: str):
    """A module of triton/: imported only where its compiler is installed, and not saved with a
    model."""
    return import_module(f".triton.{name}", __package__)


def _is_step(call: AttentionCall) -> tuple[bool, str]:
    fits = isinstance(call.layout, StepLayout)
    return fits, "plain torch, one token for every row" if fits else "not one token for every row"


# By their names: whether it can compute a call, and why, or why not; and what computes it
BACKENDS: dict[str, tuple[Callable[[AttentionCall], tuple[bool, str]], Run]] = {
    "triton": (_fits_kernels, _run_kernels),
    "step": (_is_step, attend_step),
    "grid": (
        lambda call: (not _is_step(call)[0], "plain torch, in a grid of segments"),
        attend_grid,
    ),
}
