"""Swapping a loaded model's attention in place, and back."""

import functools

import torch
from transformers import GPT2Config, PreTrainedModel
from transformers.models.gpt2 import modeling_gpt2 as stock

from . import modeling_infini_gpt2_heads as memory
from .configuration_infini_gpt2 import OPTIONS, InfiniGPT2Config
from .modeling_infini_gpt2 import GPT2InfiniAttention, InfiniGPT2PreTrainedModel

# The support table: class of the loaded model → class with memory. Base models are among them.
SUPPORTED = {
    stock.GPT2Model: memory.InfiniGPT2Model,
    stock.GPT2LMHeadModel: memory.InfiniGPT2LMHeadModel,
    stock.GPT2DoubleHeadsModel: memory.InfiniGPT2DoubleHeadsModel,
    stock.GPT2ForSequenceClassification: memory.InfiniGPT2ForSequenceClassification,
    stock.GPT2ForTokenClassification: memory.InfiniGPT2ForTokenClassification,
    stock.GPT2ForQuestionAnswering: memory.InfiniGPT2ForQuestionAnswering,
}
PLAIN = {infini: plain for plain, infini in SUPPORTED.items()}


def patch_model(model, *, base_only: bool = False, **options):
    """Gives a loaded GPT-2 Infini-attention, in place.

    Modules and weights stay the same objects (optimisers, PEFT adapters and forward hooks keep working on them). The gates
    and the other parameters of [`MemoryLayerMixin`] are added; with `position_encoding="rope"` the position embedding is
    set aside. Class and configuration change too, so that the model saves as an `infini_gpt2` and the Auto class that loaded
    the model loads it patched. Other models attached to this one stay as they are.

    Args:
        model: a whole GPT-2, with any of the heads that transformers has for it.
        base_only: say that `model` is a base model, a `GPT2Model`, and not part of another model, which cannot be checked.
            Inside another model it must not be patched: that model would remain a plain GPT-2, saved and generating
            without the memory.
        options: those of [`MemoryOptions`], such as `segment_length=256`, and `position_encoding` of [`InfiniGPT2Config`].

    Returns:
        The same model.

    Raises:
        ValueError: a model of another kind, one that is patched already, or one with cross-attention; a base model without
            `base_only`, and the other way round.
    """
    if isinstance(model, InfiniGPT2PreTrainedModel):
        raise ValueError("this model has Infini-attention already; unpatch_model() it first to change its options.")
    if type(model) not in SUPPORTED or type(model.base_model) not in SUPPORTED:
        kind = getattr(getattr(model, "config", None), "model_type", None)
        raise ValueError(
            f"cannot patch a {type(model).__name__} (model_type {kind!r}). Supported: "
            + ", ".join(f"{cls.__name__} (model_type {cls.config_class.model_type!r})" for cls in SUPPORTED)
            + "."
        )
    _check_whole(model, base_only)
    unknown = set(options) - set(OPTIONS)
    if unknown:
        raise ValueError(f"unknown options {', '.join(sorted(unknown))}; patch_model takes {', '.join(OPTIONS)}.")
    if model.config.add_cross_attention:
        raise ValueError("cross-attention has no segments: a GPT-2 with add_cross_attention=True cannot be patched.")
    values = model.config.to_dict()
    accepted = InfiniGPT2Config.without_ignored(values)
    config = _convert(model.config, InfiniGPT2Config, accepted, **options)
    model._unpatched_config_class = type(model.config)
    model.__dict__["_unpatched_ignored"] = {name: values[name] for name in values.keys() - accepted.keys()}
    base = model.base_model
    _adopt(model, SUPPORTED, config)
    for layer in config.infini_layers:
        attention = base.h[layer].attn
        attention.__class__ = GPT2InfiniAttention
        weight = attention.c_attn.bias
        attention.add_memory_parameters(attention.embed_dim, device=weight.device, dtype=weight.dtype)
        attention.init_memory_parameters()
    if config.position_encoding == "rope":
        model.__dict__["_unpatched_embedding"] = base.wpe  # not a module of the model any more: neither trained nor saved
        base.wpe = None
    return model


def unpatch_model(model, *, base_only: bool = False):
    """Removes Infini-attention in place, and nothing else.

    What [`patch_model`] added is dropped, trained or not: the gates, the memory's start, its convolution and its write
    weights. The GPT-2's weights, and other changes to the model or its configuration, stay as they are now; the
    position embedding that `position_encoding="rope"` had set aside comes back as it was. So the result is the original
    model only if nothing was trained or changed in between. A model that was loaded or built as `infini_gpt2` becomes the
    plain GPT-2 with the same weights.

    Args:
        base_only: that `model` is a base model and no part of another, as for [`patch_model`].

    Returns:
        The same model.

    Raises:
        ValueError: the model has no Infini-attention, or no position embedding to restore; a base model without
            `base_only`, and the other way round.
    """
    if type(model) not in PLAIN or type(model.base_model) not in PLAIN:
        raise ValueError(
            f"a {type(model).__name__} has no Infini-attention to take out; unpatch_model is for "
            + ", ".join(cls.__name__ for cls in PLAIN)
            + "."
        )
    _check_whole(model, base_only)
    base = model.base_model
    if base.wpe is None:
        if "_unpatched_embedding" not in model.__dict__:
            raise ValueError(
                "this model was built with position_encoding='rope': it has no position embedding, and a plain GPT-2 "
                "needs one."
            )
        base.wpe = model.__dict__.pop("_unpatched_embedding").to(model.device, model.dtype)
    config_class, ignored = (model.__dict__.pop(f"_unpatched_{name}", None) for name in ("config_class", "ignored"))
    config = _convert(model.config, config_class or GPT2Config, model.config.to_dict(), **(ignored or {}))
    for block in base.h:
        if isinstance(block.attn, GPT2InfiniAttention):
            block.attn.drop_memory_parameters()
            block.attn.__class__ = stock.GPT2Attention
    _adopt(model, PLAIN, config)
    return model


def _check_whole(model, base_only: bool) -> None:
    """Refuses a base model that may be part of another, which would not learn of the change."""
    name, is_base = type(model).__name__, model.base_model is model
    if is_base and not base_only:
        raise ValueError(
            f"a {name} can be part of a larger model, which would not learn of the change: saved and loaded again, it would "
            f"compute something else. Give the whole model, or, if this {name} is no part of another, base_only=True."
        )
    if base_only and not is_base:
        raise ValueError(f"base_only=True is for a base model; a {name} is a whole model: leave it out.")


def _convert(config, config_class, values: dict, **options):
    """`values` of `config` that the two configuration classes share, with `options` on top."""
    own = {"model_type", "transformers_version", "architectures", "auto_map", *OPTIONS}
    converted = config_class(**{name: value for name, value in values.items() if name not in own}, **options)
    converted._attn_implementation = config._attn_implementation
    converted._name_or_path = config._name_or_path
    if config.architectures:
        names = {cls.__name__: other.__name__ for cls, other in (SUPPORTED | PLAIN).items()}
        converted.architectures = [names.get(name, name) for name in config.architectures]
    return converted


def _adopt(model, classes: dict[type, type], config) -> None:
    """Makes `model`, and the base model inside it, instances of their other classes, with the other configuration."""
    base = model.base_model
    _construct_once(classes[type(model)])
    for part in {model, base}:
        part.__class__ = classes[type(part)]
    for module in (model, *_modules_of(base)):
        if isinstance(getattr(module, "config", None), GPT2Config):
            module.config = config


def _modules_of(base):
    """The base model and the modules inside it, except other models attached to it: they keep their configuration."""
    waiting = [base]
    while waiting:
        module = waiting.pop()
        yield module
        waiting += [child for child in module.children() if not isinstance(child, PreTrainedModel)]


@functools.cache
def _construct_once(model_class: type) -> None:
    """transformers learns at construction which outputs a class can record (`output_attentions`); an adopted class may
    never have been constructed, so a model of one number is, without memory for it."""
    options = {"segment_length": 1} if issubclass(model_class, InfiniGPT2PreTrainedModel) else {}
    sizes = dict.fromkeys(("vocab_size", "n_positions", "n_embd", "n_layer", "n_head"), 1)
    with torch.device("meta"):
        model_class(model_class.config_class(**sizes, bos_token_id=None, eos_token_id=None, **options))
