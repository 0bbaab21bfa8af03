"""The recipes' command lines: the fields of dataclasses are the options; flags override the entries of a YAML file.

Every recipe calls [`parse_options`] and decorates its `main` with [`exit_on_error`]. Nothing here imports hf_infini, which
takes seconds: `--help` answers at once.
"""

import argparse
import difflib
import math
import operator
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import MISSING, field, fields
from pathlib import Path

from .errors import FAILURE_FILE, TRACEBACK, NotPossible, UserError, describe, exit_on_error, report_failure

__all__ = ["FAILURE_FILE", "NotPossible", "UserError", "describe", "exit_on_error", "option", "parse_options"]
__all__ += ["parse_yaml", "read_yaml", "report_failure"]

# What an option's metadata may demand of its number, or of each in its list
BOUNDS = {"at_least": operator.ge, "greater_than": operator.gt, "at_most": operator.le, "below": operator.lt}
SEED = {"at_least": 0, "at_most": 2**32 - 1}  # NumPy's generators take no other
ADAPTER = "Adapter by recipes/convert.py to put on --model: a folder or a name on the Hub."
LISTS = ("+", "*")  # argparse's words for options that take several values
LARGEST = 2**63 - 1  # of whole numbers: what tensors and files can hold
_LARGEST_CONFIG = 1_000_000  # bytes of a YAML file


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
    when a number is out of its bounds or not finite, or a text is no text.
    """
    from .parser import GENERAL, OptionParser, show_no_bars_of_weights

    show_no_bars_of_weights()
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
        hints = _nearest(unknown[0], known) + _of_one_value(argv, parser)
        parser.error(f"unrecognised arguments: {' '.join(unknown)}{hints}")
    for group in options:
        _check(group)
    return tuple(options)


def bounds_in_words(metadata) -> str:
    """The bounds in an option's metadata, as a sentence has them: "at least 0 and below 1"; "" where there are none."""
    return " and ".join(f"{name.replace('_', ' ')} {metadata[name]}" for name in BOUNDS if name in metadata)


def _check(options) -> None:
    """UserError for a number that is out of its bounds, and for a text that no file, name or tokenizer can have."""
    for described in fields(options):
        bounds, given = described.metadata, getattr(options, described.name)
        is_needed = isinstance(given, str) and described.default in (MISSING, None)
        for value in given if isinstance(given, list) else [given]:
            if isinstance(value, str) and (problem := _problem_of_text(value, is_needed)):
                raise UserError(f"--{described.name} {value!r} {problem}")
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                continue
            possible = abs(value) <= LARGEST if isinstance(value, int) else math.isfinite(value)
            if not possible or not all(BOUNDS[name](value, bounds[name]) for name in BOUNDS if name in bounds):
                wanted = bounds_in_words(bounds) or "a finite number of at most 19 digits"
                raise UserError(f"--{described.name} must be {wanted}, got {value}")


def _problem_of_text(text: str, is_needed: bool) -> str | None:
    if is_needed and not text:
        return "is empty: give a value"
    if "\0" in text:
        return "holds a NUL character: take it out"
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return "is not UTF-8: write it in UTF-8, or give the file another name"
    return None


def read_yaml(path: Path, where: str, typed: bool = True) -> dict:
    """The mapping in a YAML file, in which no name may come twice.

    Args:
        path: the file.
        where: what errors begin with, such as "--config FILE".
        typed: whether numbers and booleans get YAML's types; otherwise they stay as they are written, as flags are.

    Raises:
        UserError: it is no such file.
    """
    if not path.is_file():
        raise UserError(f"{where}: there is no file of this name; give a YAML file of `name: value` lines")
    try:
        if path.stat().st_size > _LARGEST_CONFIG:
            raise UserError(f"{where} has more than {_LARGEST_CONFIG:,} bytes: give a YAML file of `name: value` lines")
        content = parse_yaml(path.read_text(encoding="utf-8-sig"), where, typed)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{where} cannot be read ({error}): give a YAML file of `name: value` lines, in UTF-8") from error
    if content is not None and not isinstance(content, dict):
        raise UserError(f"{where} must hold `name: value` lines, got a {type(content).__name__}")
    return content or {}


def parse_yaml(text: str, where: str, typed: bool = True):
    """What a YAML text says, see [`read_yaml`]."""
    import yaml

    kinds = ("null", "bool", "int", "float", "merge") if typed else ("null",)
    wanted = [f"tag:yaml.org,2002:{kind}" for kind in kinds]

    class Loader(yaml.SafeLoader):
        """PyYAML's, in which no name comes twice. From 6.0.4 on, merges of merges (`<<`) cannot make gigabytes of a few
        lines."""

        yaml_implicit_resolvers = {
            first: [(tag, pattern) for tag, pattern in entries if tag in wanted]
            for first, entries in yaml.SafeLoader.yaml_implicit_resolvers.items()
        }

        def compose_mapping_node(self, anchor):
            node = super().compose_mapping_node(anchor)
            names = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
            if twice := [name for name, count in names.items() if count > 1]:
                raise UserError(f"{where} has {twice[0]!r} twice: keep one of them")
            return node

    try:
        return yaml.load(text, Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"{where} is not valid YAML: {' '.join(str(error).split())}") from error


def _arguments_from_yaml(file_name: str, parser) -> list[str]:
    known = {action.dest for action in parser._actions} - {"help", "help_all", "config", "traceback"}
    lists = {action.dest for action in parser._actions if action.nargs in LISTS}
    arguments = []
    try:
        entries = read_yaml(Path(file_name), f"--config {file_name}", typed=False)
    except UserError as error:
        parser.error(str(error))
    for name, value in entries.items():
        if name not in known:
            parser.error(f"--config {file_name} has the unknown option {name!r}{_nearest(str(name), sorted(known))}")
        if value is None:  # `name:` with nothing behind it leaves the default
            continue
        values = value if isinstance(value, list) else [value]
        if not values or not all(isinstance(entry, str) for entry in values):
            parser.error(f"--config {file_name}: {name} must be a value or a list of values: [a, b]")
        if isinstance(value, list) and name not in lists:
            parser.error(f"--config {file_name}: {name} takes one value, got the list [{', '.join(values)[:99]}]")
        # With "=", so that a value may begin with a hyphen
        arguments += [f"--{name}={values[0]}"] if len(values) == 1 else [f"--{name}", *values]
    return arguments


def _of_one_value(argv: Sequence[str], parser) -> str:
    """Which of the given flags has several values and takes one; "" where none has."""
    flag, values = "", 0
    for word in argv:
        if word.startswith("--"):
            flag, equals, _ = word.partition("=")
            values = len(equals)
        elif flag in parser._option_string_actions and parser._option_string_actions[flag].nargs not in LISTS:
            values += 1
            if values == 2:
                return f"; {flag} takes one value"
    return ""


def _nearest(name: str, known: Sequence[str]) -> str:
    matches = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {matches[0]}?" if matches else ""
