"""Softmax inside the window: every query sees its own segment up to itself, the whole of the `w`
segments before it, and the first `S` tokens of its document (attention sinks).

    A_dot = softmax(scaling · Q Kᵀ) V                                  equation 2

Shapes: `B` batch, `N` segments, `C` slots in one, `W = S + (w + 1) · C` slots in its window, `H`
query heads, `K` key/value heads, `D` head dimension. The segment of a query is the last of its
window.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from .positions import rotate

# Of a segment. By torch's kernel and by plain operations, forward and backward in bfloat16 on one
# thread of a Xeon with AMX, torch 2.13, windows of two segments: 20 and 3 ms for 64 segments of 16,
# 13 and 5 for 16 of 64, 84 and 104 for 8 of 256
FEW_QUERIES = 128
# Of a product in a graph of torch.compile. More would read the other factor as often, where a
# matrix product reads it once
FEW_ROWS = 8


@dataclass(frozen=True)
class ScoreOptions:
    """How the softmax of a window is computed."""

    scaling: float | None = None  # factor of the dot products; `None`: `head_dim ** -0.5`
    dropout: float = 0.0  # probability with which a weight is dropped
    written_out: bool = False  # by plain operations instead of a fused kernel
    # scores s become `softcap · tanh(s / softcap)` (Gemma 2), and are then written out
    softcap: float | None = None
    # Tables `[places, …]`, such as the [`rotation`] of the places' numbers: the token in place p of
    # the window is turned as one in position p of a text, for only distances count
    rotary: tuple[Tensor, ...] | None = None
    # of states `[…, tokens, head_dim]` and their rows of the tables, which broadcast
    turn: Callable[..., Tensor] = rotate
    # Of positions that are scaled by a text's length: the tables of segments whose first token has
    # at least this number in its document, and the number
    far_rotary: tuple[tuple[Tensor, ...], int] | None = None

    def compared(
        self,
        states: Tensor,
        places: slice | Tensor,
        first: Callable[[], Tensor] | None = None,
    ) -> Tensor:
        """Queries or keys as they are compared.

        Args:
            states: `[…, tokens, head_dim]`; or `[batch, heads, tokens, head_dim]` with places
                `[batch, tokens]`.
            places: theirs in the window.
            first: gives the number of the first token of the query's segment in its document,
                `[…, 1, 1]`; `None`: below that of the far tables.
        """
        if self.rotary is None:
            return states
        near = self._turned(states, places, self.rotary)
        if self.far_rotary is None or first is None:
            return near
        tables, limit = self.far_rotary
        return torch.where(first() >= limit, self._turned(states, places, tables), near)

    def _turned(self, states: Tensor, places: slice | Tensor, tables: tuple[Tensor, ...]) -> Tensor:
        rows = (table[places] for table in tables)
        if isinstance(places, Tensor) and places.dim() == 2:
            rows = (row.unsqueeze(1) for row in rows)
        return self.turn(states, *rows)

    def scaling_of(self, query: Tensor) -> float:
        return query.shape[-1] ** -0.5 if self.scaling is None else self.scaling


def window_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, softmax: ScoreOptions
) -> tuple[Tensor, Tensor | None]:
    """Softmax attention inside the window, for many segments in one call: the output `[B, N, H, C,
    D]`, which means nothing where a slot is empty, and, where `softmax.written_out`, the weights
    `[B, N, H, C, W]`. query: `[B, N, H, C, D]`; key and value: `[B, N, K, W, D]`; mask: bool, True
    = visible, `[B or 1, N, 1, C, W]`; `None`: all slots up to the query's own."""
    slots, width, heads_per_key = query.shape[-2], key.shape[-2], query.shape[2] // key.shape[2]
    written_out = (
        softmax.written_out or softmax.softcap or _fused_gradient_is_slow(query, key, value)
    )
    # Torch's kernel for CPUs reads keys and values where they are, for all heads that share them;
    # others would not be fused
    if heads_per_key > 1 and (written_out or softmax.dropout or query.device.type != "cpu"):
        key, value = (tensor.repeat_interleave(heads_per_key, 2) for tensor in (key, value))
    if mask is None and (written_out or width != slots):
        mask = torch.ones(slots, width, dtype=torch.bool, device=key.device).tril(width - slots)
    if written_out:
        weights = softmax_weights(query, key, mask, softmax, value.dtype)
        return weights @ value, weights if softmax.written_out else None
    if mask is not None and mask.dim() > 2:
        mask = mask.expand(query.shape[0], -1, -1, -1, -1).flatten(0, 1)
    flat = (tensor.flatten(0, 1) for tensor in (query, key, value))
    options = {"dropout_p": softmax.dropout, "is_causal": mask is None, "scale": softmax.scaling}
    options["enable_gqa"] = key.shape[2] < query.shape[2]
    output = F.scaled_dot_product_attention(*flat, attn_mask=mask, **options)
    return output.view(*query.shape[:-1], value.shape[-1]), None


def _fused_gradient_is_slow(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether torch's kernel with its gradient is slower than plain operations: on a CPU, in
    bfloat16, for few queries."""
    if query.device.type != "cpu" or query.dtype != torch.bfloat16 or torch.compiler.is_compiling():
        return False
    wanted = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
    return wanted and query.shape[-2] <= FEW_QUERIES


def softmax_weights(
    query: Tensor, key: Tensor, mask: Tensor | None, softmax: ScoreOptions, dtype: torch.dtype
) -> Tensor:
    """softmax(scaling · Q Kᵀ) written out, `[…, tokens, keys]` in `dtype`, of `[…, tokens, D]`;
    mask: bool, True = visible. Scores that would be float16 are float32, as in torch's own kernel,
    for they can leave its range."""
    scores = masked_scores(query, key, mask, softmax)
    return F.dropout(scores.softmax(-1).to(dtype), softmax.dropout)


def masked_scores(query: Tensor, key: Tensor, mask: Tensor | None, softmax: ScoreOptions) -> Tensor:
    """What [`softmax_weights`] is the softmax of: scaling · Q Kᵀ, and the lowest number where
    `mask` is False."""
    kind, scaling = query.device.type, softmax.scaling_of(query)
    autocast = kind != "meta" and torch.is_autocast_enabled(kind)  # meta: while a model is made
    given = torch.get_autocast_dtype(kind) if autocast else query.dtype
    if given == torch.float16:
        with torch.autocast(kind, enabled=False):
            scores = product(query.float(), key.float().mT) * scaling
    else:
        scores = product(query, key.mT) * scaling
    if softmax.softcap:
        scores = (scores / softmax.softcap).tanh() * softmax.softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    return scores


def are_few(rows: Tensor) -> bool:
    """Whether `[…, rows, D]` are so few that a graph of torch.compile had better not make a matrix
    product of them."""
    return torch.compiler.is_compiling() and rows.shape[-2] <= FEW_ROWS


def product(left: Tensor, right: Tensor) -> Tensor:
    """`left @ right`, for `[…, rows, D]` and `[…, D, columns]`. Of few rows in a graph of
    torch.compile: a sum in float32 or wider, which is fused with what comes before and after it:
    one kernel less to start."""
    if not are_few(left):
        return left @ right
    wide = torch.promote_types(left.dtype, torch.float32)
    return (left.to(wide).unsqueeze(-1) * right.to(wide).unsqueeze(-3)).sum(-2)
