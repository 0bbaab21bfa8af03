"""Keeps paths of a machine out of cards: shortens paths and commands, and looks through files for the rest."""

import re
import shlex
from pathlib import Path

TOKEN = re.compile(r"hf_[A-Za-z0-9]{30,}")
HOMES = re.compile(r"(?<![\w.:])/(?:home|Users|root)/[\w.@+-]+|[A-Za-z]:[\\/]{1,2}Users\b[^\s'\"`]*")


def shorten_path(text: str) -> str:
    """The last one or two components of an absolute path, or of one that begins with `~` or `..`; other text as it is.

    The first two name a machine and its user rather than a run: they are only shown where there is no other.
    """
    if not re.match(r"([A-Za-z]:)?[\\/]|~|\.\.[\\/]", text):
        return text
    parts = [part for part in re.split(r"^[A-Za-z]:|[\\/]", text) if part not in ("", ".", "..")]
    return "/".join(parts[2:][-2:] or parts[-1:])


def last_part(path: str) -> str:
    """The last component of a path of any system."""
    return re.split(r"[\\/]", path.rstrip("\\/"))[-1]


def shorten_command(command: str) -> str:
    """A shell command with its paths shortened, an option a line."""
    text = ""
    for word in shlex.split(command):
        name, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
        text += " \\\n    " if name else " "
        text += shlex.quote(name + equals + shorten_path(value))
    return text.strip()


def private_lines(text: str) -> list[str]:
    """`line number: finding`, for each token of the Hub (not spelled out) and each path in a home folder."""
    home = re.compile(rf"{re.escape(str(Path.home()))}(?=[\\/])[^\s'\"`]*")
    found = []
    for number, line in enumerate(text.split("\n"), start=1):
        found += [f"{number}: a token of the Hub ({token[:6]}…); revoke it" for token in TOKEN.findall(line)]
        paths = dict.fromkeys(match[0] for pattern in (HOMES, home) for match in pattern.finditer(line))
        found += [f"{number}: a path of a machine ({path})" for path in paths]
    return found
