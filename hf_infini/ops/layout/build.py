"""Makes the layout of a call ([`Layout`]), once per forward.

Outside of a graph of torch.compile values are read back from the device, and the layout is no
larger than it must be. Inside of one are steps without positions and rows that begin one document
each, whose sizes follow from the arguments' shapes.
"""

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ...options import Window
from ..checks import bool_mask, check_shapes, check_window
from ..state import InfiniState
from .base import Grid, GridLayout, last_position, pad
from .step import StepLayout, step_layout


def segment_layout(
    batch: int,
    tokens: int,
    window: Window,
    *,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    memory_mask: Tensor | None = None,
    state: InfiniState | None = None,
    device: torch.device | None = None,
    completes_segments: bool = True,
) -> StepLayout | GridLayout:
    """Lays out a call of `[batch, tokens]`. On an accelerator this waits for the device a few
    times, but not for a training step of rows without padding and positions. Arguments as of
    [`infini_attention`], positions perhaps `[1, tokens]`, and of [`step_layout`]. ValueError for
    masks or positions of another shape, a mask with other values than 0 and 1 (in a graph a
    RuntimeError), and as many sinks as a segment has tokens."""
    graph = torch.compiler.is_compiling()
    if graph and (position_ids is not None or (state is not None and tokens > 1)):
        masks = {
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "memory_mask": memory_mask,
        }
        return _layout_outside_graph(batch, tokens, window, **masks, state=state, device=device)
    check_window(window)
    check_shapes(batch, tokens, attention_mask, memory_mask, position_ids)
    real = bool_mask("attention_mask", attention_mask, not graph)
    memory_mask, restart = bool_mask("memory_mask", memory_mask, not graph), None
    if position_ids is not None:
        position_ids = position_ids.expand(batch, tokens)
        restart = restarts(position_ids, real, state)
    training = torch.is_grad_enabled() and device is not None and device.type != "cpu"
    reads = not graph and not (training and real is None and restart is None)
    if reads:  # masks that change nothing are left out
        masks = (real, memory_mask, None if restart is None else ~restart)
        given = [mask for mask in masks if mask is not None]
        idle = iter(torch.stack([mask.all() for mask in given]).tolist() if given else ())
        real, memory_mask, restart = (
            None if mask is None or next(idle) else mask for mask in masks
        )
        restart = None if restart is None else ~restart
    if tokens == 1 and state is not None and restart is None:
        return step_layout(
            batch, window, real, position_ids, memory_mask, state, not graph, completes_segments
        )
    seen = [0] if state is None else state.tokens_seen.tolist()
    if real is None and restart is None and len({*seen}) == 1:
        form = _plain_form(batch, tokens, window, seen[0], device)
    else:
        known = (
            torch.zeros(batch, dtype=torch.long, device=device)
            if state is None
            else state.tokens_seen
        )
        every = torch.ones(batch, tokens, dtype=torch.bool, device=device)
        masks = every if real is None else real, ~every if restart is None else restart
        form = _indexed_form(window, *masks, known, any(seen))
    before = torch.full_like(form["tokens_seen"], -1) if state is None else state.last_position
    last = last_position(tokens, real, position_ids, before)
    shape: dict[str, Any] = {"window": window, "batch": batch, "tokens": tokens}
    grid = Grid(**shape, **form, begun=any(seen), last_position=last)
    return _with_windows(grid, memory_mask, state, reads)


_layout_outside_graph = torch.compiler.disable(
    segment_layout,
    reason="position_ids can begin any number of documents, and a state be any number of tokens "
    "long: the layout of their segments is made outside of the graph.",
)


def _plain_form(
    batch: int,
    tokens: int,
    window: Window,
    seen: int,
    device: torch.device | None,
) -> dict[str, Any]:
    """Fields of a [`Grid`] of one document in every row, without padding; `seen`: its tokens
    before this call."""
    length, local = window.segment_length, window.local_segments
    base = min(local, seen // length)  # grid segment that the next token falls into
    carried = base * length + seen % length
    total = carried + tokens
    segments = -(-total // length)
    return {
        "segments": segments,
        "slots": length if total >= length else total,
        "carried": carried,
        "carried_to": window.ahead + (local - base) * length + carried if seen else 0,
        "document": torch.full((1, segments + 1), base - seen // length, device=device),
        "positions": torch.arange(seen, seen + tokens, device=device).unsqueeze(0),
        "tokens_seen": torch.full((batch,), seen + tokens, device=device),
    }


def _indexed_form(
    window: Window, real: Tensor, restart: Tensor, seen: Tensor, begun: bool
) -> dict[str, Any]:
    """Fields of a [`Grid`] of any rows; `seen`: `[batch]`, tokens of the document before;
    begun: whether any is."""
    length, local = window.segment_length, window.local_segments
    (batch, tokens), device = real.shape, real.device
    # Tokens of the window in the grid, and the grid segment that the next token of a continued
    # document falls into
    carried, base = ((local + 1) * length, local) if begun else (0, 0)
    begin = seen.unsqueeze(1)

    counted = real.cumsum(1)
    counted_at_restart = torch.where(restart, counted, 0).cummax(1).values
    # in the document
    number = torch.where(counted_at_restart > 0, counted - counted_at_restart, begin + counted - 1)
    slot = number % length
    opens = real & (slot == 0) & ((number != begin) | (counted_at_restart > 0))
    segment = base + opens.cumsum(1)
    if torch.compiler.is_compiling():
        segments, slots, packed = -(-tokens // length), min(length, tokens), False
    else:
        limits = torch.stack(
            [segment.amax(), torch.where(real, slot, 0).amax(), restart.any().long()]
        ).tolist()
        segments, slots, packed = limits[0] + 1, length if begun else limits[1] + 1, bool(limits[2])

    target = torch.where(real, segment * slots + slot, -1)
    rows = torch.arange(carried, carried + tokens, device=device).expand(batch, -1)
    spare = segments * slots  # an extra slot that takes the padding, cut off again
    source = torch.full((batch, spare + 1), -1, device=device)
    source = source.scatter(1, torch.where(real, target, spare), rows)[:, :spare].contiguous()
    if begun:
        places = torch.arange(carried, device=device)
        token = (begin // length - base) * length + places
        filled = (token >= 0) & (token < begin)
        source[:, :carried] = torch.where(filled, places, source[:, :carried])
        target = torch.cat([torch.where(filled, places, -1), target], 1)

    marks = torch.full((batch, segments + 2), torch.iinfo(torch.long).min, device=device)
    marks[:, :1] = base - begin // length
    marks = marks.scatter_reduce(1, torch.where(restart, segment, segments + 1), segment, "amax")
    return {
        "segments": segments,
        "slots": slots,
        "carried": carried,
        "carried_to": window.ahead + carried if begun else 0,
        "document": marks[:, :-1].cummax(1).values,
        "packed": packed,
        "source": source,
        "target": target,
        "positions": torch.where(real, number, 0),
        "tokens_seen": number[:, -1] + 1,
        "real": real,
        "restart": restart,
    }


def _rows(layout: Grid) -> tuple[Tensor, Tensor]:
    """[`GridLayout.sink_rows`] and [`GridLayout.window_rows`]."""
    length, local, sinks, kept = layout.window
    source, places = (
        layout.source,
        torch.arange(max(sinks, (local + 1) * length), device=layout.document.device),
    )
    if source is None:
        slots = torch.arange(layout.segments * layout.slots, device=places.device)
        source = torch.where(slots < layout.carried + layout.tokens, slots, -1).unsqueeze(0)
    source = F.pad(source, (1, 1), value=-1)  # before and beyond the grid there is none
    before = layout.carried_to - layout.carried  # places of the window before what is in the grid

    # of the document's tokens of these numbers
    def rows_of(document: Tensor, number: Tensor) -> Tensor:
        place = (document + number // length) * layout.slots + number % length
        row = source.gather(1, (place + 1).clamp(0, source.shape[1] - 1).flatten(1)).view_as(place)
        return torch.where((number >= 0) & (number % length < layout.slots), row, -1)

    document = layout.document if layout.source is not None else layout.document[:, :1]
    first = document.unsqueeze(2)
    row = rows_of(first, places[:sinks].expand(*document.shape, -1))
    known = (first < 0) | ((row >= 0) & (row < layout.carried))  # before the call
    sink_rows = torch.where(known, places[:sinks], torch.where(row < 0, -1, row + before))
    last, ended = layout.document[:, -1:], layout.tokens_seen[: len(document)].unsqueeze(1)
    row = rows_of(last, (ended // length - local) * length + places[: (local + 1) * length])
    rows = F.pad(torch.where(row < 0, -1, row + before), (kept, 0), value=-1)
    rows = torch.cat([sink_rows[:, -1], rows], 1).expand(layout.batch, -1)
    return sink_rows[:, :-1] if layout.source is not None else sink_rows, rows


def _with_windows(
    grid: Grid, memory_mask: Tensor | None, state: InfiniState | None, reads: bool
) -> GridLayout:
    """The layout of a grid; `reads`: whether values may be read back from the device."""
    batch, device, skipped, next_skipped = grid.batch, grid.tokens_seen.device, None, None
    before, written, (sink_rows, window_rows) = None, _leaving(grid), _rows(grid)
    if state is not None:
        before = state.local_skipped
    if memory_mask is not None or before is not None:
        shape = (batch, grid.tokens if memory_mask is None else grid.window.places)
        nothing = torch.zeros(shape, dtype=torch.bool, device=device)
        new = (nothing if memory_mask is None else ~memory_mask)[:, None, :, None]
        before = (nothing if before is None else before)[:, None, :, None]
        next_skipped = grid.rows_at(window_rows, new, before)[:, :, 0, 0]
        skipped = grid.to_grid(new, before)[..., 0, 0]
        written = written & ~grid.delay(skipped)
    left = _left(grid, written, state)
    most_kept = grid.window.kept_tokens
    if most_kept and reads:  # short rows do not attend to empty places
        most_kept = min(most_kept, int(left[:, :-1].max()))
    known: dict[str, Any] = {field.name: getattr(grid, field.name) for field in fields(grid)}
    known |= {
        "memory_tokens": (left[:, -1] - grid.window.kept_tokens).clamp(min=0),
        "next_skipped": next_skipped,
    }
    return GridLayout(
        **known,
        sink_rows=sink_rows,
        window_rows=window_rows,
        skipped=skipped,
        written=written,
        left=left,
        most_kept=most_kept,
    )


def _left(grid: Grid, written: Tensor, state: InfiniState | None) -> Tensor:
    """[`GridLayout.left`]."""
    batch, device = grid.batch, grid.tokens_seen.device
    before = (
        torch.zeros(batch, dtype=torch.long, device=device)
        if state is None
        else state.tokens_left()
    )
    total = pad(written.sum(-1), (1, 0)).cumsum(1)
    # the delayed segment that takes in a document's first
    first = (grid.document + grid.window.local_segments).clamp(min=0)
    first = first.minimum(torch.arange(grid.segments + 1, device=device))
    continued = grid.document == grid.document[:, :1]
    return total - total.gather(1, first) + continued * before.unsqueeze(1)


def _leaving(layout: Grid) -> Tensor:
    """[`GridLayout.written`], with skipped tokens."""
    document, last = layout.document[:, :-1], layout.document[:, -1:]
    # Grid index of the next token's segment
    current = (
        layout.tokens_seen[: len(document)].unsqueeze(1) // layout.window.segment_length + last
    )
    segments = torch.arange(layout.segments, device=last.device)
    complete = (document != last) | (segments < current - layout.window.local_segments)
    filled = complete.unsqueeze(-1).expand(-1, -1, layout.slots)
    if layout.source is not None:
        filled = filled & (layout.source >= 0).unflatten(1, filled.shape[1:])
    # Of a document that has ended, nobody reads what is left: numbers below 0
    return layout.delay(filled) & (
        layout.delayed_numbers(0, layout.segments) >= layout.window.sink_tokens
    )


def restarts(position_ids: Tensor, real: Tensor | None, state: InfiniState | None) -> Tensor:
    """Which real tokens start a new document, `[batch, tokens]` bool."""
    columns = torch.arange(position_ids.shape[1], device=position_ids.device).expand_as(
        position_ids
    )
    latest = columns if real is None else torch.where(real, columns, -1).cummax(1).values
    latest = F.pad(latest[:, :-1], (1, 0), value=-1)  # the last real token before each
    before, begun = position_ids.gather(1, latest.clamp(min=0)), latest >= 0
    if state is not None:
        before = torch.where(begun, before, state.last_position.unsqueeze(1))
        begun = begun | (state.tokens_seen > 0).unsqueeze(1)
    goes_back = (position_ids <= before) & begun
    return goes_back if real is None else goes_back & real
