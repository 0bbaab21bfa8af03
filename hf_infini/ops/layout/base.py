"""The layout of a call: which token is in which segment and slot. [`segment_layout`] in build.py
makes it once per forward, and the layers share it; they see one interface, [`Layout`].

    token t of a document → segment t // L, slot t mod L

The *grid* of a row is its list of segments in order, each with `slots` places. Tokens fill the
slots of a segment from the first on, so a causal mask inside the segment is all that padding needs.
A call that continues a state begins its grid with the segments of the window. Where rows agree and
hold one document each, tokens come there by a reshape; otherwise by a gather. One more token for
every row needs no grid: [`StepLayout`] in step.py.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from ...options import Window


def gather(rows: Tensor, index: Tensor) -> Tensor:
    """Rows of `[batch, rows, …]` at `index` `[batch, places]`, zero at −1."""
    first = torch.arange(rows.shape[0], device=rows.device).unsqueeze(1) * rows.shape[1]
    taken = (
        rows.flatten(0, 1)
        .index_select(0, (index.clamp(min=0) + first).flatten())
        .unflatten(0, index.shape)
    )
    return taken.masked_fill((index < 0)[(...,) + (None,) * (rows.dim() - 2)], 0)


def pad(tensor: Tensor, widths: Sequence[int]) -> Tensor:
    """`F.pad` with zeros. Booleans are padded as numbers: of compared and padded ones torch.compile
    makes invalid C++."""
    return (
        F.pad(tensor.to(torch.uint8), widths).to(torch.bool)
        if tensor.dtype == torch.bool
        else F.pad(tensor, widths)
    )


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What is known of every call."""

    window: Window  # the same for all rows
    positions: Tensor  # `[batch or 1, tokens]`, number of each token within its document
    # `[batch]` after this call, as in [`InfiniState`]
    tokens_seen: Tensor
    last_position: Tensor
    memory_tokens: Tensor | None = None
    real: Tensor | None = None  # `[batch, tokens]` bool, which tokens are no padding; `None`: all
    # `[batch, tokens]` bool, which tokens begin a document; `None`: none
    restart: Tensor | None = None
    next_skipped: Tensor | None = None  # `local_skipped` of the next state

    def to(self, device: torch.device, non_blocking: bool = False) -> "Layout":
        """The layout on another device: accelerate asks for it where a model's layers are on
        several."""
        if torch.device(device) == self.positions.device:
            return self
        moved = self.__dict__.setdefault("_moved", {})
        if device not in moved:
            to = functools.partial(Tensor.to, device=device, non_blocking=non_blocking)
            moved[device] = replace(
                self,
                **{k: to(value) for k, value in vars(self).items() if isinstance(value, Tensor)},
            )
        return moved[device]


@dataclass(frozen=True, kw_only=True)
class Grid(Layout):
    """Which token is where in the grid. The memory takes in the grid *delayed* by the `w` segments
    after which one leaves the window."""

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
        """The rows of the state's window and the call's tokens, `[batch, heads, …, dim]`, at
        `index` `[batch or 1, …]`: `[batch, …, heads, dim]`, zero at −1."""
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
        these segments sees, without kept tokens; `None`: a full one up to its own slot."""
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


@dataclass(frozen=True, kw_only=True)
class GridLayout(Grid):
    """A grid, and what its segments see and what leaves their windows."""

    # Which rows of (the state's window up to `carried_to`, new tokens) are the sinks that each
    # segment sees, `[batch or 1, segments or 1, S]`, and the next state's window, `[batch,
    # places]`; −1: none
    sink_rows: Tensor
    window_rows: Tensor
    # `[batch, segments, slots]` bool, which tokens never reach the memory; `None`: all do
    skipped: Tensor | None
    # `[batch or 1, segments, slots]` bool, which slots of the delayed grid leave the window
    written: Tensor
    # `[batch, segments + 1]`, int64: how many tokens of its document have left the window, into the
    # memory or to be kept, when each segment, and the row's next token, is read
    left: Tensor
    most_kept: int  # how many tokens are kept at most when a segment is read

    def next_window(self, new: Tensor, window: Tensor) -> Tensor:
        """The next state's window, but for what is kept, of the call's tokens and the window,
        `[batch, heads, …, dim]`."""
        return self.rows_at(self.window_rows, new, window).transpose(1, 2).contiguous()

    def sinks(self, new: Tensor, window: Tensor) -> Tensor:
        """The sinks that segments see, `[batch, segments or 1, S, heads, dim]`; arguments as of
        `next_window`."""
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
        (w + 1) · slots, dim]`: sinks, then the segments of the window, the oldest first. Arguments
        as of `next_window`."""
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


def last_position(
    tokens: int, real: Tensor | None, position_ids: Tensor | None, before: Tensor
) -> Tensor:
    """[`Layout.last_position`], `[batch]`, of so many tokens; `before`: that before them."""
    if position_ids is None:
        return before + (tokens if real is None else real.sum(1))
    if real is None:
        return position_ids[:, -1].long()
    latest = torch.where(real, torch.arange(tokens, device=real.device), -1).amax(1)
    return torch.where(
        latest >= 0, position_ids.gather(1, latest.clamp(min=0).unsqueeze(1)).squeeze(1), before
    )
