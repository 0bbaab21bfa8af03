"""The layout of one more token for every row, the step that `generate` repeats, and what leaves the
window of the rows that complete a segment with it."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from ...options import Window
from ..state import COUNTS, InfiniState, Layout, last_position, pad


@dataclass(frozen=True, kw_only=True)
class SegmentBorder(Layout):
    """What leaves the window of the rows that complete a segment."""

    completing: Any  # `[batch]` bool, whether the row's segment is complete; `None`: no row's
    complete_rows: Tensor | None  # the numbers of those rows; `None`: not known
    # `[batch, L]`, the numbers in their document of the tokens of the window's oldest segment
    oldest_numbers: Any = None
    # `[batch, L]` bool, which of them leave it now: the memory takes them in, but for kept tokens
    taken_in: Any = None

    def oldest(self, window: Tensor) -> Tensor:
        """The oldest segment of the window, `[batch, heads, L, dim]`."""
        return window[:, :, self.window.ahead : self.window.ahead + self.window.segment_length]

    def shift(self, window: Tensor) -> Tensor:
        """The window without its oldest segment, the others moved one segment on."""
        segments = pad(
            window[:, :, self.window.ahead + self.window.segment_length :],
            (0, 0, 0, self.window.segment_length),
        )
        return (
            torch.cat([window[:, :, : self.window.ahead], segments], 2)
            if self.window.ahead
            else segments
        )

    def in_complete_rows(
        self, function: Callable[..., tuple[Tensor, ...]], *old: Tensor
    ) -> tuple[Tensor, ...]:
        """`function(taken_in, oldest_numbers, *old)` in rows that complete a segment, `old`
        `[batch, …]` in the others."""
        given = (self.taken_in, self.oldest_numbers, *old)
        if self.complete_rows is not None:
            new = function(*(part[self.complete_rows] for part in given))
            return tuple(
                part.index_copy(0, self.complete_rows, rows)
                for part, rows in zip(old, new, strict=True)
            )
        pairs = zip(function(*given), old, strict=True)
        return tuple(
            torch.where(self.completing.view(-1, *(1,) * (o.dim() - 1)), n, o) for n, o in pairs
        )


def segment_border(
    state: InfiniState,
    window: Window,
    completing: Tensor | None,
    complete_rows: Tensor | None,
) -> SegmentBorder:
    """The border of the rows that complete a segment with the last token of any layer's state,
    and the counts behind it. `state`: after that token; `window`, `completing`,
    `complete_rows`: as in [`SegmentBorder`]."""
    length, local, sinks, kept_tokens = window
    last, skipped = state.tokens_seen.unsqueeze(1) - 1, state.local_skipped
    given: dict[str, Any] = {"window": window} | {name: getattr(state, name) for name in COUNTS}
    given |= {
        "positions": last,
        "next_skipped": skipped,
        "completing": completing,
        "complete_rows": complete_rows,
    }
    border = SegmentBorder(**given)
    if completing is None:
        return border
    numbers = (last // length - local) * length + torch.arange(length, device=last.device)
    border = replace(
        border, oldest_numbers=numbers, taken_in=completing.unsqueeze(1) & (numbers >= sinks)
    )
    if skipped is not None:
        skipped = skipped[:, None, :, None]
        border = replace(border, taken_in=border.taken_in & ~border.oldest(skipped)[:, 0, :, 0])
        (skipped,) = border.in_complete_rows(lambda *given: (border.shift(given[-1]),), skipped)
        skipped = skipped[:, 0, :, 0]
    left = state.tokens_left() + border.taken_in.sum(1)
    return replace(border, memory_tokens=(left - kept_tokens).clamp(min=0), next_skipped=skipped)


@dataclass(frozen=True, kw_only=True)
class StepLayout(SegmentBorder):
    """Where the one new token of each row goes. Only tensors tell one step from another, so that
    one graph of torch.compile does for all. Outside of a graph, `seen` and what is `None` say what
    need not be computed."""

    rows: Tensor  # `[batch]`, their numbers
    slot: Tensor  # `[batch]`, the place of the row's token in its window
    # `[batch]`, the place that it also takes among the sinks, or its slot; `None`: none is a sink
    sink: Tensor | None
    seen: slice  # the part of the window that any row sees
    visible: Tensor  # `[batch, 1, 1, places of it]` bool, what each row sees of it
    # the same without kept tokens, which receive no attention that counts; `None`: the same
    in_window: Tensor | None
    turned: slice | Tensor  # as what places its keys are turned, `[batch, places of it]`, or `seen`
    # `[batch, 1, 1, 1, 1]` bool, whether the memory holds any token of the row's document
    filled: Tensor

    def first_number(self) -> Tensor:
        """`[batch, 1, 1, 1]`, the number in its document of the first token of the row's
        segment."""
        return (self.positions - self.positions % self.window.segment_length)[..., None, None]

    def put(self, window: Tensor, new: Tensor, in_place: bool = False) -> Tensor:
        """The window with the new tokens `[batch, heads, 1, dim]` in their slots; `in_place`: if it
        may, the given one."""
        if torch.compiler.is_compiling():  # for others a graph makes a new one anyway
            in_place = in_place and self.completing is None
        # an initial window is one zero seen many times; one of inference mode may be written only
        # there
        elif in_place:
            in_place = window.is_contiguous() and (
                torch.is_inference_mode_enabled() or not window.is_inference()
            )
        if not in_place:
            window = window.clone(memory_format=torch.contiguous_format)
        new = new.to(window.dtype)
        if self.real is not None:  # padding writes the zero that is there
            new = new.masked_fill(~self.real[:, :, None, None], 0)
        window[self.rows, :, self.slot] = new[:, :, 0]
        if self.sink is not None:
            window[self.rows, :, self.sink] = new[:, :, 0]
        return window


def step_layout(
    batch: int,
    window: Window,
    real: Tensor | None,
    position_ids: Tensor | None,
    memory_mask: Tensor | None,
    state: InfiniState,
    read_back: bool,
    completes_segments: bool = True,
) -> StepLayout:
    """The layout of one more token for every row's document, as of [`segment_layout`].

    Args:
        batch: rows.
        window: the sizes of the layer's window.
        real, memory_mask: the attention mask and the memory's, `[batch, 1]` bool; `None`:
            all are.
        position_ids: `[batch, 1]`; `None`: counted.
        state: that the token continues.
        read_back: whether values may be read back from the device.
        completes_segments: if not, the call leaves the border of a segment to whoever
            calls, and no row lacks a sink.
    """
    length, local, sinks, kept_tokens = window
    seen, left, skipped, ahead = (
        state.tokens_seen,
        state.tokens_left(),
        state.local_skipped,
        window.ahead,
    )
    after = seen + (1 if real is None else real[:, 0].long())
    slot, empty = ahead + local * length + seen % length, (kept_tokens - left).clamp(min=0)
    waiting = (local - seen // length).clamp(min=0)  # segments of the window that have not begun
    completing = (after > seen) & (after % length == 0)
    complete_rows, has_gap, has_new_sinks = None, kept_tokens > 0, sinks > 0 and completes_segments
    stop = window.places
    if read_back:
        stop, gap, fewest, complete = torch.stack(
            [slot.amax() + 1, empty.amax(), seen.amin(), completing.sum()]
        ).tolist()
        has_gap, has_new_sinks = gap > 0, fewest < sinks
        completes_segments = completes_segments and complete > 0
        complete_rows = completing.nonzero().squeeze(1) if completes_segments else None
    rows, sink = (
        torch.arange(batch, device=seen.device),
        torch.where(seen < sinks, seen, slot) if has_new_sinks else None,
    )
    # Sinks and kept tokens are seen when the document's first segment has left the window
    places, begin = (
        torch.arange(stop, device=seen.device),
        torch.where(seen // length > local, 0, ahead + waiting * length),
    )
    visible = (places >= begin[:, None]) & (places <= slot[:, None])
    turned: slice | Tensor = slice(0, stop)
    if has_gap:
        visible = visible & ((places < sinks) | (places >= sinks + empty[:, None]))
        turned = torch.where(places < sinks, places + empty[:, None], places)
    in_window = (
        (visible & ((places < sinks) | (places >= ahead)))[:, None, None] if kept_tokens else None
    )
    if memory_mask is not None or skipped is not None:
        new = torch.zeros_like(completing) if memory_mask is None else ~memory_mask[:, 0]
        new = new if real is None else new & real[:, 0]
        skipped = new.new_zeros(batch, window.places) if skipped is None else skipped
        skipped = skipped.index_put((rows, slot), new)
        skipped = skipped if sink is None else skipped.index_put((rows, sink), new)
    last = last_position(1, real, position_ids, state.last_position)
    state = state.having(tokens_seen=after, last_position=last, local_skipped=skipped)
    border = segment_border(
        state, window, completing if completes_segments else None, complete_rows
    )
    given: dict[str, Any] = {field.name: getattr(border, field.name) for field in fields(border)}
    given |= {
        "positions": seen.unsqueeze(1),
        "real": real,
        "rows": rows,
        "slot": slot,
        "sink": sink,
        "seen": slice(0, stop),
    }
    given |= {"visible": visible[:, None, None], "in_window": in_window, "turned": turned}
    return StepLayout(**given, filled=(left > kept_tokens)[:, None, None, None, None])
