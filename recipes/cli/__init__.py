"""The recipes' command lines: the fields of dataclasses are the options; flags override the entries
of a YAML file.

Every recipe calls [`parse_options`] and decorates its `main` with [`exit_on_error`]. Nothing here
imports hf_infini, which takes seconds: `--help` answers at once.
"""

import math
import operator
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import MISSING, field, fields
from pathlib import Path

from .errors import NotPossible, UserError, describe, exit_on_error, one_line

__all__ = ["NotPossible", "UserError", "describe", "exit_on_error", "needed", "one_line", "option"]
__all__ += ["parse_options", "parse_yaml", "read_yaml"]

# What an option's metadata may demand of its number, or of each in its list
BOUNDS = {"at_least": operator.ge, "greater_than": operator.gt}
BOUNDS |= {"at_most": operator.le, "below": operator.lt}
SEED = {"at_least": 0, "at_most": 2**32 - 1}  # NumPy's generators take no other
ADAPTER = (
    "Adapter of hf-infini fit or finetune_lora.py to put on --model: a folder or a name on the Hub."
)


def option(default, help_text: str, **metadata):
    """A field of an options dataclass: its default and its help text (with the unit).

    `metadata` may have `choices`; the bounds of a number (`at_least=1`); `group`, the heading in
    `--help` of this option and those after it; and `rare=True` for an option that only `--help_all`
    shows, as it is mostly set in a file.
    """
    given = {"default_factory": default.copy} if isinstance(default, list) else {"default": default}
    return field(**given, metadata={"help": help_text, **metadata})


def needed(help_text: str, **metadata):
    """A field that must be given; otherwise as [`option`]."""
    return field(metadata={"help": help_text, **metadata})


def parse_options(
    *option_classes: type, description: str, argv: Sequence[str] | None = None
) -> tuple:
    """Parses flags, and the YAML file named by `--config`, into one instance of each dataclass.

    The file's entries become flags in front of the given ones: types and choices are checked in
    both, and a given flag wins.

    Args:
        option_classes: dataclasses; each field is an option.
        description: shown by `--help`, usually the recipe's docstring.
        argv: the arguments without the program's name; `None` reads `sys.argv`.

    Exits with status 2 and a message on standard error when an option is unknown, missing or
    malformed. Raises UserError when a number is out of its bounds or not finite, a needed text is
    empty, or an entry of the file is not possible.
    """
    from .parser import OptionParser, show_no_bars_of_weights

    show_no_bars_of_weights()
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = OptionParser(option_classes, description, show_all="--help_all" in argv)
    file_name = parser.config_in(argv)
    if file_name is not None:
        argv = _flags_of_file(file_name, parser.takes_lists) + argv
    how = {"return_remaining_strings": True, "look_for_args_file": False}
    *options, _, unknown = parser.parse_args_into_dataclasses(argv, **how)
    if unknown:
        parser.error(f"unrecognised arguments: {' '.join(unknown)}")
    for group in options:
        _check(group)
    return tuple(options)


def bounds_in_words(metadata) -> str:
    """The bounds in an option's metadata, as a sentence has them: "at least 0 and below 1"; ""
    where there are none."""
    given = [name for name in BOUNDS if name in metadata]
    return " and ".join(f"{name.replace('_', ' ')} {metadata[name]}" for name in given)


def _check(options) -> None:
    """UserError for a number that is out of its bounds, and for an empty text that is needed."""
    for described in fields(options):
        bounds, given = described.metadata, getattr(options, described.name)
        if given == "" and described.default in (MISSING, None):
            raise UserError(f"--{described.name} '' is empty: give a value")
        for value in given if isinstance(given, list) else [given]:
            if isinstance(value, bool) or not isinstance(value, int | float):
                continue
            kept = [
                is_kept(value, bounds[name]) for name, is_kept in BOUNDS.items() if name in bounds
            ]
            if not (math.isfinite(value) and all(kept)):
                wanted = bounds_in_words(bounds) or "a finite number"
                raise UserError(f"--{described.name} must be {wanted}, got {value}")


def read_yaml(path: Path, where: str, typed: bool = True) -> dict:
    """The mapping in a YAML file, see [`parse_yaml`]; a UserError where there is none."""
    try:
        content = parse_yaml(path.read_text(encoding="utf-8-sig"), where, typed)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"{where} cannot be read ({error}): give a YAML file of `name: value` lines, in UTF-8"
        ) from error
    if not isinstance(content, dict | None):
        raise UserError(f"{where} must hold `name: value` lines, got a {type(content).__name__}")
    return content or {}


def parse_yaml(text: str, where: str, typed: bool = True):
    """What a YAML text says, in which no name may come twice; a UserError, which begins with
    `where`, if it is none.

    `typed`: whether values get YAML's types; otherwise they are text as it is written, as flags
    are.
    """
    import yaml

    class Loader(yaml.SafeLoader if typed else yaml.BaseLoader):
        def compose_mapping_node(self, anchor):
            node = super().compose_mapping_node(anchor)
            names = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
            if twice := [name for name, count in names.items() if count > 1]:
                raise UserError(f"{where} has {twice[0]!r} twice: keep one of them")
            return node

    try:
        return yaml.load(text, Loader)
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        raise UserError(f"{where} is not valid YAML: {one_line(error)}") from error


def _flags_of_file(file_name: str, takes_lists: dict[str, bool]) -> list[str]:
    where, flags = f"--config {file_name}", []
    for name, value in read_yaml(Path(file_name), where, typed=False).items():
        if name not in takes_lists:
            raise UserError(f"{where} has the unknown option {name!r}")
        values = value if isinstance(value, list) else [value]
        if not values or not all(isinstance(entry, str) for entry in values):
            raise UserError(f"{where}: {name} must be a value or a list of values: [a, b]")
        if isinstance(value, list) and not takes_lists[name]:
            raise UserError(f"{where}: {name} takes one value, got a list")
        if value not in ("", "~", "null"):  # which leave the default
            # With "=", so that a value may begin with a hyphen
            flags += [f"--{name}={values[0]}"] if len(values) == 1 else [f"--{name}", *values]
    return flags
