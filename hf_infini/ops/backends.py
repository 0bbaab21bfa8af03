"""What computes window, read and mixture of a call: the one seam where a fused kernel can take the place of plain torch."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from torch import Tensor

from .rules import MemoryRule
from .state import InfiniState, Projections
from .window import ScoreOptions


class AttentionCall(NamedTuple):
    """What [`attend`] is given, with the state that the tokens continue."""

    tokens: Projections
    gate: Tensor
    layout: Any  # a StepLayout or a GridLayout, as `fits` has found
    rule: MemoryRule
    softmax: ScoreOptions
    state: InfiniState
    return_state: bool = False
    return_weights: bool = False
    in_place: bool = False
    scored: bool = False


class Attended(NamedTuple):
    """Output, state and weights as [`attend`] returns them; what was not asked for may be `None`."""

    output: Tensor
    state: InfiniState | None
    weights: Tensor | None


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
