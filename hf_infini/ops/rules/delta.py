"""The delta rule, as in the paper: M ← M + σ(K)ᵀ (V − σ(K) M / (σ(K) z + ε)),  z ← z + Σ σ(k)."""

from ..equations import MemoryRule, running_sum
from .scan import DeltaScan


class Rule(MemoryRule):
    """A segment's values are added, minus what the memory already returns for their keys."""

    update_rule = "delta"

    def states(self, written, memory, normaliser, continues=None):
        """The rule is affine in M, so that the loop over segments touches the state only.
        `written`, `memory`, `normaliser`, `continues`: as of [`MemoryRule.states`]."""
        features, value, _ = written
        normalisers, last_normaliser = running_sum(features.sum(-2), normaliser, continues)
        scaled = features / (
            (features * normalisers.unsqueeze(-2)).sum(-1, keepdim=True) + self.eps
        )
        factors = features.mT @ value, features.mT @ scaled
        memories, last_memory = DeltaScan.apply(*factors, memory, continues)
        return (memories, normalisers), (last_memory, last_normaliser)

    @staticmethod
    def naive_write(memory, normaliser, features, values, log_weight, eps):
        retrieved = features @ memory / (features @ normaliser.unsqueeze(-1) + eps)
        return memory + features.mT @ (values - retrieved), normaliser + features.sum(-2)
