"""Documents that ask for what they said before, as tokens; here: a number hidden in real text.

Everything is drawn from a `random.Random`, so that a seed gives the same examples on every machine.
The pieces of a document are encoded separately, and an answer always with the space in front of it
(" 48213"): it has the same tokens where the text states it and where it is asked for. Positions and
lengths are in tokens, segments are counted from the document's first token.

`encode` is `functools.partial(tokenization.encode_texts, tokenizer)`, `names` is
`biographies.portuguese_names()`.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import yaml

from .filler import Filler

Encode = Callable[[Sequence[str]], "list[np.ndarray]"]

WORDING: dict[str, dict] = yaml.safe_load(
    Path(__file__).with_name("sentences.yaml").read_text(encoding="utf-8")
)


class DoesNotFit(ValueError):
    """The example cannot be made with this length, or with segments this short; the message gives
    the sizes."""


@dataclass(frozen=True)
class Question:
    """An answer that the document first states and later asks for.

    Args:
        fact: "passkey", a name of `facts.FACT_NAMES`, or what a drill asks for.
        answer: its text, without the space in front.
        stated, asked: the first and the last of its tokens, at both places.
        begins: the first token of what asks, which goes on to the answer; `None`: not known.
    """

    fact: str
    answer: str
    stated: tuple[int, int]
    asked: tuple[int, int]
    begins: int | None = None


@dataclass(frozen=True)
class Example:
    """A document: `tokens` (1-D, int64), and its `questions` in the order in which they are
    asked."""

    tokens: np.ndarray
    questions: tuple[Question, ...]

    def after(self, begin: Sequence[int]) -> "Example":
        """The same after other tokens."""
        moved, count = [], len(begin)
        for asked in self.questions:
            stated, span = ((a + count, b + count) for a, b in (asked.stated, asked.asked))
            begins = None if asked.begins is None else asked.begins + count
            moved.append(replace(asked, stated=stated, asked=span, begins=begins))
        tokens = np.concatenate([np.asarray(begin, dtype=np.int64), self.tokens])
        return Example(tokens, tuple(moved))


class Document:
    """Tokens that are appended to each other."""

    def __init__(self):
        self.parts: list[np.ndarray] = []
        self.length = 0

    def add(self, *pieces: np.ndarray) -> tuple[int, int]:
        """Appends the pieces and returns the positions of the last one's first and last token."""
        for piece in pieces:
            self.parts.append(piece)
            self.length += len(piece)
        return self.length - len(pieces[-1]), self.length - 1

    def tokens(self) -> np.ndarray:

        return np.concatenate(self.parts)


def passkey_example(
    rng: random.Random,
    encode: Encode,
    filler: Filler,
    length: int,
    depth: float,
    questions: int = 1,
    language: str = "pt",
) -> Example:
    """Real text of exactly `length` tokens with a number in it, which is asked for at the very end.

    Args:
        depth: share of the filler that stands in front of the number, 0 to 1.
        questions: how often the number is asked for; all questions but the last stand anywhere
            after it.
        language: of the sentences that state it and ask for it, a key of `WORDING`.

    Raises [`DoesNotFit`] when the number and the questions alone are longer.
    """
    number, sentences = f"{rng.randrange(100_000):05d}", WORDING[language]
    needle = rng.choice(sentences["needles"]).split("{answer}")
    asks = [rng.choice(sentences["questions"]) for _ in range(questions)]
    answer, stop, before, between, after, *asks = encode([f" {number}", ".\n", *needle, *asks])
    room = length - sum(map(len, (before, answer, between, answer, after, *asks)))
    room -= questions * len(answer) + (questions - 1) * len(stop)
    if room < 0:
        needed = f"the number and {questions} question(s) take {length - room} tokens"
        raise DoesNotFit(f"{needed}, more than {length}")
    text, place = filler.take(rng, room), round(depth * room)
    document, asked = Document(), []
    stated = document.add(text[:place], before, answer)
    document.add(between, answer, after)
    ends = [*sorted(rng.randint(place, room) for _ in asks[1:]), room]
    for ask, end in zip(asks, ends, strict=True):
        asked.append(document.add(text[place:end], ask, answer))
        if len(asked) < questions:
            document.add(stop)
        place = end
    found = [
        Question("passkey", number, stated, span, span[0] - len(ask))
        for ask, span in zip(asks, asked, strict=True)
    ]
    return Example(document.tokens(), tuple(found))
