"""Moving rows of a tensor to other places, with a gradient that is such a move as well, and zeros beside them."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F


class _Gather(torch.autograd.Function):
    """Rows of `[batch, rows, …]` at an index `[batch, places]`, zero at −1; no row is taken twice.

    The inverse index makes the gradient a gather as well: no scatter with its atomic additions.
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
    """`torch.nn.functional.pad` with zeros. Booleans are padded as numbers: of booleans that are compared and padded,
    torch.compile writes C++ that is none where it has AVX2 to write for."""
    return F.pad(tensor.to(torch.uint8), widths).to(torch.bool) if tensor.dtype == torch.bool else F.pad(tensor, widths)
