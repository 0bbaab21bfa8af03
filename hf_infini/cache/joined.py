"""Several documents, each read by itself, that are asked together."""

from collections.abc import Iterable

from ..ops.rules import RULES
from .archive import Archive, Row
from .cache import InfiniCache


def joined(caches: Iterable[InfiniCache]) -> InfiniCache:
    """A cache that goes on from one of several documents, and recalls from the archives of all:
    each keeps its own blocks, and no block's relevance spreads to another document
    (`hf_infini.ops.recall`). It takes as many bytes on the device as one of them. Where all tokens
    fit into the kept places, all are recalled, in the order of the documents.

    It goes on from the last document that fills the window's segments, whose end stays in sight:
    before, a document's softmax has no kept places.

    Args:
        caches: of one row each, with an archive, of one model with update_rule "none". They are
            taken one after the other, and only one state is held. They are not changed.

    Raises:
        ValueError: there are none, one of them is otherwise, or none of several fills the window's
            segments; says which, and why.
        TypeError: one is no InfiniCache.
    """
    documents: list[Row] = []
    own, goes_on, span = None, 0, 0
    for number, cache in enumerate(caches, 1):
        row = _row_of(cache, number)
        if own is not None:
            own.check_same_model(cache)
            if row.parts != documents[-1].parts:
                raise ValueError(
                    f"cache {number} has keys and values in {row.parts[0]}, and the one before in "
                    f"{documents[-1].parts[0]}: read all under one autocast, and with one archive=."
                )
        every = sorted(row.documents, key=lambda each: each.number)
        span = max(window.span for window in cache.windows.values())
        if own is None or row.tokens >= span:
            own, goes_on = cache, len(documents) + row.number
        documents += [
            each._replace(others=(), number=len(documents) + place)
            for place, each in enumerate(every)
        ]
    if own is None:
        raise ValueError("caches has none: give that of one document at least.")
    row = documents.pop(goes_on)
    if documents and row.tokens < span:
        raise ValueError(
            f"none of the documents has the {span} tokens that fill the window, before which "
            "nothing is recalled: read them as one text."
        )
    made = own.__copy__()
    made.archive = Archive([row._replace(others=tuple(documents))])
    return made


def tokens_read(cache: InfiniCache) -> int:
    """The tokens of all documents that a `cache` of one row asks; without an archive there is
    one."""
    archive, tokens = cache.archive, cache.get_seq_length()
    return tokens if archive is None else sum(row.tokens for row in archive.rows()[0].documents)


def _row_of(cache: object, number: int) -> Row:
    """The archive's row of a cache, the `number`-th; ValueError where it cannot be joined."""
    if not isinstance(cache, InfiniCache):
        raise TypeError(f"caches must be InfiniCaches; number {number} is {cache!r:.60}.")
    if cache.archive is None or cache.batch_size != 1:
        found = f"{max(cache.batch_size, 0)} rows" if cache.archive else "no archive"
        raise ValueError(
            f"cache {number} has {found}: have an InfiniCache(model.config, archive=True) read "
            "each document, in one row."
        )
    cache.check_finished()
    if cache.update_rule in RULES:
        raise ValueError(
            f"cache {number} has a memory (update_rule={cache.update_rule!r}) of its document, and "
            "there is no memory of several that were read apart: read them as one text, or use a "
            "model with update_rule='none'."
        )
    [row] = cache.archive.rows()
    return row
