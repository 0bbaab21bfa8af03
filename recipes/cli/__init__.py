"""The recipes' command lines: the fields of dataclasses are the options; flags override the entries of a YAML file.

Every recipe calls [`parse_options`] and wraps its `main` in [`exit_on_user_error`]. Nothing here imports hf_infini, which
takes seconds: `--help` answers at once.
"""

import argparse
import difflib
import functools
import json
import operator
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import field, fields
from pathlib import Path

# A program that starts recipes names in this environment variable the file that takes why one failed, as JSON
# (`{"status", "reason"}`). An exit status would not do: launchers of distributed runs have their own.
FAILURE_FILE = "HF_INFINI_FAILURE_FILE"
# What an option's metadata may demand of its number, or of each in its list
BOUNDS = {"at_least": operator.ge, "greater_than": operator.gt, "at_most": operator.le, "below": operator.lt}


class UserError(Exception):
    """Something that the user can mend (a wrong path, a damaged file, options that clash): shown without a traceback."""

    status, prefix = "failed", ""

    def __str__(self) -> str:
        return self.prefix + super().__str__()


class NotPossible(UserError):
    """Options that no model can have together: a grid of runs lists them and is no failure for it."""

    status, prefix = "not possible", "these model options do not go together: "


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


def exit_on_user_error(main: Callable[..., None]) -> Callable[..., None]:
    """Decorator: a [`UserError`] inside `main`, or a package that is not installed, becomes one line on standard error and
    exit status 1."""

    @functools.wraps(main)
    def wrapper(*args, **kwargs):
        try:
            main(*args, **kwargs)
        except UserError as error:
            shown, status, reason = str(error), error.status, error.args[0]
        except ModuleNotFoundError as error:
            if error.name is None or "." in error.name:  # a module of a package that is there: no matter of installing
                raise
            shown, status = f"{error.name} is not installed: pip install 'hf-infini[recipes]'", UserError.status
            reason = shown
        else:
            return
        report_failure(status, reason)
        print(f"error: {shown}", file=sys.stderr)
        raise SystemExit(1)

    return wrapper


def report_failure(status: str, reason: str) -> None:
    """Tells the program that started this one why it fails, see [`FAILURE_FILE`]; without one, does nothing."""
    if file := os.environ.get(FAILURE_FILE):
        part = Path(f"{file}.{os.getpid()}")  # of several processes the last one's is kept, whole
        part.write_text(json.dumps({"status": status, "reason": reason}), encoding="utf-8")
        os.replace(part, file)


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
    known = {action.dest for action in parser._actions} - {"help", "help_all", "config"}
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
