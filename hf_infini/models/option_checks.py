"""What the configurations share: errors of one line, and options that are given on loading."""

import dataclasses
import functools
from typing import ClassVar

from huggingface_hub.dataclasses import strict
from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig

from ..compat.hub_code import HubConfigMixin
from ..ops.rules import RULES
from ..options import MemoryOptions, check_number
from .adapter_files import meet_peft

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


class InfiniConfigMixin(MemoryOptions, HubConfigMixin):
    """What a configuration with the options of a memory has beyond its own base class, which comes after it."""

    own_class: ClassVar[type[PreTrainedConfig]] = PreTrainedConfig  # of the model without a memory
    has_no_defaults_at_init = True  # transformers 5.17 would otherwise build one without options to compare with

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
            ValueError: a value that cannot be, or values of another kind of model.
        """
        kind = config_dict.get("model_type", cls.model_type)
        if kind not in (cls.model_type, cls.own_class.model_type):
            raise ValueError(f"a {cls.__name__} is made from a configuration of {cls.model_type}; this one is of {kind!r}.")
        replaced = {"model_type", *(SEGMENTS if SEGMENTS & kwargs.keys() else ())}
        options = (cls.__dataclass_fields__.keys() | cls.attribute_map.keys()) - PreTrainedConfig.__dataclass_fields__.keys()
        given = {name: kwargs.pop(name) for name in options & kwargs.keys()}
        values = {name: value for name, value in config_dict.items() if name not in replaced} | given
        found = super().from_dict(values, **kwargs)
        if kind != cls.model_type:  # its model compares the layers once they are loaded
            (found[0] if isinstance(found, tuple) else found).__dict__["_from_other_type"] = list(given)
        return found

    @classmethod
    def own_options(cls) -> list[str]:
        """The names of the options that the own class does not have."""
        return [name for name in cls.__dataclass_fields__ if name not in cls.own_class.__dataclass_fields__]

    def __post_init__(self, **kwargs):
        """Checks numbers before anything is computed of them."""
        for entry in dataclasses.fields(self):
            check_number(entry.name, getattr(self, entry.name), entry.metadata)
        super().__post_init__(**kwargs)

    def to_dict(self) -> dict:
        meet_peft(self.model_type)  # it looks for the type here, and may have been imported after the model was made
        return super().to_dict()

    def check_update_rule(self) -> None:
        """ValueError where options mean nothing with the update rule."""
        RULES[self.update_rule].check(vars(self))
