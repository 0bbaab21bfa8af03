"""The compressive memory: what is written when a segment leaves the window, and what a query reads (equations 3 to 5).

    σ(x) = ELU(x) + 1
    A_mem = σ(Q) M / (σ(Q) z + ε)                                      read, equation 3
    M ← M + σ(K)ᵀ V,  z ← z + Σ σ(k)                                   write by the linear rule, equation 4
    M ← M + σ(K)ᵀ (V − σ(K) M / (σ(K) z + ε))                          write by the delta rule
    M ← α (M − β k kᵀ M) + β k vᵀ,  A_mem = q M                        the gated delta rule, token by token: |k| = |q| = 1
    A = sigmoid(β) A_mem + (1 − sigmoid(β)) A_dot                      mix, equation 5

Pure functions on tensors; of padding and documents they see only the masks that they are given. "The paper" is
Munkhdalai, Faruqui and Gopal, "Leave No Context Behind" (arXiv 2404.07143). Their gradients are in memory_gradients.py. The
gated delta rule is that of Yang, Kautz and Hatamizadeh, "Gated Delta Networks" (arXiv 2412.06464).

Shapes: `B` batch, `N` blocks (a segment, or several short ones), `P` tokens in a block, `K` key/value heads, `R` queries of
a block that read a key/value head's memory, `D` head dimension, `E` value dimension. The heads come before the tokens, so
that every product is one of contiguous matrices.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..options import check_rule
from .gated_delta import gated_delta_scan
from .memory_gradients import DeltaScan, EluFeatures, ExpFeatures, Mix, Read, RunningSum, UnitLength

EPS = 1e-6


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
        log_weight: log β and log α of the gated delta rule, `[B, N, K, P, 2]`, zero for tokens that are not to be written;
            `None` for the others.
    """

    key_features: Tensor
    value: Tensor
    log_weight: Tensor | None


class States(NamedTuple):
    """Memory and normaliser over the blocks of a call.

    Attributes:
        memory, normaliser: before each block, `[B, N, K, D, E]` and `[B, N, K, D]`.
        last_memory, last_normaliser: after the last block, `[B, K, D, E]` and `[B, K, D]`.

    The gated delta rule has no normaliser: there the width of z is 0.
    """

    memory: Tensor
    normaliser: Tensor
    last_memory: Tensor
    last_normaliser: Tensor


def elu_features(x: Tensor) -> Tensor:
    """σ(x) = ELU(x) + 1, positive (section 2.1.2 of the paper). Any shape."""
    return EluFeatures.apply(x)


def exp_features(x: Tensor) -> Tensor:
    """σ(x) = exp(x), positive, so that σ(q)·σ(k) = Σ_d exp(q_d + k_d). Any shape.

    What a query looks for can outweigh tens of thousands of other tokens by a few units of x, where ELU(x) + 1 grows
    linearly. x beyond 30 counts as 30: sums of a million products then still fit into float32.
    """
    return ExpFeatures.apply(x)


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


def linear_states(
    key_features: Tensor,
    value: Tensor,
    memory: Tensor,
    normaliser: Tensor,
    start: tuple[Tensor, Tensor] | None = None,
    borders: Borders | None = None,
) -> States:
    """The states by the linear rule M ← M + σ(K)ᵀ V.

    Args:
        key_features: σ(k), zero for tokens that are not to be written, `[B, N, K, P, D]`; value: `[B, N, K, P, E]`.
        memory, normaliser: before the first block, `[B, K, D, E]` and `[B, K, D]`.
        start: M_0 `[K, D, E]` and z_0 `[K, D]` of a new document; needed with borders.
        borders: [`Borders`] of packed documents, or `None`.
    """
    first_memory, first_normaliser = start or (None, None)
    memories, last_memory = _running_sum(key_features.transpose(-1, -2) @ value, memory, first_memory, borders)
    normalisers, last_normaliser = _running_sum(key_features.sum(-2), normaliser, first_normaliser, borders)
    return States(memories, normalisers, last_memory, last_normaliser)


def delta_states(
    key_features: Tensor,
    value: Tensor,
    memory: Tensor,
    normaliser: Tensor,
    start: tuple[Tensor, Tensor] | None = None,
    borders: Borders | None = None,
    *,
    eps: float,
) -> States:
    """As [`linear_states`], by the delta rule M ← M + σ(K)ᵀ (V − σ(K) M / (σ(K) z + ε)).

    The rule is affine in M. Where a segment has as many tokens as a head is wide, its matrix and its constant are made for
    all blocks at once, so that the loop over blocks touches the state only.
    """
    first_memory, first_normaliser = start or (None, None)
    normalisers, last_normaliser = _running_sum(key_features.sum(-2), normaliser, first_normaliser, borders)
    scaled = key_features / ((key_features * normalisers.unsqueeze(-2)).sum(-1, keepdim=True) + eps)
    continues = None
    if borders is not None:
        key_features = key_features * borders.wrote
        continues = borders.continues
    keys = key_features.transpose(-1, -2)
    # In shorter segments two thin products a block cost less than one D × D matrix a block
    thin = key_features.shape[-2] < key_features.shape[-1]
    factors = (value, keys, scaled) if thin else (keys @ value, None, keys @ scaled)
    memories, last_memory = DeltaScan.apply(*factors, None, memory, continues, None if borders is None else first_memory)
    return States(memories, normalisers, last_memory, last_normaliser)


def gated_delta_states(
    key: Tensor,
    value: Tensor,
    log_weight: Tensor,
    memory: Tensor,
    normaliser: Tensor,
    start: tuple[Tensor, Tensor] | None = None,
    borders: Borders | None = None,
) -> States:
    """As [`linear_states`], by the gated delta rule: [`gated_delta_scan`]; `log_weight` as in [`Written`]."""
    first_memory, _ = start or (None, None)
    continues = None
    if borders is not None:
        key, log_weight, continues = key * borders.wrote, log_weight * borders.wrote, borders.continues
    memories, last_memory = gated_delta_scan(key, value, log_weight, memory, continues, first_memory)
    return States(memories, normaliser.unsqueeze(1).expand(-1, key.shape[1], -1, -1), last_memory, normaliser)


def _running_sum(
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


UPDATE_RULES = ("linear", "delta", "gated_delta")
FEATURE_MAPS = {"elu": elu_features, "exp": exp_features}
DENOMINATORS = ("separate", "shared")


@dataclass(frozen=True, eq=False)
class MemoryRule:
    """How a memory is written, read and mixed in: the options of [`infini_attention`] with these names.

    Attributes:
        query_map, key_map: `[heads, D, D]` and `[kv_heads, D, D]`, [`infini_attention`]'s `feature_maps`, or `None`.

    Raises:
        ValueError: an option has another value than those allowed, or one that does not go with the update rule.
    """

    update_rule: str = "linear"
    feature_map: str = "elu"
    denominator: str = "separate"
    eps: float = EPS
    query_map: Tensor | None = None
    key_map: Tensor | None = None

    def __post_init__(self):
        choices = {"update_rule": UPDATE_RULES, "feature_map": FEATURE_MAPS, "denominator": DENOMINATORS}
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}.")
        check_rule(vars(self))

    @property
    def shared(self) -> bool:
        """Whether window and memory have one denominator."""
        return self.denominator == "shared"

    @property
    def normalised(self) -> bool:
        """Whether the memory has a normaliser, by which reads are divided."""
        return self.update_rule != "gated_delta"

    @property
    def weights(self) -> int:
        """Numbers in a token's log weight: log w, or log β and log α."""
        return 1 if self.normalised else 2

    def query_features(self, query: Tensor) -> Tensor:
        """σ(q W), `[…, heads, tokens, D]`: positive, so that every denominator of equation 3 is, or of length one."""
        return self._features(_mapped(query, self.query_map))

    def written(self, key: Tensor, value: Tensor, log_weight: Tensor | None, mask: Tensor | None = None) -> Written:
        """What these tokens write: σ(k W + log w), or σ(k W) beside log β and log α.

        Args:
            key: `[B, N, K, P, D]`; value: `[B, N, K, P, E]`; log_weight: `[B, N, K, P, 1 or 2]`; `None`: zeros.
            mask: which tokens are written, of a shape that broadcasts to `[B, N, K, P, 1]`; `None`: all.
        """
        key = _mapped(key, self.key_map)
        if log_weight is not None:
            log_weight = log_weight.to(key.dtype)
        if self.normalised:
            key, log_weight = key if log_weight is None else key + log_weight, None
        elif log_weight is None:
            log_weight = key.new_zeros(*key.shape[:-1], self.weights)
        features = self._features(key)
        if mask is not None:  # σ(0) is not zero
            features = features * mask
            log_weight = None if log_weight is None else log_weight * mask
        return Written(features, value, log_weight)

    def states(self, written: Written, *arguments) -> States:
        """The states by the rule, with the arguments of [`linear_states`] after key features and value."""
        if written.log_weight is not None:
            return gated_delta_states(written.key_features, written.value, written.log_weight, *arguments)
        if self.update_rule == "delta":
            return delta_states(*written[:2], *arguments, eps=self.eps)
        return linear_states(*written[:2], *arguments)

    def read(
        self, features: Tensor, memory: Tensor, normaliser: Tensor, within: Within | None = None
    ) -> tuple[Tensor, Tensor]:
        """[`read_memory`], or q M, whose σ(q) z is 0 without a normaliser."""
        if self.normalised:
            return read_memory(features, memory, normaliser, self.eps, within)
        return features @ memory, features.new_zeros(*features.shape[:-1], 1)

    def _features(self, x: Tensor) -> Tensor:
        """σ(x), or without a normaliser (σ(x) − σ(0)) / |σ(x) − σ(0)|: positive features would nearly be parallel."""
        features = FEATURE_MAPS[self.feature_map](x)
        return features if self.normalised else UnitLength.apply(features, self.eps)[0]


def _mapped(x: Tensor, weight: Tensor | None) -> Tensor:
    return x if weight is None else x @ weight.to(x.dtype)
