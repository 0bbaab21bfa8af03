"""Plots of the recall tasks: accuracy by length and depth, and by the distance in segments."""

from pathlib import Path

from .run import figure_with_axes


def plot_passkey(cells: list[dict], file: Path, title: str) -> None:
    """A heat map of the accuracy; a cell that was not possible is grey.

    Args:
        cells: with `length`, `depth`, and `accuracy` where there is one.
    """
    import numpy as np
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    lengths, depths = (list(dict.fromkeys(cell[name] for cell in cells)) for name in ("length", "depth"))
    values = np.full((len(depths), len(lengths)), np.nan)
    for cell in cells:
        values[depths.index(cell["depth"]), lengths.index(cell["length"])] = cell.get("accuracy", np.nan)
    figure = Figure(figsize=(3 + 0.9 * len(lengths), 2.2 + 0.45 * len(depths)), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    image = axes.imshow(values, vmin=0, vmax=1, cmap=colormaps["Blues"].with_extremes(bad="0.88"), aspect="auto")
    for (row, column), value in np.ndenumerate(values):
        text, color = "–" if np.isnan(value) else f"{value:.0%}", "white" if value > 0.6 else "black"
        axes.text(column, row, text, ha="center", va="center", fontsize=9, color=color)
    axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
    axes.set_yticks(range(len(depths)), [f"{depth:g}" for depth in depths])
    axes.set(title=title, xlabel="length (tokens)", ylabel="depth of the number")
    figure.colorbar(image, ax=axes, label="exact answers")
    figure.savefig(file, format="png")


def plot_facts(cells: list[dict], file: Path, title: str) -> None:
    """Accuracy over the distance, with 95 % intervals, and what a constant guess reaches.

    Args:
        cells: with `distance`, and where they were possible `accuracy`, `low`, `high` and `chance`.
    """
    figure, axes = figure_with_axes(title, "segments between the fact and the question", "exact answers")
    places = {cell["distance"]: place for place, cell in enumerate(cells)}
    cells = [cell for cell in cells if "accuracy" in cell]
    x = [places[cell["distance"]] for cell in cells]
    y = [cell["accuracy"] for cell in cells]
    below = [cell["accuracy"] - cell["low"] for cell in cells]
    above = [cell["high"] - cell["accuracy"] for cell in cells]
    axes.errorbar(x, y, (below, above), marker="o", capsize=3, label="model, 95 % interval")
    axes.plot(x, [cell["chance"] for cell in cells], color="0.4", linestyle="--", label="the most frequent answers")
    axes.set_xticks(range(len(places)), [str(distance) for distance in places])
    axes.set_ylim(-0.02, 1.02)
    axes.legend()
    figure.savefig(file, format="png")
