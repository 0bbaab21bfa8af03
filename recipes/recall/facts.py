"""Biographies of invented people that ask for the facts they stated, as tokens; lengths and
positions as in [`examples`]."""

import itertools
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from corpora import biographies
from corpora.biographies import SENTENCES, Person, Sentence, forbid_answers, invent_person

from .examples import Document, DoesNotFit, Encode, Example, Question
from .filler import Filler

FACT_NAMES = tuple(SENTENCES["facts"])
# tokens of a piece of real text among the invented paragraphs of a training row
REAL_TEXT = (32, 256)


@dataclass(frozen=True)
class _Statement:
    """The tokens of a sentence that states a fact."""

    name: str
    before: np.ndarray
    answer: np.ndarray
    after: np.ndarray

    def __len__(self) -> int:
        return len(self.before) + len(self.answer) + len(self.after)


def invent_clear_person(rng: random.Random, names) -> tuple[Person, list[list[Sentence]]]:
    """A person and the opening of the biography, in which every answer occurs once, in its own
    sentence."""
    names.seed_instance(rng.getrandbits(64))
    while True:
        person = invent_person(rng, names)
        opening = biographies.write_opening(rng, person)
        text = " ".join([person.name, *map(str, itertools.chain.from_iterable(opening))])
        # no city is a surname here, and so on
        if all(_occurs_once(answer, text) for answer in person.answers.values()):
            return person, opening


def _occurs_once(answer: str, text: str) -> bool:
    if text.lower().count(answer.lower()) == 1:
        return True
    return len(re.findall(rf"\b{re.escape(answer)}\b", text, re.IGNORECASE)) == 1


def fact_example(
    rng: random.Random,
    encode: Encode,
    names,
    fact: str,
    distance: int,
    segment_length: int,
    lines: Sequence[str] | None = None,
) -> Example:
    """A biography that asks for a fact in the segment that comes `distance` segments after the one
    that stated it.

    The document: other text, so that the statement stands where it shall; the name and the opening
    up to the end of the sentence with the fact; paragraphs in which no answer occurs; the prompt
    and the answer. The first token of the answer lies in segment s where it is stated and in
    segment s + `distance` where it is asked for, and the answer crosses no border of segments where
    that can be avoided. All pairs of places inside their segments have the same probability. With
    `distance` 0 everything from the name to the answer is in one segment, with as many of the
    sentences before the fact's own as there is room for.

    Args:
        fact: one of `FACT_NAMES`.
        distance: in segments of `segment_length` tokens, 0 or more.
        lines: of real text, to stand in front and between; `None`: invented paragraphs.

    Raises [`DoesNotFit`] when the text between the two places is longer than the distance."""
    person, opening = invent_clear_person(rng, names)
    (title, prompt), statements = _encode_opening(encode, person, opening, [fact])
    last = next(number for number, statement in enumerate(statements) if statement.name == fact)
    statements = statements[: last + 1]
    answer, after = statements[-1].answer, statements[-1].after
    width = len(answer)
    if distance == 0:
        ends = len(title) + len(prompt) + width
        need = ends + len(statements[-1])
        if need > segment_length:
            raise DoesNotFit(
                f"statement, question and answer of {fact} take {need} tokens, a segment "
                f"{segment_length}"
            )
        while ends + sum(map(len, statements)) > segment_length:
            statements = statements[1:]
    # within the opening
    stated_at = len(title) + sum(map(len, statements)) - len(after) - width
    # from one first token to the other, with nothing between
    least = width + len(after) + len(prompt)
    start, end = _draw_places(rng, distance, segment_length, width, least, stated_at)
    gap, front = (
        distance * segment_length + end - start - least,
        (start - stated_at) % segment_length,
    )

    other = invent_person(rng, names)
    forbidden = forbid_answers(person)

    def write(about: Person) -> Iterator[str]:
        if lines is None:
            return biographies.write_paragraphs(rng, names, about, forbidden)
        return _take_lines(rng, lines, forbidden)

    document = Document()
    text = _encode_enough(encode, write(other), front)
    document.add(text[len(text) - front :], title)
    for statement in statements:
        stated = document.add(statement.before, statement.answer)
        document.add(statement.after)
    text = _encode_enough(encode, write(person), gap)
    asked = document.add(text[:gap], prompt, answer)
    question = Question(fact, person.answers[fact], stated, asked, asked[0] - len(prompt))
    return Example(document.tokens(), (question,))


def facts_row(rng: random.Random, encode: Encode, names, filler: Filler, length: int) -> Example:
    """A row to learn from: exactly `length` tokens of a biography that asks for every fact it
    states.

    Each question stands on a line of its own at a place drawn at random between its statement and
    the end of the row: all places alike for one half of them, all orders of magnitude of the
    distance alike for the other, so that what lies inside the window is asked for in long rows too.
    Between them, after the opening, invented paragraphs alternate by chance with pieces of real
    text. Where the opening and its questions fill more than three quarters of the row, paragraphs
    of the opening are left out, then sentences.

    Raises [`DoesNotFit`] when not even one fact fits.
    """
    person, opening = invent_clear_person(rng, names)
    facts = [[sentence.name for sentence in paragraph] for paragraph in opening]
    every = sum(facts, [])
    (title, *prompts), statements = _encode_opening(encode, person, opening, every)
    stop, newline = encode([".\n", "\n"])
    asks = dict(zip(every, prompts, strict=True))

    def length_without_gap() -> int:
        sizes = (len(s) + len(asks[s.name]) + len(s.answer) + len(stop) for s in statements)
        return len(title) + sum(sizes)

    while 4 * length_without_gap() > 3 * length and len(statements) > 1:
        dropped = facts.pop(rng.randrange(len(facts))) if len(facts) > 1 else [statements[-1].name]
        statements = [statement for statement in statements if statement.name not in dropped]
    if 4 * length_without_gap() > 3 * length:
        raise DoesNotFit(f"rows of {length} tokens have no room for a fact and its question")

    parts = [title, *(part for s in statements for part in (s.before, s.answer, s.after))]
    gap = length - length_without_gap()
    lines = _encode_lines(
        encode, biographies.write_paragraphs(rng, names, person, forbid_answers(person))
    )
    while gap > 0:
        if rng.random() < 0.5:
            unit = np.concatenate([newline, filler.take(rng, rng.randint(*REAL_TEXT))])
        else:
            unit = next(lines)
        parts.append(unit[:gap])
        gap -= len(parts[-1])
    tokens, spans = _ask_anywhere(rng, np.concatenate(parts), len(title), statements, asks, stop)
    questions = (Question(name, person.answers[name], *places) for name, *places in spans)
    return Example(tokens, tuple(questions))


def paragraphs_row(rng: random.Random, encode: Encode, names, length: int) -> np.ndarray:
    """Exactly `length` tokens of the invented paragraphs that stand between the facts and the
    questions of [`fact_example`]: other people, places and years without end, none of which is ever
    asked for."""
    names.seed_instance(rng.getrandbits(64))
    person = invent_person(rng, names)
    paragraphs = biographies.write_paragraphs(rng, names, person, forbid_answers(person))
    return _encode_enough(encode, paragraphs, length)[:length]


def _ask_anywhere(
    rng: random.Random,
    text: np.ndarray,
    opening_at: int,
    statements: "Sequence[_Statement]",
    asks: dict[str, np.ndarray],
    stop: np.ndarray,
) -> tuple[np.ndarray, list[tuple]]:
    """Puts the question for every statement in, with its answer, at a place drawn at random after
    the statement: within the opening at the end of a sentence, after it anywhere.

    Args:
        text: the row without questions; the statements stand in it one after the other from
            `opening_at` on.
        asks: the prompt for each fact; `stop` follows the answers.

    Returns the row and, in the order of the questions, each fact's name and the places of its
    answer: stated and asked.
    """
    ends = list(itertools.accumulate(map(len, statements), initial=opening_at))[1:]
    places = []
    for end, statement in zip(ends, statements, strict=True):
        far, near = len(text) - end, rng.random() >= 0.5
        target = end + (int((far + 1) ** rng.random()) - 1 if near else rng.randint(0, far))
        target = next((border for border in ends if border >= target), target)
        places.append((target, rng.random(), end, statement))
    places.sort(key=lambda place: place[:2])
    pieces = [np.concatenate([asks[each.name], each.answer, stop]) for *_, each in places]
    targets = np.array([target for target, *_ in places])
    lengths, spans = np.array(list(map(len, pieces))), []
    earlier = np.cumsum(lengths) - lengths
    for before, (target, _, end, statement) in zip(earlier.tolist(), places, strict=True):
        width = len(statement.answer)
        stated = end - len(statement.after) - width
        stated += int(lengths[targets <= stated].sum())
        asked = target + before + len(asks[statement.name])
        spans.append((statement.name, (stated, stated + width - 1), (asked, asked + width - 1)))
    return np.insert(text, np.repeat(targets, lengths), np.concatenate(pieces)), spans


def _encode_opening(
    encode: Encode, person: Person, opening: list[list[Sentence]], asked: Sequence[str]
) -> "tuple[list[np.ndarray], list[_Statement]]":
    """The tokens of the title and of the prompts of the facts `asked`, and those of all sentences
    of the opening."""
    texts = [
        f"\n\n{person.name}\n",
        *(f"\n{biographies.fact_prompt(person, name)}" for name in asked),
    ]
    heads, names = len(texts), []
    for paragraph in opening:
        for number, sentence in enumerate(paragraph):
            # In quotation marks the answer would have no space in front of it, and other tokens
            # than after the prompt
            before, after = sentence.before.removesuffix("“"), sentence.after.removeprefix("”")
            if not before.endswith(" "):
                raise ValueError(
                    f"an answer needs a space in front of it, and has none in {sentence}"
                )
            texts += [("\n" if number == 0 else " ") + before[:-1], f" {sentence.answer}", after]
            names.append(sentence.name)
    heads, tokens = (found := encode(texts))[:heads], found[heads:]
    parts = zip(names, tokens[::3], tokens[1::3], tokens[2::3], strict=True)
    return heads, [_Statement(*part) for part in parts]


def _draw_places(
    rng: random.Random, distance: int, segment_length: int, width: int, least: int, stated_at: int
) -> tuple[int, int]:
    """Places inside their segments, which are `distance` apart, of an answer's first token where it
    is stated, and where it is asked for.

    Args:
        width: tokens of the answer; least: from one place to the other at the least.
        stated_at: tokens that stand in front of the answer in its document; with a distance of 0
            they are in the segment.
    """
    far = distance * segment_length
    last = segment_length - (width if width <= segment_length else 1)
    starts = range(stated_at if distance == 0 else 0, last + 1)
    first_ends = [max(0, start + least - far) for start in starts]
    choices = [max(0, last + 1 - first) for first in first_ends]
    if sum(choices) == 0:
        raise DoesNotFit(
            f"{least} tokens lie between the two places at least, and {distance} segment(s) of "
            f"{segment_length} are {far + last} at most"
        )
    (number,) = rng.choices(range(len(starts)), choices)
    return starts[number], rng.randint(first_ends[number], last)


def _take_lines(rng: random.Random, lines: Sequence[str], forbidden: re.Pattern) -> Iterator[str]:
    """Yields lines from one drawn at random on, after the last the first again, without those that
    `forbidden` is in."""
    first, found = rng.randrange(len(lines)), False
    while True:
        for line in itertools.chain(lines[first:], lines[:first]):
            if not forbidden.search(line):
                found = True
                yield line
        if not found:
            raise DoesNotFit(
                f"each of the {len(lines)} line(s) of text holds one of a person's answers"
            )


def _encode_lines(encode: Encode, paragraphs: Iterator[str]) -> Iterator[np.ndarray]:
    """The tokens of paragraphs, each with the line break in front of it."""
    while True:
        yield from encode([f"\n{next(paragraphs)}" for _ in range(4)])


def _encode_enough(encode: Encode, paragraphs: Iterator[str], count: int) -> np.ndarray:
    """The tokens of as many paragraphs as make `count` tokens or more."""
    parts, length, lines = [np.empty(0, dtype=np.int64)], 0, _encode_lines(encode, paragraphs)
    while length < count:
        parts.append(next(lines))
        length += len(parts[-1])
    return np.concatenate(parts)
