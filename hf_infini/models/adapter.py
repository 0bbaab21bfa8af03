"""What a memory has learned, apart from the model: a folder of a few megabytes, put on the plain model with one call.

`infini_adapter.json` has the options of [`patch_model`], and which model they were trained with;
`infini_adapter.safetensors` has the parameters of the memory. A LoRA trained with them is beside them, saved by PEFT. Where
the model was patched after loading, PEFT's own `save_pretrained` writes these files too. PEFT alone would put the LoRA on a
model without the memory: so `adapter_config.json` has a task type that PEFT refuses, and which says how to load it.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import cached_file

from ..compat.swap_class import unchanged_on_error
from ..layers.memory_layer import PARAMETERS, memory_parameters
from .base import InfiniPreTrainedMixin
from .checkpoints import FLOATS, one_line, read_json
from .gpt2_configuration import OPTIONS
from .patching import patch_model
from .peft import AFTER_SAVING, LORA, LORA_WEIGHTS
from .structure import attention_layers, decoder_of

RECORD, WEIGHTS = "infini_adapter.json", "infini_adapter.safetensors"
MARK = " with Infini-attention: hf_infini.load_adapter(plain_model, path) loads this adapter and its memory"
DESCRIBED = ("model_type", "layers", "heads", "width", "weights")  # of a model, by `describe`


def save_adapter(model, folder, dtype: torch.dtype | None = None) -> None:
    """Writes what the memories of a model have learned.

    Args:
        model: one that [`patch_model`] takes, with its memory, or PEFT's wrapper around one, whose adapter is saved with it.
        folder: is made where there is none.
        dtype: of the parameters in the files, of floating point; `None`: their own.

    Raises:
        ValueError: the model has no such memory, or several adapters of PEFT.
    """
    inside = _inside(model)
    if not isinstance(inside, InfiniPreTrainedMixin):
        raise ValueError(f"a {type(inside).__name__} has no Infini-attention, whose parameters could be saved.")
    if dtype is not None and dtype not in FLOATS:
        raise ValueError(f"dtype must be one of {', '.join(map(str, FLOATS))}; got {dtype}.")
    if model is not inside and [*model.peft_config] != ["default"]:
        raise ValueError(
            f"one adapter is saved, named 'default'; this model has {', '.join(model.peft_config)}: use "
            "its save_pretrained, which gives each a folder."
        )
    folder = Path(folder)
    if model is inside and (folder / LORA).is_file():
        raise ValueError(f"{folder} has an adapter of PEFT, and this model has none: remove it, or give another folder.")
    folder.mkdir(parents=True, exist_ok=True)
    if model is not inside:
        model.save_pretrained(folder)
        memory = memory_parameters(model).keys()  # PEFT's copies of gates have other names here
        lora = load((folder / LORA_WEIGHTS).read_bytes())
        lora = {name: tensor.to(dtype or tensor.dtype) for name, tensor in lora.items() if name not in memory}
        save_file(lora, folder / LORA_WEIGHTS, metadata={"format": "pt"})
    _write(model, folder, model.state_dict(), dtype)


def _write(model, folder: Path, state: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> None:
    """Writes the files of [`save_adapter`] but those of PEFT, which it marks; `state`: that of the model."""
    inside, has_lora = _inside(model), (folder / LORA).is_file()
    tensors = {name: state[key].detach() for name, key in _names(model).items()}
    tensors = {name: tensor.to("cpu", dtype or tensor.dtype).contiguous() for name, tensor in tensors.items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    options = {name: getattr(inside.config, name) for name in OPTIONS if hasattr(inside.config, name)}
    record = {"options": options, "model": describe(model, state), "peft": has_lora}
    (folder / RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if has_lora:
        values = read_json(folder / LORA)
        values["task_type"] = f"{str(values.get('task_type')).removesuffix(MARK)}{MARK}"
        (folder / LORA).write_text(json.dumps(values, indent=2, sort_keys=True), encoding="utf-8")


def _write_beside_peft(model, folder: Path, state: Mapping[str, Tensor]) -> None:
    """What is done once PEFT has saved an adapter: without this, the plain model that it names would be loaded as it is."""
    if getattr(_inside(model), "_base_is_plain", False):
        _write(model, folder, state)


AFTER_SAVING.append(_write_beside_peft)


def load_adapter(model: PreTrainedModel, path, **hub):
    """Gives a plain model the memories of [`save_adapter`], in place, and PEFT's adapter, if there is one.

    Args:
        model: the plain model that the adapter was trained with.
        path: a folder, or a name on the Hub.
        hub: `revision`, `token`, … of a name on the Hub.

    Returns:
        The model, or PEFT's wrapper around it, whose `merge_and_unload()` gives the model with the adapter in its weights.

    Raises:
        ValueError: the adapter belongs to another model, or a file of it is missing or damaged; the model stays as it was.
    """
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"an adapter of a memory is put on a plain model of transformers; got a {type(model).__name__}.")
    record = read_record(path, **hub)
    config = _peft_config(path, record, hub)
    try:
        with unchanged_on_error(model):
            found, wanted = describe(model), record["model"]
            if different := [name for name in DESCRIBED if found[name] != wanted[name]]:
                differences = "; ".join(f"{name} is {found[name]!r}, not {wanted[name]!r}" for name in different)
                raise ValueError(f"the adapter of {path} was trained with another model: {differences}.")
            adapted = patch_model(model, **record["options"])
            if config is not None:
                from peft import get_peft_model

                config.base_model_name_or_path = model.__dict__.get("name_or_path") or None
                adapted = get_peft_model(model, config).eval()
            restore_adapter(adapted, path, **hub)
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:  # nobody knows what all of PEFT raises for what its configuration may hold
        reason = f"{'' if isinstance(error, ValueError) else f'{type(error).__name__}: '}{one_line(error)}"
        named = "" if str(path) in reason else f"the adapter of {path} cannot be put on the model: "
        raise ValueError(named + reason) from error
    return adapted


def merged(model) -> PreTrainedModel:
    """What [`load_adapter`] gives, with PEFT's adapter, if there is one, added to the model's weights."""
    return model.merge_and_unload() if hasattr(model, "merge_and_unload") else model


def read_record(path, **hub) -> dict[str, dict]:
    """`options` of [`patch_model`], and the `model` as [`describe`] tells it, of an adapter.

    Raises:
        ValueError: as [`load_adapter`].
    """
    record = read_json(_file(path, RECORD, hub))
    options, model = record.get("options"), record.get("model")
    if not isinstance(options, dict) or not isinstance(model, dict) or not model.keys() >= set(DESCRIBED):
        raise ValueError(f"{path} is damaged: {RECORD} has no options and model. Save the adapter again.")
    return record


def _peft_config(path, record: dict, hub: dict):
    """PEFT's configuration beside a record, for a model that is not trained, or `None`."""
    if not record.get("peft"):  # older adapters do not say it
        options = {"_raise_exceptions_for_missing_entries": False, **hub}
        if all(cached_file(path, name, **options) is None for name in (LORA, LORA_WEIGHTS)):
            return None
    from peft import PEFT_TYPE_TO_CONFIG_MAPPING

    file = _file(path, LORA, hub)
    values = read_json(file)
    kind, task = values.get("peft_type"), values.get("task_type")
    if isinstance(task, str) and task.endswith(MARK):
        task = task.removesuffix(MARK)
        values["task_type"] = None if task == "None" else task
    if not isinstance(kind, str) or kind not in PEFT_TYPE_TO_CONFIG_MAPPING:
        raise ValueError(f"{file} is damaged: its peft_type is {kind!r}, which this version of PEFT does not know.")
    try:
        return PEFT_TYPE_TO_CONFIG_MAPPING[kind].from_peft_type(**values | {"inference_mode": True})
    except Exception as error:  # whatever PEFT's configurations make of other values
        raise ValueError(f"{file} cannot be used: {one_line(error)}") from error


def restore_adapter(model, path, **hub) -> None:
    """Gives a model that has its memories already the parameters of [`save_adapter`]; its LoRA too, if it has one.

    Raises:
        ValueError: as [`load_adapter`].
    """
    state = model.state_dict(keep_vars=True)
    memory = {name: state[key] for name, key in _names(model).items()}
    tensors = _read(_file(path, WEIGHTS, hub), memory)
    if model is not _inside(model):
        from peft import get_peft_model_state_dict, set_peft_model_state_dict

        adapter = _read(_file(path, LORA_WEIGHTS, hub), get_peft_model_state_dict(model, save_embedding_layers=False), state)
        set_peft_model_state_dict(model, adapter)
    with torch.no_grad():
        for name, parameter in memory.items():
            parameter.copy_(tensors[name])


def _read(file: Path, wanted: Mapping[str, Tensor], others: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """The tensors of a file: those of `wanted`, and any of `others`, by name, each with such a shape and finite numbers."""
    try:
        found = load_file(file)
    except Exception as error:  # the library's own errors
        raise ValueError(f"{file} is damaged or no safetensors file ({one_line(error)}). Save the adapter again.") from error
    for name in sorted(found.keys() | wanted.keys()):
        tensor, target = found.get(name), wanted.get(name, (others or {}).get(name))
        if tensor is None or target is None or tensor.shape != target.shape:
            sizes = "" if tensor is None or target is None else f"{list(tensor.shape)} and must be {list(target.shape)}"
            problem = sizes or ("left over" if target is None else "missing")
            raise ValueError(f"{file} does not have what its options say: {name} is {problem}. Save the adapter again.")
        floating = target.is_floating_point()
        if tensor.dtype not in FLOATS if floating else tensor.dtype != target.dtype:
            kinds = "of floating point with 16 to 64 bits" if floating else str(target.dtype)
            raise ValueError(f"{file} is damaged: {name} is {tensor.dtype} and must be {kinds}. Save the adapter again.")
        if not tensor.to(target.dtype).isfinite().all():
            raise ValueError(f"{file} holds NaN or infinity in {name}: its training diverged, or it is damaged.")
    return found


def describe(model, state: Mapping[str, Tensor] | None = None) -> dict:
    """What tells one plain model from another: its type, its sizes, and a hash of its first weights, rounded to bfloat16 so
    that it does not depend on the dtype that the model was loaded with. `state`: of the model, if it is at hand."""
    inside, state = _inside(model), model.state_dict() if state is None else state
    embeddings = next(name for name, module in model.named_modules() if module is inside.get_input_embeddings())
    weight = next(tensor for name, tensor in state.items() if name.startswith(f"{embeddings}."))  # before those of PEFT
    rows = weight[:64].detach().to("cpu", torch.bfloat16).contiguous()
    return {
        "model_type": inside.config.model_type.removeprefix("infini_"),
        "layers": inside.config.num_hidden_layers,
        "heads": inside.config.num_attention_heads,
        "width": inside.config.hidden_size,
        "weights": hashlib.sha256(rows.view(torch.uint8).numpy().tobytes()).hexdigest()[:16],
    }


def _names(model) -> dict[str, str]:
    """The names that the memories' tensors have in the model's state, by the number of the layer and their own name:
    "3.gate.weight"."""
    names = {module: name for name, module in model.named_modules()}
    found = {}
    for number, layer in enumerate(attention_layers(decoder_of(_inside(model)))):
        for name in layer.state_dict(keep_vars=True):
            own = name.replace("original_module.", "")  # and not PEFT's copies of it
            if own.partition(".")[0] in PARAMETERS and ".modules_to_save." not in name:
                found[f"{number}.{own}"] = f"{names[layer]}.{name}"
    return found


def _inside(model):
    """The transformers model inside PEFT's wrapper, or what was given."""
    modules = model.modules() if isinstance(model, torch.nn.Module) else ()
    return next((module for module in modules if isinstance(module, PreTrainedModel)), model)


def _file(path, name: str, hub: dict) -> Path:
    try:
        found: Any = cached_file(path, name, **hub)  # without further options never None
        return Path(found)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is no adapter of a memory: {one_line(error)}") from error
