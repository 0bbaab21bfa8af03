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

from .kept import Kept, keep_best, received_attention
from .layout.base import Layout, last_position, pad
from .memory import KEEP_SCORES, MemoryRule
from .state import WINDOWS, Attended, AttentionCall, InfiniState
from .window import window_attention


@dataclass(frozen=True, kw_only=True)
class StepLayout(Layout):
    """Where the one new token of each row goes, each at its own place in its window.

    Only tensors tell one step from another, so that one graph of torch.compile does for all. Outside of a graph, `seen` and
    `completing` say what need not be computed.

    Attributes:
        slot: `[batch]`, the place of the row's token in its window.
        new_sinks: `[batch, 1, S, 1]` bool, the place that the token also takes among the sinks.
        seen: the part of the window that any row sees; visible: `[batch, 1, 1, 1, places of it]` bool, what each row sees
            of it; unkept: the same without kept tokens.
        turned: as what places its keys are turned: `seen`, or `[batch, places of it]`, for sinks come right before what is
            kept.
        filled: `[batch, 1, 1, 1, 1]` bool, whether the memory holds any token of the row's document.
        completing: `[batch]` bool, whether the row's segment is complete with this token; `None`: no row's.
        oldest_numbers: `[batch, L]`, the numbers, in their document, of the tokens of the window's oldest segment; taken_in:
            `[batch, L]` bool, which of them leave it now: the memory takes them in, but for kept tokens.
    """

    slot: Tensor
    new_sinks: Tensor
    seen: slice
    visible: Tensor
    unkept: Tensor
    turned: slice | Tensor
    filled: Tensor
    completing: Tensor | None
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
        window.scatter_(2, self.slot[:, None, None, None].expand_as(new), new)
        if self.sink_tokens:
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
        """What `function(*old)` makes of tensors `[batch, …]` in the rows that complete a segment; `old` in the others."""
        if self.completing is None:
            return old
        pairs, rows = zip(function(*old), old, strict=True), self.completing
        return tuple(torch.where(rows.view(-1, *(1,) * (o.dim() - 1)), n, o) for n, o in pairs)


def step_layout(
    sizes: dict[str, Any], real: Tensor | None, position_ids: Tensor | None, memory_mask: Tensor | None, state: InfiniState
) -> StepLayout:
    """The layout of one more token for every row's document, with masks as bool; `sizes`: of the window, by their names in
    [`Layout`]."""
    length, local, sinks, kept_tokens = sizes.values()
    seen, left, skipped, ahead = state.tokens_seen, state.tokens_left(), state.local_skipped, sinks + kept_tokens
    after = seen + (1 if real is None else real[:, 0].long())
    slot, empty = ahead + local * length + seen % length, (kept_tokens - left).clamp(min=0)
    waiting = (local - seen // length).clamp(min=0)  # segments of the window that have not begun
    completing = (after > seen) & (after % length == 0)
    numbers = (seen // length - local)[:, None] * length + torch.arange(length, device=seen.device)
    taken_in = completing[:, None] & (numbers >= sinks)
    stop, any_complete = ahead + (local + 1) * length, True
    if not torch.compiler.is_compiling():  # in a graph nothing can be read back
        stop, any_complete = torch.stack([slot.amax() + 1, completing.sum()]).tolist()
    # Sinks and kept tokens are seen when the document's first segment has left the window
    places, begin = torch.arange(stop, device=seen.device), torch.where(seen // length > local, 0, ahead + waiting * length)
    visible = (places >= begin[:, None]) & (places <= slot[:, None])
    turned: slice | Tensor = slice(0, stop)
    if kept_tokens:
        visible = visible & ((places < sinks) | (places >= sinks + empty[:, None]))
        turned = torch.where(places < sinks, places + empty[:, None], places)
    unkept = visible & ((places < sinks) | (places >= ahead))
    first = torch.arange(sinks, device=seen.device)
    new_sinks = (first >= seen[:, None]) & (first < after[:, None])
    layout = StepLayout(
        **sizes,
        positions=seen.unsqueeze(1),
        tokens_seen=after,
        last_position=last_position(1, real, position_ids, state.last_position),
        real=real,
        slot=slot,
        new_sinks=new_sinks[:, None, :, None],
        seen=slice(0, stop),
        visible=visible[:, None, None, None],
        unkept=unkept[:, None, None, None],
        turned=turned,
        filled=(left > kept_tokens)[:, None, None, None, None],
        completing=completing if any_complete else None,
        oldest_numbers=numbers,
        taken_in=taken_in,
    )
    if memory_mask is not None or skipped is not None:
        skipped = seen.new_zeros(len(seen), layout.places, dtype=torch.bool) if skipped is None else skipped
        new = torch.zeros_like(skipped[:, :1]) if memory_mask is None else ~memory_mask
        skipped = layout.put(skipped[:, None, :, None], new[:, None, :, None])
        layout = replace(layout, taken_in=taken_in & ~layout.oldest(skipped)[:, 0, :, 0])
        (skipped,) = layout.in_complete_rows(lambda window: (layout.shift(window),), skipped)
        layout = replace(layout, next_skipped=skipped[:, 0, :, 0])
    return replace(layout, memory_tokens=(left + layout.taken_in.sum(1) - kept_tokens).clamp(min=0))


def attend_step(call: AttentionCall) -> Attended:
    """[`attend`] for one token per row: a segment of one query."""
    tokens, gate, layout, rule, softmax, state, _, in_place = call
    state = state.map_windows(lambda window, new: layout.put(window, new, in_place), tokens)
    keys, values, *_ = state.windows()
    query = softmax.compared_queries(tokens.query, layout.slot.unsqueeze(1)).unsqueeze(1)  # [B, 1, H, 1, D]
    keys = softmax.compared_keys(keys[:, :, layout.seen], layout.turned).unsqueeze(1)
    if state.local_score is not None:
        scores = state.local_score.detach()  # which `put` has allowed to write into
        scores[:, :, : layout.sink_tokens] = 0  # they need none
        if "attention" in KEEP_SCORES[rule.keep_score]:
            asking = torch.ones_like(layout.slot, dtype=torch.bool)[:, None] if layout.real is None else layout.real
            received = received_attention(query, keys, layout.unkept, asking[:, None, None], softmax)[:, 0]
            scores[:, :, layout.ahead : layout.seen.stop, 0] += received[..., layout.ahead :]
        state = replace(state, local_score=scores)
    values, places = values[:, :, layout.seen].unsqueeze(1), (0, layout.places - layout.seen.stop)
    local, log_sum, weights = window_attention(query, keys, values, layout.visible, softmax, rule.denominator == "shared")
    with torch.autocast(keys.device.type, enabled=False):
        held = state.memory.unsqueeze(1), state.normaliser.unsqueeze(1)
        filled = layout.filled if state.start_memory is None else None
        output = rule.mix(local, log_sum, tokens.query.unsqueeze(1), held, gate, filled)
        state = _with_segments_complete(rule, state, layout)
    weights = weights if weights is None else F.pad(weights, places).squeeze(1)
    output = output.squeeze(1)
    if (real := layout.real) is not None:
        output = output.masked_fill(~real[:, None, None], 0)
        weights = weights if weights is None else weights.masked_fill(~real[:, None, None], 0)
    return output, state.after(layout), weights


def _with_segments_complete(rule: MemoryRule, state: InfiniState, layout: StepLayout) -> InfiniState:
    """The state whose rows that complete a segment have written the oldest one of their window, and moved the window on."""
    if layout.completing is None:
        return state

    def complete(*parts):
        rows, kept = replace(state, **dict(zip(old, parts, strict=True))), None
        oldest: Any = (None if window is None else layout.oldest(window).unsqueeze(1) for window in rows.windows())
        keys, values, log_weights, scores = oldest  # [B, 1, K, L, dim]
        mask, dtype = layout.taken_in[:, None, None, :], rows.memory.dtype
        if layout.kept_tokens:
            number = layout.oldest_numbers[:, None, None, :, None].expand_as(scores[..., :1])
            leaving, before = Kept(keys, values, log_weights, scores, number), Kept.of_state(rows, layout)
            _, kept, evicted = keep_best(before, leaving, layout.taken_in.unsqueeze(1), rule.keep_score, layout)
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
