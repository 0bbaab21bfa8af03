"""Plots of recipes/benchmark.py: seconds and memory over the length. PNG files drawn without a display."""

from collections.abc import Sequence
from pathlib import Path

MIB = 2**20


def plot_attention(rows: list[dict], file: Path) -> None:
    """Seconds (upper row) and peak memory (lower row) over n, a column for each dtype and segment length.

    Args:
        rows: of `benchmarks.layer.attention_rows`, of any shapes and dtypes.
    """
    rows = [row for row in rows if "skipped" not in row]
    kinds = sorted({(row["dtype"], row["segment"]) for row in rows}, key=lambda kind: (kind[0] != "float32", kind[1]))
    names = list(dict.fromkeys(row["contestant"] for row in rows))
    figure, panels = _panels(2, len(kinds))
    for column, kind in zip(panels.T, kinds, strict=True):
        here = [row for row in rows if (row["dtype"], row["segment"]) == kind]
        for number, name in enumerate(names):
            own = sorted((row for row in here if row["contestant"] == name), key=lambda row: row["tokens"])
            _line(column[0], own, "tokens", "seconds", 1e3, name, number)
            _line(column[1], own, "tokens", "peak_bytes", 1 / MIB, name, number)
        column[0].set_title(f"{kind[0]}, L = {kind[1]:,}", fontsize=10)
        column[1].set_xlabel("n (tokens)")
    if kinds:
        panels[0, 0].set_ylabel("ms, forward + backward")
        panels[1, 0].set_ylabel("peak memory (MiB)")
        _legend(figure, panels.flat)
    figure.savefig(file)


def plot_scaling(rows: list[dict], memory_rows: list[dict], file: Path) -> None:
    """Seconds and memory over n, and over L the memory beyond the inputs, the output and their gradients.

    Args:
        rows: of `benchmarks.layer.scaling_rows`; memory_rows: of `memory_rows`.
    """
    figure, panels = _panels(1, 3)
    settings = (("tokens", "seconds", 1e3), ("tokens", "peak_bytes", 1 / MIB), ("segment", "extra", 1.0))
    names = list(dict.fromkeys((row["contestant"], row["dtype"]) for row in [*rows, *memory_rows]))
    for axes, (over, what, unit), source in zip(panels[0], settings, (rows, rows, memory_rows), strict=True):
        for number, name in enumerate(names):
            own = [row for row in source if (row["contestant"], row["dtype"]) == name and "skipped" not in row]
            _line(axes, own, over, what, unit, ", ".join(name), number)
    for axes, x_label, y_label in (
        (panels[0, 0], "n (tokens)", "ms, forward + backward"),
        (panels[0, 1], "n (tokens)", "peak memory (MiB)"),
        (panels[0, 2], "L (tokens in a segment)", "memory beyond q, k, v, out, gradients (× those)"),
    ):
        axes.set(xlabel=x_label, ylabel=y_label)
    panels[0, 2].set_yscale("linear")
    panels[0, 2].set_ylim(bottom=0)
    _legend(figure, panels.flat)
    figure.savefig(file)


def plot_options(rows: list[dict], file: Path) -> None:
    """How much longer a training step takes with one option changed: a bar each, a panel for each precision and context.

    Args:
        rows: of `benchmarks.whole_models.option_rows`.
    """
    _plot_ratios(rows, "change", "training step, × none changed", file)


def plot_compiled(rows: list[dict], file: Path) -> None:
    """How long training steps and new tokens take under torch.compile: a bar each, a panel for each precision and context.

    Args:
        rows: of `compiled_training_rows` and `compiled_decoding_rows` there.
    """
    _plot_ratios([row for row in rows if row["compiled"] == "yes"], "work", "compiled, × as it is", file)


def _plot_ratios(rows: list[dict], label: str, unit: str, file: Path) -> None:
    kinds = list(dict.fromkeys((row["precision"], row["context"]) for row in rows))
    figure, panels = _panels(1, len(kinds))
    for axes, kind in zip(panels[0], kinds, strict=True):
        own = [row for row in rows if (row["precision"], row["context"]) == kind]
        errors = [[abs(row["ratio"] - row["ratio" + end]) for row in own] for end in ("_lowest", "_highest")]
        axes.barh([row[label] for row in own], [row["ratio"] for row in own], xerr=errors)
        axes.axvline(1, color="grey", linewidth=0.8)
        axes.invert_yaxis()
        axes.set(xlabel=unit, title=f"{kind[0]}, context {kind[1]:,}")
    figure.savefig(file)


def plot_models(training_rows: list[dict], prefill_rows: list[dict], file: Path) -> None:
    """Tokens a second and memory of a training step over the context, and memory of reading a prompt over its length.

    Args:
        training_rows: of `benchmarks.whole_models.training_rows`; prefill_rows: of `prefill_rows`.
    """
    figure, panels = _panels(1, 3)
    settings = (("tokens_per_second", 1.0), ("peak_bytes", 1 / MIB))
    for number, name in enumerate(dict.fromkeys((row["model"], row["precision"]) for row in training_rows)):
        own = [row for row in training_rows if (row["model"], row["precision"]) == name]
        for axes, (what, unit) in zip(panels[0], settings, strict=False):
            _line(axes, [row for row in own if what in row], "context", what, unit, ", ".join(name), number)
    for number, name in enumerate(dict.fromkeys(row["model"] for row in prefill_rows)):
        own = [row for row in prefill_rows if row["model"] == name and "skipped" not in row]
        _line(panels[0, 2], own, "context", "peak_bytes", 1 / MIB, name, number)
    panels[0, 0].set(xlabel="context (tokens)", ylabel="tokens per second, training")
    panels[0, 1].set(xlabel="context (tokens)", ylabel="peak memory, training (MiB)")
    panels[0, 2].set(xlabel="prompt (tokens)", ylabel="peak memory over the weights, reading (MiB)")
    for axes in panels.flat:
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8)
    figure.savefig(file)


def plot_decoding(rows: list[dict], file: Path) -> None:
    """Cache size and time per new token over the context, both axes logarithmic.

    Args:
        rows: with `context`, `model`, `cache_bytes` and `seconds_per_token`.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.5), dpi=120, layout="constrained")
    panels = (("cache (MiB)", "cache_bytes", 2**-20), ("ms per new token", "seconds_per_token", 1e3))
    for axes, (label, name, unit) in zip(figure.subplots(1, 2), panels, strict=True):
        for model in dict.fromkeys(row["model"] for row in rows):
            points = [(row["context"], row[name] * unit) for row in rows if row["model"] == model]
            axes.plot(*zip(*points, strict=True), marker="o", label=model)
        axes.set(xlabel="context (tokens)", ylabel=label)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(file)


def _panels(rows: int, columns: int):
    """A figure with logarithmic panels, `[rows, columns]`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1 + 4.2 * max(1, columns), 1 + 3.8 * rows), dpi=110, layout="constrained")
    panels = figure.subplots(rows, max(1, columns), squeeze=False)
    for axes in panels.flat:
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.grid(alpha=0.3)
    return figure, panels[:, :columns]


def _line(axes, rows: Sequence[dict], over: str, what: str, unit: float, label: str, number: int) -> None:
    """A contestant's points, with the same colour and marker in every panel."""
    points = [(row[over], row[what] * unit) for row in rows if row[what] > 0]  # the axes are logarithmic
    if points:
        axes.plot(*zip(*points, strict=True), label=label, color=f"C{number % 10}", marker="osv^Dx+*<>p"[number % 11])


def _legend(figure, panels) -> None:
    """One legend for all panels, beside them."""
    found = {}
    for axes in panels:
        handles, labels = axes.get_legend_handles_labels()
        found |= dict(zip(labels, handles, strict=True))
    if found:
        figure.legend(found.values(), found.keys(), loc="outside right upper", fontsize=8)
