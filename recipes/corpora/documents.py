"""Documents, and the files that hold them: what every kind of corpus has in common."""

import bz2
import gzip
import lzma
import math
import zlib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from cli import UserError

_PIECE = 1 << 22  # bytes that are read at a time
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


def read_text(path: Path, max_gb: float = math.inf) -> str:
    """The UTF-8 text (without its byte-order mark) of a plain, gzip, xz or bzip2 file.

    Args:
        path: the file.
        max_gb: gigabytes of text that it may have, unpacked: a few kilobytes of gzip can hold any number of them.

    Raises UserError if the file is damaged, empty, too large, not UTF-8, or no text.
    """
    data = bytearray()
    try:
        with _COMPRESSED.get(path.suffix, open)(path, "rb") as file:
            while piece := file.read(_PIECE):
                data += piece
                if len(data) > max_gb * 1e9:
                    raise UserError(f"{path}: more than --max_file_gb {max_gb:g} of text; split it, or give prepare.py more")
    except (EOFError, zlib.error, lzma.LZMAError, OSError) as error:
        raise UserError(f"{path}: damaged or truncated, it cannot be read to its end ({one_line(error)})") from error
    except MemoryError as error:
        raise UserError(f"{path}: its text needs more memory than there is; split the file") from error
    if not data:
        raise UserError(f"{path}: the file is empty")
    if (place := data.find(b"\0")) >= 0:
        raise UserError(f"{path}: no text, byte {place:,} is 0; is it binary, or UTF-16? iconv converts that")
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
    try:
        return urlsplit(document.source).netloc.lower() if "://" in document.source else ""
    except ValueError:  # such as "http://[": no address
        return ""
