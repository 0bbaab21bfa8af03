"""From documents to rows of tokens, in Arrow files that are mapped into memory: nothing holds a
corpus as Python objects."""

import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from tqdm.auto import tqdm

from support.prepared import digest, open_rows

from .documents import Document
from .selection import choose
from .tokenization import build_character_tokenizer, encode_texts, load_tokenizer, train_bpe

if TYPE_CHECKING:
    import datasets

DOCUMENTS = "documents.arrow"
_FIELDS = ("id", "title", "source", "text")
_BATCH_CHARACTERS = 4_000_000  # of text in memory at a time while writing or tokenising


def write_documents(documents: Iterable[Document], folder: Path) -> int:
    """Writes documents into a file that [`read_documents`] maps, and returns how many."""
    import pyarrow as pa

    schema = pa.schema([(name, pa.large_string()) for name in _FIELDS])
    with pa.ipc.new_stream(str(folder / DOCUMENTS), schema) as writer:
        for batch in _batches(documents, lambda document: len(document.text)):
            columns = [[getattr(row, name) for row in batch] for name in _FIELDS]
            writer.write_batch(pa.record_batch(columns, schema))
    return len(read_documents(folder))


def read_documents(folder: Path) -> "datasets.Dataset":
    """The documents of [`write_documents`], with the columns `id`, `title`, `source` and `text`."""
    import datasets

    return datasets.Dataset.from_file(str(folder / DOCUMENTS))


def save_tokenizer(
    training: "datasets.Dataset",
    folder: Path,
    *,
    tokenizer: str,
    vocab_size: int,
    tokenizer_sample: float,
    seed: int,
) -> dict:
    """Makes the corpus's tokenizer, saves it into `folder` for `AutoTokenizer.from_pretrained`, and
    returns `{"vocabulary", "eos_token_id", "pad_token_id", "learned_from_documents"}`.

    Args:
        training: the training documents.
        tokenizer: "bpe", "characters", or a ready tokenizer's name or folder.
        vocab_size: entries of a BPE.
        tokenizer_sample: the share of the training documents that a BPE is trained on; characters
            are taken from all.
        seed: of the choice of these documents.
    """
    share = {"bpe": tokenizer_sample, "characters": 1.0}.get(tokenizer, 0.0)
    chosen = choose(training["id"][:], share, seed, "tokenizer")
    texts = iter(training.select(chosen)["text"])
    if tokenizer == "bpe":
        made = train_bpe(texts, vocab_size)
    elif tokenizer == "characters":
        made = build_character_tokenizer(texts)
    else:
        made = load_tokenizer(tokenizer)
    made.save_pretrained(folder)
    found = {name: getattr(made, name) for name in ("eos_token_id", "pad_token_id")}
    return {"vocabulary": len(made), **found, "learned_from_documents": len(chosen)}


def pack_rows(
    documents: "datasets.Dataset",
    tokenizer,
    context: int,
    counts: Counter,
    max_tokens: int | None = None,
) -> Iterator[np.ndarray]:
    """Yields the rows of documents, [some, context] int32: one stream, an end-of-text token after
    each document, cut.

    Args:
        tokenizer: has an `eos_token`.
        context: tokens per row; a tail shorter than that is left out.
        counts: receives `documents`, `characters`, `stream_tokens` and `dropped_tail_tokens`.
        max_tokens: the stream ends after so many; `None`: with the last document."""
    rest = np.empty(0, dtype=np.int32)
    texts = tqdm(documents["text"], desc="tokenising", unit="document", total=len(documents))
    for batch in _batches(texts, len):
        arrays = [rest]
        for text, ids in zip(batch, encode_texts(tokenizer, batch), strict=True):
            ids = np.append(ids, tokenizer.eos_token_id)
            if max_tokens is not None:
                ids = ids[: max_tokens - counts["stream_tokens"]]
            if len(ids) == 0:
                break
            counts.update(documents=1, characters=len(text), stream_tokens=len(ids))
            arrays.append(ids)
        stream = np.concatenate(arrays).astype(np.int32)
        end = len(stream) // context * context
        yield stream[:end].reshape(-1, context)
        rest = stream[end:]
        if counts["stream_tokens"] == max_tokens:
            break
    counts.update(dropped_tail_tokens=len(rest))


def write_rows(
    batches: Iterable[dict[str, np.ndarray]], columns: Sequence[str], context: int, folder: Path
) -> dict:
    """[`save_rows`] for rows that are made one batch after the other: an array [rows, context] for
    each column."""
    import pyarrow as pa
    from datasets import Dataset, Features, List, Value

    features = Features({name: List(Value("int32"), length=context) for name in columns})
    # This file is mapped into memory, so that the rows are never all there; it may not lie where
    # they go.
    file = folder / "stream" / "rows.arrow"
    file.parent.mkdir(parents=True)
    with pa.ipc.new_stream(str(file), features.arrow_schema) as writer:
        for batch in batches:
            values = (pa.array(np.ravel(batch[name]), pa.int32()) for name in columns)
            lists = [pa.FixedSizeListArray.from_arrays(column, context) for column in values]
            writer.write_batch(pa.record_batch(lists, schema=features.arrow_schema))
    saved = save_rows(Dataset.from_file(str(file)), folder)
    shutil.rmtree(file.parent)
    return saved


def save_rows(rows: "datasets.Dataset", folder: Path) -> dict:
    """Saves rows of one length for `datasets.load_from_disk`, and returns `{"blocks", "tokens",
    "sha256"}`: rows, their tokens, and their [`support.prepared.digest`]."""
    import datasets

    rows.save_to_disk(folder)
    tokens, sha256 = digest(datasets.load_from_disk(folder)) if len(rows) else (0, "")
    return {"blocks": len(rows), "tokens": tokens, "sha256": sha256}


def read_rows(folder: Path, column: str = "input_ids") -> np.ndarray:
    """A column of a split of a prepared folder, [rows, context] int32."""
    rows = open_rows(folder.parent, folder.name)
    return rows.data.column(column).combine_chunks().flatten().to_numpy().reshape(len(rows), -1)


def shuffle_blocks(count: int, shares: dict[str, float], seed: int) -> dict[str, "np.ndarray"]:
    """Shuffles `count` block numbers, gives each held-out split its share (by name, one block at
    least if it is above 0), and what is left to `"train"`. They take their blocks in this order, so
    that a split added after the others takes from training only."""
    order, splits = np.random.default_rng(seed).permutation(count), {}
    for name, share in shares.items():
        held_out = max(1, round(share * count)) if share > 0 else 0
        splits[name], order = order[:held_out], order[held_out:]
    return {"train": order, **splits}


def _batches(items: Iterable, size_of: Callable[..., int]) -> Iterator[list]:
    """Lists of items of about `_BATCH_CHARACTERS` characters together."""
    batch, size = [], 0
    for item in items:
        batch.append(item)
        size += size_of(item)
        if size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
