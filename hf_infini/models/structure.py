"""Where a decoder of transformers has what is swapped: its base model, and the attention of each
layer."""

from typing import Any

from torch import nn
from transformers import PreTrainedModel


def inside_of(model):
    """The transformers model inside a `PeftModel` or another wrapper, or what was given."""
    modules = model.modules() if isinstance(model, nn.Module) else ()
    return next((module for module in modules if isinstance(module, PreTrainedModel)), model)


def decoder_of(model: nn.Module) -> Any:
    """The base model in a model with a head or in PEFT's wrapper, or the model itself. (Of Llama 4,
    `base_model` is not.)"""
    inside = inside_of(model)
    return getattr(inside, "model", getattr(inside, "base_model", inside))


def attention_layers(base: PreTrainedModel) -> list[nn.Module]:
    """The attention modules of a decoder's layers, in order; errors as [`decoder_layers`]."""
    return [attention for _, attention in decoder_layers(base)]


def decoder_layers(base: PreTrainedModel) -> list[tuple[nn.Module, nn.Module]]:
    """A decoder's layers, each with its attention module, in order; ValueError where it has not one
    in each."""
    count = base.config.num_hidden_layers
    for layers in base.children():
        if isinstance(layers, nn.ModuleList) and len(layers) == count:
            found = [
                [m for m in layer.children() if type(m).__name__.endswith("Attention")]
                for layer in layers
            ]
            if all(len(modules) == 1 for modules in found):
                return [(layer, modules[0]) for layer, modules in zip(layers, found, strict=True)]
    raise ValueError(
        f"a {type(base).__name__} cannot have Infini-attention: it is not made of {count} decoder "
        "layers with one attention module each."
    )
