"""Which turning functions the kernels know: Llama's, of the pair (x_i, x_{i + d/2}) by the cosines and sines of a table."""

from typing import Any

import torch

from ..window import ScoreOptions

_known: dict[Any, bool | None] = {}


def signed_sines(softmax: ScoreOptions) -> bool | None:
    """Whether the first half of the sines has its sign already ([`rotation`]); `None`: another way of turning."""
    turn: Any = softmax.turn
    tables: Any = softmax.rotary
    width = tables[0].shape[-1]
    known = (getattr(turn, "__func__", turn), type(getattr(turn, "__self__", None)), len(tables), width)
    if known not in _known:
        _known[known] = _compared(turn, tables, width)
    return _known[known]


def _compared(turn: Any, tables: Any, width: int) -> bool | None:
    """Compares the function with the formulas, on the CPU, by random tables whose halves are the same."""
    if len(tables) != 2 or width % 2 or not all(table.is_floating_point() for table in tables):
        return None
    draw = torch.Generator().manual_seed(0)
    states = torch.randn(1, 1, 3, width, generator=draw)
    cos, sin = (torch.randn(3, width // 2, generator=draw).repeat(1, 2) for _ in range(2))
    found, swapped = turn(states, cos, sin), states.roll(width // 2, -1)
    signs = torch.tensor([-1.0, 1.0]).repeat_interleave(width // 2)
    for signed, sines in ((True, sin), (False, sin * signs)):
        if torch.allclose(found, states * cos + swapped * sines, atol=1e-5):
            return signed
    return None
