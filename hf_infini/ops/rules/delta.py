"""The delta rule, as in the paper: M ← M + σ(K)ᵀ (V − σ(K) M / (σ(K) z + ε)),  z ← z + Σ σ(k)."""

from ..memory import States
from .base import MemoryRule, normaliser_states
from .scan import DeltaScan


class Rule(MemoryRule):
    """A segment's values are added, minus what the memory already returns for their keys."""

    update_rule = "delta"

    def states(self, written, memory, normaliser, start=None, borders=None) -> States:
        """The rule is affine in M. Where a segment has as many tokens as a head is wide, its matrix and its constant are
        made for all blocks at once, so that the loop over blocks touches the state only."""
        normalisers, last_normaliser = normaliser_states(written, normaliser, start, borders)
        features, value, continues = written.key_features, written.value, None
        scaled = features / ((features * normalisers.unsqueeze(-2)).sum(-1, keepdim=True) + self.eps)
        if borders is not None:
            features, continues = features * borders.wrote, borders.continues
        keys = features.transpose(-1, -2)
        # In shorter segments two thin products a block cost less than one D × D matrix a block
        thin = features.shape[-2] < features.shape[-1]
        factors = (value, keys, scaled) if thin else (keys @ value, None, keys @ scaled)
        first_memory = None if borders is None or start is None else start[0]
        memories, last_memory = DeltaScan.apply(*factors, None, memory, continues, first_memory)
        return States(memories, normalisers, last_memory, last_normaliser)

    @staticmethod
    def naive_write(memory, normaliser, features, values, log_weight, eps):
        retrieved = features @ memory / (features @ normaliser.unsqueeze(-1) + eps)
        return memory + features.mT @ (values - retrieved), normaliser + features.sum(-2)
