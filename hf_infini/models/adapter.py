"""What a memory has learned, apart from the model: a folder of a few megabytes, put on the plain
model with one call.

`infini_adapter.json` has the options of [`patch_model`], and which model they were trained with;
`infini_adapter.safetensors` the parameters of the memory. A LoRA trained with them is beside them,
saved by PEFT, but with a task type that PEFT refuses, and which says how to load it: PEFT would put
it on a model without the memory.
"""

import hashlib
import json
import operator
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import cached_file

from ..compat.class_lookups import PREFIX
from ..compat.peft_saving import UnsavedMemoryWarning, with_saving
from ..layers.memory_layer import PARAMETERS, gates_of, memory_layers
from ..ops.keeping import SCORES
from .base import InfiniPreTrainedMixin
from .patching import patch_model
from .structure import inside_of

RECORD, WEIGHTS = "infini_adapter.json", "infini_adapter.safetensors"
LORA, LORA_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # PEFT's names
# how many are compared, and which share may differ; of models that differ, half do
SIGNS, MOST_SIGNS = 512, 0.2
MARK = (
    " with Infini-attention: hf_infini.load_adapter(plain_model, path) loads this adapter and "
    "its memory"
)


def lora_config(model, **options):
    """PEFT's `LoraConfig` for a model with a memory, whose gates are trained and saved beside the
    LoRA. What else the memory has learned is saved as it is now, and not trained. ValueError where
    the model has no memory.

    Args:
        options: those of `LoraConfig`, such as `r=16`; your `modules_to_save` are added to the
            gates. Not given, `task_type` is "CAUSAL_LM", and `target_modules` are the ones that
            PEFT chooses for the plain model.
    """
    from peft import LoraConfig
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING

    gates = gates_of(model) if isinstance(model, nn.Module) else {}
    if not gates:
        raise ValueError(
            f"a {type(model).__name__} has no memory to train beside a LoRA: "
            "patch_model() it first."
        )
    inside = inside_of(model)
    kind = inside.config.model_type.removeprefix(PREFIX)
    names = dict.fromkeys(".".join(name.split(".")[-2:]) for name in gates)
    own: dict[str, Any] = {
        "task_type": "CAUSAL_LM",
        "modules_to_save": [*names, *(options.pop("modules_to_save", None) or ())],
        "target_modules": TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING.get(kind),
    }
    config = LoraConfig(**own | options)
    if not hasattr(inside, "_base_is_plain"):
        return config
    # with which it is saved: by its name PEFT would find the plain model
    record, tensors = _memory_of(model)
    return with_saving(config, lambda folder: _write_memory(Path(folder), record, tensors))


def save_adapter(model, folder, dtype: torch.dtype | None = None) -> None:
    """Writes what the memories of a patched model have learned into a folder, which is made where
    there is none; of PEFT's wrapper around a model, its adapter, too. `dtype`: of the parameters in
    the files, of floating point; `None`: their own. ValueError where the model has no such memory,
    or several adapters of PEFT."""
    inside = inside_of(model)
    if not isinstance(inside, InfiniPreTrainedMixin):
        raise ValueError(
            f"a {type(inside).__name__} has no Infini-attention, whose parameters could be saved."
        )
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(
            f"dtype must be one of floating point, such as torch.bfloat16; got {dtype}."
        )
    folder = Path(folder)
    if model is inside:
        if (folder / LORA).is_file():
            raise ValueError(
                f"{folder} has an adapter of PEFT, and this model has none: remove "
                "it, or give another folder."
            )
        folder.mkdir(parents=True, exist_ok=True)
    else:
        if [*model.peft_config] != ["default"]:
            raise ValueError(
                "one adapter is saved, named 'default'; this model has "
                f"{', '.join(model.peft_config)}."
            )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UnsavedMemoryWarning)  # it is saved below
            model.save_pretrained(folder)
        lora = load((folder / LORA_WEIGHTS).read_bytes())
        lora = {name: tensor.to(dtype or tensor.dtype) for name, tensor in lora.items()}
        save_file(lora, folder / LORA_WEIGHTS, metadata={"format": "pt"})
    _write_memory(folder, *_memory_of(model, dtype))


def load_adapter(
    model: PreTrainedModel,
    path,
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
        keep_score: one that learns the same: "learned" and "half" take each other's scores; `None`:
            as when it was saved.
        hub: `revision`, `token`, … of a name on the Hub.

    Returns:
        The model, or PEFT's wrapper around it, whose `merge_and_unload()` gives the model with the
        adapter in its weights.

    Raises:
        ValueError: the adapter belongs to another model, or has no such scores, and the model stays
            as it was; or a file does not fit: reload the model.
        OSError: a file is missing.
    """
    if not isinstance(model, PreTrainedModel):
        raise ValueError(
            "an adapter of a memory is put on a plain model of transformers; got a "
            f"{type(model).__name__}."
        )
    record = read_record(path, **hub)
    _check_model(path, describe(model), record["model"])
    config, options = _peft_config(path, hub), record["options"]
    saved = options.get("keep_score", "attention")
    # those that learn the same
    alike = [name for name, score in SCORES.items() if score.learns == SCORES[saved].learns]
    if keep_score not in (None, *alike):
        raise ValueError(
            f"the adapter was saved with keep_score={saved!r}: only "
            f"{' and '.join(map(repr, alike))} share scores."
        )
    given = {"kept_tokens": kept_tokens, "keep_score": keep_score}
    adapted = patch_model(
        model, **options | {name: value for name, value in given.items() if value is not None}
    )
    if config is not None:
        from peft import get_peft_model

        config.base_model_name_or_path = model.__dict__.get("name_or_path") or None
        adapted = get_peft_model(model, config).eval()
    restore_adapter(adapted, path, **hub)
    return adapted


def read_record(path, **hub) -> dict:
    """What an adapter says of itself: the `options` of its memory, and the `model` that it belongs
    to ([`describe`])."""
    return json.loads(_file(path, RECORD, hub).read_text("utf-8"))


def merged(model) -> PreTrainedModel:
    """What [`load_adapter`] gives, with PEFT's adapter, if there is one, added to the model's
    weights."""
    return model.merge_and_unload() if hasattr(model, "merge_and_unload") else model


def restore_adapter(model, path, **hub) -> None:
    """Gives a model that has its memories what [`save_adapter`] wrote, also of its LoRA; errors as
    [`load_adapter`]."""
    state = model.state_dict(keep_vars=True)
    memory = {name: state[key] for name, key in _names_of(model).items()}
    tensors = _read_tensors(_file(path, WEIGHTS, hub), memory, {})
    if model is not inside_of(model):
        from peft import get_peft_model_state_dict, set_peft_model_state_dict

        wanted = get_peft_model_state_dict(model, save_embedding_layers=False)
        set_peft_model_state_dict(
            model, _read_tensors(_file(path, LORA_WEIGHTS, hub), wanted, state)
        )
    with torch.no_grad():
        for name, parameter in memory.items():
            parameter.copy_(tensors[name])


def describe(model) -> dict:
    """What tells one plain model from another: its type, its sizes, a hash of its first weights in
    bfloat16, whatever dtype it was loaded with; and signs of sums of them, most of which are the
    same where weights are quantized."""
    inside = inside_of(model)
    weight = next(inside.get_input_embeddings().parameters())  # before those of PEFT
    rows = weight[:1024].detach().to("cpu", torch.bfloat16).contiguous()
    sums = rows.float().flatten()[: rows.numel() // SIGNS * SIGNS].view(SIGNS, -1).sum(1)
    return {
        "model_type": inside.config.model_type.removeprefix(PREFIX),
        "layers": inside.config.num_hidden_layers,
        "heads": inside.config.num_attention_heads,
        "width": inside.config.hidden_size,
        "weights": hashlib.sha256(rows[:64].view(torch.uint8).numpy().tobytes()).hexdigest()[:16],
        "signs": "".join("1" if positive else "0" for positive in (sums > 0).tolist()),
    }


def _check_model(path, found: dict, wanted: dict) -> None:
    """ValueError where the model `found` is not the `wanted` one of an adapter; a warning where
    weights differ a little."""
    if different := [
        name for name in found if name not in ("weights", "signs") and found[name] != wanted[name]
    ]:
        names = "; ".join(f"{name} is {found[name]!r}, not {wanted[name]!r}" for name in different)
        raise ValueError(f"the adapter of {path} was trained with another model: {names}.")
    if found["weights"] == wanted["weights"]:
        return
    share = sum(map(operator.ne, found["signs"], wanted["signs"])) / SIGNS
    if share > MOST_SIGNS:
        raise ValueError(
            f"the adapter of {path} was trained with another model: its weights are others."
        )
    warnings.warn(
        f"the weights differ a little from those that the adapter of {path} was trained with "
        f"({share:.0%} of the signs that are compared), as those of a quantized or fine-tuned "
        "model do: nothing was measured with these.",
        stacklevel=3,
    )


def _memory_of(model, dtype: torch.dtype | None = None) -> tuple[dict, dict[str, Tensor]]:
    """The record of a model's memory, and copies of its parameters; `dtype`: theirs, or `None`."""
    state, config = model.state_dict(), inside_of(model).config
    tensors = {name: state[key].detach() for name, key in _names_of(model).items()}
    tensors = {
        name: tensor.to("cpu", dtype or tensor.dtype, copy=True).contiguous()
        for name, tensor in tensors.items()
    }
    return {
        "options": {name: getattr(config, name) for name in config.own_options()},
        "model": describe(model),
    }, tensors


def _write_memory(folder: Path, record: dict, tensors: dict[str, Tensor]) -> None:
    """Writes a memory, and marks the configuration of a LoRA that is beside it."""
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if (folder / LORA).is_file():
        values = json.loads((folder / LORA).read_text("utf-8"))
        values["task_type"] = f"{str(values.get('task_type')).removesuffix(MARK)}{MARK}"
        (folder / LORA).write_text(json.dumps(values, indent=2, sort_keys=True), encoding="utf-8")


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


def _peft_config(path, hub: dict):
    """PEFT's configuration beside a memory, for a model that is not trained, or `None`."""
    file = cached_file(path, LORA, _raise_exceptions_for_missing_entries=False, **hub)
    if file is None:
        return None
    from peft import PeftConfig

    values = json.loads(Path(file).read_text("utf-8"))
    task = str(values.get("task_type")).removesuffix(MARK)
    return PeftConfig.from_peft_type(
        **values | {"task_type": None if task == "None" else task, "inference_mode": True}
    )


def _read_tensors(
    file: Path, wanted: Mapping[str, Tensor], others: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The tensors of a file: those of `wanted`, and any of `others`, by name, each with such a
    shape."""
    found, known = load_file(file), {**others, **wanted}
    for name in sorted(found.keys() | wanted.keys()):
        shapes = [
            None if tensor is None else list(tensor.shape)
            for tensor in (found.get(name), known.get(name))
        ]
        if shapes[0] != shapes[1]:
            raise ValueError(
                f"{file} does not have what its options say: {name} is {shapes[0]} "
                f"and must be {shapes[1]}."
            )
    return found


def _file(path, name: str, hub: dict) -> Path:
    found: Any = cached_file(path, name, **hub)  # without further options never None
    return Path(found)
