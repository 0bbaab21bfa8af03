"""Rows that drill recall: every answer stood there before, behind the same words."""

import random
import re

import numpy as np
import pytest

from recall.drills import KNOWN_FROM, codes_row, echo_row
from recall.examples import DoesNotFit
from recall_texts import NAMES, assert_answered, encoder, filler, tokenizer


@pytest.mark.parametrize(("kind", "length"), [("bpe", 256), ("bpe", 1024), ("characters", 600)])
def test_codes_are_asked_for_until_the_row_is_full(kind, length):
    asked_of = set()
    for seed in range(12):
        example = codes_row(random.Random(seed), encoder(kind), NAMES, filler(kind), length)
        assert len(example.tokens) == length
        assert_answered(kind, example)
        text = tokenizer(kind).decode(example.tokens)
        # the first sentence about each counts
        given = dict(re.findall(r"O código de ([^\n]+?) é ([^\n]+?)\.", text)[::-1])
        asked_of.add(len(given))
        for question in example.questions:
            before = tokenizer(kind).decode(example.tokens[: question.asked[0]])
            name = re.search(r"O código de ([^\n]+) é$", before)[1]
            assert given[name] == question.answer
            assert (
                tokenizer(kind)
                .decode(example.tokens[: question.stated[0]])
                .endswith(f"O código de {name} é")
            )
        turns = [question.stated for question in example.questions]
        # all in turn
        assert all(len(set(turns[: len(given)])) == min(len(given), len(turns)) for _ in turns)
    assert len(asked_of) > 1


@pytest.mark.parametrize("length", [256, 1000])
def test_echoes_are_what_stood_there_with_what_led_to_it(length):
    for seed in range(12):
        example = echo_row(random.Random(seed), tokenizer("bpe").decode, filler("bpe"), length)
        assert len(example.tokens) == length and example.questions
        for question in example.questions:
            (first, last), (begin, end) = question.stated, question.asked
            assert last - first == end - begin and last < begin and end < length
            passages = (
                example.tokens[place - KNOWN_FROM : place + last - first + 1]
                for place in (first, begin)
            )
            assert np.array_equal(*passages)
            assert tokenizer("bpe").decode(example.tokens[begin : end + 1]) == question.answer


def test_a_row_too_short_for_a_code():
    with pytest.raises(DoesNotFit, match="more than 12 tokens"):
        codes_row(random.Random(0), encoder("bpe"), NAMES, filler("bpe"), 12)
