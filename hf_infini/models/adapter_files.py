"""The files of a memory's adapter: what is in them, and how they are written and read.

`infini_adapter.json` has the options of [`patch_model`], and which model they were trained with;
`infini_adapter.safetensors` has the parameters of the memory. A LoRA trained with them is beside them, saved by PEFT. PEFT
alone would put it on a model without the memory: so `adapter_config.json` has a task type that PEFT refuses, and which says
how to load it.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..compat.peft_layers import inside_of
from ..layers.memory_layer import PARAMETERS
from .checkpoints import FLOATS, one_line, read_json
from .structure import attention_layers, decoder_of

RECORD, WEIGHTS = "infini_adapter.json", "infini_adapter.safetensors"
LORA, LORA_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # PEFT's names
MARK = " with Infini-attention: hf_infini.load_adapter(plain_model, path) loads this adapter and its memory"


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
        values = read_json(folder / LORA)
        values["task_type"] = f"{str(values.get('task_type')).removesuffix(MARK)}{MARK}"
        (folder / LORA).write_text(json.dumps(values, indent=2, sort_keys=True), encoding="utf-8")


def read_tensors(file: Path, wanted: Mapping[str, Tensor], others: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
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
    inside, state = inside_of(model), model.state_dict() if state is None else state
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
