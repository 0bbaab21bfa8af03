"""The cache of `generate()`: one [`InfiniState`] for each layer with memory, so its bytes do not
grow with the context."""

import copy
import os
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedConfig
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)

from ..compat.cache_name import CACHE
from ..compat.execution_device import device_of
from ..ops.checks import check_types
from ..ops.recall import Terms
from ..ops.rules import RULES
from ..ops.state import InfiniState
from ..options import MemoryOptions, check_number, key_heads
from .archive import Archive, Call, form_of, kept_blocks, recalled
from .archive_files import loaded, saved
from .files import (
    DESCRIBED_INDIRECTLY,
    WITHOUT_EFFECT,
    MemoryFileError,
    check_description,
    check_model,
    check_tensors,
    describe_model,
    read_memory_file,
    write_memory_file,
)
from .identity import Sample, different_weights, sample_of

TEXT_END = 64  # so many last ids are kept
# Odd numbers without a pattern, by which products in wrapping int64 spread over all bits
FOR_IDS, FOR_COLUMNS, FOR_BOTH = -7046029254386353131, -4417276706812531889, -49064778989728563
# Options of the memory by which a state means something else, beside the windows
OPTIONS = {field.name for field in fields(MemoryOptions)} - WITHOUT_EFFECT - DESCRIBED_INDIRECTLY


class InfiniLayer(CacheLayerMixin):
    """One layer's `state` between two calls, an [`InfiniState`], or `None` before the first.
    Without gradients, the next token may be written into it in place: to keep one, copy it
    (`copy.deepcopy`). `columns`: tokens passed so far, padding included. In the cache of one call:
    `left`, the state after it, in a list, for torch.compile sees no attribute set; and `read`, what
    an archive takes in, keys and values, or `None`."""

    def __init__(
        self,
        state: InfiniState | None = None,
        columns: int = 0,
        left: list[InfiniState] | None = None,
        read: list[tuple[Tensor, Tensor]] | None = None,
    ):
        super().__init__()
        self.state, self.columns, self.left, self.read = state, columns, left, read

    def advance(self, state: InfiniState, columns: int) -> None:
        """Takes the state after a call of `columns` tokens."""
        self.state = state
        self.columns += columns
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the state is made by the first call, whatever `key_states` and
        `value_states` are."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args, **kwargs
    ) -> tuple[Tensor, Tensor]:
        """Keeps nothing, and gives what it is given: the attention leaves the next state.
        `key_states`, `value_states`: `[batch, kv_heads, tokens, head_dim]`. TypeError for a
        layer that is not of a call's cache."""
        if self.left is None:
            raise TypeError(
                "an InfiniLayer keeps no keys and values to attend to; the attention "
                "leaves its next state."
            )
        return key_states, value_states

    def get_seq_length(self) -> int:
        return self.columns

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Columns of a mask, past ones and `query_length` new ones; and the first of them."""
        return self.columns + query_length, 0


class InfiniCache(Cache):
    """The cache of a model with a memory: bounded for layers with memory, growing for those with
    full attention.

    `generate()` and `model(..., use_cache=True)` make one; pass it back to continue from there.
    `copy.copy` and `copy.deepcopy` give a second one, with its own tensors, that continues from the
    same place, in training also in the same graph: gradients go back through either to what was
    read. `detach` cuts the graph. ValueError without such layers.

    Attributes:
        text: what is known of the text read, by its names in a memory file: `text_end` `[batch,
            TEXT_END]`, the last ids, −1 before the first and −2 for embeddings; `text_digest`
            `[batch, 2]`, [`digest_after`] of all ids (not of a file of earlier versions);
            `documents`, see [`kept_layers_masks`], where padding needs it.
        archive: keys and values of all tokens that were read, outside of the device, where
            [`InfiniCache.recall`] finds them; `None`: they are not archived.

    Args:
        config: of the model that will fill it; ValueError where no layer of it has a memory.
        archive: whether keys and values of all tokens are archived, in host memory, while they are
            read: `True`, as the model computes them, or "int8", rounded to 8 bits, each token's and
            head's by itself, which takes about half the bytes of 16. ValueError for another.
    """

    layers: Any  # each an InfiniLayer, or transformers' own
    completes_segments = True  # the attention itself does; of a StepCache `end_step`
    in_step = False  # whether a compiled step has begun and not ended

    _dtype: torch.dtype | None = None  # of the weights that have filled it

    def __init__(self, config: PreTrainedConfig, *, archive: bool | str = False):
        form = None if archive is False else form_of(archive)  # without: no part of it is called
        bounded = set(getattr(config, "infini_layers", ()))
        if not bounded:
            raise ValueError(
                f"this {type(config).__name__} has no layers with a memory: pass a "
                "transformers.DynamicCache."
            )
        if archive and not config.window.kept_tokens:
            raise ValueError(
                "an archive is for models with kept tokens, whose places a recall fills: patch the "
                "model with cache_tokens=2048, or with kept_tokens."
            )
        own = [DynamicLayer() for _ in range(config.num_hidden_layers)]
        if len(bounded) < len(own):
            own = DynamicCache(config=config).layers  # layers that slide keep their window only
        super().__init__(
            layers=[InfiniLayer() if i in bounded else layer for i, layer in enumerate(own)]
        )
        self._config, self.windows = config, config.windows
        self.text: dict[str, Tensor] = {}
        self.archive = Archive(form=form) if archive else None
        # the model that filled it, while it is there, and what its weights were
        self._model: Callable[[], nn.Module | None] = _nothing
        self._sample: Sample = {}

    __copy__ = copy.deepcopy

    @property
    def is_compileable(self) -> bool:
        """`generate` asks; what it compiles gets a StepCache in this one's place, which archives
        nothing."""
        return self.archive is None

    @property
    def archived(self) -> bool | str:
        """How what is read is archived, as the argument `archive` says it."""
        return self.archive is not None and (self.archive.form or True)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_model": _nothing}

    def __deepcopy__(self, memo) -> "InfiniCache":
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__, layers=[copy.copy(layer) for layer in self.layers])
        other._map(Tensor.clone)
        return other

    def detach(self) -> "InfiniCache":
        """Cuts the graph, in place: no gradient goes back to what was read before. Returns the
        cache itself."""
        self._map(Tensor.detach)
        return self

    def _map(self, function: Callable[[Tensor], Tensor]) -> None:
        """Applies a function to all that the cache holds."""
        for layer in self.layers:
            if isinstance(layer, InfiniLayer):
                layer.state = None if layer.state is None else layer.state.map(function)
            else:
                vars(layer).update(
                    {name: function(tensor) for name, tensor in _tensors_of(layer).items()}
                )
        self.text = {name: function(tensor) for name, tensor in self.text.items()}

    @check_types
    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keeps the rows `beam_idx`, their numbers `[rows]`: those of beams that go on.
        ValueError where there is no such row."""
        self._choose_rows(beam_idx)

    @check_types
    def batch_repeat_interleave(self, repeats: int) -> None:
        """Has each row `repeats` times, 1 or more, one after the other; ValueError for another
        number."""
        check_number("repeats", repeats, {"at_least": 1})
        self._map_rows(lambda tensor: tensor.repeat_interleave(repeats, 0))

    @check_types
    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps the rows `indices`, their numbers `[rows]`, or a bool for each row; ValueError
        where there is no such row."""
        self._choose_rows(indices)

    def _choose_rows(self, indices: Tensor) -> None:
        """Keeps these rows; ValueError unless they are numbers of rows, `[rows]`, or bool for
        each."""
        try:
            if indices.dim() != 1 or not len(indices):
                raise IndexError
            self._map_rows(lambda tensor: tensor[indices.to(tensor.device)])
        except (IndexError, RuntimeError) as error:  # of torch, where there is no such row
            raise ValueError(
                f"indices must be the numbers of some of the cache's {self.batch_size} rows, "
                f"[rows]; got {list(indices.shape)} of {indices.dtype}."
            ) from error

    def _map_rows(self, function: Callable[[Tensor], Tensor]) -> None:
        """Applies a function that chooses among rows to all that the cache holds, and has
        archived."""
        self._map(function)
        if self.archive is not None and (rows := self.archive.rows()):
            self.archive = self.archive.chosen(function(torch.arange(len(rows))).tolist())

    @check_types
    def recall(
        self, question: Tensor | Sequence, *, terms: Tensor | Terms | None = None
    ) -> "InfiniCache":
        """A copy of the cache in which what a question asks for takes the places of kept tokens:
        the blocks of 64 tokens that share its rarest terms, [`block_relevance`], in all layers
        alike; without a memory, places stay empty rather than hold blocks that are far less
        relevant than the best. Give it the question next. Where all tokens are in sight anyway it
        changes nothing.

        Args:
            question: the ids of what is asked, `[tokens]` for all rows, or one of these for each.
            terms: what the ids of the vocabulary mean, such as `Reader.terms`, by which words count
                too, by their first five letters; or of each id its term, `[vocabulary]`, int64, −1:
                none. `None`: each is one.

        Raises:
            ValueError: nothing is archived, or there are not as many questions as rows.
        """
        if self.archive is None or self.state is None:
            raise ValueError(
                "recall finds what was read in an archive, and this cache has "
                f"{'none' if self.archive is None else 'read nothing yet'}: have "
                "InfiniCache(model.config, archive=True) read the text."
            )
        cache = copy.copy(self)
        windows = {layer: window for layer, window in self.windows.items() if window.kept_tokens}
        states = {layer: cache.layers[layer].state for layer in windows}
        displaced = self.update_rule not in RULES
        rows = self.archive.rows_of(self.state.tokens_seen)
        made = recalled(rows, question, terms, states, windows, displaced)
        for layer, state in made.items():
            cache.layers[layer].state = state
        return cache

    def passages(self, row: int = 0) -> list[Tensor]:
        """What a row keeps in the layer with the most places, by blocks of 64 tokens: their
        numbers, `[tokens]` each; after a recall, the most relevant block first. `located` of the
        archive's row says which document of several ([`joined`]) has one, and its ids."""
        layer = max(self.windows, key=lambda layer: self.windows[layer].kept_tokens)
        window, state = self.windows[layer], self.layers[layer].state
        if state is None or not window.kept_tokens:
            return []
        return kept_blocks(state, window, row)

    @property
    def update_rule(self) -> str:
        """The update rule of the model that fills it."""
        return self._config.update_rule

    @property
    def batch_size(self) -> int:
        """Rows of what has been read; −1 before the first call."""
        return -1 if self.state is None else len(self.state.tokens_seen)

    def reset(self) -> None:
        """Empties the cache: it may then read a text as a new one does."""
        if self.exchange() is not None:
            raise ValueError(f"a {type(self).__name__} is for one call: make one for each.")
        InfiniCache.__init__(self, self._config, archive=self.archived)
        self.in_step = False

    def crop(self, tokens_to_remove: int) -> None:
        """ValueError unless `tokens_to_remove` is 0: a memory cannot take back a token."""
        if tokens_to_remove:
            raise ValueError(
                "a memory cannot take back a token that it has read: keep a copy from before it, "
                "copy.copy(cache), and go on from that one."
            )

    def activate_past_recording(self) -> None:
        """ValueError: what it prepares is [`InfiniCache.crop`]."""
        self.crop(-1)

    def early_initialization(self, *args, **kwargs) -> None:
        """ValueError: only a call of the model makes the states."""
        raise ValueError(
            "the states of a memory are made by the first call of its model, so the cache cannot "
            "be filled with zeros before it (torch.export): begin with a call."
        )

    def offload(self, *args, **kwargs) -> None:
        """ValueError: a cache of constant size stays on the devices of its layers."""
        raise ValueError(
            "an InfiniCache is not offloaded to the CPU: it is of constant size. To keep what has "
            "been read elsewhere, use save_pretrained and from_pretrained."
        )

    prefetch = offload

    @property
    def state(self) -> InfiniState | None:
        """The state of the first layer with memory: its tokens_seen and positions hold for all."""
        return next(layer.state for layer in self.layers if isinstance(layer, InfiniLayer))

    def state_before(self, layer: int) -> InfiniState | None:
        """The state that a call's layout for a layer continues."""
        return self.layers[layer].state

    def for_call(self, attention_mask: Tensor | None, memory_mask: Tensor | None) -> Cache:
        """What the layers with memory are given in one call: they take their states from it, and
        leave the next ones in it. A call that fails, or a layer that gradient checkpointing runs a
        second time, changes nothing here. `attention_mask` and `memory_mask`, `[batch, tokens]`,
        are for an archive."""
        reads = self.archive is not None
        of_call = Cache(
            [
                InfiniLayer(e.state, e.columns, [], [] if reads else None)
                if isinstance(e, InfiniLayer)
                else e
                for e in self.layers
            ]
        )
        if reads:
            vars(of_call)["masks"] = attention_mask, memory_mask
        return of_call

    def check_model(self, model: nn.Module) -> None:
        """ValueError unless a base model is the one that has filled the cache, whatever has become
        of it but of another dtype, or another one with the same options and weights, as far as
        [`sample_of`] shows. Into an empty cache any model of its configuration may read."""
        config: Any = model.config
        known, dtype = self._model(), next(model.parameters()).dtype
        if self.state is None or self._dtype is None:
            self._dtype = dtype
        same = known is model and self._config is config and self._dtype == dtype
        if self.exchange() is not None or same:
            return
        written = _facts(self._config) | {"dtype": self._dtype}
        given = _facts(config) | {"dtype": dtype}
        names = [name for name in given if written[name] != given[name]]
        different = [f"{name} is {written[name]} in the cache and {given[name]}" for name in names]
        sample = sample_of(model)
        if not different and self.state is not None:
            # training may have changed the one since
            before = self._sample if known is None else sample_of(known)
            weights = different_weights(before, sample)
            different = [f"{name} has other numbers" for name in weights[:1]]
        if different:
            raise ValueError(
                f"this cache is of another model: {'; '.join(different)} in this one. A memory "
                "means nothing to other weights: go on with the model that has filled it, or have "
                f"this one read the text, with a new {type(self).__name__}(model.config)."
            )
        self._model, self._config, self._sample = weakref.ref(model), config, sample

    def check_same_model(self, other: "InfiniCache") -> None:
        """ValueError unless the `other` cache was filled by the same model, as far as both show."""
        for known in filter(None, (other._model(), self._model())):
            self.check_model(known)
            other.check_model(known)
        if _facts(self._config) != _facts(other._config):
            raise ValueError(
                "these caches are of models with other layers, windows or options: have one model "
                "read all of the documents."
            )

    def exchange(self) -> Any:
        """What gives the layers of one call what other processes have read (context parallelism);
        `None`: nobody has."""
        return None

    def check_finished(self) -> None:
        """ValueError where a call has failed halfway: a compiled step, or one with layers of full
        attention."""
        if (
            self.in_step
            or len({self.get_seq_length(layer) for layer in range(len(self.layers))}) > 1
        ):
            raise ValueError(
                "a call with this cache has failed halfway: make a new one and read the text again."
            )

    def advance(self, of_call: Any, input_ids: Tensor | None, tokens: int) -> None:
        """Takes over what a call of `tokens` columns has left in `of_call`,
        [`InfiniCache.for_call`]; `input_ids` `[batch, tokens]`, or `None` for embeddings."""
        # first, for a disk may be full
        archive = None if self.archive is None else self._archived(of_call, input_ids, tokens)
        self.advance_layers(of_call, tokens)
        if input_ids is None:
            state: Any = self.state
            input_ids = _embeddings(state.tokens_seen, tokens)
        self.note_text(input_ids)
        self.archive = archive

    @torch.compiler.disable(reason="an archive is outside of the device, and of its graphs.")
    def _archived(self, of_call: Any, input_ids: Tensor | None, tokens: int) -> Archive:
        """The archive with what a call has read; arguments as of [`InfiniCache.advance`]."""
        read: dict[int, Any] = {number: of_call.layers[number] for number in self.windows}
        seen = next(iter(read.values())).left[0].tokens_seen
        ids = _embeddings(seen, tokens) if input_ids is None else input_ids
        every = torch.ones_like(ids, dtype=torch.bool)
        real, eligible = (every if mask is None else mask.bool() for mask in of_call.masks)
        layers: dict[int, Any] = {
            number: [side.detach() for side in layer.read[0]] for number, layer in read.items()
        }
        ids = ids.to(torch.long, copy=True)  # whoever gave them may write into them
        archive: Any = self.archive
        return archive.after(Call(ids, real, eligible, seen, layers))

    def note_text(self, ids: Tensor) -> None:
        """Takes the ids `[batch, tokens]` of a call into the `text`."""
        self.text = self.text | text_after(self.text, ids)

    def advance_layers(self, of_call: Any, tokens: int) -> None:
        """Gives the layers that have been called their new states, which are in `of_call`, after
        `tokens` columns."""
        for layer, called in zip(self.layers, of_call.layers, strict=True):
            for state in called.left if isinstance(layer, InfiniLayer) else ():
                layer.advance(state, tokens)

    def nbytes(self) -> int:
        """Bytes that the cache holds now."""
        return sum(tensor.nbytes for layer in self.layers for tensor in _tensors_of(layer).values())

    @check_types
    def attention_mask(self, attention_mask: Tensor) -> Tensor:
        """The mask with which `generate()` continues from this cache with only new tokens, for
        example from a memory file, whose ids are gone: `generate(ids,
        attention_mask=cache.attention_mask(mask), cache=cache)` (before transformers 5.24
        `past_key_values=cache`). Without it, ids are a whole text, which begins with what the cache
        has read. Of a mask `[batch, tokens]` of the new tokens, 1 = real: `[batch, columns +
        tokens]`, 1 for all that the cache has passed."""
        rows = "batch" if self.batch_size < 0 else self.batch_size
        # a cache may have several rows for each (beams)
        if attention_mask.dim() != 2 or rows != "batch" and rows % max(1, len(attention_mask)):
            raise ValueError(
                f"attention_mask must be [{rows}, tokens], of the new tokens of each row; got "
                f"{list(attention_mask.shape)}. For other rows repeat the cache's with "
                "batch_repeat_interleave, or choose among them with batch_select_indices."
            )
        return F.pad(attention_mask, (self.get_seq_length(), 0), value=1)

    def check_ids(self, input_ids: Tensor) -> None:
        """ValueError unless `input_ids`, `[batch, tokens]`, begin with what has been read, by
        its digest, or in a file of earlier versions by its end, and go on. The cache may have
        several rows for each (beams)."""
        columns, tokens = self.get_seq_length(), input_ids.shape[1]
        if not columns:
            return
        begins = text_after({}, input_ids[:, :columns])
        name = "text_digest" if "text_digest" in self.text else "text_end"
        read, found = self.text[name], begins[name]
        found = found.repeat_interleave(max(1, len(read) // len(found)), 0).to(read)
        if tokens < columns or (same := torch.equal(read, found)) and tokens == columns:
            reason = "there are no new ones"
        elif not same:
            reason = "the cache has read another text"
        else:
            return
        raise ValueError(
            f"these {tokens} ids are not the {columns} that the cache has read and new ones "
            f"after them: {reason}. Give those, or, for new ids alone, "
            "attention_mask=cache.attention_mask(mask), mask being [batch, tokens] with 1 for "
            "real tokens."
        )

    def check_past(self, attention_mask: Tensor) -> None:
        """ValueError (in a graph RuntimeError) where `attention_mask`, `[batch, columns]` of the
        past, 1 = real, has fewer real tokens in a row than its document."""
        state: Any = self.state
        given, counted = (attention_mask != 0).sum(1), state.tokens_seen.to(attention_mask.device)
        if torch.compiler.is_compiling():
            torch._assert_async(
                (given >= counted).all(),
                "the attention_mask disagrees with what the cache has read.",
            )
        elif (fewer := given < counted).any():
            row = int(fewer.nonzero()[0])
            raise ValueError(
                f"row {row} of attention_mask has {int(given[row])} real tokens (1) among the "
                f"{attention_mask.shape[1]} columns that the cache has passed, but the cache has "
                f"read {int(counted[row])} of them as real. Mask the padding; what generate() has "
                "appended after the end of a row is text to the cache."
            )

    @check_types
    def save_pretrained(
        self,
        path: str | os.PathLike,
        model: nn.Module | dict,
        *,
        text_sha256: Sequence[str] | None = None,
    ) -> None:
        """Writes what has been read so far into a memory file, by custom `NAME.safetensors`: the
        whole state, bit for bit. Whoever reads the file finds the old one or this one, whole, also
        where several write it.

        Args:
            path: of the file; an old one of this name is replaced.
            model: the model that filled the cache, or what [`describe_model`] said of it, which is
                expensive.
            text_sha256: for each row, the sha256 of the text that it has read.

        Raises:
            ValueError: nothing has been read yet, or by another model; or `text_sha256` is not one
                for each row.
            OSError: the file cannot be written, or is a folder.
        """
        if self.state is None:
            raise ValueError(
                "this cache has read nothing yet: give it to model(ids, "
                f"{CACHE}=cache) before saving."
            )
        tokens_seen = self.state.tokens_seen.tolist()
        if text_sha256 is not None and (
            isinstance(text_sha256, (str, bytes)) or len(text_sha256) != len(tokens_seen)
        ):
            raise ValueError(
                f"text_sha256 must be a list with one for each of the {len(tokens_seen)} rows."
            )
        self.check_finished()
        if self.archive is not None and any(row.others for row in self.archive.rows()):
            raise ValueError(
                "this cache asks several documents together, each of which has its own file: save "
                "the caches that were joined."
            )
        if isinstance(model, dict):
            check_description(described := model)
        else:
            described, known = describe_model(model), self._model()
            if all(part is not known for part in model.modules()):
                base: Any = getattr(model, "base_model", model)
                self.check_model(base)
        record: dict[str, Any] = {
            "model": described,
            "columns": self.get_seq_length(),
            "tokens_seen": tokens_seen,
            "text_sha256": None if text_sha256 is None else list(text_sha256),
        }
        # an archive's file is found from any working directory
        place, tensors, kept = Path(path).absolute(), self.tensors(), None
        if self.archive is not None:
            kept = saved(self.archive, place, self.state.tokens_seen)
            record["archive"], tensors = kept.entry, tensors | kept.tensors
        write_memory_file(path, tensors, record)
        if kept is not None:
            self.archive = kept.archive
            kept.remove_others(place)

    def tensors(self) -> dict[str, Tensor]:
        """All tensors, by their names in a memory file."""
        layers = (
            (number, *entry)
            for number, layer in enumerate(self.layers)
            for entry in _tensors_of(layer).items()
        )
        return self.text | {f"layers.{number}.{name}": tensor for number, name, tensor in layers}

    @classmethod
    @check_types
    def from_pretrained(
        cls,
        path: str | os.PathLike,
        model: nn.Module,
        *,
        text_sha256: Sequence[str] | None = None,
        description: dict | None = None,
        archive: bool = True,
    ) -> "InfiniCache":
        """The cache that [`InfiniCache.save_pretrained`] wrote, on the model's devices. Hashes
        the model's weights to compare them with those that wrote the memory.

        Args:
            path: of the file.
            model: which continues from it, with the weights and options of the one that
                wrote it.
            text_sha256: for each row, that of the text that it must have read; `None`:
                any.
            description: what [`describe_model`] said of the model, for many files of one, whose
                weights are then hashed once; `None`: it is asked.
            archive: whether questions may recall from the archive that the text may have, in 8 bits
                or not; without, its file is not needed, and a warning says that there was one.

        Raises:
            MemoryFileError: the file is damaged, no memory file, or of another model or
                text; the message says which.
            OSError: there is no such file, or it may not be read.
        """
        config: Any = getattr(model, "config", None)
        cache, (record, tensors) = cls(config), read_memory_file(path)
        check_model(path, record, model, description)
        check_tensors(path, tensors, config, len(record["tokens_seen"]))
        if text_sha256 is not None and record["text_sha256"] != list(text_sha256):
            raise MemoryFileError(
                f"{path} is the memory of another text: give another name, or delete it."
            )
        cache._dtype, columns = next(model.parameters()).dtype, record["columns"]
        devices: dict[Any, torch.device] = {
            getattr(part, "layer_idx", None): device_of(part) for part in model.modules()
        }
        for number, layer in enumerate(cache.layers):
            names = {name.removeprefix(f"layers.{number}."): name for name in tensors}
            own = {
                short: tensors[name].to(devices[number])
                for short, name in names.items()
                if short != name
            }
            if isinstance(layer, InfiniLayer):
                state = InfiniState(local_log_weight=own.pop("local_log_weight", None), **own)
                layer.advance(state, columns)
            else:
                layer.update(own["keys"], own["values"])
            if isinstance(layer, DynamicSlidingWindowLayer):
                layer.cumulative_length = columns
        cache.text = {
            name: part.to(device_of(model))
            for name, part in tensors.items()
            if not name.startswith(("layers.", "archive."))
        }
        if "archive" in record and not archive:
            warnings.warn(
                f"{path} is loaded without its archive: what is not in the cache cannot be "
                "recalled",
                stacklevel=2,
            )
        elif "archive" in record:
            heads, *widths = key_heads(config)
            parts = [(layer, heads, width) for layer in cache.windows for width in widths]
            own = record["archive"], tensors, parts, record["tokens_seen"]
            cache.archive = loaded(Path(path).absolute(), *own)
        return cache


def text_after(text: dict[str, Tensor], ids: Tensor) -> dict[str, Tensor]:
    """What is known of a text, [`InfiniCache.text`], and of these ids `[batch, tokens]` after it;
    `text_digest` only where it is known of what is before."""
    end, digest = text.get("text_end"), text.get("text_digest")
    before = ids.new_full((len(ids), TEXT_END), -1) if end is None else end
    after = {"text_end": torch.cat([before, ids[:, -TEXT_END:].to(before)], 1)[:, -TEXT_END:]}
    if end is None or digest is not None:
        after["text_digest"] = digest_after(digest, ids)
    return after


def digest_after(digest: Tensor | None, ids: Tensor) -> Tensor:
    """The digest of a text that goes on with these ids, `[batch, tokens]`; `None`: that begins
    with them. `[batch, 2]`, int64: the columns so far, and the sum of a hash of each column with
    its id. So it does not matter how the text was cut into calls, and rows can be moved."""
    digest = ids.new_zeros(len(ids), 2, dtype=torch.long) if digest is None else digest
    columns = digest[:, :1] + torch.arange(ids.shape[1], device=ids.device)
    # a sum of hashes knows the order only by the columns in them
    mixed = torch.add(columns * FOR_COLUMNS, ids.long(), alpha=FOR_IDS)
    mixed = (mixed ^ (mixed >> 29)) * FOR_BOTH
    hashed = (mixed ^ (mixed >> 32)).sum(1, keepdim=True)
    return digest + torch.cat([torch.full_like(hashed, ids.shape[1]), hashed], 1)


def _embeddings(seen: Tensor, tokens: int) -> Tensor:
    """What stands for the ids `[batch, tokens]` of embeddings; `seen`: `[batch]`."""
    return seen.new_full((len(seen), tokens), -2)


def _nothing() -> None:
    """As a weak reference to what is gone."""


def _facts(config: Any) -> dict[str, Any]:
    """What the states of a model's cache depend on, beside its weights."""
    return {
        "num_hidden_layers": config.num_hidden_layers,
        "(segment_length, local_segments, sink_tokens, kept_tokens) by layer": config.windows,
    } | {name: getattr(config, name, None) for name in sorted(OPTIONS)}


def _tensors_of(layer) -> dict[str, Tensor]:
    """What a layer of the cache holds, by name; nothing before the first call."""
    if isinstance(layer, InfiniLayer):
        return {} if layer.state is None else layer.state.tensors()
    return {
        name: getattr(layer, name)
        for name in ("keys", "values")
        if getattr(layer, name) is not None
    }
