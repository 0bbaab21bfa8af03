"""The gated delta rule over blocks of tokens (Yang, Kautz and Hatamizadeh, "Gated Delta Networks", arXiv 2412.06464).

    M_t = α_t (M_{t−1} − β_t k_t k_tᵀ M_{t−1}) + β_t k_t v_tᵀ           |k_t| ≤ 1, 0 ≤ β_t ≤ 1, 0 ≤ α_t ≤ 1

Only the states between blocks are needed, so the tokens of a chunk are taken all at once (the WY form, section 3.3). With
g_t = α_1 ⋯ α_t, counted from the chunk's first token, the state after t is g_t M_0 + Σ_{i≤t} (g_t / g_i) k_i u_iᵀ, where

    (I + T) U = β V − β g K M_0,  T_ti = β_t (g_t / g_i) k_t·k_i for i < t, else 0.

The state after a chunk is affine in M_0: the loop over chunks touches states and, in short chunks, two thin factors.

Shapes as in memory.py: `B` batch, `N` blocks, `K` key/value heads, `P` tokens in a block, `D` head dimension, `E` value
dimension.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from ..memory import States, Written, unit_features
from ..tensors import pad
from .base import MemoryRule, mapped
from .scan import DeltaScan

SMALL = 32  # tokens of a triangular system that is solved as it is

# Logits of β and α before training: β = 1/2; α = 0.999994, of which 16,384 tokens leave 90 %, and which still has a gradient
RATES = (0.0, 12.0)


class Rule(MemoryRule):
    """Token by token, a share β of what the memory returns for the token's key, of length one, is replaced by its value, and
    a share α of everything is kept; both are learned from the layer's input."""

    update_rule = "gated_delta"
    normalised = False
    rates = 2  # log β and log α, neither positive
    not_with = {
        "denominator": ("shared", "its memory has no denominator that the window could share"),
        "memory_init": ("noise", "the noise is a first normaliser, and its memory has none"),
        "memory_write": ("learned", "its β already is a learned weight of each token"),
    }

    def features(self, x: Tensor) -> Tensor:
        """(σ(x) − σ(0)) / |σ(x) − σ(0)|: positive features would nearly be parallel."""
        return unit_features(super().features(x), self.eps)

    def written(self, key: Tensor, value: Tensor, log_weight: Tensor | None, mask: Tensor | None = None) -> Written:
        """σ(k W) beside log β and log α, all of them zero for tokens that are not written."""
        features = self.features(mapped(key, self.key_map))
        log_weight = features.new_zeros(*key.shape[:-1], 2) if log_weight is None else log_weight.to(features.dtype)
        return Written(features, value, log_weight) if mask is None else Written(features * mask, value, log_weight * mask)

    def states(self, written, memory, normaliser, start=None, borders=None) -> States:
        key, value, log_weight = written
        continues = first_memory = None
        if start is not None:
            first_memory = start[0]
        if borders is not None:
            key, log_weight, continues = key * borders.wrote, log_weight * borders.wrote, borders.continues
        memories, last_memory = gated_delta_scan(key, value, log_weight, memory, continues, first_memory)
        return States(memories, normaliser.unsqueeze(1).expand(-1, key.shape[1], -1, -1), last_memory, normaliser)

    def read(self, features, memory, normaliser, within=None) -> tuple[Tensor, Tensor]:
        """q M, whose mass σ(q) z counts as 0."""
        return features @ memory, features.new_zeros(*features.shape[:-1], 1)

    @classmethod
    def parameters(cls, heads: int, width: int) -> dict[str, Tensor]:
        """What the layer's input is multiplied by, and what is added, for the logits of β and α."""
        bias = torch.tensor(RATES).expand(heads, -1)
        return {"memory_rates": torch.zeros(heads, 2, width), "memory_rates_bias": bias}

    @staticmethod
    def log_rates(inputs: Tensor, memory_rates: Tensor, memory_rates_bias: Tensor) -> Tensor:
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
        for key, value, weight in zip(features.unbind(1), values.unbind(1), log_weight.exp().unbind(1), strict=True):
            beta, alpha = weight[:, :1], weight[:, 1:, None]
            retrieved = (key.unsqueeze(1) @ memory).squeeze(1)
            memory = alpha * (memory - torch.einsum("hd,he->hde", beta * key, retrieved))
            memory = memory + torch.einsum("hd,he->hde", beta * key, value)
        return memory, normaliser


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
    log_beta, log_alpha = log_weight.unbind(-1)
    k, v, *logarithms = (part.flatten(0, 2) for part in (key, value, log_beta, log_alpha.cumsum(-1)))
    plain = torch.compiler.is_compiling()  # a compiler makes the gradient of plain operations
    if key.shape[-2] < width:  # M ← g_P M + Zᵀ (V − g K M): two thin products cost less than one D × D matrix
        weighted = _weights(k, *logarithms)[0] if plain else ChunkWeights.apply(k, *logarithms)
        log_kept = logarithms[1]
        factors = v, weighted.mT, k * log_kept.exp().unsqueeze(-1), log_kept[:, -1].expm1()
    else:  # M ← M + A − E M
        added, erased = _maps(k, v, *logarithms)[:2] if plain else ChunkMaps.apply(k, v, *logarithms)
        factors = added, None, erased, None
    factors = (None if part is None else part.unflatten(0, key.shape[:3]) for part in factors)
    memories, last = DeltaScan.apply(*factors, memory, continues, start)
    return memories[:, ::chunks], last


class ChunkWeights(Function):
    """Z of each chunk ([`_weights`]), with a gradient of few passes over the tokens:

    with Y = (I + T)⁻¹ β g_Z and H = −tril(Z Yᵀ) g_t / g_i without its diagonal, g_K = (H + Hᵀ) K + (g_P / g) Y. The
    exponents' gradients are sums of what they multiply.

    Args:
        key: `[chunks, P, D]`; log_beta, log_kept: log β and log g, `[chunks, P]`.

    Returns Z, `[chunks, P, D]`.
    """

    @staticmethod
    def forward(ctx, *tensors):
        weighted, *others = _weights(*tensors)
        ctx.save_for_backward(*tensors, weighted, *others)
        return weighted

    @staticmethod
    def backward(ctx, *gradients):
        return _backward(_weights, _gradients_of_weights, ctx.saved_tensors, 3, gradients)


class ChunkMaps(Function):
    """The map of each chunk, M ← M + A − E M ([`_maps`]), with a gradient of few passes over the tokens:

    with g_Z = V g_Aᵀ + g K g_Eᵀ, g_V = Z g_A and g_K = g Z g_E + what [`ChunkWeights`] makes of g_Z.

    Args:
        key: `[chunks, P, D]`; value: `[chunks, P, E]`; log_beta, log_kept: log β and log g, `[chunks, P]`.

    Returns A `[chunks, D, E]` and E `[chunks, D, D]`.
    """

    @staticmethod
    def forward(ctx, *tensors):
        added, erased, *others = _maps(*tensors)
        ctx.save_for_backward(*tensors, *others)
        return added, erased

    @staticmethod
    def backward(ctx, *gradients):
        return _backward(_maps, _gradients_of_maps, ctx.saved_tensors, 4, gradients)


def _weights(key: Tensor, log_beta: Tensor, log_kept: Tensor) -> tuple[Tensor, ...]:
    """Z = β (I + T)⁻ᵀ (g_P / g) K, with P the chunk's last token; and what the gradient needs: g_t / g_i, T / β and
    (I + T)⁻¹ β. Above their diagonals, the first two mean nothing."""
    beta = log_beta.exp()
    decay = (log_kept.unsqueeze(-1) - log_kept.unsqueeze(-2)).tril_(-1).exp_()  # no exponent is positive
    products = _times(key @ key.mT, decay)
    weighted_inverse = _times(_inverse(products * beta.unsqueeze(-1)), beta.unsqueeze(-2))
    weighted = weighted_inverse.mT @ (key * (log_kept[:, -1:] - log_kept).exp().unsqueeze(-1))
    return weighted, decay, products, weighted_inverse


def _maps(key: Tensor, value: Tensor, log_beta: Tensor, log_kept: Tensor) -> tuple[Tensor, ...]:
    """A = Zᵀ V and E = Zᵀ g K + (1 − g_P) I, and all of [`_weights`]."""
    weighted, *others = _weights(key, log_beta, log_kept)
    erased = (weighted * log_kept.exp().unsqueeze(-1)).mT @ key
    erased.diagonal(dim1=1, dim2=2).sub_(torch.expm1(log_kept[:, -1:]))
    return weighted.mT @ value, erased, weighted, *others


def _backward(plain: Callable, by_hand: Callable, saved: tuple[Tensor, ...], count: int, gradients: tuple[Tensor, ...]):
    """Gradients of the first `count` of `saved`, by hand or, where a second derivative is wanted, through `plain`."""
    with torch.autocast(gradients[0].device.type, enabled=False):  # where products in place are not of one dtype
        if not torch.is_grad_enabled():
            return by_hand(saved, *gradients)
        inputs = [part if part.requires_grad else part.detach().requires_grad_() for part in saved[:count]]
        return torch.autograd.grad(plain(*inputs)[: len(gradients)], inputs, gradients, create_graph=True)


def _gradients_of_weights(
    saved: tuple[Tensor, ...], to_weighted: Tensor, to_key: Tensor | None = None, to_log_kept: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Of the tensors of [`_weights`]; `saved`: these and what it returns; `to_key`, `to_log_kept`: what they have so far."""
    key, log_beta, log_kept, weighted, decay, products, weighted_inverse = saved
    fading = (log_kept[:, -1:] - log_kept).exp().unsqueeze(-1)
    spare = torch.mul(weighted, to_weighted)  # a new tensor costs more than a product
    to_log_beta = spare.sum(-1)
    to_remaining = weighted_inverse @ to_weighted
    to_products = (weighted @ to_remaining.mT).tril_(-1).neg_()
    of_exponents = products.mul(to_products)
    sums = of_exponents.sum(-1)
    to_log_beta += sums
    owed = sums - of_exponents.sum(-2)
    to_log_kept = owed if to_log_kept is None else to_log_kept.add_(owed)
    to_products *= decay
    of_exponents = torch.add(to_products, to_products.mT, out=of_exponents)
    to_key = of_exponents @ key if to_key is None else to_key.baddbmm_(of_exponents, key)
    to_key += to_remaining.mul_(fading)
    of_fading = torch.mul(to_remaining, key, out=spare).sum(-1)
    to_log_kept -= of_fading
    to_log_kept[:, -1] += of_fading.sum(-1)
    return to_key, to_log_beta, to_log_kept


def _gradients_of_maps(saved: tuple[Tensor, ...], to_added: Tensor, to_erased: Tensor) -> tuple[Tensor, ...]:
    """Of the tensors of [`_maps`]; `saved`: these and what [`_weights`] returns."""
    key, value, log_beta, log_kept, weighted, *others = saved
    kept = log_kept.exp().unsqueeze(-1)
    to_weighted = (key @ to_erased.mT).mul_(kept)
    to_log_kept = torch.mul(weighted, to_weighted).sum(-1)
    to_log_kept[:, -1] -= kept[:, -1, 0] * to_erased.diagonal(dim1=1, dim2=2).sum(-1)
    to_weighted.baddbmm_(value, to_added.mT)
    owed = (weighted @ to_erased).mul_(kept), to_log_kept
    to_key, *to_logarithms = _gradients_of_weights((key, log_beta, log_kept, weighted, *others), to_weighted, *owed)
    return to_key, weighted @ to_added, *to_logarithms


def _times(new: Tensor, factor: Tensor) -> Tensor:
    """Their product, in the place of the first where no gradient needs it."""
    return new * factor if torch.is_grad_enabled() else new.mul_(factor)


def _inverse(lower: Tensor) -> Tensor:
    """(I + T)⁻¹ `[chunks, P, P]`, T being what `lower` has below its diagonal.

    By halves, in products, which a CPU computes several times faster than it solves. None of the entries of the inverse, or
    of a part's, is larger than 1: those below the diagonal are β_t k_t·(what the tokens between leave of k_i).
    """
    tokens = lower.shape[-1]
    if tokens <= SMALL:
        eye = torch.eye(tokens, dtype=lower.dtype, device=lower.device)
        return torch.linalg.solve_triangular(lower, eye, upper=False, unitriangular=True)
    half = tokens // 2
    first, last = _inverse(lower[:, :half, :half]), _inverse(lower[:, half:, half:])
    corner = last @ lower[:, half:, :half] @ first
    return torch.cat([pad(first, (0, tokens - half)), torch.cat([-corner, last], -1)], 1)


def _in_chunks(part: Tensor, chunks: int) -> Tensor:
    """`[B, N, K, P, X]` as `[B, N · chunks, K, tokens of a chunk, X]`, with zeros at the end of a block's last chunk."""
    size = -(-part.shape[3] // chunks)
    part = pad(part, (0, 0, 0, chunks * size - part.shape[3]))
    return part.unflatten(3, (chunks, size)).transpose(2, 3).flatten(1, 2)
