"""PEFT saves what it has made, and asks a model for nothing else that was trained. No version yet makes this needless."""

import copy
import warnings
from collections.abc import Callable, Collection


class UnsavedMemoryWarning(UserWarning):
    """PEFT has saved an adapter alone, and what the model's memory has learned is in no file."""


def warning_when_saved(config, unsaved: Callable[[], Collection[str]]):
    """A copy of PEFT's configuration that warns when it is saved, which PEFT does with every adapter.

    Args:
        config: is returned as it is if its class has `saves_memory`, as that of [`lora_config`].
        unsaved: gives the names of the parameters that are in no file then.
    """
    own = type(config)
    if hasattr(own, "saves_memory"):
        return config

    def save_pretrained(self, save_directory, **kwargs):
        own.save_pretrained(self, save_directory, **kwargs)
        if names := unsaved():
            warnings.warn(
                f"PEFT has saved an adapter in {save_directory} without the memory that the model has beside it: "
                f"{', '.join(sorted(names))} are in no file. Save both with hf_infini.save_adapter(model, folder), or make "
                "the configuration with hf_infini.lora_config(model).",
                UnsavedMemoryWarning,
                stacklevel=3,
            )

    found = copy.copy(config)
    found.__class__ = type(own.__name__, (own,), {"saves_memory": False, "save_pretrained": save_pretrained})
    return found
