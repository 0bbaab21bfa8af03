"""Tensor operations of the layouts: gathering rows with a gradient that gathers as well, and padding with zeros."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F


class _Gather(torch.autograd.Function):
    """y_j = x_{i(j)}, rows of `[batch, rows, …]` at an index `[batch, places]`, zero at −1, no row taken twice;
    g_x_i = g_{j(i)} with the inverse index: a gather as well, where autograd's scatter would add atomically.
    """

    @staticmethod
    def forward(ctx, rows: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(index, inverse)
        offsets = torch.arange(rows.shape[0], device=rows.device).unsqueeze(1) * rows.shape[1]
        taken = rows.flatten(0, 1).index_select(0, (index.clamp(min=0) + offsets).flatten())
        taken = taken.unflatten(0, index.shape)
        return taken.masked_fill_((index < 0)[(...,) + (None,) * (rows.dim() - 2)], 0)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        index, inverse = ctx.saved_tensors
        return _Gather.apply(gradient, inverse, index), None, None


def gather(rows: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
    """Rows of `[batch, rows, …]` at `index` `[batch, places]`, zero at −1; `inverse` `[batch, rows]` is the way back."""
    return _Gather.apply(rows, index, inverse)


def pad(tensor: Tensor, widths: Sequence[int]) -> Tensor:
    """`torch.nn.functional.pad` with zeros. Booleans are padded as numbers: for booleans that are compared and padded,
    torch.compile generates invalid C++ on AVX2."""
    return F.pad(tensor.to(torch.uint8), widths).to(torch.bool) if tensor.dtype == torch.bool else F.pad(tensor, widths)


def pad_to(grid: Tensor, rows: int) -> Tensor:
    """`[batch, rows given, …]` with zeros appended, to that many rows."""
    missing = rows - grid.shape[1]
    if isinstance(missing, int) and missing == 0:  # where torch.export leaves the length open, it has to be padded anyhow
        return grid
    return pad(grid, (0, 0) * (grid.dim() - 2) + (0, missing))


def in_blocks(part: Tensor, block: int) -> Tensor:
    """`[B, s, …]` as `[B, N, T, …]`, T = block, with empty segments at the end where s is no multiple of it."""
    blocks = -(-part.shape[1] // block)
    return pad_to(part, blocks * block).unflatten(1, (blocks, block))
