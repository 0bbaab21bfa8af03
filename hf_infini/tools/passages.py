"""Passages that an answer has looked at, as text; and which of a tokenizer's tokens are the same to
a recall."""

import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from ..cache.cache import InfiniCache
from ..ops.recall import Terms

SOURCES = 3  # passages of an answer that are shown


class Passage(NamedTuple):
    """What an answer has looked at."""

    document: int  # its number, from 0, among those that were read
    tokens: range  # of the document, or of all that was read where there is none
    text: str


def passages_of(
    tokenizer: PreTrainedTokenizerBase,
    cache: InfiniCache,
    row: int = 0,
    documents: tuple[int, Sequence[int]] | None = None,
) -> Iterator[Passage]:
    """The passages that a row of a cache with an archive keeps, the most relevant first.

    Args:
        tokenizer: by which they are text; special tokens are left out.
        cache: after a recall.
        row: its number.
        documents: where these begin, in tokens, and the tokens of each: what is before and behind
            them is left out. `None`: there are none, and all is told that was read.
    """
    archive: Any = cache.archive
    of_row, begin = archive.rows()[row], 0 if documents is None else documents[0]
    for block in cache.passages(row):
        document, numbers = of_row.in_document(block)
        inside = numbers - begin
        if documents is not None:
            inside = inside[(inside >= 0) & (inside < documents[1][document.number])]
        if len(inside):
            text: Any = tokenizer.decode(document.ids[inside + begin], skip_special_tokens=True)
            places = range(int(inside[0]), int(inside[-1]) + 1)
            yield Passage(document.number, places, text)


def term_numbers(tokenizer: PreTrainedTokenizerBase) -> Terms:
    """The `terms` of [`InfiniCache.recall`] of a `tokenizer`: tokens that differ in case or a space
    only are one term, and words are put together from them; special tokens, and those without a
    letter or digit, are none (−1)."""
    vocabulary = len(tokenizer), tuple(tokenizer.all_special_ids)  # which may grow
    with _TERMS_LOCK:  # threads that wait for it need not make it
        known = _TERMS.get(tokenizer)
        if known is None or known[0] != vocabulary:
            _TERMS[tokenizer] = known = vocabulary, _term_numbers(tokenizer)
        return known[1]


# of each tokenizer, for as long as it is there: a large vocabulary takes a second
_TERMS: weakref.WeakKeyDictionary[Any, tuple[tuple, Terms]] = weakref.WeakKeyDictionary()
_TERMS_LOCK = threading.Lock()


def _term_numbers(tokenizer: PreTrainedTokenizerBase) -> Terms:
    special = {*tokenizer.all_special_ids}
    # some tokenizers leave out the space in front of a text, but not in front of its second half
    twice: list[str] = tokenizer.batch_decode(
        [[token, token] for token in range(len(tokenizer))], clean_up_tokenization_spaces=False
    )
    texts = (text[len(text) // 2 :].lower() for text in twice)
    return Terms.of_texts("" if n in special else text for n, text in enumerate(texts))
