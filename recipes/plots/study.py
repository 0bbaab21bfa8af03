"""The figures of a study: validation losses over the tokens, their difference to the first variant's, loss by position."""

from pathlib import Path
from typing import TYPE_CHECKING

from .run import add_positions, figure_with_axes

if TYPE_CHECKING:
    from studies.report import Finished


def draw(runs: "list[Finished]", baselines: list[dict], out: Path) -> dict[str, str]:
    """Draws into the folder `out` and returns the titles of the figures by their files; of runs on other data than the
    first one's, only loss by position, as their tokens are others."""
    same = [run for run in runs if run.data == runs[0].data]
    plot_losses(same, {ngram["name"]: ngram["cross_entropy"] for ngram in baselines}, out / "loss.png")
    figures = {"loss.png": "Validation loss, and its difference to the first variant's"}
    for name in dict.fromkeys(name for run in same for name in run.evaluations):
        title = f"Perplexity by position: {name}"
        figures[f"evaluation_{name}.png"] = title
        figure, axes = figure_with_axes(title, "position (tokens before the predicted one)", "perplexity")
        for run in same:
            if name in run.evaluations:
                add_positions(axes, run.evaluations[name]["by_position"], run.name)
        axes.legend(fontsize=8)
        figure.savefig(out / f"evaluation_{name}.png")
    return figures


def plot_losses(runs: "list[Finished]", levels: dict[str, float], file: Path) -> None:
    """Validation loss over the tokens trained on, a line for each variant (the mean over its seeds), and beside it minus
    that of the first: below zero a variant is ahead.

    Args:
        levels: name → cross-entropy of what is not trained in steps, drawn as a horizontal line with its name beside it.
    """
    import pandas

    evaluated = {run.name: {line["tokens"]: line["eval_loss"] for line in run.lines if "eval_loss" in line} for run in runs}
    curves = pandas.DataFrame({name: pandas.Series(points, dtype=float) for name, points in evaluated.items()}).sort_index()
    curves = curves.T.groupby([run.variant for run in runs], sort=False).mean().T
    figure, axes = figure_with_axes("Validation loss", "tokens trained on", "cross-entropy (nats per token)", columns=2)
    for panel, lines in zip(axes, (curves, curves.sub(curves.iloc[:, 0], axis=0)), strict=True):
        for name, line in lines.items():
            panel.plot(line.dropna(), marker=".", label=name)
    axes[1].set(title=f"minus that of {curves.columns[0]}", ylabel="difference (nats per token)")
    for name, loss in levels.items():
        axes[0].axhline(loss, color="0.4", linestyle="--", linewidth=1)
        axes[0].annotate(
            f"{name} {loss:.3f}", (1, loss), xycoords=("axes fraction", "data"), ha="right", va="bottom", fontsize=8
        )
    axes[0].legend(fontsize=8)
    figure.savefig(file)
