"""A module's class changed in place, also for accelerate and transformers. No version yet makes
this needless."""

from torch import nn
from transformers import PreTrainedModel
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY


def has_own_forward(module: nn.Module) -> bool:
    """Whether a module runs the forward of its class, perhaps inside a hook of accelerate."""
    name = "_old_forward" if "_hf_hook" in vars(module) else "forward"
    forward = vars(module).get(name)
    return forward is None or getattr(forward, "__func__", None) is type(module).forward


def swap_class(module: nn.Module, other: type) -> None:
    """Makes a module an instance of the class `other` in place, also for a hook, which keeps the
    forward that it wraps, and for transformers, which finds what it can record of a model by a
    class that was constructed."""
    own, module.__class__ = type(module), other
    for name in ("_old_forward", "forward"):  # the second is left by a hook that was removed
        if getattr(vars(module).get(name), "__func__", None) is own.forward:
            vars(module)[name] = other.forward.__get__(module)
    if isinstance(module, PreTrainedModel):
        # newer ones take a model for a key
        dict.__setitem__(_CAN_RECORD_REGISTRY, str(other), module._can_record_outputs)
