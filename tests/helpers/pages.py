"""What the pages tell a reader to run."""

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: str | Path) -> list[tuple[str, str]]:
    """The language and the text of each block of code of a page, in order."""
    return BLOCK.findall((ROOT / page).read_text(encoding="utf-8"))


def programs(page: str | Path) -> list[str]:
    """A page's blocks of Python."""
    return [text for language, text in blocks(page) if language == "python"]


def commands(text: str) -> list[list[str]]:
    """The words of each command of a block of bash, without comments."""
    lines = text.replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]
