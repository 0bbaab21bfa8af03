"""Passages of running text that a score of kept tokens is fitted on."""

import random
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from ..models.loading import PLAIN_TEXT, opening
from ..ops.checks import check_types
from ..options import check_number


@check_types
def text_rows(
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    *,
    rows: int = 24,
    length: int = 850,
    seed: int = 0,
) -> list[list[int]]:
    """The `passages` of [`hf_infini.fit_keep_score`], from any text, such as the one that will be
    asked: one from each of as many parts of it; a short text comes again.

    Args:
        tokenizer: of the model that is fitted.
        text: running text, not empty.
        rows: how many.
        length: tokens of each.
        seed: of where in its part a passage begins.

    Returns:
        token ids, `rows` lists of `length`; in front what the tokenizer puts in front of texts.

    Raises:
        ValueError: there is no text, halves of characters are in it, or `length` has no place for
            text.
    """
    begin = opening(tokenizer)
    check_number("rows", rows, {"at_least": 1})
    check_number("length", length, {"at_least": len(begin) + 1})
    ids, count, rng = ids_of_text(tokenizer, text), length - len(begin), random.Random(seed)
    places = max(1, len(ids) - count + 1)  # where a passage can begin
    made = []
    for row in range(rows):
        low, high = places * row // rows, places * (row + 1) // rows
        made.append(begin + ids_from(ids, rng.randrange(low, max(high, low + 1)), count))
    return made


def ids_from(ids: Sequence[int], first: int, count: int) -> list[int]:
    """`count` of a text's ids from number `first` on, and from its beginning again at its end."""
    return [ids[(first + place) % len(ids)] for place in range(count)]


def ids_of_text(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The ids of a text by a tokenizer; ValueError where there are none, or it has halves of
    characters."""
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError(
            "the text has halves of characters (surrogates): decode its file with errors='replace'."
        )
    [ids] = tokenizer([text], **PLAIN_TEXT)["input_ids"]
    if not ids:
        raise ValueError("rows are made of running text, and this one is empty.")
    return ids
