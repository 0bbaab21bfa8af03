"""The figure of a study: validation losses over the tokens, and their difference to the first
variant's."""

from pathlib import Path
from typing import TYPE_CHECKING

from . import style

if TYPE_CHECKING:
    from studies.report import FinishedRun


def plot_losses(runs: "list[FinishedRun]", file: Path) -> None:
    """Validation loss over the tokens trained on, a line for each variant (the mean over its
    seeds), and below it minus that of the first: below zero a variant is ahead."""
    import pandas

    columns = {}
    for run in runs:
        points = [line for line in run.lines if "eval_loss" in line]
        points = {line["tokens"]: line["eval_loss"] for line in points}
        columns[run.name] = pandas.Series(points, dtype=float)
    curves = pandas.DataFrame(columns).sort_index()
    curves = curves.T.groupby([run.variant for run in runs], sort=False).mean().T
    figure, panels = style.new_figure(
        "Validation loss", "cross-entropy, nats per token", rows=2, sharex=True
    )
    (above,), (below,) = panels
    style.set_panel_title(below, f"minus that of {curves.columns[0]}: below zero is better")
    for axes, lines in ((above, curves), (below, curves.sub(curves.iloc[:, 0], axis=0))):
        for name, line in lines.items():
            line = line.dropna()
            style.draw_line(axes, list(line.index), list(line), name)
    below.set_xlabel("tokens trained on")
    style.format_token_ticks(below.xaxis)
    style.label_lines(above)
    style.save(figure, file)
