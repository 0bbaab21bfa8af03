"""The configuration and the models with Infini-attention of every family of decoders, made when
they are asked for: `families.InfiniLlamaModel` is `LlamaModel` with the mixins of base.py before
it, and so on for all of its heads."""

import functools
import inspect
import sys
from collections import ChainMap
from collections.abc import Iterable
from typing import Any

import transformers
from transformers import GenerationMixin, GPT2Config, PreTrainedConfig, PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from ..compat.cache_name import CACHE
from ..compat.class_lookups import PREFIX, alias_tokenizer, alias_weights
from ..compat.hub_code import IS_COPY, carry_code
from ..layers.memory_layer import InfiniAttentionMixin
from .base import InfiniModelMixin, InfiniPreTrainedMixin, cache_as_it_was, with_signature
from .generation import MemoryGenerationMixin
from .gpt2 import InfiniGPT2Config, InfiniGPT2ModelMixin
from .option_checks import InfiniConfigMixin, checked

# Families that a swapped layer's test may pass although their attention is another
REFUSED = {
    "its attention does not go through transformers' attention interface": ("falcon", "gpt_neo"),
    "its layers share keys and values": ("gemma3n_text", "gemma4_text", "zamba", "zamba2"),
    "its positions are biases of the scores (ALiBi)": ("bloom", "mpt"),
    "its heads are differences of two": ("diffllama",),
    "some of its layers are linear attention": ("minimax",),
    "it normalises queries and keys after their rotation": ("hunyuan_v1_dense", "hunyuan_v1_moe"),
}
# Auto classes that load a decoder
AUTO_CLASSES = (
    *(
        "AutoModel",
        "AutoModelForPreTraining",
        "AutoModelForCausalLM",
        "AutoModelForSequenceClassification",
    ),
    *("AutoModelForTokenClassification", "AutoModelForQuestionAnswering"),
)
# Families that are known to go with it; others may, and say so when they are patched
PROBED = (
    *(
        "apertus",
        "arcee",
        "bitnet",
        "cohere",
        "cohere2",
        "ernie4_5",
        "exaone4",
        "exaone_moe",
        "gemma",
        "gemma2",
    ),
    *(
        "gemma3_text",
        "glm",
        "glm4",
        "gpt_neox",
        "granite",
        "helium",
        "hy_v3",
        "kolibri1",
        "llama",
        "llama4_text",
    ),
    *(
        "minimax_m2",
        "ministral",
        "mistral",
        "mixtral",
        "nanochat",
        "nemotron",
        "olmo",
        "olmo2",
        "olmo3",
        "olmoe",
    ),
    *(
        "persimmon",
        "phi",
        "phi3",
        "qwen2",
        "qwen3",
        "qwen3_moe",
        "seed_oss",
        "smollm3",
        "stablelm",
        "starcoder2",
    ),
)
# families whose layers do not pass on keywords to their attention
DROP_KEYWORDS = ("stablelm", "nemotron")
# what an attention that needs no more is given
GIVEN = {"self", "hidden_states", "position_embeddings", "attention_mask"}


class FamilyConfigMixin(InfiniConfigMixin):
    """All options of the own configuration, and those of [`MemoryOptions`]."""

    def __post_init__(self, **kwargs):
        # whoever has a configuration may ask an Auto class for its model next
        register_models(type(self))
        super().__post_init__(**kwargs)

    def validate_memory_options(self):
        """Those of every memory, and that there is one."""
        super().validate_memory_options()
        if not self.infini_layers:
            raise ValueError(
                f"none of the {self.num_hidden_layers} layers of this {self.model_type} attends "
                "to everything: name with layers=[…] those with a sliding window or chunk that "
                "are to have a memory instead."
            )


@functools.cache
def infini_config(own: type[PreTrainedConfig]) -> type[FamilyConfigMixin] | type[InfiniGPT2Config]:
    """The configuration class with Infini-attention of a family, whose `own` class this is, or one
    derived from it; ValueError if it cannot be."""
    if issubclass(own, GPT2Config):
        return InfiniGPT2Config
    reason = next((reason for reason, types in REFUSED.items() if own.model_type in types), None)
    if "kv_lora_rank" in own.__dataclass_fields__:
        reason = "its keys and values are compressed together (multi-head latent attention)"
    if reason is not None:
        raise ValueError(f"a {own.model_type!r} cannot have Infini-attention: {reason}.")
    doc = (
        f"`{own.__name__}` with Infini-attention: all of its options, and those of "
        "[`MemoryOptions`]."
    )
    attributes = {
        "__module__": __name__,
        "__doc__": doc,
        "model_type": PREFIX + own.model_type,
        "own_class": own,
    }
    config = checked(type(f"Infini{own.__name__}", (FamilyConfigMixin, own), attributes))
    carry_code("models.families", AutoConfig=config)
    # or it would stand for the code of all folders, also of those that nobody trusts
    if not IS_COPY:
        transformers.AutoConfig.register(config.model_type, config, exist_ok=True)
    return config


@functools.cache
def infini_class(own: type) -> type:
    """The class with Infini-attention of a family's own attention, base model or model with a
    head."""
    if not issubclass(own, PreTrainedModel):
        return _attention_class(own)
    config: Any = own.config_class
    attributes: dict[str, Any] = {
        "__module__": __name__,
        "__doc__": f"`{own.__name__}` with Infini-attention.",
    }
    attributes |= {
        "own_class": own,
        "config_class": infini_config(config),
        "class_with_memory": staticmethod(infini_class),
    }
    # transformers finds these out by the file of a class, and the layers and experts are those of
    # the own class
    for name in ("_can_set_attn_implementation", "_can_set_experts_implementation"):
        attributes[name] = getattr(own, name)
    # whose checkpoints name weights as its modules do; transformers takes 0.3 s to say so
    if config is not GPT2Config:
        alias_weights(config.model_type, PREFIX + config.model_type)
        alias_weights(own.__name__, f"Infini{own.__name__}")
    call = own.forward
    bases: list[type] = [InfiniPreTrainedMixin]
    if own.__name__ == modeling_auto.MODEL_MAPPING_NAMES.get(config.model_type):
        mixin = InfiniGPT2ModelMixin if config is GPT2Config else InfiniModelMixin
        bases.append(mixin)
        call = with_signature(own.forward, mixin.forward)
        forward = inspect.unwrap(own.forward)
        attributes["argument_names"] = _arguments(forward)
        attributes["layers_drop_keywords"] = config.model_type in DROP_KEYWORDS
        rotary = [
            c
            for name, c in vars(sys.modules[own.__module__]).items()
            if name.endswith("RotaryEmbedding")
        ]
        attributes["turns_by_layer_type"] = any(
            "layer_type" in _arguments(c.forward) for c in rotary
        )
        attributes["takes_masks_by_type"] = "causal_mask_mapping" in forward.__code__.co_varnames
    attributes["forward"] = cache_as_it_was(call)
    if issubclass(own, GenerationMixin):
        bases.append(MemoryGenerationMixin)
        # transformers looks for a loss by the class's name, and where it finds none, its warning
        # breaks a compiled graph
        attributes["_loss_function"] = staticmethod(ForCausalLMLoss)
    return type("Infini" + own.__name__, (*bases, own), attributes)


def _attention_class(own: type) -> type:
    arguments = _arguments(own.forward)[1:]
    cache = next((name for name in (CACHE, "layer_past") if name in arguments), None)
    if cache is None:
        raise ValueError(
            f"a {own.__name__} cannot have Infini-attention: its forward takes no "
            "cache of keys and values."
        )
    if needed := _required(own.forward) - GIVEN:
        raise ValueError(
            f"a {own.__name__} cannot have Infini-attention: its forward needs "
            f"{', '.join(sorted(needed))}, which a memory does not know."
        )
    module = sys.modules[own.__module__]
    turn = getattr(module, "apply_rotary_pos_emb", None) or getattr(
        module, "apply_rotary_emb", None
    )
    attributes: dict[str, Any] = {
        "__module__": __name__,
        "__doc__": f"`{own.__name__}` over segments, with a memory.",
    }
    attributes |= {"own_class": own, "argument_names": arguments}
    attributes |= {
        "cache_argument": cache,
        "turning_function": None if turn is None else staticmethod(turn),
    }
    return type(
        own.__name__.replace("Attention", "InfiniAttention"),
        (InfiniAttentionMixin, own),
        attributes,
    )


def _arguments(function) -> list[str]:
    return [
        name for name in inspect.signature(function).parameters if name not in ("self", "kwargs")
    ]


def _required(function) -> set[str]:
    found = inspect.signature(function).parameters.values()
    rest = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {each.name for each in found if each.kind not in rest and each.default is each.empty}


@functools.cache
def register_models(config: type[FamilyConfigMixin] | type[InfiniGPT2Config]) -> None:
    """Registers all models of a family with the Auto classes, and has them saved with their code.
    `config`: the family's class of [`infini_config`]."""
    own = config.own_class
    classes = {}
    alias_tokenizer(own, config)
    for name in AUTO_CLASSES:
        auto_class = getattr(transformers, name)
        if own in auto_class._model_mapping:
            classes[name] = infini_class(auto_class._model_mapping[own])
            auto_class.register(config, classes[name], exist_ok=True)
    carry_code("models.families", **classes)


def register_lazily(model_types: Iterable[str]) -> None:
    """Has `AutoConfig` know families by their own `model_types`, such as "llama", and make the
    configuration of one when it is asked for it."""
    known = transformers.CONFIG_MAPPING  # older versions of transformers do not have them all
    names = {
        PREFIX + own: f"Infini{CONFIG_MAPPING_NAMES[own]}"
        for own in model_types
        if own in CONFIG_MAPPING_NAMES
    }
    for model_type in names.keys() & known:  # a copy of this code, loaded with a model, came before
        __getattr__(names[model_type])
    # Not in CONFIG_MAPPING_NAMES: whoever iterates over models would look there for modules of
    # transformers
    known._mapping = ChainMap(known._mapping, names)
    known._modules |= dict.fromkeys(names, sys.modules[__name__])


def __getattr__(name: str) -> type:
    """A class by its name, as a saved model's configuration gives it."""
    own = (
        getattr(transformers, name.removeprefix("Infini"), None)
        if name.startswith("Infini")
        else None
    )
    if isinstance(own, type) and issubclass(own, PreTrainedConfig):
        config = infini_config(own)
        register_models(config)  # one that another process has pickled is not constructed
        return config
    if isinstance(own, type) and issubclass(own, PreTrainedModel):
        return infini_class(own)
    family, found, rest = name.partition("InfiniAttention")
    if found and not rest:  # "Llama", beside whose model its attention is
        for model in (f"{family}Model", f"{family}PreTrainedModel"):
            own = getattr(transformers, model, None)
            beside = vars(sys.modules[own.__module__]) if own else {}
            if f"{family}Attention" in beside:
                return infini_class(beside[f"{family}Attention"])
    raise AttributeError(f"module {__name__} has no {name}.")


register_models(InfiniGPT2Config)
