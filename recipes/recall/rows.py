"""Rows that train recall: passkeys, facts, drills and running text in given shares, as a split that
train.py reads."""

import functools
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from tqdm.auto import tqdm

from cli import UserError
from corpora import blocks
from corpora.biographies import portuguese_names
from corpora.tokenization import encode_texts

from .drills import codes_row, echo_row, forms_row
from .examples import DoesNotFit, Example, passkey_example
from .facts import facts_row, paragraphs_row
from .filler import Filler, read_stream

KINDS = ("passkey", "facts", "codes", "echo", "forms", "paragraphs", "text")
NOT_COUNTED = -100  # a label that adds nothing to the loss


def read_mix(entries: list[str]) -> dict[str, float]:
    """The shares of `--mix`, "passkey=0.3" and so on, for all of `KINDS`; a UserError unless they
    sum to 1."""
    shares = dict.fromkeys(KINDS, 0.0)
    for entry in entries:
        name, _, value = entry.partition("=")
        try:
            share = float(value)
        except ValueError:
            share = -1.0
        if name not in shares or not 0 <= share <= 1:
            raise UserError(
                f"--mix {entry}: give a kind ({', '.join(KINDS)}), = and a share from "
                "0 to 1: facts=0.4"
            )
        shares[name] = share
    if abs(sum(shares.values()) - 1) > 1e-6:
        total = f"{sum(shares.values()):g}"
        raise UserError(f"--mix {' '.join(entries)}: the shares sum to {total}; they must sum to 1")
    return shares


def deal_kinds(rows: int, shares: dict[str, float], rng: random.Random) -> list[str]:
    """The kind of each of so many rows in random order; each has its share, rounded so that all
    rows are dealt."""
    counts = {kind: int(share * rows) for kind, share in shares.items()}
    by_remainder = sorted(shares, key=lambda kind: shares[kind] * rows - counts[kind], reverse=True)
    for kind in by_remainder[: rows - sum(counts.values())]:
        counts[kind] += 1
    kinds = [kind for kind, count in counts.items() for _ in range(count)]
    rng.shuffle(kinds)
    return kinds


def make_rows(
    tokenizer,
    stream: np.ndarray,
    *,
    split: str,
    context: int,
    rows: int,
    shares: dict[str, float],
    questions: int,
    answers_only: bool,
    language: str,
    seed: int,
) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Yields kind, tokens and labels of each row of one split, the arrays int64 of `context`
    tokens.

    Row number i depends on the split's name, the seed, and i only.

    Args:
        tokenizer: that of the stream, which is the split's own running text.
        split: its name; other splits have other people and other numbers.
        shares: of `KINDS`, summing to 1.
        questions: how often a passkey row asks for its number.
        language: of what passkeys, codes and forms say.
        answers_only: only the answers are learned where a row asks; rows that ask nothing always
            are learned as a whole.
    """
    encode, names = functools.partial(encode_texts, tokenizer), portuguese_names()
    filler, key = Filler(stream, tokenizer.eos_token_id, encode(["\n\n"])[0]), f"{split}/{seed}"
    kinds = deal_kinds(rows, shares, random.Random(key))
    order = random.Random(f"{key}/blocks")
    texts = _blocks_of_text(stream, context, kinds.count("text"), split, order)
    examples: dict[str, Callable[[random.Random], Example]] = {
        "passkey": lambda rng: passkey_example(
            rng, encode, filler, context, rng.random(), questions, language
        ),
        "facts": lambda rng: facts_row(rng, encode, names, filler, context),
        "codes": lambda rng: codes_row(rng, encode, names, filler, context, language),
        "forms": lambda rng: forms_row(rng, encode, filler, context, language),
        "echo": lambda rng: echo_row(rng, tokenizer.decode, filler, context),
    }
    for number, kind in enumerate(kinds):
        rng = random.Random(f"{key}/{number}")
        if kind in examples:
            try:
                example = examples[kind](rng)
            except DoesNotFit as error:
                raise UserError(f"--context {context}: {error}; give a longer --context") from error
            yield kind, example.tokens, answer_labels(example) if answers_only else example.tokens
        else:
            tokens = next(texts) if kind == "text" else paragraphs_row(rng, encode, names, context)
            yield kind, tokens, tokens


def _blocks_of_text(
    stream: np.ndarray, context: int, count: int, split: str, rng: random.Random
) -> Iterator[np.ndarray]:
    """Blocks of the stream in random order; every one comes once before any comes again."""
    blocks_there = len(stream) // context
    if count > 0 and blocks_there == 0:
        raise UserError(
            f"the {split} text of {len(stream):,} tokens has no row of --context {context:,}"
        )
    for block in itertools.cycle(rng.sample(range(blocks_there), min(count, blocks_there))):
        yield read_stream(stream, block * context, context)


def answer_labels(example: Example) -> np.ndarray:
    """The tokens of the example where an answer is asked for, −100 elsewhere."""
    labels = np.full_like(example.tokens, NOT_COUNTED)
    for question in example.questions:
        first, last = question.asked
        labels[first : last + 1] = example.tokens[first : last + 1]
    return labels


def write_rows(
    rows: Iterator[tuple[str, np.ndarray, np.ndarray]], count: int, context: int, folder: Path
) -> dict:
    """Saves rows as a dataset with the columns `input_ids` and `labels` (int32), one in memory at a
    time.

    Args:
        rows: so many (`count`) of [`make_rows`].
        folder: for `datasets.load_from_disk`.

    Returns what [`corpora.blocks.save_rows`] does, `rows_by_kind`, and the `counted_tokens` (those
    with a label) by kind."""
    kinds, counted = Counter(), Counter()

    def arrays() -> Iterator[dict[str, np.ndarray]]:
        for kind, tokens, labels in tqdm(rows, total=count, desc="rows", unit="row"):
            kinds[kind] += 1
            counted[kind] += int((labels != NOT_COUNTED).sum())
            yield {"input_ids": tokens, "labels": labels}

    saved = blocks.write_rows(arrays(), ["input_ids", "labels"], context, folder)
    if not sum(counted.values()):
        raise UserError(
            f"--context {context}: no token of these rows would be learned; give a longer --context"
        )
    return {**saved, "rows_by_kind": dict(kinds), "counted_tokens": dict(counted)}
