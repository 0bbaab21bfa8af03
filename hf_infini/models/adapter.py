"""What a memory has learned, apart from the model: a folder of a few megabytes, put on the plain model with one call."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import cached_file

from ..layers.memory_layer import memory_parameters
from .adapter_files import LORA, LORA_WEIGHTS, MARK, RECORD, WEIGHTS, describe, inside_of, names_of, write_memory
from .base import InfiniPreTrainedMixin
from .patching import patch_model

TASKS = {"CausalLM": "CAUSAL_LM", "LMHeadModel": "CAUSAL_LM", "SequenceClassification": "SEQ_CLS"}
TASKS |= {"TokenClassification": "TOKEN_CLS", "QuestionAnswering": "QUESTION_ANS"}


def lora_config(model, **options):
    """PEFT's `LoraConfig` for a model with a memory, whose parameters are trained and saved beside the LoRA.

    Their names are in `modules_to_save`. PEFT copies the gates, which are modules. The other parameters of a memory are
    trained in place, and act also where the adapter is disabled. The score of kept tokens is saved with them, not trained.

    Args:
        model: one with a memory.
        options: those of `LoraConfig`, such as `r=16`; your `modules_to_save` are added to the memory's.

    Raises:
        ValueError: the model has no memory.
    """
    from peft import LoraConfig

    found = memory_parameters(model) if isinstance(model, nn.Module) else {}
    if not found:
        raise ValueError(f"a {type(model).__name__} has no memory to train beside a LoRA: patch_model() it first.")
    paths = (name.partition(".original_module")[0].removesuffix(".weight").split(".") for name in found)
    names = dict.fromkeys(".".join(path[-2:]) for path in paths if "modules_to_save" not in path)
    task = next((task for ending, task in TASKS.items() if type(model).__name__.endswith(ending)), None)
    own: dict[str, Any] = {"task_type": task, "modules_to_save": [*names, *(options.pop("modules_to_save", None) or ())]}
    return LoraConfig(**own | options)


def save_adapter(model, folder, dtype: torch.dtype | None = None) -> None:
    """Writes what the memories of a model have learned.

    Args:
        model: one that [`patch_model`] takes, with its memory, or PEFT's wrapper around one, whose adapter is saved with it.
        folder: is made where there is none.
        dtype: of the parameters in the files, of floating point; `None`: their own.

    Raises:
        ValueError: the model has no such memory, or several adapters of PEFT.
    """
    inside = inside_of(model)
    if not isinstance(inside, InfiniPreTrainedMixin):
        raise ValueError(f"a {type(inside).__name__} has no Infini-attention, whose parameters could be saved.")
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"dtype must be one of floating point, such as torch.bfloat16; got {dtype}.")
    folder = Path(folder)
    if model is inside:
        if (folder / LORA).is_file():
            raise ValueError(f"{folder} has an adapter of PEFT, and this model has none: remove it, or give another folder.")
        folder.mkdir(parents=True, exist_ok=True)
    else:
        if [*model.peft_config] != ["default"]:
            raise ValueError(
                f"one adapter is saved, named 'default'; this model has {', '.join(model.peft_config)}: use its "
                "save_pretrained, which gives each a folder."
            )
        model.save_pretrained(folder)
        memory = memory_parameters(model).keys()  # PEFT's copies of gates have other names here
        lora = load((folder / LORA_WEIGHTS).read_bytes())
        lora = {name: tensor.to(dtype or tensor.dtype) for name, tensor in lora.items() if name not in memory}
        save_file(lora, folder / LORA_WEIGHTS, metadata={"format": "pt"})
    write_memory(model, folder, model.state_dict(), dtype)


def load_adapter(model: PreTrainedModel, path, *, kept_tokens: int | None = None, **hub):
    """Gives a plain model the memories of [`save_adapter`], in place, and PEFT's adapter, if there is one.

    Args:
        model: the plain model that the adapter was trained with.
        path: a folder, or a name on the Hub.
        kept_tokens: how many tokens each head keeps, for which the same scores serve; `None`: as many as when it was saved.
        hub: `revision`, `token`, … of a name on the Hub.

    Returns:
        The model, or PEFT's wrapper around it, whose `merge_and_unload()` gives the model with the adapter in its weights.

    Raises:
        ValueError: the adapter belongs to another model, which stays as it was; or a file of it does not fit: load the model
            again.
        OSError: a file is missing.
    """
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"an adapter of a memory is put on a plain model of transformers; got a {type(model).__name__}.")
    record = read_record(path, **hub)
    found, wanted = describe(model), record["model"]
    if different := "; ".join(f"{n} is {found[n]!r}, not {wanted[n]!r}" for n in found if found[n] != wanted[n]):
        raise ValueError(f"the adapter of {path} was trained with another model: {different}.")
    config, options = _peft_config(path, record, hub), record["options"]
    adapted = patch_model(model, **options if kept_tokens is None else options | {"kept_tokens": kept_tokens})
    if config is not None:
        from peft import get_peft_model

        config.base_model_name_or_path = model.__dict__.get("name_or_path") or None
        adapted = get_peft_model(model, config).eval()
    restore_adapter(adapted, path, **hub)
    return adapted


def merged(model) -> PreTrainedModel:
    """What [`load_adapter`] gives, with PEFT's adapter, if there is one, added to the model's weights."""
    return model.merge_and_unload() if hasattr(model, "merge_and_unload") else model


def read_record(path, **hub) -> dict[str, dict]:
    """`options` of [`patch_model`], and the `model` as [`describe`] tells it, of an adapter; errors as [`load_adapter`]."""
    return json.loads(_file(path, RECORD, hub).read_text("utf-8"))


def _peft_config(path, record: dict, hub: dict):
    """PEFT's configuration beside a record, for a model that is not trained, or `None`."""
    options = {"_raise_exceptions_for_missing_entries": False, **hub}
    if not record.get("peft") and cached_file(path, LORA, **options) is None:  # older records do not say it
        return None
    from peft import PeftConfig

    values = json.loads(_file(path, LORA, hub).read_text("utf-8"))
    task = str(values.get("task_type")).removesuffix(MARK)
    return PeftConfig.from_peft_type(**values | {"task_type": None if task == "None" else task, "inference_mode": True})


def restore_adapter(model, path, **hub) -> None:
    """Gives a model that has its memories already the parameters of [`save_adapter`]; its LoRA too, if it has one. Errors as
    [`load_adapter`]."""
    state = model.state_dict(keep_vars=True)
    memory = {name: state[key] for name, key in names_of(model).items()}
    tensors = _read_tensors(_file(path, WEIGHTS, hub), memory, {})
    if model is not inside_of(model):
        from peft import get_peft_model_state_dict, set_peft_model_state_dict

        wanted = get_peft_model_state_dict(model, save_embedding_layers=False)
        set_peft_model_state_dict(model, _read_tensors(_file(path, LORA_WEIGHTS, hub), wanted, state))
    with torch.no_grad():
        for name, parameter in memory.items():
            parameter.copy_(tensors[name])


def _read_tensors(file: Path, wanted: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a file: those of `wanted`, and any of `others`, by name, each with such a shape."""
    found, known = load_file(file), {**others, **wanted}
    for name in sorted(found.keys() | wanted.keys()):
        shapes = [None if tensor is None else list(tensor.shape) for tensor in (found.get(name), known.get(name))]
        if shapes[0] != shapes[1]:
            raise ValueError(f"{file} does not have what its options say: {name} is {shapes[0]} and must be {shapes[1]}.")
    return found


def _file(path, name: str, hub: dict) -> Path:
    found: Any = cached_file(path, name, **hub)  # without further options never None
    return Path(found)
