"""The layout of a decoding step: one new token for every row, each at its own place in its window."""

from dataclasses import dataclass

import torch
from torch import Tensor

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


def step_layout(state: InfiniState, seen: list[int], position_ids: Tensor | None, length: int, kept: int) -> StepLayout:
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
    return StepLayout(
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
