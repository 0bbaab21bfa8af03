"""The cache of `generate()`: one [`InfiniState`] for each layer with memory, so its bytes do not grow with the context."""

import copy
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from ..compat.cache_name import CACHE
from ..compat.peft_layers import without_wrappers
from ..ops.checks import check_kinds
from ..ops.layout.base import Layout
from ..ops.rules import MemoryRule
from ..ops.state import InfiniState, Projections, empty_places
from ..options import check_number
from .contents import fill_with_one_token, find_problem
from .files import MemoryFileError, check_model, describe_model, read_memory_file, write_memory_file
from .text import ReadText, check_rows


class InfiniLayer(CacheLayerMixin):
    """One layer's state between two calls.

    Attributes:
        state: [`InfiniState`], or `None` before the first call. It is safe to keep: once it has been read, the next token is
            written into a copy of its window instead of in place.
        columns: tokens passed so far, padding included (what `generate` counts in).
    """

    def __init__(self):
        super().__init__()
        self._state: InfiniState | None = None
        self._shared = False
        self.columns = 0

    @property
    def state(self) -> InfiniState | None:
        self._shared = True
        return self._state

    @state.setter
    def state(self, state: InfiniState | None) -> None:
        self._state, self._shared = state, True

    def advance(self, state: InfiniState, columns: int) -> None:
        """Takes the state after a call of `columns` tokens."""
        if self._state is None or state.local_key is not self._state.local_key:
            self._shared = False
        self._state = state
        self.columns += columns
        self.is_initialized = True

    def __copy__(self) -> "InfiniLayer":
        """Shares the state; what one of the two reads later does not change the other."""
        self._shared = True
        other = type(self)()
        other.__dict__.update(self.__dict__)
        return other

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the state is made by the first call."""

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs):
        raise TypeError("an InfiniLayer keeps no keys and values to attend to; the attention calls `advance`.")

    def get_seq_length(self) -> int:
        return self.columns

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.columns + query_length, 0

    def reset(self) -> None:
        self.__init__()

    def _map(self, function) -> None:
        if self._state is not None:
            self._state = self._state.map_rows(function)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._map(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._map(lambda tensor: tensor.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._map(lambda tensor: tensor[indices])

    def crop(self, tokens_to_remove: int) -> None:
        raise ValueError(
            "a compressive memory cannot be cropped: what was written into it cannot be taken out again. "
            "Keep a copy of the cache (copy.deepcopy) from before the tokens you may want to undo."
        )

    def offload(self) -> None:
        if self._state is not None:
            self.device = self._state.memory.device
            self._map(lambda tensor: tensor.to("cpu"))

    def prefetch(self) -> None:
        self._map(lambda tensor: tensor.to(getattr(self, "device", tensor.device)))


class StatesOfCall:
    """The states of the layers with memory before and after one call of the model.

    Every layer takes its state from here and leaves the next one here; [`InfiniCache.advance`] takes these over when all
    layers are through. So a call that fails changes nothing in the cache, nor does a layer that gradient checkpointing runs
    a second time.

    Attributes:
        documents: see [`full_attention_mask`], of all columns up to the last of this call.
    """

    def __init__(self, layers: Sequence, documents: Tensor | None = None):
        self.documents = documents
        self._layers = {number: layer for number, layer in enumerate(layers) if isinstance(layer, InfiniLayer)}
        self._before = {number: layer._state for number, layer in self._layers.items()}
        self._after: dict[int, InfiniState] = {}

    def before(self, layer: int) -> InfiniState | None:
        """The state that the layer continues."""
        return self._before[layer]

    def inputs_before(self, inputs: Tensor, recent: Tensor) -> Tensor:
        """What a short convolution needs of the tokens before these `inputs`; `recent`: what the layer's state has."""
        return recent

    def continued(self, state: InfiniState, tokens: Projections, layout: Layout, rule: MemoryRule) -> InfiniState:
        """The state that these tokens of a layer continue; `state`: the one that the layer knows of."""
        return state

    def may_overwrite(self, layer: int) -> bool:
        """Whether a token may be written into the state's own window: nobody has kept it, and no gradient needs it."""
        return not (torch.is_grad_enabled() or self._layers[layer]._shared)

    def leave(self, layer: int, state: InfiniState) -> None:
        """Hands over the state after the call."""
        self._after[layer] = state

    def advance_layers(self, tokens: int) -> None:
        """Gives the layers that have been called their new states."""
        for number, state in self._after.items():
            self._layers[number].advance(state, tokens)


class InfiniCache(Cache):
    """The cache of an [`InfiniGPT2LMHeadModel`]: bounded for layers with memory, growing for those with full attention.

    `generate()` and `model(..., use_cache=True)` make one; pass it back to continue from there. `copy.copy` and
    `copy.deepcopy` give a second one that continues from the same place, in training also in the same graph: gradients go
    back through either to what was read. The second has tensors of its own. `detach` cuts the graph.

    Args:
        config: of the model, which has layers with memory: an [`InfiniGPT2Config`], or a [`CausalMHAConfig`] with
            `attention="infini"`.

    Raises:
        ValueError: the configuration names no layers with memory.
    """

    @check_kinds
    def __init__(self, config: PreTrainedConfig):
        bounded = set(getattr(config, "infini_layers", ()))
        if not bounded:
            raise ValueError(
                f"an InfiniCache is for layers with a compressive memory, and this {type(config).__name__} has none: leave "
                f"{CACHE} out, or pass transformers.DynamicCache(config=model.config)."
            )
        own = [DynamicLayer() for _ in range(config.num_hidden_layers)]
        if len(bounded) < len(own):
            own = DynamicCache(config=config).layers or own  # layers that slide keep their window only
        super().__init__(layers=[InfiniLayer() if i in bounded else layer for i, layer in enumerate(own)])
        self._config, self._window = config, config.window
        self.text = ReadText()

    def __copy__(self) -> "InfiniCache":
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__, layers=[copy.copy(layer) for layer in self.layers], text=copy.copy(self.text))
        return other

    def __deepcopy__(self, memo) -> "InfiniCache":
        other = copy.copy(self)
        for layer in other.layers:
            _map_tensors(layer, Tensor.clone)
        other.text.map_rows(Tensor.clone)
        return other

    def detach(self) -> "InfiniCache":
        """Cuts the graph, in place: what is read from here on has no gradient that goes back to what was read before, and
        what only that gradient needed is freed. Returns the cache itself."""
        for layer in self.layers:
            _map_tensors(layer, Tensor.detach)
        return self

    @property
    def state(self) -> InfiniState | None:
        """The state of the first layer with memory: its tokens_seen and positions hold for all."""
        return self._first_layer.state

    @property
    def _first_layer(self) -> InfiniLayer:
        return next(layer for layer in self.layers if isinstance(layer, InfiniLayer))

    def states(self) -> StatesOfCall:
        """The states for a call of the model."""
        return StatesOfCall(self.layers, self.text.documents)

    def drop_unfinished(self) -> None:
        """Removes the keys and values that a failed call has left in layers of full attention.

        Raises:
            ValueError: it has left some in a sliding layer, which has dropped others for them.
        """
        columns = self.get_seq_length()
        for layer in self.layers:
            if isinstance(layer, DynamicLayer) and layer.get_seq_length() > columns:
                if layer.is_sliding:
                    raise ValueError("a call with this cache has failed halfway: make a new one and read the text again.")
                _map_tensors(layer, lambda tensor: tensor[:, :, :columns])

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns that all layers have read; layers of full attention may hold more, where a call has failed."""
        return self._first_layer.columns

    def first_state(self) -> InfiniState | None:
        """As `state`, for a call that keeps nothing of it."""
        return self._first_layer._state

    def state_of_call(self, batch: int, tokens: int, device: torch.device, **masks: Tensor | None) -> InfiniState | None:
        """The state that the layout of a call continues; `masks` as [`segment_layout`] takes them."""
        return self.first_state()

    def advance(self, states: StatesOfCall, input_ids: Tensor | None, layout: Layout, tokens: int) -> None:
        """Takes over what a call of `tokens` columns has left; `input_ids` `[batch, tokens]`, or `None` for embeddings."""
        states.advance_layers(tokens)
        self.text.documents = states.documents
        self.text.extend(input_ids, layout.real, len(layout.tokens_seen), tokens, layout.tokens_seen.device)

    def nbytes(self) -> int:
        """Bytes that the cache holds now."""
        states = [layer._state for layer in self.layers if isinstance(layer, InfiniLayer) and layer._state is not None]
        others = [_tensors_of(layer).values() for layer in self.layers if not isinstance(layer, InfiniLayer)]
        return sum(state.nbytes() for state in states) + sum(tensor.nbytes for tensors in others for tensor in tensors)

    @check_kinds
    def attention_mask(self, attention_mask: Tensor) -> Tensor:
        """The mask with which `generate()` continues from this cache with only new tokens, for example from a memory file,
        whose ids are gone: `generate(ids, attention_mask=cache.attention_mask(mask), cache=cache)` (before transformers 5.24
        `past_key_values=cache`).

        `generate()` tells new ids from a whole text by the width of the mask. With beams or several sequences for each row,
        repeat the cache (`batch_repeat_interleave`) after this. Without this mask, `generate()` recognises a whole text by
        its beginning, and takes other ids for new if they are no more than the cache has read.

        Args:
            attention_mask: `[batch, tokens]` of the new tokens, 1 = real, 0 = padding.

        Returns:
            `[batch, columns + tokens]`, the columns being those that the cache has passed.

        Raises:
            ValueError: another number of rows than the cache has.
        """
        if attention_mask.dim() != 2:
            raise ValueError(f"attention_mask must be [batch, tokens], of the new tokens; got {list(attention_mask.shape)}.")
        if self.text.real is None:
            return attention_mask
        check_rows("the mask", len(attention_mask), len(self.text.real))
        return self.text.mask_before(attention_mask, self.get_seq_length())

    @check_kinds
    def save_pretrained(
        self, path: str | Path, model: nn.Module | dict, *, text_sha256: Sequence[str] | None = None
    ) -> None:
        """Writes what has been read so far into a memory file (see memory_files.py): the whole state, bit for bit.

        Whoever reads the file finds the old one or this one, whole, also where several write it: [`write_memory_file`].

        Args:
            path: the file, by custom `NAME.safetensors`.
            model: the model that filled the cache, or what [`describe_model`] said of it, which is expensive.
            text_sha256: for each row, the sha256 of the text that it has read.

        Raises:
            ValueError: nothing has been read yet, `text_sha256` is not one for each row, or the state is not finite.
            MemoryFileAccessError: the file cannot be written, or is a folder (a ValueError and an OSError).
        """
        state = self.first_state()
        if state is None:
            raise ValueError(f"this cache has read nothing yet: give it to model(ids, {CACHE}=cache) before saving.")
        tokens_seen = state.tokens_seen.tolist()
        if text_sha256 is not None and (isinstance(text_sha256, str) or len(text_sha256) != len(tokens_seen)):
            raise ValueError(f"text_sha256 must be a list with one for each of the {len(tokens_seen)} rows.")
        self.drop_unfinished()
        tensors = self._tensors()
        empty = empty_places(state.tokens_seen, *self._window)[:, None, :, None]
        for name in [name for name in tensors if name.endswith((".local_key", ".local_value", ".local_log_weight"))]:
            tensors[name] = tensors[name].masked_fill(empty, 0)  # a step that failed may have written its token there
        for name, tensor in tensors.items():
            if tensor.is_floating_point() and not tensor.isfinite().all():
                raise ValueError(f"{name} of this cache holds NaN or infinity: nothing could go on from its file.")
        record = {
            "model": model if isinstance(model, dict) else describe_model(model),
            "columns": self.get_seq_length(),
            "tokens_seen": tokens_seen,
            "text_sha256": None if text_sha256 is None else list(text_sha256),
        }
        write_memory_file(path, tensors, record)

    def _tensors(self) -> dict[str, Tensor]:
        """All tensors, by their names in a memory file."""
        tensors = self.text.tensors()
        for number, layer in enumerate(self.layers):
            tensors |= {f"layers.{number}.{name}": tensor for name, tensor in _tensors_of(layer).items()}
        return tensors

    @classmethod
    @check_kinds
    def from_pretrained(cls, path: str | Path, model: nn.Module, *, rows: Sequence | None = None) -> "InfiniCache":
        """The cache that [`InfiniCache.save_pretrained`] wrote, on the model's devices.

        Hashes the model's weights to compare them with those that wrote the memory (see [`describe_model`] for the time).

        Args:
            path: the file.
            model: the model that continues.
            rows: which rows of the batch to take, in this order; `None`: all.

        Raises:
            MemoryFileError: the file is damaged, no memory file, of another model, or holds what no cache of this model
                can hold: the message says what is wrong.
            MemoryFileAccessError: there is no such file, or it may not be read (also an OSError).
            ValueError: there is no such row.
        """
        record, tensors = read_memory_file(path)
        check_model(path, record, model)
        model = without_wrappers(model)
        cache, example = cls(model.config), cls(model.config)
        fill_with_one_token(model, example)
        if problem := find_problem(record, tensors, example._tensors(), model):
            raise MemoryFileError(f"{path} is of this model, but was not written by save_pretrained: {problem}.")
        devices = {name.rpartition(".")[0]: tensor.device for name, tensor in example._tensors().items()}
        for number, layer in enumerate(cache.layers):
            prefix = f"layers.{number}"
            of_layer = {n: t.to(devices[prefix]) for n, t in tensors.items() if n.rpartition(".")[0] == prefix}
            own = {name.rpartition(".")[2]: tensor for name, tensor in of_layer.items()}
            if isinstance(layer, InfiniLayer):
                layer.advance(InfiniState.from_tensors(own), record["columns"])
            elif isinstance(layer, DynamicLayer):
                layer.update(own["keys"], own["values"])
                if isinstance(layer, DynamicSlidingWindowLayer):
                    layer.cumulative_length = record["columns"]
        cache.text = ReadText.from_tensors({name: tensor.to(devices[""]) for name, tensor in tensors.items()})
        count = len(record["tokens_seen"])
        if rows is not None:
            if not rows or not all(hasattr(row, "__index__") and 0 <= row < count for row in rows):
                raise ValueError(f"rows must be numbers from 0 to {count - 1}, the rows of {path}; got {list(rows)}.")
            cache.batch_select_indices(torch.tensor(rows, dtype=torch.long))
        return cache

    def crop(self, tokens_to_remove: int) -> None:
        self._first_layer.crop(tokens_to_remove)

    def reset(self) -> None:
        self.__init__(self._config)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        super().reorder_cache(beam_idx)
        self.text.map_rows(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    @check_kinds
    def batch_repeat_interleave(self, repeats: int) -> None:
        check_number("repeats", repeats, {"at_least": 1})
        super().batch_repeat_interleave(repeats)
        self.text.map_rows(lambda tensor: tensor.repeat_interleave(repeats, 0))

    @check_kinds
    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self.text.map_rows(lambda tensor: tensor[indices])


def _tensors_of(layer) -> dict[str, Tensor]:
    """What a layer of the cache holds, by name; nothing before the first call."""
    if isinstance(layer, InfiniLayer):
        return {} if layer._state is None else layer._state.tensors()
    return {name: getattr(layer, name) for name in ("keys", "values") if getattr(layer, name) is not None}


def _map_tensors(layer, function) -> None:
    """Applies a function to what a layer of the cache holds."""
    if isinstance(layer, InfiniLayer):
        layer.state = None if layer._state is None else layer._state.map(function)
        return
    for name, tensor in _tensors_of(layer).items():
        setattr(layer, name, function(tensor))
