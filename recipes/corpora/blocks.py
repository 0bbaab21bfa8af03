"""From documents to fixed-length blocks: the document store, the token stream, the blocks.

Nothing here keeps the corpus as Python objects: documents lie in an Arrow file, tokens in a flat file of 2 or 4 bytes
each, blocks in a `datasets` folder with the single column `input_ids`.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .documents import Document
from .selection import choose
from .tokenization import encode_texts, make_tokenizer

if TYPE_CHECKING:
    import numpy as np

_BATCH_CHARACTERS = 4_000_000  # of text in memory at a time while writing or tokenising


class DocumentStore:
    """Documents in an Arrow file, mapped into memory rather than read: `len`, `ids`, `store[i]`, `texts(positions)`."""

    def __init__(self, path: Path):
        import pyarrow as pa

        self.table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
        self.ids: list[str] = self.table["id"].to_pylist()

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, position: int) -> dict:
        """One document as `{"id", "title", "source", "text", "extra"}`."""
        row = self.table.slice(position, 1).to_pylist()[0]
        return {**row, "extra": json.loads(row["extra"])}

    def texts(self, positions: Iterable[int]):
        """Yields the texts at ascending `positions`, holding one batch of the file at a time."""
        wanted = sorted(positions)
        start = cursor = 0
        for chunk in self.table["text"].chunks:
            end = start + len(chunk)
            while cursor < len(wanted) and wanted[cursor] < end:
                yield chunk[wanted[cursor] - start].as_py()
                cursor += 1
            start = end

    def characters(self, positions: Iterable[int]) -> int:
        """The number of characters (Unicode code points) of the documents at `positions`."""
        import pyarrow.compute as pc

        lengths = pc.utf8_length(self.table["text"]).to_numpy()
        return int(lengths[sorted(positions)].sum())

    def write_jsonl(self, positions: Iterable[int], path: Path) -> None:
        """Writes the documents at `positions`, one JSON object a line; the file appears when it is complete."""
        partial = path.with_name(f"{path.name}.partial")
        with open(partial, "w", encoding="utf-8") as file:
            for position in positions:
                file.write(json.dumps(self[position], ensure_ascii=False) + "\n")
        os.replace(partial, path)


def write_documents(documents: Iterable[Document], path: Path, max_documents: int | None = None) -> int:
    """Writes documents (at most `max_documents`) into the file of a [`DocumentStore`] and returns how many."""
    import pyarrow as pa

    names = ("id", "title", "source", "text", "extra")
    schema = pa.schema([(name, pa.large_string()) for name in names])
    rows: list[tuple] = []
    count = size = 0
    with pa.ipc.new_file(str(path), schema) as writer:
        for document in documents if max_documents != 0 else ():
            extra = json.dumps(document.extra, ensure_ascii=False)
            rows.append((document.id, document.title, document.source, document.text, extra))
            count, size = count + 1, size + len(document.text)
            if size >= _BATCH_CHARACTERS:
                writer.write_batch(_record_batch(rows, schema))
                rows, size = [], 0
            if count == max_documents:
                break
        if rows:
            writer.write_batch(_record_batch(rows, schema))
    return count


def save_tokenizer(
    store: DocumentStore,
    training: Sequence[int],
    folder: Path,
    *,
    tokenizer: str = "bpe",
    tokenizer_sample: float = 0.35,
    seed: int = 0,
    **settings,
) -> dict:
    """Makes the corpus's tokenizer and saves it into `folder`.

    Args:
        store, training: the training documents.
        folder: for `AutoTokenizer.from_pretrained`.
        tokenizer: "bpe", "characters", or a ready tokenizer's name or folder.
        tokenizer_sample: the share of the training documents that a BPE is trained on; characters are taken from all.
        seed: of the choice of these documents.
        settings: further arguments of [`make_tokenizer`].

    Returns:
        `{"vocabulary", "eos_token_id", "pad_token_id", "learned_from_documents"}`.
    """
    share = {"bpe": tokenizer_sample, "characters": 1.0}.get(tokenizer, 0.0)
    chosen = choose([store.ids[position] for position in training], share, seed, "tokenizer")
    made = make_tokenizer(tokenizer, store.texts(training[i] for i in chosen), **settings)
    made.save_pretrained(folder)
    return {
        "vocabulary": len(made),
        "eos_token_id": made.eos_token_id,
        "pad_token_id": made.pad_token_id,
        "learned_from_documents": len(chosen),
    }


def token_batches(
    texts: Iterable[str], tokenizer, batch_characters: int = _BATCH_CHARACTERS
) -> "Iterator[list[np.ndarray]]":
    """Yields the token ids of the documents, each followed by the end-of-text token, in lists of `batch_characters`
    characters or a little more."""
    import numpy as np

    for batch in _batches(texts, batch_characters):
        yield [np.append(array, tokenizer.eos_token_id) for array in encode_texts(tokenizer, batch)]


def cut_blocks(arrays: "Iterable[np.ndarray]", context: int) -> "Iterator[np.ndarray]":
    """Yields the blocks (int32, `[context]`) of a token stream that comes in pieces of any lengths, as [`write_blocks`]
    cuts them from a whole one: a tail shorter than a block is left out."""
    import numpy as np

    waiting, size = [], 0
    for array in arrays:
        waiting.append(array)
        size += len(array)
        if size >= context:
            tokens = np.concatenate(waiting).astype(np.int32)
            end = size // context * context
            for start in range(0, end, context):
                yield tokens[start : start + context].copy()  # a view would keep the whole piece in memory
            waiting, size = [tokens[end:].copy()], size - end


def write_tokens(
    store: DocumentStore, positions: Sequence[int], tokenizer, path: Path, *, max_tokens: int | None = None
) -> dict:
    """Tokenises documents by ascending position, each followed by the end-of-text token, into one flat file.

    Args:
        store, positions: the documents.
        tokenizer: a tokenizer with an `eos_token`.
        path: the file; [`read_tokens`] maps it back.
        max_tokens: stop after exactly this many tokens.

    Returns:
        `{"documents", "characters", "stream_tokens", "dtype"}`: `dtype` is `uint16` where all ids fit, else `uint32`.
    """
    import numpy as np
    from tqdm.auto import tqdm

    dtype = "uint16" if max(tokenizer.get_vocab().values()) < 2**16 else "uint32"
    documents = tokens = 0
    with open(path, "wb") as file, tqdm(total=len(positions), desc=f"tokenising {path.stem}", unit="doc") as progress:
        for arrays in token_batches(store.texts(positions), tokenizer):
            stream = np.concatenate(arrays).astype(dtype)
            room = len(stream) if max_tokens is None else max_tokens - tokens
            if room < len(stream):
                ends = np.cumsum([len(array) for array in arrays])
                stream, arrays = stream[:room], arrays[: int(np.searchsorted(ends, room)) + 1]
            stream.tofile(file)
            documents += len(arrays)
            tokens += len(stream)
            progress.update(len(arrays))
            if tokens == max_tokens:
                break
    characters = store.characters(sorted(positions)[:documents])
    return {"documents": documents, "characters": characters, "stream_tokens": tokens, "dtype": dtype}


def read_tokens(path: Path, dtype: str) -> "np.ndarray":
    """The token stream of [`write_tokens`], mapped into memory."""
    import numpy as np

    return np.memmap(path, dtype=dtype, mode="r") if path.stat().st_size else np.empty(0, dtype=dtype)


def write_blocks(tokens: "np.ndarray", folder: Path, context: int, numbers: Sequence[int] | None = None) -> dict:
    """Cuts a token stream into blocks of `context` tokens and saves them as a dataset, column `input_ids` (int32).

    Args:
        tokens: the stream; a tail shorter than a block is left out.
        folder: for `datasets.load_from_disk`.
        context: tokens per block.
        numbers: the blocks to take, in this order; `None` takes all.

    Returns:
        `{"blocks", "tokens", "dropped_tail_tokens", "sha256"}`: the hash is over the blocks' tokens as little-endian
        32-bit integers.
    """
    import numpy as np

    blocks = tokens[: len(tokens) // context * context].reshape(-1, context)
    numbers = np.arange(len(blocks)) if numbers is None else np.asarray(numbers, dtype=np.int64)
    step = max(1, _BATCH_CHARACTERS // context)
    batches = ((blocks[numbers[start : start + step]],) for start in range(0, len(numbers), step))
    digest = save_rows(batches, ["input_ids"], context, folder)
    return {
        "blocks": len(numbers),
        "tokens": len(numbers) * context,
        "dropped_tail_tokens": len(tokens) % context,
        "sha256": digest,
    }


def save_rows(batches: "Iterable[tuple[np.ndarray, ...]]", columns: Sequence[str], context: int, folder: Path) -> str:
    """Saves rows of `context` numbers as a dataset with these columns (int32), one batch in memory at a time.

    Args:
        batches: an array [rows, context] for each column.
        folder: for `datasets.load_from_disk`.

    Returns:
        The sha256 of the arrays one after the other, as little-endian 32-bit integers.
    """
    import numpy as np
    import pyarrow as pa
    from datasets import Dataset, Features, List, Value
    from datasets.utils import disable_progress_bars, enable_progress_bars

    features = Features({name: List(Value("int32"), length=context) for name in columns})
    digest = hashlib.sha256()
    # `Dataset.from_file` maps this file, so that the rows are never all in memory; it may not lie where they go.
    stream_file = folder / "stream" / "rows.arrow"
    stream_file.parent.mkdir(parents=True, exist_ok=True)
    with pa.ipc.new_stream(str(stream_file), features.arrow_schema) as writer:
        for batch in batches:
            arrays = [np.ascontiguousarray(array, dtype="<i4").reshape(-1) for array in batch]
            for array in arrays:
                digest.update(array.tobytes())
            lists = [pa.FixedSizeListArray.from_arrays(pa.array(array, pa.int32()), context) for array in arrays]
            writer.write_batch(pa.record_batch(lists, schema=features.arrow_schema))
    disable_progress_bars()
    try:
        Dataset.from_file(str(stream_file)).save_to_disk(str(folder))
    finally:
        enable_progress_bars()
    shutil.rmtree(stream_file.parent)
    return digest.hexdigest()


def shuffle_blocks(count: int, shares: dict[str, float], seed: int) -> dict[str, "np.ndarray"]:
    """Shuffles `count` block numbers, gives each held-out split its share, and what is left to `"train"`.

    Args:
        count: how many blocks there are.
        shares: of the held-out splits, by name, one block at least if it is above 0. They take their blocks in this
            order, so that a split added behind the others takes from training alone.
        seed: of the shuffle.
    """
    import numpy as np

    order, splits = np.random.default_rng(seed).permutation(count), {}
    for name, share in shares.items():
        held_out = max(1, round(share * count)) if share > 0 else 0
        splits[name], order = order[:held_out], order[held_out:]
    return {"train": order, **splits}


def _record_batch(rows: list[tuple], schema):
    import pyarrow as pa

    return pa.record_batch([pa.array(column, pa.large_string()) for column in zip(*rows, strict=True)], schema=schema)


def _batches(texts: Iterable[str], batch_characters: int):
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= batch_characters:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
