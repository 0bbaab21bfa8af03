"""What a memory has learned, apart from the model: a folder of a few megabytes, put on the plain model with one call.

`infini_adapter.json` has the options of [`patch_model`], and which model they were trained with;
`infini_adapter.safetensors` has the parameters of the memory. A LoRA trained with them is beside them, saved by PEFT.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import cached_file

from ..compat.peft_layers import without_wrappers
from ..layers.memory_layer import PARAMETERS
from .base import InfiniPreTrainedMixin
from .checkpoints import one_line, read_json
from .gpt2_configuration import OPTIONS
from .patching import patch_model, unpatch_model
from .structure import attention_layers, decoder_of

RECORD, WEIGHTS = "infini_adapter.json", "infini_adapter.safetensors"
LORA, LORA_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # PEFT's names


def save_adapter(model, folder, dtype: torch.dtype | None = None) -> None:
    """Writes what the memories of a model have learned.

    Args:
        model: one with Infini-attention, or PEFT's wrapper around one, whose adapter is then saved with it.
        folder: is made where there is none.
        dtype: of the parameters in the files; `None`: their own.

    Raises:
        ValueError: the model has no Infini-attention.
    """
    inside = without_wrappers(model)
    if not isinstance(inside, InfiniPreTrainedMixin):
        raise ValueError(f"a {type(inside).__name__} has no Infini-attention, whose parameters could be saved.")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    options = {name: getattr(inside.config, name) for name in OPTIONS if hasattr(inside.config, name)}
    if model is not inside:
        model.save_pretrained(folder)
        for file in folder.glob(LORA_WEIGHTS) if dtype is not None else ():
            lora = load_file(file)
            save_file({name: tensor.to(dtype) for name, tensor in lora.items()}, file, metadata={"format": "pt"})
    tensors = {name: tensor.detach().to(dtype or tensor.dtype).contiguous() for name, tensor in _parameters(inside).items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    record = {"options": options, "model": describe(inside)}
    (folder / RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


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
    record = read_record(path, **hub)
    found, wanted = describe(model), record["model"]
    different = [name for name in wanted if found.get(name) != wanted[name]]
    if different:
        differences = "; ".join(f"{name} is {found.get(name)!r}, not {wanted[name]!r}" for name in different)
        raise ValueError(f"the adapter of {path} was trained with another model: {differences}.")
    patch_model(model, **record["options"])
    try:
        restore_adapter(model, path, **hub)
    except ValueError:
        unpatch_model(model)
        raise
    if cached_file(path, LORA, _raise_exceptions_for_missing_entries=False, **hub) is None:
        return model
    from peft import PeftModel

    return PeftModel.from_pretrained(model, path, **hub)


def merged(model) -> PreTrainedModel:
    """What [`load_adapter`] gives, with PEFT's adapter, if there is one, added to the model's weights."""
    return model.merge_and_unload() if hasattr(model, "merge_and_unload") else model


def read_record(path, **hub) -> dict[str, dict]:
    """`options` of [`patch_model`], and the `model` as [`describe`] tells it, of an adapter.

    Raises:
        ValueError: as [`load_adapter`].
    """
    record = read_json(_file(path, RECORD, hub))
    if not all(isinstance(record.get(name), dict) for name in ("options", "model")):
        raise ValueError(f"{path} is damaged: {RECORD} has no options and model. Save the adapter again.")
    return record


def restore_adapter(model, path, **hub) -> None:
    """Gives a model that has its memories already the parameters of [`save_adapter`]; its LoRA too, if it has one.

    Raises:
        ValueError: as [`load_adapter`].
    """
    inside, file = without_wrappers(model), _file(path, WEIGHTS, hub)
    try:
        tensors = load_file(file)
    except Exception as error:  # the library's own errors
        raise ValueError(f"{file} is damaged or no safetensors file ({one_line(error)}). Save the adapter again.") from error
    parameters = _parameters(inside)
    for name in sorted(tensors.keys() | parameters.keys()):
        if name not in tensors or name not in parameters or tensors[name].shape != parameters[name].shape:
            raise ValueError(f"{file} does not have what its options say: look at {name}. Save the adapter again.")
        if not tensors[name].isfinite().all():
            raise ValueError(f"{file} holds NaN or infinity in {name}: its training diverged, or it is damaged.")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[name])
    if model is not inside:
        from peft import load_peft_weights, set_peft_model_state_dict

        try:
            set_peft_model_state_dict(model, load_peft_weights(str(path), device="cpu"))
        except (RuntimeError, OSError) as error:  # of a LoRA of other sizes, or of none
            raise ValueError(f"{path} has no LoRA like that of the model: {one_line(error)}") from error


def describe(model: PreTrainedModel) -> dict:
    """What tells one plain model from another: its type, its sizes, and a hash of its first weights, rounded to bfloat16 so
    that it does not depend on the dtype that the model was loaded with."""
    config = model.config
    embeddings: Any = model.get_input_embeddings()
    rows = embeddings.weight[:64].detach().to("cpu", torch.bfloat16).contiguous()
    return {
        "model_type": config.model_type.removeprefix("infini_"),
        "layers": config.num_hidden_layers,
        "heads": config.num_attention_heads,
        "width": config.hidden_size,
        "weights": hashlib.sha256(rows.view(torch.uint8).numpy().tobytes()).hexdigest()[:16],
    }


def _parameters(model: PreTrainedModel) -> dict[str, Tensor]:
    """The memories' parameters by the number of the layer and their name: "3.gate.weight"."""
    found = {}
    for number, layer in enumerate(attention_layers(decoder_of(model))):
        for name, tensor in layer.state_dict(keep_vars=True).items():
            if name.partition(".")[0] in PARAMETERS:
                found[f"{number}.{name}"] = tensor
    return found


def _file(path, name: str, hub: dict) -> Path:
    try:
        found: Any = cached_file(path, name, **hub)  # without further options never None
        return Path(found)
    except OSError as error:
        raise ValueError(f"{path} is no adapter of a memory: {one_line(error)}") from error
