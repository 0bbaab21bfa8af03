"""A figure of what ways to read documents are worth: nats of the right answers above another way,
set by set."""

from pathlib import Path

from . import style


def plot_ways(rows: list[dict], against: str, file: Path, subtitle: str) -> None:
    """Nats per token of the right answers above those of `against`, with paired 95 % intervals;
    where nothing is beside it, the nats themselves."""
    alone = not any(row["paired"] and row["way"] != against for row in rows)
    if not alone:
        rows = [row for row in rows if row["paired"]]
    value = "nats" if alone else "nats_above"
    sets = list(dict.fromkeys(row["set"] for row in rows))
    ways = [way for way in dict.fromkeys(row["way"] for row in rows) if alone or way != against]
    above = "" if alone else f" above “{against}”"
    most = max(row["documents"] for row in rows if row["set"] != "all")
    counts = f"up to {most} documents per set"
    what = f"{subtitle}, {counts}\nwith 95 % intervals; lower is better"
    size = style.WIDTH, max(style.HEIGHT, 0.6 + 0.18 * len(sets) * (len(ways) + 1))
    figure, axes = style.new_figure("Questions about documents", what, size=size)
    for number, way in enumerate(ways):
        look = style.style_of(number)
        own = [row for row in rows if row["way"] == way]
        places = [sets.index(row["set"]) + (number + 1) / (len(ways) + 1) - 0.5 for row in own]
        found = [row[value] for row in own]
        spread = [[a.value - a.low for a in found], [a.high - a.value for a in found]]
        drawn = axes.errorbar(
            [a.value for a in found],
            places,
            xerr=spread,
            color=look["color"],
            marker=look.get("marker", "o"),
            linestyle="none",
            capsize=3,
        )
        drawn.lines[0].set_label(way)  # the points', which the legend takes
    if not alone:
        axes.axvline(0, color=style.GREY, linestyle="--", marker="none")
    axes.set_yticks(range(len(sets)), sets)
    axes.set(ylim=(len(sets) - 0.5, -0.5), xlabel=f"nats per token of the right answer{above}")
    style.label_lines(axes)
    style.save(figure, file)
