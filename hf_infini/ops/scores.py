"""Scores: how well a query and a key go together, before the softmax. Each is a pure function with
the same shapes.

| function | equation | source |
| --- | --- | --- |
| `dot_scores` | qᵀk | Luong et al. 2015 |
| `scaled_dot_scores` | qᵀk / √d | Vaswani et al. 2017, equation 1 |
| `general_scores` | qᵀWk | Luong et al. 2015 |
| `additive_scores` | vᵀ tanh(W[q; k]) | Bahdanau et al. 2015; Luong et al. 2015, "concat" |

Shapes: `B` batch, `H` heads, `Q` queries, `K` keys, `D` head dimension, `A` width inside the
additive score. `query` is `[B, H, Q, D]`, `key` `[B, H, K, D]`, every result `[B, H, Q, K]`.
"""

import torch
from torch import Tensor


def dot_scores(query: Tensor, key: Tensor) -> Tensor:
    """qᵀk of each `query` and `key`."""
    return query @ key.mT


def scaled_dot_scores(query: Tensor, key: Tensor) -> Tensor:
    """qᵀk / √d of each `query` and `key`: keeps the variance of the scores at 1, whatever the
    width, for entries of variance 1."""
    # in this order less can leave the range of float16
    return query * query.shape[-1] ** -0.5 @ key.mT


def general_scores(query: Tensor, key: Tensor, weight: Tensor) -> Tensor:
    """qᵀWk of each `query` and `key`, with a matrix for each head: weight `[H, D, D]`."""
    return query @ weight @ key.mT


def additive_scores(
    query: Tensor, key: Tensor, weight: Tensor, vector: Tensor, added_key: Tensor | None = None
) -> Tensor:
    """vᵀ tanh(W[q; k]) with a matrix and a vector for each head: weight `[H, A, 2D]`, its first
    half for the query, vector `[H, A]`. Needs memory for `B · H · Q · K · A` numbers. `added_key`:
    `[Q, K, D]`, added to the key of each pair."""
    for_query, for_key = weight.mT.chunk(2, 1)  # [H, D, A] each
    hidden = (query @ for_query).unsqueeze(3) + (key @ for_key).unsqueeze(2)  # [B, H, Q, K, A]
    if added_key is not None:
        hidden = hidden + torch.einsum("qkd,hda->hqka", added_key.to(for_key.dtype), for_key)
    return (torch.tanh(hidden) @ vector[:, None, :, None].to(hidden.dtype)).squeeze(-1)


def visible_softmax(scores: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    """The scores with −inf where `visible` (bool, broadcast) is False, and their softmax: 0 in rows
    that see nothing."""
    scores = scores.masked_fill(~visible, float("-inf"))
    # Without a lowest number, a row that sees nothing would be NaN, and its gradient too
    return scores, scores.clamp(min=torch.finfo(scores.dtype).min).softmax(-1).masked_fill(
        ~visible, 0.0
    )


def as_dot_product(score: str, query: Tensor, weight: Tensor | None) -> tuple[Tensor, float]:
    """The query and the factor with which a score, `"scaled_dot"`, `"dot"` or `"general"` (with its
    weight `[H, D, D]`), is `factor · queryᵀ key`: what fused kernels take."""
    if score == "general":
        if weight is None:
            raise ValueError("score='general' needs its weight, [heads, head_dim, head_dim].")
        return query @ weight.to(query.dtype), 1.0
    return query, query.shape[-1] ** -0.5 if score == "scaled_dot" else 1.0
