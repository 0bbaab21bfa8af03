"""Modules on which accelerate has put hooks (`device_map`): where they compute; and how a module's class is changed."""

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY


def device_of(module: nn.Module) -> torch.device:
    """Where a module computes; its parameters may be kept elsewhere until they are needed."""
    hook = getattr(module, "_hf_hook", None)
    devices = (getattr(each, "execution_device", None) for each in getattr(hook, "hooks", (hook,)))
    found = next((device for device in devices if device is not None), None)
    if found is None:  # the weights of layers without parameters, those of torch.ao.quantization, are on a CPU
        return next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
    return torch.device(found)


def become(module: nn.Module, other: type) -> None:
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
