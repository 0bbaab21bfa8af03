"""The compressive memory: what is written when a segment leaves the window, and what a query reads (equations 3 to 5).

    σ(x) = ELU(x) + 1                                                  features
    A_mem = σ(Q) M / (σ(Q) z + ε)                                      read, equation 3
    M ← M + σ(K)ᵀ V,  z ← z + Σ σ(k)                                   write by the linear rule, equation 4
    A = sigmoid(β) A_mem + (1 − sigmoid(β)) A_dot                      mix, equation 5

"The paper" is Munkhdalai, Faruqui and Gopal, "Leave No Context Behind" (arXiv 2404.07143). Of padding and documents these
functions see only the masks that they are given. How a memory is written is in rules/.

The gradients are written by hand. Those of features come from their own result, so that the exponential function, by far
the most expensive operation of the memory on a CPU, is computed once. What autograd would keep or copy takes longer, where
memory is slower than arithmetic, than the products: together with blocks of contiguous matrices they made a layer a third
faster on a CPU in bfloat16. Second derivatives go through these gradients: whatever depends on the inputs is there an input
or an output of the function, never a result on the way, which would count as constant. g is the gradient of the output,
`g_x` that of x.

Shapes: `B` batch, `N` blocks (a segment, or several short ones), `P` tokens in a block, `K` key/value heads, `R` queries of
a block that read a key/value head's memory, `D` head dimension, `E` value dimension. The heads come before the tokens, so
that every product is one of contiguous matrices.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

EPS = 1e-6
EXP_LIMIT = 30.0


class Borders(NamedTuple):
    """Where documents begin among the `N` blocks of a packed row (`None` in its place: all blocks are one document's).

    Attributes:
        reach: `[B, N + 1, N + 2]` bool: the state before a block (row; the last is the state after all) holds the incoming
            memory (column 0), the start (column 1), what block j wrote (column 2 + j).
        continues: `[B, N]` bool: the state after the block still belongs to the document of the state before it.
    """

    reach: Tensor
    continues: Tensor

    @property
    def wrote(self) -> Tensor:
        """`[B, N, 1, 1, 1]` bool: whether the state after a block holds what the block wrote."""
        return self.reach[:, 1:, 2:].diagonal(dim1=1, dim2=2)[:, :, None, None, None]


class Within(NamedTuple):
    """Tokens that later tokens of the same block read, where segments shorter than the head width are joined to blocks.

    σ(q) Σ σ(k)ᵀv = Σ (σ(q)·σ(k)) v: for these, products of tokens cost less than a state per segment.

    Attributes:
        key_features: σ(k), `[B, N, K, P, D]`; value: `[B, N, K, P, E]`.
        visible: `[R, P]`, 1 where the query (row) reads the token (column), else 0, in the features' dtype.
    """

    key_features: Tensor
    value: Tensor
    visible: Tensor


class Written(NamedTuple):
    """What the blocks write into the memory.

    Attributes:
        key_features: σ(k), zero for tokens that are not to be written, `[B, N, K, P, D]`; value: `[B, N, K, P, E]`.
        log_weight: rates that the rule does not write as part of the features, `[B, N, K, P, rates]`, zero for tokens that
            are not to be written; or `None`.
    """

    key_features: Tensor
    value: Tensor
    log_weight: Tensor | None


class States(NamedTuple):
    """Memory and normaliser over the blocks of a call.

    Attributes:
        memory, normaliser: before each block, `[B, N, K, D, E]` and `[B, N, K, D]`.
        last_memory, last_normaliser: after the last block, `[B, K, D, E]` and `[B, K, D]`.

    Without a normaliser the width of z is 0.
    """

    memory: Tensor
    normaliser: Tensor
    last_memory: Tensor
    last_normaliser: Tensor


class EluFeatures(Function):
    """σ(x) = ELU(x) + 1;  g_x = g · min(σ(x), 1), for σ'(x) is e^x = σ(x) below zero and 1 above.    """

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        features = F.elu(x).add_(1)
        ctx.save_for_backward(features)
        return features

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        (features,) = ctx.saved_tensors
        return features.clamp(max=1).mul_(gradient)


class ExpFeatures(Function):
    """σ(x) = e^min(x, 30);  g_x = g · σ(x), and 0 beyond the limit."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        features = x.clamp(max=EXP_LIMIT).exp_()
        ctx.save_for_backward(x, features)
        return features

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        x, features = ctx.saved_tensors
        return (gradient * features).masked_fill_(x > EXP_LIMIT, 0)


class UnitLength(Function):
    """y = r c with c = x − 1 and r = 1 / √(|c|² + ε), of vectors in the last dimension;  g_x = r (g − (y·g + r g_r) y).

    Returns y and r, which is an output for the second derivative only.
    """

    @staticmethod
    def forward(ctx, x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        unit = x - 1
        inverse = unit.square().sum(-1, keepdim=True).add_(eps).rsqrt_()
        unit *= inverse
        ctx.save_for_backward(unit, inverse)
        ctx.set_materialize_grads(False)
        return unit, inverse

    @staticmethod
    def backward(ctx, gradient, inverse_gradient):
        unit, inverse = ctx.saved_tensors
        gradient = torch.zeros_like(unit) if gradient is None else gradient
        along = (unit * gradient).sum(-1, keepdim=True)
        if inverse_gradient is not None:
            along = along + inverse * inverse_gradient
        return torch.addcmul(gradient, unit, along, value=-1) * inverse, None


def elu_features(x: Tensor) -> Tensor:
    """σ(x) = ELU(x) + 1, positive (section 2.1.2 of the paper)."""
    return EluFeatures.apply(x)


def exp_features(x: Tensor) -> Tensor:
    """σ(x) = exp(x), positive, so that σ(q)·σ(k) = Σ_d exp(q_d + k_d).

    What a query looks for can outweigh tens of thousands of other tokens by a few units of x, where ELU(x) + 1 grows
    linearly. x beyond 30 counts as 30: sums of a million products then still fit into float32.
    """
    return ExpFeatures.apply(x)


def unit_features(x: Tensor, eps: float) -> Tensor:
    """(x − 1) / √(|x − 1|² + ε) along the last dimension."""
    return UnitLength.apply(x, eps)[0]


FEATURE_MAPS = {"elu": elu_features, "exp": exp_features}


class Read(Function):
    """A = n / (m + ε), n = σ(q) M + C V, m = σ(q) z + Σ C, with C = σ(q) σ(K)ᵀ of the visible tokens of the same block;

    g_n = g / (m + ε),  g_m += −g_n · A,  g_σ(q) = g_n Mᵀ + g_m zᵀ,  g_M = σ(q)ᵀ g_n,  g_z = σ(q)ᵀ g_m,
    g_C = g_n Vᵀ + g_m where visible,  g_σ(q) += g_C σ(K),  g_σ(K) = g_Cᵀ σ(q),  g_V = Cᵀ g_n.

    Returns A, m and C (`None` without `visible`), which is an output for the second derivative only.
    """

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
        read_gradient = torch.zeros_like(read) if read_gradient is None else read_gradient
        to_numerator = read_gradient * (mass + ctx.eps).reciprocal()
        to_mass = (to_numerator * read).sum(-1, keepdim=True).neg()
        if mass_gradient is not None:
            to_mass = to_mass + mass_gradient
        to_features = (to_numerator @ memory.transpose(-1, -2)).addcmul_(to_mass, normaliser.unsqueeze(-2))
        to_memory = features.transpose(-1, -2) @ to_numerator
        to_normaliser = (to_mass.transpose(-1, -2) @ features).squeeze(-2)
        to_keys = to_value = None
        if visible is not None:
            to_products = to_numerator @ value.transpose(-1, -2) + to_mass
            if products_gradient is not None:  # of a second derivative
                to_products = to_products + products_gradient
            to_products = to_products * visible
            to_features = to_features + to_products @ key_features
            to_keys = to_products.transpose(-1, -2) @ features
            to_value = products.transpose(-1, -2) @ to_numerator
        return to_features, to_memory, to_normaliser, None, to_keys, to_value, None


class Mix(Function):
    """A = (1 − s) L + s R;  g_L = (1 − s) g,  g_R = s g,  g_s = Σ g (R − L)."""

    @staticmethod
    def forward(ctx, local, read, share):
        ctx.save_for_backward(local, read, share)
        return torch.lerp(local.to(read.dtype), read, share.expand_as(read)).to(local.dtype)

    @staticmethod
    def backward(ctx, gradient):
        local, read, share = ctx.saved_tensors
        # It comes from the grid, with the tokens before the heads, and every product of blocks would copy it again
        gradient = gradient.to(read.dtype, memory_format=torch.contiguous_format)
        to_read = gradient * share
        to_share = (read - local).mul_(gradient).sum_to_size(share.shape)
        return (gradient - to_read).to(local.dtype), to_read, to_share


class RunningSum(Function):
    """S_n = S_0 + Σ_{j<n} W_j for every block and after the last;  g_W_j = Σ_{n>j} g_n, the same sum from the other end.

    A CPU adds whole states many times faster than it sums along a dimension that is not the last.

    Args:
        written: W, `[B, N, …]`; incoming: S_0, `[B, …]`.
        backwards: begin with the last block.
    """

    @staticmethod
    def forward(ctx, written, incoming, backwards):
        ctx.backwards = backwards
        first, *others = range(written.shape[1])[:: -1 if backwards else 1]
        sums = torch.empty_like(written)
        sums[:, first] = incoming
        last = first
        for block in others:
            torch.add(sums[:, last], written[:, last], out=sums[:, block])
            last = block
        return sums, sums[:, last] + written[:, last]

    @staticmethod
    def backward(ctx, gradient, last_gradient):
        return *RunningSum.apply(gradient, last_gradient, not ctx.backwards), None


def read_memory(
    features: Tensor, memory: Tensor, normaliser: Tensor, eps: float, within: Within | None = None
) -> tuple[Tensor, Tensor]:
    """σ(q) M / (σ(q) z + ε), equation 3, for every block at once.

    Args:
        features: σ(q), `[B, N, K, R, D]`; memory: `[B, N, K, D, E]`; normaliser: `[B, N, K, D]`.
        eps: ε.
        within: what is read beside the memory, or `None`.

    Returns:
        What was read, `[B, N, K, R, E]`, and σ(q) z, the sum of σ(q)·σ(k) over the memory's tokens, `[B, N, K, R, 1]`.
    """
    return Read.apply(features, memory, normaliser, eps, *(within or (None, None, None)))[:2]


def memory_weight(gate: Tensor, mass: Tensor, log_sum: Tensor | None, width: int, eps: float) -> Tensor:
    """The memory's share of the output, of any shape that broadcasts: sigmoid(β), equation 5, without a `log_sum`.

    With it, window and memory have one denominator: the window's tokens weigh e^s each, as in its softmax, and the memory's
    e^β σ(q)·σ(k) / D, so that one like all others weighs e^β. A query that finds nothing in the memory then leaves it out,
    which a constant share cannot (after LoLCATs, arXiv 2410.10254, section 3.2).

    Args:
        gate: β.
        mass: σ(q) z, the sum of σ(q)·σ(k) over the memory's tokens.
        log_sum: log Σ e^s over the window's tokens, or `None`.
        width: D.
        eps: of equation 3.
    """
    if log_sum is None:
        return torch.sigmoid(gate)
    return torch.sigmoid(gate + (mass + eps).log() - math.log(width) - log_sum)


def mix(local: Tensor, read: Tensor, share: Tensor) -> Tensor:
    """(1 − share) · local + share · read, equation 5, computed in the dtype of `read`.

    Args:
        local: what local attention found, and read: what the memory did, both `[B, N, H, P, E]`.
        share: [`memory_weight`], of a shape that broadcasts to theirs.

    Returns:
        `[B, N, H, P, E]` in the dtype of `local`.
    """
    return Mix.apply(local, read, share)


def running_sum(
    written: Tensor, incoming: Tensor, start: Tensor | None, borders: Borders | None
) -> tuple[Tensor, Tensor]:
    """Running sums of what the blocks wrote, `[B, N, …]`: before each block, `[B, N, …]`, and after the last, `[B, …]`."""
    if borders is None:
        if written.device.type == "cpu" and not torch.compiler.is_compiling():
            return RunningSum.apply(written, incoming, False)
        sums = torch.cat([incoming.unsqueeze(1), written], 1).cumsum(1)
    elif start is None:
        raise ValueError("borders need the start of the documents that begin there.")
    else:
        sources = torch.cat([incoming.unsqueeze(1), start.expand_as(incoming).unsqueeze(1), written], 1)
        sums = (borders.reach.to(written.dtype) @ sources.flatten(2)).unflatten(2, written.shape[2:])
    return sums[:, :-1], sums[:, -1]
