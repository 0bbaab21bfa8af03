"""The figures of a study: losses over the tokens, their difference to the baseline's, the gates, long texts."""

from pathlib import Path

from studies.planning import BASE, BASELINE

from .run import figure_with_axes


def draw(content: dict, folder: Path) -> list[str]:
    """Draws what the variants in a report's content have, and returns the names of the files."""
    folder.mkdir(parents=True, exist_ok=True)
    finished = [variant for variant in content["variants"] if "cross_entropy" in variant]
    figures = {"loss.png": (plot_losses, finished)}
    if any(variant.get("curve_difference") for variant in finished):
        figures["loss_difference.png"] = (plot_differences, finished)
    for variant in finished:
        if variant["gates"]:
            figures[f"gates_{variant['name']}.png"] = (plot_gate_distribution, variant)
    if any(variant["positions"]["long"] for variant in finished if variant["data"] == BASE):
        figures["positions.png"] = (plot_long_texts, finished)
    for name, (plot, argument) in figures.items():
        figure = plot(argument)
        part = folder / f"{name}.part"
        figure.savefig(part, format="png")
        part.replace(folder / name)
    return list(figures)


def plot_losses(variants: list[dict]):
    """Validation loss over the tokens trained on; variants with data of their own are dashed, as their tokens differ."""
    figure, axes = figure_with_axes("Validation loss", "tokens trained on", "cross-entropy (nats per token)")
    for number, variant in enumerate(variants):
        own_data = variant["data"] != BASE
        label = f"{variant['name']} (other tokens: not comparable)" if own_data else variant["name"]
        points = list(zip(*variant["curve"], strict=True)) or [[], []]
        axes.plot(*points, marker=".", color=f"C{number % 10}", linestyle="--" if own_data else "-", label=label)
    axes.legend()
    return figure


def plot_differences(variants: list[dict]):
    """Validation loss minus the baseline's over the tokens: below the line of zero a variant is ahead."""
    title = f"Validation loss minus {BASELINE}'s (below 0: better than {BASELINE})"
    figure, axes = figure_with_axes(title, "tokens trained on", "difference (nats per token)")
    for number, variant in enumerate(variants):
        if variant.get("curve_difference"):
            points = zip(*variant["curve_difference"], strict=True)
            axes.plot(*points, marker=".", color=f"C{number % 10}", label=variant["name"])
    axes.axhline(0, color="black", linewidth=1.5)
    axes.legend()
    return figure


def plot_gate_distribution(variant: dict):
    """sigmoid(gate) of every head, a column for each layer; several seeds lie on top of each other."""
    title = f"{variant['name']}: gates at the end of training, a point for each head"
    figure, axes = figure_with_axes(title, "layer", "sigmoid(gate)")
    for number, layers in enumerate(variant["gates"].values()):
        for place, values in enumerate(layers.values()):
            offsets = [place + 0.5 * ((head + 0.5) / len(values) - 0.5) for head in range(len(values))]
            axes.plot(offsets, values, "o", color=f"C{number % 10}", alpha=0.7, markersize=4)
            axes.hlines(sum(values) / len(values), place - 0.3, place + 0.3, color=f"C{number % 10}")
    axes.set_xticks(range(len(layers)), list(layers))
    axes.set_ylim(0, 1)
    axes.axhline(0.5, color="0.5", linestyle=":", linewidth=1)
    return figure


def plot_long_texts(variants: list[dict]):
    """Perplexity by position in long rows, and as dotted lines that of the same text in rows of the trained length, of the
    variants that count the same tokens."""
    figure, axes = figure_with_axes("Beyond the trained context", "position (tokens before the predicted one)", "perplexity")
    for number, variant in enumerate(variants):
        long, context = variant["positions"]["long"], variant["positions"]["context"]
        if variant["data"] != BASE:
            continue
        if long:
            middles = [(row["first"] * row["last"]) ** 0.5 for row in long["by_position"]]
            perplexities = [row["perplexity"] for row in long["by_position"]]
            axes.plot(middles, perplexities, marker="o", color=f"C{number % 10}", label=variant["name"])
        label = f"{variant['name']}, rows of {context['length']:,}"
        axes.axhline(context["perplexity"], color=f"C{number % 10}", linestyle=":", linewidth=1.5, label=label)
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)
    return figure
