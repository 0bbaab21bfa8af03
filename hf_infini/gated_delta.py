"""The gated delta rule over blocks of tokens (Yang, Kautz and Hatamizadeh, "Gated Delta Networks", arXiv 2412.06464).

    M_t = α_t (M_{t−1} − β_t k_t k_tᵀ M_{t−1}) + β_t k_t v_tᵀ           |k_t| ≤ 1, 0 ≤ β_t ≤ 1, 0 ≤ α_t ≤ 1

Only the states between blocks are needed, so the tokens of a chunk are taken all at once (the WY form, section 3.3). With
g_t = α_1 ⋯ α_t, counted from the chunk's first token, the state after t is g_t M_0 + Σ_{i≤t} (g_t / g_i) k_i u_iᵀ, where

    (I + T) U = β V − β g K M_0,  T_ti = β_t (g_t / g_i) k_t·k_i for i < t, else 0.

The state after a chunk is affine in M_0, and the loop over chunks touches the state only.

Shapes as in memory.py: `B` batch, `N` blocks, `K` key/value heads, `P` tokens in a block, `D` head dimension, `E` value
dimension.
"""

import torch
from torch import Tensor

from .memory_gradients import DeltaScan
from .tensors import pad


def gated_delta_scan(
    key: Tensor,
    value: Tensor,
    log_weight: Tensor,
    memory: Tensor,
    continues: Tensor | None = None,
    start: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """M before each block, `[B, N, K, D, E]`, and after the last, `[B, K, D, E]`.

    A chunk has at most as many tokens as a head is wide: then neither T nor the states between chunks hold more numbers than
    the tokens do.

    Args:
        key: k, `[B, N, K, P, D]`; value: v, `[B, N, K, P, E]`; log_weight: log β and log α, `[B, N, K, P, 2]`. A token with
            k = 0 and log α = 0 changes nothing.
        memory: before the first block, `[B, K, D, E]`.
        continues: `[B, N]` bool: where it is False, M begins again as `start` `[K, D, E]` behind the block; `None`: nowhere.
    """
    width = key.shape[-1]
    chunks = -(-key.shape[-2] // width)
    if chunks > 1:
        key, value, log_weight = (_in_chunks(part, chunks) for part in (key, value, log_weight))
        if continues is not None:  # M begins again behind a block's last chunk
            inside = continues.new_ones(*continues.shape, chunks - 1)
            continues = torch.cat([inside, continues.unsqueeze(-1)], -1).flatten(1)
    beta, log_kept = log_weight[..., :1].exp(), log_weight[..., 1].cumsum(-1)  # β and log g
    weighted = beta * key
    decay = (log_kept.unsqueeze(-1) - log_kept.unsqueeze(-2)).tril(-1).exp()  # the zeros above: no exponent is positive
    right = torch.cat([weighted * log_kept.exp().unsqueeze(-1), beta * value], -1)
    # Reads T below its diagonal only
    solved = torch.linalg.solve_triangular(weighted @ key.mT * decay, right, upper=False, unitriangular=True)
    remaining = key * (log_kept[..., -1:] - log_kept).exp().unsqueeze(-1)
    erased, added = (remaining.mT @ solved).split([width, value.shape[-1]], -1)
    lost = -torch.expm1(log_kept[..., -1])[..., None, None]  # 1 − g of the whole chunk
    erased = erased + lost * torch.eye(width, dtype=key.dtype, device=key.device)
    memories, last = DeltaScan.apply(added, None, erased, memory, continues, start)
    return memories[:, ::chunks], last


def _in_chunks(part: Tensor, chunks: int) -> Tensor:
    """`[B, N, K, P, X]` as `[B, N · chunks, K, tokens of a chunk, X]`, with zeros at the end of a block's last chunk."""
    size = -(-part.shape[3] // chunks)
    part = pad(part, (0, 0, 0, chunks * size - part.shape[3]))
    return part.unflatten(3, (chunks, size)).transpose(2, 3).flatten(1, 2)
