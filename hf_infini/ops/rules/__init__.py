"""The update rules: [`MemoryRule`] itself, and the files here whose names are in
`options.UPDATE_RULES`."""

from importlib import import_module

from ...options import UPDATE_RULES
from ..equations import MemoryRule

RULES: dict[str, type[MemoryRule]] = {MemoryRule.update_rule: MemoryRule}
RULES |= {name: import_module(f"{__name__}.{name}").Rule for name in UPDATE_RULES[1:]}


def memory_rule(update_rule: str, **options) -> MemoryRule:
    """The rule named `update_rule`, with the options of [`MemoryRule`]; ValueError for another
    name."""
    if update_rule not in RULES:
        raise ValueError(f"update_rule must be one of {', '.join(RULES)}, got {update_rule!r}.")
    return RULES[update_rule](**options)
