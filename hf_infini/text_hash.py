"""What a bounded cache knows of the text it has read, whose ids are gone: a hash that grows with the text, 8 bytes a row."""

import torch
from torch import Tensor

FACTOR = 6364136223846793005  # odd, so that nothing is lost; the multiplier of Knuth's MMIX generator


def extend_hash(before: Tensor, input_ids: Tensor) -> Tensor:
    """The hash of a longer text: h ← (h + id + 1) · FACTOR for each further id, in 64 bits.

    In which pieces a text is read does not matter.

    Args:
        before: `[batch]` int64, of the text so far; zeros for an empty one.
        input_ids: `[batch, tokens]`, what comes behind it, padding included.
    """
    powers = torch.full((input_ids.shape[1],), FACTOR, dtype=torch.long, device=input_ids.device).cumprod(0)
    return before.to(powers.device) * powers[-1] + ((input_ids + 1) * powers.flip(0)).sum(1)
