"""The Carolina corpus: its shards of TEI XML (https://sites.usp.br/corpuscarolina)."""

from pathlib import Path

from cli import UserError

from .documents import Document, read_text

_TEI = "{http://www.tei-c.org/ns/1.0}"
_FILE = f"{_TEI}teiHeader/{_TEI}fileDesc"


def read_carolina_shard(path: Path, name: str, encoding: str) -> list[Document]:
    """Reads one shard whole; `name` begins the ids of documents without one.

    Only `text/body/p` is text; the headers hold `<p>` too.

    Raises:
        UserError: the shard is empty, truncated, not of the encoding, not well-formed, or has no
            document.
    """
    from lxml import etree

    parser = etree.XMLParser(
        encoding="utf-8",
        resolve_entities=False,
        no_network=True,
        remove_comments=True,
        remove_pis=True,
    )
    try:
        corpus = etree.fromstring(read_text(path, encoding).encode(), parser)
    except etree.XMLSyntaxError as error:
        raise UserError(f"{path}: damaged XML: {error.msg}") from error
    documents = [
        _carolina_document(tei, f"{name}:{n}") for n, tei in enumerate(corpus.iter(f"{_TEI}TEI"))
    ]
    if not documents:
        raise UserError(
            f"{path}: holds no <TEI> document of the namespace {_TEI[1:-1]}; is it a "
            "Carolina shard?"
        )
    return documents


def _carolina_document(tei, fallback_id: str) -> Document:
    body = (
        "".join(paragraph.itertext())
        for paragraph in tei.iterfind(f"{_TEI}text/{_TEI}body/{_TEI}p")
    )
    paragraphs = tuple(filter(str.strip, body))
    name = tei.findtext(f"{_FILE}/{_TEI}titleStmt/{_TEI}title") or fallback_id
    title = tei.findtext(f"{_FILE}/{_TEI}sourceDesc//{_TEI}title/{_TEI}name") or ""
    media = tei.find(f"{_FILE}/{_TEI}sourceDesc//{_TEI}media")
    return Document(
        "\n".join(paragraphs),
        name,
        title,
        "" if media is None else media.get("url", ""),
        paragraphs,
    )
