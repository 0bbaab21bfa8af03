"""N-gram counts, entropies and smoothing against dictionaries and closed forms; the recipe on a folder really prepared."""

import json
import math
from collections import Counter

import datasets
import numpy as np
import pytest

from evaluation import ngrams
from running import load_recipe

ngram_baseline = load_recipe("ngram_baseline")
VOCABULARY = 7


def random_rows(count: int, length: int, seed: int) -> np.ndarray:
    """Rows in which the next token depends on the last two, so that every order has something to learn."""
    draw = np.random.default_rng(seed)
    rows = draw.integers(0, VOCABULARY - 1, (count, length))  # the last token of the vocabulary never occurs
    follow = draw.random((count, length)) < 0.5
    for column in range(2, length):
        rows[:, column] = np.where(follow[:, column], (rows[:, column - 2] + rows[:, column - 1]) % 5, rows[:, column])
    return rows


def windows(rows, order: int) -> Counter:
    return Counter(tuple(row[i : i + order + 1]) for row in rows.tolist() for i in range(len(row) - order))


def brute_force(tables: list[Counter], alphas, window: tuple, left_out=0) -> float:
    """p_k of the module's docstring, from dictionaries."""
    if not tables:
        return 1 / VOCABULARY
    *below, table = tables
    total = sum(count for seen, count in table.items() if seen[:-1] == window[:-1])
    lower = brute_force(below, alphas, window[1:], left_out)
    return (table[window] - left_out + alphas[len(below)] * lower) / (total - left_out + alphas[len(below)])


@pytest.mark.parametrize("order", [0, 3])
def test_counts_and_entropy_of_a_dictionary(order):
    rows = random_rows(30, 12, seed=order)
    expected, found = windows(rows, order), ngrams.NgramCounts(rows, order, VOCABULARY)
    digits = [[int(code) // VOCABULARY**place % VOCABULARY for place in range(order, -1, -1)] for code in found.codes]
    assert dict(zip(map(tuple, digits), found.counts.tolist(), strict=True)) == expected
    contexts = Counter()
    for window, count in expected.items():
        contexts[window[:-1]] += count
    assert sorted(found.totals.tolist()) == sorted(contexts.values()) and len(found.contexts) == len(contexts)
    total = sum(expected.values())
    entropy = -sum(count / total * math.log(count / contexts[window[:-1]]) for window, count in expected.items())
    assert ngrams.conditional_entropy(found) == pytest.approx(entropy, rel=1e-12)  # float64 sums in another order


@pytest.mark.parametrize("order", [0, 3])
def test_held_out_loss_of_a_dictionary(order):
    train, held_out = random_rows(8, 9, seed=1), random_rows(25, 9, seed=2)
    held_out[0, 4] = VOCABULARY - 1  # a token that training never had
    alphas = [0.5, 3.0, 0.25, 8.0][: order + 1]
    tables = [ngrams.NgramCounts(train, k, VOCABULARY) for k in range(order + 1)]
    counted = [windows(train, k) for k in range(order + 1)]
    for ignored in ([], [0, 3]):
        expected, count = 0.0, 0
        for row in held_out.tolist():
            for place in range(1, len(row)):  # a row's first token is predicted by no model
                if row[place] not in ignored:
                    k, count = min(place, order), count + 1
                    expected -= math.log(brute_force(counted[: k + 1], alphas, tuple(row[place - k : place + 1])))
        loss, tokens = ngrams.held_out_loss(tables, alphas, held_out, ignored)
        assert tokens == count and loss == pytest.approx(expected, rel=1e-10)  # float64 sums in another order


def test_alphas_are_the_likeliest_when_each_token_is_left_out():
    train = random_rows(12, 10, seed=4)
    tables = [ngrams.NgramCounts(train, order, VOCABULARY) for order in range(3)]
    counted = [windows(train, order) for order in range(3)]
    expected = []
    for order in range(3):
        def loss(alpha, order=order, chosen=tuple(expected)):
            tables, alphas = counted[: order + 1], [*chosen, alpha]
            return -sum(n * math.log(brute_force(tables, alphas, w, left_out=1)) for w, n in counted[order].items())

        expected.append(min(ngrams.ALPHAS, key=loss))
    assert ngrams.choose_alphas(tables) == expected
    assert len(set(expected)) > 1  # otherwise one α for all orders would do


def test_what_cannot_be_counted_is_refused():
    with pytest.raises(ValueError, match="do not fit into 63 bits"):
        ngrams.NgramCounts(np.zeros((1, 9), dtype=int), 4, 50_257)
    with pytest.raises(ValueError, match="token numbers go from 0 to 9"):
        ngrams.NgramCounts(np.arange(10)[None, :], 1, 9)
    with pytest.raises(ValueError, match="no window of 3 tokens"):
        ngrams.conditional_entropy(ngrams.NgramCounts(np.zeros((4, 2), dtype=int), 2, 9))


# --- the recipe -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    out = tmp_path_factory.mktemp("ngrams") / "data"
    options = ["--biographies", 12, "--tokenizer", "characters", "--context", 40, "--split_by", "block"]
    options += ["--source", "biographies", "--test", 0.01, "--validation", 0.01, "--out", out]
    load_recipe("prepare").main([*map(str, options)])
    return out


@pytest.mark.slow
def test_the_recipe_writes_what_a_dictionary_counts(data, tmp_path, capsys):
    out = tmp_path / "deep" / "ngrams.json"
    capsys.readouterr()  # what preparing the data printed
    ngram_baseline.main(["--data", str(data), "--split", "test", "--orders", "2", "0", "--out", str(out)])
    found = json.loads(out.read_text(encoding="utf-8"))
    rows = {name: np.array(datasets.load_from_disk(str(data / name))["input_ids"]) for name in ("train", "test")}
    assert [(row["order"], row["name"]) for row in found["orders"]] == [(0, "unigram"), (2, "trigram")]
    assert found["split"] == "test"
    assert found["training_tokens"] == rows["train"].size
    counts = np.unique(rows["train"], return_counts=True)[1] / rows["train"].size
    assert found["orders"][0]["entropy"] == pytest.approx(-(counts * np.log(counts)).sum(), rel=1e-12)  # another order
    for row in found["orders"]:
        assert row["tokens"] == rows["test"].shape[0] * 39  # as many as a model predicts: all but each row's first
        assert row["perplexity"] == pytest.approx(math.exp(row["cross_entropy"]), rel=1e-12)
    assert found["orders"][1]["cross_entropy"] < found["orders"][0]["cross_entropy"] < math.log(found["vocabulary"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 and f"{found['orders'][1]['cross_entropy']:.4f}" in lines[3]
