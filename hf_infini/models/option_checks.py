"""What the configurations share: errors of one line, and options that are given on loading."""

import dataclasses
import difflib
import functools
from collections.abc import Iterable
from typing import ClassVar

from huggingface_hub.dataclasses import strict
from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig

from ..compat.class_lookups import alias_adapters
from ..compat.hub_code import HubConfigMixin
from ..ops.keeping import SCORES
from ..ops.rules import RULES
from ..options import KEEP_SCORES, MemoryOptions, check_number

# How near a name must be to an option's to be taken for it: transformers' configurations have
# "n_layers", whose ratio to "layers" is 0.857
NEAR = 0.88


def checked(config_class: type) -> type:
    """Decorator of a configuration, `config_class`: what its types and validators refuse is a
    ValueError of one line."""
    config_class = strict(config_class)
    init = config_class.__init__

    @functools.wraps(init)
    def with_one_error(self, *args, **kwargs):
        try:
            init(self, *args, **kwargs)
        except StrictDataclassError as error:
            # without a union's, one for each of its types
            reason = str(error.__cause__).partition(" Errors:")[0]
            raise ValueError(" ".join(reason.split())) from None

    config_class.__init__ = with_one_error
    return config_class


def refuse_unknown(names: Iterable[str], known: Iterable[str]) -> None:
    """ValueError where some of the `names` are not among those of the `known` options, each with
    the option that was perhaps meant."""
    known = [*known]
    if unknown := sorted({*names} - {*known}):
        raise ValueError(
            f"unknown options {meant(unknown, known)}; patch_model takes {', '.join(known)}."
        )


def meant(unknown: Iterable[str], known: Iterable[str]) -> str:
    """The `unknown` names in words, each with the one of the `known` that it may be."""
    known = [*known]
    return ", ".join(
        name + "".join(f" (did you mean {near}?)" for near in _near(name, known, 0.6))
        for name in unknown
    )


def _near(name: str, known: Iterable[str], ratio: float) -> list[str]:
    """The option whose name is nearest, if any is near enough."""
    return difflib.get_close_matches(name, known, 1, ratio)


class InfiniConfigMixin(MemoryOptions, HubConfigMixin):
    """What a configuration with the options of a memory has beyond its own base class, which comes
    after it."""

    own_class: ClassVar[type[PreTrainedConfig]] = PreTrainedConfig  # of the model without a memory
    # transformers 5.17 would otherwise build one without options to compare with
    has_no_defaults_at_init = True

    @classmethod
    def from_dict(cls, config_dict, **kwargs):
        """As usual, of a `config_dict`, the entries of a config.json, but options in `kwargs` count
        before the check. A plain model's configuration stays one where no `segment_length` is
        given: PEFT asks the class of a patched model for the vocabulary of its checkpoint."""
        kind = config_dict.get("model_type", cls.model_type)
        if kind == cls.own_class.model_type and "segment_length" not in kwargs:
            return cls.own_class.from_dict(config_dict, **kwargs)
        options = (
            cls.__dataclass_fields__.keys() | cls.attribute_map.keys()
        ) - PreTrainedConfig.__dataclass_fields__.keys()
        given = {name: kwargs.pop(name) for name in options & kwargs.keys()}
        cls.refuse_misspelt(kwargs)
        values = {
            name: value for name, value in config_dict.items() if name != "model_type"
        } | given
        found = super().from_dict(values, **kwargs)
        if kind == cls.own_class.model_type:  # its model compares the layers once they are loaded
            (found[0] if isinstance(found, tuple) else found).__dict__["_from_other_type"] = True
        return found

    @classmethod
    def refuse_misspelt(cls, names: Iterable[str]) -> None:
        """ValueError for names that are nearly those of options; others that transformers does not
        know become attributes, as of every configuration."""
        for name in names:
            if name not in cls.attribute_map and (near := _near(name, cls.own_options(), NEAR)):
                raise ValueError(f"unknown option {name}: did you mean {near[0]}?")

    @classmethod
    def own_options(cls) -> list[str]:
        return [
            name
            for name in cls.__dataclass_fields__
            if name not in cls.own_class.__dataclass_fields__
        ]

    def to_dict(self) -> dict:
        # by which PEFT asks for the type, right before it chooses the modules of an adapter
        alias_adapters(self.model_type)
        return super().to_dict()

    def validate_memory_options(self):
        """Also that no token is weighed twice: a rule with parameters learns its own rates; and
        that each of the scores by which tokens are kept has a place to fill."""
        portions = SCORES[self.keep_score].portions
        fewest = -(-sum(portions) // min(portions)) if self.keep_score != KEEP_SCORES[0] else 0
        if self.has_memory and self.kept_tokens < fewest:
            raise ValueError(
                f"keep_score={self.keep_score!r} says which tokens are kept: give kept_tokens, at "
                f"least {fewest}, such as 256, with it; got {self.kept_tokens}."
            )
        if (
            self.has_memory
            and self.memory_write == "learned"
            and (rule := RULES.get(self.update_rule)) is not None
            and rule.parameters(1, 1)
        ):
            raise ValueError(
                f"update_rule={self.update_rule!r} does not go with memory_write='learned': it "
                "already learns a weight of each token."
            )
        super().validate_memory_options()

    def __post_init__(self, **kwargs):
        """Checks numbers before anything is computed of them, and that no option is ignored."""
        for name in {"denominator", "memory_init", "n_segments"} & kwargs.keys():
            if kwargs[name] not in (None, "separate", "zeros"):
                raise ValueError(
                    f"{name}={kwargs[name]!r} was an option of an earlier version: "
                    "train without it."
                )
        if "cache_tokens" in kwargs:
            raise ValueError(
                "cache_tokens is for patch_model and estimate: a configuration has the sizes that "
                "follow from it, hf_infini.options.options_of_cache(cache_tokens)."
            )
        self.refuse_misspelt(kwargs)
        for entry in dataclasses.fields(self):
            check_number(entry.name, getattr(self, entry.name), entry.metadata)
        super().__post_init__(**kwargs)
