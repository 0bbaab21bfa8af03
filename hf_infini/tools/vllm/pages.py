"""A layer's state as a page of vLLM's cache: bytes of a size that never changes."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...cache.files import first_states
from ...cache.step_cache import SHARED
from ...ops.state import InfiniState


class Page:
    """What a page holds of one request in one layer: the tensors of its [`InfiniState`] that have
    numbers, those of wide dtypes first, so that each begins at a multiple of its own width."""

    def __init__(self, first: InfiniState, skips: bool):
        """`first`: the state before the first token, of one row, of which only shapes and dtypes
        are read; `skips`: whether some tokens may stay out of the memory."""
        if skips:
            places = first.local_key.shape[2]
            skipped = torch.zeros(1, places, dtype=torch.bool, device=first.local_key.device)
            first = first.having(local_skipped=skipped)
        self.first = first
        held = {name: tensor for name, tensor in first.tensors().items() if tensor.numel()}
        self.held = dict(sorted(held.items(), key=lambda item: -item[1].itemsize))

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of its tensors, in order."""
        return tuple(tuple(tensor.shape[1:]) for tensor in self.held.values())

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """Of its tensors, in order."""
        return tuple(tensor.dtype for tensor in self.held.values())

    @property
    def nbytes(self) -> int:
        """Bytes of a page, with those at its end after which the next one begins at a multiple of
        every width."""
        held = sum(tensor.numel() * tensor.itemsize for tensor in self.held.values())
        widest = max(tensor.itemsize for tensor in self.held.values())
        return -(-held // widest) * widest

    def read(self, views: Sequence[Tensor], pages: Tensor | slice) -> InfiniState:
        """The state of the requests in these pages. `views`: of all pages, for each tensor,
        `[pages, …]`, as its shape; `pages`: [`places`]. Of a slice nothing is copied but what the
        layers share, which must last until they all have written."""
        taken = {name: view[pages] for name, view in zip(self.held, views, strict=True)}
        taken |= {name: taken[name].clone() for name in SHARED if name in taken}
        first = next(iter(taken.values()))
        empty = {
            name: tensor.new_empty((len(first), *tensor.shape[1:]), device=first.device)
            for name, tensor in self.first.tensors().items()
            if name not in taken
        }
        return self.first.having(**taken, **empty)

    def write(self, views: Sequence[Tensor], pages: Tensor | slice, state: InfiniState) -> None:
        """Puts the `state` of requests into their pages; `views` and `pages` as of [`read`]."""
        for name, view in zip(self.held, views, strict=True):
            tensor = getattr(state, name)
            if tensor is None:  # `local_skipped` of a state that has skipped no token
                tensor = view.new_zeros(())
            elif isinstance(pages, slice) and tensor.data_ptr() == view[pages].data_ptr():
                continue  # it was written in place
            view[pages] = tensor


def places(numbers: list[int], in_place: bool, device: torch.device) -> Tensor | slice:
    """Where pages of these `numbers` are: a slice, if they lie side by side and the call may write
    into them (`in_place`), or a tensor of the numbers on `device`."""
    first, count = numbers[0], len(numbers)
    if in_place and numbers == [*range(first, first + count)]:
        return slice(first, first + count)
    return torch.tensor(numbers, device=device)


def pages_of(config: Any, dtype: torch.dtype) -> dict[int, Page]:
    """The pages of a model's layers with a memory, by their numbers. `config`: of the model;
    `dtype`: of its weights."""
    return {
        layer: Page(first, config.mask_special_tokens)
        for layer, first in first_states(config, 1, dtype).items()
    }
