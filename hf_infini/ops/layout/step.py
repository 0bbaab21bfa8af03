"""The layout of one more token for every row, the step that `generate` repeats, and what leaves the
window of the rows that complete a segment with it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...options import Window
from ..state import InfiniState, Layout, last_position, pad


@dataclass(frozen=True, kw_only=True)
class StepLayout(Layout):
    """Where the one new token of each row goes, and what leaves the windows with it. Only tensors
    tell one step from another, so that one graph of torch.compile does for all. Outside of a graph,
    `seen` and what is `None` say what need not be computed."""

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
    # Which rows complete a segment: their numbers, or, in a graph, `[batch]` bool; `None`: none
    complete: Tensor | None
    leaving: Tensor | None  # what leaves their windows, as of [`segment_border`]

    def first_number(self) -> Tensor:
        """`[batch, 1, 1, 1]`, the number in its document of the first token of the row's
        segment."""
        return (self.positions - self.positions % self.window.segment_length)[..., None, None]

    def put(self, window: Tensor, new: Tensor, in_place: bool = False) -> Tensor:
        """The window with the new tokens `[batch, heads, 1, dim]` in their slots; `in_place`: if it
        may, the given one."""
        if torch.compiler.is_compiling():  # for others a graph makes a new one anyway
            in_place = in_place and self.complete is None
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
    seen, left, ahead = state.tokens_seen, state.tokens_left(), window.ahead
    after = seen + (1 if real is None else real[:, 0].long())
    slot, empty = ahead + local * length + seen % length, (kept_tokens - left).clamp(min=0)
    waiting = (local - seen // length).clamp(min=0)  # segments of the window that have not begun
    completing = (after > seen) & (after % length == 0)
    complete = completing if completes_segments else None
    has_gap, has_new_sinks = kept_tokens > 0, sinks > 0 and completes_segments
    stop = window.places
    if read_back:
        stop, gap, fewest, count = torch.stack(
            [slot.amax() + 1, empty.amax(), seen.amin(), completing.sum()]
        ).tolist()
        has_gap, has_new_sinks = gap > 0, fewest < sinks
        complete = completing.nonzero().squeeze(1) if completes_segments and count else None
    rows = torch.arange(batch, device=seen.device)
    sink = torch.where(seen < sinks, seen, slot) if has_new_sinks else None
    # Sinks and kept tokens are seen when the document's first segment has left the window
    places = torch.arange(stop, device=seen.device)
    begin = torch.where(seen // length > local, 0, ahead + waiting * length)
    visible = (places >= begin[:, None]) & (places <= slot[:, None])
    turned: slice | Tensor = slice(0, stop)
    if has_gap:
        visible = visible & ((places < sinks) | (places >= sinks + empty[:, None]))
        turned = torch.where(places < sinks, places + empty[:, None], places)
    in_window = (
        (visible & ((places < sinks) | (places >= ahead)))[:, None, None] if kept_tokens else None
    )
    skipped = state.local_skipped
    if memory_mask is not None or skipped is not None:
        new = torch.zeros_like(completing) if memory_mask is None else ~memory_mask[:, 0]
        new = new if real is None else new & real[:, 0]
        skipped = new.new_zeros(batch, window.places) if skipped is None else skipped
        skipped = skipped.index_put((rows, slot), new)
        skipped = skipped if sink is None else skipped.index_put((rows, sink), new)
    last = last_position(1, real, position_ids, state.last_position)
    memory_tokens, leaving = state.memory_tokens, None
    if complete is not None:
        state = state.having(tokens_seen=after, local_skipped=skipped)
        leaving, memory_tokens, skipped = segment_border(state, window, complete)
    return StepLayout(
        window=window,
        positions=seen.unsqueeze(1),
        tokens_seen=after,
        last_position=last,
        memory_tokens=memory_tokens,
        real=real,
        next_skipped=skipped,
        rows=rows,
        slot=slot,
        sink=sink,
        seen=slice(0, stop),
        visible=visible[:, None, None],
        in_window=in_window,
        turned=turned,
        filled=(left > kept_tokens)[:, None, None, None, None],
        complete=complete,
        leaving=leaving,
    )


def segment_border(
    state: InfiniState, window: Window, complete: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """What the rows that complete a segment with the last token of any layer's state leave behind.

    Args:
        state: after that token, but for this.
        window: the sizes of the layer's window.
        complete: which rows do, as in [`StepLayout`].

    Returns:
        `[batch, L]`, the numbers in their document of the tokens that leave the window now, for the
        memory takes them in, but for kept ones; −1 for those that it does not take in; of other
        rows they mean nothing. And the `memory_tokens` and `local_skipped` of the next state.
    """
    length, local, sinks, kept_tokens = window
    last, skipped = state.tokens_seen.unsqueeze(1) - 1, state.local_skipped
    leaving = (last // length - local) * length + torch.arange(length, device=last.device)
    leaving = leaving.masked_fill(leaving < sinks, -1)
    if skipped is not None:
        leaving = leaving.masked_fill(skipped[:, window.oldest], -1)
        skipped = skipped.unsqueeze(-1)
        [skipped] = in_rows(complete, lambda part: (without_oldest(part, window),), [skipped])
        skipped = skipped.squeeze(-1)
    left = state.tokens_left() + (leaving >= 0).sum(1)
    in_memory = (left - kept_tokens).clamp(min=0)
    [memory_tokens] = in_rows(complete, lambda new, _: (new,), [state.memory_tokens], in_memory)
    return leaving, memory_tokens, skipped


def in_rows(
    rows: Tensor, function: Callable[..., tuple[Tensor, ...]], old: Sequence[Tensor], *given: Tensor
) -> tuple[Tensor, ...]:
    """`function(*given, *old)` in some rows of `[batch, …]` each, `old` in the others; `rows`: the
    numbers of the former, or `[batch]` bool."""
    if rows.dtype == torch.bool:
        pairs = zip(function(*given, *old), old, strict=True)
        return tuple(torch.where(rows.view(-1, *(1,) * (o.dim() - 1)), n, o) for n, o in pairs)
    pairs = zip(function(*(part[rows] for part in (*given, *old))), old, strict=True)
    return tuple(o.index_copy(0, rows, n) for n, o in pairs)


def without_oldest(part: Tensor, window: Window) -> Tensor:
    """What is held of a window's places, `part` `[…, places, dim]`, without its oldest segment, the
    others moved one segment on. `window`: its sizes."""
    segments = pad(part[..., window.oldest.stop :, :], (0, 0, 0, window.segment_length))
    ahead = part[..., : window.ahead, :]
    return torch.cat([ahead, segments], -2) if window.ahead else segments
