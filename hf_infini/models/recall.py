"""Recall: before a question is answered, what it looks at in all that a cache has read takes the
places of kept tokens."""

import copy
from typing import Any

import torch
from torch import Tensor

from ..cache.archive import Row
from ..cache.cache import InfiniCache
from ..compat.cache_name import CACHE
from ..ops.backends import choose, forced_backend
from ..ops.keeping.choose import Kept
from ..ops.recall import block_weights
from ..ops.state import Attended, AttentionCall, InfiniState
from ..ops.window import ScoreOptions
from ..options import Window
from .structure import decoder_of


def asked_by(
    model, cache: InfiniCache, ids: Tensor, attention_mask: Tensor | None
) -> dict[int, tuple[Tensor, ScoreOptions]]:
    """The un-rotated queries `[batch, heads, tokens, head_dim]` of these ids `[batch, tokens]`, by
    layer, and how they are compared; the cache stays as it is."""
    found: dict[int, tuple[Tensor, ScoreOptions]] = {}

    def run(call: AttentionCall) -> Attended:
        found[call.layer] = call.tokens.query, ScoreOptions(call.softmax.scaling, softcap=call.softmax.softcap)
        return choose(call)[0](call)

    cache = copy.copy(cache)
    cache.archive = None
    mask = None if attention_mask is None else cache.attention_mask(attention_mask)
    with forced_backend(run):
        decoder_of(model)(input_ids=ids, attention_mask=mask, use_cache=True, **{CACHE: cache})
    return found


def have_left(seen: int, window: Window) -> tuple[int, int]:
    """The numbers of the tokens, of a document of which `seen` were read, that have left this
    window, but sinks: from the first to before the second."""
    end = max(0, seen // window.segment_length - window.local_segments) * window.segment_length
    return window.sink_tokens, max(end, window.sink_tokens)


def choose_blocks(weights: Tensor, first: int, end: int, block_tokens: int, places: int, allowed: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers of the tokens that fill so many places, `[n]` ascending, and the rank of the block of each, 0 the best."""
    order = weights.argsort(descending=True, stable=True)
    numbers = order[:, None] * block_tokens + torch.arange(block_tokens)
    ranks = torch.arange(len(order))[:, None].expand_as(numbers).flatten()
    numbers = numbers.flatten()
    inside = (numbers >= first) & (numbers < end)
    inside[inside.clone()] &= allowed[numbers[inside]]
    numbers, ranks = numbers[inside][:places], ranks[inside][:places]
    numbers, by_number = numbers.sort()
    return numbers, ranks[by_number]


def with_recalled(cache: InfiniCache, orders: list[Tensor], block_tokens: int) -> InfiniCache:
    """A copy of the cache whose kept tokens are those of the blocks with the largest weights, for each row `[blocks]`."""
    rows, cache = cache.archive.rows, copy.copy(cache)
    for number, layer in enumerate(cache.layers):
        window = cache.windows.get(number)
        if window is None or not window.kept_tokens:
            continue
        state = layer.state
        own = Kept.of_state(state, window)
        parts = []
        for index, (row, weights) in enumerate(zip(rows, orders, strict=True)):
            first, end = have_left(row.tokens, window)
            if end - first <= window.kept_tokens:  # all of them are kept
                parts.append([part[index] for part in (own.key, own.value, own.score, own.position)])
                continue
            allowed = torch.cat([piece.recalled for piece in row.pieces])
            numbers, ranks = choose_blocks(weights, first, end, block_tokens, window.kept_tokens, allowed)
            parts.append(placed(state, row, number, window, numbers, ranks))
        key, value, score, position = (torch.stack(part) for part in zip(*parts, strict=True))
        weight = None if own.log_weight is None else torch.zeros_like(own.log_weight)
        layer.state = Kept(key, value, weight, score, position).into(state, window)
    return cache


def placed(state: InfiniState, row: Row, layer: int, window: Window, numbers: Tensor, ranks: Tensor):
    """Kept of one row"""
    key, value = row.taken(layer, numbers)
    device = state.local_key.device
    missing = window.kept_tokens - len(numbers)
    pad = lambda t: torch.nn.functional.pad(t, (0, 0, missing, 0))
    heads = key.shape[0]
    position = torch.nn.functional.pad(numbers, (missing, 0), value=-1).to(device)
    position = position.expand(heads, -1).unsqueeze(-1)
    score = -1e20 * (1 + torch.nn.functional.pad(ranks, (missing, 0)).to(device))
    score = score[None, :, None].expand(heads, -1, state.local_score.shape[-1]).to(state.local_score.dtype)
    return pad(key).to(device), pad(value).to(device), score, position
