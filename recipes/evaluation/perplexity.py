"""The perplexity of rows of tokens, overall and by position: what `evaluate_model.py --task
perplexity` reads and measures.

A row is `(tokens, labels)`, two integer arrays of one length: the labels are the tokens, or −100
where one is not counted.
"""

import itertools
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from corpora.tokenization import encode_texts
from hf_infini.models.loading import opening
from support.prepared import open_rows

from .losses import LossByPosition, stream_losses

Row = tuple[np.ndarray, np.ndarray]


def prepared_rows(data: Path, split: str, max_tokens: int | None = None) -> list[Row]:
    """The rows of a split of a prepared folder as train.py reads them, up to the one with which
    `max_tokens` are reached."""
    rows = open_rows(data, split).with_format("numpy")
    labels = rows["labels" if "labels" in rows.column_names else "input_ids"]
    return _enough(list(zip(rows["input_ids"][:], labels[:], strict=True)), max_tokens)


def text_rows(
    tokenizer, texts: Sequence[str], length: int, max_tokens: int | None = None
) -> list[Row]:
    """Rows of up to `length` tokens: the documents one after the other, each followed by an
    end-of-text token, cut; each after what the tokenizer puts in front of a text."""
    begin = np.array(opening(tokenizer), dtype=np.int64)
    length -= len(begin)
    end = np.array([tokenizer.eos_token_id])
    stream = np.concatenate(
        [part for tokens in encode_texts(tokenizer, texts) for part in (tokens, end)]
    )
    rows = [
        np.concatenate([begin, stream[start : start + length]])
        for start in range(0, len(stream), length)
    ]
    rows = [(row, row) for row in rows if len(row) >= 2]  # one token predicts nothing
    return _enough(rows, max_tokens)


def losses_of(
    model, rows: Sequence[Row], reader, chunk: int | None, batch_size: int
) -> Iterator[tuple[list[int], int, torch.Tensor, torch.Tensor]]:
    """The losses of rows of any lengths, `batch_size` of about one length at a time, with a bar.
    Yields the places of a batch in `rows`, and what [`stream_losses`] yields of it.

    Args:
        model: a causal language model in evaluation mode.
        reader: the [`support.rows.RowReader`] that makes inputs of them.
        chunk: tokens per call of the model in rows longer than this; `None`: all of a row.
    """
    # The longest first: too little memory shows at once
    order = sorted(range(len(rows)), key=lambda number: len(rows[number][0]), reverse=True)
    batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    total = sum(len(batch) * len(rows[batch[0]][0]) for batch in batches)
    with tqdm(total=total, desc="losses", unit="token", unit_scale=True, leave=False) as bar:
        for batch in batches:
            columns = {}
            # Padding stands on the right, where a causal model's other tokens do not see it
            for place, (name, padding) in enumerate((("input_ids", 0), ("labels", -100))):
                column = [torch.as_tensor(rows[number][place]).long() for number in batch]
                columns[name] = pad_sequence(column, True, padding)
            for first, losses, targets in stream_losses(model, **reader(columns), chunk=chunk):
                yield batch, first, losses, targets
                bar.update(min(targets.numel(), total - bar.n))


def measure_perplexity(model, rows: Sequence[Row], reader, chunk: int, batch_size: int) -> dict:
    """`cross_entropy`, `perplexity`, `tokens`, `by_position` and `tokens_per_second` of rows;
    arguments as of [`losses_of`]."""
    positions, started = LossByPosition(), time.perf_counter()
    for _, *found in losses_of(model, rows, reader, chunk, batch_size):
        positions.add(*found)
    speed = sum(len(row[0]) for row in rows) / (time.perf_counter() - started)
    found = {**positions.total(), "by_position": positions.table()}
    return {**found, "tokens_per_second": round(speed, 1)}


def positions_table(found: dict) -> str:
    """What [`measure_perplexity`] returned, by position and overall."""
    lines = [f"{'positions':>17}  {'tokens':>10}  {'nats':>7}  {'perplexity':>10}"]
    for row in (*found["by_position"], found):
        place = f"{row['first']}–{row['last']}" if "last" in row else "all"
        numbers = f"{row['tokens']:>10,}  {row['cross_entropy']:7.4f}  {row['perplexity']:10.2f}"
        lines.append(f"{place:>17}  {numbers}")
    return "\n".join(lines)


def _enough(rows: list[Row], max_tokens: int | None) -> list[Row]:
    totals = itertools.accumulate(len(tokens) for tokens, _ in rows)
    return rows[: 1 + sum(max_tokens is None or total < max_tokens for total in totals)]
