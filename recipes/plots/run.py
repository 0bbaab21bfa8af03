"""Figures of a run: its losses, its perplexity by position."""

from pathlib import Path

from . import style


def plot_loss_curve(lines: list[dict], file: Path) -> None:
    """Training and validation loss over the tokens trained on.

    Args:
        lines: of a run's `metrics.jsonl`: `tokens` with `train_loss` or `eval_loss`, nats per token.
    """
    figure, axes = style.new_figure("Loss during the training")
    axes.set(xlabel="tokens trained on", ylabel="cross-entropy (nats per token)")
    for name, label in (("train_loss", "training"), ("eval_loss", "validation")):
        points = [(line["tokens"], line[name]) for line in lines if name in line]
        if points:
            style.draw_line(axes, *zip(*points, strict=True), label)
            style.set_panel_title(axes, f"{label} at the end: {points[-1][1]:.4f} nats per token")
    style.format_token_ticks(axes.xaxis)
    style.label_lines(axes)
    style.save(figure, file)


def plot_positions(tables: dict, file: Path, subtitle: str, trained: int | None = None) -> None:
    """Perplexity by position in the row, in log-2 buckets: a line for each table, at the middle of its buckets.

    Args:
        tables: the label of a line, or None, → `LossByPosition.table()`: rows with `first`, `last` and `perplexity`.
        subtitle: the model and the data.
        trained: tokens of the rows that the model was trained on, where that is known.
    """
    from matplotlib.ticker import FuncFormatter, NullLocator

    figure, axes = style.new_figure("Perplexity by position in the text", subtitle)
    axes.set(xlabel="tokens before the predicted one", ylabel="perplexity")
    for label, table in tables.items():
        middles = [(row["first"] * row["last"]) ** 0.5 for row in table]
        style.draw_line(axes, middles, [row["perplexity"] for row in table], label)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.xaxis.set_minor_locator(NullLocator())
    rows = [row for table in tables.values() for row in table]
    style.set_log_scale(axes.yaxis, [row["perplexity"] for row in rows])
    if trained is not None and any(row["last"] >= trained for row in rows):
        style.mark_across(axes, trained, "trained length")
    style.label_lines(axes)
    style.save(figure, file)
