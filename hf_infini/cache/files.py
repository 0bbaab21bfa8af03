"""Memory files: what a model remembers of a text, in one safetensors file from which the same weights continue.

[`InfiniCache.save_pretrained`] and `from_pretrained` write and read them; this module has the format. The tensors are
those of the cache, by name (`layers.0.memory`, …, `text_real`) and with their dtypes. The metadata hold one JSON
object, the record:

| entry | |
| --- | --- |
| `format_version` | of this table |
| `model` | what [`describe_model`] says of the model: configuration, dtype, adapters, hash of the weights |
| `columns` | tokens that the cache has passed, padding included |
| `tokens_seen` | for each row, real tokens of its document |
| `text_sha256` | for each row, the hash of its text as the caller gave it; or null |
| `sha256` | of the record without this entry, and of the tensors: a damaged file is known by it |

Whether a cache of the model can be made of a whole file, contents.py checks.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile

import torch
from safetensors import safe_open
from safetensors.torch import load, save
from torch import Tensor, nn
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from ..compat.cache_name import CACHE
from ..compat.peft_layers import active_adapters, adapter_layers, settings, without_wrappers
from ..ops.checks import check_kinds
from ..ops.state import WINDOWS, InfiniState
from .contents import different_options, fill_with_one_token, find_problem, semantic_options

FORMAT_VERSION = 2
# The only key of the metadata: several would be written in an order that differs from process to process.
METADATA_KEY = "hf_infini_memory"


class MemoryFileError(ValueError):
    """A file that is no memory file, is damaged, or holds the memory of another model; the message says which."""


class MemoryFileAccessError(MemoryFileError, OSError):
    """A memory file that is not there, or that the system does not read or write; the message says why."""


@contextmanager
def _naming(path: Path, done: str) -> Iterator[None]:
    """Re-raises OSError naming path and action."""
    try:
        yield
    except MemoryFileAccessError:
        raise
    except OSError as error:
        raise MemoryFileAccessError(f"{path} cannot be {done}: {error.strerror or error}.") from error


def _is_count(value) -> bool:
    return type(value) is int and 0 <= value < 2**63  # True is no count


def _is_list(value, kind) -> bool:
    return isinstance(value, list) and all(map(kind, value))


def _is_text(value) -> bool:
    return isinstance(value, str)


def _is_description(value) -> bool:
    texts = isinstance(value, dict) and all(_is_text(value.get(name)) for name in ("dtype", "weights_sha256"))
    texts = texts and _is_list(value.get("adapters"), _is_text)
    return texts and isinstance(value.get("config"), dict) and _is_text(value["config"].get("model_type"))


# What the entries of a record may be, beside the version.
ENTRIES = {
    "model": _is_description,
    "columns": _is_count,
    "tokens_seen": lambda value: _is_list(value, _is_count),
    "text_sha256": lambda value: value is None or _is_list(value, _is_text),
    "sha256": _is_text,
}


@check_kinds
def describe_model(model: nn.Module) -> dict:
    """What a memory of this model is bound to, JSON-safe: the model as it is set now.

    Reads every weight once to hash it: about a second for 124 million parameters in float32 on one core. For many files of
    one model, call it once and give the result to [`InfiniCache.save_pretrained`].

    Args:
        model: a model with a memory, or a `PeftModel` around one.

    Returns:
        `config`, the options that decide what a memory means; `dtype`, of the weights; `adapters`, the names of those of
        PEFT that act; and `weights_sha256`, of the parameters and buffers that the base model saves, the language-model
        head left out, and of how adapters are set: active, merged, scaled. The few parameters after the last layer's
        memory are hashed with the rest.

    Raises:
        ValueError: the model has no layer with a memory, or an adapter that is not inside of layers.
    """
    model = without_wrappers(model)
    if not getattr(model.config, "infini_layers", None):
        raise ValueError(
            f"a {type(model).__name__} without Infini-attention has no memory to keep: patch_model() gives a GPT-2 one, "
            "attention='infini' a CausalMHAConfig."
        )
    digest = hashlib.sha256()
    layers = adapter_layers(model.base_model)
    # Buffers that are not saved as well: some adapters draw theirs from a seed
    buffers = {f"{name}.{own}": buffer for name, layer in layers.items() for own, buffer in layer.named_buffers()}
    _add_tensors(digest, model.base_model.state_dict() | buffers)
    if layers:
        digest.update(settings(layers).encode())
    return {
        "config": semantic_options(model.config),
        "dtype": str(model.dtype).removeprefix("torch."),
        "adapters": active_adapters(layers),
        "weights_sha256": digest.hexdigest(),
    }


def save_cache(cache, path: str | Path, model, text_sha256: Sequence[str] | None) -> None:
    """[`InfiniCache.save_pretrained`]."""
    state = cache.first_state()
    if state is None:
        raise ValueError(f"this cache has read nothing yet: give it to model(ids, {CACHE}=cache) before saving.")
    tokens_seen = state.tokens_seen.tolist()
    if text_sha256 is not None and (isinstance(text_sha256, str) or len(text_sha256) != len(tokens_seen)):
        raise ValueError(f"text_sha256 must be a list with one for each of the {len(tokens_seen)} rows.")
    cache.drop_unfinished()
    tensors = cache.tensors()
    empty = state.empty_places(*cache.window)[:, None, :, None]
    for name in [name for name in tensors if name.rpartition(".")[2] in WINDOWS]:
        tensors[name] = tensors[name].masked_fill(empty, 0)  # a step that failed may have written its token there
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise ValueError(f"{name} of this cache holds NaN or infinity: nothing could go on from its file.")
    record = {
        "model": model if isinstance(model, dict) else describe_model(model),
        "columns": cache.get_seq_length(),
        "tokens_seen": tokens_seen,
        "text_sha256": None if text_sha256 is None else list(text_sha256),
    }
    write_memory_file(path, tensors, record)


def load_cache(kind: type, path: str | Path, model, rows: Sequence[int] | None):
    """[`InfiniCache.from_pretrained`] of this class of caches."""
    record, tensors = read_memory_file(path)
    check_model(path, record, model)
    model = without_wrappers(model)
    cache, example = kind(model.config), kind(model.config)
    fill_with_one_token(model, example)
    if problem := find_problem(record, tensors, example.tensors(), model):
        raise MemoryFileError(f"{path} is of this model, but was not written by save_pretrained: {problem}.")
    devices = {name.rpartition(".")[0]: tensor.device for name, tensor in example.tensors().items()}
    for number, layer in enumerate(cache.layers):
        prefix = f"layers.{number}"
        of_layer = {n: t.to(devices[prefix]) for n, t in tensors.items() if n.rpartition(".")[0] == prefix}
        own = {name.rpartition(".")[2]: tensor for name, tensor in of_layer.items()}
        if not isinstance(layer, DynamicLayer):
            state = InfiniState(local_log_weight=own.pop("local_log_weight", None), **own)
            layer.advance(state, record["columns"])
        else:
            layer.update(own["keys"], own["values"])
            if isinstance(layer, DynamicSlidingWindowLayer):
                layer.cumulative_length = record["columns"]
    cache.text = cache.text.from_tensors({name: tensor.to(devices[""]) for name, tensor in tensors.items()})
    count = len(record["tokens_seen"])
    if rows is not None:
        if not rows or not all(hasattr(row, "__index__") and 0 <= row < count for row in rows):
            raise ValueError(f"rows must be numbers from 0 to {count - 1}, the rows of {path}; got {list(rows)}.")
        cache.batch_select_indices(torch.tensor(rows, dtype=torch.long))
    return cache


@check_kinds
def write_memory_file(path: str | Path, tensors: dict[str, Tensor], record: dict) -> None:
    """Writes tensors and a record (its entries `model` to `text_sha256`) so that a reader finds the old file or the new one,
    also where several processes write the same file: each writes a temporary file, `NAME.….part` in the same folder, and
    the last to finish wins. The same content gives the same bytes.

    Folders on the way are made. A symbolic link of this name is replaced by the file, and not followed. Permissions are
    those of any new file (umask).

    Raises:
        ValueError: an entry of the record is missing, or cannot be.
        MemoryFileAccessError: the file cannot be written, or is a folder; an old one is still there.
    """
    path = Path(path)
    with _naming(path, "written"):
        if path.is_dir():
            name = path / "memory.safetensors"
            raise MemoryFileAccessError(f"{path} is a folder: give the name of a file, such as {name}.")
    # Copies: layers share tensors, and views of larger ones
    tensors = {
        name: tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format) for name, tensor in tensors.items()
    }
    record = json.loads(json.dumps({"format_version": FORMAT_VERSION, **record}))  # as a reader will have it
    record["sha256"] = _checksum(record, tensors)
    if wrong := _wrong_entries(record):
        raise ValueError(f"this is not a record of a memory: {wrong}. The model's entry is what describe_model() gives.")
    content = save(tensors, {METADATA_KEY: json.dumps(record, sort_keys=True)})
    with _naming(path, "written"):
        _replace(path, content)


def _replace(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with NamedTemporaryFile(dir=path.parent, prefix=f"{path.name}.", suffix=".part", delete=False) as file:
        try:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())  # the content reaches the disk before the name does
            file.close()  # Windows renames no open file
            os.chmod(file.name, 0o666 & ~_umask())  # a temporary file is its owner's only
            os.replace(file.name, path)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise


def _umask() -> int:
    os.umask(mask := os.umask(0))
    return mask


@check_kinds
def read_record(path: str | Path) -> dict:
    """The record of a memory file, without its tensors and unchecked against them: what it is, for people and programs.

    Raises:
        MemoryFileError: this is no memory file, an unreadable one, or one of a later version.
        MemoryFileAccessError: there is no such file, or it may not be read.
    """
    return _read(path, whole=False)[0]


@check_kinds
def read_memory_file(path: str | Path) -> tuple[dict, dict[str, Tensor]]:
    """Record and tensors (on the CPU, in memory of their own) of a memory file, whole and undamaged.

    Raises:
        MemoryFileError: this is no memory file, a damaged one, or one of a later version.
        MemoryFileAccessError: there is no such file, or it may not be read.
    """
    record, tensors = _read(path, whole=True)
    if record.pop("sha256") != _checksum(record, tensors):
        raise MemoryFileError(f"{path} is damaged: its content is not what was written (the checksums differ).")
    return record, tensors


@check_kinds
def check_model(path: str | Path, record: dict, model: nn.Module) -> None:
    """MemoryFileError, naming all that differs, unless the record is of a memory of this model's weights and options."""
    written, given = record["model"], describe_model(model)
    differences = different_options(written["config"], given["config"], without_wrappers(model).config)
    if not differences and written["dtype"] != given["dtype"]:
        differences = [f"dtype is {written['dtype']} in the file and {given['dtype']} in the model"]
    adapters = [side["adapters"] for side in (written, given)]
    if not differences and adapters[0] != adapters[1]:
        before, now = (", ".join(names) or "none" for names in adapters)
        differences = [f"the adapters that act are {before} in the file and {now} in the model"]
    if not differences and written["weights_sha256"] != given["weights_sha256"]:
        hashes = " and ".join(f"{side['weights_sha256'][:12]}…" for side in (written, given))
        kind = "the weights, or how adapters are set," if given["adapters"] else "the weights"
        differences = [f"{kind} are not the same (sha256 {hashes})"]
    if differences:
        raise MemoryFileError(
            f"{path} holds the memory of another model: {'; '.join(differences)}. A memory means nothing to other weights: "
            "load the model that wrote it, or have this one read the text (recipes/memorize.py)."
        )


def _read(path: str | Path, whole: bool) -> tuple[dict, dict[str, Tensor]]:
    """The record and, if `whole`, the tensors."""
    path = Path(path)
    with _naming(path, "read"):
        metadata, tensors = _content(path, whole)
    try:
        record = json.loads(metadata[METADATA_KEY])
        version = record["format_version"]
    except (KeyError, TypeError, ValueError, RecursionError):
        raise MemoryFileError(
            f"{path} is no memory file: it is a safetensors file without the record that InfiniCache.save_pretrained and "
            "recipes/memorize.py write."
        ) from None
    if version != FORMAT_VERSION:
        raise MemoryFileError(
            f"{path} has format version {version!r}, and this version of hf_infini reads {FORMAT_VERSION}: have this one "
            "read the text (recipes/memorize.py), or use the one that wrote the file."
        )
    if wrong := _wrong_entries(record):
        raise MemoryFileError(f"{path} is damaged, or was not written by hf_infini: in its record {wrong}.")
    return record, tensors


def _content(path: Path, whole: bool) -> tuple[dict, dict[str, Tensor]]:
    """The metadata and, if `whole`, the tensors."""
    if path.exists() and not path.is_file():
        raise MemoryFileError(f"{path} is no memory file: it is {'a folder' if path.is_dir() else 'no regular file'}.")
    if not path.exists():
        raise MemoryFileAccessError(f"there is no memory file {path}.")
    try:
        if not whole:
            with safe_open(path, framework="np") as file:
                return file.metadata(), {}
        # One read: safe_open opens a file twice for torch, and another writer may replace it between
        with path.open("rb") as file:
            content = file.read(8)
            end = 8 + int.from_bytes(content, "little")
            if not 8 < end <= os.fstat(file.fileno()).st_size:  # or a hole of any size would be read
                raise ValueError("no header")
            content += file.read()
        return json.loads(content[8:end]).get("__metadata__"), load(content)
    except OSError:
        raise
    except Exception as error:  # safetensors and torch have no common class for what a header may say
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise MemoryFileError(f"{path} is damaged or no memory file ({reason}).") from error


def _wrong_entries(record: dict) -> str:
    """In words, which entries are missing or cannot be; empty where all are right."""
    return "; ".join(f"{name} is {record.get(name)!r:.80}" for name, fits in ENTRIES.items() if not fits(record.get(name)))


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
