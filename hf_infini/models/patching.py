"""Swapping a loaded model's attention in place, and back."""

import warnings

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ..compat.swap_class import swap_class
from ..layers.memory_layer import InfiniAttentionMixin
from ..ops.checks import Model, check_types
from ..options import options_of_cache
from .base import InfiniPreTrainedMixin, score_is_known
from .families import infini_class, infini_config
from .generation import step_caches
from .option_checks import InfiniConfigMixin, refuse_unknown
from .structure import (
    attention_layers,
    check_own_forwards,
    decoder_layers,
    decoder_of,
    holder_of,
    trained_places,
)
from .transaction import unchanged_on_error


@check_types
@unchanged_on_error
def patch_model(model: Model, *, cache_tokens: int | None = None, **options):
    """Gives a loaded decoder Infini-attention, in place, and returns it.

    Modules and weights stay the same objects (optimisers, PEFT adapters and forward hooks keep
    working on them). Gates and other parameters of the memory are added; a GPT-2's position
    embedding is set aside with `position_encoding="rope"`. Class and configuration change too, so
    that the model saves as an `infini_gpt2`, `infini_llama`, … and the Auto class that loaded it
    loads it patched. Each swapped layer is compared with what it computed before.

    Args:
        model: a whole decoder of transformers, such as a `GPT2LMHeadModel` or a `LlamaForCausalLM`,
            with any of its heads, or a base model. Not one that is part of another model of
            transformers, which would be saved without the memory.
        cache_tokens: how many tokens a head holds, such as 2048: sensible sizes of sinks, window
            and kept tokens follow, without a memory ([`options_of_cache`]); `None`: by `options`.
        options: those of [`MemoryOptions`], such as `segment_length=256` or, with `cache_tokens`,
            `keep_score="learned"`; for a GPT-2 also `position_encoding` of [`InfiniGPT2Config`]. To
            train a pretrained model with a memory, begin with `sink_tokens=4` and
            `gate_init=-4.0`.

    Raises:
        ValueError: a model of another kind, one that is patched already, or one with
            cross-attention; layers that share their attention, or whose forward another library
            has replaced; a layer that computes something else with its memory empty. After this or
            any other error, also Ctrl-C, the model is as it was.
    """
    if isinstance(model, InfiniPreTrainedMixin):
        raise ValueError(
            "this model has Infini-attention already; unpatch_model() it first to "
            "change its options."
        )
    name, kind = type(model).__name__, getattr(getattr(model, "config", None), "model_type", None)
    if (
        not type(model).__module__.startswith("transformers.models.")
        or kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    ):
        raise ValueError(
            f"cannot patch a {name} (model_type {kind!r}): it is no decoder of transformers. "
            "Supported are GPT-2 and decoders with rotary positions, such as LlamaForCausalLM, "
            "with any head that transformers has for them."
        )
    config_class = infini_config(model.config_class)
    base = decoder_of(model)
    config = convert_config(model.config, config_class, cache_tokens, **options)
    if base is model and (holder := holder_of(base)) is not None:
        raise ValueError(
            f"this {name} is part of a {type(holder).__name__}, which would be saved without its "
            f"memory: patch the {type(holder).__name__}."
        )
    check_own_forwards(base, *(part for pair in decoder_layers(base) for part in pair))
    model.__dict__["_base_is_plain"] = True  # what its name leads to: see adapter.py
    if getattr(config, "position_encoding", None) == "rope":
        # no module of the model any more: not trained or saved
        model.__dict__["_unpatched_embedding"] = base.wpe
    _adopt(model, base, infini_class, config)
    model.add_memory()
    model.check_layers()
    # an adapter that was there before warns, too, when it is saved alone
    if "peft_config" in vars(model):
        model.peft_config = model.peft_config
    if config.places > (trained := trained_places(config)):
        warnings.warn(
            f"a window of {config.places:,} places, kept tokens among them, is wider than the "
            f"{trained:,} positions that this {name} was trained with (max_position_embeddings): "
            "it sees distances that it does not know. Give fewer kept_tokens, or a smaller "
            "segment_length.",
            stacklevel=4,
        )
    return model


@check_types
@unchanged_on_error
def unpatch_model(model: Model):
    """Removes Infini-attention in place, and returns the model. What [`patch_model`] added is
    dropped, trained or not, and the position embedding that `position_encoding="rope"` had set
    aside comes back as it was; nothing else changes. A model that was loaded or built with
    Infini-attention becomes the plain one with the same weights. ValueError where the model has no
    Infini-attention, or no position embedding to restore."""
    if not isinstance(model, InfiniPreTrainedMixin) or not isinstance(
        base := decoder_of(model), InfiniPreTrainedMixin
    ):
        raise ValueError(f"a {type(model).__name__} has no Infini-attention to take out.")
    if (
        getattr(model.config, "position_encoding", None) == "rope"
        and "_unpatched_embedding" not in model.__dict__
    ):
        raise ValueError(
            "this model was built with position_encoding='rope': it has no position embedding, "
            "and a plain GPT-2 needs one."
        )
    config = convert_config(model.config, model.own_class.config_class)
    if "_unpatched_embedding" in model.__dict__:
        base.wpe = model.__dict__.pop("_unpatched_embedding").to(model.device, model.dtype)
    for part in (model, base):
        part.__dict__.pop("_base_is_plain", None)
    score_is_known.discard(base)
    for attention in attention_layers(base):
        if isinstance(attention, InfiniAttentionMixin):
            attention.swap_out()
    _adopt(model, base, lambda kind: getattr(kind, "own_class", kind), config)
    step_caches.pop(model, None)
    return model


def convert_config(config, config_class, cache_tokens: int | None = None, **options):
    """The values of `config` in `config_class`, with `options` on top, and those that follow
    from `cache_tokens` ([`options_of_cache`]); ValueError for options that no memory has."""
    infini = config_class if issubclass(config_class, InfiniConfigMixin) else type(config)
    refuse_unknown(options, ["cache_tokens", *infini.own_options()])
    if cache_tokens is not None:
        options = options_of_cache(cache_tokens, **options)
        if "position_encoding" in infini.own_options():  # texts longer than a GPT-2's positions
            options.setdefault("position_encoding", "segment")
    own = {"model_type", "transformers_version", "architectures", "auto_map", *infini.own_options()}
    converted = config_class(
        **({name: value for name, value in config.to_dict().items() if name not in own} | options)
    )
    converted._attn_implementation = config._attn_implementation
    converted._name_or_path = config._name_or_path
    if config.architectures:
        prefix = "Infini" if infini is config_class else ""
        converted.architectures = [
            prefix + name.removeprefix("Infini") for name in config.architectures
        ]
    return converted


def _adopt(model, base, class_of, config) -> None:
    """Makes the model, and the base model inside it, instances of their other classes, with the
    other configuration."""
    before = model.config
    for part in {model, base}:
        swap_class(part, class_of(type(part)))
    for module in (model, *base.modules()):
        if getattr(vars(module).get("config"), "model_type", None) == before.model_type:
            module.config = config
