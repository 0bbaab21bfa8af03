"""The configuration of a decoder of transformers with Infini-attention, made for a family when it is asked for."""

import functools
import sys
from collections import ChainMap
from collections.abc import Callable, Iterable
from typing import ClassVar

import transformers
from transformers import GPT2Config, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from ..compat.class_lookups import PREFIX, AdaptersOfOwnMixin
from ..compat.hub_code import IS_COPY, HubConfigMixin, carry_code
from ..options import MemoryOptions, layer_kinds
from .gpt2_configuration import InfiniGPT2Config
from .option_checks import OptionsMixin, checked

# Families that a swapped layer's test would pass or fail without telling the reason
KINDS = {"full_attention", "sliding_attention", "chunked_attention"}  # of layers that a model with memories may have
REFUSED = {
    "multi-head latent attention makes its keys from a compressed state": (
        *("deepseek_v2", "deepseek_v3", "deepseek_v32", "minicpm3", "youtu", "mistral4", "glm4_moe_lite", "kimi_linear"),
        *("longcat_flash", "axk1"),
    ),
    "its attention does not go through transformers' attention interface": (
        *("gptj", "codegen", "falcon", "bloom", "mpt", "gpt_neo", "openai-gpt", "ctrl", "xglm", "biogpt"),
        "gpt_neox_japanese",
    ),
    "its layers share keys and values": ("gemma3n_text", "gemma4_text", "zamba", "zamba2"),
    "its attention has learned sinks": ("gpt_oss",),
    "its heads are differences of two": ("diffllama",),
    "it normalises queries and keys after their rotation": ("hunyuan_v1_dense", "hunyuan_v1_moe"),
    "some of its layers are no attention": (
        *("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "lfm2", "lfm2_moe", "bamba", "jamba", "falcon_h1"),
        *("granitemoehybrid", "nemotron_h", "recurrent_gemma", "olmo_hybrid", "rwkv"),
    ),
}

FAMILY_REGISTRARS: list[Callable[[type], None]] = []  # families.py adds the one that registers a family's models


class FamilyConfigMixin(MemoryOptions, OptionsMixin, AdaptersOfOwnMixin, HubConfigMixin):
    """All options of the own configuration, and those of [`MemoryOptions`]."""

    own_class: ClassVar[type[PreTrainedConfig]]
    has_no_defaults_at_init = True  # transformers 5.17 would otherwise build one without options to compare with

    def __post_init__(self, **kwargs):
        for register in FAMILY_REGISTRARS:
            register(type(self))  # whoever has a configuration may ask an Auto class for its model next
        super().__post_init__(**kwargs)

    def validate_memory_options(self):
        """Those of every memory, and those of families."""
        super().validate_memory_options()
        if others := sorted({*layer_kinds(self)} - KINDS):
            raise ValueError(
                f"a {self.own_class.model_type!r} cannot have Infini-attention: some of its layers are no attention over "
                f"all tokens, a sliding window or a chunk, but {', '.join(others)}."
            )
        if not self.infini_layers:
            raise ValueError(
                f"all {self.num_hidden_layers} layers of this {self.model_type} see a sliding window or chunk, which bounds "
                "them already: name with layers=[…] those that are to have a memory instead."
            )


def _computed(config_class: type[PreTrainedConfig]) -> tuple[str, ...]:
    """What a configuration has beside what it declares, such as a head's width that it works out."""
    if getattr(config_class, "has_no_defaults_at_init", False):
        return ()
    common = PreTrainedConfig.__dataclass_fields__
    return tuple(name for name in vars(config_class()) if not name.startswith("_") and name not in common)


@functools.cache
def infini_config(own: type[PreTrainedConfig]) -> type[FamilyConfigMixin] | type[InfiniGPT2Config]:
    """The configuration class of a family with Infini-attention; `own`: that of the family, or one derived from it.

    Raises:
        ValueError: the family is known not to go with it; the message says why.
    """
    if issubclass(own, GPT2Config):
        return InfiniGPT2Config
    reason = next((reason for reason, types in REFUSED.items() if own.model_type in types), None)
    if reason is not None:
        raise ValueError(f"a {own.model_type!r} cannot have Infini-attention: {reason}.")
    attributes = {
        "__module__": __name__,
        "__doc__": f"`{own.__name__}` with Infini-attention: all of its options, and those of [`MemoryOptions`].",
        "model_type": PREFIX + own.model_type,
        "undeclared_options": _computed(own),
        "own_class": own,
    }
    config = checked(type(f"Infini{own.__name__}", (FamilyConfigMixin, own), attributes))
    carry_code("models.families", AutoConfig=config)
    if not IS_COPY:  # or it would stand for the code of all folders, also of those that nobody trusts
        transformers.AutoConfig.register(config.model_type, config, exist_ok=True)
    return config


def register_lazily(model_types: Iterable[str]) -> None:
    """Has `AutoConfig` know families by their own types, and make the configuration of one when it is asked for it."""
    known = transformers.CONFIG_MAPPING  # older versions of transformers do not have them all
    names = {PREFIX + own: f"Infini{CONFIG_MAPPING_NAMES[own]}" for own in model_types if own in CONFIG_MAPPING_NAMES}
    for model_type in names.keys() & known:  # a copy of this code, loaded with a model, came before
        __getattr__(names[model_type])
    # Not in CONFIG_MAPPING_NAMES: whoever iterates over models would look there for modules of transformers
    known._mapping = ChainMap(known._mapping, names)
    known._modules |= dict.fromkeys(names, sys.modules[__name__])


def __getattr__(name: str) -> type:
    """A configuration class by its name, as a saved model gives it."""
    own = getattr(transformers, name.removeprefix("Infini"), None) if name.startswith("Infini") else None
    if isinstance(own, type) and issubclass(own, PreTrainedConfig):
        config = infini_config(own)
        for register in FAMILY_REGISTRARS:  # one that another process has pickled is not constructed
            register(config)
        return config
    raise AttributeError(f"module {__name__} has no {name}.")
