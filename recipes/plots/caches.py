"""Figures of caches of equal size: nats over the tokens they hold, and right answers by length or
distance."""

from pathlib import Path

from evaluation.caches import pooled, summarize_nats

from . import style


def plot_nats(contestants: list[dict], file: Path, subtitle: str) -> None:
    """Nats a token over the size of the cache, with 95 % intervals of the difference to plain;
    plain is a level."""
    what = (
        f"{subtitle}; {len(contestants[0]['beyond'])} rows\n95 % interval of the difference to "
        "plain"
    )
    figure, axes = style.new_figure("What a bounded cache costs", what)
    axes.set(xlabel="tokens in the cache of a head", ylabel="cross-entropy (nats per token)")
    found = list(zip(contestants, summarize_nats(contestants), strict=True))
    for number, way in enumerate(dict.fromkeys(each["way"] for each in contestants)):
        own = [(each["cache"], summary) for each, summary in found if each["way"] == way]
        if way == "plain":
            axes.axhline(
                own[0][1]["mean"].value,
                color=style.GREY,
                linestyle="--",
                marker="none",
                label="plain: all tokens",
            )
            continue
        x, y = [size for size, _ in own], [summary["mean"].value for _, summary in own]
        spread = [
            [summary["above"].value - summary["above"].low for _, summary in own],
            [summary["above"].high - summary["above"].value for _, summary in own],
        ]
        look = style.style_of(number)
        axes.errorbar(x, y, spread, ecolor=look["color"], capsize=3, fmt="none")
        style.draw_line(axes, x, y, way, **look)
    style.set_log_scale(axes.xaxis, [each["cache"] for each in contestants if each["cache"]] or [1])
    style.label_lines(axes)
    style.save(figure, file)


def plot_parts(contestants: list[dict], file: Path, subtitle: str) -> None:
    """How many nats a token each contestant is above the first, with paired 95 % intervals."""
    what = f"{subtitle}; {len(contestants[0]['beyond'])} rows; {contestants[0]['way']}: "
    summaries = summarize_nats(contestants)
    what += f"{summaries[0]['mean'].value:.3f} nats a token\n95 % intervals of the difference to it"
    figure, axes = style.new_figure("What a model owes to its parts", what)
    for place, found in enumerate(summaries[1:]):
        above = found["above"]
        spread = [[above.value - above.low], [above.high - above.value]]
        axes.errorbar(
            above.value, place, xerr=spread, color=style.style_of(0)["color"], capsize=4, fmt="o"
        )
    axes.axvline(0, color=style.GREY, linestyle="--", marker="none")
    axes.set_yticks(range(len(contestants) - 1), [each["way"] for each in contestants[1:]])
    axes.set(
        ylim=(len(contestants) - 1.5, -0.5),
        xlabel=f"nats per token above “{contestants[0]['way']}”",
    )
    style.save(figure, file)


def plot_shares(contestants: list[dict], file: Path, subtitle: str) -> None:
    """The share of right answers by length or distance, a panel for each size of the cache, with 95
    % intervals."""
    from matplotlib.ticker import PercentFormatter

    sizes = list(dict.fromkeys(each["cache"] for each in contestants if each["cache"])) or [None]
    size = style.WIDTH, style.HEIGHT * (1 + 0.75 * (len(sizes) - 1))
    numbers = "length" in contestants[0]["cells"][0]
    title, where = (
        ("Hidden numbers found", "tokens of the text")
        if numbers
        else ("Facts recalled", "segments between")
    )
    figure, panels = style.new_figure(title, rows=len(sizes), size=size, sharex=True)
    ways = list(dict.fromkeys(each["way"] for each in contestants))
    for axes, cache in zip(getattr(panels, "flat", [panels]), sizes, strict=True):
        style.set_panel_title(
            axes, f"{subtitle}; {cache:,} tokens in the cache" if cache else subtitle
        )
        axes.set(ylabel="found", ylim=(-0.04, 1.04))
        axes.yaxis.set_major_formatter(PercentFormatter(1, 0))
        for each in contestants:
            if each["cache"] not in (cache, None):
                continue
            cells = [(at, cell) for at, cell in enumerate(pooled(each["cells"])) if cell["samples"]]
            x, y = [at for at, _ in cells], [cell["correct"] / cell["samples"] for _, cell in cells]
            spread = [
                [max(0, share - cell["low"]) for share, (_, cell) in zip(y, cells, strict=True)],
                [max(0, cell["high"] - share) for share, (_, cell) in zip(y, cells, strict=True)],
            ]
            look = style.style_of(ways.index(each["way"]))
            axes.errorbar(x, y, spread, ecolor=look["color"], capsize=3, fmt="none")
            style.draw_line(axes, x, y, each["way"], **look)
        places = [cell["place"] for cell in pooled(contestants[0]["cells"])]
        axes.set_xticks(range(len(places)), [f"{place:,}" for place in places])
        style.label_lines(axes)
    axes.set_xlabel(where)
    style.save(figure, file)
