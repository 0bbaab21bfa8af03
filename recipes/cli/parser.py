"""The parser of a recipe's options: transformers' parser of dataclasses, whose import takes half a
second, with groups."""

import argparse
import copy
import dataclasses
import typing
from collections.abc import Sequence

from huggingface_hub.utils import are_progress_bars_disabled, enable_progress_bars
from transformers import HfArgumentParser
from transformers.utils import logging

from . import BOUNDS, bounds_in_words
from .errors import TRACEBACK

GENERAL, OTHER = "general", "options"
CONFIG = {"metavar": "FILE.yaml", "help": "YAML file of options; flags override its entries."}


def show_no_bars_of_weights() -> None:
    """Weights are loaded and saved without progress bars; downloads from the Hub, which take
    minutes, keep theirs."""
    hub_has_bars = not are_progress_bars_disabled()
    logging.disable_progress_bar()
    if hub_has_bars:
        enable_progress_bars()


class Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows the description's lines as they are written, and the defaults that the help texts do
    not name."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        """Without the spelling that has hyphens for the underscores, which is understood but
        nowhere used."""
        shown, names = copy.copy(action), action.option_strings
        shown.option_strings = [name for name in names if "-" not in name.removeprefix("--")[1:]]
        return super()._format_action_invocation(shown)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        says_it = action.default in (None, [], argparse.SUPPRESS)
        return action.help if says_it else super()._get_help_string(action)


class OptionParser(HfArgumentParser):
    """transformers' parser with a group of options wherever a field's metadata names one:
    `option(…, group="data")`; a field without a name belongs to the group of the field before it. A
    group may have fields of several classes. `--help` leaves out the options whose metadata says
    `rare`, `--help_all` (`show_all`) shows them.

    Attributes:
        takes_lists: by the name of each option, whether it takes several values."""

    def __init__(self, option_classes: Sequence[type], description: str, show_all: bool = False):
        self._groups: dict[str, argparse._ArgumentGroup] = {}
        self._show_all, self._some_are_rare = show_all, False
        how = {"allow_abbrev": False, "add_help": False, "formatter_class": Help}
        super().__init__(option_classes, description=description, **how)
        self.takes_lists = {action.dest: action.nargs in ("+", "*") for action in self._actions}
        general = self.group(GENERAL)
        general.add_argument("-h", "--help", action="help", help="Show this and exit.")
        if self._some_are_rare:
            rare = "The same with the options that are rarely given."
            general.add_argument("--help_all", action="help", help=rare)
        general.add_argument("--config", **CONFIG)
        general.add_argument(TRACEBACK, action="store_true", help="Show where an error comes from.")
        given = [action for action in self._actions if action.required]
        words = [f"{action.option_strings[0]} {action.dest.upper()}" for action in given]
        self.usage = " ".join(["%(prog)s", *words, "[options]"])

    def config_in(self, argv: Sequence[str]) -> str | None:
        """The value of `--config`, if it is given."""
        finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False, usage=self.usage)
        finder.add_argument("--config", **CONFIG)
        return finder.parse_known_args(argv)[0].config

    def group(self, title: str) -> argparse._ArgumentGroup:
        """The group of this name, new at the end where there is none."""
        if title not in self._groups:
            self._groups[title] = self.add_argument_group(title)
        return self._groups[title]

    def _add_dataclass_arguments(self, option_class: type) -> None:
        types, title = typing.get_type_hints(option_class), OTHER
        for field in dataclasses.fields(option_class):
            shown, ours = copy.copy(field), ("group", "rare", *BOUNDS)  # the rest goes to argparse
            metadata = {name: value for name, value in field.metadata.items() if name not in ours}
            title, rare = field.metadata.get("group", title), field.metadata.get("rare", False)
            if words := bounds_in_words(field.metadata):
                metadata["help"] += f" {words.capitalize()}."
            self._some_are_rare |= rare
            if rare and not self._show_all:
                metadata["help"] = argparse.SUPPRESS
            shown.type, shown.metadata = types[field.name], metadata
            self._parse_dataclass_field(self.group(title), shown)
            off = self._option_string_actions.get(f"--no_{field.name}")
            if off and off.help != argparse.SUPPRESS:  # transformers gives it the help of the other
                off.help = f"The same as --{field.name} false."
