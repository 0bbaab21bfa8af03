"""No memory: a token that leaves the window and is not kept is forgotten."""

from ..equations import MemoryRule


class Rule(MemoryRule):
    """Only the window, sinks and kept tokens: nothing is written or read, and there is no gate."""

    update_rule = "none"
    holds = False
    normalised = False

    @staticmethod
    def naive_write(memory, normaliser, features, values, log_weight, eps):
        return memory, normaliser
