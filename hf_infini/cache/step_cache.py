"""What compiled steps of `generate` read and write: tensors that stay where they are. CUDA graphs
know addresses only."""

import weakref
from collections import defaultdict
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache

from ..ops.backends.step import with_segments_complete
from ..ops.keeping import SCORES
from ..ops.layout.step import segment_border
from ..ops.rules import rule_of
from ..options import first_layers
from .cache import InfiniCache, text_after

# the same tensors in all layers of a window
SHARED = ("tokens_seen", "last_position", "memory_tokens", "local_skipped")


class StepCache(InfiniCache):
    """Holds the states of one cache at a time. A model has one, so that the graph of one generation
    serves the next; a cache of other shapes gets new tensors. A call with it is one real token for
    every row, and writes into them. A complete segment is left to `end_step`, outside of the graph;
    the host waits for the device only where a cache moves in."""

    completes_segments = False

    def __init__(self, config: PreTrainedConfig):
        super().__init__(config)
        self._holder: Any = lambda: None  # a weak reference to the cache whose states these are
        self._steps = 0  # since it has moved in
        # after how many steps, modulo L, which rows complete a segment
        self._borders: dict[int, Tensor] = {}

    def is_for(self, config: PreTrainedConfig) -> bool:
        """Whether a model's `config` is the one that this was made for; the model may have been
        patched again."""
        return self._config is config and self.windows == config.windows

    def begin_step(self, cache: InfiniCache) -> bool:
        """Moves the states of a cache in, if they are not here. False while a row lacks sinks,
        which a compiled step does not look for. A step that fails leaves the cache `in_step`."""
        if cache.in_step:
            cache.check_finished()
        pairs = [*zip(self.layers, cache.layers, strict=True)]
        here = self._holder() is cache and all(own.state is layer.state for own, layer in pairs)
        cache.in_step = here or self._move_in(cache, pairs)
        return cache.in_step

    def _move_in(self, cache: InfiniCache, pairs: list[tuple[Any, Any]]) -> bool:
        """Takes the states of a cache, by `pairs` of own layers and the cache's; the one that was
        here gets copies."""
        length, sinks = self._config.segment_length, self._config.sink_tokens
        if cache.state is None or int(cache.state.tokens_seen.min()) < sinks:
            return False
        if self._holder() is not cache:
            self.release(self._holder())
        for _, layer in pairs:  # a graph cannot see that no token is special
            if self._config.mask_special_tokens and layer.state.local_skipped is None:
                nothing = torch.zeros_like(layer.state.local_key[:, 0, :, 0], dtype=torch.bool)
                layer.state = layer.state.having(local_skipped=nothing)
        if _signatures(self.tensors()) != _signatures(cache.tensors()):
            self.text, shared = (
                {name: _static_like(tensor) for name, tensor in cache.text.items()},
                defaultdict(dict),
            )
            for own, _ in pairs:
                own.state = None  # freed before there are new ones
            for (own, layer), window in zip(pairs, self.windows.values(), strict=True):
                own.state = layer.state.map(_static_like).having(**shared[window])
                shared[window] = {name: getattr(own.state, name) for name in SHARED}
        write_into(self.tensors(), cache.tensors())
        for own, layer in pairs:
            layer.state = own.state
        cache.text, self._holder, self._steps = dict(self.text), weakref.ref(cache), 0
        to_border = -pairs[0][0].state.tokens_seen % length
        self._borders = {
            steps: (to_border == steps).nonzero().squeeze(1)
            for steps in to_border.unique().tolist()
        }
        return True

    def end_step(self, cache: InfiniCache) -> None:
        """After the call of a step: counts it, and writes the segments that rows have completed."""
        self._steps += 1
        for layer in cache.layers:
            layer.columns += 1
        length = self._config.segment_length
        rows = self._borders.get(self._steps % length)
        if rows is not None:
            config = self._config
            ways = rule_of(config), SCORES[config.keep_score]
            borders = {
                window: segment_border(self.layers[layer].state, window, rows)
                for window, layer in first_layers(self.windows).items()
            }
            for layer, window in self.windows.items():
                state, (leaving, memory_tokens, skipped) = self.layers[layer].state, borders[window]
                new = with_segments_complete(*ways, state, window, rows, leaving)
                new = new.having(memory_tokens=memory_tokens, local_skipped=skipped)
                write_into(state.tensors(), new.tensors())
        cache.in_step = False

    def release(self, cache: InfiniCache | None) -> None:
        """Gives this cache, if its states are here, tensors of its own, which no later step writes
        into."""
        if cache is not None and self._holder() is cache:
            cache._map(Tensor.clone)
            self._holder = lambda: None

    def advance_layers(self, of_call: Cache, tokens: int) -> None:
        for layer, called in zip(self.layers, cast(Any, of_call).layers, strict=True):
            write_into(layer.state.tensors(), called.left[0].tensors())

    def note_text(self, ids: Tensor) -> None:
        write_into(self.text, text_after(self.text, ids))


def write_into(old: dict[str, Tensor], new: dict[str, Tensor]) -> None:
    """Copies the tensors `new` into those of the same names in `old`, where they are others."""
    for name, tensor in new.items():
        if tensor is not old[name]:
            old[name].copy_(tensor)


def _static_like(tensor: Tensor) -> Tensor:
    """A tensor of the same kind, which a CUDA graph may write into."""
    # what is made within inference mode could not be written into outside of it later
    with torch.inference_mode(False):
        made = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    torch._dynamo.mark_static_address(made)
    return made


def _signatures(tensors: dict[str, Tensor]) -> dict[str, tuple]:
    return {name: (tensor.shape, tensor.dtype, tensor.device) for name, tensor in tensors.items()}
