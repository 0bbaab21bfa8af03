"""Swapping a loaded model's attention in place, and back."""

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ..compat.swap_class import swap_class, unchanged_on_error
from ..layers.memory_layer import InfiniAttentionMixin, KeywordlessLayerMixin
from .base import InfiniPreTrainedMixin
from .checkpoints import one_line
from .families import infini_class, infini_config
from .option_checks import OptionsMixin
from .structure import attention_layers, decoder_layers, decoder_of


def patch_model(model, *, base_only: bool = False, **options):
    """Gives a loaded decoder Infini-attention, in place.

    Modules and weights stay the same objects (optimisers, PEFT adapters and forward hooks keep working on them). The gates
    and the other parameters of [`MemoryLayerMixin`] are added; a GPT-2's position embedding is set aside with
    `position_encoding="rope"`. Class and configuration change too, so that the model saves as an `infini_gpt2`,
    `infini_llama`, … and the Auto class that loaded it loads it patched. Other models attached to it stay as they are.

    Each swapped layer is compared with what it computed before: attention over rotary positions, or none, that goes through
    transformers' attention interface. A model that computes something else is refused, and stays as it was.

    Args:
        model: a whole decoder of transformers, such as a `GPT2LMHeadModel` or a `LlamaForCausalLM`, with any of its heads.
        base_only: say that `model` is a base model, such as a `GPT2Model`, and not part of another model, which cannot be
            checked. Inside another model it must not be patched: that model would be saved and generate without the memory.
        options: those of [`MemoryOptions`], such as `segment_length=256`; for a GPT-2 also `position_encoding` of
            [`InfiniGPT2Config`]. A pretrained model needs `sink_tokens=4` and `gate_init=-4.0`, or much the same.

    Returns:
        The same model.

    Raises:
        ValueError: a model of another kind, one that is patched already, or one with cross-attention; one that was changed
            otherwise than in its weights (shared layers, a class or `forward` of their own); a layer that computes something
            else with its memory empty; a base model without `base_only`, and the other way round.
    """
    if isinstance(model, InfiniPreTrainedMixin):
        raise ValueError("this model has Infini-attention already; unpatch_model() it first to change its options.")
    name, kind = type(model).__name__, getattr(getattr(model, "config", None), "model_type", None)
    if not type(model).__module__.startswith("transformers.models.") or kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ValueError(
            f"cannot patch a {name} (model_type {kind!r}): it is no decoder of transformers. Supported are GPT-2 and "
            "decoders with rotary positions, such as LlamaForCausalLM, with any head that transformers has for them."
        )
    config_class = infini_config(model.config_class)
    base = decoder_of(model)
    _check_whole(model, base, base_only)
    known = config_class.own_options()
    if unknown := set(options) - set(known):
        raise ValueError(f"unknown options {', '.join(sorted(unknown))}; patch_model takes {', '.join(known)}.")
    if getattr(model.config, "add_cross_attention", False):
        raise ValueError(f"cross-attention has no segments: a {name} with add_cross_attention=True cannot be patched.")
    config = _convert(model.config, config_class, **options)
    _check_unchanged(base)
    try:
        with unchanged_on_error(model):
            model.__dict__["_unpatched_config_class"] = type(model.config)
            model.__dict__["_base_is_plain"] = True  # what its name leads to: see adapter.py
            if getattr(config, "position_encoding", None) == "rope":
                model.__dict__["_unpatched_embedding"] = base.wpe  # no module of the model any more: not trained or saved
            _adopt(model, base, infini_class, config)
            model.add_memory()
            model.check_layers()
    except (ValueError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # whatever another family's attention raises where it is called otherwise than by its model
        raise ValueError(f"a {name} cannot have Infini-attention: {type(error).__name__}: {one_line(error)}.") from error
    model.advise(options)
    return model


def unpatch_model(model, *, base_only: bool = False):
    """Removes Infini-attention in place, and nothing else.

    What [`patch_model`] added is dropped, trained or not: the gates, the memory's start, its convolution and its write
    weights. The model's own weights, and other changes to the model or its configuration, stay as they are now; the
    position embedding that `position_encoding="rope"` had set aside comes back as it was. So the result is the original
    model only if nothing was trained or changed in between. A model that was loaded or built with Infini-attention becomes
    the plain one with the same weights.

    Args:
        base_only: that `model` is a base model and no part of another, as for [`patch_model`].

    Returns:
        The same model.

    Raises:
        ValueError: the model has no Infini-attention, or no position embedding to restore; a base model without
            `base_only`, and the other way round.
    """
    if not isinstance(model, InfiniPreTrainedMixin) or not isinstance(base := decoder_of(model), InfiniPreTrainedMixin):
        raise ValueError(f"a {type(model).__name__} has no Infini-attention to take out.")
    _check_whole(model, base, base_only)
    config_class = model.__dict__.get("_unpatched_config_class", model.own_class.config_class)
    if getattr(model.config, "position_encoding", None) == "rope" and "_unpatched_embedding" not in model.__dict__:
        raise ValueError(
            "this model was built with position_encoding='rope': it has no position embedding, and a plain GPT-2 needs one."
        )
    if "_unpatched_embedding" in model.__dict__:
        base.wpe = model.__dict__.pop("_unpatched_embedding").to(model.device, model.dtype)
    for name in ("_unpatched_config_class", "_base_is_plain"):
        model.__dict__.pop(name, None)
    config = _convert(model.config, config_class)
    for layer, attention in decoder_layers(base):
        if isinstance(attention, InfiniAttentionMixin):
            attention.swap_out()
        if isinstance(layer, KeywordlessLayerMixin):
            swap_class(layer, layer.own_class)
    _adopt(model, base, lambda infini: infini.own_class, config)
    return model


def _check_whole(model, base, base_only: bool) -> None:
    """Refuses a base model that may be part of another, which would not learn of the change."""
    name, is_base = type(model).__name__, base is model
    if is_base and not base_only:
        raise ValueError(
            f"a {name} can be part of a larger model, which would not learn of the change: saved and loaded again, it would "
            f"compute something else. Give the whole model, or, if this {name} is no part of another, base_only=True."
        )
    if base_only and not is_base:
        raise ValueError(f"base_only=True is for a base model; a {name} is a whole model: leave it out.")


def _check_unchanged(base) -> None:
    """Refuses a decoder that was changed in a way that its configuration does not tell, so that it would be saved without.

    Raises:
        ValueError: the base model, a layer or its attention is of a foreign class, or has a `forward` or a configuration of
            its own; or an attention is not causal, or belongs to another layer.
    """
    attentions = attention_layers(base)
    for name, part in base.named_modules():
        if part is not base and part not in attentions and not any(child in attentions for child in part.children()):
            continue
        found = {
            f"is of no class of {type(base).__module__}": type(part).__module__ != type(base).__module__,
            "has a forward of its own: use forward hooks, or delete it": _replaces_forward(part),
            "has a configuration of its own": vars(getattr(part, "config", base.config)) != vars(base.config),
            "is not causal (is_causal=False)": not getattr(part, "is_causal", True),
        }
        for reason in (reason for reason, applies in found.items() if applies):
            where = f"its {name}, a {type(part).__name__}," if name else "it"
            raise ValueError(f"a {type(base).__name__} cannot have Infini-attention: {where} {reason}.")
    for number, attention in enumerate(attentions):
        if getattr(attention, "layer_idx", number) != number:
            raise ValueError(
                f"a {type(base).__name__} cannot have Infini-attention: layer {number} has the attention of layer "
                f"{attention.layer_idx} (layer_idx). Give each layer a module of its own, with its own number."
            )


def _replaces_forward(module: nn.Module) -> bool:
    """Whether a module computes something else than its class, in a `forward` of its own; a hook keeps what it wraps."""
    kept = vars(module).get("_old_forward", vars(module).get("forward"))
    return kept is not None and getattr(kept, "__func__", None) is not type(module).forward


def _convert(config, config_class, **options):
    """The values of `config` in another class, with `options` on top."""
    infini = config_class if issubclass(config_class, OptionsMixin) else type(config)
    own = {"model_type", "transformers_version", "architectures", "auto_map", *infini.own_options()}
    converted = config_class(**({name: value for name, value in config.to_dict().items() if name not in own} | options))
    converted._attn_implementation = config._attn_implementation
    converted._name_or_path = config._name_or_path
    if config.architectures:
        prefix = "Infini" if infini is config_class else ""
        converted.architectures = [prefix + name.removeprefix("Infini") for name in config.architectures]
    return converted


def _adopt(model, base, class_of, config) -> None:
    """Makes the model, and the base model inside it, instances of their other classes, with the other configuration."""
    before = model.config
    for part in {model, base}:
        swap_class(part, class_of(type(part)))
    for module in (model, *_modules_of(base)):
        if getattr(getattr(module, "config", None), "model_type", None) == before.model_type:
            module.config = config


def _modules_of(base):
    """The base model and the modules inside it, except other models attached to it: they keep their configuration."""
    waiting = [base]
    while waiting:
        module = waiting.pop()
        yield module
        waiting += [child for child in module.children() if not isinstance(child, PreTrainedModel)]
