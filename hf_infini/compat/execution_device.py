"""Where a module computes that accelerate has put hooks on (`device_map`); no version yet makes
this needless."""

import torch
from torch import nn


def device_of(module: nn.Module) -> torch.device:
    """Where a module computes; its parameters may be kept elsewhere until they are needed."""
    hook = getattr(module, "_hf_hook", None)
    devices = (getattr(each, "execution_device", None) for each in getattr(hook, "hooks", (hook,)))
    found = next((device for device in devices if device is not None), None)
    # the weights of layers without parameters, those of torch.ao.quantization, are on a CPU
    if found is None:
        return next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
    return torch.device(found)
