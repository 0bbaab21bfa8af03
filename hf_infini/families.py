"""The models with Infini-attention of every family of decoders, made when they are asked for: `families.InfiniLlamaModel` is
`LlamaModel` with the mixins of modeling_infini.py before it, and so on for all of its heads.
"""

import copyreg
import functools
import inspect
import sys
from typing import Any

import transformers
from torch import nn
from transformers import GenerationMixin, GPT2Config, PreTrainedConfig, PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.models.auto import modeling_auto
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention, GPT2DoubleHeadsModel

from .cache_name import CACHE
from .checkpoints import HUB_OPTIONS
from .configuration_infini import FamilyConfigMixin, infini_config
from .configuration_infini_gpt2 import InfiniGPT2Config
from .generation import MemoryGenerationMixin
from .hooks import become
from .hub_code import HubModelMixin, carry_code
from .lookups import PREFIX, enter_adapters, enter_tokenizer
from .modeling_infini import InfiniModelMixin, InfiniPreTrainedMixin
from .modeling_infini_gpt2 import GPT2InfiniAttention, InfiniGPT2ModelMixin
from .modeling_infini_layer import InfiniAttentionMixin, LayerConfig
from .options import MemoryOptions

# Auto classes that load a decoder, with the tables that say which class of a family they load
AUTO_CLASSES = {
    "AutoModel": modeling_auto.MODEL_MAPPING,
    "AutoModelForPreTraining": modeling_auto.MODEL_FOR_PRETRAINING_MAPPING,
    "AutoModelForCausalLM": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING,
    "AutoModelForSequenceClassification": modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    "AutoModelForTokenClassification": modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    "AutoModelForQuestionAnswering": modeling_auto.MODEL_FOR_QUESTION_ANSWERING_MAPPING,
}
# Families that are known to go with it; others may, and say so when they are patched
PROBED = (
    *("apertus", "arcee", "bitnet", "cohere", "cohere2", "ernie4_5", "exaone4", "exaone_moe", "gemma", "gemma2"),
    *("gemma3_text", "glm", "glm4", "gpt_neox", "granite", "helium", "hy_v3", "kolibri1", "llama", "llama4_text"),
    *("minimax_m2", "ministral", "mistral", "mixtral", "nanochat", "nemotron", "olmo", "olmo2", "olmo3", "olmoe"),
    *("persimmon", "phi", "phi3", "qwen2", "qwen3", "qwen3_moe", "seed_oss", "smollm3", "stablelm", "starcoder2"),
)
# Families whose layers do not pass on keywords to their attention
DROP_KEYWORDS = ("stablelm", "nemotron")


class MadeHere(type):
    """The type of classes that [`infini_class`] makes: another process finds them by what they are made of."""

    own_class: type


copyreg.pickle(
    MadeHere, lambda cls: (infini_class, (cls.own_class,)) if cls.__module__ == __name__ else cls.__qualname__
)


@functools.cache
def infini_class(own: type) -> type:
    """The class with Infini-attention of a family's own attention, base model, or model with a head."""
    if not issubclass(own, PreTrainedModel):
        return GPT2InfiniAttention if own is GPT2Attention else _attention_class(own)
    config: Any = own.config_class
    attributes: dict[str, Any] = {"__module__": __name__, "__doc__": f"`{own.__name__}` with Infini-attention."}
    attributes |= {"own_class": own, "config_class": infini_config(config)}
    bases: list[type] = [HubModelMixin, InfiniPreTrainedMixin]
    if own.__name__ == base_model_name(config):
        mixin = InfiniGPT2ModelMixin if config is GPT2Config else InfiniModelMixin
        bases.append(mixin)
        attributes["forward"] = _with_arguments_of(own.forward, mixin.forward)
        forward = inspect.unwrap(own.forward)
        attributes["argument_names"] = _arguments(forward)
        attributes["layers_drop_keywords"] = config.model_type in DROP_KEYWORDS
        rotary = [c for name, c in vars(sys.modules[own.__module__]).items() if name.endswith("RotaryEmbedding")]
        attributes["turns_by_layer_type"] = any("layer_type" in _arguments(c.forward) for c in rotary)
        attributes["takes_masks_by_type"] = "causal_mask_mapping" in forward.__code__.co_varnames
    if issubclass(own, GenerationMixin):
        bases.append(MemoryGenerationMixin)
        # transformers looks for a loss by the class's name, and where it finds none, its warning breaks a compiled graph
        attributes["_loss_function"] = staticmethod(ForCausalLMLoss)
    return MadeHere("Infini" + own.__name__, (*bases, own), attributes)


def _with_arguments_of(own, forward):
    """A mixin's `forward` with the `own` one's signature and what the mixins add to it: others ask it what a model takes."""
    signature, added = inspect.signature(own), inspect.signature(InfiniModelMixin.forward).parameters.values()
    named = [*signature.parameters.values(), *(argument for argument in added if argument.kind is argument.KEYWORD_ONLY)]

    @functools.wraps(forward)
    def with_arguments(self, *args, **kwargs):
        return forward(self, *args, **kwargs)

    vars(with_arguments)["__signature__"] = signature.replace(parameters=sorted(named, key=lambda argument: argument.kind))
    return with_arguments


def _attention_class(own: type) -> type:
    arguments = _arguments(own.forward)[1:]
    cache = next(name for name in (CACHE, "layer_past") if name in arguments)
    module = sys.modules[own.__module__]
    turn = getattr(module, "apply_rotary_pos_emb", None) or getattr(module, "apply_rotary_emb", None)
    attributes: dict[str, Any] = {"__module__": __name__, "own_class": own}
    attributes |= {"argument_names": arguments, "cache_argument": cache}
    attributes["turning_function"] = None if turn is None else staticmethod(turn)
    return MadeHere("Infini" + own.__name__, (InfiniAttentionMixin, own), attributes)


def _arguments(function) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name not in ("self", "kwargs")]


def add_memory(model: InfiniPreTrainedMixin) -> None:
    """Gives the layers that the model's configuration names their memory, in place, if they do not have it."""
    base: Any = decoder_of(model)  # is made an InfiniModelMixin
    if not isinstance(base, InfiniModelMixin):
        become(base, infini_class(type(base)))
    for part in (model, base):
        part.enter_weights()
    enter_adapters(base.config.model_type)  # of experts PEFT looks for the type before it asks for `to_dict()`
    base.set_positions()
    layers, config = attention_layers(base), LayerConfig(base.config)
    for number in base.config.infini_layers:
        attention: Any = layers[number]  # is made an InfiniAttentionMixin
        if not isinstance(attention, InfiniAttentionMixin):
            become(attention, infini_class(type(attention)))
            attention.swap_in(config, base.rotary_tables(1), base.dtype)


def attention_layers(base: PreTrainedModel) -> list[nn.Module]:
    """The attention modules of a decoder's layers, in order.

    Raises:
        ValueError: the model is not made of layers with one attention each.
    """
    count = base.config.num_hidden_layers
    for layers in base.children():
        if isinstance(layers, nn.ModuleList) and len(layers) == count:
            found = [[m for m in layer.children() if type(m).__name__.endswith("Attention")] for layer in layers]
            if all(len(modules) == 1 for modules in found):
                return [modules[0] for modules in found]
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
        raise ValueError(f"no {name} is inside this {type(model).__name__}.")
    return found


@functools.cache
def register_models(config: type[FamilyConfigMixin] | type[InfiniGPT2Config]) -> None:
    """Registers all models of a family with the Auto classes, and has them saved with their code."""
    own = config.own_class
    classes = {}
    enter_tokenizer(own, config)
    for auto_class, table in AUTO_CLASSES.items():
        if own in table:
            classes[auto_class] = infini_class(table[own])
            getattr(transformers, auto_class).register(config, classes[auto_class], exist_ok=True)
    others = [infini_class(GPT2DoubleHeadsModel)] if own is GPT2Config else []  # as the own class, none that Auto loads
    carry_code("families", *others, **classes)


class AutoInfiniModelForCausalLM:
    """Loads any decoder with Infini-attention, as `AutoModelForCausalLM` loads one without."""

    @staticmethod
    def from_pretrained(path, **options) -> PreTrainedModel:
        """A language model from a plain checkpoint, whose gates are then initialised as `gate_init` says, or from one that
        was saved with Infini-attention.

        Args:
            path: a folder or the name of a repository, as `AutoModelForCausalLM.from_pretrained` takes it.
            options: those of [`MemoryOptions`], such as `segment_length=256`, and those of that method.

        Raises:
            ValueError: the checkpoint is of a family that cannot have Infini-attention, or a layer computes something else
                with its memory empty; the message says why.
        """
        options = {"trust_remote_code": False} | options  # nobody is asked whether a folder's code may run
        hub = {name: options[name] for name in HUB_OPTIONS & options.keys()}
        config_class = type(transformers.AutoConfig.from_pretrained(path, **hub))
        if not issubclass(config_class, MemoryOptions):
            infini_config(config_class)
            table = AUTO_CLASSES["AutoModelForCausalLM"]
            if config_class not in table:
                raise ValueError(f"{path} is a {config_class.model_type!r}, and that is no causal language model.")
            return infini_class(table[config_class]).from_pretrained(path, **options)
        return transformers.AutoModelForCausalLM.from_pretrained(path, **options)


def __getattr__(name: str) -> type:
    """A class by its name, as a saved model's configuration gives it."""
    own = getattr(transformers, name.removeprefix("Infini"), None) if name.startswith("Infini") else None
    if isinstance(own, type) and issubclass(own, PreTrainedConfig):
        return infini_config(own)
    if isinstance(own, type) and issubclass(own, PreTrainedModel):
        return infini_class(own)
    raise AttributeError(f"module {__name__} has no {name}.")


register_models(InfiniGPT2Config)
