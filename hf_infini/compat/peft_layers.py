"""Adapters (LoRA and others, by PEFT) in a model's layers: which of them act, and how. A state dict tells only which exist.

PEFT itself is not imported: its layers are known by what they have in common.
"""

import json
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel


def inside_of(model):
    """The transformers model inside a `PeftModel` or another wrapper, or what was given."""
    modules = model.modules() if isinstance(model, nn.Module) else ()
    return next((module for module in modules if isinstance(module, PreTrainedModel)), model)


def without_wrappers(model):
    """As [`inside_of`], for a memory file; adapters inside the model's layers stay where they are.

    Raises:
        ValueError: there is no such model, or the active adapter puts learned tokens before every text (prompt and prefix
            tuning): it is no part of the model inside.
    """
    config = getattr(model, "active_peft_config", None)
    if config is not None and config.is_prompt_learning:
        raise ValueError(
            f"the adapter {model.active_adapter!r} ({type(config).__name__}) puts learned tokens before every text, and a "
            "memory file is bound to what is in the layers: use an adapter like LoRA, or model.get_base_model()."
        )
    inside = inside_of(model)
    if not isinstance(inside, PreTrainedModel):
        raise ValueError(f"a model of transformers is needed, or a wrapper around one; got {type(model).__name__}.")
    return inside


def adapter_layers(model: nn.Module) -> dict[str, Any]:
    """The layers that hold adapters, by name.

    Raises:
        ValueError: PEFT has changed the model in a way that such layers do not tell.
    """
    layers, inside = {}, set()
    for name, module in model.named_modules():
        if isinstance(getattr(type(module), "disable_adapters", None), property):
            layers[name] = module
            inside.update(module.modules())
        elif type(module).__module__.startswith("peft.") and module not in inside:
            raise ValueError(
                f"{name} is a {type(module).__name__} of PEFT, which does not say whether it acts: a memory file cannot be "
                "bound to it. Use an adapter like LoRA, or merge it into the weights."
            )
    return layers


def active_adapters(layers: dict[str, Any]) -> list[str]:
    """The names of the adapters that act in any of the layers, merged ones included."""
    names = set()
    for layer in layers.values():
        names.update(_active(layer), layer.merged_adapters)
    return sorted(names)


def settings(layers: dict[str, Any]) -> str:
    """All that decides what the adapters of the layers do beside their tensors, as JSON: which act, in their order (sums
    round), which are merged, and their numbers, such as LoRA's scaling."""
    found = {
        name: {
            "active": _active(layer),
            "merged": list(layer.merged_adapters),
            "numbers": {number: getattr(layer, number, None) for number in layer.other_param_names},
        }
        for name, layer in layers.items()
    }
    # Modules (dropout) and functions by their type: they have no more numbers that count
    return json.dumps(
        found, sort_keys=True, default=lambda value: value.tolist() if isinstance(value, Tensor) else type(value).__name__
    )


def _active(layer) -> list[str]:
    return [] if layer.disable_adapters else list(layer.active_adapters)
