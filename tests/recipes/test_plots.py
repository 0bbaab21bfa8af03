"""The figures: what they say in words and numbers, and that lines are told apart without their colours."""

import math

import pytest

from plots import recall, run, style


@pytest.fixture
def drawn(monkeypatch) -> list:
    """The figures that are saved, in their order."""
    figures = []
    monkeypatch.setattr(style, "save", lambda figure, file: figures.append(figure))
    return figures


def texts(figure) -> list[str]:
    """All that is written in a figure, as it is drawn."""
    from matplotlib.text import Text

    figure.draw_without_rendering()
    return [text.get_text() for text in figure.findobj(Text) if text.get_visible() and text.get_text()]


def ticks(axis) -> list[str]:
    low, high = sorted(axis.get_view_interval())
    return [
        label.get_text() for label in axis.get_ticklabels() if low <= label.get_position()[axis.axis_name == "y"] <= high
    ]


def positions(last: int) -> list[dict]:
    starts = [2**power for power in range(last.bit_length() - 1)]
    return [{"first": first, "last": 2 * first - 1, "perplexity": 20 + 400 / first} for first in starts]


def test_losses_over_millions_of_tokens(drawn):
    lines = [{"tokens": 400_000 * step, "train_loss": 9 - step / 5, "learning_rate": 0.1} for step in range(1, 21)]
    run.plot_loss_curve([*lines, {"tokens": 8_000_000, "eval_loss": 5.25}], "file")
    found = texts(drawn[0])
    assert {"Loss during the training", "tokens trained on", "8 M", "training", "validation"} <= {*found}
    assert "validation at the end: 5.2500 nats per token" in found


def test_perplexities_are_on_a_log_axis_with_plain_numbers_and_the_trained_length(drawn):
    run.plot_positions({None: positions(8192)}, "file", "model a; plays", trained=1024)
    run.plot_positions({None: positions(1024)}, "file", "model a; plays", trained=1024)  # no token is beyond it
    [wide, short] = drawn
    axes = wide.axes[0]
    assert {"Perplexity by position in the text", "model a; plays", "trained length"} <= {*texts(wide)}
    assert axes.get_xscale() == axes.get_yscale() == "log" and "trained length" not in texts(short)
    assert ticks(axes.yaxis) == ["20", "50", "100", "200"] and "1,024" in ticks(axes.xaxis)


@pytest.mark.parametrize("values", [(3.2, 3.9), (24, 150), (5, 40_000)])
def test_a_logarithmic_axis_has_a_few_plain_numbers(values):
    figure, axes = style.new_figure("title")
    axes.plot([1, 2], values)
    style.set_log_scale(axes.yaxis, values)
    figure.draw_without_rendering()
    shown = [label for label in ticks(axes.yaxis) if label]
    assert 3 <= len(shown) and len({*shown}) == len(shown) and all("e" not in label for label in shown)


def test_lines_differ_and_their_names_are_below_the_panel():
    figure, axes = style.new_figure("title")
    for number in range(12):
        style.draw_line(axes, [1, 2, 3], [1, 2, 3 + number / 1000], f"name {number}")
    assert len({(line.get_color(), line.get_marker(), line.get_linestyle()) for line in axes.get_lines()}) == 12
    style.label_lines(axes)
    figure.draw_without_rendering()
    [legend] = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [f"name {number}" for number in range(12)]
    assert legend.get_window_extent().y1 <= axes.get_window_extent().y0


def cell(**place) -> dict:
    return {**place, "accuracy": 0.75, "low": 0.612, "high": 0.851, "samples": 48, "chance": 0.04}


def test_rates_have_their_number_and_interval(drawn):
    cells = [cell(length=length, depth=depth) for length in (1024, 4096) for depth in (0, 1)]
    recall.plot_passkey([*cells, {"length": 8192, "depth": 0}, {"length": 8192, "depth": 1}], "file", "model a; plays", 4096)
    found = texts(drawn[0])
    assert found.count("75%\n61–85") == 4 and found.count("–") == 2
    assert "model a; plays\n48 questions each, with the 95 % interval" in found
    assert "length of the text (tokens); dashed: the trained length, 4,096" in found
    cells = [cell(distance=distance) for distance in (0, 2, 4)] + [{"distance": 64}]
    recall.plot_facts(cells, "file", "model a; invented text", trained=256, segment_length=64)
    found = texts(drawn[1])
    assert "model a; invented text\n48 questions each, with the 95 % interval" in found
    assert {"trained length", "constant guess", "model", "64"} <= {*found}


def test_names_of_others_are_no_formulas_and_the_card_is_opaque(tmp_path):
    from matplotlib.image import imread

    figure, axes = style.new_figure("a $title_$", "a $\\frac$")
    style.draw_line(axes, [1, 2], [1, 2], "a_$x_$")
    style.mark_across(axes, 1.5, "$_$")
    style.label_lines(axes)
    style.save(figure, tmp_path / "figure.png")
    image = imread(tmp_path / "figure.png")
    assert image.shape[1] == round(style.WIDTH * style.DPI) and (image[0, 0] == 1).all()
    assert image.shape[2] == 3 or math.isclose(image[..., 3].min(), 1)
