"""The picture of what one head keeps of a text: its tokens, coloured by where they are in the
end."""

from pathlib import Path

from . import style

COLUMNS, LINE = 92, 0.165  # characters of the longest line, and inches from line to line
WIDE = 0.602 * style.SMALL / 72  # a character of DejaVu Sans Mono, in inches
# Name in the legend, background and ink, by fate
LOOKS = {
    "sink": ("sinks", "#EBD3E2", style.INK),
    "kept": ("kept", "#FFCF4D", "black"),
    "window": ("window", "#D3E9F8", style.INK),
    "memory": ("in the memory", "#FFFFFF", "#858585"),
    "none": ("left out", "#FFFFFF", "#C8C8C8"),
}


def plot_kept(inspection, layer: int, head: int, file: Path) -> None:
    """A PNG file of what a head keeps of the first text of an `Inspection`, after its last
    token."""
    from matplotlib.patches import Patch, Rectangle

    from hf_infini.tools.inspection import FATES

    # without the next line's indent
    texts = [text[: text.rfind("⏎") + 1 or None] for text in inspection.texts[0]]
    fates = [FATES[number] for number in inspection.layers[layer].fates[0, head, -1].tolist()]
    places = token_places(texts)
    lines, columns = (
        places[-1][0] + 1,
        max(column + len(text) for text, (_, column) in zip(texts, places, strict=True)),
    )
    figure, axes = style.new_figure(
        f"What head {head} of layer {layer} keeps",
        f"{inspection.name}, after {len(texts):,} tokens",
        size=(max(columns, COLUMNS // 2) * WIDE + 0.16, lines * LINE + 0.85),
    )
    axes.set(xlim=(0, max(columns, COLUMNS // 2)), ylim=(lines, 0))
    axes.set_axis_off()
    for text, fate, (line, column) in zip(texts, fates, places, strict=True):
        _, background, ink = LOOKS[fate]
        axes.add_patch(Rectangle((column, line), len(text), 1, color=background, linewidth=0))
        look = {"family": "monospace", "fontsize": style.SMALL, "color": ink, "parse_math": False}
        axes.text(column, line + 0.74, text.replace("·", " "), **look)
    shown = {fate: look for fate, look in LOOKS.items() if fate in fates}
    patches = [
        Patch(facecolor=background, edgecolor=style.GREY, linewidth=0.5)
        for _, background, _ in shown.values()
    ]
    names = [f"{name} {fates.count(fate):,}" for fate, (name, *_) in shown.items()]
    figure.legend(
        patches, names, loc="outside lower left", ncols=5, frameon=False, fontsize=style.SMALL
    )
    style.save(figure, file)


def token_places(texts: list[str]) -> list[tuple[int, int]]:
    """Line and column of each token. Lines end where those of the text do, and, when full, where a
    word begins."""
    places, line, column = [], 0, 0
    for text in texts:
        room = COLUMNS - 12 * text.startswith("·") - column  # for the rest of the word
        if column and len(text) > room:
            line, column = line + 1, 0
        places.append((line, column))
        line, column = (line + 1, 0) if text.endswith("⏎") else (line, column + len(text))
    return places
