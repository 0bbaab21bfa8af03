"""What the configurations share: errors of one line, options that are given on loading, and names that are mistyped."""

import dataclasses
import difflib
import functools
from collections.abc import Iterable
from typing import ClassVar

from huggingface_hub.dataclasses import strict
from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig

from ..ops.rules import RULES
from ..options import ConfigBase, check_number, limits_of
from .peft import meet_peft

ALIKE = 0.9  # similarity of names, at most 1: one letter more or less, or two swapped
SEGMENTS = {"segment_length", "n_segments"}  # one of the two is given


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
    """What a configuration with the options of a memory does beyond its own base class, which comes after it."""

    own_class: ClassVar[type[PreTrainedConfig]] = PreTrainedConfig  # of the model without a memory

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, **kwargs):
        """As usual, but there is no warning that a plain model's is of another type.

        A plain model's configuration stays one where no segments are given: PEFT asks the class of a patched model for the
        vocabulary of its checkpoint.
        """
        values, kwargs = cls.get_config_dict(pretrained_model_name_or_path, **kwargs)
        if values.get("model_type") == cls.own_class.model_type and not SEGMENTS & kwargs.keys():
            return cls.own_class.from_dict(values, **kwargs)
        kwargs = {"name_or_path": str(pretrained_model_name_or_path)} | kwargs  # as AutoConfig gives it
        return cls.from_dict(values, **kwargs)

    @classmethod
    def from_dict(cls, config_dict, **kwargs):
        """As usual, but options in `kwargs` count before the check, and `segment_length` or `n_segments` replaces either.

        Raises:
            ValueError: a value that cannot be, or values of another kind of model; the message names the place.
        """
        place = kwargs.get("name_or_path")
        kind = config_dict.get("model_type", cls.model_type)
        if kind not in (cls.model_type, cls.own_class.model_type):
            raise ValueError(
                f"the configuration of {place} is of the model type {kind!r}, and a {cls.__name__} is made from "
                f"{cls.model_type}. AutoModelForCausalLM and AutoInfiniModelForCausalLM load any."
            )
        replaced = {"model_type", *(SEGMENTS if SEGMENTS & kwargs.keys() else ())}
        options = (cls.__dataclass_fields__.keys() | cls.attribute_map.keys()) - PreTrainedConfig.__dataclass_fields__.keys()
        given = {name: kwargs.pop(name) for name in options & kwargs.keys()}
        values = {name: value for name, value in config_dict.items() if name not in replaced} | given
        try:
            refuse_misspelt(cls, kwargs)
            found = super().from_dict(values, **kwargs)
        except ValueError as error:
            raise ValueError(f"the configuration of {place} cannot be used: {error}" if place else str(error)) from error
        if kind != cls.model_type:  # its model compares the layers once they are loaded
            (found[0] if isinstance(found, tuple) else found).__dict__["_from_other_type"] = list(given)
        return found

    @classmethod
    def own_options(cls) -> list[str]:
        """The names of the options that the own class does not have."""
        return [name for name in cls.__dataclass_fields__ if name not in cls.own_class.__dataclass_fields__]

    def __post_init__(self, **kwargs):
        """Checks numbers before anything is computed of them, and undeclared attributes before they are kept."""
        for entry in dataclasses.fields(self):
            check_number(entry.name, getattr(self, entry.name), limits_of(entry))
        refuse_misspelt(type(self), kwargs)
        super().__post_init__(**kwargs)

    def to_dict(self) -> dict:
        meet_peft(self.model_type)  # it looks for the type here, and may have been imported after the model was made
        return super().to_dict()

    def check_update_rule(self) -> None:
        """ValueError where options mean nothing with the update rule."""
        RULES[self.update_rule].check(vars(self))


def refuse_misspelt(config_class: type[OptionsMixin], names: Iterable[str]) -> None:
    """ValueError for a name that is nearly one of the options that are declared here, and would change nothing."""
    own = config_class.own_options()
    for name in names:
        if name not in own and (alike := difflib.get_close_matches(name, own, 1, ALIKE)):
            raise ValueError(
                f"{config_class.model_type} has no option {name}: it would be kept and change nothing. Did you mean "
                f"{alike[0]}?"
            )
