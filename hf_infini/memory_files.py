"""Memory files: what a model remembers of a text, in one safetensors file that the same weights go on from.

[`InfiniCache.save_pretrained`] and `from_pretrained` are the way in and out; here is what lies in the file. The tensors are
those of the cache, by name (`layers.0.memory`, …, `text_hash`) and with their dtypes. The metadata hold one JSON
object, the record:

| entry | |
| --- | --- |
| `format_version` | of this table |
| `model` | what [`describe_model`] says of the model: configuration, dtype, hash of the weights |
| `columns` | tokens that the cache has passed, padding included |
| `tokens_seen` | for each row, real tokens of its document |
| `text_sha256` | for each row, the hash of its text as the caller gave it; or null |
| `sha256` | of the record without this entry, and of the tensors: a damaged file is known by it |

This module travels to the Hub with a model: it imports torch, transformers and safetensors alone.
"""

import hashlib
import json
import os
from dataclasses import fields
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor
from transformers import PreTrainedConfig

FORMAT_VERSION = 2  # 1 did not say how many tokens a memory holds
# The only key of the metadata: several would be written in an order that differs from process to process.
METADATA_KEY = "hf_infini_memory"
# Options that change nothing of what given weights write into a memory.
WITHOUT_MEANING = {"attn_pdrop", "embd_pdrop", "resid_pdrop", "dropout", "gate_init", "initializer_range", "use_cache"}
WITHOUT_MEANING |= {f"summary_{name}" for name in ("type", "use_proj", "activation", "proj_to_labels", "first_dropout")}
WITHOUT_MEANING |= {"tie_word_embeddings"}
# Options that a description has by what they come to.
SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
IN_OTHER_WORDS = {"n_segments", "segment_length", "layers", "mask_special_tokens", *SPECIAL_TOKENS}


class MemoryFileError(ValueError):
    """A file that is no memory file, is damaged, or holds the memory of another model; the message says which."""


def describe_model(model) -> dict:
    """What a memory of this model is bound to, JSON-safe.

    Reads every weight once to hash it: about a second for 124 million parameters in float32 on one core. For many files of
    one model, call it once and give the result to [`InfiniCache.save_pretrained`].

    Returns:
        `config`, the options that decide what a memory means; `dtype`, of the weights; and `weights_sha256`, of all
        parameters and buffers of the base model, the language-model head left out; the few behind the last layer's memory
        are hashed with the rest.

    Raises:
        ValueError: the model has no layer with a memory.
    """
    if not getattr(model.config, "infini_layers", None):
        raise ValueError(
            f"a {type(model).__name__} without Infini-attention has no memory to keep: patch_model() gives a GPT-2 one, "
            "attention='infini' a CausalMHAConfig."
        )
    digest = hashlib.sha256()
    _add_tensors(digest, model.base_model.state_dict())
    return {
        "config": _meaning(model.config),
        "dtype": str(model.dtype).removeprefix("torch."),
        "weights_sha256": digest.hexdigest(),
    }


def write_memory_file(path: str | Path, tensors: dict[str, Tensor], record: dict) -> None:
    """Writes tensors and a record (its entries `model` to `text_sha256`) so that a reader finds the old file or the new one,
    never half of it. Folders on the way are made. The same content gives the same bytes.

    Raises:
        OSError: the file cannot be written; an old one is still there.
    """
    path = Path(path)
    # Copies: layers share tensors, and views of larger ones
    tensors = {
        name: tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format) for name, tensor in tensors.items()
    }
    record = json.loads(json.dumps({"format_version": FORMAT_VERSION, **record}))  # as a reader will have it
    record["sha256"] = _checksum(record, tensors)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not save_file: it goes by a temporary file of another name each time, and a killed process would leave them behind
    part = _part(path)
    try:
        with open(part, "wb") as file:
            file.write(save(tensors, {METADATA_KEY: json.dumps(record, sort_keys=True)}))
            file.flush()
            os.fsync(file.fileno())  # the content reaches the disk before the name does
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def delete_memory_file(path: str | Path) -> None:
    """Deletes a memory file, and what a killed process left of one that it was writing; neither needs to be there."""
    for file in (Path(path), _part(Path(path))):
        file.unlink(missing_ok=True)


def read_record(path: str | Path) -> dict:
    """The record of a memory file, without its tensors and unchecked against them: what it is, for people and programs.

    Raises:
        MemoryFileError: the file is no memory file, or one of a later version.
        OSError: there is no such file.
    """
    return _read(path, lambda file: [])[0]


def read_memory_file(path: str | Path) -> tuple[dict, dict[str, Tensor]]:
    """Record and tensors (on the CPU, in memory of their own) of a memory file, whole and undamaged.

    Raises:
        MemoryFileError: the file is damaged, no memory file, or one of a later version.
        OSError: there is no such file.
    """
    record, tensors = _read(path, lambda file: file.keys())
    if record.pop("sha256", None) != _checksum(record, tensors):
        raise MemoryFileError(f"{path} is damaged: its content is not what was written (the checksums differ).")
    return record, tensors


def check_model(path: str | Path, record: dict, model) -> None:
    """MemoryFileError, naming all that differs, unless the record is of a memory of this model's weights and options."""
    written, given = record["model"], describe_model(model)
    differences = _differences(written["config"], given["config"], model.config)
    if not differences and written["dtype"] != given["dtype"]:
        differences = [f"dtype is {written['dtype']} in the file and {given['dtype']} in the model"]
    if not differences and written["weights_sha256"] != given["weights_sha256"]:
        hashes = " and ".join(f"{side['weights_sha256'][:12]}…" for side in (written, given))
        differences = [f"the weights are not the same (sha256 {hashes})"]
    if differences:
        raise MemoryFileError(
            f"{path} holds the memory of another model: {'; '.join(differences)}. A memory means nothing to other weights: "
            "load the model that wrote it, or have this one read the text (recipes/memorize.py)."
        )


def _meaning(config) -> dict:
    """The options of a configuration that decide what a memory means, as JSON gives them back.

    All options of the class but those known to change nothing: a new one counts from its first day.
    """
    passed_over = {field.name for field in fields(PreTrainedConfig)} | WITHOUT_MEANING | IN_OTHER_WORDS
    options = {field.name: getattr(config, field.name) for field in fields(config) if field.name not in passed_over}
    options |= {name: getattr(config, name) for name in ("model_type", "infini_layers", "tokens_per_segment")}
    kept_out = [getattr(config, name) for name in SPECIAL_TOKENS] if config.mask_special_tokens else []
    return json.loads(json.dumps(options | {"tokens_kept_out": kept_out}))


def _differences(written: dict, given: dict, config) -> list[str]:
    """Which options differ, in words. One that the file does not know yet had its default when the file was written."""
    if written["model_type"] != given["model_type"]:
        written, given = ({"model_type": side["model_type"]} for side in (written, given))
    defaults = {field.name: field.default for field in fields(config)}
    differences = []
    for name in sorted(written.keys() | given.keys()):
        before = written.get(name, defaults.get(name))
        if before != given.get(name):
            differences.append(f"{name} is {before!r} in the file and {given.get(name)!r} in the model")
    return differences


def _part(path: Path) -> Path:
    return path.with_name(f"{path.name}.part")


def _read(path: str | Path, wanted) -> tuple[dict, dict[str, Tensor]]:
    """The record and the tensors whose names `wanted(file)` gives."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no memory file {path}.")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            # Copies, because the file stays mapped under what it gives, and someone may write over it
            tensors = {name: file.get_tensor(name).clone() for name in wanted(file)}
    except SafetensorError as error:
        raise MemoryFileError(f"{path} is damaged or no memory file: {error}.") from error
    try:
        record = json.loads(metadata[METADATA_KEY])
        version = record["format_version"]
    except (KeyError, TypeError, ValueError):
        raise MemoryFileError(
            f"{path} is no memory file: it is a safetensors file without the record that InfiniCache.save_pretrained and "
            "recipes/memorize.py write."
        ) from None
    if version != FORMAT_VERSION:
        remedy = "update hf_infini" if version > FORMAT_VERSION else "have the model read the text again (memorize.py)"
        raise MemoryFileError(
            f"{path} has format version {version}, and this version of hf_infini reads {FORMAT_VERSION}: {remedy}."
        )
    return record, tensors


def _checksum(record: dict, tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256(json.dumps(record, sort_keys=True).encode())
    _add_tensors(digest, tensors)
    return digest.hexdigest()


def _add_tensors(digest, tensors: dict[str, Tensor]) -> None:
    """Names, dtypes, shapes and bytes, by name."""
    for name in sorted(tensors):
        tensor = tensors[name].detach().contiguous().cpu()
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy())
