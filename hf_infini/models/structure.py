"""Where a decoder of transformers has what is swapped: its base model, and the attention of each
layer."""

import gc
import math
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ..compat.swap_class import has_own_forward


def inside_of(model):
    """The transformers model inside a `PeftModel` or another wrapper, or what was given."""
    modules = model.modules() if isinstance(model, nn.Module) else ()
    return next((module for module in modules if isinstance(module, PreTrainedModel)), model)


def decoder_of(model: nn.Module) -> Any:
    """The base model in a model with a head or in PEFT's wrapper, or the model itself. (Of Llama 4,
    `base_model` is not.)"""
    inside = inside_of(model)
    return getattr(inside, "model", getattr(inside, "base_model", inside))


def holder_of(base: PreTrainedModel) -> PreTrainedModel | None:
    """The model of transformers that `base` is a part of. A module does not know what holds it,
    so all models that are alive are asked; then again without garbage, which is no holder."""
    if not _holders(base):
        return None
    gc.collect()
    return next(iter(_holders(base)), None)


def _holders(base: PreTrainedModel) -> list[PreTrainedModel]:
    alive = (each for each in gc.get_objects() if issubclass(type(each), PreTrainedModel))
    return [
        each
        for each in alive
        if any(part is base for part in vars(each).get("_modules", {}).values())
    ]


def check_own_forwards(*modules: nn.Module) -> None:
    """ValueError where a module does not run the forward of its class."""
    for module in modules:
        if not has_own_forward(module):
            raise ValueError(
                f"the forward of a {type(module).__name__} in this model was replaced, perhaps by "
                "another library, and a memory needs its own: take the replacement out "
                "(del module.forward), patch the model, and put it back then."
            )


def trained_places(config) -> float:
    """The most places of a window at whose distances the rotary positions of a model with this
    `config` were trained; ∞ for other positions."""
    return config.max_position_embeddings if getattr(config, "rope_parameters", None) else math.inf


def attention_layers(base: PreTrainedModel) -> list[nn.Module]:
    """The attention modules of the layers of a `base` model, in order; errors as
    [`decoder_layers`]."""
    return [attention for _, attention in decoder_layers(base)]


def decoder_layers(base: PreTrainedModel) -> list[tuple[nn.Module, nn.Module]]:
    """The layers of a `base` model, each with its attention module, in order; ValueError where
    it has not one in each, where layers share one, or where their numbers are not those of
    their places."""
    count = base.config.num_hidden_layers
    for layers in base.children():
        if isinstance(layers, nn.ModuleList) and len(layers) == count:
            found = [
                [m for m in layer.children() if type(m).__name__.endswith("Attention")]
                for layer in layers
            ]
            if all(len(modules) == 1 for modules in found):
                if len({modules[0] for modules in found}) < count:
                    raise ValueError(
                        f"layers of this {type(base).__name__} share one attention module, which "
                        "could have one memory only: give each its own, with copy.deepcopy and "
                        "its own layer_idx."
                    )
                numbers = [getattr(modules[0], "layer_idx", None) for modules in found]
                if None not in numbers and numbers != [*range(count)]:
                    raise ValueError(
                        f"layers of this {type(base).__name__} have the numbers {numbers}, by "
                        "which they find their options and their part of a cache: give each its "
                        "place in the list as its attention's layer_idx."
                    )
                return [(layer, modules[0]) for layer, modules in zip(layers, found, strict=True)]
    raise ValueError(
        f"a {type(base).__name__} cannot have Infini-attention: it is not made of {count} decoder "
        "layers with one attention module each."
    )
