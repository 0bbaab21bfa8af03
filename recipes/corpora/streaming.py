"""Training rows of a corpus that nobody prepared: read, filtered, tokenised and packed while a model trains on them.

The corpus goes through the code of `recipes/prepare.py`, with the options that the folder of `--data` was prepared with:
[`RowStream`] gives the rows that a preparation of the same documents would, in an `IterableDataset` that never ends.
"""

import contextlib
import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from transformers import TrainerCallback

from cli import UserError
from cli.corpus_options import CorpusOptions
from support.stages import read_manifest, source_files, write_json

from .blocks import cut_blocks, token_batches
from .documents import Document, ReadingLog
from .selection import chance
from .sources import corpus_documents, detect_source_type

if TYPE_CHECKING:
    import datasets

BUFFER = 1000  # rows, 4 MB of them at a context of 1,024
BATCH_CHARACTERS = 1_000_000  # of text that is tokenised at a time, for which training waits
RECORD = "stream.json"


def check_options(run) -> None:
    """Checks the options of a run that streams, and those that mean something to such a run alone.

    Args:
        run: an object with `streaming`, `shuffle_buffer` (which gets its default here), `epochs`, `max_tokens`, `max_steps`.
    """
    if run.streaming is None:
        if run.shuffle_buffer is not None:
            raise UserError("--shuffle_buffer belongs to --streaming; prepared rows are all shuffled: leave it out")
        return
    if run.epochs is not None:
        raise UserError(
            f"--epochs {run.epochs:g} with --streaming: a stream has no end, and how long one pass takes is not known "
            "before; give --max_tokens or --max_steps instead"
        )
    if run.max_tokens is None and run.max_steps is None:
        raise UserError("--streaming needs --max_tokens or --max_steps: a stream begins again at its end and never stops")
    run.shuffle_buffer = BUFFER if run.shuffle_buffer is None else run.shuffle_buffer


class HeldOut:
    """Tells the documents that a model must not be trained on if the validation and test documents of a prepared folder, and
    of any folder prepared from more of the corpus with the same seed and shares, are to judge it.

    These are the documents with the id or the very text of one that the folder holds out (ids need not be the same where the
    folder's share of the corpus lay in other files), and those whose [`chance`] is below the share that was held out, which
    in a whole corpus are as good as all that [`selection.choose`] would choose.

    Args:
        data: the folder; manifest: its.

    Raises:
        UserError: the folder holds out no whole documents.
    """

    def __init__(self, data: Path, manifest: dict):
        options, self.data = manifest["options"], data
        if "prepared_from" in options:
            raise UserError(f"--data {data} holds rows of recall, of which a corpus has none; give a folder of prepare.py")
        if options["split_by"] != "document":
            raise UserError(
                f"--data {data} was made with --split_by {options['split_by']}: its validation rows are parts of the "
                "documents that a stream would train on; prepare it with --split_by document"
            )
        self.seed = options["seed"]
        self.shares = {name: options.get(name, 0) for name in ("validation", "test")}
        self.ids, self.digests = set(), set()
        for document in self._documents():
            self.ids.add(document["id"])
            self.digests.add(_digest(document["text"]))

    def __contains__(self, document: Document) -> bool:
        if document.id in self.ids or _digest(document.text) in self.digests:
            return True
        return any(chance(self.seed, name, document.id) < share for name, share in self.shares.items())

    def texts(self) -> Iterator[str]:
        """The texts of the documents that the folder holds out, one at a time."""
        return (document["text"] for document in self._documents())

    def _documents(self) -> Iterator[dict]:
        for name in self.shares:
            file = self.data / f"{name}_documents.jsonl"
            if file.is_file():
                with open(file, encoding="utf-8") as lines:
                    yield from map(json.loads, lines)


class RowStream:
    """The rows of a corpus, read as they are asked for; after its last document it begins again.

    In memory are one file of the corpus, whole (of a dataset, a batch of rows), some megabytes of text and tokens, the rows
    of the shuffle buffer, and the name of each file. Near-duplicates, where the prepared folder was made without them, are
    those of the held-out documents alone: a memory of all documents would grow with the corpus.

    Args:
        source: the corpus: what `--source` of recipes/prepare.py takes.
        data: a folder that prepare.py made, whose options, but for how much of the corpus to take, hold here too, and whose
            held-out documents are left out (see [`HeldOut`]).
        tokenizer, context: its.

    Attributes:
        identity: a name and 16 hexadecimal digits that change with the options of the corpus, or with the names and sizes of
            its files.
        passes, documents, tokens: how often the corpus was read to its end, and the documents and tokens (end-of-text tokens
            among them) that went into rows, over all passes; rows that still wait in the buffer are counted in.

    Raises:
        UserError: the source is not there, or nothing whole is held out in `data`.
    """

    def __init__(self, source: str, data: Path, tokenizer, context: int):
        manifest = read_manifest(data)
        self.held_out = HeldOut(data, manifest)
        known = {entry.name for entry in dataclasses.fields(CorpusOptions)}
        options = {name: value for name, value in manifest["options"].items() if name in known}
        self.options = CorpusOptions(**options | {"source": source, "fraction": 1.0, "max_documents": -1})
        with _for_a_stream():
            self.kind = detect_source_type(source) if self.options.source_type == "auto" else self.options.source_type
        self.identity = _identity(self.options)
        self.tokenizer, self.context = tokenizer, context
        self.passes = self.documents = self.tokens = 0
        self._dropped, self._log, self._first_log = Counter(), ReadingLog(), None

    def dataset(self, seed: int = 0, buffer: int = BUFFER) -> "datasets.IterableDataset":
        """The rows, `{"input_ids": [context]}` (int32), without end; `buffer` rows are kept to draw the next ones from, so
        that each pass has an order of its own, and 1 leaves them in the order of the corpus."""
        import datasets

        rows = datasets.IterableDataset.from_generator(self.one_pass).repeat(None)
        return rows.shuffle(seed=seed, buffer_size=buffer) if buffer > 1 else rows

    def one_pass(self) -> Iterator[dict]:
        """The rows of one pass over the corpus; what is left at its end, shorter than a row, is dropped."""
        self._log, rows = ReadingLog(), 0
        if self._first_log is None:
            self._first_log = self._log
        with _for_a_stream():
            for block in cut_blocks(self._arrays(), self.context):
                rows += 1
                yield {"input_ids": block}
        dropped = self._log.dropped
        if rows == 0:
            reasons = ", ".join(f"{number:,} {reason}" for reason, number in dropped.items()) or "none"
            raise UserError(
                f"--streaming {self.options.source}: not one row of {self.context:,} tokens is there to train on (documents "
                f"left out: {reasons}); give more text"
            )
        self.passes += 1
        self._dropped += dropped
        self._log = ReadingLog()

    def record(self) -> dict:
        """What has been read so far, JSON-safe: the counts over all passes, the files as far as the first pass has come."""
        log = self._first_log or self._log
        return {
            "source": self.options.source,
            "source_type": self.kind,
            "passes": self.passes,
            "documents": self.documents,
            "tokens": self.tokens,
            "dropped": dict(self._dropped + self._log.dropped),
            **{name: getattr(log, name) for name in ("files", "skipped", "notes")},
        }

    def _arrays(self) -> Iterator:
        for arrays in token_batches(self._texts(), self.tokenizer, BATCH_CHARACTERS):
            for array in arrays:  # counted as they go into rows: what is read ahead is not learned from yet
                self.documents, self.tokens = self.documents + 1, self.tokens + len(array)
                yield array

    def _texts(self) -> Iterator[str]:
        log = self._log
        for document in self._documents(log):
            if document in self.held_out:
                log.dropped["held out"] += 1
            else:
                yield document.text

    def _documents(self, log: ReadingLog) -> Iterable[Document]:
        # Checksums would take a second reading of the whole corpus, and with several processes the others wait for this one
        return corpus_documents(self.options, log, checksums=False, compared_with=self.held_out.texts())


class StreamRecorder(TrainerCallback):
    """Writes what a stream has read into every checkpoint; it must come before the callback that marks it complete."""

    def __init__(self, stream: RowStream):
        self.stream = stream

    def on_save(self, args, state, control, **kwargs):
        if state.is_world_process_zero:  # which reads for all processes
            write_json(Path(args.output_dir) / f"checkpoint-{state.global_step}" / RECORD, self.stream.record())


def recorded(checkpoint: Path) -> dict:
    """What [`StreamRecorder`] wrote into a checkpoint."""
    return json.loads((checkpoint / RECORD).read_text(encoding="utf-8"))


@contextlib.contextmanager
def _for_a_stream() -> Iterator[None]:
    """Errors of the reading code, in the words of recipes/train.py."""
    try:
        yield
    except UserError as error:
        words = str(error).replace("--source", "--streaming")
        raise UserError(f"{words} (the corpus is read with the options of prepare.py that --data was made with)") from error


def _identity(options: CorpusOptions) -> str:
    files = source_files(options.source) if Path(options.source).exists() else []
    listed = [(file.relative_to(options.source).as_posix(), file.stat().st_size) for file in files]
    settings = dataclasses.asdict(options)
    for name in ("source", "skip_bad") if files else ("skip_bad",):  # a folder may move, and a bad file be found late
        del settings[name]
    digest = hashlib.sha256(json.dumps([settings, listed], sort_keys=True).encode()).hexdigest()[:16]
    return f"{Path(options.source).name} ({digest})"


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=16).digest()
