"""The compressive memory: what is written when a segment leaves the window, and what a query reads
(equations 3 to 5).

    σ(x) = ELU(x) + 1                                               features
    A_mem = σ(Q) M / (σ(Q) z + ε)                                   read, equation 3
    M ← M + σ(K)ᵀ V,  z ← z + Σ σ(k)                                write, linear rule, equation 4
    A = sigmoid(β) A_mem + (1 − sigmoid(β)) A_dot                   mix, equation 5

"The paper" is Munkhdalai, Faruqui and Gopal, "Leave No Context Behind" (arXiv 2404.07143).
[`MemoryRule`] is the linear rule; each other one is a subclass of it, called `Rule`, in a file of
rules/.

Shapes: `B` batch, `N` segments, `C` tokens in a segment, `K` key/value heads, `R` queries of a
segment that read a key/value head's memory, `D` head dimension, `E` value dimension. Heads come
before tokens: products are of contiguous matrices.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from .window import product

EPS = 1e-6
Written = tuple[Tensor, Tensor, Tensor | None]  # what [`MemoryRule.written`] returns
State = tuple[Tensor, Tensor]  # memory and normaliser

# Positive features: those of section 2.1.2 of the paper, or exponential ones, with which σ(q)·σ(k)
# = Σ_d exp(q_d + k_d): a few units of x outweigh tens of thousands of other tokens. Sums of a
# million products still fit into float32
FEATURE_MAPS = {"elu": lambda x: F.elu(x).add_(1), "exp": lambda x: x.clamp(max=30.0).exp_()}


def running_sum(
    written: Tensor, incoming: Tensor, continues: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Running sums of what the segments wrote, `[B, N, …]`: before each, `[B, N, …]`, and after the
    last, `[B, …]`; behind a segment where `continues` `[B, N]` is False they begin again at
    zero."""
    if continues is None and (written.device.type != "cpu" or torch.compiler.is_compiling()):
        sums = torch.cat([incoming.unsqueeze(1), written], 1).cumsum(1)
        return sums[:, :-1], sums[:, -1]
    # a CPU adds whole states many times faster than it sums along a dimension but the last
    before, last = [], incoming
    for number, new in enumerate(written.unbind(1)):
        before.append(last)
        last = last + new
        if continues is not None:
            last = last.masked_fill(~continues[:, number].view(-1, *(1,) * (last.dim() - 1)), 0)
    return torch.stack(before, 1), last


@dataclass(frozen=True, eq=False)
class MemoryRule:
    """How a memory is written, read and mixed in, with the options of [`infini_attention`] of these
    names; ValueError for a value that is not allowed. This is the linear rule, as in the paper: a
    segment's values are added (equation 4). Its memory has a normaliser z, the sum of the features
    that were written, by which reads are divided; and a token may have one rate, the logarithm of
    its weight, which is added to its key before the feature map."""

    feature_map: str = "elu"
    eps: float = EPS

    update_rule: ClassVar[str] = "linear"  # its name, that of its file in rules/
    # whether there is a memory at all; otherwise M has no rows, and a layer no gate
    holds: ClassVar[bool] = True
    # whether its memory has a normaliser; otherwise the width of z is 0
    normalised: ClassVar[bool] = True
    rates: ClassVar[int] = 1  # numbers in a token's log weight

    def __post_init__(self):
        if self.feature_map not in FEATURE_MAPS:
            raise ValueError(
                f"feature_map must be one of {', '.join(FEATURE_MAPS)}, got {self.feature_map!r}."
            )

    @classmethod
    def of(cls, config: Any) -> "MemoryRule":
        """The rule with the options of a configuration, [`MemoryOptions`]."""
        return cls(feature_map=config.feature_map)

    def features(self, x: Tensor) -> Tensor:
        """σ(x), of any shape: positive, so that every denominator of equation 3 is."""
        return FEATURE_MAPS[self.feature_map](x)

    def written(
        self, key: Tensor, value: Tensor, log_weight: Tensor | None, mask: Tensor | None = None
    ) -> Written:
        """What these tokens write: their features σ(k + log w), their values and the log rates that
        are not part of the features, or `None`; zero, but for the values, where `mask` is False.
        key: `[B, N, K, C, D]`; value: `[B, N, K, C, E]`; log_weight: `[B, N, K, C, rates]` or
        `None`, zeros; mask: bool, broadcasts to `[B, N, K, C, 1]`."""
        key = key if log_weight is None else key + log_weight.to(key.dtype)
        # σ(−∞) = 0
        return (
            self.features(key if mask is None else key.masked_fill(~mask, -torch.inf)),
            value,
            None,
        )

    def states(
        self, written: Written, memory: Tensor, normaliser: Tensor, continues: Tensor | None = None
    ) -> tuple[State, State]:
        """Memory and normaliser before each segment, `[B, N, K, D, E]` and `[B, N, K, D]`, and
        after the last. `written`: by the segments; nothing by one whose document has ended by then.
        `memory`, `normaliser`: before the first. `continues`: `[B, N]` bool, False where the state
        begins again at zero behind the segment; `None`: nowhere."""
        features, value, _ = written
        memories, last_memory = running_sum(features.mT @ value, memory, continues)
        normalisers, last_normaliser = running_sum(features.sum(-2), normaliser, continues)
        return (memories, normalisers), (last_memory, last_normaliser)

    def read(self, features: Tensor, memory: Tensor, normaliser: Tensor) -> Tensor:
        """σ(q) M / (σ(q) z + ε), equation 3, `[B, N, K, R, E]`, of σ(q) `[B, N, K, R, D]`, M `[…,
        D, E]` and z `[…, D]`."""
        read = product(features, memory)
        inverse = (product(features, normaliser.unsqueeze(-1)) + self.eps).reciprocal()
        return read * inverse if read.requires_grad else read.mul_(inverse)

    def mix(self, local: Tensor, query: Tensor, state: State, gate: Any, filled: Tensor) -> Tensor:
        """(1 − s) · local + s · read, equation 5, computed in the dtype of the memory and returned
        in that of `local`; s is sigmoid(β), or 0 where the memory is not `filled`. local: what the
        window gives, `[B, N, H, C, E]`; query: `[B, N, H, C, D]`; state: M `[B, N, K, D, E]` and z
        `[B, N, K, D]`; gate: β, `[H]`."""
        dtype, kv_heads = state[0].dtype, state[0].shape[2]
        features = self.features(query.to(dtype)).unflatten(2, (kv_heads, -1)).flatten(3, 4)
        read = self.read(features, *state).unflatten(3, (-1, query.shape[3])).flatten(2, 3)
        share = torch.sigmoid(gate.to(dtype)[:, None, None]) * filled
        return torch.lerp(local.to(read.dtype), read, share).to(local.dtype)

    @classmethod
    def parameters(cls, heads: int, width: int) -> dict[str, Tensor]:
        """The first values of what a layer of so many key/value heads learns for this rule, by
        name; `width`: of the layer's input, for all numbers of which they are the same."""
        return {}

    @staticmethod
    def log_rates(inputs: Tensor, **parameters: Tensor) -> Tensor:
        """Tokens' log rates, `[B, K, tokens, rates]`, of the layer's input `[B, tokens, width]`;
        only with parameters."""
        raise NotImplementedError

    # The reference, for one row: heads of `[heads, tokens, D]`; it uses nothing of the above

    @staticmethod
    def naive_features(
        x: Tensor, log_weight, feature_map: Callable[[Tensor], Tensor], eps: float
    ) -> Tensor:
        """Features of queries or keys; `log_weight`: of keys, `[heads, tokens, rates]`, or 0."""
        return feature_map(x + log_weight)

    @staticmethod
    def naive_read(
        features: Tensor, memory: Tensor, normaliser: Tensor, eps: float
    ) -> tuple[Tensor, Any]:
        """Numerator `[heads, tokens, E]` and denominator `[heads, tokens, 1]` of equation 3."""
        return features @ memory, features @ normaliser.unsqueeze(-1) + eps

    @staticmethod
    def naive_write(
        memory: Tensor,
        normaliser: Tensor,
        features: Tensor,
        values: Tensor,
        log_weight: Tensor | None,
        eps: float,
    ) -> State:
        """M and z after a segment with these features, values and log weights."""
        return memory + features.mT @ values, normaliser + features.sum(-2)
