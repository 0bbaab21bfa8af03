"""Markdown: tables that read well in a terminal too, and blocks of any text."""

import re
from collections.abc import Sequence


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]], left: int) -> str:
    """A table with columns as wide as their widest cell: the first `left` aligned on the left, the
    others on the right."""
    lines = [[str(cell).replace("|", "\\|") for cell in line] for line in (header, *rows)]
    columns = []
    for place, column in enumerate(zip(*lines, strict=True)):
        width, on_left = max(3, *map(len, column)), place < left
        head, *cells = (cell.ljust(width) if on_left else cell.rjust(width) for cell in column)
        columns.append([head, "-" * width if on_left else "-" * (width - 1) + ":", *cells])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in zip(*columns, strict=True))


def fence(text: str, language: str = "") -> str:
    """A fenced block that no run of backticks in the text can close."""
    longest = max(map(len, re.findall("`+", text)), default=0)
    ticks = "`" * max(3, longest + 1)
    return f"{ticks}{language}\n{text}\n{ticks}"
