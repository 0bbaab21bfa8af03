"""Rows that drill recall: many short associations, passages that come again, sentences of many
forms; every row asks often.

Passkeys and facts ask for one thing in many tokens; a model that starts from nothing finds no
gradient in them. These rows teach the step before: that what followed something once will follow it
again (an induction head, or its like in a memory). Shapes and positions as in [`examples`].
"""

import functools
import random
from collections.abc import Callable

import numpy as np

from .examples import WORDING, Document, DoesNotFit, Encode, Example, Question
from .filler import Filler

TOKENS_PER_CODE = 64  # a row of 1,024 tokens has up to 16 people
GAP = 40  # a row of n tokens has up to n / 40 tokens between two sentences
FRESH, ECHO = (10, 50), (8, 24)  # tokens of a piece of new text, and of one that comes again
KNOWN_FROM = 2  # an echo can be known for one from its third token on


def codes_row(
    rng: random.Random, encode: Encode, names, filler: Filler, length: int, language: str = "pt"
) -> Example:
    """Real text in which people are given codes (a number or a surname), all of which are asked for
    until the row is full.

    Raises [`DoesNotFit`] when not even one code and its question fit.
    """
    names.seed_instance(rng.getrandbits(64))
    people, codes, most = set(), {}, max(1, length // TOKENS_PER_CODE)
    wanted = rng.randint(min(2, most), most)
    while len(people) < wanted:
        people.add(names.first_name())
    for name in sorted(people):
        surname = rng.random() >= 0.5
        codes[name] = names.last_name().split()[-1] if surname else f"{rng.randrange(100_000):05d}"
    statements = [WORDING[language]["code"].format(name=name) for name in codes]
    stop, *pieces = encode([".", *statements, *(f" {code}" for code in codes.values())])
    pairs = zip(pieces[: len(codes)], pieces[len(codes) :], strict=True)
    sentences = dict(zip(codes, pairs, strict=True))

    document, stated, questions = Document(), {}, []
    for name in rng.sample(list(codes), len(codes)):
        document.add(filler.take(rng, rng.randint(0, length // GAP)))
        stated[name] = document.add(*sentences[name])
        document.add(stop)
    turns: list[str] = []
    while True:
        turns = turns or rng.sample(list(codes), len(codes))
        name = turns.pop()
        document.add(filler.take(rng, rng.randint(0, length // GAP)))
        asked = document.add(*sentences[name])
        if asked[1] >= length:
            break
        questions.append(Question("code", codes[name], stated[name], asked))
        document.add(stop)
    if not questions:
        raise DoesNotFit(f"{len(codes)} code(s) and a question take more than {length} tokens")
    return Example(document.tokens()[:length], tuple(questions))


def echo_row(
    rng: random.Random, decode: Callable[..., str], filler: Filler, length: int
) -> Example:
    """Real text in which pieces of 8 to 24 tokens come again, about as often as new ones of 10 to
    50. An answer, a text by `decode`, is an echo from its third token on."""
    text, document, read, questions = filler.take(rng, length), Document(), 0, []
    while document.length < length:
        if document.length < ECHO[1] or rng.random() < 0.5:
            count = rng.randint(*FRESH)
            document.add(text[read : read + count])
            read += count
            continue
        count = rng.randint(*ECHO)
        first = rng.randint(0, document.length - count)
        begin, end = document.add(document.tokens()[first : first + count])
        begin, end = begin + KNOWN_FROM, min(end, length - 1)
        if begin <= end:
            stated = (first + KNOWN_FROM, first + KNOWN_FROM + end - begin)
            answer = decode(document.tokens()[begin : end + 1])
            questions.append(Question("echo", answer, stated, (begin, end)))
    return Example(document.tokens()[:length], tuple(questions))


def forms_row(
    rng: random.Random, encode: Encode, filler: Filler, length: int, language: str = "pt"
) -> Example:
    """Real text with invented facts of many forms, all of which are asked for at its end:
    [`asking_row`].

    Raises [`DoesNotFit`] when the facts and their questions are longer.
    """
    from hf_infini.tools.asking_rows import asking_row

    try:
        row, asked = asking_row(rng, encode, functools.partial(filler.take, rng), length, language)
    except ValueError as error:
        raise DoesNotFit(str(error)) from error
    questions = tuple(Question("form", *question) for question in asked)
    return Example(np.asarray(row, dtype=np.int64), questions)
