"""Markdown: tables that read well in a terminal too, and blocks of any text."""

import re
from collections.abc import Sequence


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]], left: int) -> str:
    """A table with columns as wide as their widest cell: the first `left` aligned on the left, the
    others on the right."""
    lines = [[str(cell).replace("|", "\\|") for cell in line] for line in (header, *rows)]
    widths = [max(3, *map(len, column)) for column in zip(*lines, strict=True)]
    aligned = [
        [
            cell.ljust(width) if place < left else cell.rjust(width)
            for place, (cell, width) in enumerate(cells)
        ]
        for cells in (zip(line, widths, strict=True) for line in lines)
    ]
    rule = [
        "-" * width if place < left else "-" * (width - 1) + ":"
        for place, width in enumerate(widths)
    ]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (aligned[0], rule, *aligned[1:]))


def fence(text: str, language: str = "") -> str:
    """A fenced block that no run of backticks in the text can close."""
    longest = max(map(len, re.findall("`+", text)), default=0)
    ticks = "`" * max(3, longest + 1)
    return f"{ticks}{language}\n{text}\n{ticks}"
