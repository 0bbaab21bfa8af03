"""Plots of what the heads did with a text: their attention weights, and their use of the memory."""

from pathlib import Path


def plot_heads(weights, labels: list[str], file: Path, title: str) -> None:
    """A heat map of each head's attention weights, on a scale of square roots that all of them share.

    Args:
        weights: numpy array `[heads, queries, keys]`, NaN where a key is not visible (drawn grey).
        labels: text of each token; where they would touch, only every second, third … is written.
    """
    import warnings

    from matplotlib import colormaps
    from matplotlib.colors import PowerNorm
    from matplotlib.figure import Figure

    columns = min(len(weights), 4)
    rows = -(-len(weights) // columns)
    figure = Figure(figsize=(1.5 + 3.4 * columns, 1.2 + 3.4 * rows), dpi=120, layout="constrained")
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    shown = range(0, len(labels), -(-len(labels) // 30))  # 30 lines of small print fit beside a panel
    texts = [labels[place] for place in shown]
    for axes in panels.flat[len(weights) :]:
        axes.set_axis_off()
    for head, axes in enumerate(panels.flat[: len(weights)]):
        image = axes.imshow(weights[head], norm=PowerNorm(0.5, 0, 1), cmap=colormaps["Blues"].with_extremes(bad="0.88"))
        axes.set_title(f"head {head}", fontsize=10)
        axes.set_xticks(shown, texts, rotation=90, fontsize=7, parse_math=False)
        axes.set_yticks(shown, texts, fontsize=7, parse_math=False)
        axes.tick_params(length=2)
    figure.colorbar(image, ax=panels, label="weight", shrink=0.8, ticks=[0, 0.01, 0.1, 0.25, 0.5, 1])
    figure.suptitle(title, parse_math=False)
    figure.supxlabel("key")
    figure.supylabel("query")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # letters that the font lacks are drawn as boxes
        figure.savefig(file)


def plot_memory(gates: dict, shares: dict, norms: dict, file: Path) -> None:
    """How much the heads of each layer use their memory, and how it grows; all arguments map layer to a numpy array.

    Args:
        gates: sigmoid(gate), `[heads]`.
        shares: the memory's share of each token's output `[heads, tokens]`, 0 where there is no memory yet; its mean over
            the other tokens is drawn.
        norms: of the memory as each segment reads it, and at the end, `[heads, segments + 1]`; a line for each head.
    """
    import numpy as np
    from matplotlib.figure import Figure

    heads, layers = len(next(iter(gates.values()))), list(gates)
    figure = Figure(figsize=(9 + 0.7 * heads, 4.5), dpi=120, layout="constrained")
    panels = figure.subplots(1, 3, width_ratios=[0.35 * heads, 0.35 * heads, 6])
    means = [[np.mean(head[head > 0]) if (head > 0).any() else np.nan for head in shares[layer]] for layer in layers]
    titles = ("gate: sigmoid(β)", "memory's mean share")
    for axes, title, values in zip(panels, titles, (list(gates.values()), means), strict=False):
        axes.imshow(values, vmin=0, vmax=1, cmap="Blues", aspect="auto")
        for place, value in np.ndenumerate(values):
            text = "–" if np.isnan(value) else f"{value:.2f}"
            axes.text(*place[::-1], text, ha="center", va="center", fontsize=8, color="white" if value > 0.6 else "black")
        axes.set(xlabel="head", ylabel="layer", xticks=range(heads))
        axes.set_title(title, fontsize=10)
        axes.set_yticks(range(len(layers)), layers)
    for number, layer in enumerate(layers):
        lines = panels[2].plot(norms[layer].T, ".-", color=f"C{number % 10}", alpha=0.8)
        lines[0].set_label(f"layer {layer}")
    panels[2].set(xlabel="segment that reads the memory (last point: the end of the text)", ylabel="Frobenius norm of M")
    panels[2].set_title("norm of the memory", fontsize=10)
    panels[2].set_ylim(bottom=0)
    panels[2].xaxis.get_major_locator().set_params(integer=True)
    panels[2].grid(alpha=0.3)
    panels[2].legend(fontsize=8)
    figure.savefig(file)
