"""Swapping a loaded model's attention in place, and back."""

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ..compat.swap_class import swap_class
from ..layers.memory_layer import InfiniAttentionMixin
from .base import InfiniPreTrainedMixin
from .families import infini_class, infini_config
from .generation import step_caches
from .option_checks import InfiniConfigMixin
from .structure import attention_layers, decoder_of


def patch_model(model, **options):
    """Gives a loaded decoder Infini-attention, in place, and returns it.

    Modules and weights stay the same objects (optimisers, PEFT adapters and forward hooks keep
    working on them). Gates and other parameters of the memory are added; a GPT-2's position
    embedding is set aside with `position_encoding="rope"`. Class and configuration change too, so
    that the model saves as an `infini_gpt2`, `infini_llama`, … and the Auto class that loaded it
    loads it patched. Each swapped layer is compared with what it computed before.

    Args:
        model: a whole decoder of transformers, such as a `GPT2LMHeadModel` or a `LlamaForCausalLM`,
            with any of its heads, or a base model. Not one inside another model, which would be
            saved without the memory.
        options: those of [`MemoryOptions`], such as `segment_length=256`; for a GPT-2 also
            `position_encoding` of [`InfiniGPT2Config`]. A pretrained model needs `sink_tokens=4`
            and `gate_init=-4.0`, or much the same.

    Raises:
        ValueError: a model of another kind, one that is patched already, or one with
            cross-attention; a layer that computes something else with its memory empty. After this
            or any other error the model is as it was.
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
    known = config_class.own_options()
    if unknown := set(options) - set(known):
        raise ValueError(
            f"unknown options {', '.join(sorted(unknown))}; patch_model takes {', '.join(known)}."
        )
    config = convert_config(model.config, config_class, **options)
    attention_layers(base)  # or a ValueError, before anything is changed
    before = model.config
    model.__dict__["_base_is_plain"] = True  # what its name leads to: see adapter.py
    if getattr(config, "position_encoding", None) == "rope":
        # no module of the model any more: not trained or saved
        model.__dict__["_unpatched_embedding"] = base.wpe
    try:
        _adopt(model, base, infini_class, config)
        model.add_memory()
        model.check_layers()
    except BaseException:
        _take_out(model, base, before)
        raise
    # an adapter that was there before warns, too, when it is saved alone
    if "peft_config" in vars(model):
        model.peft_config = model.peft_config
    return model


def unpatch_model(model):
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
    _take_out(model, base, convert_config(model.config, model.own_class.config_class))
    return model


def _take_out(model, base, config) -> None:
    """Makes a model plain, with this configuration, of whose layers some or all have a memory."""
    if "_unpatched_embedding" in model.__dict__:
        base.wpe = model.__dict__.pop("_unpatched_embedding").to(model.device, model.dtype)
    model.__dict__.pop("_base_is_plain", None)
    step_caches.pop(model, None)
    for attention in attention_layers(base):
        if isinstance(attention, InfiniAttentionMixin):
            attention.swap_out()
    _adopt(model, base, lambda kind: getattr(kind, "own_class", kind), config)


def convert_config(config, config_class, **options):
    """The values of `config` in another class, with `options` on top."""
    infini = config_class if issubclass(config_class, InfiniConfigMixin) else type(config)
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
