"""Documents, and the files that hold them: what every kind of corpus has in common."""

import bz2
import gzip
import lzma
import zlib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from cli import UserError

_COMPRESSED = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}


@dataclass(frozen=True, slots=True)
class Document:
    """One text of a corpus.

    Args:
        text: the text itself.
        id: unique within the corpus and stable between runs: sampling and splitting go by it.
        title: a title for people, or "".
        source: where the text comes from (a URL or a file name), or "".
        paragraphs: the source's own paragraphs where it marks them; `None` means the lines of `text`.
    """

    text: str
    id: str
    title: str = ""
    source: str = ""
    paragraphs: tuple[str, ...] | None = None


@dataclass
class ReadingLog:
    """What reading a corpus met: `files` read, `skipped` files with reasons, documents `dropped` by reason."""

    files: list[dict] = field(default_factory=list)
    skipped: list[dict] = field(default_factory=list)
    dropped: Counter = field(default_factory=Counter)


def inner_suffix(path: Path) -> str:
    """The suffix that tells a file's format: of `a.txt.xz`, `.txt`."""
    return (Path(path.stem) if path.suffix in _COMPRESSED else path).suffix.lower()


def read_text(path: Path) -> str:
    """The UTF-8 text (without its byte-order mark) of a plain, gzip, xz or bzip2 file.

    Raises UserError if the file is damaged, empty or not UTF-8.
    """
    try:
        with _COMPRESSED.get(path.suffix, open)(path, "rb") as file:
            data = file.read()
    except (EOFError, zlib.error, lzma.LZMAError, OSError) as error:
        raise UserError(f"{path}: damaged or truncated, it cannot be read to its end ({one_line(error)})") from error
    if not data:
        raise UserError(f"{path}: the file is empty")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path}: not UTF-8, byte {error.start:,} ({error.reason}); convert it, for example with iconv"
        ) from error


def one_line(error: Exception) -> str:
    """An error's message without line breaks."""
    return " ".join(str(error).split()) or type(error).__name__


def url_host(document: Document) -> str:
    """The host of the document's URL, or "" where it has none."""
    return urlsplit(document.source).netloc.lower() if "://" in document.source else ""
