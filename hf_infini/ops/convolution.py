"""A short causal convolution over a document's tokens: what lets a memory learn which token came
before which.

A linear memory stores a value under the key of the same token. To recall what *followed* a token,
the key must also depend on the token before: one layer learns this with two or three taps, and
otherwise it takes several layers (H3, arXiv 2212.14052, section 3; Based, arXiv 2402.18668).

Shapes: `B` batch, `T` new tokens, `C` channels, `K` taps.
"""

import torch
from torch import Tensor

from .state import Layout, gather


def short_convolution(
    inputs: Tensor, weight: Tensor, layout: Layout, before: Tensor
) -> tuple[Tensor, Tensor]:
    """`y_t = Σ_j w_j ⊙ x_{t−j}`, j = 0 … K − 1, over the real tokens of t's own document, `[B, T,
    C]` (padding means nothing); and `before` for the next call. `inputs`: x, `[B, T, C]`; `weight`:
    w, `[K, C]`; `layout`: of the call; `before`: the last inputs of each row's document before this
    call, `[B, K − 1, C]`, oldest first; or zeros."""
    taps = weight.shape[0]
    weight = weight.to(inputs.dtype)
    output = inputs * weight[0]
    everything = torch.cat([before.to(inputs.dtype), inputs], 1)
    real = layout.real
    if real is None:  # every row continues its document, without padding
        for tap in range(1, taps):
            output = (
                output + everything[:, taps - 1 - tap : everything.shape[1] - tap] * weight[tap]
            )
        return output, everything[:, everything.shape[1] - (taps - 1) :]
    carried, columns = (
        torch.arange(taps - 1, device=real.device),
        torch.arange(real.shape[1], device=real.device),
    )
    # which of its row's real tokens each is; that of padding is only in range
    rank = (real.cumsum(1) - 1).clamp(min=0)
    column = torch.zeros(real.shape[0], real.shape[1] + 1, dtype=torch.long, device=real.device)
    # In which column the r-th real token is; an extra place takes the padding
    column = column.scatter(1, torch.where(real, rank, real.shape[1]), columns.expand_as(real))[
        :, :-1
    ]
    # of the carried, then of the real inputs
    place = torch.cat([carried.expand(inputs.shape[0], -1), column + taps - 1], 1)
    for tap in range(1, taps):
        index = torch.where(layout.positions >= tap, place.gather(1, rank + taps - 1 - tap), -1)
        output = output + gather(everything, index) * weight[tap]
    inside = layout.tokens_seen.unsqueeze(1) >= taps - 1 - carried
    return output, gather(
        everything, torch.where(inside, place.gather(1, real.sum(1, keepdim=True) + carried), -1)
    )
