"""What a memory has learned, apart from the model: a folder of a few megabytes, put on the plain
model with one call.

`infini_adapter.json` has the options of [`patch_model`], and which model they were trained with;
`infini_adapter.safetensors` the parameters of the memory. A LoRA trained with them is beside them,
saved by PEFT, but with a task type that PEFT refuses, and which says how to load it: PEFT would put
it on a model without the memory.

The record has a checksum of itself, and one of each file beside it: files that are damaged, or of
two adapters, are refused. Records of earlier versions have none, and are read as they are.
"""

import functools
import hashlib
import inspect
import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import cached_file
from transformers.utils.hub import cached_files

from ..cache.tensor_files import FileKind, checksum, copies_of, write_files
from ..compat.class_lookups import PREFIX
from ..compat.peft_saving import UnsavedMemoryWarning, renewed, with_saving
from ..layers.memory_layer import PARAMETERS, MemoryLayerMixin, gates_of, memory_layers
from ..ops.checks import Model, check_types
from ..ops.keeping import SCORES
from ..options import key_heads
from .base import InfiniPreTrainedMixin, call_of_fit
from .description import DESCRIPTION, check_same, describe, has_signs
from .families import infini_config
from .option_checks import meant
from .patching import convert_config, patch_model
from .structure import inside_of
from .transaction import unchanged_on_error

RECORD, WEIGHTS = "infini_adapter.json", "infini_adapter.safetensors"
LORA, LORA_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # PEFT's names
LOADING = ("kept_tokens", "keep_score")  # what load_adapter takes itself
KIND = FileKind("file of an adapter", "get it again, or save the adapter again (save_adapter)")
OTHER = FileKind("file of an adapter", f"patch the model with the options of its {RECORD}")
UNSAVED = FileKind("adapter", "nothing was written")
ENTRIES = {"options": dict, "model": dict, "files": dict, "sha256": str}
FILES = {WEIGHTS: str, LORA: str, LORA_WEIGHTS: str}
SEALED = ("files", "sha256")  # entries that the records of earlier versions do not have
MARK = (
    " with Infini-attention: hf_infini.load_adapter(plain_model, path) loads this adapter and "
    "its memory"
)


@check_types
def lora_config(model: Model, **options):
    """PEFT's `LoraConfig` for a model with a memory, whose gates are trained and saved beside the
    LoRA. What else the memory has learned is not trained, and saved as it is now, or as a later
    [`fit_keep_score`] of PEFT's wrapper leaves it. ValueError where the model has no memory, or one
    with a learned score that was not fitted.

    Args:
        options: those of `LoraConfig`, such as `r=16`; your `modules_to_save`, names or one name,
            are added to the gates. Not given, `task_type` is "CAUSAL_LM", and `target_modules` are
            the ones that PEFT chooses for the plain model.
    """
    from peft import LoraConfig
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING

    if not memory_layers(model):
        raise ValueError(
            f"a {type(model).__name__} has no memory to train beside a LoRA: "
            "patch_model() it first."
        )
    inside = inside_of(model)
    kind = inside.config.model_type.removeprefix(PREFIX)
    names = dict.fromkeys(".".join(name.split(".")[-2:]) for name in gates_of(model))
    others = options.pop("modules_to_save", None) or ()
    own: dict[str, Any] = {
        "task_type": "CAUSAL_LM",
        "modules_to_save": [*names, *([others] if isinstance(others, str) else others)] or None,
        "target_modules": TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING.get(kind),
    }
    config = LoraConfig(**own | options)
    if not hasattr(inside, "_base_is_plain"):
        return config
    # with which it is saved: by its name PEFT would find the plain model
    return with_saving(config, _writing_of(model))


def renew_saved(model: Model) -> None:
    """Has the LoRAs of PEFT's wrapper around a `model`, which were made with [`lora_config`], save
    what the memory has learned by now."""
    configs: Any = getattr(model, "peft_config", {})
    for name, config in configs.items():
        configs[name] = renewed(config, functools.partial(_writing_of, model))


def _writing_of(model: Model) -> Callable:
    """What writes a model's memory, as it is now, into a folder."""
    record, tensors = _memory_of(model)
    return functools.partial(_write_memory, record=record, tensors=tensors)


@check_types
def save_adapter(model: Model, folder: str | os.PathLike, dtype: torch.dtype | None = None) -> None:
    """Writes what the memories of a patched model have learned into a folder, which is made where
    there is none; of PEFT's wrapper around a model, its adapter, too. Whoever reads the folder
    finds the old adapter or this one, or an error.

    Args:
        model: the patched model, or PEFT's wrapper around it.
        folder: where to; an adapter that is there is replaced.
        dtype: of the parameters in the files, of floating point; `None`: their own.

    Raises:
        ValueError: the model has no such memory, several adapters of PEFT, a learned score that was
            not fitted, or numbers that are not finite; nothing was written.
        OSError: a file cannot be written.
    """
    inside = inside_of(model)
    if not isinstance(inside, InfiniPreTrainedMixin):
        raise ValueError(
            f"a {type(inside).__name__} has no Infini-attention, whose parameters could be saved."
        )
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(
            f"dtype must be one of floating point, such as torch.bfloat16; got {dtype}."
        )
    folder, beside = Path(folder), {}
    if model is not inside:
        if [*model.peft_config] != ["default"]:
            raise ValueError(
                "one adapter is saved, named 'default'; this model has "
                f"{', '.join(model.peft_config)}."
            )
        beside = _saved_by_peft(model, folder, dtype)
    elif (folder / LORA).is_file():
        raise ValueError(
            f"{folder} has an adapter of PEFT, and this model has none: remove "
            "it, or give another folder."
        )
    _write_memory(folder, *_memory_of(model, dtype), beside)


@check_types
@unchanged_on_error
def load_adapter(
    model: Model,
    path: str | os.PathLike,
    *,
    kept_tokens: int | None = None,
    keep_score: str | None = None,
    **hub,
):
    """Gives a plain model the memories of [`save_adapter`], in place, and PEFT's adapter, if there
    is one.

    Args:
        model: the plain model of the adapter; or one whose weights differ a little, as quantized
            ones do: a warning says so.
        path: a folder, or a name on the Hub.
        kept_tokens: how many tokens a head keeps on average, by the same scores; `None`: as many as
            when it was saved.
        keep_score: one that has learned no more: "learned" and "half" take each other's scores,
            and the first of "two_learned", with the shares of both; `None`: as when it was saved.
        hub: `revision`, `token`, … of a name on the Hub.

    Returns:
        The model, or PEFT's wrapper around it, whose `merge_and_unload()` gives the model with the
        adapter in its weights.

    Raises:
        ValueError: the adapter belongs to another model, is damaged, does not go with its own
            options or with these, or a keyword is unknown. After this or any other error, also
            Ctrl-C, the model is as it was.
        OSError: a file is missing.
    """
    if not isinstance(model, PreTrainedModel):
        raise ValueError(
            "an adapter of a memory is put on a plain model of transformers; got a "
            f"{type(model).__name__}."
        )
    if isinstance(model, InfiniPreTrainedMixin):
        raise ValueError(
            "this model has Infini-attention already, and an adapter is put on a plain one: "
            "unpatch_model() it first."
        )
    adapter = read_adapter(path, **hub)
    wanted = adapter.record["model"]
    kind = {"model_type": model.config.model_type.removeprefix(PREFIX)}
    # of another type there is perhaps nothing else to say
    check_same(path, describe(model) if kind.items() <= wanted.items() else kind, wanted)
    options = _checked_options(
        model, adapter, {"kept_tokens": kept_tokens, "keep_score": keep_score}
    )
    config = _peft_config(adapter)
    # All that can be checked is checked: from here on the model is changed
    adapted = patch_model(model, **options)
    if config is not None:
        adapted = _with_lora(model, adapter, config)
    restore_adapter(adapted, of_score(adapter, options["keep_score"]))
    return adapted


class Adapter(NamedTuple):
    """An adapter as its files have it, each checked by itself."""

    files: dict[str, Path]  # by their names, those that there are
    record: dict  # [`read_record`]
    tensors: dict[str, Tensor]  # of the memory
    lora: dict[str, Tensor]  # of PEFT's adapter, if there is one
    lora_config: dict[str, Any]


def read_record(path, **hub) -> dict:
    """What an adapter says of itself: the `options` of its memory, and the `model` that it belongs
    to ([`describe`]); and, but for earlier versions, the checksums of the `files` beside it and of
    all this, `sha256`. ValueError where the file is damaged or no record; OSError where it is
    missing. `path`, others: as of [`load_adapter`]."""
    return _record_of(_file(path, RECORD, hub))


def read_adapter(path, **hub) -> Adapter:
    """All files of the adapter at `path`, checked as [`load_adapter`] says, apart from a model."""
    files = {name: _file(path, name, hub) for name in (RECORD, WEIGHTS)}
    if (file := _file(path, LORA, hub, needed=False)) is not None:
        files |= {LORA: file, LORA_WEIGHTS: _file(path, LORA_WEIGHTS, hub)}
    elif Path(path).is_dir() and (file := _file(path, LORA_WEIGHTS, hub, needed=False)):
        files[LORA_WEIGHTS] = file
    record = _record_of(files[RECORD])
    sums, there = record.get("files"), files.keys() - {RECORD}
    named = there if sums is None else sums.keys()
    # of the two, none is without the other
    wanted = {*named, *((LORA, LORA_WEIGHTS) if named & {LORA, LORA_WEIGHTS} else ())}
    if missing := sorted(wanted - there):
        raise FileNotFoundError(
            f"{path} has an adapter without its {', '.join(missing)}: {KIND.remedy}."
        )
    content = {name: files[name].read_bytes() for name in sorted(there)}
    for name, found in _checksums(content, files).items():
        if sums is not None and sums.get(name) != found:
            KIND.refuse(files[name], f"is damaged, or was not saved with the {RECORD} beside it")
    tensors = {}
    for name in sorted(there & {WEIGHTS, LORA_WEIGHTS}):
        tensors[name], _ = KIND.tensors_of(files[name], content[name])
        for each, tensor in tensors[name].items():
            if not tensor.is_floating_point():
                KIND.refuse(
                    files[name],
                    f"is damaged: {each} must be of floating point, and is {tensor.dtype}",
                )
        KIND.check_finite(files[name], tensors[name])
    config = KIND.object_of(files[LORA], content[LORA]) if LORA in content else {}
    return Adapter(files, record, tensors[WEIGHTS], tensors.get(LORA_WEIGHTS, {}), config)


def of_score(adapter: Adapter, keep_score: str) -> Adapter:
    """An adapter without what a `keep_score` has not learned."""
    learned = {name for score in SCORES.values() for name in score.learns}
    others = learned - {*SCORES[keep_score].learns}
    return adapter._replace(
        tensors={
            name: tensor
            for name, tensor in adapter.tensors.items()
            if name.partition(".")[2] not in others
        }
    )


def merged(model) -> PreTrainedModel:
    """What [`load_adapter`] gives, with PEFT's adapter, if there is one, added to the model's
    weights."""
    return model.merge_and_unload() if hasattr(model, "merge_and_unload") else model


def restore_adapter(model, adapter, **hub) -> None:
    """Gives a model that has its memories what [`save_adapter`] wrote, also of its LoRA; `adapter`:
    what [`read_adapter`] gives, or its arguments. Errors as [`load_adapter`]; the model is as it
    was."""
    found = adapter if isinstance(adapter, Adapter) else read_adapter(adapter, **hub)
    state = model.state_dict(keep_vars=True)
    memory = {name: state[key] for name, key in _names_of(model).items()}
    OTHER.check_shapes(found.files[WEIGHTS], found.tensors, memory, "the model's options say")
    if model is not inside_of(model):
        from peft import get_peft_model_state_dict, set_peft_model_state_dict

        wanted = get_peft_model_state_dict(model, save_embedding_layers=False)
        wanted |= {name: state[name] for name in found.lora.keys() & state.keys() - wanted.keys()}
        file = found.files.get(LORA_WEIGHTS, found.files[RECORD])
        KIND.check_shapes(file, found.lora, wanted, f"{LORA} says")
        set_peft_model_state_dict(model, found.lora)
    with torch.no_grad():
        for name, parameter in memory.items():
            parameter.copy_(found.tensors[name])


def _checked_options(model, adapter: Adapter, given: dict[str, Any]) -> dict[str, Any]:
    """The options with which a plain model is patched for an adapter: those of its record, and
    those `given` that are not `None`. ValueError where they do not go together, or with the
    tensors or the model."""
    config_class = infini_config(model.config_class)
    options, file = adapter.record["options"], adapter.files[RECORD]
    if unknown := sorted(options.keys() - {*config_class.own_options()}):
        KIND.refuse(file, f"has unknown options {meant(unknown, config_class.own_options())}")
    try:
        config = convert_config(model.config, config_class, **options)
    except (ValueError, TypeError) as error:
        KIND.refuse(file, f"has options that do not go together, or not with the model ({error})")
    # as the layers will have them
    layer: Any = MemoryLayerMixin()
    layer.options, layer.head_counts = (
        config,
        (config.num_attention_heads, *key_heads(config)[:2]),
    )
    layer.add_memory_parameters(config.hidden_size, device="meta")
    wanted = {
        f"{number}.{name}": tensor
        for number in config.infini_layers
        for name, tensor in layer.state_dict(keep_vars=True).items()
    }
    KIND.check_shapes(
        adapter.files[WEIGHTS], adapter.tensors, wanted, f"the options of {RECORD} say"
    )
    saved = config.keep_score
    there = {*SCORES[saved].learns}
    alike = [
        name
        for name, score in SCORES.items()
        if there >= {*score.learns} and bool(there) == bool(score.learns)
    ]
    given = {name: value for name, value in given.items() if value is not None}
    if given.get("keep_score", saved) not in alike:
        raise ValueError(
            f"the adapter was saved with keep_score={saved!r}: only "
            f"{' and '.join(map(repr, alike))} share scores."
        )
    convert_config(model.config, config_class, **options | given)
    return options | given


def _memory_of(model, dtype: torch.dtype | None = None) -> tuple[dict, dict[str, Tensor]]:
    """The record of a model's memory, and copies of its parameters; `dtype`: theirs, or `None`.
    ValueError where a learned score was not fitted, or numbers are not finite."""
    unfitted = [
        str(layer.layer_idx)
        for layer in memory_layers(model).values()
        if layer.window.kept_tokens and not all(each.any() for each in layer.keep_weights.values())
    ]
    if unfitted:
        raise ValueError(
            f"the learned keep_score of layers {', '.join(unfitted)} was not fitted, and would "
            f"keep the earliest tokens: {call_of_fit(inside_of(model).config.keep_score)} first, "
            'or patch the model with keep_score="attention".'
        )
    state, config = model.state_dict(), inside_of(model).config
    tensors = {name: state[key] for name, key in _names_of(model).items()}
    tensors = copies_of(tensors, dtype)
    UNSAVED.check_finite("the adapter", tensors)
    return {
        "options": {name: getattr(config, name) for name in config.own_options()},
        "model": describe(model),
    }, tensors


def _names_of(model) -> dict[str, str]:
    """The names of the memories' tensors in the model's state, by layer and their own name:
    "3.gate.weight"."""
    found = {}
    for layer_name, layer in memory_layers(model).items():
        for name in layer.state_dict(keep_vars=True):
            own = name.replace("original_module.", "")  # and not PEFT's copies of it
            if own.partition(".")[0] in PARAMETERS and ".modules_to_save." not in name:
                found[f"{layer.layer_idx}.{own}"] = f"{layer_name}.{name}"
    return found


def _saved_by_peft(model, folder: Path, dtype: torch.dtype | None) -> dict[str, bytes]:
    """The files in which PEFT saves its adapter into a folder, by their names."""
    with tempfile.TemporaryDirectory() as name, warnings.catch_warnings():
        warnings.simplefilter("ignore", UnsavedMemoryWarning)  # it is saved beside them
        place = Path(name)
        if (folder / "README.md").is_file():  # in which PEFT changes what it knows
            shutil.copy(folder / "README.md", place)
        model.save_pretrained(place)
        files = {file.name: file.read_bytes() for file in place.iterdir() if file.is_file()}
    lora, _ = KIND.tensors_of(LORA_WEIGHTS, files[LORA_WEIGHTS])
    lora = copies_of(lora, dtype)
    UNSAVED.check_finite("the LoRA", lora)
    return files | {LORA_WEIGHTS: save(lora, {"format": "pt"})}


def _write_memory(
    folder: str | Path,
    record: dict,
    tensors: dict[str, Tensor],
    beside: dict[str, bytes] | None = None,
) -> None:
    """Writes a memory and its record, which says what is `beside` it: files of PEFT, which are
    written too, by their names; `None`: those that are in the folder. The configuration of a LoRA
    is marked."""
    folder, names = Path(folder), (LORA, LORA_WEIGHTS)
    there = {name: (folder / name).read_bytes() for name in names if (folder / name).is_file()}
    files = dict(there if beside is None else beside)
    files.pop(RECORD, None)  # the new one comes last
    if LORA in files:
        values = KIND.object_of(folder / LORA, files[LORA])
        values["task_type"] = f"{str(values.get('task_type')).removesuffix(MARK)}{MARK}"
        files[LORA] = json.dumps(values, indent=2, sort_keys=True).encode()
    files[WEIGHTS] = save(tensors, {"format": "pt"})
    content = {name: files[name] for name in (*names, WEIGHTS) if name in files}
    files[RECORD] = sealed(record, content)
    write_files(folder, {name: text for name, text in files.items() if there.get(name) != text})


def sealed(record: dict, files: Mapping[str, bytes]) -> bytes:
    """A record with the checksums of itself and of the files beside it, as it is written."""
    # as a reader will have it
    found = json.loads(json.dumps(record | {"files": _checksums(files)}))
    return (json.dumps(found | {"sha256": checksum(found)}, indent=1) + "\n").encode()


def _checksums(files: Mapping[str, bytes], places: Mapping[str, Path] | None = None) -> dict:
    """Of each file, by its name; of JSON, its content, however it is laid out."""
    return {
        name: checksum(KIND.object_of((places or {}).get(name, name), content))
        if name.endswith(".json")
        else hashlib.sha256(content).hexdigest()
        for name, content in files.items()
    }


def _record_of(file: Path) -> dict:
    """The record in a file, whose own checksum is right, if it has one."""
    record = KIND.object_of(file, file.read_bytes())
    KIND.check_entries(file, record, ENTRIES, SEALED)
    model = record["model"]
    KIND.check_entries(file, model, DESCRIPTION, ["layer_signs"])
    if any(name in record for name in SEALED) or "layer_signs" in model:
        KIND.check_entries(file, record, ENTRIES)
        rest = {name: value for name, value in record.items() if name != "sha256"}
        if record["sha256"] != checksum(rest):
            KIND.refuse(
                file, "is damaged: its content is not what was written (the checksums differ)"
            )
        KIND.check_entries(file, record["files"], FILES, [LORA, LORA_WEIGHTS])
    if not has_signs(model):
        KIND.refuse(file, "is damaged: its signs are not those of a model")
    return record


def _peft_config(adapter: Adapter):
    """PEFT's configuration beside a memory, for a model that is not trained, or `None`."""
    if LORA not in adapter.files:
        return None
    from peft import PeftConfig

    values = adapter.lora_config
    if not values.get("peft_type"):
        KIND.refuse(adapter.files[LORA], "cannot be used: it has no peft_type")
    task = str(values.get("task_type")).removesuffix(MARK)
    try:
        return PeftConfig.from_peft_type(
            **values | {"task_type": None if task == "None" else task, "inference_mode": True}
        )
    except (KeyError, TypeError, ValueError) as error:  # of PEFT, for a name or a value
        KIND.refuse(adapter.files[LORA], f"cannot be used ({type(error).__name__}: {error})")


def _with_lora(model, adapter: Adapter, config):
    """PEFT's wrapper around a model, with an adapter of this configuration."""
    from peft import get_peft_model

    config.base_model_name_or_path = model.__dict__.get("name_or_path") or None
    try:
        return get_peft_model(model, config).eval()
    except Exception as error:  # a value that PEFT does not check fails anywhere
        KIND.refuse(adapter.files[LORA], f"cannot be used ({type(error).__name__}: {error})")


def _file(path, name: str, hub: dict, *, needed: bool = True) -> Any:
    """Where a file of an adapter is on this machine, loaded from the Hub perhaps; `None`: it is not
    there, and not `needed`."""
    known = [
        each.name
        for each in [*inspect.signature(cached_files).parameters.values()][2:]
        if each.kind != each.VAR_KEYWORD and not each.name.startswith("_")
    ]
    if unknown := sorted(hub.keys() - {*known}):
        raise ValueError(
            f"unknown options {meant(unknown, [*LOADING, *known])}; load_adapter takes "
            f"{', '.join(LOADING)}, and for a name on the Hub {', '.join(known)}."
        )
    try:
        found = cached_file(path, name, _raise_exceptions_for_missing_entries=needed, **hub)
    except OSError as error:
        where, found = f"there is no folder {path} here; ", str(error)
        if Path(path).exists():
            no = f"the folder {path} has no such file"
            where, found = "", no if Path(path).is_dir() else f"{path} is a file and no folder"
        reason = f"{where}cannot read {name} of the adapter: {found}"
        raise OSError(" ".join(reason.split())) from error
    return None if found is None else Path(found)
