"""Kept tokens: of those that have left the window, the K with the highest scores stay visible to the softmax, word for word,
and all others are written into the memory, each once, in the order of their positions; for each key/value head.

A score is known when its token leaves the window and then stays, and depends on nothing that is kept. So what is kept after
any segment are the best of all that had left by then, whether they came in one call or in many: the choices of many segments
are made at once, before any attention to kept tokens is computed. Ties go to the earlier token. A choice has no gradient.

Sums of the same attention in another order differ by rounding, in float32 by some 10⁻⁷ of the score. Two tokens as close as
that may change places between two ways to compute the same call, and an equally good one is kept. Rounding before comparing
would not help: scores lie as often near the border of a rounding step as near each other. Equal scores, such as learned ones
of zero, are equal whatever the order.

Shapes: `B` batch, `K` key/value heads, `N` segments, `C` slots of one, `R` scores of a token. What is kept has as many
*places* as the option says, right-aligned, in the order of positions. The *rows* among which is chosen are what was kept
before, and then the tokens of the segments that leave the window: `[B, places + N · C, K, …]`.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .layout.base import GridLayout, Layout, pad
from .memory import KEEP_SCORES, MemoryRule
from .state import InfiniState, Projections
from .window import ScoreOptions, masked_scores

# A token that is FADE times the kept tokens older must have received e times the attention. SmolLM2 with 252 tokens kept by
# half, nats from 4,096 to 8,191 tokens (16,384 of Shakespeare): 3.802 without fading, 3.742, 3.743, 3.765 with 1.2, 4, 12
FADE = 4
LEAST = torch.finfo(torch.float32).tiny  # of attention, in the logarithm
CHOICE_ELEMENTS = {"cpu": 2**17, "cuda": 2**24}  # rows times segments among which is chosen at a time


class Kept(NamedTuple):
    """What is kept of each row's document, `[B, places, K, …]` each; zeros, and position −1, where there is no token.

    Attributes:
        position: the number of the token in its document, int64, `[B, places, K, 1]`; the others are as in [`Projections`].
    """

    key: Tensor
    value: Tensor
    log_weight: Tensor | None
    score: Tensor
    position: Tensor

    @classmethod
    def of_state(cls, state: InfiniState, places: slice) -> "Kept":
        position: Any = state.kept_position
        windows: Any = (None if window is None else window[:, :, places] for window in state.windows())
        key, value, log_weight, score = windows
        return cls(key, value, log_weight, score, position.unsqueeze(-1)).map(lambda part: part.transpose(1, 2))

    def into(self, state: InfiniState, places: slice) -> InfiniState:
        """The state that keeps this in these places of its windows."""
        key, value, log_weight, score, position = self.map(lambda part: part.transpose(1, 2))

        def put(window, kept):
            sinks = window[:, :, : places.start]
            sinks = torch.zeros_like(sinks) if window is state.local_score else sinks  # they need none
            return torch.cat([sinks, kept.to(window.dtype), window[:, :, places.stop :]], 2)

        state = state.map_windows(put, Projections(key, key, value, log_weight, score))
        return replace(state, kept_position=position[..., 0].contiguous())

    def map(self, function: Callable[..., Tensor], *others: "Kept") -> "Kept":
        """`function(part, *of the others)` for each part that there is."""
        parts: Any = (None if own is None else function(own, *rest) for own, *rest in zip(self, *others, strict=True))
        return Kept(*parts)

    def taken(self, index: Tensor) -> "Kept":
        """What is kept of such rows; `index`: `[B, K, places]`, −1 for none."""
        flat, empty = flat_index(index, self.key.shape[1]), (index < 0).transpose(1, 2).unsqueeze(-1)
        kept = self.map(lambda part: take(part, flat).transpose(1, 2).masked_fill(empty, 0))
        return kept._replace(position=kept.position.masked_fill(empty, -1))


def first_scores(keep_score: str, key: Tensor, learned: Tensor | None) -> Tensor:
    """`[B, K, tokens, R]`, the scores of new tokens before any query has seen them, in float32 or wider; `learned` `[B, K,
    tokens]`."""
    zeros = key.new_zeros(key.shape[:3], dtype=torch.promote_types(key.dtype, torch.float32))
    found: Any = [learned if name == "learned" else zeros for name in KEEP_SCORES[keep_score]]
    return torch.stack([score.to(zeros) for score in found], -1).detach()


@torch.no_grad()
def received_attention(
    query: Tensor, key: Tensor, mask: Tensor, asking: Tensor, softmax: ScoreOptions
) -> Tensor:
    """What each key receives of a softmax over all of them, without dropout: the sum over the queries, the mean over the
    heads of its group, `[B, N, K, W]` in float32 or wider.

    Args:
        query: `[B, N, H, C, D]`; key: `[B, N, K, W, D]`.
        mask: bool, True = visible, `[B or 1, N, 1, C, W]`.
        asking: bool, which queries count, `[B, N, 1, C]`.
    """
    query = query.unflatten(2, (key.shape[2], -1)).flatten(3, 4)  # [B, N, K, heads of a group · C, D]
    group = query.shape[3] // asking.shape[-1]
    mask = mask.unsqueeze(-3).expand(*mask.shape[:-2], group, -1, -1).flatten(-3, -2)
    scores = masked_scores(query, key, mask, softmax)
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))
    asking = asking.repeat(1, 1, 1, group).to(weights.dtype)
    return (asking.unsqueeze(-2) @ weights).squeeze(-2) / group


def with_sinks_before(
    compared: Tensor, keys: Tensor, layout: GridLayout, kept: Tensor, softmax: ScoreOptions
) -> Tensor:
    """Keys of windows as they are compared, `[B, N, K, W, D]`, whose sinks are turned right before so many kept tokens, `[B,
    N]`: a window without a gap is that of a plain model; `keys`: the same before any turn."""
    sinks = layout.sink_tokens
    if not sinks or softmax.rotary is None:
        return compared
    places = (layout.kept_tokens - kept).unsqueeze(-1) + torch.arange(sinks, device=kept.device)  # [B, N, S]
    turned = softmax.rotary(keys[..., :sinks, :].flatten(0, 1), places.flatten(0, 1)).unflatten(0, keys.shape[:2])
    return torch.cat([turned, compared[..., sinks:, :]], 3)


def final_scores(keep_score: str, leaving: "Kept", layout: Layout) -> Tensor:
    """The scores of tokens that leave, `[B, s, C, K, R]`.

    Of the attention a token has received that is the logarithm of the mean over its queries, which are those of its segment,
    from itself on, and of the segments after it in the window; plus its position in units of [`FADE`] times the kept tokens.
    So what is kept by attention fades: without the position ever more places would go to a few tokens of long ago.
    """
    scores = leaving.score
    if "attention" not in KEEP_SCORES[keep_score]:
        return scores
    slots = torch.arange(scores.shape[2], device=scores.device)
    queries = ((layout.local_segments + 1) * layout.segment_length - slots).to(scores.dtype)[:, None, None]
    mean = (scores[..., :1] / queries).clamp(min=LEAST).log()
    return torch.cat([mean + leaving.position.to(scores.dtype) / (FADE * layout.kept_tokens), scores[..., 1:]], -1)


class KeptInGrid:
    """What is kept while a call goes through the groups of its grid, from one to the next.

    Attributes:
        kept: before the group, and then after it.
        scores: of the grid's tokens so far, `[B, w + segments, C, K, R]`; the first w segments are empty.
        sees: whether what is seen still counts for them.
    """

    def __init__(
        self, tokens: Projections, layout: GridLayout, rule: MemoryRule, state: InfiniState, scored: bool = False
    ):
        self.layout, self.rule, self.sees = layout, rule, "attention" in KEEP_SCORES[rule.keep_score] and not scored
        self.kept = Kept.of_state(state, layout.kept_places)
        self.kept = self.kept._replace(score=self.kept.score.detach())
        new: Any = tokens.score
        scores = layout.to_grid(new, state.local_score).detach()
        self.scores = pad(scores, (0,) * 6 + (layout.local_segments, 0)).clone()
        ones = torch.ones(layout.batch, 1, layout.tokens, 1, dtype=torch.bool, device=scores.device)
        self.asking = layout.to_grid(ones, None)[..., 0, 0]

    def see(self, query: Tensor, key: Tensor, mask: Any, begin: int, end: int, softmax: ScoreOptions) -> None:
        """Adds what the tokens of the windows receive from the queries of segments `begin … end`, `[B, N, H, C, D]`; `key`:
        `[B, N, K, W, D]` of sinks and segments, as they are compared."""
        if not self.sees:
            return
        received = received_attention(query, key, mask, self.asking[:, begin:end].unsqueeze(2), softmax)
        received = received[..., self.layout.sink_tokens :].unflatten(-1, (-1, self.layout.slots)).permute(3, 0, 1, 4, 2)
        for shift, of_segments in enumerate(received):
            self.scores[:, begin + shift : end + shift, ..., 0] += of_segments

    def choose(self, leaving: Sequence[Any], written: Any, begin: int, end: int) -> "KeptOfGroup":
        """What segments `begin … end` see and evict; `leaving`: keys, values and log weights of the tokens that leave while
        they are read, `[B, N, K, C, …]` each; `written`: as of [`keep_best`]. All that these have received is known."""
        layout, scores = self.layout, self.scores[:, begin:end]
        parts: Any = (None if part is None else part.transpose(2, 3) for part in leaving)
        key, value, log_weight = parts
        documents = layout.documents(begin, end) if layout.packed else None
        position = layout.delayed_numbers(begin, end)[..., None, None].expand_as(scores[..., :1])
        new = Kept(key, value, log_weight, scores, position)
        found = keep_best(self.kept, new, written, self.rule.keep_score, layout, documents)
        self.kept = found.kept
        return found

    def scored(self, tokens: Projections, state: InfiniState) -> tuple[Projections, InfiniState]:
        """The call's tokens, and the state's window, with what they have received."""
        layout, scores, window = self.layout, self.scores[:, self.layout.local_segments :], state.local_score
        if window is not None:
            window, end = window.detach().clone(), layout.carried_to
            window[:, :, end - layout.carried : end] = scores.flatten(1, 2)[:, : layout.carried].transpose(1, 2)
        return tokens._replace(score=layout.from_grid(scores)), replace(state, local_score=window)


class KeptOfGroup(NamedTuple):
    """What the segments of a group see and evict.

    Attributes:
        rows: among which is chosen.
        before: `[B, N, K, places]`, which rows are kept when each of the segments is read, −1 for none; last: `[B, K,
            places]`, after them.
        evicted_rows: `[B, N, K, C]`, what the memory takes in after each segment is read, left-aligned.
    """

    rows: Kept
    before: Tensor
    last: Tensor
    evicted_rows: Tensor
    layout: Layout

    def visible(
        self, keys: Tensor, values: Tensor, mask: Tensor, most: int, kept: Tensor, softmax: ScoreOptions
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Keys, as they are compared, and values of the windows, `[B, N, K, W, D]`, and their mask, with the kept tokens
        between sinks and segments; `most`: how many there are at most; `kept`: `[B, N]`, how many there are."""
        sinks, places = self.layout.sink_tokens, self.layout.kept_places
        if not most:
            return keys, values, mask
        index = flat_index(self.before[..., -most:], self.rows.key.shape[1])
        kept_keys = softmax.compared_keys(take(self.rows.key, index), slice(places.stop - most, places.stop))
        pairs = (kept_keys, keys), (take(self.rows.value, index), values)
        keys, values = (torch.cat([part[..., :sinks, :], found, part[..., sinks:, :]], 3) for found, part in pairs)
        filled = torch.arange(most, 0, -1, device=keys.device) <= kept.unsqueeze(-1)
        filled = filled[:, :, None, None].expand(-1, -1, -1, mask.shape[3], -1)
        mask = mask.expand(filled.shape[0], -1, -1, -1, -1)
        return keys, values, torch.cat([mask[..., :sinks], filled, mask[..., sinks:]], -1)

    @property
    def kept(self) -> Kept:
        """What is kept after the last of the segments."""
        return self.rows.taken(self.last)

    def evicted(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        """Keys, values and log weights of what the memory takes in, `[B, N, K, C, D]`; and which of them are any, `[B, N, K,
        C]` bool."""
        index = flat_index(self.evicted_rows, self.rows.key.shape[1])
        log_weight = None if self.rows.log_weight is None else take(self.rows.log_weight, index)
        return take(self.rows.key, index), take(self.rows.value, index), log_weight, self.evicted_rows >= 0


def choose(
    kept: Kept, scores: Tensor, written: Tensor, shares: Sequence[int], documents: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Which rows are kept and evicted: `before`, `last` and `evicted_rows` of [`KeptOfGroup`].

    Args:
        kept: before the first of the segments that leave the window one after the other.
        scores: `[B, N, C, K, R]`, final; written: as of [`keep_best`]; shares: places for each of the scores.
        documents: of each segment that leaves, `[B, N]`, and of those that are read while they do, and after, `[B, N + 1]`;
            `None`: one.
    """
    batch, segments, slots, heads, _ = scores.shape
    places, device = kept.position.shape[1], scores.device
    limit = CHOICE_ELEMENTS.get(device.type, CHOICE_ELEMENTS["cuda"]) // (batch * heads)
    size = max(1, min(segments, limit // places, int((limit / slots) ** 0.5)))
    index = torch.arange(places, device=device).expand(batch, heads, -1)
    index = index.masked_fill(kept.position[..., 0].transpose(1, 2) < 0, -1)
    scores, before, evicted = torch.cat([kept.score, scores.flatten(1, 2)], 1).transpose(1, 2), [], []
    for begin in range(0, segments, size):
        part, to = slice(begin, begin + size), slice(begin, begin + size + 1)
        of = None if documents is None else (documents[0][:, part], documents[1][:, to])
        after, goes = _choose_at_once(index, scores, written[:, part], places + begin * slots, shares, of)
        before.append(torch.cat([index.unsqueeze(1), after[:, :-1]], 1))
        evicted.append(goes)
        index = after[:, -1]
    return torch.cat(before, 1), index, torch.cat(evicted, 1)


def _choose_at_once(
    index: Tensor,
    scores: Tensor,
    written: Tensor,
    first: int,
    shares: Sequence[int],
    documents: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor]:
    """What is kept after each of some segments, `[B, N, K, places]`, and evicted, `[B, N, K, C]`.

    Args:
        index: `[B, K, places]`, rows that were kept before; scores: of all rows, `[B, K, rows, R]`.
        written: of these segments; first: row of the first token that leaves.
    """
    (batch, heads, places), (segments, slots), device = index.shape, written.shape[1:], index.device
    numbers = torch.arange(segments, device=device)
    # When each candidate has left the window: −1 before, `segments` where there is none
    new = torch.where(written, numbers[:, None], segments).flatten(1).expand(batch, -1)
    time = torch.cat([torch.where(index[:, 0] < 0, segments, -1), new], 1)[:, None, None]
    rows = torch.arange(first, first + segments * slots, device=device).expand(batch, heads, -1)
    rows = torch.cat([index, rows], 2)
    left = time <= numbers[:, None, None]
    if documents is not None:  # of documents that nobody reads any more nothing is kept or evicted
        of, reading = documents
        of = torch.cat([reading[:, :1].expand(-1, places), of.repeat_interleave(slots, 1)], 1)
        left = left & (of[:, None, None] == reading[:, 1:, None, None])
    left = left.expand(-1, -1, heads, -1)
    stays = torch.zeros_like(left)
    for share, score in zip(shares, scores.unbind(-1), strict=True):
        order = score.gather(2, rows.clamp(min=0)).argsort(dim=-1, descending=True, stable=True)
        order = order.unsqueeze(1).expand_as(left)
        free = (left & ~stays).gather(-1, order)
        stays = stays | torch.zeros_like(stays).scatter(-1, order, free & (free.cumsum(-1) <= share))
    held = torch.cat([(time < 0).expand(-1, -1, heads, -1), stays], 1)[:, :-1]
    goes = left & ~stays & (held | (time == numbers[:, None, None]))

    def listed(chosen: Tensor, size: int, at_end: bool) -> Tensor:  # the rows that are, in order, −1 for none
        count = chosen.cumsum(-1)
        place = count - 1 + (size - count[..., -1:] if at_end else 0)
        found = torch.full((*chosen.shape[:-1], size + 1), -1, device=device)
        place = torch.where(chosen, place, size)  # a spare place takes the others
        return found.scatter(-1, place, rows.unsqueeze(1).expand_as(chosen))[..., :size]

    return listed(stays, places, True), listed(goes, slots, False)


def keep_best(
    kept: Kept,
    leaving: Kept,
    written: Tensor,
    keep_score: str,
    layout: Layout,
    documents: tuple[Tensor, Tensor] | None = None,
) -> KeptOfGroup:
    """What is kept and evicted of what was kept before and of the tokens of segments that leave one after the other.

    Args:
        leaving: `[B, N, C, K, …]` each, scores as they are in a window.
        written: `[B or 1, N, C]` bool, which tokens there are to keep or evict.
        documents: as in [`choose`].
    """
    scores = final_scores(keep_score, leaving, layout)
    rows = kept.map(lambda old, new: torch.cat([old, new.flatten(1, 2)], 1), leaving._replace(score=scores))
    found = choose(kept, scores, written, shares(keep_score, layout.kept_tokens), documents)
    return KeptOfGroup(rows, *found, layout)


def shares(keep_score: str, places: int) -> list[int]:
    """Places for each of the scores; the first gets the odd one."""
    count = len(KEEP_SCORES[keep_score])
    return [(places + number) // count for number in reversed(range(count))]


def flat_index(index: Tensor, count: int) -> Tensor:
    """Rows `[B, …, K, places]` of `[B, count, K]` as [`take`] counts them; row 0 for −1."""
    batch, heads = index.shape[0], index.shape[-2]
    first = torch.arange(batch, device=index.device).view(-1, *(1,) * (index.dim() - 1)) * count
    return (index.clamp(min=0) + first) * heads + torch.arange(heads, device=index.device).unsqueeze(-1)


def take(rows: Tensor, index: Tensor) -> Tensor:
    """`[…, D]` of rows `[B, n, K, D]` at a [`flat_index`] of any shape."""
    return rows.flatten(0, 2).index_select(0, index.flatten()).unflatten(0, index.shape)
