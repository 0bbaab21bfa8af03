"""The compressive memory: what is written at the end of a segment, and what a query reads (equations 3 and 4).

Pure functions on tensors, with nothing of segments' borders, padding or documents beyond the 0/1 masks that they are
given. "The paper" is Munkhdalai, Faruqui and Gopal, "Leave No Context Behind" (arXiv 2404.07143).

Shapes: `B` batch, `N` steps (segments, or blocks of short segments), `P` tokens in a step, `K` key/value heads, `R` queries
of a step that read a key/value head's memory, `D` head dimension, `E` value dimension. The heads come before the tokens, so
that every product is one of contiguous matrices.

Reading, mixing and the steps' states have gradients of their own: what autograd would keep or copy for them takes longer,
where memory is slower than arithmetic, than the products. Second derivatives go through these gradients: whatever depends
on the inputs is there an input or an output of the function, never a result on the way, which would count as constant.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function


class Borders(NamedTuple):
    """Where documents begin among the `N` steps of a packed row (`None` in its place: all steps are one document's).

    Attributes:
        reach: `[B, N + 1, N + 2]` bool: the state before a step (row; the last is the state after all) holds the incoming
            memory (column 0), the start (column 1), what step j wrote (column 2 + j).
        continues: `[B, N]` bool: the state after the step still belongs to the document of the state before it.
    """

    reach: Tensor
    continues: Tensor


class Within(NamedTuple):
    """Tokens that later tokens of the same step read: for segments shorter than a head is wide, joined to steps.

    σ(q) Σ σ(k)ᵀv = Σ (σ(q)·σ(k)) v: for these, products of tokens cost less than a state per segment.

    Attributes:
        key_features: σ(k), `[B, N, K, P, D]`; value: `[B, N, K, P, E]`.
        visible: `[R, P]`, 1 where the query (row) reads the token (column), else 0, in the features' dtype.
    """

    key_features: Tensor
    value: Tensor
    visible: Tensor


class States(NamedTuple):
    """Memory and normaliser over the steps of a call.

    Attributes:
        memory, normaliser: before each step, `[B, N, K, D, E]` and `[B, N, K, D]`.
        last_memory, last_normaliser: after the last step, `[B, K, D, E]` and `[B, K, D]`.
    """

    memory: Tensor
    normaliser: Tensor
    last_memory: Tensor
    last_normaliser: Tensor


class _Read(Function):
    """What was read, its mass and, for the gradient, the tokens' masked products (`None` without `visible`)."""

    @staticmethod
    def forward(ctx, features, memory, normaliser, eps, key_features, value, visible):
        read = features @ memory
        mass = features @ normaliser.unsqueeze(-1)
        products = None
        if visible is not None:
            products = (features @ key_features.transpose(-1, -2)).mul_(visible)
            read += products @ value
            mass += products.sum(-1, keepdim=True)
        inverse = (mass + eps).reciprocal_()
        read *= inverse
        ctx.save_for_backward(features, memory, normaliser, read, mass, key_features, value, visible, products)
        ctx.eps = eps
        ctx.set_materialize_grads(False)
        return read, mass, products

    @staticmethod
    def backward(ctx, read_gradient, mass_gradient, products_gradient):
        features, memory, normaliser, read, mass, key_features, value, visible, products = ctx.saved_tensors
        inverse = (mass + ctx.eps).reciprocal()
        # read = (σ(q) M) · inverse, and inverse = 1 / (mass + ε), so d inverse = −inverse² · d mass
        read_gradient = torch.zeros_like(read) if read_gradient is None else read_gradient
        numerator = read_gradient * inverse
        denominator = (numerator * read).sum(-1, keepdim=True).neg()
        if mass_gradient is not None:
            denominator = denominator + mass_gradient
        to_features = (numerator @ memory.transpose(-1, -2)).addcmul_(denominator, normaliser.unsqueeze(-2))
        to_memory = features.transpose(-1, -2) @ numerator
        to_normaliser = (denominator.transpose(-1, -2) @ features).squeeze(-2)
        to_keys = to_value = None
        if visible is not None:
            to_products = numerator @ value.transpose(-1, -2) + denominator
            if products_gradient is not None:  # of a second derivative
                to_products = to_products + products_gradient
            to_products = to_products * visible
            to_features = to_features + to_products @ key_features
            to_keys = to_products.transpose(-1, -2) @ features
            to_value = products.transpose(-1, -2) @ numerator
        return to_features, to_memory, to_normaliser, None, to_keys, to_value, None


def read_memory(
    features: Tensor, memory: Tensor, normaliser: Tensor, eps: float, within: Within | None = None
) -> tuple[Tensor, Tensor]:
    """σ(q) M / (σ(q) z + ε), equation 3, for every step at once.

    Args:
        features: σ(q), `[B, N, K, R, D]`; memory: `[B, N, K, D, E]`; normaliser: `[B, N, K, D]`.
        eps: ε.
        within: what is read beside the memory, or `None`.

    Returns:
        What was read, `[B, N, K, R, E]`, and σ(q) z, the sum of σ(q)·σ(k) over the memory's tokens, `[B, N, K, R, 1]`.
    """
    return _Read.apply(features, memory, normaliser, eps, *(within or (None, None, None)))[:2]


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


class _Mix(Function):
    @staticmethod
    def forward(ctx, local, read, weight):
        ctx.save_for_backward(local, read, weight)
        return torch.lerp(local.to(read.dtype), read, weight.expand_as(read)).to(local.dtype)

    @staticmethod
    def backward(ctx, gradient):
        local, read, weight = ctx.saved_tensors
        # It comes from the grid, with the tokens before the heads, and every product of blocks would copy it again
        gradient = gradient.to(read.dtype, memory_format=torch.contiguous_format)
        to_read = gradient * weight
        to_weight = (read - local).mul_(gradient).sum_to_size(weight.shape)
        return (gradient - to_read).to(local.dtype), to_read, to_weight


def mix(local: Tensor, read: Tensor, weight: Tensor) -> Tensor:
    """(1 − weight) · local + weight · read, equation 5, worked out in the dtype of `read`.

    Args:
        local: what local attention found, and read: what the memory did, both `[B, N, H, P, E]`.
        weight: [`memory_weight`], of a shape that broadcasts to theirs.

    Returns:
        `[B, N, H, P, E]` in the dtype of `local`.
    """
    return _Mix.apply(local, read, weight)


def linear_states(
    key_features: Tensor,
    value: Tensor,
    memory: Tensor,
    normaliser: Tensor,
    start: tuple[Tensor, Tensor],
    borders: Borders | None,
) -> States:
    """The states by the linear rule M_s = M_{s-1} + σ(K)ᵀ V.

    Args:
        key_features: σ(k), zero for tokens that are not to be written, `[B, N, K, P, D]`; value: `[B, N, K, P, E]`.
        memory, normaliser: before the first step, `[B, K, D, E]` and `[B, K, D]`.
        start: M_0 `[K, D, E]` and z_0 `[K, D]` of a new document.
        borders: [`Borders`] of packed documents, or `None`.
    """
    memories, last_memory = _scan(key_features.transpose(-1, -2) @ value, memory, start[0], borders)
    normalisers, last_normaliser = _scan(key_features.sum(-2), normaliser, start[1], borders)
    return States(memories, normalisers, last_memory, last_normaliser)


def delta_states(
    key_features: Tensor,
    value: Tensor,
    memory: Tensor,
    normaliser: Tensor,
    start: tuple[Tensor, Tensor],
    borders: Borders | None,
    eps: float,
) -> States:
    """As [`linear_states`], by the delta rule M_s = M_{s-1} + σ(K)ᵀ (V − σ(K) M_{s-1} / (σ(K) z_{s-1} + ε)).

    The rule is affine in M. Where a segment has as many tokens as a head is wide, its matrix and its constant are made for
    all steps at once, so that the loop over steps touches the state alone.
    """
    normalisers, last_normaliser = _scan(key_features.sum(-2), normaliser, start[1], borders)
    scaled = key_features / ((key_features * normalisers.unsqueeze(-2)).sum(-1, keepdim=True) + eps)
    continues = first = None
    if borders is not None:
        wrote = borders.reach[:, 1:, 2:].diagonal(dim1=1, dim2=2)  # whether the state after a step has its tokens
        key_features = key_features * wrote[:, :, None, None, None]
        continues, first = borders.continues, start[0]
    keys = key_features.transpose(-1, -2)
    # In shorter segments two thin products a step cost less than one D × D matrix a step
    thin = key_features.shape[-2] < key_features.shape[-1]
    factors = (value, keys, scaled) if thin else (keys @ value, None, keys @ scaled)
    memories, last_memory = _DeltaScan.apply(*factors, memory, continues, first)
    return States(memories, normalisers, last_memory, last_normaliser)


class _DeltaScan(Function):
    """`incoming [B, K, D, E]` before each step, `[B, N, K, D, E]`, and after the last of M ← M + left (target − right M).

    Left `None`: the identity. Where `continues` `[B, N]` is False, M begins again as `start` `[K, D, E]`. The gradient's
    loop touches the states' gradient alone; what is owed to the factors is worked out for all steps at once.
    """

    @staticmethod
    def forward(ctx, target, left, right, incoming, continues, start):
        memory, memories = incoming, []
        for step in range(target.shape[1]):
            memories.append(memory)
            change = target[:, step] - right[:, step] @ memory
            memory = memory + (change if left is None else left[:, step] @ change)
            if continues is not None:
                memory = torch.where(continues[:, step, None, None, None], memory, start)
        memories = torch.stack(memories, 1)
        ctx.save_for_backward(target, left, right, continues, memories)
        return memories, memory

    @staticmethod
    def backward(ctx, memories_gradient, gradient):
        target, left, right, continues, memories = ctx.saved_tensors
        to_start = None if continues is None else torch.zeros_like(gradient[0])
        to_states, to_changes = [], []
        for step in range(target.shape[1] - 1, -1, -1):
            if continues is not None:
                on = continues[:, step, None, None, None]
                to_start = to_start + gradient.masked_fill(on, 0).sum(0)
                gradient = gradient * on
            to_change = gradient if left is None else left[:, step].transpose(-1, -2) @ gradient
            to_states.append(gradient)
            to_changes.append(to_change)
            gradient = gradient - right[:, step].transpose(-1, -2) @ to_change + memories_gradient[:, step]
        to_target = torch.stack(to_changes[::-1], 1)
        to_right = (to_target @ memories.transpose(-1, -2)).neg_()
        to_left = None
        if left is not None:
            to_left = torch.stack(to_states[::-1], 1) @ (target - right @ memories).transpose(-1, -2)
        return to_target, to_left, to_right, gradient, None, to_start


class _RunningSum(Function):
    """`incoming [B, …]` with none, the first, the first two, … but the last of `written [B, N, …]`; and with all of them.
    `backwards`: with the last, the last two, … instead, which is the gradient of the other direction.

    A CPU adds whole states many times faster than it sums along a dimension that is not the last.
    """

    @staticmethod
    def forward(ctx, written, incoming, backwards):
        ctx.backwards = backwards
        first, *others = range(written.shape[1])[:: -1 if backwards else 1]
        sums = torch.empty_like(written)
        sums[:, first] = incoming
        last = first
        for step in others:
            torch.add(sums[:, last], written[:, last], out=sums[:, step])
            last = step
        return sums, sums[:, last] + written[:, last]

    @staticmethod
    def backward(ctx, gradient, last_gradient):
        return *_RunningSum.apply(gradient, last_gradient, not ctx.backwards), None


def _scan(written: Tensor, incoming: Tensor, start: Tensor, borders: Borders | None) -> tuple[Tensor, Tensor]:
    """Running sums of what the steps wrote, `[B, N, …]`: before each step, `[B, N, …]`, and after the last, `[B, …]`."""
    if borders is None:
        if written.device.type == "cpu" and not torch.compiler.is_compiling():
            return _RunningSum.apply(written, incoming, False)
        sums = torch.cat([incoming.unsqueeze(1), written], 1).cumsum(1)
    else:
        sources = torch.cat([incoming.unsqueeze(1), start.expand_as(incoming).unsqueeze(1), written], 1)
        sums = (borders.reach.to(written.dtype) @ sources.flatten(2)).unflatten(2, written.shape[2:])
    return sums[:, :-1], sums[:, -1]
