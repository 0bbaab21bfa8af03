"""Rows on which a keep score is fitted: passages of documents, with their questions and answers,
and text of documents with invented facts."""

import random
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from cli import UserError
from evaluation.prompts import ASKED
from hf_infini.models.loading import PLAIN_TEXT, opening
from hf_infini.tools.asking_rows import row_of_text
from hf_infini.tools.text_rows import ids_of_text

STEPS = 4  # passages begin so often in the tokens of one


def asked_rows(
    tokenizer: PreTrainedTokenizerBase,
    documents: Sequence[dict],
    *,
    rows: int,
    passage: int,
    least: int,
    length: int,
    seed: int,
) -> list[list[int]]:
    """Rows for [`hf_infini.fit_keep_score`], as many of each set of documents, but for one: a
    passage of a document, and behind it the questions whose evidence lies in it, each with its
    right answer, in any order.

    Args:
        tokenizer: of the model that is fitted; a fast one.
        documents: prepared documents, of one or several sets.
        rows: how many.
        passage: tokens of a passage.
        least: questions of a passage: one with fewer is not drawn.
        length: tokens of a row, at most; questions beyond it are left out.
        seed: of all that is drawn.

    Returns:
        token ids, `rows` lists of at most `length`.

    Raises:
        UserError: a set has too few passages with so many questions.
    """
    sets = list(dict.fromkeys(document["set"] for document in documents))
    found = []
    for number, name in enumerate(sets):
        wanted = rows // len(sets) + (number < rows % len(sets))
        rng = random.Random(f"{seed}/{name}")
        there = [
            row
            for document in documents
            if document["set"] == name
            for row in _rows_of(tokenizer, document, passage, least, length, rng)
        ]
        if len(there) < wanted:
            raise UserError(
                f"the set {name} has {len(there)} passages of {passage:,} tokens with the evidence "
                f"of --least {least} questions, and {wanted} are needed: ask for fewer --rows or "
                "questions, give other --sets, or a longer --passage and --length"
            )
        found += rng.sample(there, wanted)
    return found


def _rows_of(
    tokenizer, document: dict, passage: int, least: int, length: int, rng: random.Random
) -> list[list[int]]:
    """The rows of all passages of a document that have enough questions."""
    text = document["text"]
    read = tokenizer(text, return_offsets_mapping=True, **PLAIN_TEXT)
    ids, spans, begin = read["input_ids"], read["offset_mapping"], opening(tokenizer)
    asked = [each for each in document["questions"] if each["evidence"]]
    pairs = [
        f"\n{ASKED[document['language']][each['kind']].format(each['question'])} "
        f"{each['answers'][0]}"
        for each in asked
    ]
    pairs = tokenizer(pairs, **PLAIN_TEXT)["input_ids"] if pairs else []
    found = []
    for start in range(0, len(ids) - passage + 1, max(1, passage // STEPS)):
        first, last = spans[start][0], spans[start + passage - 1][1]
        inside = [
            pair
            for each, pair in zip(asked, pairs, strict=True)
            if all(first <= low and high <= last for low, high in each["evidence"])
        ]
        rng.shuffle(inside)
        row, taken = begin + ids[start : start + passage], 0
        for pair in inside:
            if len(row) + len(pair) > length:
                break
            row, taken = row + pair, taken + 1
        if taken >= least:
            found.append(row)
    return found


def fact_rows(
    tokenizer: PreTrainedTokenizerBase,
    documents: Sequence[dict],
    *,
    rows: int,
    length: int,
    seed: int,
) -> list[list[int]]:
    """Rows for [`hf_infini.fit_keep_score`], as many of each set of documents, but for one: text of
    a document, with invented facts in its language here and there, all asked for at the end.

    Args:
        tokenizer: of the model that is fitted.
        documents: prepared documents, of one or several sets.
        rows: how many.
        length: tokens of each.
        seed: of all that is drawn.

    Returns:
        token ids, `rows` lists of `length`.

    Raises:
        UserError: the facts of a row and their questions take more than `length`.
    """
    sets = list(dict.fromkeys(document["set"] for document in documents))
    made = []
    for number in range(rows):
        rng = random.Random(f"{seed}/{number}")
        own = [document for document in documents if document["set"] == sets[number % len(sets)]]
        document = rng.choice(own)
        running = ids_of_text(tokenizer, document["text"])
        try:
            made.append(row_of_text(rng, tokenizer, running, length, document["language"]))
        except ValueError as error:
            raise UserError(f"--length {length:,} is too short for --facts: {error}") from None
    return made
