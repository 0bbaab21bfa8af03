"""The text of documents as they come: plain text, Markdown, HTML and PDF."""

import io
from collections.abc import Iterable
from pathlib import Path

ENDS_A_LINE = "title p br div li tr dt dd pre blockquote h1 h2 h3 h4 h5 h6".split()


def read_document(path: str | Path) -> str:
    """The text of a file: that of a PDF page by page, of HTML without its markup, and any other as
    UTF-8. OSError where it cannot be read, ValueError where it is of another kind or has no text,
    ModuleNotFoundError without `pip install "hf-infini[documents]"`, which brings what reads PDF
    and HTML."""
    path = Path(path)
    content, kind = path.read_bytes(), path.suffix.lower()
    if kind == ".pdf":
        from pypdf import PdfReader
        from pypdf.errors import PyPdfError

        try:
            text = "\n\n".join(page.extract_text() for page in PdfReader(io.BytesIO(content)).pages)
        except PyPdfError as error:
            raise ValueError(f"{path} is damaged, encrypted or no PDF: {error}") from error
    elif kind in (".html", ".htm", ".xhtml"):
        from bs4 import BeautifulSoup

        page = BeautifulSoup(content, "html.parser")  # finds the encoding in the page
        for element in page.find_all(ENDS_A_LINE):
            element.insert_after("\n")
        text = page.get_text()
    else:
        try:
            text = content.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{path} is no text in UTF-8 (byte {error.start:,}): give text, Markdown, HTML or "
                "PDF. Text of another encoding: iconv --from-code=ISO-8859-1 --to-code=UTF-8."
            ) from error
    text = "\n".join(text.splitlines()).strip()
    if not text:
        raise ValueError(
            f"{path} has no text."
            + (" Pages that are pictures need OCR first." if kind == ".pdf" else "")
        )
    return text


def read_documents(paths: Iterable[str | Path]) -> str:
    """The texts of files as one, with an empty line between them; errors as of
    [`read_document`]."""
    return "\n\n".join(map(read_document, paths))
