"""The name of a model's cache: `cache`, and before transformers 5.24 `past_key_values`. Models here
take it by either."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from transformers.modeling_outputs import BaseModelOutputWithPast

NAMES = ("cache", "past_key_values")
CACHE = next(
    name for name in NAMES if name in {field.name for field in fields(BaseModelOutputWithPast)}
)
OTHER_NAME = next(name for name in NAMES if name != CACHE)


def cache_of(output) -> Any:
    """The cache in the output of a model or of `generate`, without the warning that its old name
    brings."""
    return getattr(output, CACHE)


def with_one_name(arguments: dict[str, Any], name: str = "cache") -> dict[str, Any]:
    """These `arguments`, by name, in which the cache, if there is one, is called `name`; TypeError
    where it came with both names."""
    found = [arguments[one] for one in NAMES if arguments.get(one) is not None]
    if len(found) == 2:
        raise TypeError(
            "cache and past_key_values are two names of one argument: give only one of them."
        )
    rest = {key: value for key, value in arguments.items() if key not in NAMES}
    return rest if len(rest) == len(arguments) else rest | {name: found[0] if found else None}


def takes_either_name(forward: Callable) -> Callable:
    """Decorator of a model's method, `forward`, whose argument for a cache may have either name."""
    name = CACHE if CACHE in inspect.signature(forward).parameters else "cache"

    @functools.wraps(forward)
    def with_either(self, *args, **kwargs):
        return forward(self, *args, **with_one_name(kwargs, name))

    return with_either
