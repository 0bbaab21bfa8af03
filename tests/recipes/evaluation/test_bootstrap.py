"""Bootstrap intervals: their coverage on a known distribution, what pairing brings, and that they
repeat."""

import math

import numpy as np
import pytest

from evaluation.bootstrap import Interval, difference_interval, mean_interval


def blocks(generator, count: int = 100):
    """Blocks of 20 to 60 tokens whose mean loss is gamma distributed (mean 2, skewed) and whose
    tokens add noise."""
    counts = generator.integers(20, 61, size=count)
    return counts * generator.gamma(4.0, 0.5, size=count) + np.sqrt(counts) * generator.normal(
        size=count
    ), counts


def test_the_interval_covers_the_true_mean_as_often_as_it_says():
    generator, inside = np.random.default_rng(1), 0
    studies = 400
    for _ in range(studies):
        losses, counts = blocks(generator)
        interval = mean_interval(losses, counts, resamples=600)
        inside += interval.low <= 2.0 <= interval.high
    # 400 draws with probability 0.95 have a standard deviation of 1.1 points. The percentile
    # interval of 100 skewed blocks covers about 94 %: both together stay between 90 and 98 % by
    # more than three deviations.
    assert 0.90 < inside / studies < 0.98


def test_pairing_narrows_the_difference():
    generator = np.random.default_rng(3)
    losses, counts = blocks(generator)
    # the same hard blocks for both
    better = losses - 0.01 * counts + 0.001 * counts * generator.normal(size=len(counts))
    paired = difference_interval(better, counts, losses, counts)
    one, other = mean_interval(better, counts), mean_interval(losses, counts)
    # Every block is about 0.01 better, with a deviation of 0.001 over 100 blocks
    assert (
        paired.value == pytest.approx(-0.01, abs=0.001)
        and paired.low < paired.value < paired.high < 0
    )
    assert paired.high - paired.low < (one.high - one.low) / 100
    assert one.low < other.value < one.high  # which the two intervals alone could not tell


def test_it_repeats_and_perplexity_is_the_exponential_of_all_three():
    losses, counts = blocks(np.random.default_rng(5))
    first = mean_interval(losses, counts, seed=7)
    assert (
        first
        == mean_interval(losses.tolist(), counts.tolist(), seed=7)
        != mean_interval(losses, counts, seed=8)
    )
    assert Interval(1.0, 0.0, 2.0).map(math.exp) == Interval(math.e, 1.0, math.exp(2))


def test_what_is_refused():
    for losses, counts, message in (
        ([], [], "at least one"),
        ([1.0], [1, 2], r"got \[1, 2\]"),
        ([1, 2], [3, 0], "above 0"),
    ):
        with pytest.raises(ValueError, match=message):
            mean_interval(losses, counts)
