"""The parser of a recipe's options: named groups of them, and the recipe's examples as they are written.

Imported when options are to be read; transformers' parser of dataclasses, which it is made of, takes half a second.
"""

import argparse
import copy
import dataclasses
import typing
from collections.abc import Sequence

from transformers import HfArgumentParser

from . import BOUNDS, UserError, report_failure

GENERAL, OTHER = "general", "options"


class Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Leaves the description's lines alone, and names the defaults that the help texts do not name themselves."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        """Without the spelling that has hyphens for the underscores, which is understood but nowhere used."""
        shown = copy.copy(action)
        shown.option_strings = [name for name in action.option_strings if "-" not in name.removeprefix("--")[1:]]
        return super()._format_action_invocation(shown)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default in (None, [], argparse.SUPPRESS) else super()._get_help_string(action)


class OptionParser(HfArgumentParser):
    """transformers' parser with a group of options wherever a field's metadata names one: `option(…, group="data")`.

    A field without a name belongs to the group of the field before it. Groups of one name are one, of all classes, and
    come in the order in which they are named first. Options whose metadata says `rare` are mostly set in a file: `--help`
    leaves them out, `--help_all` shows them.

    Args:
        option_classes: dataclasses; each field is an option.
        description: what `--help` shows above the options, usually the recipe's docstring.
        show_all: whether the help texts of rare options are shown.
    """

    def __init__(self, option_classes: Sequence[type], description: str, show_all: bool = False):
        self._groups: dict[str, argparse._ArgumentGroup] = {}
        self._show_all, self._some_are_rare = show_all, False
        super().__init__(option_classes, description=description, allow_abbrev=False, add_help=False, formatter_class=Help)
        self.add_to(GENERAL, "-h", "--help", action="help", help="Show this and exit.")
        if self._some_are_rare:
            self.add_to(GENERAL, "--help_all", action="help", help="The same with the options that are rarely given.")
        needed = [f"{action.option_strings[0]} {action.dest.upper()}" for action in self._actions if action.required]
        self.usage = " ".join(["%(prog)s", *needed, "[options]"])

    def add_to(self, group: str, *names: str, **arguments) -> None:
        """As `add_argument`, in the group of this name."""
        self._group(group).add_argument(*names, **arguments)

    def error(self, message: str) -> typing.NoReturn:
        report_failure(UserError.status, message)
        super().error(message)

    def _group(self, title: str):
        if title not in self._groups:
            self._groups[title] = self.add_argument_group(title)
        return self._groups[title]

    def _add_dataclass_arguments(self, option_class: type) -> None:
        types, title = typing.get_type_hints(option_class), OTHER
        for field in dataclasses.fields(option_class):
            title = field.metadata.get("group", title)
            shown = copy.copy(field)
            shown.type = types[field.name]
            ours = ("group", "rare", *BOUNDS)  # the rest goes to argparse
            shown.metadata = {name: value for name, value in field.metadata.items() if name not in ours}
            self._parse_dataclass_field(self._group(title), shown)
            if field.metadata.get("rare"):
                self._some_are_rare = True
                for action in self._actions:
                    if action.dest == field.name and not self._show_all:
                        action.help = argparse.SUPPRESS
