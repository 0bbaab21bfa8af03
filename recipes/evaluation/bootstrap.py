"""Bootstrap confidence intervals of a mean over tokens, when the tokens come in blocks that are drawn as a whole.

Tokens of one block (a row, a document) are not independent of each other, blocks are taken to be. A statistic here is
sum(losses) / sum(counts) over the blocks; each resample draws as many blocks as there are, with replacement, and the
interval lies between two percentiles of the statistic over the resamples.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 10_000
LEVEL = 0.95
_CHUNK_NUMBERS = 2**22  # block numbers drawn at a time: 32 MiB


@dataclass(frozen=True)
class Interval:
    """A value measured on all blocks, and the bounds of its confidence interval."""

    value: float
    low: float
    high: float

    def map(self, function) -> "Interval":
        """The interval of an increasing function of the value: percentiles go through it unchanged."""
        return Interval(*(float(function(number)) for number in (self.value, self.low, self.high)))


def mean_interval(losses, counts, *, seed: int = 0, resamples: int = RESAMPLES, level: float = LEVEL) -> Interval:
    """The interval of sum(losses) / sum(counts).

    Args:
        losses: [blocks], the sum of the losses of each block.
        counts: [blocks], how many tokens (or characters) each sum covers.
        seed: of the resampling; the same arguments give the same interval.
        resamples: how many resamples.
        level: the share of the resamples inside the interval, between 0 and 1.

    Raises ValueError for no blocks, lists of different lengths, negative counts, or blocks without any token.
    """
    columns = _check(losses, counts)
    means = [sums[:, 0] / sums[:, 1] for sums in _resampled_sums(columns, seed, resamples)]
    return _interval(columns[:, 0].sum() / columns[:, 1].sum(), np.concatenate(means), level)


def difference_interval(
    losses, counts, other_losses, other_counts, *, seed: int = 0, resamples: int = RESAMPLES, level: float = LEVEL
) -> Interval:
    """The interval of the mean of one model minus that of another, paired: a resample takes the same blocks of both.

    What makes a block hard for both models falls out of the difference, so that its interval is far narrower than those
    of the two means.

    Args:
        losses, counts: as in [`mean_interval`]; other_losses, other_counts: of the other model on the same blocks.
    """
    columns = np.concatenate([_check(losses, counts), _check(other_losses, other_counts, blocks=len(losses))], axis=1)
    totals = columns.sum(0)
    differences = [s[:, 0] / s[:, 1] - s[:, 2] / s[:, 3] for s in _resampled_sums(columns, seed, resamples)]
    value = totals[0] / totals[1] - totals[2] / totals[3]
    return _interval(value, np.concatenate(differences), level)


def _check(losses: Sequence, counts: Sequence, blocks: int | None = None) -> np.ndarray:
    """[blocks, 2] float64: losses and counts."""
    if not 0 < len(losses) == len(counts) == (blocks or len(losses)):
        raise ValueError(f"losses and counts must be of the same blocks, at least one; got {len(losses)} and {len(counts)}")
    columns = np.stack([np.asarray(losses, dtype=np.float64), np.asarray(counts, dtype=np.float64)], axis=1)
    if (columns[:, 1] <= 0).any():
        raise ValueError("every block needs a count above 0: leave blocks without tokens out")
    return columns


def _resampled_sums(columns: np.ndarray, seed: int, resamples: int) -> Iterator[np.ndarray]:
    """Yields [some resamples, columns]: the sums over the blocks that each resample drew, the same for every call."""
    generator = np.random.default_rng(seed)
    blocks = len(columns)
    step = max(1, _CHUNK_NUMBERS // blocks)
    for start in range(0, resamples, step):
        drawn = generator.integers(0, blocks, size=(min(step, resamples - start), blocks))
        yield np.stack([column[drawn].sum(1) for column in columns.T], axis=1)


def _interval(value: float, resampled: np.ndarray, level: float) -> Interval:
    low, high = np.quantile(resampled, [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(value), float(low), float(high))
