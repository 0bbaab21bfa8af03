"""The Carolina corpus: finding, downloading and reading its shards of TEI XML (https://sites.usp.br/corpuscarolina).

A shard is read whole, checked, and only then turned into documents. A bad one is always a [`UserError`] here; leaving
it out is the choice of `sources.iterate_documents`' caller.
"""

import hashlib
import io
from collections.abc import Sequence
from pathlib import Path

from cli import UserError

from .documents import Document, decode, decompress, one_line

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
_MAX_SHARD_BYTES = 2**30  # the real shards hold about 30 MB of XML each: more than 1 GiB is a decompression bomb


def download_carolina(taxonomy: Sequence[str] = (), revision: str | None = None) -> str:
    """Downloads the chosen parts of Carolina from the Hub, or finds them in its cache, and returns their folder."""
    from huggingface_hub import snapshot_download

    folders = [CAROLINA_FOLDERS[code] for code in _check_taxonomy(taxonomy)] or ["*"]
    patterns = [f"corpus/{folder}/{name}" for folder in folders for name in ("*.xml.gz", "checksum.sha256")]
    try:
        return snapshot_download(CAROLINA_REPOSITORY, repo_type="dataset", revision=revision, allow_patterns=patterns)
    except (OSError, ValueError) as error:
        raise UserError(
            f"--source {CAROLINA_REPOSITORY}: the download from the Hub failed ({one_line(error)}); check the "
            f"connection and --revision, or give the path of a local copy"
        ) from error


def carolina_shards(source: str | Path, taxonomy: Sequence[str] = ()) -> list[Path]:
    """Finds the `.xml.gz` shards of `source`: a shard, a taxonomy folder, the `corpus` folder or the one around it."""
    path = Path(source)
    codes = _check_taxonomy(taxonomy)
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise UserError(f"--source: there is no Carolina folder {source}")
    root = path / "corpus" if (path / "corpus").is_dir() else path
    folders = [root / CAROLINA_FOLDERS[code] for code in codes] or [root]
    if codes and root.name in CAROLINA_FOLDERS.values():  # the taxonomy folder itself was given
        folders = [root.parent / CAROLINA_FOLDERS[code] for code in codes]
    for folder in folders:
        if not next(folder.rglob("*.xml.gz"), None):
            present = [c for c, name in CAROLINA_FOLDERS.items() if (root / name).is_dir()]
            raise UserError(f"{folder} holds no *.xml.gz shard; taxonomy codes present: {', '.join(present) or 'none'}")
    return sorted(shard for folder in folders for shard in folder.rglob("*.xml.gz"))


def read_carolina_shard(path: str | Path) -> list[Document]:
    """Reads one shard whole: gzip, checksum (where a `checksum.sha256` above it lists the shard), UTF-8, XML.

    Only `text/body/p` is text; the headers hold `<p>` too. Entities are not expanded and a DOCTYPE is refused.

    Raises:
        UserError: the shard is empty, truncated, changed, not UTF-8, not well-formed, or holds no document.
    """
    from lxml import etree

    path = Path(path)
    data = decompress(path, _MAX_SHARD_BYTES)
    expected = listed_checksum(path)
    if expected is not None and hashlib.sha256(data).hexdigest() != expected:
        raise UserError(f"{path}: the XML inside does not match its checksum in checksum.sha256; the shard has changed")
    decode(data, path)
    if b"<!DOCTYPE" in data or b"\0" in data:  # a NUL byte would be XML in another encoding, which hides a DOCTYPE
        raise UserError(
            f"{path}: holds a DOCTYPE or NUL bytes, which no Carolina shard does (entities can be an attack)"
        )
    documents = []
    try:
        events = etree.iterparse(
            io.BytesIO(data),
            tag=f"{_TEI}TEI",
            encoding="utf-8",
            resolve_entities=False,
            no_network=True,
            huge_tree=False,
            load_dtd=False,
            remove_comments=True,
            remove_pis=True,
        )
        for _, element in events:
            documents.append(_carolina_document(element, path, len(documents)))
            element.clear()
            while element.getprevious() is not None:  # cleared elements would pile up under the root
                del element.getparent()[0]
    except etree.XMLSyntaxError as error:
        raise UserError(f"{path}: damaged XML after {len(documents)} document(s): {error.msg}") from error
    if not documents:
        raise UserError(f"{path}: holds no <TEI> document of the namespace {_TEI[1:-1]}; is it a Carolina shard?")
    return documents


def _carolina_document(element, path: Path, number: int) -> Document:
    body = element.iterfind(f"{_TEI}text/{_TEI}body/{_TEI}p")
    paragraphs = tuple(text for text in ("".join(p.itertext()) for p in body) if text.strip())
    name = element.findtext(f"{_TEI}teiHeader/{_TEI}fileDesc/{_TEI}titleStmt/{_TEI}title") or f"{path.name}:{number}"
    origin = element.find(f"{_TEI}teiHeader/{_TEI}fileDesc/{_TEI}sourceDesc")
    title = media = None
    if origin is not None:
        title, media = origin.findtext(f".//{_TEI}title/{_TEI}name"), origin.find(f".//{_TEI}media")
    url = media.get("url", "") if media is not None else ""
    return Document("\n".join(paragraphs), name, title or "", url, paragraphs)


def listed_checksum(path: Path) -> str | None:
    """The sha256 of the shard's decompressed XML after the nearest `checksum.sha256` above it; `None` if not listed."""
    for folder in path.absolute().parents[:4]:
        listing = folder / "checksum.sha256"
        if listing.is_file():
            name = path.absolute().relative_to(folder).as_posix().removesuffix(".gz")
            for line in listing.read_text(encoding="utf-8").splitlines():
                digest, _, listed = line.strip().partition("\t" if "\t" in line else " ")
                if listed.strip().lstrip("*").removeprefix("./") == name:
                    return digest.lower()
            return None
    return None


def _check_taxonomy(codes: Sequence[str]) -> list[str]:
    unknown = [code for code in codes if code not in CAROLINA_FOLDERS]
    if unknown:
        raise UserError(f"--taxonomy: unknown code {unknown[0]!r}; choose from {', '.join(CAROLINA_FOLDERS)}")
    return list(codes)
