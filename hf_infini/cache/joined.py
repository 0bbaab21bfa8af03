"""Several documents, each read by itself, that are asked together."""

from collections.abc import Iterable
from typing import Any

from ..ops.rules import RULES
from .archive import Archive, Row
from .cache import InfiniCache


def joined(caches: Iterable[InfiniCache]) -> InfiniCache:
    """A cache that goes on from the last of several documents, and recalls from the archives of
    all: each keeps its own blocks, and no block's relevance spreads to another document
    (`hf_infini.ops.recall`). It takes as many bytes on the device as one of them. Where all tokens
    fit into the kept places, all are recalled, in the order of the documents.

    Args:
        caches: of one row each, with an archive, of one model with update_rule "none". They are
            taken one after the other, and of all but the last only the archive is held. They are
            not changed.

    Raises:
        ValueError: there are none, or one of them is otherwise; says which, and why.
        TypeError: one is no InfiniCache.
    """
    documents: list[Row] = []
    last: InfiniCache | None = None
    for number, cache in enumerate(caches, 1):
        row = _row_of(cache, number)
        if last is not None:
            last.check_same_model(cache)
            if row.parts != documents[-1].parts:
                raise ValueError(
                    f"cache {number} has keys and values in {row.parts[0].dtype}, and the one "
                    f"before in {documents[-1].parts[0].dtype}: read all under one autocast."
                )
        documents += [each._replace(others=()) for each in row.documents]
        last = cache
    if last is None:
        raise ValueError("caches has none: give that of one document at least.")
    made = last.__copy__()
    made.archive = Archive([documents[-1]._replace(others=tuple(documents[:-1]))])
    return made


def _row_of(cache: Any, number: int) -> Row:
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
    if RULES[cache.update_rule].holds:
        raise ValueError(
            f"cache {number} has a memory (update_rule={cache.update_rule!r}) of its document, and "
            "there is no memory of several that were read apart: read them as one text, or use a "
            "model with update_rule='none'."
        )
    [row] = cache.archive.rows()
    return row
