"""Whether what a memory file holds is what a cache of the model can hold, so that a wrong file is refused when it is loaded
and not by the attention: which tensors there are, their shapes, dtypes and finite numbers, and the counts of tokens. A
checksum tells of damage before that. And which options of the model decide what its memory means, which must be the same.
"""

import json
from collections.abc import Iterator
from dataclasses import fields

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from ..compat.cache_name import CACHE
from ..compat.execution_device import device_of
from ..options import layer_kinds

# A window's tensors have one dtype, that of the keys and values; the memory's are wider.
WINDOW = ("local_key", "local_value", "local_log_weight", "keys", "values")
AUTOCAST = {torch.bfloat16, torch.float16}
# Options that change nothing of what given weights write into a memory.
WITHOUT_EFFECT = {"attn_pdrop", "embd_pdrop", "resid_pdrop", "dropout", "gate_init", "initializer_range", "use_cache"}
WITHOUT_EFFECT |= {f"summary_{name}" for name in ("type", "use_proj", "activation", "proj_to_labels", "first_dropout")}
WITHOUT_EFFECT |= {"tie_word_embeddings"}
# Options that a description has by what they come to.
SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
DESCRIBED_INDIRECTLY = {"n_segments", "segment_length", "layers", "mask_special_tokens", *SPECIAL_TOKENS}


def semantic_options(config) -> dict:
    """The options of a configuration that decide what a memory means, as JSON gives them back.

    All options of the class but those known to change nothing: a new one counts from its first day.
    """
    passed_over = {field.name for field in fields(PreTrainedConfig)} | WITHOUT_EFFECT | DESCRIBED_INDIRECTLY
    options = {field.name: getattr(config, field.name) for field in fields(config) if field.name not in passed_over}
    options |= {name: getattr(config, name) for name in ("model_type", "infini_layers", "tokens_per_segment")}
    kept_out = [getattr(config, name) for name in SPECIAL_TOKENS] if config.mask_special_tokens else []
    return json.loads(json.dumps(options | {"tokens_kept_out": kept_out}))


def different_options(written: dict, given: dict, config) -> list[str]:
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


def fill_with_one_token(model, cache) -> None:
    """Has the model put one token, of zeros, into an empty cache: then its tensors have the names, dtypes and, but for rows
    and columns, the shapes of all caches of this model. Draws no random numbers that others would miss."""
    device = device_of(model)
    embeddings = torch.zeros(1, 1, model.config.hidden_size, dtype=model.dtype, device=device)
    written = torch.ones(1, 1, dtype=torch.bool, device=device)
    with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):
        model.base_model(inputs_embeds=embeddings, memory_mask=written, use_cache=True, **{CACHE: cache})


def find_problem(record: dict, tensors: dict[str, Tensor], example: dict[str, Tensor], model) -> str | None:
    """What is wrong with record and tensors of a file, in words; `None` where nothing is.

    Args:
        record: its entries have the right types.
        tensors: on the CPU.
        example: those of a cache of the model with one token in one row.
        model: with `config` and `dtype`.
    """
    return next(_problems(record, tensors, example, model), None)


def _problems(record, tensors, example, model) -> Iterator[str]:
    """In this order, for a check relies on those before it."""
    yield from _problems_of_record(record)
    yield from _problems_of_form(record, tensors, example, model)
    yield from _problems_of_numbers(tensors)
    yield from _problems_of_counts(record, tensors)
    for name in [name for name in example if name.rpartition(".")[2].startswith("start_")]:
        # Equal on the device that wrote the file; softplus may round otherwise on another, by far less than this
        if not torch.allclose(tensors[name], example[name].cpu(), rtol=1e-5, atol=0):
            yield f"{name} is not the start that the model's weights give"


def _problems_of_record(record) -> Iterator[str]:
    seen, columns, hashes = record["tokens_seen"], record["columns"], record["text_sha256"]
    if not seen:
        yield "tokens_seen has no rows"
    if columns < 1 or max(seen) > columns:
        yield f"tokens_seen is {max(seen)} in a row, and columns, which counts padding too, {columns}"
    if hashes is not None and len(hashes) != len(seen):
        yield f"text_sha256 has {len(hashes)} rows and tokens_seen {len(seen)}"


def _problems_of_form(record, tensors, example, model) -> Iterator[str]:
    """Names, shapes and dtypes."""
    rows, columns = len(record["tokens_seen"]), record["columns"]
    full = any(name.endswith(".keys") for name in example)
    wanted: dict[str, tuple[tuple[int, ...], set[torch.dtype]]] = {"text_real": ((rows,), {torch.int64})}
    optional = {"text_fingerprint": ((rows, 2), {torch.int64})}
    if full:
        optional["documents"] = ((rows, columns), {torch.int64})
    computed = {model.dtype} | (AUTOCAST if model.dtype == torch.float32 else set())
    for name, one in example.items():
        layer, _, kind = name.rpartition(".")
        shape, dtypes = (rows, *one.shape[1:]), {one.dtype}
        if kind.startswith("start_"):
            shape = tuple(one.shape)
        elif kind in ("keys", "values"):
            shape = (rows, one.shape[1], _kept_columns(model.config, int(layer.split(".")[1]), columns), one.shape[3])
        elif kind == "local_key":
            optional[f"{layer}.local_skipped"] = ((rows, one.shape[2]), {torch.bool})
        if kind in WINDOW:
            dtypes |= computed
            first = tensors.get(f"{layer}.{'local_key' if kind.startswith('local') else 'keys'}")
            if first is not None and first.dtype in dtypes:
                dtypes = {first.dtype}
        elif kind == "recent_inputs":
            dtypes |= computed | {torch.float32}  # autocast leaves a norm's output in float32
        wanted[name] = (shape, dtypes)
    missing, extra = sorted(wanted.keys() - tensors.keys()), sorted(tensors.keys() - wanted.keys() - optional.keys())
    if missing:
        yield f"the tensors {', '.join(missing)} are missing"
    if extra:
        yield f"the tensors {', '.join(extra)} are none of this model's"
    for name, tensor in sorted(tensors.items()):
        shape, dtypes = (wanted | optional)[name]
        if tuple(tensor.shape) != shape:
            yield f"{name} is {list(tensor.shape)}, for {rows} rows and {columns} columns it must be {list(shape)}"
        if tensor.dtype not in dtypes:
            names = " or ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
            yield f"{name} is {str(tensor.dtype).removeprefix('torch.')} and must be {names}"


def _kept_columns(config, layer: int, columns: int) -> int:
    """How many of the columns a layer without a memory keeps: all, or those of its sliding window before the next token."""
    kind = layer_kinds(config)[layer]
    if kind == "full_attention":
        return columns
    return min(columns, (config.sliding_window if kind == "sliding_attention" else config.attention_chunk_size) - 1)


def _problems_of_counts(record, tensors) -> Iterator[str]:
    seen, first = record["tokens_seen"], {}
    for name, tensor in sorted(tensors.items()):
        kind = name.rpartition(".")[2]
        if kind == "kept_position":
            if (tensor < -1).any() or (tensor >= torch.tensor(seen)[:, None, None]).any() or (tensor.diff() < 0).any():
                yield f"{name} holds other numbers than those of tokens that were read, in order, and −1"
            kind, tensor = "how many tokens are kept", (tensor >= 0).sum(2)
            other, shared = first.setdefault(kind, (name, tensor[:, :1]))
            if not (tensor == shared).all():
                yield f"{name} keeps another number of tokens than {other}, and all heads keep as many"
        if kind == "tokens_seen" and tensor.tolist() != seen:
            yield f"{name} is {tensor.tolist()} and the record's tokens_seen {seen}"
        if kind in ("last_position", "local_skipped", "memory_tokens"):
            other, shared = first.setdefault(kind, (name, tensor))
            if not torch.equal(tensor, shared):
                yield f"{name} is not {other}, and all layers have read the same tokens"
        if kind == "keys" and "documents" not in tensors and seen != [record["columns"]] * len(seen):
            yield f"without documents every column is a token, and of {record['columns']} columns tokens_seen has {seen}"


def _problems_of_numbers(tensors) -> Iterator[str]:
    for name, tensor in sorted(tensors.items()):
        if tensor.is_floating_point() and not tensor.isfinite().all():
            yield f"{name} holds NaN or infinity"
        if name.endswith(".normaliser") and (tensor < 0).any():
            yield f"{name} is negative somewhere, and is a sum of positive features"
