"""Memory files: what a model remembers of a text, in one safetensors file from which the same
weights continue.

[`InfiniCache.save_pretrained`] and `from_pretrained` write and read them. The tensors are those of
the cache, by name (`layers.0.memory`, …, `text_end`) and with their dtypes. The metadata hold one
JSON object, the record:

| entry | |
| --- | --- |
| `format_version` | of this table |
| `model` | what [`describe_model`] says: configuration, dtype, adapters, hash of the weights |
| `columns` | tokens that the cache has passed, padding included |
| `tokens_seen` | for each row, real tokens of its document |
| `text_sha256` | for each row, the hash of its text as the caller gave it; or null |
| `archive` | of a text with an archive: the `suffix` of the file of its blocks, and its `parts` |
| `sha256` | of the record without this entry, and of the tensors: a damaged file is known by it |
"""

import hashlib
import json
from dataclasses import fields
from pathlib import Path
from types import NoneType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..ops.checks import check_types
from ..ops.keeping import SCORES
from ..ops.rules import rule_of
from ..ops.state import InfiniState
from ..options import key_heads
from .tensor_files import FileKind, Place, add_tensors, checksum, copies_of, write_files

FORMAT_VERSION = 2
# The only key of the metadata: several would be written in an order that differs from process to
# process
METADATA_KEY = "hf_infini_memory"
# Options that change nothing of what given weights write into a memory
WITHOUT_EFFECT = {
    "attn_pdrop",
    "embd_pdrop",
    "resid_pdrop",
    "dropout",
    "gate_init",
    "initializer_range",
    "use_cache",
}
WITHOUT_EFFECT |= {"tie_word_embeddings"}
# Options that a description has by what they come to
SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
DESCRIBED_INDIRECTLY = {"segment_length", "layers", "mask_special_tokens", *SPECIAL_TOKENS}


class MemoryFileError(ValueError):
    """A file that is no memory file, is damaged, or holds the memory of another model; the message
    says which."""


KIND = FileKind(
    "memory file", "have the model read the text again (hf-infini read)", MemoryFileError
)
UNSAVED = FileKind(
    "memory file", "nothing was written; find out where the model computes them", MemoryFileError
)
TEXT_HASHES: Any = (list, NoneType)
ENTRIES = {"format_version": int, "model": dict, "columns": int, "tokens_seen": list}
ENTRIES |= {"text_sha256": TEXT_HASHES, "archive": dict, "sha256": str}
MODEL_ENTRIES = {"config": dict, "dtype": str, "adapters": list, "weights_sha256": str}


def describe_model(model: nn.Module) -> dict:
    """What a memory of this model is bound to, JSON-safe: the model as it is set now.

    Reads every weight once to hash it: about a second for 124 million parameters in float32 on one
    core. For many files of one model, call it once and give the result to
    [`InfiniCache.save_pretrained`].

    Returns:
        `config`, the options that decide what a memory means; `dtype`, of the weights; `adapters`,
        none; and `weights_sha256`, of the parameters and buffers that the base model saves, without
        the language-model head.

    Raises:
        ValueError: the model has adapters of PEFT, which can be switched and scaled, is none of
            transformers, or has no memory.
    """
    if not isinstance(model, PreTrainedModel) or any(
        type(m).__module__.startswith("peft.") for m in model.modules()
    ):
        raise ValueError(
            "a memory file is bound to the weights of a model of transformers, and this "
            f"{type(model).__name__} is none, or has adapters beside them: merge these first, "
            "with merge_and_unload()."
        )
    config: Any = model.config
    if not getattr(config, "infini_layers", ()):
        raise ValueError(
            f"a {type(model).__name__} has no memory, which a file could hold: give the model that "
            "has filled the cache."
        )
    # All options of the class but those known to change nothing: a new one counts from its first
    # day
    passed_over = (
        {field.name for field in fields(PreTrainedConfig)} | WITHOUT_EFFECT | DESCRIBED_INDIRECTLY
    )
    options = {
        field.name: getattr(config, field.name)
        for field in fields(config)
        if field.name not in passed_over
    }
    options |= {"model_type": config.model_type, "infini_layers": config.infini_layers}
    # its name in files of earlier versions
    options["tokens_per_segment"] = getattr(config, "segment_length", None)
    options["tokens_kept_out"] = (
        [getattr(config, name) for name in SPECIAL_TOKENS] if config.mask_special_tokens else []
    )
    digest = hashlib.sha256()
    add_tensors(digest, model.base_model.state_dict())
    return {
        "config": json.loads(json.dumps(options)),
        "dtype": str(model.dtype).removeprefix("torch."),
        "adapters": [],
        "weights_sha256": digest.hexdigest(),
    }


def check_description(description: dict) -> None:
    """ValueError unless `description` has the entries of [`describe_model`]."""
    if description.keys() != MODEL_ENTRIES.keys():
        raise ValueError(
            "model must be the model that has filled the cache, or what describe_model says of it, "
            f"with {', '.join(MODEL_ENTRIES)}; got {', '.join(map(str, description)) or 'nothing'}."
        )


def write_memory_file(path: Place, tensors: dict[str, Tensor], record: dict) -> None:
    """Writes tensors and a record (its entries `model` to `text_sha256`) to `path`, so that a
    reader finds the old file or the new one, also where several processes write the same
    file: each writes into a folder, `NAME.….part` beside it, and the last to finish wins. The
    same content gives the same bytes. Folders on the way are made. MemoryFileError where
    numbers are not finite; OSError where the file cannot be written, or is a folder; an old
    one is still there."""
    path, tensors = Path(path), copies_of(tensors)
    UNSAVED.check_finite(path, tensors)
    # as a reader will have it
    record = json.loads(json.dumps({"format_version": FORMAT_VERSION, **record}))
    record["sha256"] = checksum(record, tensors)
    content = save(tensors, {METADATA_KEY: json.dumps(record, sort_keys=True)})
    write_files(path.parent, {path.name: content})


def read_memory_file(path: Place) -> tuple[dict, dict[str, Tensor]]:
    """Record and tensors (on the CPU) of the memory file `path`, whole and undamaged.
    MemoryFileError where it is none, damaged, of another version, or has numbers that are not
    finite; OSError where there is no such file, or it may not be read."""
    _check_no_device(path)
    # in one read: another writer may replace the file between two
    tensors, metadata = KIND.tensors_of(path, Path(path).read_bytes())
    record = KIND.object_of(path, metadata.get(METADATA_KEY, ""))
    version = record.get("format_version")
    if version != FORMAT_VERSION:
        KIND.refuse(
            path,
            f"has format version {version!r}, and this version of hf_infini reads "
            f"{FORMAT_VERSION}; use the one that wrote the file",
        )
    KIND.check_entries(path, record, ENTRIES, {"archive"})
    if record.pop("sha256") != checksum(record, tensors):
        KIND.refuse(path, "is damaged: its content is not what was written (the checksums differ)")
    KIND.check_entries(path, record["model"], MODEL_ENTRIES)
    KIND.check_finite(path, tensors)
    return record, tensors


def _check_no_device(path: Place) -> None:
    if Path(path).is_char_device():  # some never end
        KIND.refuse(path, "is a device and no file")


def kept_and_archived(path: Place) -> tuple[int, bool]:
    """How many tokens the model of the memory file `path` keeps, and whether the file has an
    archive; only its record is read. Errors as of [`read_memory_file`]."""
    _check_no_device(path)
    try:
        with safe_open(path, "pt") as file:
            record = KIND.object_of(path, (file.metadata() or {}).get(METADATA_KEY, ""))
    except SafetensorError as error:
        KIND.refuse(path, f"is damaged or no {KIND.name} ({error})")
    config = record.get("model", {}).get("config", {})
    return int(config.get("kept_tokens", 0)), "archive" in record


def check_model(path: Place, record: dict, model: nn.Module, described: dict | None = None) -> None:
    """MemoryFileError, naming what differs, unless the `record` of the file `path` is of this
    model; options unknown to it had their defaults. `described`: what [`describe_model`] says of
    the model, where it is known."""
    config: Any = model.config
    defaults = {field.name: field.default for field in fields(config)}
    written, given = (
        defaults | side["config"] | side for side in (record["model"], describe_model(model))
    )
    names = sorted(
        name for name in {*written, *given} - {"config"} if written.get(name) != given.get(name)
    )
    # they differ with the options
    names = [name for name in names if name != "weights_sha256"] or names
    if names:
        different = (
            f"{name} is {written.get(name)!r} in the file and {given.get(name)!r} in the model"
            for name in names
        )
        raise MemoryFileError(
            f"{path} holds the memory of another model: {'; '.join(different)}. A memory means "
            "nothing to other weights: load the model that wrote it, or have this one read the "
            "text (hf-infini read)."
        )


def check_tensors(path: Place, tensors: dict[str, Tensor], config: Any, rows: int) -> None:
    """MemoryFileError, naming the first that differs, unless the layers' `tensors` of the file
    `path` are those of a cache of so many `rows` for this `config`."""
    wanted = {
        f"layers.{layer}.{name}": tensor
        for layer, state in first_states(config, rows, torch.float32).items()
        for name, tensor in state.tensors().items()
    }
    for layer, window in config.windows.items():
        if (name := f"layers.{layer}.local_skipped") in tensors:  # `None`: no token was
            wanted[name] = torch.empty(rows, window.places, dtype=torch.bool, device="meta")
    for layer in {*range(config.num_hidden_layers)} - config.windows.keys():
        for name in (f"layers.{layer}.keys", f"layers.{layer}.values"):  # as many as were read
            shape = tensors[name].shape[1:] if name in tensors else ()
            wanted[name] = torch.empty(rows, *(shape if len(shape) == 3 else (0,) * 3))
    found = {name: tensor for name, tensor in tensors.items() if name.startswith("layers.")}
    KIND.check_shapes(path, found, wanted, "the model's cache has")


def first_states(config: Any, rows: int, dtype: torch.dtype) -> dict[int, InfiniState]:
    """The states of the layers with a memory of a model with this `config` before the first
    token, without numbers, by layer. `rows`: of the batch; `dtype`: of keys and values."""
    rule, (heads, *widths) = rule_of(config), key_heads(config)
    key, value = (
        torch.empty(rows, heads, 0, width, dtype=dtype, device="meta") for width in widths
    )
    weighted, taps = (
        bool(rule and rule.parameters(1, 1)) or config.memory_write == "learned",
        config.memory_conv,
    )
    recent = (
        torch.empty(rows, taps - 1, config.hidden_size, dtype=dtype, device="meta")
        if taps
        else None
    )
    how: Any = {"rule": rule, "weighted": weighted, "scores": SCORES[config.keep_score].count}
    return {
        layer: InfiniState.initial(key, value, *window, **how).having(recent_inputs=recent)
        for layer, window in config.windows.items()
    }


@check_types
def cache_bytes(config: PreTrainedConfig) -> int:
    """Bytes that a model's layers with a memory hold of one sequence, however long it is. Where
    the memory skips tokens, each place of a window takes one more.

    Args:
        config: of the model; the cache is counted in its dtype (`None`: torch's default).

    Raises:
        ValueError: no layer has a memory, so that the cache grows with every token.
    """
    if not getattr(config, "infini_layers", ()):
        raise ValueError(
            f"the cache of a {type(config).__name__} without a compressive memory "
            "grows with every token."
        )
    states = first_states(config, 1, dtype_of(config))
    return sum(state.nbytes() for state in states.values())


def dtype_of(config: PreTrainedConfig) -> torch.dtype:
    """The dtype of a `config`, which is a name once it was saved; `None`: torch's default."""
    dtype: Any = config.dtype or torch.get_default_dtype()
    return getattr(torch, dtype) if isinstance(dtype, str) else dtype
