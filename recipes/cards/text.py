"""Text of model cards: paths and commands without a machine's folders, numbers as a reader writes them."""

import re
import shlex
from collections.abc import Iterable


def bullets(points: Iterable[str]) -> str:
    return "\n".join(f"- {point}" for point in points)


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


def plain(value) -> str:
    """A value as a reader writes it: true, 0.001, 1,200."""
    return str(value).lower() if isinstance(value, bool) else f"{value:,}" if isinstance(value, int) else str(value)


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def measured_on(files: Iterable[dict]) -> str:
    """The machine and day of JSONs that hold `hardware` and `date`, each pair once: `2 CPU cores, AMD EPYC, 2026-11-21`."""
    return "; ".join(dict.fromkeys(f"{file['hardware']}, {file['date'][:10]}" for file in files))


def position_cells(rows: Iterable[dict]) -> list[list[str]]:
    """Positions, tokens and perplexity of each of the `by_position` rows of an evaluation."""
    return [[f"{row['first']:,}–{row['last']:,}", f"{row['tokens']:,}", f"{row['perplexity']:,.2f}"] for row in rows]
