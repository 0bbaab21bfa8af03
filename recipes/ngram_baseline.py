"""What the last few tokens alone predict: n-grams of the training rows, on the held-out rows of a
prepared folder.

    python recipes/ngram_baseline.py --data data/shakespeare --order 3
    python recipes/ngram_baseline.py --data data/shakespeare --split test

Order k predicts a token from the k tokens before it: 0 from none (unigram), 1 from the last
(bigram), 2 from the last two (trigram). A model without attention sees one token, as the bigram
does. Prints a table: the nats are of the tokens that train.py and evaluate_model.py count in the
same rows (special tokens are not), and stand beside their number.

The k-gram's estimate is its count plus α_k times the estimate of the order below,

    p_k(x | h) = (c(h, x) + α_k · p_{k−1}(x | h′)) / (c(h) + α_k),        p_{−1}(x) = 1 / V,

with h′ the context h without its oldest token, c(h) = Σ_x c(h, x), and V the vocabulary (MacKay and
Bauman Peto, "A hierarchical Dirichlet language model", Natural Language Engineering 1(3), 1995).
Each α_k is the power of 2 under which the training tokens, each left out of the counts when it is
predicted, are likeliest. No held-out token takes part in that.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from cli import UserError, exit_on_error, option, parse_options

ALPHAS = [2.0**power for power in range(-10, 21)]


@dataclass
class Options:
    data: str = field(metadata={"help": "Folder made by recipes/prepare.py.", "group": "data"})
    split: Literal["validation", "test"] = option(
        "validation", "The held-out rows to predict.", group="data"
    )
    order: int = option(
        2,
        "Earlier tokens to predict from, at most; lower orders are shown too.",
        at_least=0,
        at_most=5,
        group="n-grams",
    )


class Counts:
    """How often each window of `order` + 1 tokens occurs in rows `[rows, tokens]`, and their first
    `order` tokens."""

    def __init__(self, rows: np.ndarray, order: int, vocabulary: int):
        self.vocabulary, self.size = vocabulary, vocabulary ** (order + 1)
        self.codes, self.counts = np.unique(codes_of(rows, order, vocabulary), return_counts=True)
        self.contexts, first = np.unique(self.codes // vocabulary, return_index=True)
        self.totals = np.add.reduceat(self.counts, first)

    def of(self, codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """c(h, x) and c(h) of windows of this order or above, given as codes."""
        codes, found = codes % self.size, []
        for keys, counts, wanted in (
            (self.codes, self.counts, codes),
            (self.contexts, self.totals, codes // self.vocabulary),
        ):
            places = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
            found.append(np.where(keys[places] == wanted, counts[places], 0))
        return found[0], found[1]


def codes_of(rows: np.ndarray, order: int, vocabulary: int) -> np.ndarray:
    """The windows inside each row, `[rows, tokens − order]`: a window is the number whose digits,
    to the base `vocabulary`, are its tokens."""
    length = max(0, rows.shape[1] - order)
    return sum(
        rows[:, i : i + length].astype(np.int64) * vocabulary ** (order - i)
        for i in range(order + 1)
    )


def probability(tables: list[Counts], alphas: list[float], codes: np.ndarray, left_out: int = 0):
    """p_k of windows, k the order of the last table. `left_out`: 1 takes each window itself out of
    the counts."""
    found = 1 / tables[0].vocabulary
    for table, alpha in zip(tables[: len(alphas)], alphas, strict=True):
        counts, totals = table.of(codes)
        found = (counts - left_out + alpha * found) / (totals - left_out + alpha)
    return found


def choose_alphas(tables: list[Counts]) -> list[float]:
    alphas: list[float] = []
    for table in tables:
        lower, (counts, totals) = (
            probability(tables, alphas, table.codes, left_out=1),
            table.of(table.codes),
        )
        likelihoods = [
            (counts * np.log((counts - 1 + a * lower) / (totals - 1 + a))).sum() for a in ALPHAS
        ]
        alphas.append(ALPHAS[int(np.argmax(likelihoods))])
    return alphas


def held_out_loss(
    tables: list[Counts], alphas: list[float], rows: np.ndarray, ignored=()
) -> tuple[float, int]:
    """Sum of −ln p over all tokens of `rows` but each row's first and the ids in `ignored`, and
    their number. A token with fewer than k tokens before it in its row is predicted by the order
    that it has."""
    top, vocabulary = len(alphas) - 1, tables[0].vocabulary
    parts = [
        (top, rows if top > 0 else rows[:, 1:]),
        *((order, rows[:, : order + 1]) for order in range(1, top)),
    ]
    loss, tokens = 0.0, 0
    for order, columns in parts:
        codes = codes_of(columns, order, vocabulary).reshape(-1)
        codes = codes[~np.isin(codes % vocabulary, ignored)]
        loss -= float(np.log(probability(tables, alphas[: order + 1], codes)).sum())
        tokens += codes.size
    return loss, tokens


@exit_on_error(when_stopped="the same command starts again")
def main(argv: list[str] | None = None) -> None:
    (options,) = parse_options(Options, description=__doc__, argv=argv)

    from corpora.blocks import read_rows
    from evaluation.losses import summarize
    from support.markdown import markdown_table
    from support.prepared import read_tokenizer
    from support.stages import read_manifest

    data = Path(options.data)
    vocabulary = read_manifest(data, options.split)["tokenizer"]["vocabulary"]
    train, held_out = (read_rows(data / split) for split in ("train", options.split))
    if vocabulary ** (options.order + 1) >= 2**63 or train.shape[1] <= options.order:
        raise UserError(
            f"--order {options.order}: rows of {train.shape[1]} tokens of a vocabulary of "
            f"{vocabulary:,} cannot be counted: give a lower one"
        )
    tables = [Counts(train, order, vocabulary) for order in range(options.order + 1)]
    alphas, special_ids, rows = choose_alphas(tables), read_tokenizer(data).all_special_ids, []
    for order, alpha in enumerate(alphas):
        loss, tokens = held_out_loss(tables, alphas[: order + 1], held_out, special_ids)
        found = summarize(loss, tokens)
        rows.append(
            [
                order,
                f"{found['cross_entropy']:.4f}",
                f"{found['perplexity']:.2f}",
                f"{tokens:,}",
                f"{alpha:.4g}",
            ]
        )
    print(markdown_table(["order", "cross-entropy", "perplexity", "tokens", "alpha"], rows, left=0))


if __name__ == "__main__":
    main()
