"""The JSON file of a benchmark, written after every cell, and its rows as Markdown tables."""

import json
from collections.abc import Callable
from pathlib import Path

from cli import UserError
from support.markdown import markdown_table
from support.stages import write_json

MIB = 2**20
SETTINGS = ("tokens", "segment", "rows", "dtype")  # columns, where rows have them


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
            found = json.loads(self.file.read_text(encoding="utf-8"))
            other = [f"{name} {found.get(name)!r}" for name in setting.keys() - {"date"} if found.get(name) != setting[name]]
            if other:
                raise UserError(f"{self.file} was measured with {', '.join(sorted(other))}: choose another --out")
            self.content["cells"] = found["cells"]

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
    return {work: [row for row in rows if row["work"] == work] for work in dict.fromkeys(row["work"] for row in rows)}


def markdown(rows: list[dict]) -> str:
    """A table for each kind of work. Times are medians, with the fastest and slowest round beside them."""
    return "\n\n".join(f"**{work}**\n\n{_table(group)}" for work, group in tables_of(rows).items())


def _table(rows: list[dict]) -> str:
    settings = [name for name in SETTINGS if any(name in row for row in rows)]
    measures = {title: show for title, show in MEASURES.items() if any(show(row) for row in rows)} or {"": _skipped}
    lines = []
    for row in rows:
        words = [f"{row[name]:,}" if isinstance(row[name], int) else row[name] for name in settings]
        values = [show(row) for show in measures.values()]
        lines.append([row["name"], *words, _skipped(row) or values[0], *values[1:]])
    return markdown_table(["", *settings, *measures], lines, left=1)


def _skipped(row: dict) -> str:
    return f"skipped: {row['skipped']}" if "skipped" in row else ""


def _spread(name: str, form: str, unit: float = 1.0) -> Callable[[dict], str]:
    """Shows `1.52 (1.49 – 1.60)`; only `1` of the contestant that the ratios are to."""

    def show(row: dict) -> str:
        if name not in row:
            return ""
        middle, low, high = (format(row[name + end] / unit, form) for end in ("", "_lowest", "_highest"))
        return middle if low == high else f"{middle} ({low} – {high})"

    return show


def _number(name: str, form: str, unit: float = 1.0) -> Callable[[dict], str]:
    return lambda row: format(row[name] / unit, form) if name in row else ""


MEASURES = {
    "ms (fastest – slowest)": _spread("seconds", ",.2f", 1e-3),
    "ratio (spread)": _spread("ratio", ".2f"),
    "tokens/s": _number("tokens_per_second", ",.0f"),
    "peak, MiB": _number("peak_bytes", ",.1f", MIB),
    "ratio": _number("memory_ratio", ".2f"),
    "beyond q, k, v, out and gradients, × those": _number("extra", ".2f"),
    "cache, MiB": _number("cache_bytes", ",.1f", MIB),
}
