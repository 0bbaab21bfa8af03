"""The layout of a step, one more token for every row: its places in the windows. A grid is not needed."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..state import InfiniState
from .base import Layout, last_position, pad


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
        filled: `[batch, 1, 1]` bool, whether the memory holds any token of the row's document.
        completing: `[batch]` bool, whether the row's segment is complete with this token; `None`: no row's.
        complete_rows: the numbers of those rows; `None`: not known.
        taken_in: `[batch, L]` bool, which tokens of the window's oldest segment leave it now: the memory takes them in, but
            for kept tokens.
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

    def oldest_numbers(self) -> Tensor:
        """`[batch, L]`: the numbers of its tokens in the document."""
        first = (self.positions // self.segment_length - self.local_segments) * self.segment_length
        return first + torch.arange(self.segment_length, device=first.device)

    def shift(self, window: Tensor) -> Tensor:
        """The window with each of its segments, but for the oldest, one segment on."""
        segments = pad(window[:, :, self.ahead + self.segment_length :], (0, 0, 0, self.segment_length))
        return torch.cat([window[:, :, : self.ahead], segments], 2) if self.ahead else segments

    def in_complete_rows(self, function: Callable[..., tuple[Tensor, ...]], *old: Tensor) -> tuple[Tensor, ...]:
        """What `function(taken_in, oldest_numbers, *old)` makes of tensors `[batch, …]` in the rows that complete a segment;
        `old` in the others."""
        if self.completing is None:
            return old
        given = (self.taken_in, self.oldest_numbers(), *old)
        if self.complete_rows is not None:
            new = function(*(part[self.complete_rows] for part in given))
            return tuple(part.index_copy(0, self.complete_rows, rows) for part, rows in zip(old, new, strict=True))
        new, completing = function(*given), self.completing
        pairs = zip(new, old, strict=True)
        return tuple(torch.where(completing.view(-1, *(1,) * (o.dim() - 1)), n, o) for n, o in pairs)


def step_layout(
    batch: int,
    window: tuple[int, int, int, int],
    real: Tensor | None,
    restart: Tensor | None,
    position_ids: Tensor | None,
    memory_mask: Tensor | None,
    state: InfiniState,
    read_back: bool = False,
) -> StepLayout:
    """The layout of one token per row, with masks as bool; `read_back`: whether values may be read back from the device."""
    length, local, sinks, kept_tokens = window
    seen, left, skipped, ahead = state.tokens_seen, state.tokens_left(), state.local_skipped, sinks + kept_tokens
    if restart is not None:
        begins = restart[:, 0]
        seen, left = seen.masked_fill(begins, 0), left.masked_fill(begins, 0)
        skipped = None if skipped is None else skipped.masked_fill(restart, False)
        real = torch.ones_like(restart) if real is None else real  # whoever reads the one reads the other
    new = 1 if real is None else real[:, 0].long()
    after = seen + new

    slot, empty = ahead + local * length + seen % length, (kept_tokens - left).clamp(min=0)
    waiting = (local - seen // length).clamp(min=0)  # segments of the window that have not begun
    completing = (after > seen) & (after % length == 0)
    # Of the window's oldest segment, by the numbers of its tokens in the document
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
        segment_length=length,
        local_segments=local,
        sink_tokens=sinks,
        kept_tokens=kept_tokens,
        positions=seen.unsqueeze(1),
        tokens_seen=after,
        last_position=last_position(1, real, position_ids, state.last_position),
        real=real,
        restart=restart,
        rows=torch.arange(batch, device=seen.device),
        slot=slot,
        new_sinks=new_sinks,
        seen=slice(0, stop),
        visible=visible[:, None, None],
        unkept=unkept,
        turned=turned,
        filled=(left > kept_tokens)[:, None, None],
        completing=None if read_back and complete_rows is None else completing,
        complete_rows=complete_rows,
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
