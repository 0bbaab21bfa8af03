"""What compiled steps of `generate` read and write: tensors that stay where they are. CUDA graphs know addresses only."""

import weakref
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache

from ..ops.layout.base import WINDOW_SIZES
from ..ops.state import InfiniState
from ..ops.step import segment_border, with_segments_complete
from .cache import TEXT_END, InfiniCache

COUNTS = ("tokens_seen", "last_position", "memory_tokens", "local_skipped")  # the same tensors in all layers


class StepCache(InfiniCache):
    """Holds the states of one cache at a time. A model has one, so that the graph of one generation does for the next; a
    cache of other shapes gets new tensors.

    A call with it is one real token for every row, and writes into the tensors. It leaves a segment that is complete to
    `end_step`, outside of the graph: the host counts in which rows there is one, and waits for the device only where a cache
    moves in.
    """

    completes_segments = False

    def __init__(self, config: PreTrainedConfig):
        super().__init__(config)
        self._holder: Any = lambda: None  # a weak reference to the cache whose states these are
        self._steps = 0  # since it has moved in
        self._borders: dict[int, Tensor] = {}  # after how many steps, modulo L, which rows complete a segment

    def begin_step(self, cache: InfiniCache) -> bool:
        """Moves the states of a cache in, if they are not here; another one gives up the tensors before. False while a row
        lacks sinks, which a compiled step does not look for."""
        pairs: Any = [*zip(self.layers, cache.layers, strict=True)]
        if self._holder() is cache and all(own.state is layer.state for own, layer in pairs):
            return True
        if cache.state is None or int(cache.state.tokens_seen.min()) < self.window[2]:
            return False
        if self._holder() is not cache:
            self.release()
        for _, layer in pairs:  # a graph cannot see that no token is special
            if self._config.mask_special_tokens and layer.state.local_skipped is None:
                nothing = torch.zeros_like(layer.state.local_key[:, 0, :, 0], dtype=torch.bool)
                layer.state = replace(layer.state, local_skipped=nothing)
        if _kinds(self.tensors()) != _kinds(cache.tensors()):
            self.text, counts = {name: _fixed(tensor) for name, tensor in cache.text.items()}, {}
            for own, _ in pairs:
                own.state = None  # freed before there are new ones
            for own, layer in pairs:
                own.state = replace(layer.state.map(_fixed), **counts)
                counts = counts or {name: getattr(own.state, name) for name in COUNTS}
        write_into(self.tensors(), cache.tensors())
        for own, layer in pairs:
            layer.state = own.state
        cache.text, self._holder, self._steps = dict(self.text), weakref.ref(cache), 0
        until = -pairs[0][0].state.tokens_seen % self.window[0]
        self._borders = {steps: (until == steps).nonzero().squeeze(1) for steps in until.unique().tolist()}
        return True

    def end_step(self, layers: Iterable[Any]) -> None:
        """After the call of a step: counts it, and completes segments by the rules of the model's `layers`."""
        self._steps += 1
        for cached in self._holder().layers:
            cached.columns += 1
        length, state, rows = self.window[0], self.state, self._borders.get(self._steps % self.window[0])
        if rows is None or state is None:
            return
        sizes = dict(zip(WINDOW_SIZES, self.window, strict=True))
        border = segment_border(state, sizes, state.tokens_seen % length == 0, rows)
        pairs: Any = zip(self.layers, layers, strict=True)
        for own, layer in pairs:
            new = with_segments_complete(layer.rule, own.state, border).after(border)
            write_into(own.state.tensors(), new.tensors())

    def release(self) -> None:
        """Gives the cache that is here tensors of its own, which no later step writes into."""
        if (holder := self._holder()) is not None:
            holder._map(Tensor.clone, InfiniState.map)
        self._holder = lambda: None

    def advance_layers(self, of_call: Cache, tokens: int) -> None:
        layers: Any = zip(self.layers, of_call.layers, strict=True)
        for layer, called in layers:
            write_into(layer.state.tensors(), called.left[0].tensors())

    def note_text(self, ids: Tensor) -> None:
        end = self.text["text_end"]
        end.copy_(torch.cat([end, ids.to(end)], 1)[:, -TEXT_END:])


def write_into(old: dict[str, Tensor], new: dict[str, Tensor]) -> None:
    """Copies tensors into those of the same names, where they are others."""
    for name, tensor in new.items():
        if tensor is not old[name]:
            old[name].copy_(tensor)


def _fixed(tensor: Tensor) -> Tensor:
    """A tensor of the same kind, which a CUDA graph may write into."""
    with torch.inference_mode(False):  # what is made within it may be written into only there
        made = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    torch._dynamo.mark_static_address(made)
    return made


def _kinds(tensors: dict[str, Tensor]) -> dict[str, tuple]:
    return {name: (tensor.shape, tensor.dtype, tensor.device) for name, tensor in tensors.items()}
