"""Vectors in 8 bits: whole numbers from −127 to 127, and of each vector a float32 step, its largest
number / 127. So a number is off by half a step at most, and by the rounding of its dtype.

Each vector is rounded by itself: what is beside it changes nothing. One with a number that is
infinite or NaN comes back as NaN, so that such a model does not pass unnoticed.
"""

import torch
from torch import Tensor

LARGEST = 127
STEP_BYTES = torch.float32.itemsize  # behind the bytes of a vector
# Smaller ones would lose digits of their own, or be 0
SMALLEST_STEP = torch.finfo(torch.float32).tiny


def to_int8(vectors: Tensor) -> Tensor:
    """The bytes of vectors in 8 bits, `[…, width + STEP_BYTES]`, uint8; `vectors`: `[…, width]`, of
    floating point. What float32 does not have is infinite."""
    wide = vectors.to(torch.float32)
    largest = wide.abs().amax(-1, keepdim=True)  # NaN, where one of them is
    step = (largest / LARGEST).clamp(min=SMALLEST_STEP)
    # by 1 / step it would be rounded twice. What is left of an infinite or NaN step is 0 · step,
    # NaN again; as a whole number, NaN is another on every machine
    whole = (wide / step).nan_to_num_(0).round_().to(torch.int8)
    return torch.cat([whole.view(torch.uint8), step.contiguous().view(torch.uint8)], -1)


def from_int8(bytes_: Tensor, dtype: torch.dtype) -> Tensor:
    """The vectors, `[…, width]`, in a `dtype` of floating point, whose bytes [`to_int8`] gave,
    `bytes_` `[…, width + STEP_BYTES]`."""
    whole, step = bytes_.split([bytes_.shape[-1] - STEP_BYTES, STEP_BYTES], -1)
    found = whole.view(torch.int8) * step.contiguous().view(torch.float32)
    # the largest number stays one: a step that was rounded up takes 127 of it beyond
    most = min(torch.finfo(each).max for each in (dtype, torch.float32))
    return found.clamp(-most, most).to(dtype)
