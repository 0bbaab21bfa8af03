"""The gated delta rule over segments (Yang, Kautz and Hatamizadeh, "Gated Delta Networks", arXiv
2412.06464).

    M_t = α_t (M_{t−1} − β_t k_t k_tᵀ M_{t−1}) + β_t k_t v_tᵀ   |k_t| ≤ 1, 0 ≤ β_t ≤ 1, 0 ≤ α_t ≤ 1

Only the states between segments are needed, so the tokens of a chunk are taken all at once (the WY
form, section 3.3). With g_t = α_1 ⋯ α_t, counted from the chunk's first token, the state after t is
g_t M_0 + Σ_{i≤t} (g_t / g_i) k_i u_iᵀ, where

    (I + T) U = β V − β g K M_0,  T_ti = β_t (g_t / g_i) k_t·k_i for i < t, else 0.

The state after a chunk is affine in M_0: the loop over chunks touches states only. `P`: tokens of a
segment or chunk.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from ..equations import MemoryRule, Written, product
from .scan import DeltaScan

# Logits of β and α before training: β = 1/2; α = 0.999994, of which 16,384 tokens leave 90 %, and
# which still has a gradient
RATES = (0.0, 12.0)


class Rule(MemoryRule):
    """The gated delta rule, whose β and α are learned from the layer's input."""

    update_rule = "gated_delta"
    normalised = False
    rates = 2  # log β and log α, neither positive

    def features(self, x: Tensor) -> Tensor:
        """(σ(x) − σ(0)) / |σ(x) − σ(0)|: positive features would nearly be parallel."""
        centred = super().features(x) - 1
        return centred * (centred.square().sum(-1, keepdim=True) + self.eps).rsqrt()

    def written(
        self, key: Tensor, value: Tensor, log_weight: Tensor | None, mask: Tensor | None = None
    ) -> Written:
        """σ(k) beside log β and log α, all of them zero for tokens that are not written. `key`,
        `value`, `mask`: as of [`MemoryRule.written`]; `log_weight`: log β and log α, `[B, N, K, C,
        2]`, or `None`, zeros."""
        features = self.features(key)
        log_weight = (
            features.new_zeros(*key.shape[:-1], 2)
            if log_weight is None
            else log_weight.to(features.dtype)
        )
        return (
            (features, value, log_weight)
            if mask is None
            else (features * mask, value, log_weight * mask)
        )

    def states(self, written, memory, normaliser, continues=None):
        key, value, log_weight = written
        memories, last_memory = gated_delta_scan(key, value, log_weight, memory, continues)
        return (memories, normaliser.unsqueeze(1).expand(-1, key.shape[1], -1, -1)), (
            last_memory,
            normaliser,
        )

    def read(self, features, memory, normaliser):
        return product(features, memory)

    @classmethod
    def parameters(cls, heads: int, width: int) -> dict[str, Tensor]:
        """What the layer's input is multiplied by, and what is added, for the logits of β and α;
        `heads`, `width`: as of [`MemoryRule.parameters`]."""
        bias = torch.tensor(RATES).expand(heads, -1)
        return {"memory_rates": torch.zeros(heads, 2, width), "memory_rates_bias": bias}

    @staticmethod
    def log_rates(inputs: Tensor, memory_rates: Tensor, memory_rates_bias: Tensor) -> Tensor:
        """log β and log α, `[B, K, tokens, 2]`. `inputs`: of the layer, `[B, tokens, width]`;
        `memory_rates`, `memory_rates_bias`: `[K, 2, width]` and `[K, 2]`."""
        logits = F.linear(inputs, memory_rates.flatten(0, 1), memory_rates_bias.flatten())
        return F.logsigmoid(logits).unflatten(-1, (-1, 2)).transpose(1, 2)

    @staticmethod
    def naive_features(x, log_weight, feature_map, eps):
        x = feature_map(x) - 1
        return x / (x.square().sum(-1, keepdim=True) + eps).sqrt()

    @staticmethod
    def naive_read(features, memory, normaliser, eps):
        return features @ memory, memory.new_ones(())

    @staticmethod
    def naive_write(memory, normaliser, features, values, log_weight, eps):
        for key, value, weight in zip(
            features.unbind(1), values.unbind(1), log_weight.exp().unbind(1), strict=True
        ):
            beta, alpha = weight[:, :1], weight[:, 1:, None]
            retrieved = (key.unsqueeze(1) @ memory).squeeze(1)
            memory = alpha * (memory - torch.einsum("hd,he->hde", beta * key, retrieved))
            memory = memory + torch.einsum("hd,he->hde", beta * key, value)
        return memory, normaliser


def gated_delta_scan(
    key: Tensor, value: Tensor, log_weight: Tensor, memory: Tensor, continues: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """M before each segment, `[B, N, K, D, E]`, and after the last, `[B, K, D, E]`. A chunk has at
    most as many tokens as a head is wide: then neither T nor the states between chunks hold more
    numbers than the tokens do. `key`, `value`: k and v, `[B, N, K, P, D]` and `[…, E]`;
    `log_weight`: log β and log α, `[…, 2]`; a token with k = 0 and log α = 0 changes nothing;
    `memory`, `continues`: as in [`MemoryRule.states`]."""
    width = key.shape[-1]
    chunks = -(-key.shape[-2] // width)
    if chunks > 1:
        key, value, log_weight = (_in_chunks(part, chunks) for part in (key, value, log_weight))
        if continues is not None:  # M begins again behind a segment's last chunk
            inside = continues.new_ones(*continues.shape, chunks - 1)
            continues = torch.cat([inside, continues.unsqueeze(-1)], -1).flatten(1)
    log_beta, log_alpha = log_weight.unbind(-1)
    k, v, log_beta, log_kept = (
        part.flatten(0, 2) for part in (key, value, log_beta, log_alpha.cumsum(-1))
    )
    weighted, kept, faded = (
        _chunk_weights(k, log_beta, log_kept),
        log_kept.exp().unsqueeze(-1),
        log_kept[:, -1].expm1(),
    )
    # M ← M + Zᵀ V − (Zᵀ g K + (1 − g_P) I) M
    erased = (weighted * kept).mT @ k - torch.diag_embed(faded.unsqueeze(-1).expand(-1, width))
    factors = (part.unflatten(0, key.shape[:3]) for part in (weighted.mT @ v, erased))
    memories, last = DeltaScan.apply(*factors, memory, continues)
    return memories[:, ::chunks], last


def _chunk_weights(key: Tensor, log_beta: Tensor, log_kept: Tensor) -> Tensor:
    """Z = β (I + T)⁻ᵀ (g_P / g) K, `[chunks, P, D]`, with P the chunk's last token; `log_kept`: log
    g, `[chunks, P]`."""
    beta = log_beta.exp()
    # no exponent is positive
    decay = (log_kept.unsqueeze(-1) - log_kept.unsqueeze(-2)).tril(-1).exp()
    # T below the diagonal; nothing else of it is read
    below = key @ key.mT * decay * beta.unsqueeze(-1)
    kept_of = key * (log_kept[:, -1:] - log_kept).exp().unsqueeze(-1)
    return torch.linalg.solve_triangular(
        below.mT, kept_of, upper=True, unitriangular=True
    ) * beta.unsqueeze(-1)


def _in_chunks(part: Tensor, chunks: int) -> Tensor:
    """`[B, N, K, P, X]` as `[B, N · chunks, K, tokens of a chunk, X]`, with zeros at the end of a
    segment's last chunk."""
    size = -(-part.shape[3] // chunks)
    part = F.pad(part, (0, 0, 0, chunks * size - part.shape[3]))
    return part.unflatten(3, (chunks, size)).transpose(2, 3).flatten(1, 2)
