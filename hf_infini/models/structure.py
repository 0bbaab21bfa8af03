"""Where a decoder of transformers has what is swapped: its base model, and the attention of each layer."""

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

from ..compat.class_lookups import PREFIX


def attention_layers(base: PreTrainedModel) -> list[nn.Module]:
    """The attention modules of a decoder's layers, in order; errors as [`decoder_layers`]."""
    return [attention for _, attention in decoder_layers(base)]


def decoder_layers(base: PreTrainedModel) -> list[tuple[nn.Module, nn.Module]]:
    """A decoder's layers, each with its attention module, in order.

    Raises:
        ValueError: the model is not made of layers with one attention each.
    """
    count = base.config.num_hidden_layers
    for layers in base.children():
        if isinstance(layers, nn.ModuleList) and len(layers) == count:
            found = [[m for m in layer.children() if type(m).__name__.endswith("Attention")] for layer in layers]
            if all(len(modules) == 1 for modules in found):
                return [(layer, modules[0]) for layer, modules in zip(layers, found, strict=True)]
    raise ValueError(
        f"a {type(base).__name__} cannot have Infini-attention: it is not made of {count} decoder layers with one attention "
        "module each."
    )


def base_model_name(config: type[PreTrainedConfig]) -> str | tuple[str, ...] | None:
    """The name of a family's own base model (of some encoders: two), or `None`."""
    return modeling_auto.MODEL_MAPPING_NAMES.get(config.model_type.removeprefix(PREFIX))


def decoder_of(model: PreTrainedModel) -> PreTrainedModel:
    """The base model inside a model with a head, or the model itself. (Not every family's `base_model` is it.)

    Raises:
        ValueError: there is none.
    """
    name = base_model_name(type(model.config))
    models = (module for module in model.modules() if isinstance(module, PreTrainedModel))
    found = next((module for module in models if type(module).__name__ in (name, f"Infini{name}")), None)
    if found is None:
        wanted = name or "base model of its family"
        raise ValueError(f"a {type(model).__name__} cannot have Infini-attention: no {wanted} is inside it.")
    return found
