"""By what a cache knows again the text that it has read, and the model that read it: a digest of
all ids, and a few numbers of every weight."""

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn

# Odd numbers without a pattern, by which products in wrapping int64 spread over all bits
FOR_IDS, FOR_COLUMNS, FOR_BOTH = -7046029254386353131, -4417276706812531889, -49064778989728563
NUMBERS = 16  # of each weight

# By device and dtype: the names of weights, how many numbers of each, and all these in one tensor
Sample = dict[tuple[torch.device, torch.dtype], tuple[list[str], list[int], Tensor]]


def digest_after(digest: Tensor | None, ids: Tensor) -> Tensor:
    """The digest of a text that goes on with these ids, `[batch, tokens]`; `None`: that begins
    with them. `[batch, 2]`, int64: the columns so far, and the sum of a hash of each column with
    its id. So it does not matter how the text was cut into calls, and rows can be moved."""
    digest = ids.new_zeros(len(ids), 2, dtype=torch.long) if digest is None else digest
    columns = digest[:, :1] + torch.arange(ids.shape[1], device=ids.device)
    # a sum of hashes knows the order only by the columns in them
    mixed = torch.add(columns * FOR_COLUMNS, ids.long(), alpha=FOR_IDS)
    mixed = (mixed ^ (mixed >> 29)) * FOR_BOTH
    hashed = (mixed ^ (mixed >> 32)).sum(1, keepdim=True)
    return digest + torch.cat([torch.full_like(hashed, ids.shape[1]), hashed], 1)


def sample_of(model: nn.Module) -> Sample:
    """A few numbers of every weight that is saved and is here as plain numbers (of quantized ones
    their bytes), without waiting for the device. What is offloaded, or sharded over processes, is
    left out."""
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
    """The names of weights that are in both samples, but have other numbers or dtypes."""
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
