"""The plot of a part of recipes/benchmark.py: time and memory over the length, or as bars where there is one length."""

from pathlib import Path

from .run import figure_with_panels

MEASURES = {"seconds": ("ms", 1e3), "peak_bytes": ("peak memory (MiB)", 2**-20), "cache_bytes": ("cache (MiB)", 2**-20)}


def plot_benchmark(tables: dict[str, list[dict]], file: Path) -> None:
    """A row of panels for each kind of work.

    Args:
        tables: kind of work → rows of `benchmarks.parts`.
    """
    figure, panels = figure_with_panels(len(tables), len(MEASURES), (5.5, 4))
    for line, (work, rows) in zip(panels, tables.items(), strict=True):
        over = next((name for name in ("tokens", "segment") if len({row.get(name) for row in rows}) > 1), None)
        for axes, (measure, (label, unit)) in zip(line, MEASURES.items(), strict=True):
            found = [row for row in rows if row.get(measure, 0) > 0]
            if not found:
                axes.set_axis_off()
            elif over is None:
                axes.barh([_label(row, over) for row in found], [row[measure] * unit for row in found])
                axes.invert_yaxis()
                axes.set(title=work, xlabel=label)
            else:
                for name in dict.fromkeys(_label(row, over) for row in found):
                    points = sorted((row[over], row[measure] * unit) for row in found if _label(row, over) == name)
                    axes.plot(*zip(*points, strict=True), marker="o", label=name)
                axes.set(title=work, xlabel=over, ylabel=label, yscale="log")
                axes.set_xscale("log", base=2)
                axes.legend(fontsize=7)
    figure.savefig(file)


def _label(row: dict, over: str | None) -> str:
    """What a row is beside what it is drawn over."""
    segment = f"L = {row['segment']:,}" if over == "tokens" and "segment" in row else None
    return ", ".join(word for word in (row["name"], row.get("dtype"), segment) if word)
