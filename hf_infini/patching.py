"""Swapping a loaded model's attention in place, and back."""

import functools

import torch
from transformers import GPT2Config, GPT2LMHeadModel, GPT2Model, PreTrainedModel
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention

from .configuration_infini_gpt2 import OPTIONS, InfiniGPT2Config
from .modeling_infini_gpt2 import (
    GPT2InfiniAttention,
    InfiniGPT2LMHeadModel,
    InfiniGPT2Model,
    InfiniGPT2PreTrainedModel,
)

# The support table: class of the loaded model → class with memory.
SUPPORTED = {GPT2LMHeadModel: InfiniGPT2LMHeadModel, GPT2Model: InfiniGPT2Model}


def patch_model(model, **options):
    """Gives a loaded GPT-2 Infini-attention, in place.

    Modules and weights stay the same objects (optimisers, PEFT adapters and forward hooks keep working on them); new are
    the gates and, with `memory_init="learned"`, the memory's start; with `positions="rope"` the position embedding is set
    aside. Class and configuration change too, so that the model saves as an `infini_gpt2` and
    `AutoModelForCausalLM.from_pretrained` gives it back patched.

    Args:
        model: a `GPT2LMHeadModel` or `GPT2Model`.
        options: those of [`InfiniGPT2Config`], such as `segment_length=256`.

    Returns:
        The same model.

    Raises:
        ValueError: a model of another kind, one that is patched already, or one with cross-attention.
    """
    if isinstance(model, InfiniGPT2PreTrainedModel):
        raise ValueError("this model has Infini-attention already; unpatch_model() it first to change its options.")
    if type(model) not in SUPPORTED:
        kind = getattr(getattr(model, "config", None), "model_type", None)
        raise ValueError(
            f"cannot patch a {type(model).__name__} (model_type {kind!r}). Supported: "
            + ", ".join(f"{cls.__name__} (model_type {cls.config_class.model_type!r})" for cls in SUPPORTED)
            + "."
        )
    unknown = set(options) - set(OPTIONS)
    if unknown:
        raise ValueError(f"unknown options {', '.join(sorted(unknown))}; patch_model takes {', '.join(OPTIONS)}.")
    if model.config.add_cross_attention:
        raise ValueError("cross-attention has no segments: a GPT-2 with add_cross_attention=True cannot be patched.")
    config = _convert(model.config, InfiniGPT2Config, **options)
    model._unpatched_config_class = type(model.config)
    base = _base(model)
    _adopt(model, base, SUPPORTED[type(model)], InfiniGPT2Model, config)
    for layer in config.infini_layers:
        attention = base.h[layer].attn
        attention.__class__ = GPT2InfiniAttention
        attention.add_memory_parameters(like=attention.c_attn.bias)
        attention.init_memory_parameters()
    if config.positions == "rope":
        model.__dict__["_unpatched_embedding"] = base.wpe  # not a module of the model any more: neither trained nor saved
        base.wpe = None
    return model


def unpatch_model(model):
    """Takes Infini-attention out again, in place: the inverse of [`patch_model`].

    Weights that were trained in between stay trained; the gates and the memory's start are dropped. A model that was loaded
    or built as `infini_gpt2` becomes the plain GPT-2 with the same weights.

    Returns:
        The same model.

    Raises:
        ValueError: the model has no Infini-attention, or no position embedding to go back to.
    """
    plain = {infini: cls for cls, infini in SUPPORTED.items()}
    if type(model) not in plain:
        raise ValueError(
            f"a {type(model).__name__} has no Infini-attention to take out; unpatch_model is for "
            + " and ".join(cls.__name__ for cls in plain)
            + "."
        )
    base = _base(model)
    if base.wpe is None:
        if "_unpatched_embedding" not in model.__dict__:
            raise ValueError(
                "this model was built with positions='rope': it has no position embedding, which a plain GPT-2 needs."
            )
        base.wpe = model.__dict__.pop("_unpatched_embedding").to(model.device, model.dtype)
    config = _convert(model.config, model.__dict__.pop("_unpatched_config_class", GPT2Config))
    for block in base.h:
        if isinstance(block.attn, GPT2InfiniAttention):
            block.attn.drop_memory_parameters()
            block.attn.__class__ = GPT2Attention
    _adopt(model, base, plain[type(model)], GPT2Model, config)
    return model


def _base(model):
    return model.transformer if hasattr(model, "transformer") else model


def _convert(config, config_class, **options):
    """The options that the two configuration classes share, as they are now, with `options` on top."""
    values = config.to_dict()
    own = {"model_type", "transformers_version", "architectures", "auto_map", *OPTIONS}
    converted = config_class(**{name: value for name, value in values.items() if name not in own}, **options)
    converted._attn_implementation = config._attn_implementation
    converted._name_or_path = config._name_or_path
    if config.architectures:
        names = {plain.__name__: infini.__name__ for plain, infini in SUPPORTED.items()}
        names |= {infini: plain for plain, infini in names.items()}
        converted.architectures = [names.get(name, name) for name in config.architectures]
    return converted


def _adopt(model, base, model_class: type, base_class: type, config) -> None:
    """Makes `model` (and the `base` inside it) instances of the other classes, with the other configuration."""
    _construct_once(model_class)
    model.__class__ = model_class
    base.__class__ = base_class
    for module in (model, *_modules_of(base)):
        if isinstance(getattr(module, "config", None), GPT2Config):
            module.config = config


def _modules_of(base):
    """The base model and the modules inside it, but for other models that hang on it: they keep their configuration."""
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
