"""Products of the few rows that a step of generation has."""

import torch
from torch import Tensor

FEW = 8  # rows. More would read the other factor as often, where a matrix product reads it once


def are_few(rows: Tensor) -> bool:
    """Whether `[…, rows, D]` are so few that a graph of torch.compile had better not make a matrix product of them."""
    return torch.compiler.is_compiling() and rows.shape[-2] <= FEW


def product(left: Tensor, right: Tensor) -> Tensor:
    """`left @ right`, for `[…, rows, D]` and `[…, D, columns]`. Of few rows in a graph of torch.compile: a sum in float32 or
    wider, which is fused with what comes before and after it: one kernel less to start."""
    if not are_few(left):
        return left @ right
    wide = torch.promote_types(left.dtype, torch.float32)
    return (left.to(wide).unsqueeze(-1) * right.to(wide).unsqueeze(-3)).sum(-2)
