"""The two forms of a [`GridLayout`]: [`PlainLayout`], where the rows agree and hold one document each, is a reshape;
[`IndexedLayout`], for padding, packed documents and rows of different lengths, is a gather."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..memory import Borders
from ..tensors import gather, pad, pad_to
from .base import GridLayout


@dataclass(frozen=True, kw_only=True)
class PlainLayout(GridLayout):
    """One document in every row, all of the same length, without padding.

    Attributes:
        first: number, within the document, of the grid's first segment.
        seen: tokens of the document before this call.
        memory_in_use: whether the memory of every row held any token before the call.
    """

    first: int
    seen: int
    memory_in_use: bool

    def to_grid(self, new: Tensor, window: Tensor | None) -> Tensor:
        tokens = new.transpose(1, 2)
        if self.carried:
            begin = (self.local_segments - self.seen // self.segment_length + self.first) * self.segment_length
            begin += self.sink_tokens
            old = (
                tokens.new_zeros(self.batch, self.carried, *tokens.shape[2:])
                if window is None
                else window[:, :, begin : begin + self.carried].transpose(1, 2)
            )
            tokens = torch.cat([old, tokens], 1)
        return pad_to(tokens, self.segments * self.slots).unflatten(1, (self.segments, self.slots))

    def from_grid(self, grid: Tensor) -> Tensor:
        return grid.flatten(1, 2)[:, self.carried : self.carried + self.tokens].transpose(1, 2)

    def next_window(self, new: Tensor, window: Tensor) -> Tensor:
        length, local, sinks = self.segment_length, self.local_segments, self.sink_tokens
        end = self.seen + self.tokens
        first = max(0, end // length - local) * length  # first token that stays, counted in the document
        begin = sinks + (local - self.seen // length) * length + first
        old = window[:, :, begin:] if first < self.seen else window[:, :, :0]
        old = old[:, :, : max(0, self.seen - first)]
        tokens = torch.cat([old, new[:, :, max(0, first - self.seen) :]], 2)
        before = max(0, local - end // length) * length
        tokens = pad(tokens, (0, 0, before, self.places - sinks - before - tokens.shape[2]))
        if not sinks:
            return tokens
        known = min(self.seen, sinks)
        front = torch.cat([window[:, :, :known], new[:, :, : sinks - known]], 2)
        return torch.cat([pad(front, (0, 0, 0, sinks - front.shape[2])), tokens], 2)

    def sinks(self, grid: Tensor, window: Tensor) -> Tensor:
        known = min(self.seen, self.sink_tokens)
        before = window[:, :, :known].transpose(1, 2).unsqueeze(1).to(grid.dtype)
        front = torch.cat([before, grid[:, :1, known : self.sink_tokens]], 2)
        return pad(front, (0, 0, 0, 0, 0, self.sink_tokens - front.shape[2]))

    def borders(self, begin: int, end: int) -> None:
        """No document begins inside of the grid."""

    def _is_steady(self, begin: int, end: int) -> bool:
        if self.skipped is not None or torch.compiler.is_compiling():
            return False
        local, complete = self.local_segments, (self.seen + self.tokens) // self.segment_length - self.first
        return begin >= local and (begin > local or self.memory_in_use) and end <= complete

    def _leaving(self) -> Tensor | None:
        end = (self.seen + self.tokens) // self.segment_length - self.first
        if isinstance(end, int) and end == self.segments and not self.local_segments:
            return None
        places = torch.arange(self.segments, device=self.tokens_seen.device)
        leaving = (places >= self.local_segments) & (places < end)
        return leaving[None, :, None].expand(1, self.segments, self.slots)


@dataclass(frozen=True, kw_only=True)
class IndexedLayout(GridLayout):
    """Any rows; the methods are those of [`PlainLayout`].

    Attributes:
        source: `[batch, segments * slots]`, which row of (window without sinks, new tokens) fills the slot; −1: none.
        target: `[batch, tokens]`, the token's slot in the grid; −1: padding.
        window: `[batch, S + (w + 1) * L]`, which row of (window, new tokens) the next state keeps; −1: none.
    """

    source: Tensor
    target: Tensor
    window: Tensor

    def to_grid(self, new: Tensor, window: Tensor | None) -> Tensor:
        tokens = new.transpose(1, 2)
        if self.carried and window is not None:
            tokens = torch.cat([window[:, :, self.sink_tokens :].transpose(1, 2), tokens], 1)
            # In which slot of the grid each slot of the carried window lies: its own place, −1 where it has no token
            places = torch.arange(self.carried, device=self.source.device)
            carried = torch.where(self.source[:, : self.carried] == places, places, -1)
            grid = gather(tokens, self.source, torch.cat([carried, self.target], 1))
        else:
            grid = gather(tokens, self._source_of_new(), self.target)
        return grid.unflatten(1, (self.segments, self.slots))

    def from_grid(self, grid: Tensor) -> Tensor:
        return gather(grid.flatten(1, 2), self.target, self._source_of_new()).transpose(1, 2)

    def _source_of_new(self) -> Tensor:
        """`source` counted among the new tokens only."""
        return torch.where(self.source >= self.carried, self.source - self.carried, -1)

    def next_window(self, new: Tensor, window: Tensor) -> Tensor:
        tokens = torch.cat([window, new], 2) if self.carried else new
        index = self.window.clamp(min=0)[:, None, :, None].expand(-1, tokens.shape[1], -1, tokens.shape[3])
        return tokens.gather(2, index).masked_fill((self.window < 0)[:, None, :, None], 0)

    def sinks(self, grid: Tensor, window: Tensor) -> Tensor:
        rows = torch.arange(self.batch, device=grid.device).unsqueeze(1)
        document = self.document[:, :-1]
        first = document.clamp(min=0)
        front = grid[:, :, : self.sink_tokens]
        front = pad(front, (0, 0, 0, 0, 0, self.sink_tokens - front.shape[2]))[rows, first]
        if not self.carried:
            return front
        before = window[:, :, : self.sink_tokens].transpose(1, 2).unsqueeze(1)
        known = (self.source < self.carried).unflatten(1, (self.segments, self.slots))[:, :, : self.sink_tokens]
        known = known[rows, first] | (document < 0).unsqueeze(-1)
        return torch.where(known[..., None, None], before, front)

    def borders(self, begin: int, end: int) -> Borders | None:
        if not self.packed:
            return None
        reading = self.document[:, begin : end + 1]
        places = torch.arange(begin, end + 1, device=reading.device)
        writing = self.document[:, (places[:-1] - self.local_segments).clamp(min=0)]
        inside = (writing.unsqueeze(1) == reading.unsqueeze(2)) & (places[:-1] < places[:, None])
        inside = inside & (places[:-1] >= self.local_segments)
        continued = (reading == reading[:, :1]).unsqueeze(-1)
        return Borders(torch.cat([continued, ~continued, inside], -1), reading[:, 1:] == reading[:, :-1])

    def _is_steady(self, begin: int, end: int) -> bool:
        return False

    def _leaving(self) -> Tensor:
        places = torch.arange(self.segments, device=self.tokens_seen.device)
        last = self.document[:, -1:]
        current = self.tokens_seen.unsqueeze(1) // self.segment_length + last  # grid index of the next token's segment
        complete = (self.document[:, :-1] != last) | (places < current - self.local_segments)
        filled = (self.source >= 0).unflatten(1, (self.segments, self.slots)) & complete.unsqueeze(-1)
        return self.delay(filled[..., None, None])[..., 0, 0]
