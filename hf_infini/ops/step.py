"""One more token for every row, the step that `generate` repeats: its layout, [`StepLayout`], and equations 2 to 5 on the
window itself instead of a grid.

A step writes its key and value into the row's next slot of the window and attends to the window and the memory; a row whose
segment is full then writes the oldest segment of its window into the memory, and moves the window one segment on.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .kept import Kept, keep_best
from .layout.base import Layout, last_position, pad
from .memory import KEEP_SCORES, MemoryRule
from .state import WINDOWS, Attended, AttentionCall, InfiniState
from .window import ScoreOptions, masked_scores, softmax_weights


@dataclass(frozen=True, kw_only=True)
class StepLayout(Layout):
    """Where the one new token of each row goes, each at its own place in its window.

    Only tensors tell one step from another, so that one graph of torch.compile does for all. Outside of a graph, `seen` and
    what is `None` say what need not be computed.

    Attributes:
        rows: `[batch]`, their numbers; slot: `[batch]`, the place of the row's token in its window.
        new_sinks: `[batch, 1, S, 1]` bool, the place that the token also takes among the sinks; `None`: none is a sink.
        seen: the part of the window that any row sees; visible: `[batch, 1, 1, places of it]` bool, what each row sees of
            it; unkept: the same without kept tokens; `None`: the same.
        turned: as what places its keys are turned, `[batch, places of it]`: sinks come right before what is kept; or `seen`.
        filled: `[batch, 1, 1, 1, 1]` bool, whether the memory holds any token of the row's document.
        completing: `[batch]` bool, whether the row's segment is complete with this token; `None`: no row's.
        complete_rows: the numbers of those rows; `None`: not known.
        oldest_numbers: `[batch, L]`, the numbers, in their document, of the tokens of the window's oldest segment; taken_in:
            `[batch, L]` bool, which of them leave it now: the memory takes them in, but for kept tokens.
    """

    rows: Tensor
    slot: Tensor
    new_sinks: Tensor | None
    seen: slice
    visible: Tensor
    unkept: Tensor | None
    turned: slice | Tensor
    filled: Tensor
    completing: Tensor | None
    complete_rows: Tensor | None
    oldest_numbers: Tensor
    taken_in: Tensor

    def put(self, window: Tensor, new: Tensor, in_place: bool = False) -> Tensor:
        """The window, `[batch, heads, places, dim]`, with the new tokens `[batch, heads, 1, dim]` in their slots;
        `in_place`: written into the given one where that may be."""
        # The window of an initial state is one zero seen many times; one made in inference mode may be written only there;
        # a graph makes a new one anyway
        in_place = in_place and not torch.compiler.is_compiling() and window.is_contiguous()
        if not in_place or (window.is_inference() and not torch.is_inference_mode_enabled()):
            window = window.clone(memory_format=torch.contiguous_format)
        new = new.to(window.dtype)
        if self.real is not None:  # padding writes the zero that is there
            new = new.masked_fill(~self.real[:, :, None, None], 0)
        window[self.rows, :, self.slot] = new[:, :, 0]
        if self.new_sinks is not None:
            sinks = window[:, :, : self.sink_tokens]
            sinks.copy_(torch.where(self.new_sinks, new, sinks))
        return window

    def oldest(self, window: Tensor) -> Tensor:
        """The oldest segment of the window, `[batch, heads, L, dim]`."""
        return window[:, :, self.ahead : self.ahead + self.segment_length]

    def shift(self, window: Tensor) -> Tensor:
        """The window with each of its segments, but for the oldest, one segment on."""
        segments = pad(window[:, :, self.ahead + self.segment_length :], (0, 0, 0, self.segment_length))
        return torch.cat([window[:, :, : self.ahead], segments], 2) if self.ahead else segments

    def in_complete_rows(self, function: Callable[..., tuple[Tensor, ...]], *old: Tensor) -> tuple[Tensor, ...]:
        """What `function(taken_in, oldest_numbers, *old)` makes of tensors `[batch, …]` in the rows that complete a segment;
        `old` in the others."""
        if self.completing is None:
            return old
        given = (self.taken_in, self.oldest_numbers, *old)
        if self.complete_rows is not None:
            new = function(*(part[self.complete_rows] for part in given))
            return tuple(part.index_copy(0, self.complete_rows, rows) for part, rows in zip(old, new, strict=True))
        new, completing = function(*given), self.completing
        pairs = zip(new, old, strict=True)
        return tuple(torch.where(completing.view(-1, *(1,) * (o.dim() - 1)), n, o) for n, o in pairs)


def step_layout(
    batch: int,
    sizes: dict[str, Any],
    real: Tensor | None,
    position_ids: Tensor | None,
    memory_mask: Tensor | None,
    state: InfiniState,
    read_back: bool,
) -> StepLayout:
    """The layout of one more token for every row's document, with masks as bool.

    Args:
        sizes: of the window, by their names in [`Layout`].
        read_back: whether values may be read back from the device.
    """
    length, local, sinks, kept_tokens = sizes.values()
    seen, left, skipped, ahead = state.tokens_seen, state.tokens_left(), state.local_skipped, sinks + kept_tokens
    after = seen + (1 if real is None else real[:, 0].long())
    slot, empty = ahead + local * length + seen % length, (kept_tokens - left).clamp(min=0)
    waiting = (local - seen // length).clamp(min=0)  # segments of the window that have not begun
    completing = (after > seen) & (after % length == 0)
    numbers = (seen // length - local)[:, None] * length + torch.arange(length, device=seen.device)
    taken_in = completing[:, None] & (numbers >= sinks)
    complete_rows, has_gap, has_new_sinks, stop = None, kept_tokens > 0, sinks > 0, ahead + (local + 1) * length
    if read_back:
        stop, gap, fewest, complete = torch.stack([slot.amax() + 1, empty.amax(), seen.amin(), completing.sum()]).tolist()
        has_gap, has_new_sinks = gap > 0, fewest < sinks
        complete_rows = completing.nonzero().squeeze(1) if complete else None
    # Sinks and kept tokens are seen when the document's first segment has left the window
    places, begin = torch.arange(stop, device=seen.device), torch.where(seen // length > local, 0, ahead + waiting * length)
    visible = (places >= begin[:, None]) & (places <= slot[:, None])
    turned: slice | Tensor = slice(0, stop)
    if has_gap:
        visible = visible & ((places < sinks) | (places >= sinks + empty[:, None]))
        turned = torch.where(places < sinks, places + empty[:, None], places)
    unkept = new_sinks = None
    if kept_tokens:
        unkept = (visible & ((places < sinks) | (places >= ahead)))[:, None, None]
    if has_new_sinks:
        places = torch.arange(sinks, device=seen.device)
        new_sinks = ((places >= seen[:, None]) & (places < after[:, None]))[:, None, :, None]
    layout = StepLayout(
        **sizes,
        positions=seen.unsqueeze(1),
        tokens_seen=after,
        last_position=last_position(1, real, position_ids, state.last_position),
        real=real,
        rows=torch.arange(batch, device=seen.device),
        slot=slot,
        new_sinks=new_sinks,
        seen=slice(0, stop),
        visible=visible[:, None, None],
        unkept=unkept,
        turned=turned,
        filled=(left > kept_tokens)[:, None, None, None, None],
        completing=None if read_back and complete_rows is None else completing,
        complete_rows=complete_rows,
        oldest_numbers=numbers,
        taken_in=taken_in,
    )
    if memory_mask is not None or skipped is not None:
        skipped = torch.zeros(batch, layout.places, dtype=torch.bool, device=seen.device) if skipped is None else skipped
        new = torch.zeros_like(skipped[:, :1]) if memory_mask is None else ~memory_mask
        skipped = layout.put(skipped[:, None, :, None], new[:, None, :, None])
        layout = replace(layout, taken_in=taken_in & ~layout.oldest(skipped)[:, 0, :, 0])
        (skipped,) = layout.in_complete_rows(lambda *given: (layout.shift(given[-1]),), skipped)
        layout = replace(layout, next_skipped=skipped[:, 0, :, 0])
    return replace(layout, memory_tokens=(left + layout.taken_in.sum(1) - kept_tokens).clamp(min=0))


def attend_step(call: AttentionCall) -> Attended:
    """[`attend`] for one token per row, which returns the weights wherever they are written out."""
    tokens, gate, layout, rule, softmax, state, _, in_place = call
    state = state.map_windows(lambda window, new: layout.put(window, new, in_place), tokens)
    keys, values, *_ = state.windows()

    query = softmax.compared_queries(tokens.query, layout.slot.unsqueeze(1))
    seen_keys, seen_values = softmax.compared_keys(keys[:, :, layout.seen], layout.turned), values[:, :, layout.seen]
    if state.local_score is not None:
        scores = state.local_score.detach()  # which `put` has allowed to write into
        if layout.new_sinks is not None:
            scores[:, :, : layout.sink_tokens] = 0  # they need none
        if "attention" in KEEP_SCORES[rule.keep_score]:
            _add_received(scores, query, seen_keys, layout, softmax)
        state = replace(state, local_score=scores)
    heads_per_key, weights = tokens.query.shape[1] // tokens.key.shape[1], None
    if softmax.written_out or softmax.softcap:
        seen_keys, seen_values = (tensor.repeat_interleave(heads_per_key, 1) for tensor in (seen_keys, seen_values))
        weights = softmax_weights(query, seen_keys, layout.visible, softmax, values.dtype)
        if layout.real is not None:
            weights = weights.masked_fill(~layout.real[:, :, None, None], 0)
        output = weights @ seen_values
        weights = F.pad(weights, (0, layout.places - layout.seen.stop))
    else:
        options = {"dropout_p": softmax.dropout, "scale": softmax.scaling, "enable_gqa": heads_per_key > 1}
        output = F.scaled_dot_product_attention(query, seen_keys, seen_values, layout.visible, **options)

    with torch.autocast(keys.device.type, enabled=False):
        held = state.memory.unsqueeze(1), state.normaliser.unsqueeze(1)
        filled = layout.filled if state.start_memory is None else None
        output = rule.mix(output.unsqueeze(1), tokens.query.unsqueeze(1), held, gate, filled).squeeze(1)
        state = _with_segments_complete(rule, state, layout)
    if layout.real is not None:
        output = output.masked_fill(~layout.real[:, :, None, None], 0)
    return output, state.after(layout), weights


def _add_received(
    scores: Tensor, query: Tensor, keys: Tensor, layout: StepLayout, softmax: ScoreOptions
) -> None:
    """Adds the attention that the window's tokens receive from the query to their scores, `[B, K, places, R]`; `keys`: what
    it sees, as they are compared."""
    query = query.unflatten(1, (keys.shape[1], -1)).squeeze(3)  # [B, K, heads of a group, D]
    received = masked_scores(query.detach(), keys.detach(), layout.unkept, softmax).softmax(-1, dtype=scores.dtype).mean(2)
    received = received if layout.real is None else received * layout.real.unsqueeze(2)
    scores[:, :, layout.ahead : layout.seen.stop, 0] += received[:, :, layout.ahead :]


def _with_segments_complete(rule: MemoryRule, state: InfiniState, layout: StepLayout) -> InfiniState:
    """The state whose rows that complete a segment have written the oldest one of their window, and moved the window on."""
    if layout.completing is None:
        return state

    def complete(taken_in, numbers, *parts):
        rows, kept = replace(state, **dict(zip(old, parts, strict=True))), None
        oldest: Any = (None if window is None else layout.oldest(window).unsqueeze(1) for window in rows.windows())
        keys, values, log_weights, scores = oldest  # [B, 1, K, L, dim]
        mask, dtype = taken_in[:, None, None, :], rows.memory.dtype
        if layout.kept_tokens:
            number = numbers[:, None, None, :, None].expand_as(scores[..., :1])
            leaving, before = Kept(keys, values, log_weights, scores, number), Kept.of_state(rows, layout)
            _, kept, evicted = keep_best(before, leaving, taken_in.unsqueeze(1), rule.keep_score, layout)
            keys, values, log_weights, _, number = evicted
            mask = number[..., 0] >= 0
        written = rule.written(keys.to(dtype), values.to(dtype), log_weights, mask.unsqueeze(-1))
        _, (memory, normaliser) = rule.states(written, rows.memory, rows.normaliser)
        rows = replace(rows.map_windows(layout.shift), memory=memory, normaliser=normaliser)
        rows = rows if kept is None else kept.into(rows, layout)
        return tuple(getattr(rows, name) for name in old)

    def compute():
        return layout.in_complete_rows(complete, *old.values())

    def keep():
        return tuple(tensor.clone() for tensor in old.values())

    names = ("memory", "normaliser", *WINDOWS, "kept_position")
    old = {name: tensor for name in names if (tensor := getattr(state, name)) is not None}
    # A graph computes it for all rows, but only in calls in which one of them needs it
    new = torch.cond(layout.completing.any(), compute, keep) if torch.compiler.is_compiling() else compute()
    return replace(state, **dict(zip(old, new, strict=True)))
