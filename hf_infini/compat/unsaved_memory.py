"""PEFT saves what it has made, and asks a model for nothing else that was trained. No version yet makes this needless."""

import warnings
from collections.abc import Callable, Collection


class UnsavedMemoryWarning(UserWarning):
    """PEFT has saved an adapter alone, and what the model's memory has learned is in no file."""


def warn_when_saved(config, unsaved: Callable[[], Collection[str]]) -> None:
    """Has a configuration of PEFT, in place, warn when it is saved, which PEFT does with every adapter.

    Args:
        config: a class that has `saves_memory` sees to it by itself.
        unsaved: gives the names of the parameters that are in no file then.
    """
    own = type(config)
    if hasattr(own, "saves_memory"):
        return

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

    config.__class__ = type(own.__name__, (own,), {"saves_memory": False, "save_pretrained": save_pretrained})
