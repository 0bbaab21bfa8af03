"""Local attention: every query sees its own segment up to itself, and the whole of the `w` segments before it (equation 2).

Shapes: `B` batch, `S` segments, `C` slots in a segment, `H` query heads, `K` key/value heads, `D` head dimension.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .segments import SegmentLayout


class LocalAttention(NamedTuple):
    """What [`local_attention`] and [`eager_attention`] return; their docstrings give the shapes."""

    output: Tensor
    weights: Tensor | None
    log_sum: Tensor | None


def local_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: SegmentLayout,
    *,
    scaling: float,
    dropout: float = 0.0,
    return_weights: bool = False,
    return_log_sum: bool = False,
    upcast: bool = False,
) -> LocalAttention:
    """Softmax attention inside the local window, for all segments in one call.

    Args:
        query: `[B, S, C, H, D]`; key and value: `[B, S, C, K, D]`; where a slot is empty the result means nothing.
        scaling: factor of the dot products.
        dropout: probability with which a weight is dropped.
        return_weights: go through the written-out softmax instead of the fused kernel, and return its weights.
        return_log_sum: likewise, and return the logarithm of the softmax's denominator.
        upcast: softmax in float32 (GPT-2's `reorder_and_upcast_attn`), where it is written out only.

    Returns:
        The output `[B, S, C, H, D]`; the weights `[B, S, H, C, (w + 1) * C]` or `None`; log Σ e^s `[B, S, C, H]` or `None`.
    """
    batch, segments, slots = query.shape[:3]
    key, value = (_windows(tensor, layout.local_segments) for tensor in (key, value))
    mask = _window_mask(layout, slots, query.device)
    query, key, value = (tensor.flatten(0, 1).transpose(1, 2) for tensor in (query, key, value))
    if mask is not None:
        mask = mask.expand(batch, -1, -1, -1).flatten(0, 1).unsqueeze(1)
    grouped = query.shape[1] != key.shape[1]
    if not (return_weights or return_log_sum):
        output = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            dropout_p=dropout,
            is_causal=mask is None,
            scale=scaling,
            enable_gqa=grouped,
        )
        return LocalAttention(output.transpose(1, 2).unflatten(0, (batch, segments)), None, None)
    if grouped:
        key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], 1) for t in (key, value))
    if mask is None:
        mask = torch.ones(slots, slots, dtype=torch.bool, device=query.device).tril()
    options = {"scaling": scaling, "dropout": dropout, "return_log_sum": return_log_sum, "upcast": upcast}
    output, weights, log_sum = eager_attention(query, key, value, mask, **options)
    return LocalAttention(
        output.transpose(1, 2).unflatten(0, (batch, segments)),
        weights.unflatten(0, (batch, segments)) if return_weights else None,
        log_sum.transpose(1, 2).unflatten(0, (batch, segments)) if return_log_sum else None,
    )


def eager_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    scaling: float,
    dropout: float,
    return_log_sum: bool = False,
    upcast: bool = False,
) -> LocalAttention:
    """softmax(scaling · Q Kᵀ) V written out, `[…, tokens, D]`; mask: bool, True = visible.

    Returns output, weights `[…, tokens, keys]` and, if asked for, log Σ e^s `[…, tokens]`, in float32 or wider.
    """
    if upcast:
        with torch.autocast(query.device.type, enabled=False):
            scores = query.float() @ key.float().transpose(-1, -2) * scaling
    else:
        scores = query @ key.transpose(-1, -2) * scaling
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    log_sum = scores.to(torch.promote_types(scores.dtype, torch.float32)).logsumexp(-1) if return_log_sum else None
    weights = F.dropout(scores.softmax(-1).to(value.dtype), dropout)
    return LocalAttention(weights @ value, weights, log_sum)


def weights_per_token(weights: Tensor, layout: SegmentLayout) -> Tensor:
    """`[B, S, H, C, (w + 1) * C]` as `[B, H, tokens, (w + 1) * L]`: column `c` is slot `c` of the query's local window."""
    blocks = weights.unflatten(-1, (layout.local_segments + 1, layout.slots))
    blocks = F.pad(blocks, (0, layout.segment_length - layout.slots)).flatten(-2)
    return layout.from_grid(blocks.transpose(2, 3))


def _windows(grid: Tensor, local_segments: int) -> Tensor:
    """`[B, S, C, …]` to `[B, S, (w + 1) * C, …]`: each segment behind the `w` before it (zeros before the first)."""
    if not local_segments:
        return grid
    segments = grid.shape[1]
    padded = F.pad(grid, (0, 0) * (grid.dim() - 2) + (local_segments, 0))
    return torch.cat([padded[:, shift : shift + segments] for shift in range(local_segments + 1)], 2)


def _window_mask(layout: SegmentLayout, slots: int, device: torch.device) -> Tensor | None:
    """`[batch or 1, S, C, (w + 1) * C]` bool, True = visible; `None` stands for the causal mask alone."""
    if not layout.local_segments:
        return None
    ages = torch.arange(layout.local_segments, 0, -1, device=device)  # how many segments back, oldest first
    earlier = (layout.segment_numbers().unsqueeze(-1) >= ages).repeat_interleave(slots, -1)
    earlier = earlier.unsqueeze(2).expand(-1, -1, slots, -1)
    own = torch.ones(slots, slots, dtype=torch.bool, device=device).tril()
    return torch.cat([earlier, own.expand(*earlier.shape[:2], -1, -1)], -1)
