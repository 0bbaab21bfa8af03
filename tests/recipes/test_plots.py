"""The figures: what they say in words and numbers, and that lines are told apart without their colours."""

import math

import numpy as np
import pytest

from plots import heads, recall, run, style


@pytest.fixture
def drawn(monkeypatch) -> list:
    """The figures that are saved, in their order."""
    figures = []
    for module in (run, recall, heads):
        monkeypatch.setattr(module, "save", lambda figure, file: figures.append(figure))
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


def positions(last: int, *, factor: float = 1.0) -> list[dict]:
    starts = [2**power for power in range(last.bit_length() - 1)]
    return [{"first": first, "last": 2 * first - 1, "perplexity": factor * (20 + 400 / first)} for first in starts]


def lines_of(axes) -> list:
    return [line for line in axes.get_lines() if len(line.get_xdata()) > 1 and line.get_marker() not in ("", "None", "none")]


def test_losses_have_words_and_ticks_in_millions(drawn):
    lines = [{"tokens": 400_000 * step, "train_loss": 9 - step / 5, "learning_rate": 0.1} for step in range(1, 21)]
    run.plot_loss_curve([*lines, {"tokens": 8_000_000, "eval_loss": 5.25}], "file")
    found = texts(drawn[0])
    assert {"Loss during the training", "tokens trained on", "8 M", "training", "validation"} <= {*found}
    assert "validation at the end: 5.2500 nats per token" in found


def test_perplexities_are_on_a_log_axis_with_plain_numbers_and_the_trained_length(drawn):
    run.plot_positions(positions(8192), "file", "model a; plays", trained=1024)
    run.plot_positions(positions(1024), "file", "model a; plays", trained=1024)  # no token is beyond it
    [wide, short] = drawn
    axes = wide.axes[0]
    assert {"Perplexity by position in the text", "model a; plays", "trained length"} <= {*texts(wide)}
    assert axes.get_xscale() == axes.get_yscale() == "log" and "trained length" not in texts(short)
    assert ticks(axes.yaxis) == ["20", "50", "100", "200"] and "1,024" in ticks(axes.xaxis)


@pytest.mark.parametrize("values", [(3.2, 3.9), (2, 11), (24, 150), (5, 40_000)])
def test_a_perplexity_axis_has_a_few_plain_numbers(values):
    figure, axes = style.new_figure("title")
    axes.plot([1, 2], values)
    style.plain_logarithm(axes.yaxis, values)
    figure.draw_without_rendering()
    shown = [label for label in ticks(axes.yaxis) if label]
    assert 3 <= len(shown) <= 15 and all(float(label.replace(",", "")) > 0 and "e" not in label for label in shown)


def test_lines_differ_by_marker_and_by_colour_and_have_their_names_beside_them():
    figure, axes = style.new_figure("title")
    for number in range(7):
        style.draw_line(axes, [1, 2, 3], [1, 2, 3 + number / 1000], f"name {number}")
    lines = lines_of(axes)
    assert len({line.get_marker() for line in lines}) == len({line.get_color() for line in lines}) == 7
    style.label_lines(axes)
    figure.draw_without_rendering()
    boxes = [text.get_window_extent() for text in axes.texts]
    assert sorted(text.get_text() for text in axes.texts) == [f"name {number}" for number in range(7)]
    edge = axes.get_window_extent().x1
    assert all(edge < box.x0 and box.x1 <= figure.bbox.width for box in boxes)
    assert not any(one.overlaps(other) for place, one in enumerate(boxes) for other in boxes[:place])


@pytest.mark.parametrize("names", [["a name that is too long to stand beside it"], [f"layer {n}" for n in range(12)]])
def test_names_that_do_not_fit_are_below_the_figure(names):
    figure, axes = style.new_figure("title")
    for number, name in enumerate(names):
        style.draw_line(axes, [1, 2], [0, number], name)
    style.label_lines(axes)
    figure.draw_without_rendering()
    assert not axes.texts and [text.get_text() for text in figure.legends[0].get_texts()] == names
    assert figure.legends[0].get_window_extent().y1 <= axes.get_window_extent().y0
    # Beyond seven, lines differ by their stroke
    assert len({(line.get_color(), line.get_marker(), line.get_linestyle()) for line in lines_of(axes)}) == len(names)


@pytest.mark.parametrize("places", [[0.5], [0, 0, 0], [1, 1, 1], [0.2, 0.21, 0.9], [0.5] * 30, []])
def test_labels_are_spread(places):
    found = style.spread(places, 0.1)
    gaps = np.diff(found)
    least = min(0.1, 1 / max(1, len(places) - 1))
    assert len(found) == len(places) and all(-1e-9 <= place <= 1 + 1e-9 for place in found) and (gaps > least - 1e-9).all()
    assert places != [0.2, 0.21, 0.9] or found == pytest.approx([0.2, 0.3, 0.9])


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


def test_gates_are_told_apart_by_layer(drawn):
    gates = {str(layer): [0.1 * layer + 0.01 * head for head in range(3)] for layer in (1, 4)}
    run.plot_gates([{"tokens": tokens, "gates": gates} for tokens in (10, 20)], "file")
    axes = drawn[0].axes[0]
    assert {"layer 1", "layer 4", "How much each head takes from the memory"} <= {*texts(drawn[0])}
    assert len({line.get_marker() for line in lines_of(axes)}) == 2 and len(lines_of(axes)) == 6


@pytest.mark.parametrize("layers", [4, 12])
def test_layers_are_named_in_their_order(layers, drawn):
    """Whatever order a file has them in, and wherever their lines end; beside the figure and, many of them, below it."""
    gates = {str(layer): [1 - 0.03 * layer, 0.5] for layer in sorted(range(layers), key=str)}
    run.plot_gates([{"tokens": tokens, "gates": gates} for tokens in (10, 20)], "file")
    norms = {layer: np.array([[1.0, 1 + layer]]) for layer in range(layers)}
    ones = {layer: np.ones((1, 2)) for layer in norms}
    heads.plot_memory({layer: np.ones(1) for layer in norms}, ones, norms, "file")
    for figure, axes in zip(drawn, (drawn[0].axes[0], drawn[1].axes[2]), strict=True):
        figure.draw_without_rendering()
        beside = sorted(axes.texts, key=lambda text: -text.get_window_extent().y0)
        below = [text for legend in figure.legends for text in legend.get_texts()]
        assert [text.get_text() for text in beside or below] == [f"layer {layer}" for layer in range(layers)]


@pytest.mark.parametrize("size", [1e-3, 0.4, 300, 9e4, 3e8, 4e13])
def test_norms_of_any_size_have_short_ticks(size, drawn):
    ones = {0: np.ones((1, 2))}
    heads.plot_memory({0: np.ones(1)}, ones, {0: np.array([[size / 2, size]])}, "file")
    texts(drawn[0])
    shown = [label for label in ticks(drawn[0].axes[2].yaxis) if label]
    assert 3 <= len(shown) == len({*shown}) and all(len(label) <= 7 for label in shown)
    assert not drawn[0].axes[2].yaxis.get_offset_text().get_text()


def test_a_memory_that_no_token_reads_has_no_row_and_no_figure(drawn):
    gates = {0: np.full(2, 0.5), 3: np.array([0.25, 0.875])}
    shares = {0: np.zeros((2, 8)), 3: np.repeat([[0, 0.4]], 2, 0).repeat(4, 1)}
    norms = {layer: np.array([[0.0, 1, 2], [0, 2, 3]]) for layer in gates}
    assert heads.plot_memory(gates, shares, norms, "file", "a, 8 tokens")
    found, axes = texts(drawn[0]), drawn[0].axes
    assert {"0.25", "0.88", "0.40"} <= {*found} and "0.50" not in found
    assert ticks(axes[0].yaxis) == ["3"]
    assert [list(line.get_xdata()) for line in lines_of(axes[2])] == [[1, 2]] * 2  # the first segment finds it empty
    assert not heads.plot_memory(gates, dict.fromkeys(gates, np.zeros((2, 8))), norms, "file") and len(drawn) == 1
    assert not heads.plot_memory({}, {}, {}, "file")


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
