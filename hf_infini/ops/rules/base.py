"""What the update rules share: [`MemoryRule`]. A rule is a subclass of it, called `Rule`, in a file of this folder.

Shapes as in memory.py: `B` batch, `N` blocks, `P` tokens in a block, `K` key/value heads, `D` head dimension, `E` value
dimension.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from ..memory import EPS, FEATURE_MAPS, Borders, States, Within, Written, read_memory, running_sum

DENOMINATORS = ("separate", "shared")
# Which scores of a token a choice of `keep_score` has; each has its share of the places (kept.py)
KEEP_SCORES = {"attention": ("attention",), "learned": ("learned",), "half": ("attention", "learned")}


@dataclass(frozen=True, eq=False)
class MemoryRule:
    """How a memory is written, read and mixed in: the options of [`infini_attention`] with these names.

    Here a memory has a normaliser z, the sum of the features that were written, by which reads are divided; and a token may
    have one rate, the logarithm of its weight, which is added to its key before the feature map.

    Attributes:
        query_map, key_map: `[heads, D, D]` and `[kv_heads, D, D]`, [`infini_attention`]'s `feature_maps`, or `None`.
        keep_score: which tokens are kept out of it, where some are.

    What a rule says of itself:
        update_rule: its name, that of its file.
        normalised: whether its memory has a normaliser; otherwise the width of z is 0.
        rates: numbers in a token's log weight.
        additive: whether what is written does not depend on the memory: M ← M + B, z ← z + b. Otherwise M ← A M + B.
        not_with: values of other options that mean nothing with it: by name, the value and the reason.

    Raises:
        ValueError: an option has another value than those allowed, or one that does not go with the update rule.
    """

    feature_map: str = "elu"
    denominator: str = "separate"
    eps: float = EPS
    query_map: Tensor | None = None
    key_map: Tensor | None = None
    keep_score: str = "attention"

    update_rule: ClassVar[str]
    normalised: ClassVar[bool] = True
    rates: ClassVar[int] = 1
    additive: ClassVar[bool] = False
    not_with: ClassVar[Mapping[str, tuple[str, str]]] = {}

    def __post_init__(self):
        choices = {"feature_map": FEATURE_MAPS, "denominator": DENOMINATORS, "keep_score": KEEP_SCORES}
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}.")
        self.check(vars(self))

    @classmethod
    def check(cls, options: Mapping[str, Any]) -> None:
        """ValueError where these options, by name, have a value that means nothing with this rule."""
        for name, (value, reason) in cls.not_with.items():
            if options.get(name) == value:
                raise ValueError(f"update_rule={cls.update_rule!r} does not go with {name}={value!r}: {reason}.")

    @property
    def shared(self) -> bool:
        """Whether window and memory have one denominator."""
        return self.denominator == "shared"

    def features(self, x: Tensor) -> Tensor:
        """σ(x), of any shape: positive, so that every denominator of equation 3 is."""
        return FEATURE_MAPS[self.feature_map](x)

    def query_features(self, query: Tensor) -> Tensor:
        """σ(q W), `[…, heads, tokens, D]`."""
        return self.features(mapped(query, self.query_map))

    def written(self, key: Tensor, value: Tensor, log_weight: Tensor | None, mask: Tensor | None = None) -> Written:
        """What these tokens write: σ(k W + log w).

        Args:
            key: `[B, N, K, P, D]`; value: `[B, N, K, P, E]`; log_weight: `[B, N, K, P, rates]`; `None`: zeros.
            mask: which tokens are written, of a shape that broadcasts to `[B, N, K, P, 1]`; `None`: all.
        """
        key = mapped(key, self.key_map)
        features = self.features(key if log_weight is None else key + log_weight.to(key.dtype))
        return Written(features if mask is None else features * mask, value, None)  # σ(0) is not zero

    def states(
        self,
        written: Written,
        memory: Tensor,
        normaliser: Tensor,
        start: tuple[Tensor, Tensor] | None = None,
        borders: Borders | None = None,
    ) -> States:
        """The states before each block and after the last.

        Args:
            written: by the blocks.
            memory, normaliser: before the first block, `[B, K, D, E]` and `[B, K, D]`.
            start: M_0 `[K, D, E]` and z_0 `[K, D]` of a new document; needed with borders.
            borders: [`Borders`] of packed documents, or `None`.
        """
        raise NotImplementedError

    def read(
        self, features: Tensor, memory: Tensor, normaliser: Tensor, within: Within | None = None
    ) -> tuple[Tensor, Tensor]:
        """[`read_memory`]."""
        return read_memory(features, memory, normaliser, self.eps, within)

    @classmethod
    def parameters(cls, heads: int, width: int) -> dict[str, Tensor]:
        """The first values of what a layer of so many key/value heads, with an input of so many numbers, learns for this
        rule, by the names of its parameters; the same for all numbers of the input."""
        return {}

    @staticmethod
    def log_rates(inputs: Tensor, **parameters: Tensor) -> Tensor:
        """The logarithms of a token's rates, `[B, K, tokens, rates]`, from the layer's input `[B, tokens, width]`; only for
        a rule with parameters."""
        raise NotImplementedError

    # The reference, for one row: heads of `[heads, tokens, D]`; it uses nothing of the above

    @staticmethod
    def naive_features(x: Tensor, log_weight, feature_map: Callable[[Tensor], Tensor], eps: float) -> Tensor:
        """Features of queries or keys; `log_weight`: of keys, `[heads, tokens, rates]`, or 0."""
        return feature_map(x + log_weight)

    @staticmethod
    def naive_read(features: Tensor, memory: Tensor, normaliser: Tensor, eps: float) -> tuple[Tensor, Any]:
        """Numerator `[heads, tokens, E]` and denominator `[heads, tokens, 1]` of equation 3."""
        return features @ memory, features @ normaliser.unsqueeze(-1) + eps

    @staticmethod
    def naive_write(
        memory: Tensor, normaliser: Tensor, features: Tensor, values: Tensor, log_weight: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        """M and z after a segment with these features, values and log weights."""
        raise NotImplementedError


def mapped(x: Tensor, weight: Tensor | None) -> Tensor:
    """x W, or x."""
    return x if weight is None else x @ weight.to(x.dtype)


def normaliser_states(
    written: Written, normaliser: Tensor, start: tuple[Tensor, Tensor] | None, borders: Borders | None
) -> tuple[Tensor, Tensor]:
    """z before each block, `[B, N, K, D]`, and after the last, `[B, K, D]`: z ← z + Σ σ(k)."""
    return running_sum(written.key_features.sum(-2), normaliser, None if start is None else start[1], borders)
