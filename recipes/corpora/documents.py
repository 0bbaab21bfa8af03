"""Documents, and the files that hold them: what every kind of corpus has in common."""

import bz2
import codecs
import gzip
import lzma
import math
import zlib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import pyarrow as pa

from cli import UserError

_PIECE = 1 << 22  # bytes that are read at a time
_COMPRESSED = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}
_COMPRESSED[".zst"] = lambda path, _: pa.input_stream(str(path), compression="zstd")
_OTHER = {  # what is no text by its first bytes, as the system's `file` knows it
    b"\x1f\x8b": ".gz", b"\xfd7zXZ": ".xz", b"BZh": ".bz2", b"\x28\xb5\x2f\xfd": ".zst", b"PK": ".zip", b"%PDF": ".pdf",
    b"PAR1": ".parquet", b"ARROW1": ".arrow",
}  # fmt: skip


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
    """What reading a corpus met: `files` read, `skipped` files with reasons, documents `dropped` by reason, files that are
    `left_out` by their suffixes, and how many documents are `duplicates` of an earlier one."""

    files: list[dict] = field(default_factory=list)
    skipped: list[dict] = field(default_factory=list)
    dropped: Counter = field(default_factory=Counter)
    left_out: Counter = field(default_factory=Counter)
    duplicates: int = 0


def unpacked(path: Path) -> Path:
    """The name of a file without the suffix of its compression: of `a.txt.xz`, `a.txt`."""
    return path.with_suffix("") if path.suffix.lower() in _COMPRESSED else path


def inner_suffix(path: Path) -> str:
    """The suffix that tells a file's format: of `a.TXT.xz`, `.txt`."""
    return unpacked(path).suffix.lower()


def read_bytes(path: Path, max_gb: float = math.inf) -> bytes:
    """The content of a plain, gzip, xz, bzip2 or Zstandard file; a UserError if it is damaged, empty, or of more than
    `max_gb` gigabytes when it is unpacked: a few kilobytes of gzip can hold any number of them."""
    data = bytearray()
    try:
        with _COMPRESSED.get(path.suffix.lower(), open)(path, "rb") as file:
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
    return data


def decode(data: bytes, path: Path, encoding: str = "utf-8") -> str:
    """The text of a file's bytes, without a byte-order mark; a UserError if it is not of the encoding, or no text."""
    try:
        if codecs.lookup(encoding).name == "utf-8":
            text = data.decode()
        else:  # a stream's decoder refuses UTF-16 without a byte-order mark, for which bytes.decode takes anything
            text = codecs.getincrementaldecoder(encoding)().decode(data, True)
            text.encode()  # half a surrogate pair is an error, too
        if (place := text.find("\0")) < 0:
            return text.removeprefix("\ufeff")
        problem = f"no text, character {place:,} is NUL"
    except UnicodeError as error:
        where = f"byte {error.start:,} ({error.reason})" if isinstance(error, UnicodeDecodeError) else one_line(error)
        problem = f"not {encoding.upper()}, {where}"
    remedy = "give prepare.py its --encoding, such as cp1252, or convert it, for example with iconv"
    if suffix := next((suffix for magic, suffix in _OTHER.items() if data.startswith(magic)), None):
        remedy = f"it begins as a {suffix} file does: unpack or convert it, or give it that suffix"
    elif b"\0" in data:
        remedy = "is it binary, or UTF-16? prepare.py reads that with --encoding utf-16 (utf-16-le without a mark)"
    raise UserError(f"{path}: {problem}; {remedy}")


def with_unix_ends(text: str) -> str:
    """The text with \\n for each \\r\\n and \\r; str.splitlines takes form feeds, NEL and U+2028 for ends of lines, too."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


def one_line(error: Exception) -> str:
    """An error's message without line breaks."""
    return " ".join(str(error).split()) or type(error).__name__


def url_host(document: Document) -> str:
    """The host of the document's URL, or "" where it has none."""
    try:
        return urlsplit(document.source).netloc.lower() if "://" in document.source else ""
    except ValueError:  # such as "http://[": no address
        return ""
