"""Real text around what has to be recalled: a long stream of tokens, of which any number can be
taken from anywhere.

A stream is one integer array: documents one after the other, an end-of-text token after each.
"""

import random

import numpy as np


def read_stream(stream: np.ndarray, start: int, count: int) -> np.ndarray:
    """`count` tokens (int64) from `start` on; after its end the stream begins again."""
    return stream.take(np.arange(start, start + count), mode="wrap").astype(np.int64)


class Filler:
    """Running text as part of one document: between two articles of the stream stands a blank line.

    Args:
        stream: the articles; where more is taken than there is, they come again.
        end_of_text: the token that stands between two articles in the stream.
        blank_line: the tokens to put there instead.
    """

    def __init__(self, stream: np.ndarray, end_of_text: int, blank_line: np.ndarray):
        self.stream, self.end_of_text, self.blank_line = stream, end_of_text, blank_line

    def take(self, rng: random.Random, count: int) -> np.ndarray:
        """`count` tokens (int64) from a place drawn at random, often in the middle of an
        article."""
        tokens = read_stream(self.stream, rng.randrange(len(self.stream)), count)
        first, *others = np.split(tokens, np.flatnonzero(tokens == self.end_of_text))
        parts = [first, *(part for other in others for part in (self.blank_line, other[1:]))]
        return np.concatenate(parts)[:count]
