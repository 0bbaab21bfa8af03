"""What makes features of the memory's queries and keys, with gradients written by hand: from its own result, so that the
exponential function, by far the most expensive operation of the memory on a CPU, is computed once. Any shapes.
"""

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

EXP_LIMIT = 30.0


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
