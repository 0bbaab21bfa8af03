"""A memory's adapter as files, and what PEFT does not do by itself with a memory beside a LoRA.

`infini_adapter.json` has the options of [`patch_model`], and which model they were trained with;
`infini_adapter.safetensors` has the parameters of the memory. A LoRA trained with them is beside them, saved by PEFT. PEFT
alone would put it on a model without the memory: so `adapter_config.json` has a task type that PEFT refuses, and which says
how to load it.

PEFT is not imported, but met where somebody has imported it. Needed as long as it copies and saves modules only, and has no
hook for what belongs to a model (0.21).
"""

import functools
import hashlib
import importlib
import inspect
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..compat.class_lookups import PREFIX
from ..layers.memory_layer import PARAMETERS, memory_layers, memory_parameters
from .structure import attention_layers, decoder_of

RECORD, WEIGHTS = "infini_adapter.json", "infini_adapter.safetensors"
LORA, LORA_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # PEFT's names
MARK = " with Infini-attention: hf_infini.load_adapter(plain_model, path) loads this adapter and its memory"
TABLES = ("peft.utils.constants", "peft.utils.transformers_weight_conversion")


def inside_of(model):
    """The transformers model inside a `PeftModel` or another wrapper, or what was given."""
    modules = model.modules() if isinstance(model, nn.Module) else ()
    return next((module for module in modules if isinstance(module, PreTrainedModel)), model)


def write_memory(model, folder: Path, state: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> None:
    """Writes the record and the parameters of a memory, and marks the configuration of a LoRA that is beside them.

    Args:
        model: with the memory, or PEFT's wrapper around one.
        state: of the model.
        dtype: of the parameters in the file; `None`: their own.
    """
    inside, has_lora = inside_of(model), (folder / LORA).is_file()
    tensors = {name: state[key].detach() for name, key in names_of(model).items()}
    tensors = {name: tensor.to("cpu", dtype or tensor.dtype).contiguous() for name, tensor in tensors.items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    options = {name: getattr(inside.config, name) for name in inside.config.own_options()}
    record = {"options": options, "model": describe(model, state), "peft": has_lora}
    (folder / RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if has_lora:
        values = json.loads((folder / LORA).read_text("utf-8"))
        values["task_type"] = f"{str(values.get('task_type')).removesuffix(MARK)}{MARK}"
        (folder / LORA).write_text(json.dumps(values, indent=2, sort_keys=True), encoding="utf-8")


def describe(model, state: Mapping[str, Tensor] | None = None) -> dict:
    """What tells one plain model from another: its type, its sizes, and a hash of its first weights, rounded to bfloat16 so
    that it does not depend on the dtype that the model was loaded with. `state`: of the model, if it is at hand."""
    inside, state = inside_of(model), model.state_dict() if state is None else state
    embeddings = next(name for name, module in model.named_modules() if module is inside.get_input_embeddings())
    weight = next(tensor for name, tensor in state.items() if name.startswith(f"{embeddings}."))  # before those of PEFT
    rows = weight[:64].detach().to("cpu", torch.bfloat16).contiguous()
    return {
        "model_type": inside.config.model_type.removeprefix(PREFIX),
        "layers": inside.config.num_hidden_layers,
        "heads": inside.config.num_attention_heads,
        "width": inside.config.hidden_size,
        "weights": hashlib.sha256(rows.view(torch.uint8).numpy().tobytes()).hexdigest()[:16],
    }


def names_of(model) -> dict[str, str]:
    """The names that the memories' tensors have in the model's state, by the number of the layer and their own name:
    "3.gate.weight"."""
    names = {module: name for name, module in model.named_modules()}
    found = {}
    for number, layer in enumerate(attention_layers(decoder_of(inside_of(model)))):
        for name in layer.state_dict(keep_vars=True):
            own = name.replace("original_module.", "")  # and not PEFT's copies of it
            if own.partition(".")[0] in PARAMETERS and ".modules_to_save." not in name:
                found[f"{number}.{own}"] = f"{names[layer]}.{name}"
    return found


def meet_peft(infini: str) -> None:
    """Where PEFT has been imported, has it choose and name the modules of an adapter as in a model of the own type, and
    completes what it saves; `infini`: the model type."""
    if "peft" in sys.modules:
        constants, weights = map(importlib.import_module, TABLES)
        found = [table for name, table in vars(constants).items() if name.startswith("TRANSFORMERS_MODELS_TO_")]
        own = infini.removeprefix(PREFIX)
        for table in (*found, weights._MODEL_TO_CONVERSION_PATTERN):
            if own in table:
                table[infini] = table[own]
        _complete_what_is_saved()


def uncopied(model: nn.Module, config, trained: bool = False) -> dict[str, nn.Parameter]:
    """The parameters of memories, by their full names, that an adapter has in its `modules_to_save` and PEFT does not copy,
    because they are no modules; with `trained`, also those that are trained without being named."""
    ends = tuple(f".{name}" for name in getattr(config, "modules_to_save", None) or ())
    found = {name: parameter for name, parameter in memory_parameters(model).items() if "modules_to_save" not in name}
    return {name: found[name] for name in found if name.endswith(ends) or (trained and found[name].requires_grad)}


def complete_adapter(model: nn.Module, folder: Path, config, state: Mapping[str, Tensor]) -> None:
    """Adds to an adapter that was just saved what PEFT does not save: what else it has trained of a memory; PEFT loads it,
    as anything in its file that is named as a parameter of the model. If the plain model was patched after loading, also the
    memory: PEFT would load the plain model that it names. `state`: of the model."""
    prefix = "base_model.model." if isinstance(model, PreTrainedModel) else ""
    if own := uncopied(model, config, trained=True):
        file = folder / LORA_WEIGHTS
        saved = load(file.read_bytes()) | {prefix + name: state[name].detach().contiguous() for name in own}
        save_file(saved, file, metadata={"format": "pt"})
    if getattr(inside_of(model), "_base_is_plain", False):
        write_memory(model, folder, state)


@functools.cache
def _complete_what_is_saved() -> None:
    """Has PEFT's `save_pretrained` end with [`complete_adapter`]: it has no hook for what belongs to the model."""
    peft_model: Any = sys.modules["peft"].PeftModel  # an import would have all who load a model by its code install PEFT
    save = peft_model.save_pretrained

    @functools.wraps(save)
    def save_pretrained(self, save_directory, *args, **kwargs):
        given = inspect.signature(save).bind(self, save_directory, *args, **kwargs)
        given.apply_defaults()
        options = given.arguments | given.arguments["kwargs"]
        if memory_layers(self) and not options["safe_serialization"]:
            raise ValueError("an adapter beside a memory is saved as safetensors only: leave safe_serialization=False out.")
        save(self, save_directory, *args, **kwargs)
        for name in (options["selected_adapters"] or self.peft_config) if options["is_main_process"] else ():
            folder = Path(save_directory, "" if name == "default" else name)
            state = self.state_dict() | (options.get("state_dict") or {})  # gathered from all processes; perhaps a part
            complete_adapter(self, folder, self.peft_config[name], state)

    peft_model.save_pretrained = save_pretrained
