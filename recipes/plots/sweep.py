"""Plots over the runs of a sweep: a heat map for two options, otherwise a ranking."""

from pathlib import Path

from studies.sweeps import Row, best_of, loss_text

LOSS = "validation cross-entropy (nats per token)"


def plot_heat_map(rows: list[Row], grid: dict[str, list[str]], file: Path) -> None:
    """The cross-entropy of each combination of two options; the best is framed, what did not finish is grey.

    Args:
        rows: [`rows_of`] the sweep's runs; grid: the two options and their values, the first one's downwards.
    """
    import numpy as np
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    (down, down_values), (across, across_values) = grid.items()
    losses = np.full((len(down_values), len(across_values)), np.nan)
    figure = Figure(figsize=(3 + 1.3 * len(across_values), 1.8 + 0.6 * len(down_values)), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    places = [(down_values.index(row.values[down]), across_values.index(row.values[across])) for row in rows]
    for row, place in zip(rows, places, strict=True):
        losses[place] = row.mean if row.finished else np.nan
    image = axes.imshow(losses, cmap="viridis_r", aspect="auto")
    axes.set_facecolor("0.85")
    for row, (y, x) in zip(rows, places, strict=True):
        bright = row.finished and image.norm(row.mean) < 0.5  # the lower half of the reversed map is light
        text = loss_text(row).replace(" ±", "\n±").replace(" (", "\n(")
        axes.text(x, y, text, ha="center", va="center", fontsize=8, color="black" if bright or not row.finished else "white")
        if row is best_of(rows):
            axes.add_patch(Rectangle((x - 0.48, y - 0.46), 0.96, 0.92, fill=False, edgecolor="red", linewidth=2))
    axes.set_xticks(range(len(across_values)), across_values, rotation=30, ha="right")
    axes.set_yticks(range(len(down_values)), down_values)
    axes.set(xlabel=across, ylabel=down)
    figure.colorbar(image, label=LOSS)
    figure.savefig(file)


def plot_ranking(rows: list[Row], grid: dict[str, list[str]], file: Path) -> None:
    """The cross-entropy of each combination, the best at the top: the mean over the seeds, and each seed as a small dot."""
    from matplotlib.figure import Figure

    ranked = sorted((row for row in rows if row.finished), key=lambda row: row.mean)
    labels = [", ".join(row.values.values()) for row in ranked]
    figure = Figure(figsize=(8, 1.6 + 0.35 * len(ranked)), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    for place, row in enumerate(ranked):
        losses = [run.result["cross_entropy"] for run in row.finished]
        axes.plot(losses, [place] * len(losses), ".", color="0.6")
        axes.plot(row.mean, place, "o", color="C0")
    axes.set_yticks(range(len(ranked)), labels)
    axes.invert_yaxis()
    axes.set(xlabel=LOSS, ylabel=", ".join(grid))
    axes.grid(alpha=0.3)
    figure.savefig(file)
