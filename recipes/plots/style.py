"""The one style of all figures: an opaque white card that reads well on light and dark pages, on a
phone and in print.

Lines differ by colour and marker. The colours are those of Okabe and Ito (2008), which people with
any colour vision tell apart, without the yellow, which is too light on white.
"""

from collections.abc import Sequence

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "D", "^", "v", "P", "X")
INK, GREY, GRID = "#262626", "#595959", "#D9D9D9"
# inches: 10 points are 10 pixels where the figure is 390 pixels wide
WIDTH, HEIGHT, DPI = 5.6, 3.9, 200
SIZE, SMALL = 11, 9  # points of text
RC = {"axes.grid": True, "grid.color": GRID, "axes.axisbelow": True, "axes.edgecolor": GREY}
RC |= {"axes.labelcolor": INK, "axes.labelsize": SIZE - 1}
RC |= {"axes.spines.top": False, "axes.spines.right": False}
for _axis in ("xtick", "ytick"):
    RC |= {f"{_axis}.color": GREY, f"{_axis}.labelcolor": INK, f"{_axis}.labelsize": SMALL}


def new_figure(
    title: str,
    subtitle: str = "",
    rows: int = 1,
    columns: int = 1,
    size: tuple | None = None,
    **options,
):
    """An empty figure, and its axes (an array of them where there are several).

    Args:
        title: what is shown, in words; subtitle: of which model and data, with which interval.
        size: inches; default: one of [`WIDTH`] × [`HEIGHT`], higher for more rows.
        options: of matplotlib's `subplots`."""
    from cycler import cycler
    from matplotlib import rc_context

    # without pyplot: no global state, and Agg is the only backend it can meet
    from matplotlib.figure import Figure

    look = cycler(linestyle=["-", "--"]) * (cycler(color=COLOURS) + cycler(marker=MARKERS))
    size = size or (WIDTH, HEIGHT * (1 + 0.75 * (rows - 1)))
    with rc_context({**RC, "axes.prop_cycle": look}):
        figure = Figure(figsize=size, dpi=DPI, layout="constrained", facecolor="white")
        panels = figure.subplots(rows, columns, squeeze=False, **options)
    figure.get_layout_engine().set(w_pad=0.07, h_pad=0.06)
    # Texts of others (names of runs, of files) are no formulas
    figure.suptitle(
        title, x=0.015, ha="left", fontsize=SIZE + 1, fontweight="bold", color=INK, parse_math=False
    )
    if subtitle:
        set_panel_title(panels[0, 0], subtitle)
    return figure, panels if panels.size > 1 else panels[0, 0]


def set_panel_title(axes, text: str) -> None:
    """Writes above a panel what it shows; above the first, also the figure's subtitle."""
    axes.set_title(text, loc="left", fontsize=SMALL, color=GREY, parse_math=False)


def style_of(number: int) -> dict[str, str]:
    """Colour, marker and stroke of all lines of one layer, or another thing that has several."""
    colour, marker = COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)]
    return {"color": colour, "marker": marker, "linestyle": "-"}


def draw_line(axes, x: Sequence[float], y: Sequence[float], label: str | None = None, **style):
    """A line with at most some twenty markers, in the next of the colours."""
    style = {"linewidth": 1.7, "markersize": 4.5, "markevery": max(1, len(x) // 20)} | style
    return axes.plot(x, y, label=label, **style)[0]


def label_lines(axes) -> None:
    """A legend below the figure, of the lines that have names."""
    lines = [line for line in axes.get_lines() if not line.get_label().startswith("_")]
    lines = [line for line in lines if len(line.get_xdata())]
    look = {"handles": lines, "fontsize": SMALL, "frameon": False, "labelcolor": INK}
    for text in axes.get_figure().legend(loc="outside lower left", ncols=2, **look).get_texts():
        text.set_parse_math(False)


def format_token_ticks(axis) -> None:
    """Ticks of a number of tokens: `8 M`."""
    from matplotlib.ticker import EngFormatter

    axis.set_major_formatter(EngFormatter(sep=" "))


def set_log_scale(axis, values: Sequence[float]) -> None:
    """A logarithmic axis for these values, with plain numbers: 2, 5, 10, 1,000."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

    axis.axes.set(**{f"{axis.axis_name}scale": "log"})
    wide = max(values) > 8 * min(values)
    axis.set_major_locator(
        LogLocator(subs=(1, 2, 5)) if wide else MaxNLocator(6, steps=[1, 2, 2.5, 5, 10])
    )
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter("{x:,.6g}")


def save(figure, file) -> None:
    """Writes a PNG file (or into a buffer)."""
    figure.savefig(file, format="png")
