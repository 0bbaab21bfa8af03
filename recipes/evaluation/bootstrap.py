"""Bootstrap confidence intervals of a mean over tokens, when the tokens come in blocks that are
drawn as a whole.

Tokens of one block (a row, a document) are not independent of each other, blocks are taken to be. A
statistic here is sum(losses) / sum(counts) over the blocks; each resample draws as many blocks as
there are, with replacement, and the interval of 95 % lies between two percentiles of the statistic
over the resamples.
"""

from dataclasses import dataclass

import numpy as np

RESAMPLES = 10_000
DRAWS_AT_ONCE = 2**18  # a few megabytes


@dataclass(frozen=True)
class Interval:
    """A value measured on all blocks, and the bounds of its confidence interval."""

    value: float
    low: float
    high: float

    def map(self, function) -> "Interval":
        """The interval of an increasing function of the value: percentiles go through it
        unchanged."""
        return Interval(*(float(function(number)) for number in (self.value, self.low, self.high)))


def mean_interval(losses, counts, *, seed: int = 0, resamples: int = RESAMPLES) -> Interval:
    """The interval of sum(losses) / sum(counts): of each block the sum of its losses, and how many
    tokens (or characters) it covers. The same arguments, with the `seed` of the resampling, give
    the same interval.

    Raises ValueError for no blocks, lists of different lengths, or blocks without any token."""
    return _interval(lambda sums: sums[..., 0] / sums[..., 1], [losses, counts], seed, resamples)


def difference_interval(losses, counts, other_losses, other_counts, *, seed: int = 0) -> Interval:
    """The interval of the mean of one model minus that of another on the same blocks, paired: a
    resample takes the same blocks of both. Arguments as in [`mean_interval`].

    What makes a block hard for both models falls out of the difference, so that its interval is far
    narrower than those of the two means."""
    columns = [losses, counts, other_losses, other_counts]
    return _interval(
        lambda sums: sums[..., 0] / sums[..., 1] - sums[..., 2] / sums[..., 3], columns, seed
    )


def _interval(statistic, columns: list, seed: int, resamples: int = RESAMPLES) -> Interval:
    """The interval of a function of the columns' sums over the blocks, losses and counts in
    turn."""
    lengths = [len(column) for column in columns]
    if not 0 < min(lengths) == max(lengths):
        raise ValueError(
            f"losses and counts must be of the same blocks, at least one; got {lengths}"
        )
    blocks = np.stack([np.asarray(column, dtype=np.float64) for column in columns], axis=1)
    if (blocks[:, 1::2] <= 0).any():
        raise ValueError("every block needs a count above 0: leave blocks without tokens out")
    generator, count = np.random.default_rng(seed), len(blocks)
    sums, at_once = [], max(1, DRAWS_AT_ONCE // count)
    for begin in range(0, resamples, at_once):
        shape = min(at_once, resamples - begin), count
        draws = generator.integers(0, count, size=shape) + count * np.arange(shape[0])[:, None]
        times_drawn = np.bincount(draws.ravel(), minlength=draws.size).reshape(shape)
        sums.append(times_drawn @ blocks)
    low, high = np.quantile(statistic(np.concatenate(sums)), [0.025, 0.975])
    return Interval(float(statistic(blocks.sum(0))), float(low), float(high))
