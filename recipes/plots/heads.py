"""Figures of what the heads did with a text: their attention weights, and their use of the memory."""

from pathlib import Path

from .style import (
    EMPTY,
    INK,
    SMALL,
    WIDTH,
    draw_line,
    heat_map,
    label_lines,
    look_of,
    new_figure,
    plain_numbers,
    save,
    say_above,
)


def plot_heads(weights, labels: list[str], file: Path, title: str) -> None:
    """A heat map of each head's attention weights, on a scale of square roots that all of them share.

    Args:
        weights: numpy array `[heads, queries, keys]`, NaN where a key is not visible (drawn grey).
        labels: text of each token; where they would touch, only every second, third … is written.
    """
    import warnings

    from matplotlib import colormaps
    from matplotlib.colors import PowerNorm

    columns = min(len(weights), 2)
    rows = -(-len(weights) // columns)
    figure, panels = new_figure(title, "", rows, columns, (WIDTH, 1.2 + 4.6 / columns * rows), sharex=True, sharey=True)
    panels = [panels] if len(weights) == 1 else [*panels.flat]
    shown = range(0, len(labels), -(-len(labels) // (32 // columns)))  # so many lines of small print fit beside a panel
    texts = [labels[place] for place in shown]
    for axes in panels[len(weights) :]:
        axes.set_axis_off()
    for head, axes in enumerate(panels[: len(weights)]):
        image = axes.imshow(weights[head], norm=PowerNorm(0.5, 0, 1), cmap=colormaps["Blues"].with_extremes(bad=EMPTY))
        say_above(axes, f"head {head}")
        axes.grid(False)
        axes.set_xticks(shown, texts, rotation=90, fontsize=7.5, parse_math=False)
        axes.set_yticks(shown, texts, fontsize=7.5, parse_math=False)
        axes.tick_params(length=2)
    bar = figure.colorbar(image, ax=panels, shrink=min(1, 1.5 / rows), fraction=0.05, ticks=[0, 0.01, 0.1, 0.25, 0.5, 1])
    bar.set_label("weight", color=INK, fontsize=SMALL)
    bar.ax.tick_params(labelsize=8, labelcolor=INK, color=INK)
    figure.supxlabel("token that is looked at", fontsize=SMALL)
    figure.supylabel("token that looks", fontsize=SMALL)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # letters that the font lacks are drawn as boxes
        save(figure, file)


def plot_memory(gates: dict, shares: dict, norms: dict, file: Path, subtitle: str = "") -> bool:
    """How much the heads of each layer use their memory, and how it grows; all arguments map layer to a numpy array. Layers
    whose memory no token reads are left out; returns whether there are others.

    Args:
        gates: sigmoid(gate), `[heads]`.
        shares: the memory's share of each token's output `[heads, tokens]`, 0 where there is no memory yet; its mean over
            the other tokens is drawn.
        norms: of the memory as each segment reads it, and at the end, `[heads, segments + 1]`; a line for each head.
    """
    import numpy as np

    layers = [layer for layer, share in shares.items() if (share > 0).any()]
    if not layers:
        return False
    heads = len(gates[layers[0]])
    means = [[np.mean(head[head > 0]) if (head > 0).any() else np.nan for head in shares[layer]] for layer in layers]
    size = (max(5.6, 1.2 + 0.5 * heads), 5.2 + 0.7 * len(layers))
    height = 0.8 + 0.35 * len(layers)
    figure, panels = new_figure("How the heads use their memory", subtitle, 3, 1, size, height_ratios=[height, height, 2.8])
    titles = ("gate, sigmoid(β)", "the memory's mean share of the output, over the tokens that read it")
    for axes, title, values in zip(panels.flat, titles, ([gates[layer] for layer in layers], means), strict=False):
        values = np.array(values)
        heat_map(axes, values, lambda *place, values=values: "–" if np.isnan(values[place]) else f"{values[place]:.2f}")
        say_above(axes, title)
        axes.set(xlabel="head", ylabel="layer", xticks=range(heads))
        axes.set_yticks(range(len(layers)), layers)
    axes = panels[2, 0]
    for number, layer in enumerate(layers):
        read = np.flatnonzero(norms[layer].any(0))  # the first segments find it empty
        for head, norm in enumerate(norms[layer]):
            draw_line(axes, read, norm[read], None if head else f"layer {layer}", **look_of(number))
    say_above(axes, "norm of the memory as each segment reads it; last: at the end of the text")
    axes.set(xlabel="segment", ylabel="Frobenius norm")
    axes.set_ylim(bottom=0)
    plain_numbers(axes.yaxis)
    axes.xaxis.get_major_locator().set_params(integer=True)
    label_lines(axes, in_order=True)
    save(figure, file)
    return True
