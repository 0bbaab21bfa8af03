"""By what a cache knows the model again that filled it: a few numbers of every weight."""

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn

NUMBERS = 16  # of each weight

# By device and dtype: the names of weights, how many numbers of each, and all these in one tensor
Sample = dict[tuple[torch.device, torch.dtype], tuple[list[str], list[int], Tensor]]


def sample_of(model: nn.Module) -> Sample:
    """A few numbers of every weight of a `model` that is saved and is here as plain numbers (of
    quantized ones their bytes), without waiting for the device. What is offloaded, or sharded over
    processes, is left out."""
    found: Any = defaultdict(lambda: ([], [], []))
    for prefix, module in model.named_modules():
        for name, weight in (*module._parameters.items(), *module._buffers.items()):
            if weight is None or name in module._non_persistent_buffers_set:
                continue
            weight = weight.data
            if _is_here(weight):
                row = (
                    weight.view(-1) if weight.is_contiguous() else weight[(0,) * (weight.dim() - 1)]
                )
                names, sizes, numbers = found[weight.device, weight.dtype]
                names.append(f"{prefix}.{name}")
                numbers.append(row[:: len(row) // NUMBERS + 1])
                sizes.append(len(numbers[-1]))
    return {kind: (*known, torch.cat(numbers)) for kind, (*known, numbers) in found.items()}


def different_weights(one: Sample, other: Sample) -> list[str]:
    """The names of weights that are in both samples, `one` and `other`, but have other numbers or
    dtypes."""
    one_by_name, other_by_name = (
        {
            name: (dtype, str(part.tolist()))  # a word for NaN equals itself
            for (_, dtype), (names, sizes, numbers) in sample.items()
            for name, part in zip(names, numbers.detach().cpu().split(sizes), strict=True)
        }
        for sample in (one, other)
    )
    return [
        name for name, numbers in one_by_name.items() if other_by_name.get(name, numbers) != numbers
    ]


def _is_here(weight: Tensor) -> bool:
    return (
        type(weight) is Tensor
        and weight.device.type != "meta"
        and weight.untyped_storage().nbytes() > 0  # FSDP frees it between two calls
    )
