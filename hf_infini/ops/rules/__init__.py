"""The update rules: [`MemoryRule`] itself, and the files here whose names are in
`options.UPDATE_RULES`. Without a memory, by the name "none", there is no rule."""

from importlib import import_module
from typing import Any

from ...options import UPDATE_RULES
from ..equations import MemoryRule

RULES: dict[str, type[MemoryRule]] = {MemoryRule.update_rule: MemoryRule}
RULES |= {
    name: import_module(f"{__name__}.{name}").Rule for name in UPDATE_RULES[1:] if name != "none"
}


def memory_rule(update_rule: str, **options) -> MemoryRule | None:
    """The rule named `update_rule`, with the options of [`MemoryRule`]; `None` for "none".
    ValueError for another name, or such options."""
    if update_rule not in UPDATE_RULES:
        raise ValueError(
            f"update_rule must be one of {', '.join(UPDATE_RULES)}, got {update_rule!r}."
        )
    rule = RULES.get(update_rule, MemoryRule)(**options)  # checks them
    return rule if update_rule in RULES else None


def rule_of(config: Any) -> MemoryRule | None:
    """The rule of a model with this `config`, [`MemoryOptions`]; `None`: it has no memory."""
    return memory_rule(config.update_rule, feature_map=config.feature_map)
