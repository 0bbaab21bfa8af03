"""Rows that train recall: passkeys, facts, drills and running text in given shares, as a split that train.py reads."""

import functools
import itertools
import random
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from cli import UserError
from corpora.blocks import save_rows

from .drills import codes_row, echo_row
from .examples import DoesNotFit, Example, passkey_example
from .facts import facts_row, paragraphs_row
from .filler import Filler, TokenStream

if TYPE_CHECKING:
    import numpy as np

KINDS = ("passkey", "facts", "codes", "echo", "paragraphs", "text")
NOT_COUNTED = -100  # a label that adds nothing to the loss
_ROWS_IN_MEMORY = 512


def read_mix(entries: list[str]) -> dict[str, float]:
    """The shares of `--mix`, "passkey=0.3" and so on, for all of `KINDS`; a UserError unless they sum to 1."""
    shares = dict.fromkeys(KINDS, 0.0)
    for entry in entries:
        name, _, value = entry.partition("=")
        try:
            share = float(value)
        except ValueError:
            share = -1.0
        if name not in shares or not 0 <= share <= 1:
            raise UserError(f"--mix {entry}: give a kind ({', '.join(KINDS)}), = and a share from 0 to 1: facts=0.4")
        shares[name] = share
    if abs(sum(shares.values()) - 1) > 1e-6:
        raise UserError(f"--mix {' '.join(entries)}: the shares sum to {sum(shares.values()):g}; they must sum to 1")
    return shares


def deal_kinds(rows: int, shares: dict[str, float], rng: random.Random) -> list[str]:
    """The kind of each of so many rows in random order; each has its share, rounded so that all rows are dealt."""
    counts = {kind: int(share * rows) for kind, share in shares.items()}
    by_remainder = sorted(shares, key=lambda kind: shares[kind] * rows - counts[kind], reverse=True)
    for kind in by_remainder[: rows - sum(counts.values())]:
        counts[kind] += 1
    kinds = [kind for kind, count in counts.items() for _ in range(count)]
    rng.shuffle(kinds)
    return kinds


class RowMaker:
    """Makes the rows of one split; row number i depends on the split's name, the seed, and i alone.

    Args:
        tokenizer: that of the stream.
        stream: the split's own running text.
        split: its name; other splits have other people and other numbers.
        context: tokens per row.
        shares: of `KINDS`, summing to 1.
        questions: how often a passkey row asks for its number.
        answers_only: only the answers are learned where a row asks; rows that ask nothing always are learned as a whole.
    """

    def __init__(
        self,
        tokenizer,
        stream: TokenStream,
        *,
        split: str,
        context: int,
        rows: int,
        shares: dict[str, float],
        questions: int,
        answers_only: bool,
        seed: int,
    ):
        from corpora.biographies import portuguese_names
        from corpora.tokenization import encode_texts

        self.encode = functools.partial(encode_texts, tokenizer)
        self.decode = tokenizer.decode
        self.names, self.stream = portuguese_names(), stream
        (blank_line,) = self.encode(["\n\n"])
        self.filler = Filler(stream, tokenizer.eos_token_id, blank_line)
        self.context, self.questions, self.answers_only = context, questions, answers_only
        self.key = f"{split}/{seed}"
        self.kinds = deal_kinds(rows, shares, random.Random(self.key))
        blocks = len(stream) // context
        if shares["text"] > 0 and blocks == 0:
            raise UserError(f"the {split} text of {len(stream):,} tokens has no row of --context {context:,}")
        # Every block of the text comes once before any comes again
        needed = self.kinds.count("text")
        self.blocks = random.Random(f"{self.key}/blocks").sample(range(blocks), min(needed, blocks))

    def __iter__(self) -> "Iterator[tuple[str, np.ndarray, np.ndarray]]":
        """Yields kind, tokens and labels of each row, the arrays int64 of `context` tokens."""
        texts = 0
        for number, kind in enumerate(self.kinds):
            rng = random.Random(f"{self.key}/{number}")
            if kind == "text":
                tokens = self.stream.read(self.blocks[texts % len(self.blocks)] * self.context, self.context)
                labels = tokens
                texts += 1
            elif kind == "paragraphs":
                tokens = labels = paragraphs_row(rng, self.encode, self.names, self.context)
            else:
                example = self._example(kind, rng)
                tokens = example.tokens
                labels = answer_labels(example) if self.answers_only else tokens
            yield kind, tokens, labels

    def _example(self, kind: str, rng: random.Random) -> Example:
        try:
            if kind == "facts":
                return facts_row(rng, self.encode, self.names, self.filler, self.context)
            if kind == "codes":
                return codes_row(rng, self.encode, self.names, self.filler, self.context)
            if kind == "echo":
                return echo_row(rng, self.decode, self.filler, self.context)
            return passkey_example(rng, self.encode, self.filler, self.context, rng.random(), self.questions)
        except DoesNotFit as error:
            raise UserError(f"--context {self.context}: {error}; give a longer --context") from error


def answer_labels(example: Example) -> "np.ndarray":
    """The tokens of the example where an answer is asked for, −100 elsewhere."""
    import numpy as np

    labels = np.full_like(example.tokens, NOT_COUNTED)
    for question in example.questions:
        first, last = question.asked
        labels[first : last + 1] = example.tokens[first : last + 1]
    return labels


def write_rows(rows: "Iterable[tuple[str, np.ndarray, np.ndarray]]", count: int, context: int, folder: Path) -> dict:
    """Saves rows as a dataset with the columns `input_ids` and `labels` (int32), a few hundred in memory at a time.

    Args:
        rows: kind, tokens and labels, as [`RowMaker`] yields them.
        count: how many there are.
        folder: for `datasets.load_from_disk`.

    Returns:
        `{"blocks", "tokens", "rows_by_kind", "counted_tokens", "sha256"}`: the tokens with a label are counted by kind of
        row; the hash is over tokens and labels as little-endian 32-bit integers.
    """
    import numpy as np
    from tqdm.auto import tqdm

    kinds, counted = Counter(), Counter()
    rows = iter(tqdm(rows, total=count, desc="rows", unit="row"))

    def batches() -> "Iterator[tuple[np.ndarray, np.ndarray]]":
        while batch := list(itertools.islice(rows, _ROWS_IN_MEMORY)):
            for kind, _, labels in batch:
                kinds[kind] += 1
                counted[kind] += int((labels != NOT_COUNTED).sum())
            yield tuple(np.stack([row[place] for row in batch]) for place in (1, 2))

    saved = save_rows(batches(), ["input_ids", "labels"], context, folder)
    return {**saved, "rows_by_kind": dict(kinds), "counted_tokens": dict(counted)}
