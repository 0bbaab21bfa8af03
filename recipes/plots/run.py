"""Figures of a run: its losses, its gates, its perplexity by position."""

from pathlib import Path

from .style import (
    draw_line,
    label_lines,
    look_of,
    mark_across,
    new_figure,
    plain_logarithm,
    save,
    say_above,
    tokens_along,
)


def plot_loss_curve(lines: list[dict], file: Path) -> None:
    """Training and validation loss over the tokens trained on.

    Args:
        lines: of a run's `metrics.jsonl`: `tokens` with `train_loss` or `eval_loss`, nats per token.
    """
    figure, axes = new_figure("Loss during the training")
    axes.set(xlabel="tokens trained on", ylabel="cross-entropy (nats per token)")
    for name, label in (("train_loss", "training"), ("eval_loss", "validation")):
        points = [(line["tokens"], line[name]) for line in lines if name in line]
        if points:
            draw_line(axes, *zip(*points, strict=True), label)
            say_above(axes, f"{label} at the end: {points[-1][1]:.4f} nats per token")
    tokens_along(axes.xaxis)
    label_lines(axes)
    save(figure, file)


def plot_gates(lines: list[dict], file: Path) -> None:
    """sigmoid(gate) of every head over the tokens trained on, one colour and marker for each layer.

    Args:
        lines: of a run's `metrics.jsonl`: those with `gates`, `{layer: [a value per head]}`, are drawn.
    """
    lines = [line for line in lines if "gates" in line]
    figure, axes = new_figure("How much each head takes from the memory", "a line for each head; 0: nothing, 1: all of it")
    axes.set(xlabel="tokens trained on", ylabel="gate, sigmoid(β)", ylim=(0, 1))
    for number, layer in enumerate(sorted(lines[0]["gates"], key=int) if lines else ()):  # a checkpoint sorts the names
        look = look_of(number)
        for head in range(len(lines[0]["gates"][layer])):
            values = [line["gates"][layer][head] for line in lines]
            draw_line(axes, [line["tokens"] for line in lines], values, None if head else f"layer {layer}", **look)
    tokens_along(axes.xaxis)
    label_lines(axes)
    save(figure, file)


def plot_positions(table: list[dict], file: Path, subtitle: str, trained: int | None = None) -> None:
    """Perplexity by position in the row, in log-2 buckets.

    Args:
        table: `LossByPosition.table()`: rows with `first`, `last` and `perplexity`.
        subtitle: the model and the data.
        trained: tokens of the rows that the model was trained on, where that is known.
    """
    figure, axes = positions_figure(subtitle)
    add_positions(axes, table)
    end_positions(axes, [table], trained)
    save(figure, file)


def positions_figure(subtitle: str):
    """An empty figure of perplexities over positions; [`add_positions`] draws a line, [`end_positions`] the rest."""
    figure, axes = new_figure("Perplexity by position in the text", subtitle)
    axes.set(xlabel="tokens before the predicted one", ylabel="perplexity")
    return figure, axes


def add_positions(axes, table: list[dict], label: str | None = None) -> None:
    """A line of perplexities, each at the middle of its bucket."""
    draw_line(axes, [(row["first"] * row["last"]) ** 0.5 for row in table], [row["perplexity"] for row in table], label)


def end_positions(axes, tables: list[list[dict]], trained: int | None) -> None:
    """The axes of the lines that are drawn, and the trained length if they reach it."""
    from matplotlib.ticker import FuncFormatter, NullLocator

    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.xaxis.set_minor_locator(NullLocator())
    plain_logarithm(axes.yaxis, [row["perplexity"] for table in tables for row in table])
    if trained is not None and any(row["last"] >= trained for table in tables for row in table):
        mark_across(axes, trained, "trained length")
    label_lines(axes)
