"""The Carolina corpus: finding, downloading and reading its shards of TEI XML (https://sites.usp.br/corpuscarolina)."""

from collections.abc import Sequence
from pathlib import Path

from cli import UserError

from .documents import Document, read_text

CAROLINA_REPOSITORY = "carolina-c4ai/corpus-carolina"  # on the Hub, a dataset

# Carolina's taxonomy codes and their folders: https://huggingface.co/datasets/carolina-c4ai/corpus-carolina
CAROLINA_FOLDERS = {
    "wik": "wikis",
    "dat": "datasets_and_other_corpora",
    "leg": "legislative_branch",
    "jud": "judicial_branch",
    "uni": "university_domains",
    "soc": "social_media",
    "pub": "public_domain_works",
}

_TEI = "{http://www.tei-c.org/ns/1.0}"
_FILE = f"{_TEI}teiHeader/{_TEI}fileDesc"


def download_carolina(taxonomy: Sequence[str] = (), revision: str | None = None) -> Path:
    """Downloads the chosen parts of Carolina from the Hub, or finds them in its cache, and returns their folder."""
    from huggingface_hub import snapshot_download

    patterns = [f"corpus/{CAROLINA_FOLDERS[code]}/*.xml.gz" for code in taxonomy] or ["corpus/*.xml.gz"]
    return Path(
        snapshot_download(CAROLINA_REPOSITORY, repo_type="dataset", revision=revision, allow_patterns=patterns)
    )


def carolina_shards(source: Path, shards: Sequence[Path], taxonomy: Sequence[str] = ()) -> list[Path]:
    """Those shards of `source` (a shard, a taxonomy folder, the `corpus` folder or the one around it) that the codes name.

    Raises UserError for a code that has no shard here.
    """
    codes = [_code_of(shard) for shard in shards]
    if absent := [CAROLINA_FOLDERS[code] for code in taxonomy if code not in codes]:
        present = ", ".join(code for code in CAROLINA_FOLDERS if code in codes)
        raise UserError(f"{source}: {absent[0]} holds no *.xml.gz shard; taxonomy codes present: {present or 'none'}")
    return [shard for shard, code in zip(shards, codes, strict=True) if not taxonomy or code in taxonomy]


def read_carolina_shard(path: Path, name: str, encoding: str) -> list[Document]:
    """Reads one shard whole; `name` begins the ids of documents without one.

    Only `text/body/p` is text; the headers hold `<p>` too.

    Raises:
        UserError: the shard is empty, truncated, not of the encoding, not well-formed, or has no document.
    """
    from lxml import etree

    parser = etree.XMLParser(
        encoding="utf-8", resolve_entities=False, no_network=True, remove_comments=True, remove_pis=True
    )
    try:
        corpus = etree.fromstring(read_text(path, encoding).encode(), parser)
    except etree.XMLSyntaxError as error:
        raise UserError(f"{path}: damaged XML: {error.msg}") from error
    documents = [_carolina_document(tei, f"{name}:{n}") for n, tei in enumerate(corpus.iter(f"{_TEI}TEI"))]
    if not documents:
        raise UserError(f"{path}: holds no <TEI> document of the namespace {_TEI[1:-1]}; is it a Carolina shard?")
    return documents


def _carolina_document(tei, fallback_id: str) -> Document:
    body = ("".join(paragraph.itertext()) for paragraph in tei.iterfind(f"{_TEI}text/{_TEI}body/{_TEI}p"))
    paragraphs = tuple(filter(str.strip, body))
    name = tei.findtext(f"{_FILE}/{_TEI}titleStmt/{_TEI}title") or fallback_id
    title = tei.findtext(f"{_FILE}/{_TEI}sourceDesc//{_TEI}title/{_TEI}name") or ""
    media = tei.find(f"{_FILE}/{_TEI}sourceDesc//{_TEI}media")
    return Document("\n".join(paragraphs), name, title, "" if media is None else media.get("url", ""), paragraphs)


def _code_of(shard: Path) -> str | None:
    """The code of the nearest taxonomy folder around a shard; `None` where it is in none."""
    codes = {folder: code for code, folder in CAROLINA_FOLDERS.items()}
    return next((codes[name] for name in reversed(shard.absolute().parts) if name in codes), None)
