"""The rows of a benchmark as Markdown tables."""

from collections.abc import Callable

from support.markdown import markdown_table

MIB = 2**20
SETTINGS = ("tokens", "segment", "rows", "dtype")  # columns, where rows have them


def markdown(rows: list[dict]) -> str:
    """A table for each kind of work. Times are medians, with the fastest and slowest round beside
    them."""
    works = dict.fromkeys(row["work"] for row in rows)
    tables = {work: _table([row for row in rows if row["work"] == work]) for work in works}
    return "\n\n".join(f"**{work}**\n\n{table}" for work, table in tables.items())


def _table(rows: list[dict]) -> str:
    settings = [name for name in SETTINGS if any(name in row for row in rows)]
    shown = {title: show for title, show in MEASURES.items() if any(show(row) for row in rows)}
    measures, lines = shown or {"": _skipped}, []
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
        middle, low, high = (
            format(row[name + end] / unit, form) for end in ("", "_lowest", "_highest")
        )
        return middle if low == high else f"{middle} ({low} – {high})"

    return show


def _number(name: str, form: str, unit: float = 1.0) -> Callable[[dict], str]:
    return lambda row: format(row[name] / unit, form) if name in row else ""


MEASURES = {
    "ms (fastest – slowest)": _spread("seconds", ",.2f", 1e-3),
    "ratio (spread)": _spread("ratio", ".2f"),
    "in a CUDA graph, ms": _spread("graph", ",.3f", 1e-3),
    "tokens/s": _number("tokens_per_second", ",.0f"),
    "peak, MiB": _number("peak_bytes", ",.1f", MIB),
    "beyond q, k, v, out and gradients, × those": _number("extra", ".2f"),
    "cache, MiB": _number("cache_bytes", ",.1f", MIB),
    "archive, MiB": _number("archive_bytes", ",.1f", MIB),
}
