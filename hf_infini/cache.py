"""The cache of `generate()`: one [`InfiniState`] for each layer with memory, so its bytes do not grow with the context."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer

from .memory_files import check_model, describe_model, read_memory_file, write_memory_file
from .segments import SegmentLayout
from .state import InfiniState
from .steps import StepLayout
from .text_hash import extend_hash


class InfiniLayer(CacheLayerMixin):
    """One layer's state between two calls.

    Attributes:
        state: [`InfiniState`], or `None` before the first call.
        columns: tokens passed so far, padding included (what `generate` counts in).
    """

    def __init__(self):
        super().__init__()
        self.state: InfiniState | None = None
        self.columns = 0

    def advance(self, state: InfiniState, columns: int) -> None:
        """Takes the state after a call of `columns` tokens."""
        self.state = state
        self.columns += columns
        self.is_initialized = True

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
        if self.state is not None:
            self.state = self.state.map_rows(function)

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
        if self.state is not None:
            self.device = self.state.memory.device
            self._map(lambda tensor: tensor.to("cpu"))

    def prefetch(self) -> None:
        if self.state is not None:
            self._map(lambda tensor: tensor.to(getattr(self, "device", tensor.device)))


class InfiniCache(Cache):
    """The cache of an [`InfiniGPT2LMHeadModel`]: bounded for layers with memory, growing for those with full attention.

    `generate()` and `model(..., use_cache=True)` make it by themselves; pass it back to go on reading where it stands.

    Args:
        config: of the model, which has layers with memory: an [`InfiniGPT2Config`], or a [`CausalMHAConfig`] with
            `attention="infini"`.

    Raises:
        ValueError: the configuration names no layers with memory.
    """

    def __init__(self, config):
        bounded = set(getattr(config, "infini_layers", ()))
        if not bounded:
            raise ValueError(
                f"an InfiniCache is for layers with a compressive memory, and this {type(config).__name__} has none: leave "
                "past_key_values out, or pass transformers.DynamicCache(config=model.config)."
            )
        super().__init__(layers=[InfiniLayer() if i in bounded else DynamicLayer() for i in range(config.n_layer)])
        self.documents: Tensor | None = None  # see full_attention_mask
        self.text_hash: Tensor | None = None  # [batch] int64, see remember

    @property
    def state(self) -> InfiniState | None:
        """The state of the first layer with memory: its tokens_seen and positions hold for all."""
        return next(layer.state for layer in self.layers if isinstance(layer, InfiniLayer))

    def nbytes(self) -> int:
        """Bytes that the cache holds now."""
        total = 0
        for layer in self.layers:
            if isinstance(layer, InfiniLayer):
                total += layer.state.nbytes() if layer.state is not None else 0
            elif layer.is_initialized:
                total += layer.keys.nbytes + layer.values.nbytes
        return total

    def attention_mask(self, attention_mask: Tensor) -> Tensor:
        """The mask with which `generate()` goes on from here with new tokens alone, as it must where the ids of what the
        cache has read are gone: `generate(ids, attention_mask=cache.attention_mask(mask), past_key_values=cache)`.

        By the width of the mask `generate()` tells new ids from a whole text, and in it positions are counted. With beams or
        several sequences for each row, repeat the cache (`batch_repeat_interleave`) after this. Without it, `generate()`
        takes ids that are no more than the cache has read for new, and knows a whole text by its beginning.

        Args:
            attention_mask: `[batch, tokens]` of the new tokens, 1 = real, 0 = padding.

        Returns:
            `[batch, columns + tokens]`, the columns being those that the cache has passed.

        Raises:
            ValueError: another number of rows than the cache has, or positions that left some numbers out.
        """
        if self.state is None:
            return attention_mask
        rows = len(self.state.last_position)
        if len(attention_mask) != rows:
            raise ValueError(
                f"the mask has {len(attention_mask)} rows and the cache {rows}: repeat the cache's rows with "
                "batch_repeat_interleave, or choose among them with batch_select_indices."
            )
        return self._mask_behind_the_past(attention_mask)

    def mask_of_ids(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """The mask with which `generate()` reads of these ids what is new, where nobody has said what is.

        It takes ids and a mask of the same width for a whole text and reads the end of it alone, as much as goes beyond the
        cache. So new ids need a wider mask, and which ids are new is seen by what the cache has read.

        Args:
            input_ids: `[batch, tokens]`, of which the cache may have several rows each (beams).
            attention_mask: `[batch, tokens]`; a wider one says what is new, and is returned as it is.

        Returns:
            The mask itself for a whole text; for ids that are all new, no more of them than the cache has read,
            [`InfiniCache.attention_mask`] of it.

        Raises:
            ValueError: nothing is new in a whole text, or the ids are more than the cache has read and begin otherwise.
        """
        columns, tokens = self.get_seq_length(), input_ids.shape[1]
        if self.state is None or attention_mask.shape[1] != tokens:
            return attention_mask
        known = tokens >= columns and self._begins(input_ids[:, :columns])
        if known and tokens == columns:
            raise ValueError(
                f"the cache has read all of these {tokens} ids, and there is nothing to go on from: pass the text with new "
                "ids behind it, or a copy of the cache from before the last of them. If the same ids come a second time, "
                "pass attention_mask=cache.attention_mask(mask), mask being [batch, tokens] with 1 for real tokens."
            )
        if not known and tokens > columns:
            raise ValueError(
                f"these {tokens} ids do not begin with the {columns} that the cache has read, and generate() would take "
                f"them for the whole text and read the last {tokens - columns} alone. If all of them are new, pass "
                "attention_mask=cache.attention_mask(mask), mask being [batch, tokens] with 1 for real tokens; a whole text "
                "must be that of the cache token by token, padding included."
            )
        return attention_mask if known else self._mask_behind_the_past(attention_mask)

    def remember(self, input_ids: Tensor | None) -> None:
        """Takes the ids `[batch, tokens]` of the call that has just gone through the layers into the hash of the text; ids
        for all columns stand for the whole text. After a call without ids (embeddings) nothing is known of it."""
        if input_ids is None:
            self.text_hash = None
        elif self.get_seq_length() == input_ids.shape[1]:
            self.text_hash = extend_hash(torch.zeros_like(input_ids[:, 0]), input_ids)
        elif self.text_hash is not None:
            self.text_hash = extend_hash(self.text_hash, input_ids)

    def _begins(self, input_ids: Tensor) -> bool:
        """Whether these ids, one for each column of the cache, are what it has read."""
        if self.text_hash is None:
            return False
        repeats = max(1, len(self.text_hash) // len(input_ids))
        read = self.text_hash.to(input_ids.device)
        return torch.equal(read, extend_hash(torch.zeros_like(input_ids[:, 0]), input_ids).repeat_interleave(repeats))

    def _mask_behind_the_past(self, attention_mask: Tensor) -> Tensor:
        columns, seen = self.get_seq_length(), self.state.last_position + 1
        seen = seen[:: max(1, len(seen) // len(attention_mask))]  # beams: equal rows for each of the mask
        if int(seen.max()) > columns:
            raise ValueError(
                f"the last position is {int(seen.max()) - 1} after {columns} tokens: generate() counts positions in the "
                "mask and cannot go on from position_ids that left some out."
            )
        # A row's real tokens are counted and not looked at, so they may stand together at the end
        past = torch.arange(columns, device=seen.device) >= columns - seen.unsqueeze(1)
        return torch.cat([past.to(attention_mask), attention_mask], 1)

    def save_pretrained(self, path: str | Path, model, *, text_sha256: Sequence[str] | None = None) -> None:
        """Writes what has been read so far into a memory file (see memory_files.py): the whole state, bit for bit.

        Whoever reads the file finds the one that was there before or this one, never half of it.

        Args:
            path: the file, by custom `NAME.safetensors`.
            model: the model that filled the cache, or what [`describe_model`] said of it, which is expensive.
            text_sha256: for each row, the sha256 of the text that it has read.

        Raises:
            ValueError: nothing has been read yet, or `text_sha256` is not one for each row.
            OSError: the file cannot be written.
        """
        if self.state is None:
            raise ValueError("this cache has read nothing yet: give it to model(ids, past_key_values=cache) before saving.")
        tokens_seen = self.state.tokens_seen.tolist()
        if text_sha256 is not None and (isinstance(text_sha256, str) or len(text_sha256) != len(tokens_seen)):
            raise ValueError(f"text_sha256 must be a list with one for each of the {len(tokens_seen)} rows.")
        tensors = {} if self.documents is None else {"documents": self.documents}
        tensors |= {} if self.text_hash is None else {"text_hash": self.text_hash}
        for number, layer in enumerate(self.layers):
            bounded = isinstance(layer, InfiniLayer)
            own = layer.state.tensors() if bounded else {"keys": layer.keys, "values": layer.values}
            tensors |= {f"layers.{number}.{name}": tensor for name, tensor in own.items()}
        record = {
            "model": model if isinstance(model, dict) else describe_model(model),
            "columns": self.get_seq_length(),
            "tokens_seen": tokens_seen,
            "text_sha256": None if text_sha256 is None else list(text_sha256),
        }
        write_memory_file(path, tensors, record)

    @classmethod
    def from_pretrained(cls, path: str | Path, model, *, rows: Sequence[int] | None = None) -> "InfiniCache":
        """The cache that [`InfiniCache.save_pretrained`] wrote, on the model's device, to go on from.

        Hashes the model's weights to compare them with those that wrote the memory (see [`describe_model`] for the time).

        Args:
            path: the file.
            model: the model that is to go on.
            rows: which rows of the batch to take, in this order; `None`: all.

        Raises:
            MemoryFileError: the file is damaged, no memory file, or of another model: the message says what differs.
            ValueError: there is no such row.
            OSError: there is no such file.
        """
        record, tensors = read_memory_file(path)
        check_model(path, record, model)
        cache = cls(model.config)
        for number, layer in enumerate(cache.layers):
            prefix = f"layers.{number}."
            own = {n.removeprefix(prefix): t.to(model.device) for n, t in tensors.items() if n.startswith(prefix)}
            if isinstance(layer, InfiniLayer):
                layer.advance(InfiniState.from_tensors(own), record["columns"])
            else:
                layer.update(own["keys"], own["values"])
        for name in ("documents", "text_hash"):
            setattr(cache, name, tensors[name].to(model.device) if name in tensors else None)
        count = len(record["tokens_seen"])
        if rows is not None:
            if not all(0 <= row < count for row in rows):
                raise ValueError(f"rows must be numbers from 0 to {count - 1}, the rows of {path}; got {list(rows)}.")
            cache.batch_select_indices(torch.tensor(rows, dtype=torch.long, device=model.device))
        return cache

    def full_attention_mask(self, layout: SegmentLayout | StepLayout, tokens: int, past: int) -> Tensor | None:
        """See [`full_attention_mask`]; remembers the documents of the new columns."""
        mask, self.documents = full_attention_mask(layout, tokens, past, self.documents)
        return mask

    def crop(self, tokens_to_remove: int) -> None:
        next(layer for layer in self.layers if isinstance(layer, InfiniLayer)).crop(tokens_to_remove)

    def reset(self) -> None:
        for layer in self.layers:
            layer.reset() if isinstance(layer, InfiniLayer) else layer.__init__()
        self.documents = self.text_hash = None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        self._map_own(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self._map_own(lambda tensor: tensor.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self._map_own(lambda tensor: tensor[indices])

    def _map_own(self, function) -> None:
        """Applies a function of rows to what the cache has beside its layers."""
        for name in ("documents", "text_hash"):
            if getattr(self, name) is not None:
                setattr(self, name, function(getattr(self, name)))


def full_attention_mask(
    layout: SegmentLayout | StepLayout, tokens: int, past: int, documents: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """The mask of the layers that keep full attention: causal, inside the document, without padding.

    Args:
        layout: of the new `tokens`; `past` columns came before.
        documents: `[batch, past]`, number of each past column's document, −1 for padding; `None`: all one document.

    Returns:
        `[batch or 1, 1, tokens, past + tokens]` bool, True = visible, or `None` where the kernel's own causal mask says the
        same; and the documents with the new columns.
    """
    device = layout.tokens_seen.device
    real, restart = layout.real, layout.restart
    columns = torch.arange(past + tokens, device=device)
    causal = columns <= torch.arange(past, past + tokens, device=device)[:, None]
    if documents is None and real is None:
        return (None if past == 0 or tokens == 1 else causal[None, None]), None
    batch = layout.tokens_seen.shape[0]
    old = torch.zeros(batch, past, dtype=torch.long, device=device) if documents is None else documents
    current = old.amax(1, keepdim=True).clamp(min=0) if past else old.new_zeros(batch, 1)
    new = current.expand(batch, tokens) if real is None else torch.where(real, current + restart.cumsum(1), -1)
    documents = torch.cat([old, new], 1)
    mask = causal & (new.unsqueeze(2) == documents.unsqueeze(1))
    # Padding sees itself, because a row of the softmax needs something to see.
    own = columns == torch.arange(past, past + tokens, device=device)[:, None]
    return (mask | own).unsqueeze(1), documents
