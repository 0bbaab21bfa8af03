"""The layout of a call, [`Layout`]: which token is in which segment and slot. [`segment_layout`]
makes it once per forward, and the layers share it.

    token t of a document → segment t // L, slot t mod L

The *grid* of a row is its list of segments in order, each with `slots` places. Tokens fill the
slots of a segment from the first on, so a causal mask inside the segment is all that padding needs.
A call that continues a state begins its grid with the segments of the window. Where rows agree and
hold one document each, tokens come there by a reshape; otherwise by a gather. One more token for
every row needs no grid: [`StepLayout`] in step.py.

Outside of a graph of torch.compile values are read back from the device, and the layout is no
larger than it must be. Inside of one are steps without positions and rows that begin one document
each, whose sizes follow from the arguments' shapes.
"""

from dataclasses import InitVar, dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ...options import Window
from ..state import InfiniState, Layout, bool_mask, check_shapes, gather, last_position, pad
from .step import StepLayout, step_layout


@dataclass(frozen=True, kw_only=True)
class GridLayout(Layout):
    """Which token is where in the grid, what its segments see, and what leaves their windows. The
    memory takes in the grid *delayed* by the `w` segments after which one leaves the window."""

    batch: int
    tokens: int
    segments: int  # in the grid
    slots: int  # of a segment: L, or fewer where none has more tokens
    # Tokens of the state's window that the grid begins with, those right before its place
    # `carried_to`: where `source` is `None` the count that every row has, otherwise all slots (0
    # without a state)
    carried: int
    carried_to: int
    begun: bool  # whether any row's document has begun before the call
    # `[batch or 1, segments + 1]`: grid index where the document of each segment begins (that of a
    # continued one may be negative); the last column is that of the row's next token
    document: Tensor
    packed: bool = False  # whether a row holds more than one document
    # `[batch, segments * slots]`, which row of (carried tokens, new tokens) fills the slot; −1:
    # none; `None`: all in order
    source: Tensor | None = None
    # `[batch, carried + tokens]`, the row's slot in the grid; −1: padding; with `source`
    target: Tensor | None = None
    # What follows from these
    # Which rows of (the state's window up to `carried_to`, new tokens) are the sinks that each
    # segment sees, `[batch or 1, segments or 1, S]`, and the next state's window, `[batch,
    # places]`; −1: none
    sink_rows: Tensor = field(init=False)
    window_rows: Tensor = field(init=False)
    # `[batch, segments, slots]` bool, which tokens never reach the memory; `None`: all do
    skipped: Tensor | None = field(init=False)
    # `[batch or 1, segments, slots]` bool, which slots of the delayed grid leave the window
    written: Tensor = field(init=False)
    # `[batch, segments + 1]`, int64: how many tokens of its document have left the window, into the
    # memory or to be kept, when each segment, and the row's next token, is read
    left: Tensor = field(init=False)
    most_kept: int = field(init=False)  # how many tokens are kept at most when a segment is read
    # What of a window `memory_mask` says, as of [`segment_layout`], the state before the call, and
    # whether values may be read back from the device
    memory_mask: InitVar[Tensor | None]
    state: InitVar[InfiniState | None]
    reads: InitVar[bool]

    def __post_init__(
        self, memory_mask: Tensor | None, state: InfiniState | None, reads: bool
    ) -> None:
        def known(**fields: Any) -> None:
            for name, value in fields.items():
                object.__setattr__(self, name, value)

        sink_rows, window_rows = _rows(self)
        known(sink_rows=sink_rows, window_rows=window_rows)
        written, skipped, before = (
            _leaving(self),
            None,
            None if state is None else state.local_skipped,
        )
        if memory_mask is not None or before is not None:
            shape = (self.batch, self.tokens if memory_mask is None else self.window.places)
            nothing = torch.zeros(shape, dtype=torch.bool, device=written.device)
            new = (nothing if memory_mask is None else ~memory_mask)[:, None, :, None]
            before = (nothing if before is None else before)[:, None, :, None]
            known(next_skipped=self.rows_at(window_rows, new, before)[:, :, 0, 0])
            skipped = self.to_grid(new, before)[..., 0, 0]
            written = written & ~self.delay(skipped)
        known(skipped=skipped, written=written)
        left, most_kept = _left(self, state), self.window.kept_tokens
        if most_kept and reads:  # short rows do not attend to empty places
            most_kept = min(most_kept, int(left[:, :-1].max()))
        memory_tokens = (left[:, -1] - self.window.kept_tokens).clamp(min=0)
        known(left=left, most_kept=most_kept, memory_tokens=memory_tokens)

    def to_grid(self, new: Tensor, window: Tensor | None) -> Tensor:
        """`new [batch, heads, tokens, dim]` and the window (`None`: zeros) as `[batch, segments,
        slots, heads, dim]`."""
        rows = new.transpose(1, 2)
        if self.carried:
            begin = self.carried_to - self.carried
            old = rows.new_zeros(()).expand(self.batch, self.carried, *rows.shape[2:])
            old = old if window is None else window[:, :, begin : self.carried_to].transpose(1, 2)
            rows = torch.cat([old, rows], 1)
        if self.source is not None:
            rows = gather(rows, self.source)
        elif missing := self.segments * self.slots - rows.shape[1]:
            rows = pad(rows, (0, 0) * (rows.dim() - 2) + (0, missing))
        return rows.unflatten(1, (self.segments, self.slots))

    def from_grid(self, grid: Tensor) -> Tensor:
        """`[batch, segments, slots, heads, dim]` back to the new tokens, `[batch, heads, tokens,
        dim]`; padding is zero."""
        rows = grid.flatten(1, 2)
        if self.target is not None:
            rows = gather(rows, self.target)
        return rows[:, self.carried : self.carried + self.tokens].transpose(1, 2)

    def rows_at(self, index: Tensor, new: Tensor, window: Tensor) -> Tensor:
        """The rows of the state's `window`, `[batch, heads, places, dim]`, and of `new`, the call's
        tokens, `[batch, heads, tokens, dim]`, at `index` `[batch or 1, …]`: `[batch, …, heads,
        dim]`, zero at −1."""
        rows = torch.cat([window[:, :, : self.carried_to], new], 2) if self.carried_to else new
        batch = torch.arange(self.batch, device=rows.device).view(-1, *(1,) * (index.dim() - 1))
        # Advanced indices, whose gradient is summed in a fixed order
        return rows.transpose(1, 2)[batch, index.clamp(min=0)].masked_fill(
            (index < 0)[..., None, None], 0
        )

    @property
    def query_places(self) -> slice:
        """Where a segment's slots are in the window of its queries."""
        begin = self.window.ahead + self.window.local_segments * self.window.segment_length
        return slice(begin, begin + self.slots)

    def key_places(self, kept: int = 0) -> Tensor:
        """The places of a window's sinks, of so many kept tokens, and of the slots of each of its
        segments."""
        places = torch.arange(self.window.places, device=self.tokens_seen.device)
        segments = places[self.window.ahead :].unflatten(0, (-1, self.window.segment_length))[
            :, : self.slots
        ]
        return torch.cat(
            [
                places[: self.window.sink_tokens],
                places[self.window.ahead - kept : self.window.ahead],
                segments.flatten(),
            ]
        )

    def first_numbers(self, begin: int, end: int) -> Tensor:
        """`[batch or 1, s, 1, 1, 1]`: the numbers, in their documents, of the first tokens of the
        segments `begin … end`."""
        segments = torch.arange(begin, end, device=self.document.device)
        numbers = (segments - self.document[:, begin:end]) * self.window.segment_length
        return numbers[..., None, None, None]

    def window_mask(self, begin: int, end: int) -> Tensor | None:
        """`[batch or 1, s, 1, C, W]` bool, which slots of its window (sinks first) each query of
        the segments `begin … end` sees, without kept tokens; `None`: a full one up to its own
        slot."""
        if not (self.window.local_segments or self.window.ahead):
            return None
        segments = torch.arange(begin, end, device=self.tokens_seen.device)
        numbers = (segments - self.document[:, begin:end])[..., None, None]  # within the document
        places = torch.arange((self.window.local_segments + 1) * self.slots, device=numbers.device)
        # Whether the document has a segment so many before its own
        begun = numbers >= self.window.local_segments - places // self.slots
        mask = begun & (places <= places[self.window.local_segments * self.slots :, None])
        left = (
            numbers > self.window.local_segments
        )  # the document's first segment has left the window
        return torch.cat(
            [left.expand(*mask.shape[:-1], self.window.sink_tokens), mask], -1
        ).unsqueeze(2)

    def asking(self, begin: int, end: int) -> Tensor:
        """`[batch or 1, s, slots]` bool: in which slots of the segments `begin … end` the call has
        a query."""
        first, stop = begin * self.slots, end * self.slots
        rows = (
            torch.arange(first, stop, device=self.document.device)[None]
            if self.source is None
            else self.source[:, first:stop]
        )
        asks = (rows >= self.carried) & (rows < self.carried + self.tokens)
        return asks.unflatten(1, (-1, self.slots))

    def delay(self, grid: Tensor) -> Tensor:
        """The grid as the memory takes it in: `w` segments later."""
        widths = (0, 0) * (grid.dim() - 2) + (self.window.local_segments, 0)
        return pad(grid, widths)[:, : self.segments] if self.window.local_segments else grid

    def delayed_numbers(self, begin: int, end: int) -> Tensor:
        """`[batch or 1, segments, slots]`: the tokens' numbers in their document, in the delayed
        segments `begin … end`; those of documents that have ended mean nothing."""
        segments = (
            torch.arange(begin, end, device=self.tokens_seen.device) - self.window.local_segments
        )
        slots = torch.arange(self.slots, device=segments.device)
        return (segments - self.document[:, begin:end]).unsqueeze(
            -1
        ) * self.window.segment_length + slots

    def documents(self, begin: int, end: int) -> tuple[Tensor, Tensor]:
        """Where the documents begin of what the delayed segments `begin … end` write, `[batch or 1,
        s]`, and of those that read, and of what comes after, `[batch or 1, s + 1]`."""
        places = torch.arange(begin, end, device=self.document.device) - self.window.local_segments
        return self.document[:, places.clamp(min=0)], self.document[:, begin : end + 1]

    def continues(self, begin: int, end: int) -> Tensor | None:
        """`[batch or 1, s]` bool: whether the segment after each of `begin … end` is of the same
        document; `None`: it is."""
        reading = self.document[:, begin : end + 1]
        return reading[:, 1:] == reading[:, :-1] if self.packed else None

    def next_window(self, new: Tensor, window: Tensor) -> Tensor:
        """The next state's window, but for what is kept. `new`: of the call's tokens, `[batch,
        heads, tokens, dim]`; `window`: of the state's, `[batch, heads, places, dim]`."""
        return self.rows_at(self.window_rows, new, window).transpose(1, 2).contiguous()

    def sinks(self, new: Tensor, window: Tensor) -> Tensor:
        """The sinks that segments see, `[batch, segments or 1, S, heads, dim]`; `new`, `window`: as
        of `next_window`."""
        return self.rows_at(self.sink_rows, new, window)

    @property
    def writes_all(self) -> bool:
        """Whether all slots are `written`, which saves a pass over the keys: whole segments of
        plain rows."""
        plain = (
            self.source is None
            and self.skipped is None
            and not (self.window.local_segments or self.window.ahead)
        )
        return plain and self.carried + self.tokens == self.segments * self.window.segment_length

    def windows(self, new: Tensor, window: Tensor) -> Tensor:
        """What the queries of each segment see, but for what is kept, `[batch, segments, heads, S +
        (w + 1) · slots, dim]`: sinks, then the segments of the window, the oldest first. `new`,
        `window`: as of `next_window`."""
        grid = pad(self.to_grid(new, window), (0,) * 6 + (self.window.local_segments, 0)).transpose(
            2, 3
        )
        parts = [
            grid[:, shift : shift + self.segments]
            for shift in range(self.window.local_segments + 1)
        ]
        if self.window.sink_tokens:
            parts.insert(
                0, self.sinks(new, window).expand(-1, self.segments, -1, -1, -1).transpose(2, 3)
            )
        return torch.cat(parts, 3)


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
    times, but not for a training step of rows without padding and positions.

    Args:
        batch, tokens: rows of the call, and new tokens of each.
        window: the sizes of the layer's window.
        attention_mask: `[batch, tokens]`, 1 = real; `None`: all are.
        position_ids: `[batch, tokens]` or `[1, tokens]`; where they go back a document
            begins; `None`: nowhere.
        memory_mask: `[batch, tokens]`, 0 = stays out of the memory; `None`: none does.
        state: that the call continues; `None`: it begins the texts.
        device: of the layout.
        completes_segments: as of [`step_layout`].

    Raises:
        ValueError: masks or positions of another shape, a mask with other values than 0
            and 1 (in a graph a RuntimeError), or as many sinks as a segment has tokens.
    """
    graph = torch.compiler.is_compiling()
    if graph and (position_ids is not None or (state is not None and tokens > 1)):
        masks = {
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "memory_mask": memory_mask,
        }
        return _layout_outside_graph(batch, tokens, window, **masks, state=state, device=device)
    window.check()
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
    made = {"memory_mask": memory_mask, "state": state, "reads": reads}
    return GridLayout(**shape, **form, begun=any(seen), last_position=last, **made)


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
    """Fields of a [`GridLayout`] of one document in every row, without padding; `seen`: its
    tokens before this call."""
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
    """Fields of a [`GridLayout`] of any rows; `seen`: `[batch]`, tokens of the document
    before; begun: whether any is."""
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


def _rows(layout: GridLayout) -> tuple[Tensor, Tensor]:
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


def _left(layout: GridLayout, state: InfiniState | None) -> Tensor:
    """[`GridLayout.left`]."""
    batch, device = layout.batch, layout.tokens_seen.device
    before = (
        torch.zeros(batch, dtype=torch.long, device=device)
        if state is None
        else state.tokens_left()
    )
    total = pad(layout.written.sum(-1), (1, 0)).cumsum(1)
    # the delayed segment that takes in a document's first
    first = (layout.document + layout.window.local_segments).clamp(min=0)
    first = first.minimum(torch.arange(layout.segments + 1, device=device))
    continued = layout.document == layout.document[:, :1]
    return total - total.gather(1, first) + continued * before.unsqueeze(1)


def _leaving(layout: GridLayout) -> Tensor:
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
    """Which real tokens start a new document, `[batch, tokens]` bool. `position_ids`: `[batch,
    tokens]`; `real`: likewise, bool, or `None`: all; `state`: before the call, or `None`."""
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
