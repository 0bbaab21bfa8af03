"""The recipes' command lines: the fields of dataclasses are the options; flags override the entries of a YAML file.

Every recipe calls [`parse_options`] and decorates its `main` with [`exit_on_error`]. Nothing here imports hf_infini, which
takes seconds: `--help` answers at once.
"""

import argparse
import difflib
import operator
import sys
from collections.abc import Sequence
from dataclasses import field, fields
from pathlib import Path

from .errors import FAILURE_FILE, TRACEBACK, NotPossible, UserError, describe, exit_on_error, report_failure

__all__ = ["FAILURE_FILE", "NotPossible", "UserError", "describe", "exit_on_error", "option", "parse_options"]
__all__ += ["report_failure"]

# What an option's metadata may demand of its number, or of each in its list
BOUNDS = {"at_least": operator.ge, "greater_than": operator.gt, "at_most": operator.le, "below": operator.lt}


def option(default, help_text: str, **metadata):
    """A field of an options dataclass: its default and its help text (with the unit).

    `metadata` may have `choices`; the bounds of a number (`at_least=1`); `group`, the heading in `--help` of this option and
    those after it; and `rare=True` for an option that only `--help_all` shows, as it is mostly set in a file.
    """
    given = {"default_factory": default.copy} if isinstance(default, list) else {"default": default}
    return field(**given, metadata={"help": help_text, **metadata})


def parse_options(*option_classes: type, description: str, argv: Sequence[str] | None = None) -> tuple:
    """Parses flags, and the YAML file named by `--config`, into one instance of each dataclass.

    The file's entries become flags in front of the given ones: types and choices are checked in both, and a given flag wins.

    Args:
        option_classes: dataclasses; each field is an option, its `metadata["help"]` the help text (with the unit).
        description: shown by `--help`, usually the recipe's docstring.
        argv: the arguments without the program's name; `None` reads `sys.argv`.

    Exits with status 2 and a message on standard error when an option is unknown, missing or malformed. Raises UserError
    when a number is out of its bounds.
    """
    from .parser import GENERAL, OptionParser

    argv = list(sys.argv[1:] if argv is None else argv)
    parser = OptionParser(option_classes, description, show_all="--help_all" in argv)
    config = {"metavar": "FILE.yaml", "help": "YAML file of options; flags override its entries."}
    parser.group(GENERAL).add_argument("--config", **config)
    parser.group(GENERAL).add_argument(TRACEBACK, action="store_true", help="Show where an error comes from.")
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False, usage=parser.usage)
    finder.add_argument("--config", **config)
    file_name = finder.parse_known_args(argv)[0].config
    if file_name is not None:
        argv = _arguments_from_yaml(file_name, parser) + argv
    *options, _, unknown = parser.parse_args_into_dataclasses(argv, return_remaining_strings=True)
    if unknown:
        known = [flag for action in parser._actions for flag in action.option_strings]
        parser.error(f"unrecognised arguments: {' '.join(unknown)}{_nearest(unknown[0], known)}")
    for group in options:
        _check_bounds(group)
    return tuple(options)


def _check_bounds(options) -> None:
    for described in fields(options):
        bounds = {name: described.metadata[name] for name in BOUNDS if name in described.metadata}
        value = getattr(options, described.name)
        for number in value if isinstance(value, list) else [value]:
            if number is not None and not all(BOUNDS[name](number, bound) for name, bound in bounds.items()):
                wanted = " and ".join(f"{name.replace('_', ' ')} {bound}" for name, bound in bounds.items())
                raise UserError(f"--{described.name} must be {wanted}, got {number}")


def _arguments_from_yaml(file_name: str, parser) -> list[str]:
    import yaml

    path = Path(file_name)
    if not path.is_file():
        parser.error(f"--config: there is no file {file_name}")
    try:
        entries = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        parser.error(f"--config: {file_name} is not valid YAML: {error}")
    if not isinstance(entries, dict):
        parser.error(f"--config: {file_name} must hold `option: value` lines, got a {type(entries).__name__}")
    known = {action.dest for action in parser._actions} - {"help", "help_all", "config", "traceback"}
    arguments = []
    for name, value in entries.items():
        if name not in known:
            parser.error(f"--config: {file_name} has the unknown option {name!r}{_nearest(str(name), sorted(known))}")
        if value is None:  # `name:` with nothing behind it leaves the default
            continue
        values = value if isinstance(value, list) else [value]
        arguments += [f"--{name}", *map(str, values)]
    return arguments


def _nearest(name: str, known: Sequence[str]) -> str:
    matches = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {matches[0]}?" if matches else ""
