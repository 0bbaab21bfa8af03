"""Documents that requests ask about: each is read once, into a memory file that the command `ask`
reads as well, and is there after a restart."""

import functools
import hashlib
import json
import logging
import tempfile
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from ...cache.cache import InfiniCache
from ...cache.files import MemoryFileError, describe_model
from .. import cache_folder
from ..documents import read_document
from ..outputs import replacing
from ..reader import Reader
from ..text_file import remove_files
from .engine import Engine
from .prefixes import Prefixes
from .prompts import Prompts
from .requests import Context

logger = logging.getLogger(__name__)


@dataclass
class Document:
    """A document of a library: its `text`, `bytes` of it when it came, and `reading`, which ends
    when it was read."""

    id: str
    filename: str
    text: str
    bytes: int
    created: int
    reading: Future = field(default_factory=Future)

    @property
    def status(self) -> Literal["uploaded", "processed", "error"]:
        """How far it is."""
        if not self.reading.done():
            return "uploaded"
        return "error" if self.reading.cancelled() or self.reading.exception() else "processed"


class Removed(Exception):
    """A document is no longer there while it is read."""


class TurnReader(Reader):
    """A reader whose every piece is a turn of an `engine`; the other arguments as of [`Reader`].

    Attributes:
        check: is called before each piece, and may raise.
    """

    def __init__(self, engine: Engine, tokenizer: Any, **options):
        self.engine, self.check = engine, lambda: None
        super().__init__(engine.loop.model, tokenizer, archive=engine.loop.archive, **options)

    def _read_piece(self, cache: InfiniCache, ids: Tensor) -> None:
        self.check()
        read = functools.partial(super()._read_piece, cache, ids)
        self.engine.turn(read, len(ids))


class Library:
    """Documents in a folder.

    Args:
        folder: of their texts, made if need be; that of memory files is `memories`.
        memories: as `ask` has it.
        engine: whose turns read them.
        tokenizer: that no other thread uses.
        model: name that is noted beside memory files.
        kept_bytes: of documents that are ready for the next request.
    """

    def __init__(
        self,
        folder: Path,
        memories: Path,
        engine: Engine,
        tokenizer: Any,
        *,
        model: str = "",
        kept_bytes: int = 2 * 10**9,
    ):
        self.folder, self.memories, self.engine, self.model = folder, memories, engine, model
        self.tokenizer = tokenizer
        self._name = cache_folder.memory_names(engine.loop.model, tokenizer, engine.loop.archive)
        self._kept, self._lock = Prefixes(kept_bytes), threading.Lock()
        self._pool = ThreadPoolExecutor(1, "hf_infini documents")
        self._documents: dict[str, Document] = {}
        folder.mkdir(parents=True, exist_ok=True)
        for file in sorted(folder.glob("file-*.json")):
            try:
                known = json.loads(file.read_text("utf-8"))
                document = Document(file.stem, **known)
            except (ValueError, TypeError, OSError) as error:
                logger.warning("%s is no document: %s", file, error)
                continue
            self._documents[document.id] = document
            self._start(document)

    def add(self, filename: str, content: bytes) -> Document:
        """Takes a document, whose `content` is read as that of a file with the name `filename`;
        ValueError where it is no text. The same text is the same document."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"document{Path(filename).suffix}"
            try:
                path.write_bytes(content)
                text = read_document(path)
            except (ValueError, OSError) as error:
                raise ValueError(str(error).replace(str(path), filename)) from error
        name = f"file-{hashlib.sha256(text.encode()).hexdigest()[:32]}"
        with self._lock:  # the same one may come twice at once, or be removed meanwhile
            if (known := self._documents.get(name)) and known.status != "error":
                return known
            document = Document(name, filename, text, len(content), int(time.time()))
            about = {"filename": filename, "text": text, "bytes": document.bytes}
            with replacing(self.folder / f"{name}.json") as file:
                file.write_text(json.dumps(about | {"created": document.created}), "utf-8")
            self._documents[name] = document
            self._start(document)
            return document

    def get(self, name: str) -> Document:
        """The document with this id, `name`; KeyError where there is none."""
        return self._documents[name]

    def __iter__(self):
        return iter(sorted(self._documents.values(), key=lambda each: -each.created))

    def remove(self, name: str) -> None:
        """Deletes the document with this id, `name`, and what was read of it; KeyError where there
        is none."""
        with self._lock:
            document = self._documents.pop(name)
            (self.folder / f"{name}.json").unlink(missing_ok=True)
            self._forget(document)

    def read_again(self, documents: Iterable[Document]) -> None:
        """Reads `documents` again that were read: what there is of them is damaged."""
        with self._lock:
            for document in documents:
                if document.status == "processed" and self._is_here(document):
                    self._forget(document)
                    self._start(document)

    def contexts(self, documents: Iterable[Document], prompts: Prompts):
        """The function `context` of [`Prompts.of_chat`], of these `prompts`, for `documents`: with
        caches of those that were read, and that follow the usual beginning of a chat."""
        by_text = {document.text: document for document in documents}

        def context(head: str, text: str) -> Context:
            found, document = prompts.context(head, text), by_text.get(text)
            if document is None or document.status != "processed" or head != _head(prompts.reader):
                return found
            begun, cache = self._kept.longest(found.ids)
            if begun < len(found.ids):
                cache = self._load(document, prompts.reader)
                self._kept.keep(found.ids, cache)
            return found._replace(cache=cache)

        return context

    def close(self) -> None:
        """Ends reading; what was read so far is in files, from which the next start goes on. The
        engine is to be stopped first."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    @functools.cached_property
    def _described(self) -> dict[str, Any]:
        return describe_model(self.engine.loop.model)

    def _file(self, document: Document) -> Path:
        """The memory file, by the content, as `ask` names it."""
        return self.memories / self._name(document.text)

    def _is_here(self, document: Document) -> bool:
        return self._documents.get(document.id) is document

    def _forget(self, document: Document) -> None:
        """Removes what was read of a document. Of one that is being read, `_read` removes what
        comes after this."""
        self._kept = Prefixes(self._kept.limit)  # whose archives may be in the file
        document.reading.cancel()
        self._remove_files(document)

    def _remove_files(self, document: Document) -> None:
        file = self._file(document)
        remove_files(file)
        for beside in (file.with_suffix(".json"), file.with_name(f"{file.name}.lock")):
            beside.unlink(missing_ok=True)

    def _start(self, document: Document) -> None:
        document.reading = self._pool.submit(self._read, document)

    def _read(self, document: Document) -> None:
        """Reads a document, or what is missing of it, into its file."""
        reader = TurnReader(self.engine, self.tokenizer, chunk=self.engine.loop.chunk)
        file = self._file(document)

        def check() -> None:
            if not self._is_here(document):
                raise Removed(f"{document.id} was deleted.")

        reader.check = check
        try:
            try:
                self._load(document, reader)
            except MemoryFileError as error:
                logger.warning("reading again, for %s", error)
                remove_files(file)
                self._load(document, reader)
            cache_folder.note(file, model=self.model, adapter=None, documents=[document.filename])
        finally:
            with self._lock:
                if not self._is_here(document):
                    self._remove_files(document)

    def _load(self, document: Document, reader: Reader) -> InfiniCache:
        """The cache after a document, from its file, or by a reader into it."""
        head = _head(reader)
        reader._read(head, None, progress=False)
        text = head + reader._plain(document.text)
        cache = reader._read(text, self._file(document), False, self._described)
        del reader.texts[text]
        return cache


def _head(reader: Reader) -> str:
    """What is before a document in the usual chat."""
    return reader._rendered_parts([{"role": "user", "content": ""}], True)[0]
