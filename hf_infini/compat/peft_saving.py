"""PEFT saves what it has made, and asks a model for nothing else that was trained. No version yet
makes this needless."""

import warnings
from collections.abc import Callable
from typing import Any


class UnsavedMemoryWarning(UserWarning):
    """PEFT has saved an adapter alone, and what the model's memory has learned is in no file."""


def with_saving(config, then: Callable):
    """A copy of PEFT's configuration, `config`, that calls `then(folder)` once it is saved, unless
    it calls something already."""
    own = type(config)
    if hasattr(own, "then"):
        return config

    def save_pretrained(self, save_directory, **kwargs):
        own.save_pretrained(self, save_directory, **kwargs)
        then(save_directory)

    found = _of_class(config, own)
    attributes: dict[str, Any] = {
        "then": staticmethod(then),
        "save_pretrained": save_pretrained,
        "__reduce_ex__": lambda self, _: (with_saving, (_of_class(self, own), then)),
    }
    found.__class__ = type(own.__name__, (own,), attributes)
    return found


def renewed(config, make: Callable[[], Callable]):
    """A copy of a `config` of [`with_saving`] that calls what `make()` gives; `config` itself where
    that warns only, or calls nothing."""
    if getattr(config, "then", warn_of_unsaved) is warn_of_unsaved:
        return config
    own: Any = type(config).__base__
    return with_saving(_of_class(config, own), make())


def _of_class(config, own: type):
    """A copy as pickle takes it: of a class that it finds by its name."""
    found = object.__new__(own)
    vars(found).update(vars(config))
    return found


def weights_are_saved(model, folder) -> None:
    """Calls what follows the saving of a model's adapter into a `folder` once more: transformers
    writes the weights of one after its configuration, and PEFT before it."""
    if getattr(model, "_hf_peft_config_loaded", False):
        then = getattr(model.peft_config[model.active_adapters()[0]], "then", warn_of_unsaved)
        if then is not warn_of_unsaved:
            then(folder)


def warn_of_unsaved(folder) -> None:
    """Warns that an adapter is in this folder, and the memory beside it is not."""
    warnings.warn(
        f"PEFT has saved an adapter in {folder} without the memory that the model has beside it. "
        "Save both with hf_infini.save_adapter(model, folder), or make the configuration with "
        "hf_infini.lora_config(model).",
        UnsavedMemoryWarning,
        stacklevel=4,
    )
