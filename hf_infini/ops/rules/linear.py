"""The linear rule, as in the paper: M ← M + σ(K)ᵀ V,  z ← z + Σ σ(k)  (equation 4)."""

from ..memory import States, running_sum
from .base import MemoryRule, normaliser_states


class Rule(MemoryRule):
    """A segment's values are added to the memory."""

    update_rule = "linear"
    additive = True

    def states(self, written, memory, normaliser, start=None, borders=None) -> States:
        products = written.key_features.transpose(-1, -2) @ written.value
        memories, last_memory = running_sum(products, memory, None if start is None else start[0], borders)
        normalisers, last_normaliser = normaliser_states(written, normaliser, start, borders)
        return States(memories, normalisers, last_memory, last_normaliser)

    @staticmethod
    def naive_write(memory, normaliser, features, values, log_weight, eps):
        return memory + features.mT @ values, normaliser + features.sum(-2)
