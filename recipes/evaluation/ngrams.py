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
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cli import UserError
from support.stages import read_json

ALPHAS = tuple(2.0**power for power in range(-10, 21))


@dataclass(frozen=True)
class NgramCounts:
    """How often each window of order + 1 tokens occurs.

    A window is one integer: its tokens are the digits of a number to the base V, the predicted token last.

    Attributes:
        order: earlier tokens in a window.
        vocabulary: V, the number of different tokens there may be.
        codes, counts: [n] the windows that occur, ascending, and how often.
        contexts, totals: [m] the windows without their last token, ascending, and how often they are followed by any.
    """

    order: int
    vocabulary: int
    codes: np.ndarray
    counts: np.ndarray
    contexts: np.ndarray
    totals: np.ndarray


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
    length = rows.shape[1] - order
    codes = np.zeros((len(rows), max(0, length)), dtype=np.int64)
    for start in range(order + 1 if length > 0 else 0):
        codes *= vocabulary
        codes += rows[:, start : start + length]
    return codes


def count_ngrams(rows: np.ndarray, order: int, vocabulary: int) -> NgramCounts:
    """Counts the windows of `order` + 1 tokens in `rows` [R, T]; order 0 counts every token, a row's first among them."""
    codes, counts = np.unique(encode_windows(rows, order, vocabulary), return_counts=True)
    contexts, first = np.unique(codes // vocabulary, return_index=True)
    totals = np.add.reduceat(counts, first) if len(counts) else counts
    return NgramCounts(order, vocabulary, codes, counts, contexts, totals)


def conditional_entropy(ngrams: NgramCounts) -> float:
    """The plug-in estimate of H(X_t | the `order` tokens before) in nats: −Σ c(h, x)/N · ln(c(h, x)/c(h)).

    On the rows that were counted no prediction from these tokens alone has a lower cross-entropy. As an estimate for other
    text it is too low, the more so the fewer times a window occurs. Raises ValueError when nothing was counted.
    """
    if len(ngrams.codes) == 0:
        raise ValueError(f"there is no window of {ngrams.order + 1} tokens: the rows are too short")
    totals = _look_up(ngrams.contexts, ngrams.totals, ngrams.codes // ngrams.vocabulary)
    logarithms = np.log(ngrams.counts / totals)
    return float(-(ngrams.counts * logarithms).sum() / ngrams.counts.sum())


def probabilities(tables: list[NgramCounts], alphas: list[float], codes: np.ndarray, left_out: int = 0) -> np.ndarray:
    """p_k of windows of order k, the order of the last table.

    Args:
        tables: the counts of the orders 0 … k.
        alphas: α_0 … α_k.
        codes: [n] windows of order k.
        left_out: 1 takes the window itself out of all counts, where it must have been counted; 0 does not.

    Returns [n].
    """
    *below, table = tables
    lower = _lower(below, alphas, table, codes, left_out)
    return _smooth(table, alphas[len(below)], codes, lower, left_out)


def choose_alphas(tables: list[NgramCounts]) -> list[float]:
    """α of each order, from `ALPHAS`, by the likelihood of the counted tokens when each is left out of the counts."""
    alphas: list[float] = []
    for order, table in enumerate(tables):
        lower = _lower(tables[:order], alphas, table, table.codes, left_out=1)
        likelihoods = [
            (table.counts * np.log(_smooth(table, alpha, table.codes, lower, left_out=1))).sum() for alpha in ALPHAS
        ]
        alphas.append(ALPHAS[int(np.argmax(likelihoods))])
    return alphas


def held_out_loss(
    tables: list[NgramCounts], alphas: list[float], rows: np.ndarray, ignored: Sequence[int] = ()
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
        loss -= float(np.log(probabilities(tables[: order + 1], alphas, codes)).sum())
        tokens += codes.size
    return loss, tokens


def read_baseline(file: Path, data_fingerprint: str) -> dict:
    """The content of a file of recipes/ngram_baseline.py; a UserError unless it is of the data with this fingerprint."""
    content = read_json(file)
    if not isinstance(content, dict) or "orders" not in content:
        raise UserError(f"{file} has no orders: it was not written by recipes/ngram_baseline.py")
    if content["data_fingerprint"] != data_fingerprint:
        raise UserError(f"{file} is of other data than the run ({data_fingerprint}): count the n-grams of the run's")
    return content


def _lower(below: list[NgramCounts], alphas, table: NgramCounts, codes: np.ndarray, left_out: int) -> np.ndarray:
    """The estimate of the order below `table`'s for its windows: [n], or 1 / V below order 0."""
    if not below:
        return np.full(len(codes), 1 / table.vocabulary)
    return probabilities(below, alphas, codes % table.vocabulary**table.order, left_out)


def _smooth(table: NgramCounts, alpha: float, codes: np.ndarray, lower: np.ndarray, left_out: int) -> np.ndarray:
    counts = _look_up(table.codes, table.counts, codes) - left_out
    totals = _look_up(table.contexts, table.totals, codes // table.vocabulary) - left_out
    return (counts + alpha * lower) / (totals + alpha)


def _look_up(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """The values of `wanted` among ascending `keys`, 0 for those that are not there."""
    if len(keys) == 0:
        return np.zeros(len(wanted), dtype=np.int64)
    places = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[places] == wanted, values[places], 0)
