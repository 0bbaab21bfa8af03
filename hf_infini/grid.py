"""The grid of segments, and where each token of a call lies in it.

The *grid* of a row is its list of segments in order, each with `slots` places. Tokens fill the slots of a segment from the
first on, so a causal mask inside the segment is all that padding needs. A call that continues a state begins its grid with
the segments of the window. Two forms hold the same thing: *plain*, where the rows agree and hold one document each, is a
reshape; *indexed*, for padding, packed documents and rows of different lengths, is a gather.
"""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from .gather import gather, pad
from .memory import Borders


@dataclass(frozen=True)
class SegmentLayout:
    """Where each token of `[batch, tokens]` goes. [`segment_layout`] builds it.

    Attributes:
        batch, tokens: of the call. segment_length: `L`; local_segments: `w`.
        segments: segments in the grid; slots: places in each (L, or fewer where no segment has more tokens).
        carried: tokens taken from the window of the state: in plain form the count that every row has, in indexed form all
            its slots (0 without a state).
        first: plain form: number, within the document, of the grid's first segment.
        seen: plain form: tokens of the document before this call.
        positions: `[batch, tokens]` number of each token within its document, or `[1, tokens]` in plain form.
        source: indexed form: `[batch, segments * slots]`, which row of (window, new tokens) fills the slot; −1: none.
        target: indexed form: `[batch, tokens]`, in which slot of the grid the token lies; −1: padding.
        document: indexed form: `[batch, segments + 1]`: grid index where the document of each segment begins (that of a
            continued one may be negative); the last column is that of the row's next token.
        window: indexed form: `[batch, (w + 1) * L]`, which row of (window, new tokens) the next state keeps; −1: none.
        tokens_seen: `[batch]`, after this call; last_position: likewise.
        packed: indexed form: whether a row holds more than one document.
        real, restart: indexed form: `[batch, tokens]` bool, which tokens are no padding, and which begin a document.
        skipped: `[batch, segments, slots]` bool, which tokens never reach the memory; `None`: all do.
        held: `[batch, segments + 1]`, int64: how many tokens of its document the memory holds when each segment reads it and
            when the row's next token does.
        holding: plain form: whether the memory of every row held any before the call.
        kept_out: the same as `skipped` before it was laid out: of the new tokens, `[batch, 1, tokens, 1]`, and of the
            state's window, `[batch, 1, (w + 1) * L, 1]`.
    """

    batch: int
    tokens: int
    segment_length: int
    local_segments: int
    segments: int
    slots: int
    carried: int
    positions: Tensor
    tokens_seen: Tensor
    last_position: Tensor
    first: int = 0
    seen: int = 0
    source: Tensor | None = None
    target: Tensor | None = None
    document: Tensor | None = None
    window: Tensor | None = None
    packed: bool = False
    real: Tensor | None = None
    restart: Tensor | None = None
    skipped: Tensor | None = None
    held: Tensor | None = None
    holding: bool = False
    kept_out: tuple[Tensor, Tensor] | None = None

    def to_grid(self, new: Tensor, window: Tensor | None) -> Tensor:
        """`new [batch, heads, tokens, dim]` and the state's window `[batch, heads, (w + 1) * L, dim]` (`None` for queries:
        zeros) as `[batch, segments, slots, heads, dim]`."""
        tokens = new.transpose(1, 2)
        if self.source is None:
            if self.carried:
                begin = (self.local_segments - self.seen // self.segment_length + self.first) * self.segment_length
                old = (
                    tokens.new_zeros(self.batch, self.carried, *tokens.shape[2:])
                    if window is None
                    else window[:, :, begin : begin + self.carried].transpose(1, 2)
                )
                tokens = torch.cat([old, tokens], 1)
            return pad_to(tokens, self.segments * self.slots).unflatten(1, (self.segments, self.slots))
        if self.carried and window is not None:
            tokens = torch.cat([window.transpose(1, 2), tokens], 1)
            target = torch.cat([self._window_target(), self.target], 1)
            return gather(tokens, self.source, target).unflatten(1, (self.segments, self.slots))
        source = torch.where(self.source >= self.carried, self.source - self.carried, -1)
        return gather(tokens, source, self.target).unflatten(1, (self.segments, self.slots))

    def from_grid(self, grid: Tensor) -> Tensor:
        """`[batch, segments, slots, heads, dim]` back to the new tokens, `[batch, heads, tokens, dim]`; padding is zero."""
        grid = grid.flatten(1, 2)
        if self.source is None:
            return grid[:, self.carried : self.carried + self.tokens].transpose(1, 2)
        source = torch.where(self.source >= self.carried, self.source - self.carried, -1)
        return gather(grid, self.target, source).transpose(1, 2)

    def next_window(self, new: Tensor, window: Tensor) -> Tensor:
        """The window of the next state from this call's tokens and the state's window, both `[batch, heads, …, dim]`."""
        length, kept = self.segment_length, self.local_segments
        if self.source is None:
            end = self.seen + self.tokens
            first = max(0, end // length - kept) * length  # first token that stays, counted in the document
            old = window[:, :, (kept - self.seen // length) * length + first :] if first < self.seen else window[:, :, :0]
            old = old[:, :, : max(0, self.seen - first)]
            tokens = torch.cat([old, new[:, :, max(0, first - self.seen) :]], 2)
            before = max(0, kept - end // length) * length
            return pad(tokens, (0, 0, before, window.shape[2] - before - tokens.shape[2]))
        tokens = torch.cat([window, new], 2) if self.carried else new
        index = self.window.clamp(min=0)[:, None, :, None].expand(-1, tokens.shape[1], -1, tokens.shape[3])
        return tokens.gather(2, index).masked_fill((self.window < 0)[:, None, :, None], 0)

    @property
    def next_skipped(self) -> Tensor | None:
        """`[batch, (w + 1) * L]` bool, which tokens of the next state's window never reach the memory; `None`: all do."""
        return None if self.kept_out is None else self.next_window(*self.kept_out)[:, 0, :, 0]

    @property
    def memory_tokens(self) -> Tensor:
        """`[batch]`, int64: tokens of each row's document that the memory holds after this call."""
        return self.held[:, -1].clone(memory_format=torch.contiguous_format)

    def segment_numbers(self) -> Tensor:
        """Number of each grid segment within its document, `[batch or 1, segments]`."""
        places = torch.arange(self.segments, device=self.tokens_seen.device)
        return places.unsqueeze(0) + self.first if self.document is None else places - self.document[:, :-1]

    def delay(self, grid: Tensor) -> Tensor:
        """The grid as the memory takes it in: `w` segments later, so that a read sees every step before its own."""
        return pad(grid, (0,) * 6 + (self.local_segments, 0))[:, : self.segments] if self.local_segments else grid

    def written(self) -> Tensor | None:
        """Which slots of the delayed grid reach the memory, `[batch or 1, segments, slots]` bool; `None`: all of them.

        Left out are empty slots, what the memory mask leaves out, and the segments that the next token still sees: they are
        in the next state's window.
        """
        written = self._complete()
        if self.skipped is None:
            return written
        wanted = ~self.delay(self.skipped[..., None, None])[..., 0, 0]
        return wanted if written is None else written & wanted

    def in_full(self, begin: int, end: int) -> bool:
        """Whether the delayed grid's steps `begin … end` are written as a whole, and every query of them has a full window
        and a memory that holds something, so that no mask is needed. Where the device, or the shapes of a graph, would
        have to be asked, the answer is no."""
        if self.source is not None or self.skipped is not None or torch.compiler.is_compiling():
            return False
        kept, complete = self.local_segments, (self.seen + self.tokens) // self.segment_length - self.first
        return begin >= kept and (begin > kept or self.holding) and end <= complete

    def _complete(self) -> Tensor | None:
        places = torch.arange(self.segments, device=self.tokens_seen.device)
        if self.source is None:
            stop = (self.seen + self.tokens) // self.segment_length - self.first
            if isinstance(stop, int) and stop == self.segments and not self.local_segments:
                return None
            kept = (places >= self.local_segments) & (places < stop)
            return kept[None, :, None].expand(1, self.segments, self.slots)
        last = self.document[:, -1:]
        current = self.tokens_seen.unsqueeze(1) // self.segment_length + last  # grid index of the next token's segment
        complete = (self.document[:, :-1] != last) | (places < current - self.local_segments)
        filled = (self.source >= 0).unflatten(1, (self.segments, self.slots)) & complete.unsqueeze(-1)
        return self.delay(filled[..., None, None])[..., 0, 0]

    def borders(self, start: int, stop: int) -> Borders | None:
        """Where the memory starts anew among the delayed grid's steps `start … stop`; `None` without packed documents."""
        if not self.packed:
            return None
        kept = self.local_segments
        reading = self.document[:, start : stop + 1]
        steps = torch.arange(start, stop + 1, device=reading.device)
        writing = self.document[:, (steps[:-1] - kept).clamp(min=0)]
        inside = (writing.unsqueeze(1) == reading.unsqueeze(2)) & (steps[:-1] < steps[:, None]) & (steps[:-1] >= kept)
        continued = (reading == reading[:, :1]).unsqueeze(-1)
        return Borders(torch.cat([continued, ~continued, inside], -1), reading[:, 1:] == reading[:, :-1])

    @property
    def order(self) -> tuple[Tensor, Tensor]:
        """Indexed form: `[batch, tokens]`, which of its row's real tokens each is (that of padding means nothing, but lies
        in range), and `[batch, tokens]`, in which column the row's r-th real token stands (0 where there are fewer)."""
        # A graph cannot take the lock of Python 3.11's cached_property, and finds by itself what was computed before
        return self._new_order() if torch.compiler.is_compiling() else self._kept_order

    @functools.cached_property
    def _kept_order(self) -> tuple[Tensor, Tensor]:
        return self._new_order()

    def _new_order(self) -> tuple[Tensor, Tensor]:
        rank = (self.real.cumsum(1) - 1).clamp(min=0)
        columns = torch.arange(self.tokens, device=self.real.device).expand(self.batch, self.tokens)
        place = torch.zeros(self.batch, self.tokens + 1, dtype=torch.long, device=self.real.device)
        # One place more takes the padding, cut off again
        place = place.scatter(1, torch.where(self.real, rank, self.tokens), columns)
        return rank, place[:, : self.tokens]

    def _window_target(self) -> Tensor:
        """In which slot of the grid each slot of the carried window lies: its own place, −1 where it is empty."""
        places = torch.arange(self.carried, device=self.source.device)
        return torch.where(self.source[:, : self.carried] >= 0, places, -1)


def pad_to(grid: Tensor, rows: int) -> Tensor:
    """`[batch, rows given, …]` with zeros behind, to so many rows."""
    missing = rows - grid.shape[1]
    if isinstance(missing, int) and missing == 0:  # where torch.export leaves the length open, it has to be padded anyhow
        return grid
    return pad(grid, (0, 0) * (grid.dim() - 2) + (0, missing))
