"""The layout of a call: which token is in which segment and slot. [`segment_layout`] in build.py makes it once per
forward, and the layers share it; they see one interface, [`Layout`].

    token t of a document → segment t // L, slot t mod L

The *grid* of a row is its list of segments in order, each with `slots` places. Tokens fill the slots of a segment from the
first on, so a causal mask inside the segment is all that padding needs. A call that continues a state begins its grid with
the segments of the window: [`GridLayout`]. Its form [`PlainLayout`], where rows agree and hold one document each, is a
reshape; [`IndexedLayout`], for padding, packed documents and rows of different lengths, a gather. One more token for every
row needs no grid: [`StepLayout`] in step.py.
"""

import functools
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..memory import Borders
from ..state import InfiniState
from ..tensors import gather, pad, pad_to


class LayoutInputs(NamedTuple):
    """What a layout is made of: the arguments of [`segment_layout`], with masks as bool and `real` for `attention_mask`, and
    the [`restarts`] of its positions; `read_back`: whether sizes may follow from values."""

    batch: int
    tokens: int
    segment_length: int
    local_segments: int
    sink_tokens: int
    kept_tokens: int
    real: Tensor | None
    position_ids: Tensor | None
    restart: Tensor | None
    memory_mask: Tensor | None
    state: InfiniState | None
    device: torch.device | None
    read_back: bool = False


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What is known of every call.

    Attributes:
        segment_length: `L`, in tokens; local_segments: `w`; sink_tokens: `S`; kept_tokens: `K`.
        positions: `[batch or 1, tokens]`, number of each token within its document.
        tokens_seen, last_position, memory_tokens: `[batch]` after this call, as in [`InfiniState`].
        real, restart: `[batch, tokens]` bool, which tokens are no padding, and which begin a document; `None`: all, none.
        next_skipped: `[batch, places]` bool, which tokens of the next state's window `memory_mask` keeps out of the
            memory; `None`: none.
    """

    segment_length: int
    local_segments: int
    sink_tokens: int = 0
    kept_tokens: int = 0
    positions: Tensor
    tokens_seen: Tensor
    last_position: Tensor
    memory_tokens: Tensor | None = None
    real: Tensor | None = None
    restart: Tensor | None = None
    next_skipped: Tensor | None = None

    @property
    def window_sizes(self) -> tuple[int, int, int, int]:
        """As the functions of windows take it."""
        return self.segment_length, self.local_segments, self.sink_tokens, self.kept_tokens

    @property
    def places(self) -> int:
        """Places of a window: the sinks, the kept tokens, and the segments that a query sees."""
        return self.ahead + (self.local_segments + 1) * self.segment_length

    @property
    def ahead(self) -> int:
        """Places before those of the segments."""
        return self.sink_tokens + self.kept_tokens

    @property
    def kept_places(self) -> slice:
        return slice(self.sink_tokens, self.ahead)

    def to(self, device: torch.device, non_blocking: bool = False) -> "Layout":
        """The layout on another device: accelerate asks for it where a model's layers are on several."""
        if torch.device(device) == self.positions.device:
            return self
        moved = self.__dict__.setdefault("_moved", {})
        if device not in moved:
            to = functools.partial(Tensor.to, device=device, non_blocking=non_blocking)
            moved[device] = replace(self, **{k: to(value) for k, value in vars(self).items() if isinstance(value, Tensor)})
        return moved[device]

    @property
    def order(self) -> tuple[Tensor, Tensor]:
        """Where `real` is given: `[batch, tokens]`, which of its row's real tokens each is (that of padding means nothing,
        but is in range), and `[batch, tokens]`, in which column the row's r-th real token is (0 where there are fewer)."""
        # A graph cannot take the lock of Python 3.11's cached_property, and torch.compile reuses equal results anyway
        return self._new_order() if torch.compiler.is_compiling() else self._cached_order

    @functools.cached_property
    def _cached_order(self) -> tuple[Tensor, Tensor]:
        return self._new_order()

    def _new_order(self) -> tuple[Tensor, Tensor]:
        if (real := self.real) is None:
            raise ValueError("the order of a row's tokens is that of its columns where no token is padding.")
        batch, tokens = real.shape
        rank = (real.cumsum(1) - 1).clamp(min=0)
        columns = torch.arange(tokens, device=real.device).expand(batch, tokens)
        place = torch.zeros(batch, tokens + 1, dtype=torch.long, device=real.device)
        # An extra place takes the padding, and is cut off
        place = place.scatter(1, torch.where(real, rank, tokens), columns)
        return rank, place[:, :tokens]


class Group(NamedTuple):
    """The segments `begin … end` of a grid, and what reading and writing them needs.

    The memory takes in a segment when it leaves the window, `w` segments later: `written` and `borders` are of the grid
    delayed by so many.

    Attributes:
        mask: `[B or 1, s, C, W]` bool, which slots of its window (sinks first) each query sees; `None`: a full one up to its
            own slot. Kept tokens are left out.
        kept: `[B, s]`, how many tokens are kept when each segment is read; `None`: none, or as many as can be.
        written: `[B or 1, s, C]` bool, which slots of the delayed grid leave the window: the memory takes them in, but for
            kept tokens; `None`: all.
        filled: `[B, s]` bool, whether the memory holds any token of the document when a segment reads it; `None`: it does.
        borders: where the memory starts again among the delayed segments; `None` without packed documents.
    """

    begin: int
    end: int
    mask: Tensor | None = None
    kept: Tensor | None = None
    written: Tensor | None = None
    filled: Tensor | None = None
    borders: Borders | None = None


@dataclass(frozen=True, kw_only=True)
class GridLayout(Layout):
    """A layout in a grid: [`PlainLayout`] or [`IndexedLayout`], which say how tokens get there and back.

    Attributes:
        batch, tokens: of the call.
        segments: segments in the grid; slots: places in each (L, or fewer where no segment has more tokens).
        carried: tokens of the state's window in the grid: in plain form the count that every row has, in indexed form all
            slots (0 without a state). Sinks are in the grid only as tokens of their segment.
        skipped: `[batch, segments, slots]` bool, which tokens never reach the memory; `None`: all do.
        left: `[batch, segments + 1]`, int64: how many tokens of its document have left the window when each segment, and
            when the row's next token, is read: they are in the memory, or kept; `None`: not counted yet.
        most_kept: how many tokens are kept at most when a segment is read.
        document: `[batch or 1, segments + 1]`: grid index where the document of each segment begins (that of a continued
            one may be negative); the last column is that of the row's next token.
        packed: whether a row holds more than one document.
    """

    batch: int
    tokens: int
    segments: int
    slots: int
    carried: int
    skipped: Tensor | None = None
    document: Tensor
    left: Tensor | None = None
    most_kept: int = 0
    packed: bool = False

    @abstractmethod
    def to_grid(self, new: Tensor, window: Tensor | None) -> Tensor:
        """`new [batch, heads, tokens, dim]` and the state's window `[batch, heads, places, dim]` (`None` for queries: zeros)
        as `[batch, segments, slots, heads, dim]`."""

    @abstractmethod
    def from_grid(self, grid: Tensor) -> Tensor:
        """`[batch, segments, slots, heads, dim]` back to the new tokens, `[batch, heads, tokens, dim]`; padding is zero."""

    @abstractmethod
    def next_window(self, new: Tensor, window: Tensor) -> Tensor:
        """The window of the next state from this call's tokens and the state's window, both `[batch, heads, …, dim]`; what
        is kept is put into it later."""

    @abstractmethod
    def sinks(self, grid: Tensor, window: Tensor) -> Tensor:
        """The sinks that segments see whose window is beyond them, `[batch, segments or 1, S, heads, dim]`, from the grid
        and the state's window."""

    @abstractmethod
    def borders(self, begin: int, end: int) -> Borders | None:
        """Where the memory starts again among the delayed grid's segments `begin … end`; `None` without packed documents."""

    @abstractmethod
    def _is_steady(self, begin: int, end: int) -> bool:
        """Whether the delayed segments `begin … end` are written as a whole, and every query of them has a full window and
        a memory that holds something, so that no mask is needed. Where values would have to be read back from the device,
        or from the shapes of a graph, the answer is no."""

    @abstractmethod
    def _leaving(self) -> Tensor | None:
        """`written`, before sinks and skipped tokens are removed: the tokens of segments that leave the window."""

    @property
    @abstractmethod
    def carried_from(self) -> int:
        """The place of the state's window that holds the first of the `carried` tokens."""

    def with_carried(self, window: Tensor, grid: Tensor) -> Tensor:
        """The state's window with what the grid has for the tokens that it carries."""
        begin, end = self.carried_from, self.carried_from + self.carried
        carried = grid.flatten(1, 2)[:, : self.carried].transpose(1, 2)
        return torch.cat([window[:, :, :begin], carried, window[:, :, end:]], 2)

    @property
    def query_places(self) -> slice:
        """Where a segment's slots are in the window of its queries."""
        begin = self.ahead + self.local_segments * self.segment_length
        return slice(begin, begin + self.slots)

    @property
    def key_places(self) -> slice | Tensor:
        """The places of a window's sinks, and of the slots of each of its segments."""
        if self.slots == self.segment_length and not self.kept_tokens:
            return slice(0, self.places)
        places = torch.arange(self.places, device=self.tokens_seen.device)
        segments = places[self.ahead :].unflatten(0, (-1, self.segment_length))[:, : self.slots]
        return torch.cat([places[: self.sink_tokens], segments.flatten()])

    def sink_places(self, kept: Tensor) -> Tensor:
        """`[batch, segments, S]`: as what places the sinks are turned, right before so many kept tokens ([`Group.kept`]): a
        window without a gap is that of a plain model."""
        places = torch.arange(self.sink_tokens, device=self.tokens_seen.device)
        return (self.kept_tokens - kept).unsqueeze(-1) + places

    def groups(self, size: int) -> Iterator[Group]:
        """The grid in groups of so many segments; 0: in one."""
        # Number of each segment within its document
        numbers = torch.arange(self.segments, device=self.tokens_seen.device) - self.document[:, :-1]
        written, left = self.written(), self.left
        for begin in range(0, self.segments, size) if size else (0,):
            end = min(begin + size, self.segments) if size else self.segments
            if self._is_steady(begin, end):
                yield Group(begin, end)
                continue
            here = None if left is None else left[:, begin:end]
            yield Group(
                begin,
                end,
                mask=self._window_mask(numbers[:, begin:end]) if self.local_segments or self.ahead else None,
                kept=None if here is None or not self.kept_tokens else here.clamp(max=self.kept_tokens),
                written=None if written is None else written[:, begin:end],
                filled=None if here is None else here > self.kept_tokens,
                borders=self.borders(begin, end),
            )

    def delayed_numbers(self, begin: int, end: int) -> Tensor:
        """`[batch or 1, segments, slots]`: the numbers, in their document, of the tokens of the delayed segments `begin …
        end`; those of documents that have ended mean nothing."""
        segments = torch.arange(begin, end, device=self.tokens_seen.device) - self.local_segments
        slots = torch.arange(self.slots, device=segments.device)
        return (segments - self.document[:, begin:end]).unsqueeze(-1) * self.segment_length + slots

    def delay(self, grid: Tensor) -> Tensor:
        """The grid as the memory takes it in: `w` segments later, so that a read finds all segments before its window."""
        return pad(grid, (0,) * 6 + (self.local_segments, 0))[:, : self.segments] if self.local_segments else grid

    def written(self) -> Tensor | None:
        """Which slots of the delayed grid reach the memory, `[batch or 1, segments, slots]` bool; `None`: all of them.

        Left out are empty slots, skipped tokens and sinks, and the segments that the next token still sees: they are in the
        next state's window.
        """
        written = self._leaving()
        for kept_out in (self.skipped, self._sink_slots()):
            if kept_out is not None:
                wanted = ~self.delay(kept_out[..., None, None])[..., 0, 0]
                written = wanted if written is None else written & wanted
        return written

    def _sink_slots(self) -> Tensor | None:
        """`[batch or 1, segments, slots]` bool, which slots hold a sink."""
        if not self.sink_tokens:
            return None
        places = torch.arange(max(self.segments, self.slots), device=self.tokens_seen.device)
        first = places[: self.segments] == self.document[:, :-1]
        return first.unsqueeze(-1) & (places[: self.slots] < self.sink_tokens)

    def _window_mask(self, numbers: Tensor) -> Tensor:
        """[`Group.mask`] of segments with these numbers within their documents, `[B or 1, s]`."""
        places = torch.arange((self.local_segments + 1) * self.slots, device=numbers.device)
        # Whether the document has a segment so many before its own
        begun = numbers[..., None, None] >= self.local_segments - places // self.slots
        mask = begun & (places <= places[self.local_segments * self.slots :, None])
        if not self.sink_tokens:
            return mask
        left = numbers[..., None, None] > self.local_segments  # the document's first segment has left the window
        return torch.cat([left.expand(*mask.shape[:-1], self.sink_tokens), mask], -1)


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
            begin = self.carried_from
            old = (
                tokens.new_zeros(self.batch, self.carried, *tokens.shape[2:])
                if window is None
                else window[:, :, begin : begin + self.carried].transpose(1, 2)
            )
            tokens = torch.cat([old, tokens], 1)
        return pad_to(tokens, self.segments * self.slots).unflatten(1, (self.segments, self.slots))

    def from_grid(self, grid: Tensor) -> Tensor:
        return grid.flatten(1, 2)[:, self.carried : self.carried + self.tokens].transpose(1, 2)

    @property
    def carried_from(self) -> int:
        return self.ahead + (self.local_segments - self.seen // self.segment_length + self.first) * self.segment_length

    def next_window(self, new: Tensor, window: Tensor) -> Tensor:
        length, local, sinks = self.segment_length, self.local_segments, self.sink_tokens
        end = self.seen + self.tokens
        first = max(0, end // length - local) * length  # first token that stays, counted in the document
        begin = self.ahead + (local - self.seen // length) * length + first
        old = window[:, :, begin:] if first < self.seen else window[:, :, :0]
        old = old[:, :, : max(0, self.seen - first)]
        tokens = torch.cat([old, new[:, :, max(0, first - self.seen) :]], 2)
        before = self.kept_tokens + max(0, local - end // length) * length
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
        if self.kept_tokens and not self.memory_in_use:
            full = (begin - local) * self.segment_length - self.sink_tokens > self.kept_tokens
            return full and end <= complete
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
        source: `[batch, segments * slots]`, which row of (the window's segments, new tokens) fills the slot; −1: none.
        target: `[batch, tokens]`, the token's slot in the grid; −1: padding.
        window: `[batch, places]`, which row of (window, new tokens) the next state keeps; −1: none.
    """

    source: Tensor
    target: Tensor
    window: Tensor

    def to_grid(self, new: Tensor, window: Tensor | None) -> Tensor:
        tokens = new.transpose(1, 2)
        if self.carried and window is not None:
            tokens = torch.cat([window[:, :, self.ahead :].transpose(1, 2), tokens], 1)
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

    @property
    def carried_from(self) -> int:
        return self.ahead

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
        leaving = self.delay(filled[..., None, None])[..., 0, 0]
        if not self.kept_tokens:
            return leaving
        of, reading = self.documents(0, self.segments)  # what nobody reads any more is not kept, or counted
        return leaving & (of == reading[:, :-1]).unsqueeze(-1)

    def documents(self, begin: int, end: int) -> tuple[Tensor, Tensor]:
        """As [`choose`] takes them: of what the delayed segments `begin … end` write, and of those that read."""
        reading = self.document[:, begin : end + 1]
        places = torch.arange(begin, end, device=reading.device)
        return self.document[:, (places - self.local_segments).clamp(min=0)], reading
