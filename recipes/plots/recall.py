"""Figures of the recall tasks: exact answers by length and depth, and by the distance in segments."""

from pathlib import Path

from . import style

EMPTY = "#E3E3E3"  # a cell without a number


def plot_passkey(cells: list[dict], file: Path, subtitle: str, trained: int | None = None) -> None:
    """The share of right answers in each cell, with its 95 % interval below; a cell that was not possible is grey.

    Args:
        cells: with `length`, `depth`, and where they were possible `accuracy`, `low`, `high` and `samples`.
        subtitle: the model and the data.
        trained: tokens of the rows that the model was trained on, where that is known.
    """
    import numpy as np
    from matplotlib import colormaps
    from matplotlib.ticker import PercentFormatter

    lengths, depths = (list(dict.fromkeys(cell[name] for cell in cells)) for name in ("length", "depth"))
    values, texts = np.full((len(depths), len(lengths)), np.nan), {}
    for cell in cells:
        place = depths.index(cell["depth"]), lengths.index(cell["length"])
        if "accuracy" in cell:
            values[place] = cell["accuracy"]
            texts[place] = f"{cell['accuracy']:.0%}\n{100 * cell['low']:.0f}–{100 * cell['high']:.0f}"
    size = max(style.WIDTH, 1.6 + 0.75 * len(lengths)), max(style.HEIGHT, 1.7 + 0.45 * len(depths))
    figure, axes = style.new_figure("Hidden numbers found", f"{subtitle}\n{counted(cells)}", size=size)
    colours = colormaps["Blues"].with_extremes(bad=EMPTY)
    image = axes.imshow(np.ma.masked_invalid(values), vmin=0, vmax=1, cmap=colours, aspect="auto")
    axes.grid(False)
    axes.tick_params(length=0)
    for (row, column), value in np.ndenumerate(values):
        look = {"color": "white" if value > 0.6 else style.INK, "fontsize": style.SMALL, "linespacing": 1.1}
        axes.text(column, row, texts.get((row, column), "–"), ha="center", va="center", **look)
    axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
    axes.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
    axes.set(xlabel="length of the text (tokens)", ylabel="text before the number")
    shorter = sum(length <= trained for length in lengths) if trained is not None else 0
    if 0 < shorter < len(lengths) and lengths == sorted(lengths):
        axes.axvline(shorter - 0.5, color=style.INK, linestyle="--", linewidth=1.2)
        axes.set_xlabel(f"length of the text (tokens); dashed: the trained length, {trained:,}")
    bar = figure.colorbar(image, ax=axes, format=PercentFormatter(1, 0))
    bar.ax.tick_params(labelsize=8, length=0, labelcolor=style.INK)
    bar.outline.set_visible(False)
    style.save(figure, file)


def plot_facts(
    cells: list[dict], file: Path, subtitle: str, trained: int | None = None, segment_length: int | None = None
) -> None:
    """Right answers over the distance, with 95 % intervals, and what a constant guess reaches.

    Args:
        cells: with `distance`, and where they were possible `accuracy`, `low`, `high`, `samples` and `chance`.
        subtitle, trained: as in [`plot_passkey`].
        segment_length: tokens of a segment.
    """
    from matplotlib.ticker import PercentFormatter

    figure, axes = style.new_figure("Facts recalled", f"{subtitle}\n{counted(cells)}")
    axes.set(xlabel="segments between the fact and the question", ylabel="exact answers", ylim=(-0.02, 1.02))
    axes.set_xticks(range(len(cells)), [str(cell["distance"]) for cell in cells])
    axes.yaxis.set_major_formatter(PercentFormatter(1, 0))
    shown = [(place, cell) for place, cell in enumerate(cells) if "accuracy" in cell]
    x, y = [place for place, _ in shown], [cell["accuracy"] for _, cell in shown]
    around = [[max(0, cell["accuracy"] - cell["low"]) for _, cell in shown],
              [max(0, cell["high"] - cell["accuracy"]) for _, cell in shown]]  # fmt: skip
    axes.errorbar(x, y, around, color=style.COLOURS[0], capsize=3, linestyle="none")
    style.draw_line(axes, x, y, "model", **style.style_of(0))
    guess = [cell["chance"] for _, cell in shown]
    style.draw_line(axes, x, guess, "constant guess", **style.style_of(1) | {"linestyle": "--"})
    if trained is not None and segment_length is not None:
        shorter = sum(cell["distance"] * segment_length < trained for cell in cells)
        if 0 < shorter < len(cells):
            style.mark_across(axes, shorter - 0.5, "trained length")
    style.label_lines(axes)
    style.save(figure, file)


def counted(cells: list[dict]) -> str:
    """How many questions a rate is of, and what is beside it."""
    counts = sorted({cell["samples"] for cell in cells if "samples" in cell})
    each = f"{counts[0]:,}" if len(counts) == 1 else f"{counts[0]:,} to {counts[-1]:,}" if counts else "no"
    return f"{each} questions each, with the 95 % interval"
