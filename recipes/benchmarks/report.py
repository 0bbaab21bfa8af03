"""The JSON file of a benchmark, written after every cell, and its rows as Markdown tables."""

import json
from collections.abc import Callable
from itertools import groupby
from pathlib import Path

from cli import UserError
from support.markdown import markdown_table
from support.stages import write_json

MIB = 2**20
SETTINGS = {"tokens": "tokens", "segment": "segment", "rows": "rows", "dtype": "dtype"}  # columns, where rows have them


class Results:
    """Rows by what was measured and how, so that a benchmark that was killed measures only the rest.

    Args:
        file: read where it exists.
        setting: where things are measured, JSON-safe. A file of another setting (but for its date) is a UserError, since its
            figures would be in one table with these.
    """

    def __init__(self, file: Path, setting: dict):
        self.file, self.content = Path(file), {**setting, "cells": []}
        if self.file.is_file():
            try:
                found = json.loads(self.file.read_text(encoding="utf-8"))
                self.content["cells"] = found["cells"]
            except (OSError, ValueError, KeyError, TypeError):
                raise UserError(f"{self.file} was not written by this recipe: choose another --out") from None
            changed = [name for name in setting if name != "date" and found.get(name) != setting[name]]
            if changed:
                different = "; ".join(f"{name} {found.get(name)!r}, now {setting[name]!r}" for name in changed)
                raise UserError(f"{self.file} was measured with {different}: choose another --out")

    def rows(self, key: dict, measure: Callable[[], list[dict]]) -> list[dict]:
        """The rows of a cell, measured by `measure()` unless the file holds them."""
        key = json.loads(json.dumps(key))  # as the file gives it back
        for cell in self.content["cells"]:
            if cell["key"] == key:
                return cell["rows"]
        rows = measure()
        self.content["cells"].append({"key": key, "rows": rows})
        self.file.parent.mkdir(parents=True, exist_ok=True)
        write_json(self.file, self.content)
        return rows


def tables_of(rows: list[dict]) -> dict[str, list[dict]]:
    """The rows by the work that was measured."""
    return {work: list(group) for work, group in groupby(sorted(rows, key=lambda row: row["work"]), lambda row: row["work"])}


def markdown(rows: list[dict]) -> str:
    """A table for each kind of work. Times are medians, with the fastest and slowest round beside them."""
    return "\n\n".join(f"**{work}**\n\n{_table(group)}" for work, group in tables_of(rows).items())


def _table(rows: list[dict]) -> str:
    settings = [name for name in SETTINGS if any(name in row for row in rows)]
    measures = {title: show for title, show in MEASURES.items() if any(show(row) for row in rows)}
    lines = []
    for row in rows:
        words = [f"{row[name]:,}" if isinstance(row[name], int) else row[name] for name in settings]
        values = [show(row) for show in measures.values()]
        if "skipped" in row:
            values[0] = f"skipped: {row['skipped']}"
        lines.append([row["name"], *words, *values])
    return markdown_table(["", *settings, *(measures or {"ms": None})], lines, left=1)


def _times(row: dict) -> str:
    """`12.3 (12.0 – 13.1)`, or `12.3, once`."""
    if "seconds" not in row:
        return ""
    digits = 1 if row["seconds"] >= 0.01 else 2
    middle, low, high = (f"{row['seconds' + end] * 1e3:,.{digits}f}" for end in ("", "_lowest", "_highest"))
    return f"{middle} ({low} – {high})" if len(row["samples"]) > 1 else f"{middle}, once"


def _ratio(row: dict) -> str:
    """`1.52 (1.49 – 1.60)`, `1.52`, or nothing where there is nothing to compare with."""
    if "ratio" not in row:
        return ""
    middle, low, high = (f"{row['ratio' + end]:.2f}" for end in ("", "_lowest", "_highest"))
    return middle if low == high else f"{middle} ({low} – {high})"


def _number(name: str, form: str, unit: float = 1.0) -> Callable[[dict], str]:
    return lambda row: format(row[name] / unit, form) if name in row else ""


MEASURES = {
    "ms (fastest – slowest)": _times,
    "ratio (spread)": _ratio,
    "tokens/s": _number("tokens_per_second", ",.0f"),
    "peak, MiB": _number("peak_bytes", ",.1f", MIB),
    "ratio": _number("memory_ratio", ".2f"),
    "beyond q, k, v, out and gradients, × those": _number("extra", ".2f"),
    "cache, MiB": _number("cache_bytes", ",.1f", MIB),
}
