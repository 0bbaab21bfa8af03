"""Corpora: Carolina, plain text, JSONL, any `datasets` dataset and generated biographies, as a stream of documents.

[`iterate_documents`] is the door, [`corpus_documents`] the one that a recipe's options open. A damaged file is a
[`UserError`] that names it; no document of a file is handed out before the whole file has been read and verified, so leaving
a bad file out never loses half of it in silence.
"""

import dataclasses
import functools
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from cli import UserError
from cli.corpus_options import SELECTION, CorpusOptions
from support.stages import source_files

from .biographies import biography_documents
from .carolina import CAROLINA_REPOSITORY, carolina_shards, download_carolina, listed_checksum, read_carolina_shard
from .documents import Document, ReadingLog, decode, decompress, inner_suffix, one_line
from .selection import select_documents

TEXT_UNITS = ("file", "line", "paragraph")

_DATASET_SUFFIXES = (".parquet", ".csv", ".arrow")
_JSONL_SUFFIXES = (".jsonl", ".ndjson")


def detect_source_type(source: str) -> str:
    """Says what kind of corpus `source` is.

    `biographies` and the Carolina repository's name stand for themselves. An existing folder is `carolina` if it holds
    `*.xml.gz` anywhere, `dataset` if `save_to_disk` wrote it or if it holds parquet, CSV or arrow files, `jsonl` if it
    holds `*.jsonl`, else `text`; an existing file goes by its suffix (`.gz`, `.xz`, `.bz2` behind it are looked
    through), and is `text` if nothing else fits. What is no path but reads `name` or `owner/name` is one on the Hub.

    Raises:
        UserError: `source` is neither there nor a possible name.
    """
    path = Path(source)
    if source == "biographies":
        return "biographies"
    if source == CAROLINA_REPOSITORY:
        return "carolina"
    if path.is_dir():
        if next(path.rglob("*.xml.gz"), None):
            return "carolina"
        if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
            return "dataset"
        for kind, suffixes in (("dataset", _DATASET_SUFFIXES), ("jsonl", _JSONL_SUFFIXES)):
            if _files_with_suffix(path, suffixes):
                return kind
        return "text"
    if path.is_file():
        suffix = inner_suffix(path)
        if path.name.endswith(".xml.gz"):
            return "carolina"
        return "dataset" if suffix in _DATASET_SUFFIXES else "jsonl" if suffix in _JSONL_SUFFIXES else "text"
    known_suffix = inner_suffix(path) in (".txt", ".xml", *_DATASET_SUFFIXES, *_JSONL_SUFFIXES)
    if known_suffix or not re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?", source):
        raise UserError(
            f"--source: there is no file or folder {source}; give an existing path, the name of a dataset on the Hub, "
            f"or 'biographies'"
        )
    return "dataset"


def corpus_documents(options: CorpusOptions, log: ReadingLog) -> Iterable[Document]:
    """The documents that a recipe's options ask for, filtered and sampled; `max_documents` is the caller's to apply."""
    settings = dataclasses.asdict(options)
    choice = {name: settings.pop(name) for name in SELECTION}
    del settings["max_documents"]
    return select_documents(iterate_documents(**settings, log=log), log, seed=options.seed, **choice)


def iterate_documents(
    source: str,
    *,
    log: ReadingLog | None = None,
    skip_bad: bool = False,
    taxonomy: Sequence[str] = (),
    text_unit: str = "file",
    text_field: str = "text",
    dataset_config: str | None = None,
    dataset_split: str = "train",
    revision: str | None = None,
    biographies: int = 1000,
    biography_distance: int = 6000,
    seed: int = 0,
) -> Iterator[Document]:
    """Yields a corpus's documents in a fixed order, reading one file at a time.

    Args:
        source: a path, the name of a dataset on the Hub, or "biographies".
        log: filled while the documents are read.
        skip_bad: leave a damaged file out as a whole, listed in `log.skipped`, instead of raising.
        taxonomy: Carolina codes (`CAROLINA_FOLDERS`); empty takes all.
        text_unit: what one document of a text file is: the "file", a "line" or a "paragraph" (up to an empty line).
        text_field: the field of JSONL and `datasets` rows that holds the text; `id` and `title` are used if present.
        dataset_config, dataset_split: passed on to `datasets.load_dataset`.
        revision: branch, tag or commit on the Hub, of a dataset or of Carolina.
        biographies, biography_distance: how many to generate, and the characters between a fact and its return.
        seed: of the generated biographies.

    Raises:
        UserError: the source is missing or empty, or a file is damaged.
    """
    log = ReadingLog() if log is None else log
    kind = detect_source_type(source)
    if kind == "biographies":
        documents = biography_documents(biographies, seed, biography_distance)
    elif kind == "dataset":
        documents = _dataset_documents(source, text_field, dataset_config, dataset_split, revision, log)
    elif kind == "carolina":
        if source == CAROLINA_REPOSITORY and not Path(source).exists():
            source = download_carolina(taxonomy, revision)
        documents = _read_files(carolina_shards(source, taxonomy), Path(source), read_carolina_shard, skip_bad, log)
    elif kind == "text":
        read = functools.partial(_text_documents, source=source, unit=text_unit)
        documents = _read_files(_find_files(source, (".txt",), "text"), Path(source), read, skip_bad, log)
    else:
        read = functools.partial(_jsonl_documents, source=source, text_field=text_field)
        documents = _read_files(_find_files(source, _JSONL_SUFFIXES, "JSONL"), Path(source), read, skip_bad, log)
    for document in documents:
        if document.text.strip():
            yield document
        else:
            log.dropped["empty"] += 1


# --- files -----------------------------------------------------------------------------------------------------------


def _read_files(
    paths: Sequence[Path], root: Path, read: Callable[[Path], list[Document]], skip_bad: bool, log: ReadingLog
) -> Iterator[Document]:
    from tqdm.auto import tqdm

    for path in tqdm(paths, desc="reading", unit="file"):
        name = path.relative_to(root).as_posix() if path != root else path.name
        try:
            documents, entry = read(path), _log_entry(path, name)
        except (UserError, OSError) as error:
            if not skip_bad:
                raise UserError(f"{one_line(error)}. Replace the file, or pass --skip_bad to leave it out") from error
            log.skipped.append({"file": name, "reason": one_line(error)})
            continue
        if path.name.endswith(".xml.gz"):
            entry["checksum_verified"] = listed_checksum(path) is not None
        log.files.append(entry)
        yield from documents


def _text_documents(path: Path, source: str, unit: str) -> list[Document]:
    if unit not in TEXT_UNITS:
        raise UserError(f"--text_unit is {unit!r}; choose one of {', '.join(TEXT_UNITS)}")
    name = _name(path, source)
    text = decode(decompress(path), path)
    if not text.strip():
        raise UserError(f"{path}: the file holds no text")
    if unit == "file":
        return [Document(text, name, path.stem, name)]
    pieces = text.splitlines() if unit == "line" else re.split(r"\n[ \t]*\n\s*", text)
    numbered = enumerate(filter(str.strip, pieces), start=1)
    return [Document(piece, f"{name}:{number}", f"{path.stem} {number}", name) for number, piece in numbered]


def _jsonl_documents(path: Path, source: str, text_field: str) -> list[Document]:
    name, documents = _name(path, source), []
    for number, line in enumerate(decode(decompress(path), path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise UserError(f"{path}: line {number} is not valid JSON ({error})") from error
        documents.append(_row_document(row, text_field, f"{name}:{number}", f"{path}: line {number}"))
    if not documents:
        raise UserError(f"{path}: the file is empty")
    return documents


def _row_document(row, text_field: str, fallback_id: str, place: str) -> Document:
    if not isinstance(row, dict) or not isinstance(row.get(text_field), str):
        fields = ", ".join(map(str, row)) if isinstance(row, dict) else type(row).__name__
        raise UserError(
            f"{place} has no text in the field {text_field!r} (--text_field); it has: {fields or 'nothing'}"
        )
    return Document(row[text_field], str(row.get("id", fallback_id)), str(row.get("title") or ""), fallback_id)


def _dataset_documents(
    source: str, text_field: str, config: str | None, split: str, revision: str | None, log: ReadingLog
) -> Iterator[Document]:
    import datasets
    from tqdm.auto import tqdm

    path = Path(source)
    if path.exists() and not _files_with_suffix(path, _DATASET_SUFFIXES):
        raise UserError(f"--source: {source} holds no dataset (parquet, CSV, arrow, or a folder of save_to_disk)")
    try:
        if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
            rows = datasets.load_from_disk(source)
            rows = rows[split] if isinstance(rows, datasets.DatasetDict) else rows
        elif path.exists():
            files = _files_with_suffix(path, _DATASET_SUFFIXES)
            if len({inner_suffix(file) for file in files}) > 1:
                raise UserError(f"--source: {source} mixes parquet, CSV and arrow files; give one kind")
            builder = inner_suffix(files[0])[1:]
            rows = datasets.load_dataset(builder, data_files=list(map(str, files)), split="train", streaming=True)
        else:
            rows = datasets.load_dataset(source, config, split=split, revision=revision, streaming=True)
        for number, row in enumerate(tqdm(rows, desc="reading", unit="row")):
            yield _row_document(row, text_field, str(number), f"--source {source}: row {number}")
    except KeyError as error:
        raise UserError(f"--source {source}: there is no split {split!r} (--dataset_split); it has {error}") from error
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise UserError(f"--source {source}: the dataset cannot be read ({one_line(error)})") from error
    if path.exists():
        for file in _files_with_suffix(path, _DATASET_SUFFIXES):
            log.files.append(_log_entry(file, _name(file, source)))
    else:
        log.notes.append(
            f"dataset {source} (config {config}, split {split}, revision {revision}) streamed from the Hub"
        )


def _log_entry(path: Path, name: str) -> dict:
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"file": name, "bytes": path.stat().st_size, "sha256": digest}


def _find_files(source: str, suffixes: tuple[str, ...], kind: str) -> list[Path]:
    path = Path(source)
    if not path.exists():
        raise UserError(f"--source: there is no file or folder {source}")
    files = [path] if path.is_file() else _files_with_suffix(path, suffixes)
    if not files:
        raise UserError(
            f"--source: the folder {source} holds no {kind} file ({', '.join(suffixes)}, or those compressed)"
        )
    return files


def _files_with_suffix(path: Path, suffixes: tuple[str, ...]) -> list[Path]:
    return [file for file in source_files(str(path)) if inner_suffix(file) in suffixes]


def _name(path: Path, source: str) -> str:
    return path.relative_to(source).as_posix() if path != Path(source) else path.name
