"""The linear rule, as in the paper: M ← M + σ(K)ᵀ V,  z ← z + Σ σ(k)  (equation 4)."""

from ..memory import MemoryRule, running_sum


class Rule(MemoryRule):
    """A segment's values are added to the memory."""

    update_rule = "linear"

    def states(self, written, memory, normaliser, start=None, continues=None):
        features, value, _ = written
        first_memory, first_normaliser = start or (None, None)
        memories, last_memory = running_sum(features.mT @ value, memory, continues, first_memory)
        normalisers, last_normaliser = running_sum(features.sum(-2), normaliser, continues, first_normaliser)
        return (memories, normalisers), (last_memory, last_normaliser)

    @staticmethod
    def naive_write(memory, normaliser, features, values, log_weight, eps):
        return memory + features.mT @ values, normaliser + features.sum(-2)
