"""Softmax inside the window: every query sees its own segment up to itself, the whole of the `w` segments before it, and the
first `S` tokens of its document (attention sinks), wherever it is.

    A_dot = softmax(scaling · Q Kᵀ) V                                  equation 2

Shapes: `B` batch, `N` segments, `C` slots in one, `W = S + (w + 1) · C` slots in its window, `H` query heads, `K` key/value
heads, `D` head dimension. The segment of a query is the last of its window.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from .positions import rotate

TILE = 128  # queries of a segment at a time; skips half of the scores that causality masks


@dataclass(frozen=True)
class ScoreOptions:
    """How the softmax of a window is computed.

    Attributes:
        scaling: factor of the dot products; `None`: `head_dim ** -0.5`.
        dropout: probability with which a weight is dropped.
        written_out: by plain operations instead of a fused kernel.
        softcap: scores s become `softcap · tanh(s / softcap)` (Gemma 2), and are then written out; `None`: they stay.
        rotary: tables `[places, …]`, what is known of every place of the window, such as the [`rotation`] of their numbers:
            the token in place p is turned as one in position p of a text. Only distances count, so that neither the length
            of a text nor the precision of large numbers matters. `None`: nothing is turned.
        turn: function of states `[…, tokens, head_dim]` and the rows of the tables for these tokens, which broadcast to
            them; returns a tensor like the states.
        query_weight: `[heads, head_dim, head_dim]`, what turned queries are multiplied by; `None`: nothing.
    """

    scaling: float | None = None
    dropout: float = 0.0
    written_out: bool = False
    softcap: float | None = None
    rotary: tuple[Tensor, ...] | None = None
    turn: Callable[..., Tensor] = rotate
    query_weight: Tensor | None = None

    def compared_keys(self, key: Tensor, places: slice | Tensor) -> Tensor:
        """Keys `[…, tokens, head_dim]` of these places of the window, as they are compared with queries; or `[batch, heads,
        tokens, head_dim]` with places `[batch, tokens]`."""
        if self.rotary is None:
            return key
        rows = (table[places] for table in self.rotary)
        if isinstance(places, Tensor) and places.dim() == 2:
            rows = (row.unsqueeze(1) for row in rows)
        return self.turn(key, *rows)

    def compared_queries(self, query: Tensor, places: slice | Tensor) -> Tensor:
        """Queries `[…, heads, tokens, head_dim]` likewise."""
        query = self.compared_keys(query, places)
        return query if self.query_weight is None else query @ self.query_weight.to(query.dtype)

    def scaling_of(self, query: Tensor) -> float:
        return query.shape[-1] ** -0.5 if self.scaling is None else self.scaling


def window_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, softmax: ScoreOptions
) -> tuple[Tensor, Tensor | None]:
    """Softmax attention inside the window, for many segments in one call.

    Args:
        query: `[B, N, H, C, D]`; key and value: `[B, N, K, W, D]`; where a slot is empty the result means nothing.
        mask: bool, True = visible, `[B or 1, N, 1, C, W]`; `None`: every slot of a full window up to the query's own.

    Returns:
        The output `[B, N, H, C, D]`; where `softmax.written_out`, the weights `[B, N, H, C, W]`.
    """
    heads_per_key, plain = query.shape[2] // key.shape[2], not (softmax.written_out or softmax.dropout or softmax.softcap)
    in_tiles = plain and _tiles_are_faster(query, key, value)
    # Torch's kernel for CPUs reads keys and values where they are, for all heads that share them; others would not be fused
    if heads_per_key > 1 and (in_tiles or not plain or query.device.type != "cpu"):
        key, value = (tensor.repeat_interleave(heads_per_key, 2) for tensor in (key, value))
    if in_tiles:
        if torch.is_autocast_enabled(query.device.type):
            query, key, value = (t.to(torch.get_autocast_dtype(t.device.type)) for t in (query, key, value))
        return _Tiled.apply(query, key, value, mask, softmax), None
    return _all_queries(query, key, value, mask, softmax)


def softmax_weights(query: Tensor, key: Tensor, mask: Tensor | None, softmax: ScoreOptions, dtype: torch.dtype) -> Tensor:
    """softmax(scaling · Q Kᵀ) written out, `[…, tokens, keys]` in `dtype`.

    query and key: `[…, tokens, D]`; mask: bool, True = visible. Scores that would be float16 are float32, for they can leave
    its range; torch's own kernel has them in float32, too.
    """
    scores = masked_scores(query, key, mask, softmax)
    return F.dropout(scores.softmax(-1).to(dtype), softmax.dropout)


def masked_scores(query: Tensor, key: Tensor, mask: Tensor | None, softmax: ScoreOptions) -> Tensor:
    """What [`softmax_weights`] is the softmax of: scaling · Q Kᵀ, and the lowest number where `mask` is False."""
    kind, scaling = query.device.type, softmax.scaling_of(query)
    autocast = kind != "meta" and torch.is_autocast_enabled(kind)  # meta: while a model is made
    given = torch.get_autocast_dtype(kind) if autocast else query.dtype
    if given == torch.float16:
        with torch.autocast(kind, enabled=False):
            scores = query.float() @ key.float().transpose(-1, -2) * scaling
    else:
        scores = query @ key.transpose(-1, -2) * scaling
    if softmax.softcap:
        scores = (scores / softmax.softcap).tanh() * softmax.softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    return scores


def _all_queries(query, key, value, mask, softmax: ScoreOptions) -> tuple[Tensor, Tensor | None]:
    """[`window_attention`] without tiles: written out, with keys and values for all of the query's heads, or by torch's own
    kernel."""
    slots, width = query.shape[-2], key.shape[-2]
    written_out = softmax.written_out or softmax.softcap
    if mask is None and (written_out or width != slots):
        mask = causal(slots, key)
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


def causal(slots: int, key: Tensor) -> Tensor:
    """`[C, W]` bool: a full window up to each query's own slot."""
    width = key.shape[-2]
    return torch.ones(slots, width, dtype=torch.bool, device=key.device).tril(width - slots)


def _tiles_are_faster(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether tiles have a faster gradient than torch: on a CPU, in half precision, two to four times."""
    if query.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    wanted = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
    return wanted and query.dtype in (torch.bfloat16, torch.float16)


class _Tiled(Function):
    """A = P V with P = softmax(S), S = scaling · Q Kᵀ;

    g_V = Pᵀ g,  g_P = g Vᵀ,  g_S = P · (g_P − Σ P g_P),  g_Q = scaling · g_S K,  g_K = scaling · g_Sᵀ Q.

    Some queries of every segment at a time, with a gradient that computes P again: [`_tiles_are_faster`] says where.
    """

    @staticmethod
    def forward(ctx, query, key, value, mask, softmax):
        ctx.save_for_backward(query, key, value, mask)
        ctx.scaling = softmax.scaling_of(query)
        outputs = []
        for tile, seen in _tiles(query, key):
            queries, keys, values = query[..., tile, :], key[..., :seen, :], value[..., :seen, :]
            visible = None if mask is None else mask[..., tile, :seen]
            outputs.append(_all_queries(queries, keys, values, visible, softmax)[0])
        return torch.cat(outputs, -2)

    @staticmethod
    def backward(ctx, gradient):
        query, key, value, mask = ctx.saved_tensors
        shapes, dtype = [tensor.shape for tensor in (query, key, value)], query.dtype
        wide = torch.float32 if dtype == torch.float16 else dtype  # whose range scores can leave
        query, key, value, gradient = (tensor.flatten(0, -3).to(wide) for tensor in (query, key, value, gradient))
        to_query, whole = torch.empty_like(query), []
        # The last tile sees all of the window: what the others add goes into its products, not into zeros
        for tile, seen in reversed(_tiles(query, key)):
            queries, gradients, keys, values = query[:, tile], gradient[:, tile], key[:, :seen], value[:, :seen]
            scores = _scaled_product(queries, keys.mT, ctx.scaling)
            lowest = torch.finfo(scores.dtype).min
            if mask is None:  # all but the last of the slots that the tile sees lie before it
                diagonal = slice(seen - scores.shape[-2], None)
                scores[..., diagonal].masked_fill_(~causal(queries.shape[-2], queries), lowest)
            else:
                scores.view(*shapes[0][:-2], *scores.shape[1:]).masked_fill_(~mask[..., tile, :seen], lowest)
            weights = scores.softmax(-1)
            to_weights = gradients @ values.mT
            to_scores = torch._softmax_backward_data(to_weights, weights, -1, weights.dtype)
            to_query[:, tile] = _scaled_product(to_scores, keys, ctx.scaling)
            parts = [_scaled_product(to_scores.mT, queries, ctx.scaling), weights.mT @ gradients]  # to keys and values
            for to, part in zip(whole, parts, strict=False):  # at first there are none
                to[:, :seen] += part
            whole = whole or parts
        gradients = (to.view(shape).to(dtype) for to, shape in zip((to_query, *whole), shapes, strict=True))
        return *gradients, None, None


def _scaled_product(left: Tensor, right: Tensor, scaling: float) -> Tensor:
    """`scaling · left @ right` of batches of matrices, without a pass for the factor."""
    return torch.baddbmm(left.new_empty(1, 1, 1), left, right, beta=0, alpha=scaling)  # beta 0: the first is not read


def _tiles(query: Tensor, key: Tensor) -> list[tuple[slice, int]]:
    """The queries of a segment in tiles, and how many slots of the window the last of each sees."""
    slots, width = query.shape[-2], key.shape[-2]
    size = slots if slots < TILE else min(TILE, -(-slots // 2))
    ends = [min(begin + size, slots) for begin in range(0, slots, size)]
    return [(slice(begin, end), width - slots + end) for begin, end in zip(range(0, slots, size), ends, strict=True)]
