"""What this project writes in docstrings, in words that mkdocstrings reads: an extension of griffe.

transformers writes ``[`InfiniCache`]`` for a cross-reference and ``name (`int`, *optional*,
defaults to `0`):`` for an option. References to what the API pages hold become links, all others
plain code.
"""

import re
from pathlib import Path

import griffe

PAGES = Path(__file__).parent / "api"
REFERENCE = re.compile(r"\[`([\w.]+)`\](?!\[)")
OPTION = re.compile(
    r"^( *\w+) \(`([^`]+)`(, \*optional\*)?(?:, defaults to `?(.+?)`?)?\):$", re.MULTILINE
)


def documented() -> dict[str, str]:
    """Last part of each name on the API pages → the whole name, as `::: hf_infini.InfiniCache`
    gives it."""
    pages = "\n".join(page.read_text(encoding="utf-8") for page in sorted(PAGES.glob("*.md")))
    return {
        name.rpartition(".")[2]: name for name in re.findall(r"^::: ([\w.]+)$", pages, re.MULTILINE)
    }


class Docstrings(griffe.Extension):
    def __init__(self):
        self.known = documented()

    def on_object(self, *, obj, **kwargs) -> None:
        if obj.docstring is None:
            return
        text = REFERENCE.sub(self._reference, obj.docstring.value)
        obj.docstring.value = OPTION.sub(self._option, text)

    def _option(self, match: re.Match) -> str:
        name, kind, optional, default = match.groups()
        note = f"Default `{default}`." if default else "Optional." if optional else ""
        return f"{name} ({kind}): {note}"

    def _reference(self, match: re.Match) -> str:
        first, dot, rest = match[1].partition(".")
        return (
            f"[`{match[1]}`][{self.known[first]}{dot}{rest}]"
            if first in self.known
            else f"`{match[1]}`"
        )
