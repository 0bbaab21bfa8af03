"""A module's class changed in place, also for accelerate's hooks and transformers' records; and a model that becomes again
what it was. No version yet makes this needless."""

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY


def swap_class(module: nn.Module, other: type) -> None:
    """Makes a module an instance of another class in place, also for a hook, which keeps the forward that it wraps.

    transformers finds what it can record of a model (attentions, hidden states) by the class that the model was constructed
    as; the other one may never have been.
    """
    own, module.__class__ = type(module), other
    for name in ("_old_forward", "forward"):  # the second is left by a hook that was removed
        if getattr(vars(module).get(name), "__func__", None) is own.forward:
            vars(module)[name] = other.forward.__get__(module)
    if isinstance(module, PreTrainedModel):
        dict.__setitem__(_CAN_RECORD_REGISTRY, str(other), module._can_record_outputs)  # newer ones take a model for a key


@contextlib.contextmanager
def unchanged_on_error(model: PreTrainedModel) -> Iterator[None]:
    """Within it, an error leaves a model as it was: its classes, modules, attributes, configuration and parameters.

    Numbers that were written into a tensor in place stay; a tensor that was given other numbers (`.data`) gets its own back.
    """
    parts: list[Any] = [*model.modules(), model.config]
    kept = [(part, type(part), dict(vars(part))) for part in parts]
    inner = [(value, dict(value)) for _, _, values in kept for value in values.values() if isinstance(value, dict)]
    tensors = [(tensor, tensor.data, tensor.requires_grad) for tensor in (*model.parameters(), *model.buffers())]
    try:
        yield
    except BaseException:
        for part, kind, values in kept:
            part.__class__ = kind
            vars(part).clear()
            vars(part).update(values)
        for value, content in inner:  # the same dictionaries: handles of hooks know them
            value.clear()
            value.update(content)
        for tensor, data, trained in tensors:
            if type(data) is Tensor:
                tensor.data = data
            tensor.requires_grad_(trained)
        raise
