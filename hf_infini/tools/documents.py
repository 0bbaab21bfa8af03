"""The text of documents as they come: plain text, Markdown, source code, HTML and PDF."""

import contextlib
import io
import logging
import unicodedata
import warnings
from collections.abc import Generator, Iterable
from html.parser import HTMLParser
from pathlib import Path

from tqdm.auto import tqdm

ENDS_A_LINE = "title p br div li tr dt dd pre blockquote h1 h2 h3 h4 h5 h6".split()
HTML = (".html", ".htm", ".xhtml")
CODE = (
    ".py .pyi .c .h .cc .cpp .hpp .cu .cs .go .java .jl .js .jsx .ts .tsx .kt .lua .php .pl .r .rb"
    " .rs .scala .sh .sql .swift .tex .toml .yaml .yml"
).split()
OTHERS_CODE = {"node_modules", "site-packages", "venv", "__pycache__"}  # folders that are left out
# Of a folder's files
KINDS = (".txt", ".text", ".md", ".markdown", ".rst", *HTML, ".pdf", *CODE)
NOT_SHOWN = "script style template noscript noframes iframe".split()  # by today's browsers
# What other files begin with, what they are, and how to get a file to read from one
OFFICE = "soffice --headless --convert-to txt:Text FILE"
OTHER_KINDS = (
    (b"PK\x03\x04", "a zip archive, such as docx, odt or epub", f"{OFFICE}, or unzip FILE"),
    (b"\xd0\xcf\x11\xe0", "an old Office file", OFFICE),
    (b"{\\rtf", "RTF", OFFICE),
    (b"%!PS", "PostScript", "ps2pdf FILE"),
    (b"\x1f\x8b", "compressed by gzip", "gzip -dc FILE > NEW"),
    (b"BZh", "compressed by bzip2", "bzip2 -dc FILE > NEW"),
    (b"\xfd7zXZ", "compressed by xz", "xz -dc FILE > NEW"),
    (b"\x28\xb5\x2f\xfd", "compressed by zstd", "zstd -dc FILE > NEW"),
)
MARKS = {  # of Unicode, the longer before the shorter that it begins with
    b"\xef\xbb\xbf": "utf-8-sig",
    b"\xff\xfe\0\0": "utf-32",
    b"\0\0\xfe\xff": "utf-32",
    b"\xff\xfe": "utf-16",
    b"\xfe\xff": "utf-16",
}
CUT_OFF = ("unexpected end of data", "truncated data")  # what Python says of an end
WITHOUT_MARK = ("utf-32-le", "utf-32-be", "utf-16-le", "utf-16-be")
MOST_UNREADABLE = 0.01  # of a text's characters; PDFs and logs have some


def read_document(path: str | Path) -> str:
    """The text of a file. What it holds decides how it is read, and then the end of its name.

    A PDF is read page by page, HTML without its markup, code and what a browser does not show; any
    other file is text in UTF-8, or in UTF-16 or UTF-32 where a mark at the beginning, or the text
    itself, leaves no doubt.

    Args:
        path: of the file.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is of another kind, damaged, encrypted or has no text; says what to do.
        ModuleNotFoundError: without `pip install "hf-infini[documents]"`, which brings what reads
            PDF and HTML.

    A PDF that is damaged, but has text, is read with a warning.
    """
    path = Path(path)
    if path.is_char_device():  # some never end
        raise ValueError(f"{path} is a device and no file: give text, Markdown, HTML or PDF.")
    content, kind = path.read_bytes(), path.suffix.lower()
    if kind == ".pdf" or content.startswith(b"%PDF-"):
        text, hint = _pdf_text(content, path), "Pages that are pictures need OCR first."
        mend = "Its fonts do not say which letters they draw: it needs OCR."
    else:
        for beginning, what, command in OTHER_KINDS:
            if content.startswith(beginning):
                raise ValueError(
                    f"{path} is {what}: give text, Markdown, HTML or PDF. To convert it: {command}."
                )
        if kind in HTML:
            text = _html_text(content, path)
            hint = "A page of scripts or frames: print it to a PDF from the browser."
        else:
            text, hint = _plain_text(content, path), ""
        mend = r"Without them: tr -d '\000-\010\016-\037' < FILE > NEW."
    text = "\n".join(text.splitlines()).strip()
    if not text:
        raise ValueError(f"{path} has no text. {hint}".rstrip())
    if (unreadable := _unreadable(text)) > MOST_UNREADABLE * len(text):
        raise ValueError(
            f"{path} is no text: {unreadable:,} of its {len(text):,} characters are control "
            f"characters or stand for none. {mend}"
        )
    return text


def files_in(paths: Iterable[str | Path]) -> list[Path]:
    """The files at these `paths`; of a folder all that have the name of a document ([`KINDS`]), at
    any depth, in the order of their names, but hidden and empty ones, code of other packages, and
    what has the name of code and is none, with a warning. ValueError for a folder without any."""
    found: list[Path] = []
    for path in map(Path, paths):
        if not path.is_dir():
            found.append(path)
            continue
        own = [
            file
            for file in sorted(path.rglob("*"))
            if file.suffix.lower() in KINDS
            and not any(
                part.startswith(".") or part in OTHERS_CODE for part in file.relative_to(path).parts
            )
            and file.is_file()
            and file.stat().st_size
            and (file.suffix.lower() not in CODE or _is_code(file))
        ]
        if not own:
            raise ValueError(
                f"{path} has no documents: of a folder, files that are not empty are read whose "
                f"names end in {', '.join(KINDS)}. Give others by their names."
            )
        found += own
    return found


def _is_code(file: Path) -> bool:
    """Whether a file is text, such as code, and not only white space; with a warning where it is no
    text, such as a video whose name ends in .ts."""
    if not file.read_bytes().strip():
        return False
    try:
        return bool(read_document(file))
    except ValueError as error:
        warnings.warn(f"left out: {error}", stacklevel=3)
        return False


def read_documents(paths: Iterable[str | Path]) -> str:
    """The texts of the files `paths` as one, with an empty line between them; errors as of
    [`read_document`]."""
    return "\n\n".join(map(read_document, paths))


def _pdf_text(content: bytes, path: Path) -> str:
    from pypdf import PdfReader
    from pypdf.errors import DependencyError, FileNotDecryptedError

    try:
        with _said_by("pypdf") as said:
            pages = PdfReader(io.BytesIO(content)).pages
            bar = tqdm(pages, desc=path.name, unit="page", delay=2, leave=False)
            text = "\n\n".join(page.extract_text() for page in bar)
    except FileNotDecryptedError as error:
        raise ValueError(
            f"{path} needs a password. Without it: qpdf --password=… --decrypt FILE NEW.pdf."
        ) from error
    except DependencyError as error:
        raise ValueError(
            f"{path} is encrypted, and pypdf needs a package for that: pip install cryptography "
            f"({error})."
        ) from error
    except Exception as error:  # of a damaged file pypdf raises what it happens to run into
        text, said = "", [str(error) or type(error).__name__]
    if said and not text.strip():
        raise ValueError(
            f"{path} is damaged, encrypted or no PDF: {said[0].rstrip('.')}. Print it to a "
            "new PDF from a viewer that opens it."
        )
    if said:
        warnings.warn(
            f"{path} is damaged, and some of its text may be missing: {said[0]}", stacklevel=3
        )
    # a letter in two halves, or half of one
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


class _HTMLText(HTMLParser):
    """Collects what a browser shows, in one pass: a page may nest deeper than a tree can. The
    parser calls its methods with the name of an element, `tag`, and its attributes, `attrs`; or
    with `data`: text, or what a declaration holds."""

    def __init__(self):
        super().__init__()
        self.pieces: list[str] = []
        self.hidden: list[str] = []  # the elements not shown that are open

    def handle_starttag(self, tag, attrs):
        if tag in NOT_SHOWN:
            self.hidden.append(tag)
        elif tag in ENDS_A_LINE and self._in_a_line():
            self.pieces.append("\n")  # an element before it that is left open ends here

    def _in_a_line(self) -> bool:
        last = self.pieces[-1].rstrip(" \t") if self.pieces else ""
        return bool(last) and not last.endswith("\n")

    def handle_startendtag(self, tag, attrs):
        self.handle_endtag(tag)

    def handle_endtag(self, tag):
        if tag in self.hidden:
            del self.hidden[self.hidden.index(tag) :]
        elif tag in ENDS_A_LINE:
            self.pieces.append("\n")

    def handle_data(self, data):
        if not self.hidden:  # white space between elements is that of the markup
            self.pieces.append(data if data.strip(" \t\r\n\f") else "\n" if "\n" in data else " ")

    def unknown_decl(self, data):
        self.handle_data(data.removeprefix("CDATA["))


def _html_text(content: bytes, path: Path) -> str:
    from bs4.dammit import UnicodeDammit  # finds an encoding by its mark, its name or the bytes

    text = _wide_text(content) or UnicodeDammit(content, is_html=True).unicode_markup or ""
    parser = _HTMLText()
    try:
        parser.feed(text)
        parser.close()
    except Exception as error:  # AssertionError and others, by version
        raise ValueError(
            f"{path} cannot be read as HTML: {str(error) or type(error).__name__}. Print it to a "
            "PDF from the browser."
        ) from error
    return "".join(parser.pieces)


def _plain_text(content: bytes, path: Path) -> str:
    encoding = next((MARKS[mark] for mark in MARKS if content.startswith(mark)), "utf-8")
    try:
        text = content.decode(encoding)
        if "\0" not in text:
            return text
        what = f"no text: character {text.index(chr(0)):,} is zero"
    except UnicodeDecodeError as error:
        what = f"no text in {encoding.removesuffix('-sig').upper()} (byte {error.start:,})"
        if error.end == len(content) and error.reason in CUT_OFF:
            raise ValueError(f"{path} ends inside a character: get the whole file.") from error
    if (wide := _wide_text(content)) is not None:
        return wide
    if _unreadable(content.decode("ascii", "ignore")) > MOST_UNREADABLE * len(content):
        raise ValueError(f"{path} is {what}, but binary: give text, Markdown, HTML or PDF.")
    raise ValueError(
        f"{path} is {what}: give text, Markdown, HTML or PDF. Text of another encoding: "
        "iconv --from-code=ISO-8859-1 --to-code=UTF-8 FILE > NEW."
    )


def _wide_text(content: bytes) -> str | None:
    """The text of UTF-16 or UTF-32 without a mark, where only one reading of the bytes is a text:
    known characters only, and one in ten at least of ASCII, such as spaces."""
    found = []
    if b"\0" in content:
        for encoding in WITHOUT_MARK:
            with contextlib.suppress(UnicodeDecodeError):
                text = content.decode(encoding)
                ascii = len(text.encode("ascii", "ignore"))
                if 10 * ascii >= len(text) and not _unreadable(text):
                    found.append(text.removeprefix("\ufeff"))
    return found[0] if len(found) == 1 else None


def _unreadable(text: str) -> int:
    """How many characters are no text: control characters that are no white space, code points
    without a character, and what stands for one that was not read."""
    return sum(
        text.count(each)
        for each in set(text)
        if each == "\ufffd" or unicodedata.category(each) in ("Cc", "Cn", "Cs") and each.strip()
    )


@contextlib.contextmanager
def _said_by(name: str) -> Generator[list[str]]:
    """What a library logs meanwhile, which then does not go to the terminal."""
    said: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record):
            said.append(record.getMessage())

    logger, handler = logging.getLogger(name), Kept(logging.WARNING)
    before, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)
        logger.propagate = before
