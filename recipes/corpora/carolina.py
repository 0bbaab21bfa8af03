"""The Carolina corpus: its shards of TEI XML (https://sites.usp.br/corpuscarolina)."""

from pathlib import Path

from cli import UserError

from .documents import Document, read_text

_TEI = "{http://www.tei-c.org/ns/1.0}"
_FILE = f"{_TEI}teiHeader/{_TEI}fileDesc"


def read_carolina_shard(path: Path, name: str, encoding: str) -> list[Document]:
    """Reads one shard whole; `name` begins the ids of documents without one.

    Only `text/body/p` is text; the headers hold `<p>` too.

    Raises UserError where the shard is empty, truncated, not of the encoding, not well-formed, or
    has no document.
    """
    from lxml import etree

    how = {"resolve_entities": False, "no_network": True}
    how |= {"remove_comments": True, "remove_pis": True}
    parser = etree.XMLParser(encoding="utf-8", **how)
    try:
        corpus = etree.fromstring(read_text(path, encoding).encode(), parser)
    except etree.XMLSyntaxError as error:
        raise UserError(f"{path}: damaged XML: {error.msg}") from error
    found = enumerate(corpus.iter(f"{_TEI}TEI"))
    documents = [_carolina_document(tei, f"{name}:{number}") for number, tei in found]
    if not documents:
        what = f"holds no <TEI> document of the namespace {_TEI[1:-1]}"
        raise UserError(f"{path}: {what}; is it a Carolina shard?")
    return documents


def _carolina_document(tei, fallback_id: str) -> Document:
    body = tei.iterfind(f"{_TEI}text/{_TEI}body/{_TEI}p")
    paragraphs = tuple(filter(str.strip, ("".join(part.itertext()) for part in body)))
    name = tei.findtext(f"{_FILE}/{_TEI}titleStmt/{_TEI}title") or fallback_id
    title = tei.findtext(f"{_FILE}/{_TEI}sourceDesc//{_TEI}title/{_TEI}name") or ""
    media = tei.find(f"{_FILE}/{_TEI}sourceDesc//{_TEI}media")
    url = "" if media is None else media.get("url", "")
    return Document("\n".join(paragraphs), name, title, url, paragraphs)
