"""The layout of a decoding step: one new token for every row, each at its own place in its window."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from .state import InfiniState


@dataclass(frozen=True)
class StepLayout:
    """Where the one new token of each row goes; made once per forward and shared by the layers.

    Attributes:
        segment_length: `L`; local_segments: `w`.
        rows: `[batch]`, 0 … batch − 1; slots: `[batch]`, the window slot of each row's token.
        begin, end: the part of the window that any row sees.
        visible: `[batch, 1, 1, end - begin]` bool, what each row sees of it; `None`: all of it.
        filled: `[batch, 1, 1]` bool, whether anything has reached the memory yet.
        leaving: rows whose segment is complete with this token; those of them that push a segment out of the window into
            the memory are `compressing`. Both are lists of row numbers.
        skipped: `[batch, (w + 1) * L]` bool, which tokens of the window, this one among them, never reach the memory;
            `None`: all do. next_skipped: the same for the next state's window.
        positions: `[batch, 1]`; tokens_seen, last_position: `[batch]`, after this token.
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
    skipped: Tensor | None = None
    next_skipped: Tensor | None = None

    def shift(self, window: Tensor) -> Tensor:
        """Moves the window, `[batch, heads, (w + 1) * L, dim]`, of the rows that completed a segment one segment on."""
        if not self.leaving:
            return window
        if len(self.leaving) == len(self.rows):
            return F.pad(window[:, :, self.segment_length :], (0, 0, 0, self.segment_length))
        rows = torch.tensor(self.leaving, device=window.device)
        return window.index_copy(0, rows, F.pad(window[rows, :, self.segment_length :], (0, 0, 0, self.segment_length)))


def step_layout(
    state: InfiniState,
    seen: list[int],
    position_ids: Tensor | None,
    memory_mask: Tensor | None,
    length: int,
    kept: int,
) -> StepLayout:
    """The layout of one real token per row that goes on with the row's document; `seen` is `state.tokens_seen` as a list."""
    device = state.tokens_seen.device
    slots = [kept * length + count % length for count in seen]
    begins = [max(0, kept - count // length) * length for count in seen]
    begin, end = min(begins), max(slots) + 1
    slot = torch.tensor(slots, device=device)
    visible = None
    if len(set(seen)) > 1:
        places = torch.arange(begin, end, device=device)
        visible = (places >= torch.tensor(begins, device=device)[:, None]) & (places <= slot[:, None])
        visible = visible[:, None, None]
    leaving = [row for row, count in enumerate(seen) if (count + 1) % length == 0]
    layout = StepLayout(
        segment_length=length,
        local_segments=kept,
        rows=torch.arange(len(seen), device=device),
        slots=slot,
        begin=begin,
        end=end,
        visible=visible,
        filled=torch.tensor([count // length > kept for count in seen], device=device)[:, None, None],
        leaving=leaving,
        compressing=[row for row in leaving if seen[row] // length >= kept],
        positions=state.tokens_seen.unsqueeze(1),
        tokens_seen=state.tokens_seen + 1,
        last_position=state.last_position + 1 if position_ids is None else position_ids[:, 0].expand(len(seen)).long(),
    )
    if memory_mask is None and state.local_skipped is None:
        return layout
    if state.local_skipped is None:
        skipped = torch.zeros(len(seen), (kept + 1) * length, dtype=torch.bool, device=device)
    else:
        skipped = state.local_skipped.clone()
    skipped[layout.rows, slot] = False if memory_mask is None else ~memory_mask[:, 0]
    return replace(layout, skipped=skipped, next_skipped=layout.shift(skipped[:, None, :, None])[:, 0, :, 0])
