"""The figures: what they say in words and numbers."""

import pytest

from plots import run, style


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
    return [
        text.get_text() for text in figure.findobj(Text) if text.get_visible() and text.get_text()
    ]


def test_losses_over_millions_of_tokens(drawn):
    lines = [
        {"tokens": 400_000 * step, "train_loss": 9 - step / 5, "learning_rate": 0.1}
        for step in range(1, 21)
    ]
    run.plot_loss_curve([*lines, {"tokens": 8_000_000, "eval_loss": 5.25}], "file")
    found = texts(drawn[0])
    assert {"Loss during the training", "tokens trained on", "8 M", "training", "validation"} <= {
        *found
    }
    assert "validation at the end: 5.2500 nats per token" in found


def test_the_ways_of_documents_have_names_in_the_legend(drawn):
    from evaluation.bootstrap import Interval
    from plots.documents import plot_ways

    ways = ["plain", "recall, 2,048", "bm25, 512"]
    above = Interval(0.1, 0.0, 0.3)
    rows = [
        {"set": name, "way": way, "paired": True, "nats_above": above, "documents": 1}
        for name in ("tpo", "qmsum")
        for way in ways
    ]
    plot_ways(rows, "plain", "file", "a model")
    [legend] = drawn[0].legends
    assert [text.get_text() for text in legend.get_texts()] == ways[1:]
    assert {"tpo", "qmsum"} <= {*texts(drawn[0])}
