"""N-gram statistics of prepared rows: what can be predicted from the last few tokens, without any attention.

Order k looks at k earlier tokens: 0 unigrams, 1 bigrams, 2 trigrams. All logarithms are natural, all means are per token,
and windows never cross a row, so the numbers stand beside a model's cross-entropy on the same rows.

Held-out tokens need smoothing. The k-gram's estimate is its count plus α_k times the estimate of the order below,

    p_k(x | h) = (c(h, x) + α_k · p_{k−1}(x | h′)) / (c(h) + α_k),        p_{−1}(x) = 1 / V,

with h′ the context h without its oldest token, c(h) = Σ_x c(h, x), and V the vocabulary: additive smoothing, interpolated
with the lower order by the weight α_k / (c(h) + α_k) (the predictive distribution under a Dirichlet prior: MacKay and
Bauman Peto, "A hierarchical Dirichlet language model", Natural Language Engineering 1(3), 1995). Each α_k is the one of
`ALPHAS` under which the training tokens, each left out of the counts when it is predicted, are likeliest: leaving-one-out
(Ney, Essen and Kneser, "On structuring probabilistic dependences in stochastic language modelling", Computer Speech and
Language 8(1), 1994). No held-out token takes part in that.

A window of k + 1 tokens is one integer, its code: its tokens are the digits of a number to the base V, the predicted token
last.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from cli import UserError
from support.stages import check_entries, read_json

ALPHAS = tuple(2.0**power for power in range(-10, 21))


class NgramCounts:
    """How often each window of `order` + 1 tokens occurs in rows [R, T], and each context, such a window's first tokens.

    Attributes:
        codes, counts: [n] the windows that occur, ascending, and how often.
        contexts, totals: [m] the contexts that occur, ascending, and how often they are followed by any token.
    """

    def __init__(self, rows: np.ndarray, order: int, vocabulary: int):
        self.order, self.vocabulary = order, vocabulary
        self.codes, self.counts = np.unique(encode_windows(rows, order, vocabulary), return_counts=True)
        self.contexts, first = np.unique(self.codes // vocabulary, return_index=True)
        self.totals = np.add.reduceat(self.counts, first) if len(first) else self.counts

    def look_up(self, codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """How often these windows and their contexts occur: [n] each."""
        return _look_up(self.codes, self.counts, codes), _look_up(self.contexts, self.totals, codes // self.vocabulary)


def name_of(order: int) -> str:
    """What a model of this order is called: after the tokens it counts together, one more than it predicts from."""
    names = ("unigram", "bigram", "trigram")
    return names[order] if order < len(names) else f"{order + 1}-gram"


def encode_windows(rows: np.ndarray, order: int, vocabulary: int) -> np.ndarray:
    """The codes of all windows that lie inside a row.

    Args:
        rows: [R, T] token numbers below `vocabulary`.

    Returns [R, T − order], the window of column t ending at position t + order. Raises ValueError when a token number is
    not below `vocabulary`, or a code would not fit into 63 bits.
    """
    if vocabulary ** (order + 1) >= 2**63:
        raise ValueError(f"windows of {order + 1} tokens of a vocabulary of {vocabulary:,} do not fit into 63 bits")
    if rows.size and not 0 <= rows.min() <= rows.max() < vocabulary:
        raise ValueError(f"token numbers go from {rows.min()} to {rows.max()}; a vocabulary of {vocabulary} ends below that")
    length = max(0, rows.shape[1] - order)
    return sum(rows[:, i : i + length].astype(np.int64) * vocabulary ** (order - i) for i in range(order + 1))


def conditional_entropy(ngrams: NgramCounts) -> float:
    """The plug-in estimate of H(X_t | the `order` tokens before) in nats: −Σ c(h, x)/N · ln(c(h, x)/c(h)).

    On the rows that were counted no prediction from these tokens alone has a lower cross-entropy. As an estimate for other
    text it is too low, the more so the fewer times a window occurs. Raises ValueError when nothing was counted.
    """
    if len(ngrams.codes) == 0:
        raise ValueError(f"there is no window of {ngrams.order + 1} tokens: the rows are too short")
    counts, totals = ngrams.look_up(ngrams.codes)
    return float(-(counts * np.log(counts / totals)).sum() / counts.sum())


def probabilities(
    tables: Sequence[NgramCounts], alphas: Sequence[float], codes: np.ndarray, left_out: int = 0
) -> np.ndarray:
    """p_k of windows, where k is the order of the last table: [n].

    Args:
        tables: the counts of the orders 0 … k.
        alphas: α_0 … α_k.
        codes: [n] windows of order k or above.
        left_out: 1 takes the window itself out of all counts, where it must have been counted; 0 does not.
    """
    estimate = 1 / tables[0].vocabulary
    for table, alpha in zip(tables, alphas, strict=True):
        counts, totals = table.look_up(codes % table.vocabulary ** (table.order + 1))
        estimate = (counts - left_out + alpha * estimate) / (totals - left_out + alpha)
    return estimate


def choose_alphas(tables: Sequence[NgramCounts]) -> list[float]:
    """α of each order, from `ALPHAS`, by the likelihood of the counted tokens when each is left out of the counts."""
    alphas: list[float] = []
    for order, table in enumerate(tables):
        lower = probabilities(tables[:order], alphas, table.codes, left_out=1) if order else 1 / table.vocabulary
        counts, totals = table.look_up(table.codes)
        likelihoods = [(counts * np.log((counts - 1 + a * lower) / (totals - 1 + a))).sum() for a in ALPHAS]
        alphas.append(ALPHAS[int(np.argmax(likelihoods))])
    return alphas


def held_out_loss(
    tables: Sequence[NgramCounts], alphas: Sequence[float], rows: np.ndarray, ignored: Sequence[int] = ()
) -> tuple[float, int]:
    """Sum of −ln p over the tokens that a model is judged on in `rows` [R, T] (all but each row's first, and the ids in
    `ignored`), and their number.

    A token with fewer than k tokens before it in its row is predicted by the order that it has.
    """
    top, vocabulary = len(tables) - 1, tables[0].vocabulary
    parts = [(top, rows if top > 0 else rows[:, 1:])]
    parts += [(order, rows[:, : order + 1]) for order in range(1, top)]  # the row's first windows
    loss, tokens = 0.0, 0
    for order, columns in parts:
        codes = encode_windows(columns, order, vocabulary).reshape(-1)
        codes = codes[~np.isin(codes % vocabulary, ignored)]
        loss -= float(np.log(probabilities(tables[: order + 1], alphas[: order + 1], codes)).sum())
        tokens += codes.size
    return loss, tokens


def read_baseline(file: Path, data_fingerprint: str) -> dict:
    """The content of a file of recipes/ngram_baseline.py; a UserError unless it is of the data with this fingerprint."""
    remedy = "it was not written by recipes/ngram_baseline.py, or is damaged: leave it out, or count again"
    entries = {"orders": list, "split": str, "data_fingerprint": str, "training_tokens": int, "hardware": str, "date": str}
    content = read_json(file, entries, remedy)
    for order in content["orders"]:
        check_entries(order, {"name": str, "cross_entropy": float, "perplexity": float, "tokens": int}, file, remedy)
    if content["data_fingerprint"] != data_fingerprint:
        raise UserError(f"{file} is of other data than the run ({data_fingerprint}): count the n-grams of the run's")
    return content


def _look_up(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """The values of `wanted` among ascending `keys`, 0 for those that are not there."""
    if len(keys) == 0:
        return np.zeros(len(wanted), dtype=np.int64)
    places = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[places] == wanted, values[places], 0)
