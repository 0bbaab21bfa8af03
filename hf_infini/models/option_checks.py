"""What the configurations share: they refuse values that no model can have, and options that the model would ignore."""

import dataclasses
import difflib
import functools
import math

import transformers
from huggingface_hub.dataclasses import strict
from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN

from ..ops.rules import RULES
from ..options import ConfigBase, check_number, limits_of

# Stock models, whose options people are likely to try; and names of options that are not declared there
STOCK = "GPT2 Llama Mistral Mixtral Qwen2 Gemma2 GPTNeoX GPTJ Phi Falcon Bloom OPT T5 Granite Cohere GptOss".split()
UNDECLARED = ("rope_theta", "rope_scaling", "partial_rotary_factor", "per_layer_config")
ACTIVATIONS = ("activation_function", "hidden_act", "hidden_activation")  # names of an activation, by name
ALIKE = 0.9  # similarity of names, at most 1: one letter more or less, or two swapped


def checked(config_class: type) -> type:
    """Decorator of a configuration: checks types and runs its validators, as transformers' own do, and raises what they find
    as a ValueError of one line."""
    config_class = strict(config_class)
    for name in ("__init__", "__setattr__"):
        setattr(config_class, name, _with_one_error(getattr(config_class, name)))
    return config_class


def _with_one_error(method):
    @functools.wraps(method)
    def wrapped(*args, **kwargs):
        try:
            return method(*args, **kwargs)
        except StrictDataclassError as error:
            reason = str(error.__cause__).partition(" Errors:")[0]  # without a union's, one for each of its types
            raise ValueError(" ".join(reason.split())) from None

    return wrapped


class OptionsMixin(ConfigBase):
    """Refuses options that a configuration would keep and its model ignore; comes before the configuration's base class.

    An extra attribute may have any name but that of an option of stock decoders (`rope_scaling`, `num_key_value_heads`, …),
    which would change their computation and not this model's, and any that is nearly the name of an option of this one.
    `None` says that an option is not used, and may stay.
    """

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, **kwargs):
        """As usual, but errors name the place, and there is no warning that a plain model's is of another type.

        A plain model's configuration stays one where no segments are given: PEFT asks the class of a patched model for the
        vocabulary of its checkpoint.
        """
        place = pretrained_model_name_or_path
        values, kwargs = cls.get_config_dict(place, **kwargs)
        own = getattr(cls, "own_class", None)
        if own and values.get("model_type") == own.model_type and not {"segment_length", "n_segments"} & kwargs.keys():
            return own.from_dict(values, **kwargs)
        return cls.from_dict(values, **{"name_or_path": str(place)} | kwargs)  # as AutoConfig gives it

    @classmethod
    def from_dict(cls, config_dict, **kwargs):
        """As usual, but options in `kwargs` count before the check, and what is unknown is refused there, too.

        Raises:
            ValueError: a value that cannot be, or values of another kind of model.
        """
        place = kwargs.get("name_or_path")
        try:
            return cls._from_dict(config_dict, **kwargs)
        except ValueError as error:
            raise ValueError(f"the configuration of {place} cannot be used: {error}" if place else str(error)) from error

    @classmethod
    def _from_dict(cls, config_dict, **kwargs):
        own_type = getattr(getattr(cls, "own_class", None), "model_type", None)
        kind, kinds = config_dict.get("model_type", cls.model_type), [cls.model_type, own_type]
        if kind not in kinds:
            raise ValueError(
                f"it is of the model type {kind!r}, and a {cls.__name__} is made from {' or '.join(filter(None, kinds))}. "
                "AutoModelForCausalLM and AutoInfiniModelForCausalLM load any."
            )
        other_type = kind != cls.model_type
        if other_type:
            config_dict = cls.without_ignored(config_dict)  # as the other model ignored them
            config_dict.pop("model_type", None)
        refuse_ignored(cls, kwargs)
        own = {name: kwargs.pop(name) for name in own_options(cls) & kwargs.keys()}
        found = super().from_dict({**config_dict, **own}, **kwargs)
        if other_type:  # its model compares the layers once they are loaded
            (found[0] if isinstance(found, tuple) else found).__dict__["_from_other_type"] = list(own)
        return found

    @classmethod
    def without_ignored(cls, values: dict) -> dict:
        """Another model's `values` by name, without those that would be refused here."""
        return {name: value for name, value in values.items() if reason_to_refuse(cls, name, value) is None}

    def __post_init__(self, **kwargs):
        """Checks numbers before anything is computed of them, and undeclared attributes before they are kept."""
        common = {own: name for name, own in self.attribute_map.items()}
        for field in dataclasses.fields(self):
            check_number(field.name, getattr(self, field.name), limits_of(field, common.get(field.name)))
        for name, value in {**vars(self), **kwargs}.items():
            if not _is_finite(value):
                raise ValueError(f"{name} holds NaN or infinity, and is {value}: no option does. Mend or leave it out.")
        for name in ACTIVATIONS:
            value = getattr(self, name, None)
            if isinstance(value, str) and value not in ACT2FN:
                raise ValueError(f"{name} must be one of {', '.join(ACT2FN)}; got {value!r}.")
        refuse_ignored(type(self), kwargs)
        super().__post_init__(**kwargs)

    def check_update_rule(self) -> None:
        """ValueError where options mean nothing with the update rule."""
        RULES[self.update_rule].check(vars(self))


def _is_finite(value) -> bool:
    """Whether all numbers inside a value of a JSON file are."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return all(map(_is_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def own_options(config_class: type[PreTrainedConfig]) -> set[str]:
    """The options that a configuration has beyond those of every configuration."""
    declared = config_class.__dataclass_fields__.keys() - PreTrainedConfig.__dataclass_fields__.keys()
    mapped = config_class.attribute_map
    return declared | mapped.keys() | set(mapped.values()) | set(getattr(config_class, "undeclared_options", ()))


@functools.cache
def stock_options() -> set[str]:
    """The names by which stock decoders are told what to compute."""
    return set(UNDECLARED).union(*(own_options(getattr(transformers, f"{name}Config")) for name in STOCK))


def reason_to_refuse(config_class: type[PreTrainedConfig], name: str, value) -> str | None:
    """Why an attribute would be refused: it looks like an option, and is none of this configuration."""
    own = own_options(config_class)
    if value is None or name.startswith("_") or name in own or name in PreTrainedConfig.__dataclass_fields__:
        return None
    alike = difflib.get_close_matches(name, sorted(own), 1, ALIKE)
    if not alike and name not in stock_options():
        return None
    hint = f"Did you mean {alike[0]}?" if alike else f"Its options are {', '.join(sorted(own))}."
    name = f"{config_class.model_type} has no option {name}"
    return f"{name}: {value!r} would be kept and change nothing. Leave it out. {hint}"


def refuse_ignored(config_class: type[PreTrainedConfig], values: dict) -> None:
    """Raises a ValueError for the first [`reason_to_refuse`] one of `values`, by name."""
    for name, value in values.items():
        message = reason_to_refuse(config_class, name, value)
        if message is not None:
            raise ValueError(message)
