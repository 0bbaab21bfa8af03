"""The layout of a decoding step: one new token for every row, each at its own place in its window."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .gather import pad
from .state import InfiniState


@dataclass(frozen=True)
class StepLayout:
    """Where the one new token of each row goes; made once per forward and shared by the layers.

    Attributes:
        segment_length: `L`; local_segments: `w`.
        rows: numbers of the rows whose token is no padding; slots: for each of them, the window slot of its token.
        begin, end: the part of the window that any row sees.
        visible: `[batch, 1, 1, end - begin]` bool, what each row sees of it; `None`: all of it.
        filled: `[batch, 1, 1]` bool, whether the memory holds any token of the row's document.
        leaving: rows whose segment is complete with this token; those of them that push a segment out of the window into
            the memory are `compressing`. Both are lists of row numbers.
        skipped: `[batch, (w + 1) * L]` bool, which tokens of the window, this one among them, never reach the memory;
            `None`: all do. next_skipped: the same for the next state's window.
        positions: `[batch, 1]`; tokens_seen, last_position, memory_tokens: `[batch]`, after this token.
        real: `[batch, 1]` bool, whether the token is no padding; `None`: every token is real.
        restart: `[batch, 1]` bool, whether the token begins a document; `None`: none does.
    """

    segment_length: int
    local_segments: int
    rows: Tensor
    slots: Tensor
    begin: int
    end: int
    visible: Tensor | None
    filled: Tensor
    leaving: list[int]
    compressing: list[int]
    positions: Tensor
    tokens_seen: Tensor
    last_position: Tensor
    memory_tokens: Tensor
    skipped: Tensor | None = None
    next_skipped: Tensor | None = None
    real: Tensor | None = None
    restart: Tensor | None = None

    @property
    def order(self) -> tuple[Tensor, Tensor]:
        """As [`SegmentLayout.order`], for one token in each row."""
        first = torch.zeros_like(self.positions)
        return first, first

    def opened(self, state: InfiniState) -> InfiniState:
        """The state that the rows' tokens go on from: no row begins a document here."""
        return state

    def put(self, window: Tensor, new: Tensor, in_place: bool) -> Tensor:
        """The window, `[batch, heads, (w + 1) * L, dim]`, with the new tokens `[batch, heads, 1, dim]` in their slots;
        `in_place`: written into the given one where that may be."""
        # The window of an initial state is one zero seen many times; one made in inference mode may be written only there.
        in_place = in_place and window.is_contiguous() and (torch.is_inference_mode_enabled() or not window.is_inference())
        window = window if in_place else window.clone(memory_format=torch.contiguous_format)
        new = new[:, :, 0] if self.real is None else new[self.rows, :, 0]
        window[self.rows, :, self.slots] = new.to(window.dtype)
        return window

    def shift(self, window: Tensor) -> Tensor:
        """Moves the window, `[batch, heads, (w + 1) * L, dim]`, of the rows that completed a segment one segment on."""
        if not self.leaving:
            return window
        if len(self.leaving) == len(window):
            return pad(window[:, :, self.segment_length :], (0, 0, 0, self.segment_length))
        rows = torch.tensor(self.leaving, device=window.device)
        return window.index_copy(0, rows, pad(window[rows, :, self.segment_length :], (0, 0, 0, self.segment_length)))


@dataclass(frozen=True)
class TensorStep(StepLayout):
    """The step in a graph of torch.compile, where nothing can be asked of the device: one graph does for every token.

    What [`StepLayout`] knows as numbers are tensors here, and rows that are padding or begin a document belong to it, too.

    Attributes:
        leaving, compressing: `[batch]` bool. begin, end: all of the window; visible always says what is seen.
        here: `[batch, 1, (w + 1) * L, 1]` bool, the slot that the row's token takes; none for padding.
    """

    here: Tensor | None = None

    def opened(self, state: InfiniState) -> InfiniState:
        """The state with an empty window, and the memory that documents start from, in the rows that begin one."""
        if self.restart is None:
            return state
        begins = self.restart[:, :, None, None]

        def emptied(window):
            return None if window is None else window.masked_fill(begins, 0)

        if state.start_memory is None:
            memory, normaliser = emptied(state.memory), state.normaliser.masked_fill(begins[..., 0], 0)
        else:
            memory = torch.where(begins, state.start_memory.to(state.memory.dtype), state.memory)
            normaliser = torch.where(begins[..., 0], state.start_normaliser.to(state.memory.dtype), state.normaliser)
        return replace(
            state,
            memory=memory,
            normaliser=normaliser,
            local_key=emptied(state.local_key),
            local_value=emptied(state.local_value),
            local_memory_key=emptied(state.local_memory_key),
        )

    def put(self, window: Tensor, new: Tensor, in_place: bool) -> Tensor:
        return torch.where(self.here, new.to(window.dtype), window)

    def shift(self, window: Tensor) -> Tensor:
        moved = pad(window[:, :, self.segment_length :], (0, 0, 0, self.segment_length))
        return torch.where(self.leaving[:, None, None, None], moved, window)


def step_layout(
    state: InfiniState,
    seen: list[int],
    real: Tensor | None,
    position_ids: Tensor | None,
    memory_mask: Tensor | None,
    length: int,
    kept: int,
) -> StepLayout:
    """The layout of one token per row that goes on with the row's document, or is padding (`real` `[batch, 1]` bool; `None`:
    none is); `seen` is `state.tokens_seen` as a list."""
    device = state.tokens_seen.device
    rows = list(range(len(seen))) if real is None else real[:, 0].nonzero()[:, 0].tolist()
    added = 1 if real is None else real[:, 0].long()
    slots = [kept * length + count % length for count in seen]
    begins = [max(0, kept - count // length) * length for count in seen]
    begin, end = min(begins), max(slots) + 1
    slot = torch.tensor(slots, device=device)
    visible = None
    if len(set(seen)) > 1:
        places = torch.arange(begin, end, device=device)
        visible = (places >= torch.tensor(begins, device=device)[:, None]) & (places <= slot[:, None])
        visible = visible[:, None, None]
    leaving = [row for row in rows if (seen[row] + 1) % length == 0]
    compressing = [row for row in leaving if seen[row] // length >= kept]
    last_position = state.last_position + 1 if position_ids is None else position_ids[:, 0].expand(len(seen)).long()
    rows = torch.tensor(rows, dtype=torch.long, device=device)
    slot = slot[rows]
    skipped = None
    if memory_mask is not None or state.local_skipped is not None:
        if state.local_skipped is None:
            skipped = torch.zeros(len(seen), (kept + 1) * length, dtype=torch.bool, device=device)
        else:
            skipped = state.local_skipped.clone()
        skipped[rows, slot] = torch.zeros_like(rows, dtype=torch.bool) if memory_mask is None else ~memory_mask[rows, 0]
    memory_tokens = state.memory_tokens
    if compressing:
        compress = torch.tensor([row in compressing for row in range(len(seen))], device=device)
        memory_tokens = _after_compressing(memory_tokens, compress, skipped, length)
    layout = StepLayout(
        segment_length=length,
        local_segments=kept,
        rows=rows,
        slots=slot,
        begin=begin,
        end=end,
        visible=visible,
        filled=(state.memory_tokens > 0)[:, None, None],
        leaving=leaving,
        compressing=compressing,
        positions=state.tokens_seen.unsqueeze(1),
        tokens_seen=state.tokens_seen + added,
        last_position=last_position if real is None else torch.where(real[:, 0], last_position, state.last_position),
        memory_tokens=memory_tokens,
        skipped=skipped,
        real=real,
    )
    return _with_next_skipped(layout)


def tensor_step(
    state: InfiniState,
    real: Tensor | None,
    restart: Tensor | None,
    position_ids: Tensor | None,
    memory_mask: Tensor | None,
    length: int,
    kept: int,
) -> TensorStep:
    """The layout of one token per row for a graph; `real`, `restart` and `memory_mask`: `[batch, 1]` bool or `None`."""
    seen, held = state.tokens_seen, state.memory_tokens
    if real is not None or restart is not None:  # whoever reads one of them reads both
        real = torch.ones_like(restart) if real is None else real
        restart = torch.zeros_like(real) if restart is None else restart
        seen, held = (count.masked_fill(restart[:, 0], 0) for count in (seen, held))
    segment, slot = seen // length, kept * length + seen % length
    places = torch.arange((kept + 1) * length, device=seen.device)
    here = places == slot[:, None]
    visible = (places >= (kept - segment).clamp(min=0)[:, None] * length) & (places <= slot[:, None])
    after = seen + 1
    leaving = after % length == 0
    last_position = state.last_position + 1 if position_ids is None else position_ids[:, 0].expand(len(seen)).long()
    if real is not None:
        here, leaving = here & real, leaving & real[:, 0]
        after = torch.where(real[:, 0], after, seen)
        last_position = torch.where(real[:, 0], last_position, state.last_position)
    compressing = leaving & (segment >= kept)
    skipped = None
    if memory_mask is not None or state.local_skipped is not None:
        skipped = torch.zeros_like(here) if state.local_skipped is None else state.local_skipped
        if restart is not None:
            skipped = skipped.masked_fill(restart, False)
        new = torch.zeros_like(here) if memory_mask is None else ~memory_mask.expand_as(here)
        skipped = torch.where(here, new, skipped)
    layout = TensorStep(
        segment_length=length,
        local_segments=kept,
        rows=torch.arange(len(seen), device=seen.device),
        slots=slot,
        begin=0,
        end=len(places),
        visible=visible[:, None, None],
        filled=(held > 0)[:, None, None],
        leaving=leaving,
        compressing=compressing,
        positions=seen.unsqueeze(1),
        tokens_seen=after,
        last_position=last_position,
        memory_tokens=_after_compressing(held, compressing, skipped, length),
        skipped=skipped,
        here=here[:, None, :, None],
        real=real,
        restart=restart,
    )
    return _with_next_skipped(layout)


def _after_compressing(held: Tensor, compressing: Tensor, skipped: Tensor | None, length: int) -> Tensor:
    """`[batch]`: how many tokens the memory holds, after `held` before, when the rows that are `compressing` `[batch]` bool
    have written the oldest segment of their window, of which some tokens may be `skipped`."""
    return held + compressing * (length if skipped is None else (~skipped[:, :length]).sum(1))


def _with_next_skipped(layout: StepLayout) -> StepLayout:
    if layout.skipped is None:
        return layout
    return replace(layout, next_skipped=layout.shift(layout.skipped[:, None, :, None])[:, 0, :, 0])
