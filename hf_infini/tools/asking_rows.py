"""Rows that a score of kept tokens is fitted on: running text with invented facts, all of which are
asked for at its end."""

import functools
import random
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import yaml
from transformers import PreTrainedTokenizerBase

from ..models.loading import PLAIN_TEXT, opening
from ..ops.checks import check_types
from ..options import check_number
from .text_rows import ids_from, ids_of_text

TOKENS_PER_FACT = 280  # a row of 1,700 tokens states six facts
SYLLABLES = "ba ce di fo gu la me ni po ru sa te vi zo xa lu mo ra pe ki".split()

Span = tuple[int, int]  # the first and the last of a row's tokens


@functools.cache
def fact_forms() -> dict[str, dict]:
    """The facts' forms and words, by language."""
    return yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))


@check_types
def asking_rows(
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    *,
    rows: int = 24,
    length: int = 1700,
    seed: int = 0,
) -> list[list[int]]:
    """Rows for [`hf_infini.fit_keep_score`] from any text, such as the one that will be asked:
    half of them state and ask in English, the others in Portuguese. Between the facts are
    pieces of the text; a short one comes again.

    Args:
        tokenizer: of the model that is fitted.
        text: running text, not empty.
        rows: how many.
        length: tokens of each.
        seed: of all that is drawn.

    Returns:
        token ids, `rows` lists of `length`.

    Raises:
        ValueError: there is no text, halves of characters are in it, or rows are too
            short.
    """
    check_number("rows", rows, {"at_least": 1})
    check_number("length", length, {"at_least": 1})
    running = ids_of_text(tokenizer, text)
    languages = [*fact_forms()]
    return [
        row_of_text(
            random.Random(f"{seed}/{number}"),
            tokenizer,
            running,
            length,
            languages[number % len(languages)],
        )
        for number in range(rows)
    ]


def row_of_text(
    rng: random.Random,
    tokenizer: PreTrainedTokenizerBase,
    running: Sequence[int],
    length: int,
    language: str,
) -> list[int]:
    """An [`asking_row`] of `length` tokens, whose text goes on from any place of `running`, ids of
    text, and begins again at its end; in front of it what `tokenizer` puts in front of texts. `rng`
    and `language`: as there."""
    first, begin = rng.randrange(len(running)), opening(tokenizer)

    def encode(texts: Sequence[str]) -> list[list[int]]:
        return tokenizer(list(texts), **PLAIN_TEXT)["input_ids"]

    take = functools.partial(ids_from, running, first)
    return begin + asking_row(rng, encode, take, length - len(begin), language)[0]


def asking_row(
    rng: random.Random,
    encode: Callable[[Sequence[str]], Sequence],
    take: Callable[[int], Iterable[int]],
    length: int,
    language: str,
) -> tuple[list[int], list[tuple[str, Span, Span]]]:
    """A row of `length` tokens, and of each question, in order, the answer, and where it is stated
    and asked for; ValueError where the facts and their questions are longer. `rng`: draws facts and
    places; `encode` gives the ids of several texts, `take` so many ids of running text; `language`:
    of the facts, a key of [`fact_forms`]."""
    facts = [invented_fact(rng, language) for _ in range(max(1, length // TOKENS_PER_FACT))]
    pieces = [
        list(ids)
        for ids in encode(
            [".\n", *(part for fact in facts for part in (f"\n{fact[0]}", f" {fact[1]}"))]
        )
    ]
    stop, pairs = pieces[0], list(zip(pieces[1::2], pieces[2::2], strict=True))
    room = (
        length
        - sum(2 * len(start) + 2 * len(answer) + 2 * len(stop) for start, answer in pairs)
        + len(stop)
    )
    if room < 0:
        raise ValueError(
            f"{len(facts)} facts and their questions take {length - room} tokens, "
            f"more than {length}"
        )
    text, row, stated, place = list(take(room)), [], [], 0

    def add(start: list[int], answer: list[int]) -> Span:
        row.extend(start + answer)
        return len(row) - len(answer), len(row) - 1

    for (start, answer), end in zip(
        pairs, sorted(rng.randint(0, room) for _ in pairs), strict=True
    ):
        stated.append(add(text[place:end] + start, answer))
        row += stop
        place = end
    row += text[place:]
    questions = []
    for number in rng.sample(range(len(facts)), len(facts)):
        questions.append((facts[number][1], stated[number], add(*pairs[number])))
        row += stop
    return row[:length], questions


def invented_fact(rng: random.Random, language: str) -> tuple[str, str]:
    """The beginning of a sentence, and what it ends with, as drawn by `rng`; `language`: a key of
    [`fact_forms`]."""
    words = fact_forms()[language]

    def drawn(match: re.Match) -> str:
        kind = match[1]
        if kind.isdigit():
            return str(rng.randrange(10 ** (int(kind) - 1), 10 ** int(kind)))
        if kind == "word":
            return "".join(rng.choice(SYLLABLES) for _ in range(rng.randint(2, 4))).capitalize()
        if kind == "code":
            return "".join(rng.choice("ABCDEFGHJKLMNPQRSTUVWXYZ") for _ in range(2)) + str(
                rng.randrange(100, 10_000)
            )
        return rng.choice(words[kind])

    start, answer = (re.sub(r"{(\w+)}", drawn, part) for part in rng.choice(words["forms"]))
    return start, answer
