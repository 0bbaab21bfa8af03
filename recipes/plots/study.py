"""The figures of a study: validation losses over the tokens, their difference to the first variant's, loss by position."""

from pathlib import Path
from typing import TYPE_CHECKING

from training.run_folder import trained_length

from . import style
from .run import plot_positions

if TYPE_CHECKING:
    from studies.report import FinishedRun


def draw(runs: "list[FinishedRun]", out: Path) -> dict[str, str]:
    """Draws into the folder `out` and returns the titles of the figures by their files; of runs on other data than the
    first one's, only loss by position, as their tokens are others."""
    same = [run for run in runs if run.data == runs[0].data]
    plot_losses(same, out / "loss.png")
    figures = {"loss.png": "Validation loss, and its difference to the first variant's"}
    for name in dict.fromkeys(name for run in same for name in run.evaluations):
        figures[f"evaluation_{name}.png"] = f"Perplexity by position: {name}"
        shown = [run for run in same if name in run.evaluations]
        lengths = {trained_length(run.result) for run in shown}
        tables = {run.name: run.evaluations[name]["by_position"] for run in shown}
        plot_positions(tables, out / f"evaluation_{name}.png", name, lengths.pop() if len(lengths) == 1 else None)
    return figures


def plot_losses(runs: "list[FinishedRun]", file: Path) -> None:
    """Validation loss over the tokens trained on, a line for each variant (the mean over its seeds), and below it minus that
    of the first: below zero a variant is ahead."""
    import pandas

    evaluated = {run.name: {line["tokens"]: line["eval_loss"] for line in run.lines if "eval_loss" in line} for run in runs}
    curves = pandas.DataFrame({name: pandas.Series(points, dtype=float) for name, points in evaluated.items()}).sort_index()
    curves = curves.T.groupby([run.variant for run in runs], sort=False).mean().T
    figure, panels = style.new_figure("Validation loss", "cross-entropy, nats per token", rows=2, sharex=True)
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
