"""The rows of multi-query associative recall, the same as zoology's for the same arguments.

A row begins with pairs of a key and a value. After them each key comes once more, at an even
distance from the pairs, where its value is to be predicted; short distances are more frequent. All
other tokens are drawn from the whole vocabulary.

Source: Arora et al., "Zoology", arXiv 2312.04927; HazyResearch/zoology,
`zoology/data/multiquery_ar.py` and `data/utils.py`.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy
import torch
from torch import Tensor

from cli import UserError

POWER = 0.01  # of the law by which near places are chosen more often


@dataclass(frozen=True)
class Part:
    """Rows of one kind: tokens of a row, pairs in it, and how many rows."""

    length: int
    pairs: int
    rows: int

    def __str__(self) -> str:
        return f"{self.length}x{self.pairs}x{self.rows}"


@dataclass(frozen=True)
class Rows:
    """Rows and their questions: `inputs` `[rows, length]`; `places` `[rows, pairs]`, where a key is
    repeated; `values` `[rows, pairs]`, the token to be predicted there."""

    inputs: Tensor
    places: Tensor
    values: Tensor

    def __len__(self) -> int:
        return len(self.inputs)

    def batches(self, size: int) -> Iterator["Rows"]:
        """The rows in their order, `size` at a time; the last batch has what is left."""
        parts = (tensor.split(size) for tensor in (self.inputs, self.places, self.values))
        return (Rows(*batch) for batch in zip(*parts, strict=True))

    def to(self, device) -> "Rows":
        """The rows on a device, as 64-bit integers."""
        tensors = (self.inputs, self.places, self.values)
        return Rows(*(tensor.to(device, torch.int64) for tensor in tensors))


def read_parts(texts: Sequence[str], option: str, vocabulary: int) -> list[Part]:
    """Parts written as LENGTHxPAIRSxROWS; UserError, which names the option, for one that cannot be
    made."""
    parts = []
    for text in texts:
        if not re.fullmatch(r"[1-9]\d{0,8}(x[1-9]\d{0,8}){2}", text):
            what = "give LENGTHxPAIRSxROWS, three numbers of at least 1"
            raise UserError(f"--{option} {text}: {what}, such as 64x4x1000")
        part = Part(*map(int, text.split("x")))
        if part.length % 2 or 4 * part.pairs > part.length or part.length >= vocabulary:
            raise UserError(
                f"--{option} {text}: the length must be even, at least 4 * pairs = "
                f"{4 * part.pairs}, and below --vocabulary {vocabulary}"
            )
        parts.append(part)
    return parts


def seeds_of(seed: int, training: int, tests: int) -> tuple[list[int], list[int]]:
    """A seed for each part of the training and of the tests; no part of the one has a seed of the
    other."""
    state = numpy.random.RandomState(seed)
    train = state.randint(0, 2**31, size=training, dtype=numpy.int64)
    return train.tolist(), state.randint(2**31, 2**32, size=tests, dtype=numpy.int64).tolist()


def make_all_rows(
    training: Sequence[Part], tests: Sequence[Part], vocabulary: int, seed: int
) -> tuple[list[Rows], list[tuple[Part, Rows]]]:
    """The rows of the training, and those of the tests with what they are."""
    train, test = seeds_of(seed, len(training), len(tests))
    asked = [
        (part, make_rows(part, vocabulary, own)) for part, own in zip(tests, test, strict=True)
    ]
    pairs = zip(training, train, strict=True)
    return [make_rows(part, vocabulary, own) for part, own in pairs], asked


def make_rows(part: Part, vocabulary: int, seed: int) -> Rows:
    """The rows of a part: keys are below half of the vocabulary, values are the other half.

    Row by row, as NumPy's old generator has no other way to the numbers that zoology draws. There
    the tokens that are in no pair and no question come from torch's generator, whatever state it is
    in; here it is seeded with the part's seed.
    """
    state, half = numpy.random.RandomState(seed), vocabulary // 2
    pairs, everyone = part.pairs, range(part.rows)
    keys = 1 + numpy.stack([state.permutation(half - 1)[:pairs] for _ in everyone])
    values = half + numpy.stack([state.permutation(vocabulary - half)[:pairs] for _ in everyone])
    space = part.length // 2 - pairs
    chances = POWER * numpy.arange(1, space + 1) ** (POWER - 1)
    how = {"size": pairs, "replace": False, "p": chances / chances.sum()}
    places = 2 * (pairs + numpy.stack([state.choice(space, **how) for _ in everyone]))

    draw = torch.Generator().manual_seed(seed)
    inputs = torch.randint(vocabulary, (part.rows, part.length), generator=draw).int()
    inputs[:, 0 : 2 * pairs : 2] = torch.from_numpy(keys).int()
    inputs[:, 1 : 2 * pairs : 2] = torch.from_numpy(values).int()
    inputs.scatter_(1, torch.from_numpy(places), torch.from_numpy(keys).int())
    return Rows(inputs, torch.from_numpy(places), torch.from_numpy(values))
