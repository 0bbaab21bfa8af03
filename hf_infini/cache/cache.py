"""The cache of `generate()`: one [`InfiniState`] for each layer with memory, so its bytes do not grow with the context.

Of the text that it has read it keeps not the ids, but how many tokens were real, and a fingerprint of the ids.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from ..compat.cache_name import CACHE
from ..compat.execution_device import device_of
from ..ops.checks import check_kinds
from ..ops.layout.base import Layout
from ..ops.memory import KEEP_SCORES
from ..ops.rules import RULES
from ..ops.state import InfiniState
from .files import check_model, describe_model, read_memory_file, write_memory_file
from .masks import mask_before

# Two moduli below 2^31, so that every product fits into 64 bits, and a base for each
PRIMES = (2_147_483_647, 2_147_483_629)
BASES = (1_103_515_245, 1_664_525_069)
NAMES = {"text_real": "real", "text_fingerprint": "fingerprint", "documents": "documents"}  # in a memory file, and here


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


class PendingStates:
    """The states of the layers with memory before and after one call of the model.

    Every layer takes its state from here and leaves the next one here; [`InfiniCache.advance`] takes these over when all
    layers are through. So a call that fails changes nothing in the cache, nor does a layer that gradient checkpointing runs
    a second time. To a layer's own forward this is the cache.

    Attributes:
        documents: see [`kept_layers_masks`], of all columns up to the last of this call.
        exchange: gives the layers what other processes have read before this one (context parallelism); `None`: nobody has.
    """

    exchange: Any = None

    def __init__(self, layers: Sequence, documents: Tensor | None = None):
        self.documents = documents
        self._layers = {number: layer for number, layer in enumerate(layers) if isinstance(layer, InfiniLayer)}
        self._before = {number: layer._state for number, layer in self._layers.items()}
        self._after: dict[int, InfiniState] = {}
        self._columns = next(iter(self._layers.values())).columns

    def before(self, layer: int) -> InfiniState | None:
        """The state that the layer continues."""
        return self._before[layer]

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

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns before this call."""
        return self._columns

    def update(self, key: Tensor, value: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Keeps nothing: the layer leaves its state."""
        return key, value


@dataclass
class ReadText:
    """What has been read of all rows, in the columns that a cache has passed.

    Attributes:
        real: `[batch]` int64, how many of the columns were not padding; `None` before the first call.
        fingerprint: `[batch, 2]` int64, see [`extend_fingerprint`]; `None` before the first call, and after one without ids.
        documents: see [`kept_layers_masks`], of all columns.
    """

    real: Tensor | None = None
    fingerprint: Tensor | None = None
    documents: Tensor | None = None

    def tensors(self) -> dict[str, Tensor]:
        """What is known, by name, as a memory file has it."""
        known = {name: getattr(self, attribute) for name, attribute in NAMES.items()}
        return {name: tensor for name, tensor in known.items() if tensor is not None}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> "ReadText":
        """The inverse of `tensors`; others are passed over."""
        return cls(**{attribute: tensors.get(name) for name, attribute in NAMES.items()})

    def map_rows(self, function) -> None:
        """Applies a function of rows, such as a choice among them."""
        for name, tensor in self.tensors().items():
            setattr(self, NAMES[name], function(tensor))

    def extend(self, input_ids: Tensor | None, real: Tensor | None, batch: int, tokens: int, device) -> None:
        """Takes in a call of `[batch, tokens]`.

        Args:
            input_ids: of the call; `None`: embeddings, after which nothing is known of the text's ids.
            real: `[batch, tokens]` bool, not padding (`None`: all).
        """
        count = torch.full((batch,), tokens, device=device) if real is None else real.sum(1)
        unknown = input_ids is None or (self.real is not None and self.fingerprint is None)
        self.fingerprint = None if unknown else extend_fingerprint(self.fingerprint, input_ids)
        self.real = count if self.real is None else self.real + count

    def begins(self, input_ids: Tensor) -> bool:
        """Whether these ids, `[rows, columns]`, are what has been read; several rows of the cache (beams) may share one."""
        if self.fingerprint is None:
            return False
        repeats = max(1, len(self.fingerprint) // len(input_ids))
        given = extend_fingerprint(None, input_ids).repeat_interleave(repeats, 0)
        return torch.equal(self.fingerprint.to(given.device), given)


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
            raise ValueError(f"this {type(config).__name__} has no layers with a memory: pass a transformers.DynamicCache.")
        own = [DynamicLayer() for _ in range(config.num_hidden_layers)]
        if len(bounded) < len(own):
            own = DynamicCache(config=config).layers or own  # layers that slide keep their window only
        super().__init__(layers=[InfiniLayer() if i in bounded else layer for i, layer in enumerate(own)])
        self._config, self.window = config, config.window
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

    def pending_states(self) -> PendingStates:
        """The states for a call of the model."""
        return PendingStates(self.layers, self.text.documents)

    def check_finished(self) -> None:
        """ValueError where a call has failed halfway, and left keys and values in some of the layers of full attention."""
        others: Any = [layer for layer in self.layers if not isinstance(layer, InfiniLayer)]
        if any(layer.get_seq_length() != self._first_layer.columns for layer in others):
            raise ValueError("a call with this cache has failed halfway: make a new one and read the text again.")

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns that the cache has passed."""
        return self._first_layer.columns

    def first_state(self) -> InfiniState | None:
        """As `state`, for a call that keeps nothing of it."""
        return self._first_layer._state

    def advance(self, states: PendingStates, input_ids: Tensor | None, layout: Layout, tokens: int) -> None:
        """Takes over what a call of `tokens` columns has left; `input_ids` `[batch, tokens]`, or `None` for embeddings."""
        states.advance_layers(tokens)
        self.text.documents = states.documents
        self.text.extend(input_ids, layout.real, len(layout.tokens_seen), tokens, layout.tokens_seen.device)

    def nbytes(self) -> int:
        """Bytes that the cache holds now."""
        named = (named for layer in self.layers for named in _tensors_of(layer).items())
        return sum(tensor.nbytes for name, tensor in named if not name.startswith("start_"))  # which are the model's

    @check_kinds
    def attention_mask(self, attention_mask: Tensor) -> Tensor:
        """The mask with which `generate()` continues from this cache with only new tokens, for example from a memory file,
        whose ids are gone: `generate(ids, attention_mask=cache.attention_mask(mask), cache=cache)` (before transformers 5.24
        `past_key_values=cache`).

        With beams or several sequences for each row, repeat the cache (`batch_repeat_interleave`) after this. Without this
        mask, `generate()` recognises a whole text by its beginning, and takes other ids for new if they are no more than the
        cache has read.

        Args:
            attention_mask: `[batch, tokens]` of the new tokens, 1 = real, 0 = padding.

        Returns:
            `[batch, columns + tokens]`, the columns being those that the cache has passed.

        Raises:
            ValueError: another number of rows than the cache has.
        """
        if self.text.real is None:
            return attention_mask
        check_rows("the mask", len(attention_mask), len(self.text.real))
        return mask_before(self.text, attention_mask, self.get_seq_length())

    @check_kinds
    def save_pretrained(
        self, path: str | Path, model: nn.Module | dict, *, text_sha256: Sequence[str] | None = None
    ) -> None:
        """Writes what has been read so far into a memory file (see files.py): the whole state, bit for bit.

        Whoever reads the file finds the old one or this one, whole, also where several write it: [`write_memory_file`].

        Args:
            path: the file, by custom `NAME.safetensors`.
            model: the model that filled the cache, or what [`describe_model`] said of it, which is expensive.
            text_sha256: for each row, the sha256 of the text that it has read.

        Raises:
            ValueError: nothing has been read yet, or `text_sha256` is not one for each row.
            OSError: the file cannot be written, or is a folder.
        """
        if self.state is None:
            raise ValueError(f"this cache has read nothing yet: give it to model(ids, {CACHE}=cache) before saving.")
        tokens_seen = self.state.tokens_seen.tolist()
        if text_sha256 is not None and (isinstance(text_sha256, str) or len(text_sha256) != len(tokens_seen)):
            raise ValueError(f"text_sha256 must be a list with one for each of the {len(tokens_seen)} rows.")
        self.check_finished()
        record = {
            "model": model if isinstance(model, dict) else describe_model(model),
            "columns": self.get_seq_length(),
            "tokens_seen": tokens_seen,
            "text_sha256": None if text_sha256 is None else list(text_sha256),
        }
        write_memory_file(path, self.tensors(), record)

    def tensors(self) -> dict[str, Tensor]:
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
            MemoryFileError: the file is damaged, no memory file, or of another model: the message says what is wrong.
            OSError: there is no such file, or it may not be read.
            IndexError: there is no such row.
        """
        record, tensors = read_memory_file(path)
        check_model(path, record, model)
        config: Any = model.config
        cache, columns = cls(config), record["columns"]
        devices = {getattr(module, "layer_idx", None): device_of(module) for module in model.modules()}
        layers: Any = cache.layers
        for number, layer in enumerate(layers):
            names = {name.removeprefix(f"layers.{number}."): name for name in tensors}
            own = {short: tensors[name].to(devices[number]) for short, name in names.items() if short != name}
            if isinstance(layer, InfiniLayer):
                state = InfiniState(local_log_weight=own.pop("local_log_weight", None), **own)
                layer.advance(state, columns)
            else:
                layer.update(own["keys"], own["values"])
            if isinstance(layer, DynamicSlidingWindowLayer):
                layer.cumulative_length = columns
        cache.text = ReadText.from_tensors({name: tensor.to(device_of(model)) for name, tensor in tensors.items()})
        if rows is not None:
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
        super().batch_repeat_interleave(repeats)
        self.text.map_rows(lambda tensor: tensor.repeat_interleave(repeats, 0))

    @check_kinds
    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self.text.map_rows(lambda tensor: tensor[indices])


@check_kinds
def cache_bytes(config: PreTrainedConfig) -> int:
    """Bytes that a model's layers with a memory hold of one sequence, however long it is, in the configuration's dtype
    (`None`: torch's default). Where the memory skips tokens, each place of a window takes one more. What layers without a
    memory hold, and grows, is not counted.
    """
    if not getattr(config, "infini_layers", ()):
        raise ValueError(f"the cache of a {type(config).__name__} without a compressive memory grows with every token.")
    rule, heads = RULES[config.update_rule], config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    dtype: Any = config.dtype or torch.get_default_dtype()
    key = torch.empty(1, getattr(config, "num_key_value_heads", None) or heads, 0, width, dtype=dtype, device="meta")
    learned = bool(rule.parameters(1, 1)) or config.memory_write == "learned"
    sizes = {"log_weights": rule.rates if learned else 0, "scores": len(KEEP_SCORES[config.keep_score])}
    state = InfiniState.initial(key, key, *config.window, normalised=rule.normalised, **sizes)
    recent = max(config.memory_conv - 1, 0) * config.hidden_size * dtype.itemsize
    return len(config.infini_layers) * (state.nbytes() + recent)


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


def check_rows(what: str, rows: int, cached: int) -> None:
    """ValueError unless `what`, such as "the mask", has as many rows as the cache."""
    if rows != cached:
        raise ValueError(
            f"{what} has {rows} rows and the cache {cached}: repeat the cache's rows with batch_repeat_interleave, or "
            "choose among them with batch_select_indices."
        )


def extend_fingerprint(before: Tensor | None, input_ids: Tensor) -> Tensor:
    """The fingerprint of a longer text: h ← (h · base + id + 1) mod prime for each further id, for two primes.

    In which pieces a text is read does not matter. Two texts of n tokens that were not made for it have the same one with
    a probability of about n · 2^−62.

    Args:
        before: `[batch, 2]` int64, of the text so far; `None`: of none.
        input_ids: `[batch, tokens]`, what follows it, padding included.
    """
    ids, hashes = input_ids.long() + 1, []
    for number, (base, prime) in enumerate(zip(BASES, PRIMES, strict=True)):
        powers = _powers(input_ids.shape[1] + 1, base, prime, ids.device)
        text = (ids % prime * powers[:-1].flip(0) % prime).sum(1)
        hashes.append(text % prime if before is None else (before[:, number].to(ids.device) * powers[-1] + text) % prime)
    return torch.stack(hashes, 1)


def _powers(count: int, base: int, prime: int, device) -> Tensor:
    """base^0 … base^(count − 1) mod prime, `[count]`, by squaring. The squares are numbers of Python's: to bring them to an
    accelerator as a tensor would wait for it."""
    exponents = torch.arange(count, device=device)
    powers = torch.ones_like(exponents)
    # Where a graph leaves the number of tokens open, as many bits as it may have
    for bit in range((count - 1).bit_length() if isinstance(count, int) else 31):
        powers = torch.where(exponents >> bit & 1 == 1, powers * base % prime, powers)
        base = base * base % prime
    return powers
