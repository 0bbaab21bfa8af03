"""Plots of a run: the loss curve, the gates, perplexity by position. All are PNG files drawn without a display."""

from pathlib import Path


def figure_with_axes(title: str, x_label: str, y_label: str):
    """An empty figure of the size and style that the plots share, and its axes."""
    from matplotlib.figure import Figure  # without pyplot: no global state, and Agg is the only backend it can meet

    figure = Figure(figsize=(8, 5), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    axes.set(title=title, xlabel=x_label, ylabel=y_label)
    axes.grid(alpha=0.3)
    return figure, axes


def plot_loss_curve(lines: list[dict], file: Path) -> None:
    """Training and validation loss over the tokens trained on.

    Args:
        lines: of a run's `metrics.jsonl`: `tokens` with `train_loss` or `eval_loss`, nats per token.
    """
    figure, axes = figure_with_axes("Loss", "tokens", "cross-entropy (nats per token)")
    for name, label, style in (("train_loss", "training", {"alpha": 0.7}), ("eval_loss", "validation", {"marker": "o"})):
        points = [(line["tokens"], line[name]) for line in lines if name in line]
        if points:
            axes.plot(*zip(*points, strict=True), label=label, **style)
    axes.legend()
    figure.savefig(file)


def plot_gates(lines: list[dict], file: Path) -> None:
    """sigmoid(gate) of every head over the tokens trained on, one colour per layer.

    Args:
        lines: of a run's `metrics.jsonl`: those with `gates`, `{layer: [a value per head]}`, are drawn.
    """
    figure, axes = figure_with_axes("Gates of the memory, a line for each head", "tokens", "sigmoid(gate)")
    lines = [line for line in lines if "gates" in line]
    tokens = [line["tokens"] for line in lines]
    for number, layer in enumerate(lines[0]["gates"] if lines else ()):
        for head in range(len(lines[0]["gates"][layer])):
            values = [line["gates"][layer][head] for line in lines]
            label = f"layer {layer}" if head == 0 else None
            axes.plot(tokens, values, color=f"C{number % 10}", marker=".", alpha=0.8, label=label)
    axes.set_ylim(0, 1)
    if lines:
        axes.legend()
    figure.savefig(file)


def plot_positions(table: list[dict], file: Path, title: str) -> None:
    """Perplexity by position in the context, in log-2 buckets.

    Args:
        table: `LossByPosition.table()`: rows with `first`, `last` and `perplexity`.
    """
    figure, axes = figure_with_axes(title, "position in the context (tokens before the predicted one)", "perplexity")
    middles = [(row["first"] * row["last"]) ** 0.5 for row in table]
    axes.plot(middles, [row["perplexity"] for row in table], marker="o")
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    figure.savefig(file)


def plot_comparison(runs: dict[str, list[dict]], file: Path, levels: dict[str, float] | None = None) -> None:
    """Validation loss of several runs over the tokens trained on.

    Args:
        runs: name → lines of its `metrics.jsonl`.
        levels: name → cross-entropy of what is not trained in steps, drawn as a horizontal line with its name beside it.
    """
    figure, axes = figure_with_axes("Validation loss", "tokens", "cross-entropy (nats per token)")
    for name, lines in runs.items():
        points = [(line["tokens"], line["eval_loss"]) for line in lines if "eval_loss" in line]
        axes.plot(*zip(*points, strict=True), marker=".", label=name)
    for name, loss in (levels or {}).items():
        axes.axhline(loss, color="0.4", linestyle="--", linewidth=1)
        place = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "xytext": (4, 0)}
        axes.annotate(f"{name} {loss:.3f}", (1, loss), va="center", color="0.3", fontsize=9, **place)
    axes.legend()
    figure.savefig(file)


def plot_decoding(rows: list[dict], file: Path) -> None:
    """Cache size and time per new token over the context, both axes logarithmic.

    Args:
        rows: with `context`, `model`, `cache_bytes` and `seconds_per_token`.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.5), dpi=120, layout="constrained")
    panels = (("cache (MiB)", "cache_bytes", 2**-20), ("ms per new token", "seconds_per_token", 1e3))
    for axes, (label, name, unit) in zip(figure.subplots(1, 2), panels, strict=True):
        for model in dict.fromkeys(row["model"] for row in rows):
            points = [(row["context"], row[name] * unit) for row in rows if row["model"] == model]
            axes.plot(*zip(*points, strict=True), marker="o", label=model)
        axes.set(xlabel="context (tokens)", ylabel=label)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(file)


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
        for head, line in enumerate(norms[layer]):
            label = f"layer {layer}" if head == 0 else None
            panels[2].plot(line, color=f"C{number % 10}", alpha=0.8, marker=".", label=label)
    panels[2].set(xlabel="segment that reads the memory (last point: the end of the text)", ylabel="Frobenius norm of M")
    panels[2].set_title("norm of the memory", fontsize=10)
    panels[2].set_ylim(bottom=0)
    panels[2].xaxis.get_major_locator().set_params(integer=True)
    panels[2].grid(alpha=0.3)
    panels[2].legend(fontsize=8)
    figure.savefig(file)
