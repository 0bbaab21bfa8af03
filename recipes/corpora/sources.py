"""Corpora: Carolina, text, JSON, CSV, parquet, datasets on the Hub and generated biographies, as a
stream of documents.

[`corpus_documents`] is the entry. A damaged file is a [`UserError`] that names it.
"""

import csv
import glob
import hashlib
import io
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tqdm.auto import tqdm

from cli import UserError, one_line
from cli.corpus_options import CorpusOptions
from support.stages import source_files

from .biographies import biography_documents
from .carolina import read_carolina_shard
from .documents import Document, ReadingLog, inner_suffix, read_text, with_unix_ends
from .selection import drop_near_duplicates, keep_distinct, keep_fraction, keep_prose

_SUFFIXES = {"carolina": (".xml",), "parquet": (".parquet",), "csv": (".csv",), "tsv": (".tsv",)}
_SUFFIXES |= {"jsonl": (".jsonl", ".ndjson", ".json"), "text": (".txt", ".text")}
_SUFFIXES |= {"markdown": (".md", ".markdown", ".rst")}
_KNOWN = sum(_SUFFIXES.values(), ())


def corpus_documents(options: CorpusOptions, log: ReadingLog | None = None) -> Iterator[Document]:
    """Yields the documents that the options ask for, in a fixed order: read one file at a time,
    filtered, sampled, limited. `log` is filled meanwhile.

    The prose filter removes near-duplicates too. The fraction is taken of what the filters leave.

    Raises UserError where the source is missing or empty, or a file is damaged.
    """
    log = ReadingLog() if log is None else log
    documents = keep_distinct(_read(options, log), log, options.drop_duplicates)
    if options.prose_filter:
        host = None if options.prose_host == "any" else options.prose_host
        least = options.prose_min_characters
        documents = keep_prose(documents, log, host=host, min_characters=least)
        documents = drop_near_duplicates(documents, log)
    if options.fraction < 1:
        documents = keep_fraction(documents, options.fraction, options.seed, log)
    return itertools.islice(documents, options.max_documents)


def _read(options: CorpusOptions, log: ReadingLog) -> Iterator[Document]:
    source, path = options.source, Path(options.source)
    if source == "biographies":
        return biography_documents(options.biographies, options.seed, options.biography_distance)
    if path.is_file() or path.is_dir():
        files, kind = _choose_files(path, log)
        return _read_files(files, path, kind, options, log)
    is_name = re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?", source)
    if path.exists() or inner_suffix(path) in _KNOWN or not is_name:
        raise UserError(
            f"--source: there is no file or folder {source}; give an existing path, the name of a "
            "dataset on the Hub, or 'biographies'"
        )
    rows = _dataset_rows(options, "hub", source)
    return _row_documents(rows, options, f"--source {source}: row", "")


# --- files ----------------------------------------------------------------------------------------


def _choose_files(path: Path, log: ReadingLog) -> tuple[list[Path], str]:
    """The files of a source, and of which kind they are by their suffixes (the one before `.gz`,
    `.xz`, `.bz2` and `.zst`).

    Raises UserError for a file of an unknown suffix, and for a folder without files of a kind, or
    of several.
    """
    present, by_kind = source_files(str(path)), {}
    for kind, ends in _SUFFIXES.items():
        if found := [file for file in present if inner_suffix(file) in ends]:
            by_kind[kind] = found
    if len(by_kind) > 1:
        by_kind.pop("markdown", None)  # often a README beside the data
    if path.is_file() and not inner_suffix(path):
        by_kind = {"text": present}
    if len(by_kind) != 1:
        found = (
            ", ".join(f"{len(files):,} {kind}" for kind, files in sorted(by_kind.items())) or "none"
        )
        raise UserError(
            f"--source: {path} must have files of one kind ({' '.join(_KNOWN)}, also compressed), "
            f"got {found}: rename or move the others"
        )
    ((kind, files),) = by_kind.items()
    others = sorted(set(present).difference(files))
    log.left_out.update(inner_suffix(file) or file.name for file in others)
    return files, kind


def _read_files(
    paths: Sequence[Path], root: Path, kind: str, options: CorpusOptions, log: ReadingLog
) -> Iterator[Document]:

    for path in tqdm(paths, desc="reading", unit="file"):
        documents = _documents_of(path, _name(path, root), kind, options)
        log.files.append(_log_entry(path, root))
        yield from documents


def _documents_of(path: Path, name: str, kind: str, options: CorpusOptions) -> Iterable[Document]:
    """The documents of a file, read whole, or of a table, which may be larger than the memory,
    while it is read."""
    if kind == "carolina":
        return read_carolina_shard(path, name, options.encoding)
    if kind == "parquet":
        rows = _dataset_rows(options, kind, str(path))
    else:
        text = read_text(path, options.encoding)
        if kind in ("text", "markdown"):
            return _text_documents(text, path, name, options.text_unit)
        rows = _json_rows(text, path) if kind == "jsonl" else _csv_rows(text, path, kind)
    return _row_documents(rows, options, f"{path}: row", f"{name}:")


def _text_documents(text: str, path: Path, name: str, unit: str) -> list[Document]:
    if unit == "file":
        return [Document(text, name, path.stem, name)]
    text = with_unix_ends(text)
    pieces = text.split("\n") if unit == "line" else re.split(r"\n[ \t]*\n\s*", text)
    found = enumerate(filter(str.strip, pieces), start=1)
    return [Document(piece, f"{name}:{n}", f"{path.stem} {n}", name) for n, piece in found]


def _json_rows(text: str, path: Path) -> list[tuple[int, object]]:
    """The values of an array, or of lines of JSON, each with its number from 1."""
    try:
        whole = json.loads(text)
        return list(enumerate(whole if isinstance(whole, list) else [whole], start=1))
    except (ValueError, RecursionError):  # several values
        rows, lines = [], enumerate(with_unix_ends(text).split("\n"), start=1)
    for number, line in lines:
        try:
            rows += [(number, json.loads(line))] if line.strip() else []
        except (ValueError, RecursionError) as error:
            what = f"row {number} is not valid JSON ({one_line(error)})"
            raise UserError(f"{path}: {what}") from error
    return rows


def _csv_rows(text: str, path: Path, kind: str) -> Iterator[tuple[int, dict]]:
    """The rows below the header, from 1; every cell is text."""
    csv.field_size_limit(2**31 - 1)  # more than the text of a file
    lines, delimiter = io.StringIO(text, newline=""), "," if kind == "csv" else "\t"
    reader = csv.DictReader(lines, delimiter=delimiter, strict=True)
    try:
        for number, row in enumerate(reader, start=1):
            if None in row or None in row.values():  # so csv marks them
                raise UserError(
                    f"{path}: row {number} has more or fewer cells than the header; quote or "
                    "repair them"
                )
            yield number, row
    except csv.Error as error:
        place = f"line {reader.reader.line_num}"
        raise UserError(f"{path}: {place} is not valid CSV ({error})") from error


def _dataset_rows(options: CorpusOptions, kind: str, source: str) -> Iterator[tuple[int, dict]]:
    """The rows, from 1, of a parquet file, or of a dataset on the Hub."""
    import datasets

    # what it reports is in the error below
    datasets.utils.logging.set_verbosity(datasets.utils.logging.CRITICAL)
    if kind == "hub":
        name, what = source, "the dataset"
        remedy = "check --dataset_config, --dataset_split and --revision"
        how = {"name": options.dataset_config, "revision": options.revision}
        how["split"] = options.dataset_split
    else:  # its rows would come in groups as in the file, and the first may have none
        name, what, remedy = kind, "the parquet file", "replace it"
        how = {"data_files": glob.escape(source), "split": "train", "batch_size": 1000}
    try:
        rows = datasets.load_dataset(name, streaming=True, **how)
        yield from enumerate(tqdm(rows, desc="reading", unit="row", disable=kind != "hub"), start=1)
    except Exception as error:  # of damaged files, datasets and its readers raise almost anything
        reason = one_line(error)[:300]
        raise UserError(f"{source}: {what} cannot be read ({reason}); {remedy}") from error


def _row_documents(
    rows: Iterable[tuple[int, object]], options: CorpusOptions, place: str, prefix: str
) -> Iterator[Document]:
    """The documents of numbered rows: `place` names a row for people, `prefix` one without an id. A
    text that is null is empty."""
    name = options.text_field
    for number, row in rows:
        text = _field(row, name)
        if not isinstance(text, str | None):
            names = ", ".join(map(str, row)) if isinstance(row, dict) else type(row).__name__
            raise UserError(
                f"{place} {number} has no text in the field {name!r} (--text_field); "
                f"it has: {names[:200]}"
            )
        own = f"{prefix}{number}" if row.get("id") is None else str(row["id"])
        document = Document(text or "", own, str(row.get("title") or ""), f"{prefix}{number}")
        try:
            (document.text + document.id + document.title).encode()
        except UnicodeEncodeError as error:
            raise UserError(
                f"{place} {number} holds half of a surrogate pair (such as \\ud800): repair it"
            ) from error
        yield document


def _field(row, name: str):
    """The value of a field; where there is none of the whole name, that of "outer.inner"; 0 where
    there is neither."""
    for part in [name] if isinstance(row, dict) and name in row else name.split("."):
        if row is not None:  # the inner field of a null is null
            row = row.get(part, 0) if isinstance(row, dict) else 0
    return row


def _log_entry(path: Path, root: Path) -> dict:
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"file": _name(path, root), "bytes": path.stat().st_size, "sha256": digest}


def _name(path: Path, root: Path) -> str:
    return path.relative_to(root).as_posix() if path != root else path.name
