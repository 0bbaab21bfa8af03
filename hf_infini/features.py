"""The feature maps of the memory's queries and keys: positive, so that every denominator of equation 3 is.

Each gives its gradient from its own result: the exponential function, by far the dearest operation of the memory on a CPU,
is computed once.
"""

from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

EXP_LIMIT = 30.0


class _EluFeatures(Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        features = F.elu(x).add_(1)
        ctx.save_for_backward(features)
        return features

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        (features,) = ctx.saved_tensors
        return features.clamp(max=1).mul_(gradient)  # e^x = σ(x) below zero, 1 above


class _ExpFeatures(Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        features = x.clamp(max=EXP_LIMIT).exp_()
        ctx.save_for_backward(x, features)
        return features

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        x, features = ctx.saved_tensors
        return (gradient * features).masked_fill_(x > EXP_LIMIT, 0)


def elu_features(x: Tensor) -> Tensor:
    """σ(x) = ELU(x) + 1, positive (section 2.1.2 of the paper). Any shape."""
    return _EluFeatures.apply(x)


def exp_features(x: Tensor) -> Tensor:
    """σ(x) = exp(x), positive, so that σ(q)·σ(k) = Σ_d exp(q_d + k_d). Any shape.

    What a query looks for can outweigh tens of thousands of other tokens by a few units of x, where ELU(x) + 1 grows
    linearly. x beyond 30 counts as 30: sums of a million products then still fit into float32.
    """
    return _ExpFeatures.apply(x)


FEATURE_MAPS = {"elu": elu_features, "exp": exp_features}
