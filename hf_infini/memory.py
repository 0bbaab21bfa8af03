"""The compressive memory: what is written at the end of a segment, and what a query reads (equations 3 and 4).

Pure functions on tensors, with nothing of segments' borders, padding or documents beyond the 0/1 masks that they are
given. "The paper" is Munkhdalai, Faruqui and Gopal, "Leave No Context Behind" (arXiv 2404.07143).

Shapes: `B` batch, `N` steps (segments, or blocks of short segments), `C` tokens in a step, `H` key/value heads,
`G` query heads for each of them, `D` head dimension, `E` value dimension.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class Borders(NamedTuple):
    """Where documents begin among the `N` steps of a packed row (`None` in its place: all steps are one document's).

    Attributes:
        reach: `[B, N + 1, N + 2]` bool: the state before a step (row; the last is the state after all) holds the incoming
            memory (column 0), the start (column 1), what step j wrote (column 2 + j).
        continues: `[B, N]` bool: the state after the step still belongs to the document of the state before it.
    """

    reach: Tensor
    continues: Tensor


def elu_features(x: Tensor) -> Tensor:
    """σ(x) = ELU(x) + 1, positive (section 2.1.2 of the paper). Any shape."""
    return F.elu(x) + 1


def exp_features(x: Tensor) -> Tensor:
    """σ(x) = exp(x), positive, so that σ(q)·σ(k) = Σ_d exp(q_d + k_d). Any shape.

    What a query looks for can outweigh tens of thousands of other tokens by a few units of x, where ELU(x) + 1 grows
    linearly. x beyond 30 counts as 30: sums of a million products then still fit into float32.
    """
    return torch.exp(x.clamp(max=30.0))


FEATURE_MAPS = {"elu": elu_features, "exp": exp_features}


def read_memory(features: Tensor, memory: Tensor, normaliser: Tensor) -> tuple[Tensor, Tensor]:
    """Numerator σ(q) M and denominator σ(q) z of equation 3, for every step at once.

    Args:
        features: σ(q), `[B, N, C, H, G, D]`; memory: `[B, N, H, D, E]`; normaliser: `[B, N, H, D]`.

    Returns:
        `[B, N, C, H, G, E]` and `[B, N, C, H, G]`.
    """
    numerator = torch.einsum("bnchgd,bnhde->bnchge", features, memory)
    denominator = torch.einsum("bnchgd,bnhd->bnchg", features, normaliser)
    return numerator, denominator


def memory_weight(gate: Tensor, mass: Tensor | None, log_sum: Tensor | None, width: int, eps: float) -> Tensor:
    """The memory's share of the output, of any shape that broadcasts: sigmoid(β), equation 5, without a `log_sum`.

    With it, window and memory have one normaliser: the window's tokens weigh e^s each, as in its softmax, and the memory's
    e^β σ(q)·σ(k) / D, so that one like all others weighs e^β. A query that finds nothing in the memory then leaves it alone,
    which a constant share cannot (after LoLCATs, arXiv 2410.10254, section 3.2).

    Args:
        gate: β.
        mass: σ(q) z, the sum of σ(q)·σ(k) over the memory's tokens; `None` without a `log_sum`.
        log_sum: log Σ e^s over the window's tokens, or `None`.
        width: D.
        eps: of equation 3.
    """
    if log_sum is None:
        return torch.sigmoid(gate)
    return torch.sigmoid(gate + (mass + eps).log() - math.log(width) - log_sum)


def read_within_step(
    query_features: Tensor, key_features: Tensor, value: Tensor, visible: Tensor
) -> tuple[Tensor, Tensor]:
    """What the tokens of a step add to equation 3's two sums for the later tokens of the same step.

    σ(q) Σ σ(k)ᵀv = Σ (σ(q)·σ(k)) v: for segments shorter than a head is wide, products of tokens cost less than a
    state per segment.

    Args:
        query_features: `[B, N, C, H, G, D]`; key_features: `[B, N, C, H, D]`; value: `[B, N, C, H, E]`.
        visible: `[C, C]` bool, which token (column) each query (row) reads.

    Returns:
        `[B, N, C, H, G, E]` and `[B, N, C, H, G]`.
    """
    products = torch.einsum("bnchgd,bnkhd->bnhgck", query_features, key_features) * visible
    numerator = torch.einsum("bnhgck,bnkhe->bnchge", products, value)
    return numerator, products.sum(-1).permute(0, 1, 4, 2, 3)


def linear_states(
    key_features: Tensor,
    value: Tensor,
    memory: Tensor,
    normaliser: Tensor,
    start: tuple[Tensor, Tensor],
    borders: Borders | None,
) -> tuple[Tensor, Tensor]:
    """Memory and normaliser before each step, and after the last, by the linear rule M_s = M_{s-1} + σ(K)ᵀ V.

    Args:
        key_features: σ(k), zero for tokens that are not to be written, `[B, N, C, H, D]`; value: `[B, N, C, H, E]`.
        memory, normaliser: before the first step, `[B, H, D, E]` and `[B, H, D]`.
        start: M_0 `[H, D, E]` and z_0 `[H, D]` of a new document.
        borders: [`Borders`] of packed documents, or `None`.

    Returns:
        `[B, N + 1, H, D, E]` and `[B, N + 1, H, D]`.
    """
    written = torch.einsum("bnchd,bnche->bnhde", key_features, value)
    return _scan(written, memory, start[0], borders), _scan(key_features.sum(2), normaliser, start[1], borders)


def delta_states(
    key_features: Tensor,
    value: Tensor,
    memory: Tensor,
    normaliser: Tensor,
    start: tuple[Tensor, Tensor],
    borders: Borders | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """As [`linear_states`], by the delta rule M_s = M_{s-1} + σ(K)ᵀ (V − σ(K) M_{s-1} / (σ(K) z_{s-1} + ε)).

    The rule is affine in M: its matrix and its constant are made for all steps at once, so that the loop over steps
    touches the state alone.
    """
    normalisers = _scan(key_features.sum(2), normaliser, start[1], borders)
    written = torch.einsum("bnchd,bnche->bnhde", key_features, value)
    retrieved = torch.einsum("bnchd,bnhd->bnch", key_features, normalisers[:, :-1]) + eps
    scaled = key_features / retrieved.unsqueeze(-1)
    # Segments shorter than a head is wide: two thin products a step cost less than one D × D matrix a step.
    thin = key_features.shape[2] < key_features.shape[-1]
    if thin:
        factors = list(zip(key_features.unbind(1), scaled.unbind(1), strict=True))
    else:
        erased = torch.einsum("bnchd,bnchf->bnhdf", key_features, scaled).unbind(1)
    states = [memory]
    for step, addition in enumerate(written.unbind(1)):
        if thin:
            keys, scaled_keys = factors[step]
            removal = torch.einsum("bchd,bche->bhde", keys, torch.einsum("bchd,bhde->bche", scaled_keys, memory))
        else:
            removal = erased[step] @ memory
        change = addition - removal
        if borders is None:
            memory = memory + change
        else:
            wrote = borders.reach[:, step + 1, 2 + step, None, None, None]
            continues = borders.continues[:, step, None, None, None]
            memory = torch.where(continues, memory + change * wrote, start[0])
        states.append(memory)
    return torch.stack(states, 1), normalisers


def _scan(written: Tensor, incoming: Tensor, start: Tensor, borders: Borders | None) -> Tensor:
    """Running sums before each step and after the last, `[B, N + 1, …]`, of what the steps wrote, `[B, N, …]`."""
    if borders is None:
        return torch.cat([incoming.unsqueeze(1), written], 1).cumsum(1)
    sources = torch.cat([incoming.unsqueeze(1), start.expand_as(incoming).unsqueeze(1), written], 1)
    return (borders.reach.to(written.dtype) @ sources.flatten(2)).unflatten(2, written.shape[2:])
