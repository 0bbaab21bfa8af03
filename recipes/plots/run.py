"""Plots of a run: the loss curve, the gates, perplexity by position. All are PNG files drawn without a display."""

from pathlib import Path


def figure_with_axes(title: str, x_label: str, y_label: str, columns: int = 1):
    """An empty figure of the size and style that the plots share, and its axes (an array of them beside each other where
    there are several columns)."""
    from matplotlib.figure import Figure  # without pyplot: no global state, and Agg is the only backend it can meet

    figure = Figure(figsize=(8 if columns == 1 else 6.5 * columns, 5), dpi=120, layout="constrained")
    panels = figure.subplots(1, columns, squeeze=False)[0]
    for axes in panels:
        axes.set(title=title, xlabel=x_label, ylabel=y_label)
        axes.grid(alpha=0.3)
    return figure, panels[0] if columns == 1 else panels


def plot_loss_curve(lines: list[dict], file: Path) -> None:
    """Training and validation loss over the tokens trained on.

    Args:
        lines: of a run's `metrics.jsonl`: `tokens` with `train_loss` or `eval_loss`, nats per token.
    """
    figure, axes = figure_with_axes("Loss", "tokens", "cross-entropy (nats per token)")
    for name, label, style in (("train_loss", "training", {"alpha": 0.7}), ("eval_loss", "validation", {"marker": "o"})):
        points = [(line["tokens"], line[name]) for line in lines if name in line]
        if points:
            axes.plot(*zip(*points, strict=True), label=label, **style)
    axes.legend()
    figure.savefig(file, format="png")


def plot_gates(lines: list[dict], file: Path) -> None:
    """sigmoid(gate) of every head over the tokens trained on, one colour per layer.

    Args:
        lines: of a run's `metrics.jsonl`: those with `gates`, `{layer: [a value per head]}`, are drawn.
    """
    figure, axes = figure_with_axes("Gates of the memory, a line for each head", "tokens", "sigmoid(gate)")
    lines = [line for line in lines if "gates" in line]
    for number, layer in enumerate(lines[0]["gates"] if lines else ()):
        heads = axes.plot([line["tokens"] for line in lines], [line["gates"][layer] for line in lines], ".-")
        for head in heads:
            head.set(color=f"C{number % 10}", alpha=0.8)
        heads[0].set_label(f"layer {layer}")
    axes.set_ylim(0, 1)
    if lines:
        axes.legend()
    figure.savefig(file, format="png")


def plot_positions(table: list[dict], file: Path, title: str) -> None:
    """Perplexity by position in the context, in log-2 buckets.

    Args:
        table: `LossByPosition.table()`: rows with `first`, `last` and `perplexity`.
    """
    figure, axes = figure_with_axes(title, "position in the context (tokens before the predicted one)", "perplexity")
    add_positions(axes, table, None)
    figure.savefig(file, format="png")


def add_positions(axes, table: list[dict], label: str | None) -> None:
    """A line of perplexities over positions, as [`plot_positions`] draws one."""
    middles = [(row["first"] * row["last"]) ** 0.5 for row in table]
    axes.plot(middles, [row["perplexity"] for row in table], marker="o", label=label)
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
