"""The tables of a benchmark: rows of its JSON as Markdown. Times are medians, with the fastest and slowest beside them."""

from collections.abc import Iterable
from itertools import groupby

from support.markdown import markdown_table

from . import layer

MIB = 2**20


def machine_table(rows: list[dict]) -> str:
    """Rows of [`machine.measure`]."""
    lines = []
    for row in rows:
        unit = "GB/s" if row["unit"] == "bytes/s" else "GFLOP/s"
        what = f"copy of {row['size'] // MIB} MiB" if row["what"] == "copy" else f"{row['size']:,}² products, {row['what']}"
        lines.append((what, f"{row['rate_highest'] / 1e9:,.1f} {unit}", f"{row['rate'] / 1e9:,.1f} {unit}"))
    return markdown_table(("machine", "peak", "median"), lines, 1)


def attention_tables(rows: Iterable[dict], peaks: dict[str, float]) -> str:
    """A table for each shape and dtype, of rows of [`layer.attention_rows`]."""
    header = ["forward + backward", "ms (fastest – slowest)", "× infini (spread)", "memory, MiB", "× infini"]
    header += ["GFLOP", "share of products", "share of copy"]
    tables = []
    for (tokens, segment, dtype), group in groupby(rows, lambda row: (row["tokens"], row["segment"], row["dtype"])):
        lines = []
        for row in group:
            if "skipped" in row:
                lines.append([row["contestant"], f"skipped: {row['skipped']}", *[""] * 6])
                continue
            reached = layer.shares(row, peaks)
            lines.append(
                [
                    row["contestant"],
                    milliseconds(row),
                    ratio(row),
                    f"{row['peak_bytes'] / MIB:,.0f}",
                    f"{row['memory_ratio']:.2f}" if "memory_ratio" in row else "",
                    f"{row['operations'] / 1e9:,.2f}",
                    f"{reached['share_of_products']:.1%}",
                    f"{reached['share_of_copy']:.1%}",
                ]
            )
        tables.append(f"**n = {tokens:,}, L = {segment:,}, {dtype}**\n\n{markdown_table(header, lines, 1)}")
    return "\n\n".join(tables)


def scaling_table(rows: list[dict]) -> str:
    """Rows of [`layer.scaling_rows`]."""
    header = ("rule", "dtype", "L", "n", "ms (fastest – slowest)", "× half of n", "memory, MiB", "× half of n")
    lines = []
    for row in rows:
        start = [row["contestant"], row["dtype"], f"{row['segment']:,}", f"{row['tokens']:,}"]
        if "skipped" in row:
            lines.append([*start, f"skipped: {row['skipped']}", "", "", ""])
            continue
        grown = f"{row['memory_ratio']:.2f}" if "memory_ratio" in row else ""
        lines.append([*start, milliseconds(row), ratio(row), f"{row['peak_bytes'] / MIB:,.0f}", grown])
    return markdown_table(header, lines, 2)


def memory_table(rows: list[dict]) -> str:
    """Rows of [`layer.memory_rows`]."""
    header = ("rule", "dtype", "n", "L", "memory, MiB", "beyond q, k, v, out and gradients, × those")
    lines = []
    for row in rows:
        values = [row["skipped"], ""] if "skipped" in row else [f"{row['peak_bytes'] / MIB:,.0f}", f"{row['extra']:.2f}"]
        lines.append([row["contestant"], row["dtype"], f"{row['tokens']:,}", f"{row['segment']:,}", *values])
    return markdown_table(header, lines, 2)


def training_table(rows: list[dict]) -> str:
    """Rows of [`whole_models.training_rows`]."""
    header = ["training step", "precision", "context", "rows"]
    header += ["tokens/s (slowest – fastest)", "seconds, × infini", "peak, MiB"]
    lines = []
    for row in rows:
        start = [row["model"], row["precision"], f"{row['context']:,}", row["rows"]]
        peak = f"{row['peak_bytes'] / MIB:,.0f}" if "peak_bytes" in row else ""
        speed = [f"skipped: {row['skipped']}", ""] if "skipped" in row else [tokens_per_second(row), ratio(row)]
        lines.append([*start, *speed, peak])
    return markdown_table(header, lines, 2)


def options_table(rows: list[dict]) -> str:
    """Rows of [`whole_models.option_rows`]."""
    header = ("changed option", "precision", "context", "rows", "ms per training step", "× none changed")
    lines = []
    for row in rows:
        start = [row["change"], row["precision"], f"{row['context']:,}", row["rows"]]
        lines.append([*start, milliseconds(row), ratio(row)])
    return markdown_table(header, lines, 2)


def compiled_table(rows: list[dict]) -> str:
    """Rows of [`whole_models.compiled_training_rows`] and [`whole_models.compiled_decoding_rows`]."""
    header = ("infini", "torch.compile", "precision", "context", "rows", "ms (fastest – slowest)", "× as it is (spread)")
    lines = []
    for row in rows:
        start = [row["work"], row["compiled"], row["precision"], f"{row['context']:,}", row["rows"]]
        lines.append([*start, milliseconds(row), ratio(row)])
    return markdown_table(header, lines, 2)


def prefill_table(rows: list[dict]) -> str:
    """Rows of [`whole_models.prefill_rows`]."""
    header = ("prompt read in chunks", "dtype", "tokens", "chunk", "peak over weights, MiB")
    lines = []
    for row in rows:
        peak = f"skipped: {row['skipped']}" if "skipped" in row else f"{row['peak_bytes'] / MIB:,.1f}"
        lines.append([row["model"], row["dtype"], f"{row['context']:,}", f"{row['chunk']:,}", peak])
    return markdown_table(header, lines, 2)


def batch_table(rows: list[dict]) -> str:
    """Rows of [`whole_models.batch_rows`]."""
    header = ["padded batch", "dtype", "rows", "context"]
    header += ["new tokens/s (slowest – fastest)", "seconds, × infini", "cache, MiB"]
    lines = []
    for row in rows:
        start = [row["model"], row["dtype"], row["batch"], f"{row['context']:,}"]
        lines.append([*start, tokens_per_second(row), ratio(row), f"{row['cache_bytes'] / MIB:,.1f}"])
    return markdown_table(header, lines, 2)


def decoding_table(rows: list[dict]) -> str:
    """Rows of [`whole_models.decoding_rows`]."""
    header = ("context", "model", "cache, MiB", "ms per new token (fastest – slowest)", "× infini (spread)")
    lines = []
    for row in rows:
        cells = [f"{row['context']:,}", row["model"], f"{row['cache_bytes'] / MIB:,.1f}"]
        lines.append([*cells, milliseconds(row, "seconds_per_token"), ratio(row)])
    return markdown_table(header, lines, 2)


def milliseconds(row: dict, name: str = "seconds") -> str:
    """`12.3 (12.0 – 13.1)`, or `12.3, once`."""
    digits = 1 if row[name] >= 0.01 else 2
    middle, low, high = (f"{row[name + end] * 1e3:,.{digits}f}" for end in ("", "_lowest", "_highest"))
    return f"{middle} ({low} – {high})" if len(row["samples"]) > 1 else f"{middle}, once"


def ratio(row: dict) -> str:
    """`1.52 (1.49 – 1.60)`, `1.52`, or nothing where there is nothing to compare with."""
    if "ratio" not in row:
        return ""
    middle, low, high = (f"{row['ratio' + end]:.2f}" for end in ("", "_lowest", "_highest"))
    return middle if low == high else f"{middle} ({low} – {high})"


def tokens_per_second(row: dict) -> str:
    """`1,234 (1,200 – 1,250)`, or with a decimal where they are few."""
    values = [row["tokens_per_second" + end] for end in ("", "_lowest", "_highest")]
    middle, low, high = (f"{value:,.0f}" if values[0] >= 100 else f"{value:,.1f}" for value in values)
    return f"{middle} ({low} – {high})"
