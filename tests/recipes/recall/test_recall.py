"""Recall examples: answers are where they are said to be and nowhere else, at exactly the length
and distance asked for."""

import functools
import itertools
import random
import re
from collections import Counter

import numpy as np
import pytest

from recall import facts
from recall.examples import WORDING, DoesNotFit, passkey_example
from recall.facts import FACT_NAMES, fact_example, facts_row
from recall.filler import Filler
from recall_texts import NAMES, assert_answered, encoder, filler, text_at, tokenizer

# --- the filler -----------------------------------------------------------------------------------


def test_articles_are_parted_by_a_blank_line():
    stream = np.array([5, 6, 0, 7, 0])
    found = {
        tuple(Filler(stream, 0, np.array([9, 9])).take(random.Random(seed), 6))
        for seed in range(40)
    }
    assert found == {
        (5, 6, 9, 9, 7, 9),
        (6, 9, 9, 7, 9, 9),
        (9, 9, 7, 9, 9, 5),
        (7, 9, 9, 5, 6, 9),
        (9, 9, 5, 6, 9, 9),
    }


# --- passkeys -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "depth"), [("bpe", 0.3), ("characters", 1)])
def test_passkeys_have_exactly_the_length_and_the_depth(kind, depth):
    for seed in range(12):
        make = functools.partial(
            passkey_example, encode=encoder(kind), filler=filler(kind), length=400
        )
        first, example, last = (make(random.Random(seed), depth=share) for share in (0, depth, 1))
        assert len(example.tokens) == 400 and tokenizer(kind).eos_token_id not in example.tokens
        assert_answered(kind, example)
        (question,) = example.questions
        assert re.fullmatch(r"\d{5}", question.answer) and question.asked[1] == 399
        asks = tokenizer(kind).decode(example.tokens[question.begins : question.asked[0]])
        assert asks in WORDING["pt"]["questions"]
        # the needle says it twice
        assert tokenizer(kind).decode(example.tokens).count(question.answer) == 3
        room = last.questions[0].stated[0] - first.questions[0].stated[0]
        assert question.stated[0] - first.questions[0].stated[0] == round(depth * room)
    # Without filler in front, the needle's first words; the question's words stand between the
    # needle and the end
    assert (
        tokenizer(kind).decode(first.tokens).startswith("\n")
        and text_at(kind, first, (0, 30)).find("número") > 0
    )


# --- facts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "segment_length", "distance"),
    [("bpe", 200, 0), ("bpe", 128, 1), ("bpe", 128, 7), ("characters", 400, 2)],
)
def test_facts_come_back_exactly_so_many_segments_later(kind, segment_length, distance):
    made = Counter()
    for number in range(36):
        fact = FACT_NAMES[number % 12]
        try:
            example = fact_example(
                random.Random(number), encoder(kind), NAMES, fact, distance, segment_length
            )
        except DoesNotFit:
            # from 2 segments on even the longest sentence and prompt lie between
            assert distance < 2
            continue
        made[fact] += 1
        assert_answered(kind, example)
        (question,) = example.questions
        first, last = (
            [place // segment_length for place in span]
            for span in (question.stated, question.asked)
        )
        assert last[0] - first[0] == distance and first[0] == first[1] and last[0] == last[1]
        assert question.asked[1] == len(example.tokens) - 1 and question.fact == fact
        text = tokenizer(kind).decode(example.tokens)
        # Whole words, in capitals or not: once where it is stated, once where it is asked for
        assert len(re.findall(rf"\b{re.escape(question.answer)}\b", text, re.IGNORECASE)) == 2, text
        name = re.search(r"\n\n(.+)\n", text)[1]
        assert text.count(name) >= 2 and name in text[text.rindex("\n") :]
        asks = tokenizer(kind).decode(example.tokens[question.begins :])
        assert asks == text[text.rindex("\n") :]
        if distance == 0:
            start = tokenizer(kind).decode(example.tokens[first[0] * segment_length :])
            assert start.count(name) >= 2  # the title and the question
    assert set(made) == set(FACT_NAMES)


def test_lines_of_text_stand_between_a_fact_and_its_question_but_none_that_answers_it():
    make = functools.partial(
        fact_example, encode=encoder("bpe"), names=NAMES, distance=6, segment_length=128
    )
    for number in range(24):
        fact = FACT_NAMES[number % 12]
        invented = make(random.Random(number), fact=fact).questions[0]
        lines = [
            f"O verso {verse} é o de {'outro' if verse % 3 else invented.answer}."
            for verse in range(30)
        ]
        example = make(random.Random(number), fact=fact, lines=lines)
        # The same person is asked about at the same places
        assert example.questions[0] == invented
        text = tokenizer("bpe").decode(example.tokens)
        between = text[text.index(invented.answer) + len(invented.answer) : text.rindex("\n")]
        assert invented.answer not in between
        assert set(re.findall(r"O verso (\d+) é", between)) == {
            str(verse) for verse in range(30) if verse % 3
        }
    with pytest.raises(DoesNotFit, match=r"each of the 1 line\(s\)"):
        make(
            random.Random(0),
            fact=fact,
            lines=[f"Aqui está {make(random.Random(0), fact=fact).questions[0].answer}."],
        )


@pytest.mark.parametrize(
    ("distance", "width", "least", "stated_at"),
    [(0, 2, 5, 3), (1, 1, 8, 30), (2, 3, 4, 7), (1, 20, 3, 0)],
)
def test_places_are_drawn_from_all_that_are_possible(distance, width, least, stated_at):
    length = 12

    def possible(start, end):
        inside = all(place + width <= length or width > length for place in (start, end))
        return (
            inside
            and distance * length + end - start >= least
            and (distance > 0 or start >= stated_at)
        )

    expected = {pair for pair in itertools.product(range(length), repeat=2) if possible(*pair)}
    rng = random.Random(0)
    drawn = (
        facts._draw_places(rng, distance, length, width, least, stated_at)
        for _ in range(100 * len(expected))
    )
    found = Counter(drawn)
    assert set(found) == expected
    # Each is drawn 100 times on average with a standard deviation of 10: 45 are out of reach for
    # some 100 pairs
    assert max(abs(count - 100) for count in found.values()) < 45


def test_a_seed_gives_the_same_example_and_the_same_person_at_every_distance():
    make = functools.partial(
        fact_example, encode=encoder("bpe"), names=NAMES, fact="work", segment_length=128
    )
    again = [make(random.Random(3), distance=2) for _ in range(2)]
    assert (
        np.array_equal(again[0].tokens, again[1].tokens)
        and again[0].questions == again[1].questions
    )
    assert not np.array_equal(again[0].tokens, make(random.Random(4), distance=2).tokens)
    assert make(random.Random(3), distance=5).questions[0].answer == again[0].questions[0].answer
    rows = [
        facts_row(random.Random(3), encoder("bpe"), NAMES, filler("bpe"), 900) for _ in range(2)
    ]
    assert np.array_equal(rows[0].tokens, rows[1].tokens) and rows[0].questions == rows[1].questions


# --- rows to learn from ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bpe", "characters"])
def test_a_row_asks_for_all_it_states_at_any_distance(kind):
    length, distances = (1600 if kind == "bpe" else 4000), []
    for seed in range(30):
        example = facts_row(random.Random(seed), encoder(kind), NAMES, filler(kind), length)
        assert len(example.tokens) == length and tokenizer(kind).eos_token_id not in example.tokens
        assert_answered(kind, example)
        assert sorted(question.fact for question in example.questions) == sorted(FACT_NAMES)
        asked = [question.asked for question in example.questions]
        assert asked == sorted(asked)
        distances += [question.asked[0] - question.stated[1] for question in example.questions]
    # Of 360 places drawn between the statement and the end of the row
    assert min(distances) < 0.05 * length and max(distances) > 0.85 * length
    assert len(set(np.array(distances) * 10 // length)) >= 9
    # All places alike would put a twentieth of them there; by orders of magnitude it is more than
    # half, less those that the end of a sentence keeps away
    assert np.mean(np.array(distances) < 0.05 * length) > 0.1
