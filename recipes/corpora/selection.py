"""Which documents of a corpus are kept: the prose filter, removal of duplicates, seeded sampling.

Every choice by chance goes by a hash of the seed and the document's id, so that it does not depend
on the order of the files, and a smaller fraction is always a part of a larger one.
"""

import hashlib
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from .documents import Document, ReadingLog, url_host

# a paragraph of prose has at least this many characters; headings and list items have fewer
PARAGRAPH_CHARACTERS = 80
PROSE_SHARE = 0.5  # and paragraphs of prose hold at least this share of a document of prose

_SHINGLE_WORDS = 5
# Two documents share a band with probability 1 - (1 - J^4)^16: 0.97 at Jaccard J = 0.67, 0.03 at
# 0.2
_BANDS, _ROWS = 16, 4
_NEAR_DUPLICATE = 0.7  # estimated Jaccard similarity of two documents' five-word shingles


def text_digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def keep_distinct(
    documents: Iterable[Document], log: ReadingLog, drop_duplicates: bool
) -> Iterator[Document]:
    """Yields the documents that are not empty, and numbers ids that come again, as choices by
    chance go by ids.

    Documents with exactly the text of an earlier one are counted or dropped. Holds the ids, and 16
    bytes of hash per text.
    """
    seen: set[bytes] = set()
    times: Counter[str] = Counter()
    for document in documents:
        digest, name = text_digest(document.text), document.id
        if not document.text.strip():
            log.dropped["empty"] += 1
        elif drop_duplicates and digest in seen:
            log.dropped["duplicate"] += 1
        else:
            log.duplicates += digest in seen
            seen.add(digest)
            times[name] += 1
            yield document if times[name] == 1 else replace(document, id=f"{name}#{times[name]}")


def keep_prose(
    documents: Iterable[Document], log: ReadingLog, *, host: str | None, min_characters: int
) -> Iterator[Document]:
    """Yields the documents that are running prose and counts the others, by reason, in
    `log.dropped`.

    A document stays if it comes from `host` (judged only where its source is a URL; `None` takes
    any), has at least `min_characters` characters, and has at least half of them in paragraphs of
    80 characters or more.
    """
    for document in documents:
        lines = document.text.split("\n") if document.paragraphs is None else document.paragraphs
        lengths = [len(line) for line in lines]
        prose = sum(length for length in lengths if length >= PARAGRAPH_CHARACTERS)
        if host and url_host(document) not in ("", host):
            log.dropped["other host"] += 1
        elif sum(lengths) < min_characters:
            log.dropped["too short"] += 1
        elif prose < PROSE_SHARE * sum(lengths):
            log.dropped["not prose"] += 1
        else:
            yield document


def drop_near_duplicates(documents: Iterable[Document], log: ReadingLog) -> Iterator[Document]:
    """Yields each document that no earlier one nearly equals: MinHash over five-word shingles,
    Jaccard of 0.7 or more.

    Holds 64 hashes per kept document (0.25 kB, and about 1.5 kB of index), never the texts.
    """
    # the hash functions, not a choice of documents: the same for every seed
    rng, one = np.random.default_rng(0), np.uint64(1)
    # Odd multipliers with a shift are the usual cheap family of hash functions on 64-bit integers.
    factors = rng.integers(1, 2**63, size=(_BANDS * _ROWS, 1), dtype=np.uint64) << one | one
    mixers = rng.integers(1, 2**63, size=_SHINGLE_WORDS, dtype=np.uint64) << one | one
    signatures: list = []
    index: dict[bytes, list[int]] = {}

    def signature_of(text: str) -> np.ndarray:
        codes = (zlib.crc32(word.encode()) for word in text.lower().split())
        words = np.fromiter(codes, dtype=np.uint64)
        words = np.pad(words, (0, max(0, _SHINGLE_WORDS - len(words))))
        length = len(words) - _SHINGLE_WORDS + 1
        shingles = sum(words[i : i + length] * mixers[i] for i in range(_SHINGLE_WORDS))
        shingles ^= shingles >> np.uint64(29)
        return ((shingles[None, :] * factors) >> np.uint64(32)).min(axis=1).astype(np.uint32)

    for document in documents:
        signature = signature_of(document.text)
        bands = enumerate(signature.reshape(_BANDS, _ROWS))
        keys = [bytes([number]) + band.tobytes() for number, band in bands]
        candidates = {number for key in keys for number in index.get(key, ())}
        if any((signatures[each] == signature).mean() >= _NEAR_DUPLICATE for each in candidates):
            log.dropped["near-duplicate"] += 1
            continue
        for key in keys:
            index.setdefault(key, []).append(len(signatures))
        signatures.append(signature)
        yield document


def chance(seed: int, purpose: str, document_id: str) -> float:
    """A number in [0, 1) that depends on nothing but its arguments; different purposes give
    independent numbers."""
    digest = hashlib.blake2b(f"{seed}\n{purpose}\n{document_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def keep_fraction(
    documents: Iterable[Document], fraction: float, seed: int, log: ReadingLog
) -> Iterator[Document]:
    """Yields each document with probability `fraction`; a smaller fraction's documents are among a
    larger one's."""
    for document in documents:
        if chance(seed, "fraction", document.id) < fraction:
            yield document
        else:
            log.dropped["outside the fraction"] += 1


def choose(
    ids: list[str], share: float, seed: int, purpose: str, exclude: Iterable[int] = ()
) -> list[int]:
    """The positions of `round(share * len(ids))` ids (one at least, if `share` is above 0) by
    chance, ascending.

    None of the positions in `exclude` is among them, so that fewer may be left than the share asks
    for.
    """
    left = set(range(len(ids))).difference(exclude)
    count = max(1, round(share * len(ids))) if share > 0 else 0
    ranked = sorted(left, key=lambda position: (chance(seed, purpose, ids[position]), position))
    return sorted(ranked[:count])
