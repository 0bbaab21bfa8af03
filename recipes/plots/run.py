"""The figure of a run: its losses."""

from pathlib import Path

from . import style


def plot_loss_curve(lines: list[dict], file: Path) -> None:
    """Training and validation loss over the tokens trained on.

    Args:
        lines: of a run's `metrics.jsonl`: `tokens` with `train_loss` or `eval_loss`, nats per
            token.
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
