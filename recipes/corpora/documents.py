"""Documents, and the files that hold them: what every kind of corpus has in common."""

import bz2
import gzip
import lzma
import zlib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import pyarrow as pa

from cli import UserError, one_line

_COMPRESSED = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}
_COMPRESSED[".zst"] = lambda path, _: pa.input_stream(str(path), compression="zstd")


@dataclass(frozen=True, slots=True)
class Document:
    """One text of a corpus.

    Args:
        id: unique within the corpus and stable between runs: sampling and splitting go by it.
        title: a title for people; source: where the text comes from (a URL or a file name); or "".
        paragraphs: the source's own where it marks them; `None` means the lines of `text`."""

    text: str
    id: str
    title: str = ""
    source: str = ""
    paragraphs: tuple[str, ...] | None = None


@dataclass
class ReadingLog:
    """What reading a corpus met: `files` read, documents `dropped` by reason, files that are
    `left_out` by their suffixes, and how many documents are `duplicates` of an earlier one."""

    files: list[dict] = field(default_factory=list)
    dropped: Counter = field(default_factory=Counter)
    left_out: Counter = field(default_factory=Counter)
    duplicates: int = 0


def inner_suffix(path: Path) -> str:
    """The suffix that tells a file's format: of `a.TXT.xz`, `.txt`."""
    return (path.with_suffix("") if path.suffix.lower() in _COMPRESSED else path).suffix.lower()


def read_text(path: Path, encoding: str = "utf-8") -> str:
    """The text of a plain, gzip, xz, bzip2 or Zstandard file, without a byte-order mark.

    Raises UserError if the file is damaged, empty, not of the encoding, or binary.
    """
    try:
        with _COMPRESSED.get(path.suffix.lower(), open)(path, "rb") as file:
            text = file.read().decode(encoding).removeprefix("\ufeff")
    except (EOFError, zlib.error, lzma.LZMAError, OSError) as error:
        raise UserError(
            f"{path}: damaged or truncated, it cannot be read to its end ({one_line(error)})"
        ) from error
    except LookupError as error:
        raise UserError(
            f"--encoding: {error}; give one of Python's, such as utf-16, latin-1 or cp1252"
        ) from error
    except UnicodeError as error:
        raise UserError(
            f"{path}: not {encoding.upper()} ({one_line(error)}); give prepare.py its --encoding"
        ) from error
    if "\0" in text:
        raise UserError(
            f"{path}: no text, character {text.index(chr(0)):,} is NUL: is it binary, "
            "or of another --encoding?"
        )
    if not text.strip():
        raise UserError(f"{path}: the file is empty")
    return text


def with_unix_ends(text: str) -> str:
    """The text with \\n for each \\r\\n and \\r; str.splitlines takes form feeds, NEL and U+2028
    for ends of lines, too."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


def url_host(document: Document) -> str:
    """The host of the document's URL, or "" where it has none."""
    try:
        return urlsplit(document.source).netloc.lower() if "://" in document.source else ""
    except ValueError:  # such as "http://[": no address
        return ""
