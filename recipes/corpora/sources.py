"""Corpora: Carolina, text, JSON, CSV, parquet, any `datasets` dataset and generated biographies, as a stream of documents.

[`corpus_documents`] is the entry. A damaged file is a [`UserError`] that names it. Where bad files are left out, a file
gives no document before all of it was read, so that no part of one is lost unnoticed.
"""

import csv
import glob
import hashlib
import io
import itertools
import json
import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from cli import UserError
from cli.corpus_options import CorpusOptions
from support.stages import source_files

from .biographies import biography_documents
from .carolina import CAROLINA_REPOSITORY, carolina_shards, download_carolina, read_carolina_shard
from .documents import Document, ReadingLog, inner_suffix, one_line, read_text, with_unix_ends
from .selection import drop_near_duplicates, keep_distinct, keep_fraction, keep_prose

_SUFFIXES = {
    "carolina": (".xml",),
    "parquet": (".parquet",),
    "csv": (".csv",),
    "tsv": (".tsv",),
    "arrow": (".arrow",),
    "jsonl": (".jsonl", ".ndjson", ".json"),
    "text": (".txt", ".text"),
    "markdown": (".md", ".markdown", ".rst"),  # text where a folder has nothing else: often a README beside the data
}
_TABLES = ("parquet", "arrow")


def corpus_documents(options: CorpusOptions, log: ReadingLog | None = None) -> Iterator[Document]:
    """Yields the documents that the options ask for, in a fixed order: read one file at a time, filtered, sampled, limited.

    The prose filter removes near-duplicates too. The fraction is taken of what the filters leave.

    Args:
        log: filled while the documents are read.

    Raises:
        UserError: the source is missing or empty, or a file is damaged.
    """
    log = ReadingLog() if log is None else log
    documents = keep_distinct(_read(options, log), log, options.drop_duplicates)
    if options.prose_filter:
        host = None if options.prose_host == "any" else options.prose_host
        documents = keep_prose(documents, log, host=host, min_characters=options.prose_min_characters)
        documents = drop_near_duplicates(documents, log)
    if options.fraction < 1:
        documents = keep_fraction(documents, options.fraction, options.seed, log)
    return itertools.islice(documents, options.max_documents)


def detect_source_type(source: str, given: str | None = None) -> str:
    """Says what kind of corpus `source` is: "biographies", "hub" (a dataset there), "saved" (by `save_to_disk`), or the kind
    of its files by their suffixes (`.gz`, `.xz`, `.bz2`, `.zst` after it are looked through): "carolina" (`.xml`),
    "parquet", "csv", "tsv", "arrow", "jsonl", and "text", also for a file without a suffix and a folder without such files.
    `given` (--format) takes the place of the suffixes.

    Raises:
        UserError: `source` is neither there nor a possible name, a file of an unknown suffix, or a folder of several kinds.
    """
    path, known = Path(source), sum(_SUFFIXES.values(), ())
    suffix = inner_suffix(path)
    if source == "biographies":
        return "biographies"
    if source == CAROLINA_REPOSITORY:
        return "carolina"
    if not (path.is_file() or path.is_dir()):
        if path.exists() or suffix in known or not re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?", source):
            raise UserError(
                f"--source: there is no file or folder {source}; give an existing path, the name of a dataset on the Hub, "
                f"or 'biographies'"
            )
        return "hub"
    if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
        return "saved"
    if given:
        return given
    if path.is_file() and suffix and suffix not in known:
        raise UserError(
            f"{source}: the suffix {suffix} is none of those that are read ({' '.join(known)}, also compressed); convert or "
            "rename it, or say with prepare.py's --format what it holds"
        )
    files = source_files(source)
    counts = {kind: len(found) for kind in _SUFFIXES if kind != "markdown" and (found := _files_of_kind(files, kind))}
    if len(counts) > 1:
        mixture = ", ".join(f"{count:,} {kind}" for kind, count in counts.items())
        raise UserError(f"--source: {source} mixes files of several kinds ({mixture}); choose one with --format")
    return next(iter(counts), "text")


def _read(options: CorpusOptions, log: ReadingLog) -> Iterator[Document]:
    path, kind = Path(options.source), detect_source_type(options.source, options.format)
    if options.format not in (None, kind):
        raise UserError(f"--format {options.format} is for files, and --source {options.source} is none: leave it out")
    if kind == "biographies":
        return biography_documents(options.biographies, options.seed, options.biography_distance)
    if kind in ("hub", "saved"):
        saved = _files_of_kind(source_files(options.source), "arrow") if kind == "saved" else []
        log.files += [_log_entry(file, path) for file in saved]
        rows = _dataset_rows(options, kind, options.source)
        return _row_documents(rows, options, log, f"--source {options.source}: row", "")
    if not path.exists():
        path = download_carolina(options.taxonomy, options.revision)
    present = source_files(str(path))
    files = present if path.is_file() else _files_of_kind(present, kind)
    files = files or (present if options.format else _files_of_kind(present, "markdown"))
    log.left_out.update(inner_suffix(file) or file.name for file in sorted(set(present).difference(files)))
    if kind == "carolina":
        files = carolina_shards(path, files, options.taxonomy)
    if not files:
        others = f"; say with --format what files of {', '.join(log.left_out)} hold" if log.left_out else ""
        wanted = ", ".join(_SUFFIXES[kind])
        raise UserError(f"--source: the folder {path} holds no {kind} file ({wanted}, also compressed){others}")
    return _read_files(files, path, kind, options, log)


# --- files -----------------------------------------------------------------------------------------------------------


def _read_files(
    paths: Sequence[Path], root: Path, kind: str, options: CorpusOptions, log: ReadingLog
) -> Iterator[Document]:
    from tqdm.auto import tqdm

    for path in tqdm(paths, desc="reading", unit="file"):
        name, entry = _name(path, root), None
        try:
            documents, entry = _documents_of(path, name, kind, options, log), _log_entry(path, root)
            log.files.append(entry)
            yield from documents
        except (UserError, OSError) as error:
            if not options.skip_bad or entry:
                raise UserError(f"{one_line(error)}. With --skip_bad, prepare.py leaves out what is bad") from error
            log.skipped.append({"file": name, "reason": one_line(error)})


def _documents_of(path: Path, name: str, kind: str, options: CorpusOptions, log: ReadingLog) -> Iterable[Document]:
    """The documents of a file, read whole; of a table, which may be larger than the memory, while it is read, but with
    --skip_bad once before."""
    if kind == "carolina":
        return read_carolina_shard(path, name, options.max_file_gb, options.encoding)
    if kind in _TABLES:
        if options.skip_bad:
            deque(_dataset_rows(options, kind, str(path)), maxlen=0)
        return _row_documents(_dataset_rows(options, kind, str(path)), options, log, f"{path}: row", f"{name}:")
    text = read_text(path, options.encoding, options.max_file_gb)
    if kind in ("text", "markdown"):
        return _text_documents(text, path, name, options.text_unit)
    word, rows = _json_rows(text, path) if kind == "jsonl" else ("row", _csv_rows(text, path, kind))
    return list(_row_documents(rows, options, log, f"{path}: {word}", f"{name}:"))


def _text_documents(text: str, path: Path, name: str, unit: str) -> list[Document]:
    if unit == "file":
        return [Document(text, name, path.stem, name)]
    text = with_unix_ends(text)
    pieces = text.split("\n") if unit == "line" else re.split(r"\n[ \t]*\n\s*", text)
    numbered = enumerate(filter(str.strip, pieces), start=1)
    return [Document(piece, f"{name}:{number}", f"{path.stem} {number}", name) for number, piece in numbered]


def _json_rows(text: str, path: Path) -> tuple[str, list[tuple[int, object]]]:
    """What the values of a JSON file are, "line" or "row" (of an array), and each with its number."""
    lines = [(number, line) for number, line in enumerate(with_unix_ends(text).split("\n"), start=1) if line.strip()]
    try:
        json.loads(lines[0][1])
    except (ValueError, RecursionError):  # it goes on in the next line
        lines = [(1, text)]
    rows = []
    for number, line in lines:
        try:
            rows.append((number, json.loads(line)))
        except (ValueError, RecursionError) as error:
            number += getattr(error, "lineno", 1) - 1
            raise UserError(f"{path}: line {number} is not valid JSON ({error})") from error
    if len(rows) == 1 and isinstance(rows[0][1], list):
        return "row", list(enumerate(rows[0][1], start=1))
    return "line", rows


def _csv_rows(text: str, path: Path, kind: str) -> Iterator[tuple[int, dict]]:
    """The rows below the header, from 1; every cell is text, and an empty one None."""
    csv.field_size_limit(2**31 - 1)  # more than the text of a file
    reader = csv.DictReader(io.StringIO(text, newline=""), delimiter="," if kind == "csv" else "\t", strict=True)
    try:
        rows = list(reader)
    except csv.Error as error:
        raise UserError(f"{path}: line {reader.reader.line_num} is not valid CSV ({error})") from error
    if not rows:
        raise UserError(f"{path}: there is no row below the header")
    for number, row in enumerate(rows, start=1):
        if None in row or None in row.values():  # so csv marks them
            raise UserError(f"{path}: row {number} has more or fewer cells than the header; quote or repair them")
        yield number, {name: cell or None for name, cell in row.items()}


def _dataset_rows(options: CorpusOptions, kind: str, source: str) -> Iterator[tuple[int, dict]]:
    """The rows, from 1, of a parquet or Arrow file, of a saved dataset, or of one on the Hub."""
    import datasets
    from tqdm.auto import tqdm

    datasets.utils.logging.set_verbosity(datasets.utils.logging.CRITICAL)  # what it reports is in the error below
    split, remedy = options.dataset_split, "replace it"
    try:
        if kind == "hub":
            remedy = "check --dataset_config, --dataset_split and --revision"
            how = {"name": options.dataset_config, "revision": options.revision}
            rows = datasets.load_dataset(source, split=split, streaming=True, **how)
        elif kind == "saved":
            rows = datasets.load_from_disk(source)
            if isinstance(rows, datasets.DatasetDict):
                remedy = f"check --dataset_split: it has {', '.join(rows)}"
                rows = rows[split]
        else:  # parquet's rows would come in groups as in the file, and the first may have none
            how = {"batch_size": 1000} if kind == "parquet" else {}
            rows = datasets.load_dataset(kind, data_files=glob.escape(source), split="train", streaming=True, **how)
        yield from enumerate(tqdm(rows, desc="reading", unit="row", disable=kind not in ("hub", "saved")), start=1)
    except Exception as error:  # of damaged files, datasets and its readers raise almost anything
        what = f"the {kind} file" if kind in _TABLES else "the dataset"
        raise UserError(f"{source}: {what} cannot be read ({one_line(error)[:300]}); {remedy}") from error


def _row_documents(
    rows: Iterable[tuple[int, object]], options: CorpusOptions, log: ReadingLog, place: str, prefix: str
) -> Iterator[Document]:
    """The documents of numbered rows: `place` names a row for people, `prefix` one without an id. With --skip_bad, rows
    without a text are counted."""
    for number, row in rows:
        try:
            yield _row_document(row, options.text_field, f"{prefix}{number}", f"{place} {number}")
        except UserError:
            if not options.skip_bad:
                raise
            log.dropped[f"without text in {options.text_field or 'text'!r}"] += 1


def _row_document(row, text_field: str | None, fallback_id: str, place: str) -> Document:
    found = _field(row, text_field or "text") if isinstance(row, dict) else None
    text = _joined(found) if text_field and not isinstance(found, str) else found
    if not isinstance(text, str):
        names = ", ".join(map(str, row)) if isinstance(row, dict) else type(row).__name__
        raise UserError(f"{place} has no text in the field {text_field or 'text'!r} (--text_field); it has: {names[:200]}")
    name = fallback_id if row.get("id") is None else str(row["id"])
    document = Document(text, name, str(row.get("title") or ""), fallback_id)
    try:
        (document.text + document.id + document.title).encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{place} holds half of a surrogate pair (such as \\ud800): repair it") from error
    return document


def _field(value, name: str):
    """What an object has under a name; one with dots leads into objects in it, and into each object of a list."""
    if isinstance(value, list) and all(isinstance(entry, dict) for entry in value):
        return [_field(entry, name) for entry in value]
    head, dot, rest = name.partition(".")
    if not isinstance(value, dict) or name in value or not dot:
        return value.get(name) if isinstance(value, dict) else None
    return _field(value.get(head), rest)


def _joined(value) -> str | None:
    """The texts of a list, one in each line; lists in it are paragraphs of sentences. None where it has anything else."""
    entries = [entry if isinstance(entry, list) else [entry] for entry in value] if isinstance(value, list) else [[None]]
    is_text = all(isinstance(text, str) for entry in entries for text in entry)
    return "\n".join(map(" ".join, entries)) if is_text else None


def _files_of_kind(files: Sequence[Path], kind: str) -> list[Path]:
    return [file for file in files if inner_suffix(file) in _SUFFIXES[kind]]


def _log_entry(path: Path, root: Path) -> dict:
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"file": _name(path, root), "bytes": path.stat().st_size, "sha256": digest}


def _name(path: Path, root: Path) -> str:
    return path.relative_to(root).as_posix() if path != root else path.name
