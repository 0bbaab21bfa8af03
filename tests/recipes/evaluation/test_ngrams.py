"""N-grams and their smoothing against dictionaries; the recipe on a folder really prepared."""

import math
from collections import Counter

import datasets
import numpy as np
import pytest

from bad_input import refused
from running import load_recipe

ngrams = load_recipe("ngram_baseline")
VOCABULARY = 7


def random_rows(count: int, length: int, seed: int) -> np.ndarray:
    """Rows in which the next token depends on the last two, so that every order has something to
    learn."""
    draw = np.random.default_rng(seed)
    # the last token of the vocabulary never occurs
    rows = draw.integers(0, VOCABULARY - 1, (count, length))
    follow = draw.random((count, length)) < 0.5
    for column in range(2, length):
        rows[:, column] = np.where(
            follow[:, column], (rows[:, column - 2] + rows[:, column - 1]) % 5, rows[:, column]
        )
    return rows


def windows(rows, order: int) -> Counter:
    return Counter(
        tuple(row[i : i + order + 1]) for row in rows.tolist() for i in range(len(row) - order)
    )


def brute_force(tables: list[Counter], alphas, window: tuple, left_out=0) -> float:
    """p_k of the module's docstring, from dictionaries."""
    if not tables:
        return 1 / VOCABULARY
    *below, table = tables
    total = sum(count for seen, count in table.items() if seen[:-1] == window[:-1])
    lower = brute_force(below, alphas, window[1:], left_out)
    return (table[window] - left_out + alphas[len(below)] * lower) / (
        total - left_out + alphas[len(below)]
    )


@pytest.mark.parametrize("order", [0, 3])
def test_held_out_loss_of_a_dictionary(order):
    train, held_out = random_rows(8, 9, seed=1), random_rows(25, 9, seed=2)
    held_out[0, 4] = VOCABULARY - 1  # a token that training never had
    alphas = [0.5, 3.0, 0.25, 8.0][: order + 1]
    tables = [ngrams.Counts(train, k, VOCABULARY) for k in range(order + 1)]
    counted = [windows(train, k) for k in range(order + 1)]
    for ignored in ([], [0, 3]):
        expected, count = 0.0, 0
        for row in held_out.tolist():
            for place in range(1, len(row)):  # a row's first token is predicted by no model
                if row[place] not in ignored:
                    k, count = min(place, order), count + 1
                    expected -= math.log(
                        brute_force(counted[: k + 1], alphas, tuple(row[place - k : place + 1]))
                    )
        loss, tokens = ngrams.held_out_loss(tables, alphas, held_out, ignored)
        # float64 sums in another order
        assert tokens == count and loss == pytest.approx(expected, rel=1e-10)


def test_alphas_are_the_likeliest_when_each_token_is_left_out():
    train = random_rows(12, 10, seed=4)
    tables = [ngrams.Counts(train, order, VOCABULARY) for order in range(3)]
    counted = [windows(train, order) for order in range(3)]
    expected = []
    for order in range(3):

        def loss(alpha, order=order, chosen=tuple(expected)):
            tables, alphas = counted[: order + 1], [*chosen, alpha]
            return -sum(
                n * math.log(brute_force(tables, alphas, w, left_out=1))
                for w, n in counted[order].items()
            )

        expected.append(min(ngrams.ALPHAS, key=loss))
    assert ngrams.choose_alphas(tables) == expected
    assert len(set(expected)) > 1  # otherwise one α for all orders would do


@pytest.mark.slow
def test_the_recipe_predicts_the_tokens_that_a_model_does(tmp_path, capsys):
    options = [
        "--biographies",
        12,
        "--tokenizer",
        "characters",
        "--context",
        40,
        "--split_by",
        "block",
    ]
    options += ["--source", "biographies", "--test", 0.01, "--validation", 0.01, "--out", tmp_path]
    load_recipe("prepare").main([*map(str, options)])
    capsys.readouterr()
    ngrams.main(["--data", str(tmp_path), "--split", "test"])
    lines = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in capsys.readouterr().out.splitlines()
    ]
    rows = len(datasets.load_from_disk(str(tmp_path / "test")))
    assert [line[0] for line in lines[2:]] == ["0", "1", "2"]
    assert {line[3] for line in lines[2:]} == {f"{rows * 39:,}"}  # all but each row's first
    losses = [float(line[1]) for line in lines[2:]]
    assert losses == sorted(losses, reverse=True)
    assert [float(line[2]) for line in lines[2:]] == pytest.approx(
        [math.exp(loss) for loss in losses], rel=1e-3
    )
    refused(
        ngrams.main,
        ["--data", tmp_path, "--order", 40],
        capsys,
        "--order must be at least 0 and at most 5",
    )
