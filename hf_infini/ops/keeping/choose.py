"""Kept tokens: of those that have left the window, the K with the highest scores stay visible to
the softmax, word for word, and all others are written into the memory, each once, in the order of
their positions; for each key/value head.

A score is known when its token leaves the window and then stays, and depends on nothing that is
kept. So what is kept after any segment are the best of all that had left by then, whether they came
in one call or in many: the choices of many segments are made at once, before any attention to kept
tokens is computed. Ties go to the earlier token. A choice has no gradient. Sums of attention in
another order differ by some 10⁻⁷ (float32): of two tokens as close as that either may be kept.

Shapes: `B` batch, `K` key/value heads, `N` segments, `C` slots of one, `R` scores of a token. What
is kept has as many *places* as the option says, right-aligned, in the order of positions. The
*rows* among which is chosen are what was kept before, and then the tokens of the segments that
leave the window: `[B, K, places + N · C, …]`.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...options import Window
from ..equations import ScoreOptions, masked_scores
from ..layout.grid import GridLayout
from ..state import AttentionCall, InfiniState, Tokens, pad
from .score import TokenScore

# rows times segments among which is chosen at a time
CHOICE_ELEMENTS = {"cpu": 2**18, "cuda": 2**24}
# Of each segment that leaves, `[B, N]`, and of those that are read while they do, and after, `[B, N
# + 1]`
Documents = tuple[Tensor, Tensor]


@torch.no_grad()
def received_attention(
    query: Tensor, key: Tensor, mask: Tensor, asking: Tensor, softmax: ScoreOptions
) -> Tensor:
    """What each key receives of a softmax over all of them, without dropout: the sum over the
    queries, the mean over the heads of its group, `[B, N, K, W]` in float32 or wider. query: `[B,
    N, H, C, D]`; key: `[B, N, K, W, D]`; mask: bool, True = visible, `[B or 1, N, 1, C, W]`;
    asking: bool, which queries count, `[B, N, 1, C]`."""
    # [B, N, K, heads of a group · C, D]
    query = query.unflatten(2, (key.shape[2], -1)).flatten(3, 4)
    group = query.shape[3] // asking.shape[-1]
    mask = mask.unsqueeze(-3).expand(*mask.shape[:-2], group, -1, -1).flatten(-3, -2)
    scores = masked_scores(query, key, mask, softmax)
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))
    asking = asking.repeat(1, 1, 1, group).to(weights.dtype)
    return (asking.unsqueeze(-2) @ weights).squeeze(-2) / group


def sinks_before_kept(
    sinks: Tensor, layout: GridLayout, softmax: ScoreOptions, begin: int, end: int
) -> Tensor:
    """Sinks of segments `begin … end` as they are compared: turned right before the tokens that
    are kept by then, for a window without a gap is that of a plain model. `sinks`: `[B, N, K,
    S, D]`; `layout`, `softmax`: of the call."""
    if softmax.rotary is None:
        return sinks
    kept = layout.left[:, begin:end].clamp(max=layout.window.kept_tokens)
    # [B, N, S]
    places = (layout.window.kept_tokens - kept).unsqueeze(-1) + torch.arange(
        sinks.shape[3], device=kept.device
    )

    def first() -> Tensor:
        numbers = layout.first_numbers(begin, end).squeeze(-1)
        return numbers.expand(*sinks.shape[:2], 1, 1).flatten(0, 1).unsqueeze(1)

    compared = softmax.compared(sinks.flatten(0, 1), places.flatten(0, 1), first)
    return compared.unflatten(0, sinks.shape[:2])


def grid_scores(call: AttentionCall) -> Tensor:
    """Scores of the grid's tokens, `[B, w + segments, K, C, R]`, as they are before the call; the
    first w segments are empty."""
    layout, state = call.layout, call.state
    scores = layout.to_grid(call.tokens.score, state.local_score).detach().transpose(2, 3)
    return pad(scores, (0,) * 6 + (layout.window.local_segments, 0)).clone()


def add_received(
    call: AttentionCall, scores: Tensor, compared: tuple[Tensor, ...], begin: int, end: int
) -> None:
    """Adds to the scores of a `call`, [`grid_scores`], what the tokens of the windows of segments
    `begin … end` receive, where that counts; `compared`: [`compared_window`]."""
    column, layout, (query, key, mask) = call.keep_score.receiving, call.layout, compared
    if column is None:
        return
    asking = layout.asking(begin, end).unsqueeze(2)
    received = received_attention(query, key, mask, asking, call.softmax)
    in_segments = received[..., layout.window.sink_tokens :].unflatten(-1, (-1, layout.slots))
    for shift, of_segments in enumerate(in_segments.movedim(3, 0)):
        scores[:, begin + shift : end + shift, ..., column] += of_segments


def choose_leaving(
    call: AttentionCall, kept: Tokens, scores: Tensor, leaving: Sequence[Any], begin: int, end: int
) -> tuple[Tokens, Tokens, Tokens | None]:
    """What segments `begin … end` of a `call` see of what is kept; what is kept after them; and
    what they evict: [`keep_best`]. `kept`: before them; `scores`: [`grid_scores`], with all
    that these have received; `leaving`: keys, values and log weights of the tokens that leave
    while they are read, `[B, N, K, C, …]` each."""
    layout, scores = call.layout, scores[:, begin:end]
    documents = layout.documents(begin, end) if layout.packed else None
    position = layout.delayed_numbers(begin, end)[:, :, None, :, None].expand_as(scores[..., :1])
    return keep_best(
        kept,
        Tokens(leaving[0], leaving[1], leaving[2], scores, position),
        layout.written[:, begin:end],
        call.keep_score,
        layout.window,
        documents,
        call.rule is not None,
    )


def scored(call: AttentionCall, scores: Tensor) -> tuple[Tokens, InfiniState]:
    """The call's tokens, and its state's window, with what they have received by its end:
    `scores`, [`grid_scores`]."""
    layout, window = call.layout, call.state.tensors()["local_score"].detach().clone()
    scores, end = scores[:, layout.window.local_segments :].transpose(2, 3), layout.carried_to
    carried = scores.flatten(1, 2)[:, : layout.carried].transpose(1, 2)
    window[:, :, end - layout.carried : end] = carried
    tokens = call.tokens._replace(score=layout.from_grid(scores))
    return tokens, call.state.having(local_score=window)


def choosable_segments(layout: GridLayout, key: Tensor) -> int:
    """Among how many segments' tokens is chosen at a time in a call with this `layout`; `key`:
    `[B, …, K, tokens, D]`."""
    limit = CHOICE_ELEMENTS.get(key.device.type, CHOICE_ELEMENTS["cuda"]) // (
        layout.batch * key.shape[-3]
    )
    return max(1, min(limit // layout.window.kept_tokens, int((limit / layout.slots) ** 0.5)))


def with_kept(
    keys: Tensor,
    values: Tensor,
    mask: Tensor,
    seen: Tokens,
    layout: GridLayout,
    softmax: ScoreOptions,
    begin: int,
    end: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, as compared, values and mask of the windows of segments `begin … end`, with kept
    tokens between sinks and segments.

    Args:
        keys, values: without kept tokens, `[B, N, K, W, D]`.
        mask: bool, True = visible, `[B or 1, N, 1, C, W]`.
        seen: what the segments see of what is kept.
        layout, softmax: of the call.
        begin, end: numbers of segments.
    """
    sinks, most = layout.window.sink_tokens, layout.most_kept
    if not most:
        return keys, values, mask
    seen = seen.map(lambda part: part[..., -most:, :])
    places = slice(layout.window.ahead - most, layout.window.ahead)
    first = functools.partial(layout.first_numbers, begin, end)
    pairs = (softmax.compared(seen.key, places, first), keys), (seen.value, values)
    keys, values = (
        torch.cat([part[..., :sinks, :], kept, part[..., sinks:, :]], 3) for kept, part in pairs
    )
    filled = (seen.position[:, :, :1, None, :, 0] >= 0).expand(-1, -1, -1, mask.shape[3], -1)
    mask = mask.expand(filled.shape[0], -1, -1, -1, -1)
    return keys, values, torch.cat([mask[..., :sinks], filled, mask[..., sinks:]], -1)


def keep_best(
    kept: Tokens,
    leaving: Tokens,
    written: Tensor,
    keep_score: TokenScore,
    window: Window,
    documents: Documents | None = None,
    evicts: bool = True,
) -> tuple[Tokens, Tokens, Tokens | None]:
    """What each segment sees of what is kept, `[B, N, K, places, …]`; what is kept after the
    last, `[B, K, places, …]`; and what the memory takes in after each, `[B, N, K, C, …]`
    (`None`: there is none), the first and the last without scores. `leaving`: the tokens of
    the segments that leave the window one after the other, `[B, N, K, C, …]` each, scores as
    in a window; `keep_score`: which makes them final; `window`: its sizes; `written`,
    `documents`, `evicts`: as in [`choose`]."""
    slots = torch.arange(leaving.score.shape[3], device=leaving.score.device)
    queries = (window.span - slots).unsqueeze(-1)  # that have seen the token
    final = keep_score.final(leaving.score, leaving.position, queries, window)
    rows = kept.map(
        lambda old, new: torch.cat([old, new.transpose(1, 2).flatten(2, 3)], 2),
        leaving._replace(score=final),
    )
    filled, shares = kept.position[:, 0, :, 0] >= 0, shares_of(keep_score, window.kept_tokens)
    best, evicted = choose(rows.score, filled, written, shares, documents, evicts)
    last = rows.taken(best[:, -1:]).map(lambda part: part.squeeze(1))
    rows = rows._replace(score=None)
    return rows.taken(best[:, :-1]), last, None if evicted is None else rows.taken(evicted)


def shares_of(keep_score: TokenScore, places: int) -> list[int]:
    """How many of so many `places` each score of a `keep_score` fills, by its portion; the first
    also those that do not divide."""
    portions = keep_score.portions
    others = [places * portion // sum(portions) for portion in portions[1:]]
    return [places - sum(others), *others]


def choose(
    scores: Tensor,
    filled: Tensor,
    written: Tensor,
    shares: Sequence[int],
    documents: Documents | None,
    evicts: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Which rows are kept when each of the segments is read, and after the last, `[B, N + 1, K,
    places]`; and, where `evicts`, which are evicted after each, `[B, N, K, C]`; −1 for none. The
    work grows with the square of N. `scores`: of the rows, final, `[B, K, places + N · C, R]`;
    `filled`: `[B, places]` bool, in which places anything was kept before; `written`: `[B or 1, N,
    C]` bool, which tokens there are to keep or evict; `shares`: places for each score; `documents`:
    `None`: one."""
    (batch, heads), (segments, slots), places = scores.shape[:2], written.shape[1:], filled.shape[1]
    numbers = torch.arange(segments, device=scores.device)[:, None, None]
    # While which segment is read each row leaves the window: −1 before the first, `segments` where
    # there is none
    time = torch.where(written, numbers[:, 0], segments).flatten(1).expand(batch, -1)
    time = torch.cat([torch.where(filled, -1, segments), time], 1).unsqueeze(1)
    known = [time]
    if documents is not None:
        of, reading = documents
        known.append(
            torch.cat(
                [reading[:, :1].expand(-1, places), of.repeat_interleave(slots, 1)], 1
            ).unsqueeze(1)
        )

    def have_left(time: Tensor, of: Tensor | None = None) -> Tensor:
        """`[B, N, K or 1, rows]`: of documents that nobody reads any more nothing is kept or
        evicted."""
        left = time.unsqueeze(1) <= numbers
        return left if of is None else left & (of.unsqueeze(1) == reading[:, 1:, None, None])

    left, chosen = have_left(*known), torch.zeros((), dtype=torch.bool, device=scores.device)
    for number, (share, score) in enumerate(zip(shares, scores.unbind(-1), strict=True)):
        order = score.argsort(dim=-1, descending=True, stable=True)
        best = have_left(*(part.expand_as(order).gather(-1, order) for part in known))
        if number:
            best = best & ~chosen.gather(-1, order.unsqueeze(1).expand_as(chosen))
        # The rows, of all in this order, with at most so many before the next that could stay
        first = (best.cumsum(-1, dtype=torch.int32) <= share).sum(-1, keepdim=True)
        chosen = chosen | (left & (order.argsort().unsqueeze(1) < first))
    held = torch.cat([(time < 0).unsqueeze(2).expand(-1, -1, heads, -1), chosen], 1)
    kept = rows_in_order(held, places)
    if not evicts:
        return kept, None
    leave = left & ~chosen & (held[:, :-1] | (time.unsqueeze(1) == numbers))
    return kept, rows_in_order(leave, slots)


def rows_in_order(chosen: Tensor, size: int) -> Tensor:
    """The numbers of the rows that are chosen, of `[…, rows]` bool, `[…, size]`, right-aligned, −1
    for none."""
    count = chosen.cumsum(-1, dtype=torch.int32)
    wanted = count[..., -1:] - torch.arange(
        size - 1, -1, -1, dtype=torch.int32, device=count.device
    )
    return torch.searchsorted(count, wanted).masked_fill(wanted <= 0, -1)
