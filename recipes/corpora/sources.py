"""Corpora: Carolina, plain text, JSONL, any `datasets` dataset and generated biographies, as a stream of documents.

[`corpus_documents`] is the door. A damaged file is a [`UserError`] that names it; no document of a shard, text or JSONL file
is handed out before the whole file has been read, so leaving a bad one out never loses half of it in silence.
"""

import functools
import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from cli import UserError
from cli.corpus_options import CorpusOptions
from support.stages import source_files

from .biographies import biography_documents
from .carolina import CAROLINA_REPOSITORY, carolina_shards, download_carolina, read_carolina_shard
from .documents import Document, ReadingLog, inner_suffix, one_line, read_text
from .selection import drop_near_duplicates, keep_fraction, keep_prose

# The first of a folder's kinds is read; of the last three, which `datasets` reads, there may be only one.
_SUFFIXES = {
    "carolina": (".xml",),
    "parquet": (".parquet",),
    "csv": (".csv",),
    "arrow": (".arrow",),
    "jsonl": (".jsonl", ".ndjson"),
    "text": (".txt",),
}
_TABLES = ("parquet", "csv", "arrow")


def corpus_documents(options: CorpusOptions, log: ReadingLog | None = None) -> Iterator[Document]:
    """Yields the documents that the options ask for, in a fixed order: read one file at a time, filtered, sampled, limited.

    The prose filter removes near-duplicates too. The fraction is taken of what the filters leave.

    Args:
        log: filled while the documents are read.

    Raises:
        UserError: the source is missing or empty, or a file is damaged.
    """
    log = ReadingLog() if log is None else log
    documents = _not_empty(_read(options, log), log)
    if options.prose_filter:
        host = None if options.prose_host == "any" else options.prose_host
        documents = keep_prose(documents, log, host=host, min_characters=options.prose_min_characters)
        documents = drop_near_duplicates(documents, log)
    if options.fraction < 1:
        documents = keep_fraction(documents, options.fraction, options.seed, log)
    return itertools.islice(documents, options.max_documents)


def detect_source_type(source: str) -> str:
    """Says what kind of corpus `source` is: "biographies", "hub" (a dataset there), "saved" (by `save_to_disk`), or the kind
    of its files by their suffixes (`.gz`, `.xz`, `.bz2` behind it are looked through): "carolina" (`.xml.gz`), "parquet",
    "csv", "arrow", "jsonl", and "text" if nothing else fits.

    Raises:
        UserError: `source` is neither there nor a possible name, or has tables of several kinds.
    """
    path = Path(source)
    if source == "biographies":
        return "biographies"
    if source == CAROLINA_REPOSITORY:
        return "carolina"
    if not path.exists():
        known_suffix = inner_suffix(path) in sum(_SUFFIXES.values(), ())
        if known_suffix or not re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?", source):
            raise UserError(
                f"--source: there is no file or folder {source}; give an existing path, the name of a dataset on the Hub, "
                f"or 'biographies'"
            )
        return "hub"
    if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
        return "saved"
    if not (path.is_file() or path.is_dir()):
        raise UserError(f"--source: {source} is neither a file nor a folder (a pipe or a device?); give a path of one")
    files = source_files(source)
    kinds = [kind for kind in _SUFFIXES if _files_of_kind(files, kind)]
    if len(set(kinds).intersection(_TABLES)) > 1:
        raise UserError(f"--source: {source} mixes parquet, CSV and arrow files; give one kind")
    return kinds[0] if kinds else "text"


def _read(options: CorpusOptions, log: ReadingLog) -> Iterator[Document]:
    kind, path = detect_source_type(options.source), Path(options.source)
    if kind == "biographies":
        return biography_documents(options.biographies, options.seed, options.biography_distance)
    if kind in ("hub", "saved", *_TABLES):
        return _dataset_documents(options, kind, log)
    if kind == "carolina":
        path = path if path.exists() else download_carolina(options.taxonomy, options.revision)
        files = carolina_shards(path, options.taxonomy)
        read = functools.partial(read_carolina_shard, max_gb=options.max_file_gb)
    else:
        files = [path] if path.is_file() else _files_of_kind(source_files(options.source), kind)
        if kind == "text":
            read = functools.partial(_text_documents, unit=options.text_unit, max_gb=options.max_file_gb)
        else:
            read = functools.partial(_jsonl_documents, options=options, log=log)
    if not files:
        raise UserError(f"--source: the folder {path} holds no {kind} file ({', '.join(_SUFFIXES[kind])}, also compressed)")
    return _read_files(files, path, read, options.skip_bad, log)


def _not_empty(documents: Iterator[Document], log: ReadingLog) -> Iterator[Document]:
    for document in documents:
        if document.text.strip():
            yield document
        else:
            log.dropped["empty"] += 1


# --- files -----------------------------------------------------------------------------------------------------------


def _read_files(
    paths: Sequence[Path], root: Path, read: Callable[[Path, str], list[Document]], skip_bad: bool, log: ReadingLog
) -> Iterator[Document]:
    from tqdm.auto import tqdm

    for path in tqdm(paths, desc="reading", unit="file"):
        name = _name(path, root)
        try:
            documents, entry = read(path, name), _log_entry(path, root)
        except (UserError, OSError) as error:
            if not skip_bad:
                raise UserError(f"{one_line(error)}. With --skip_bad, prepare.py leaves out what is bad") from error
            log.skipped.append({"file": name, "reason": one_line(error)})
            continue
        log.files.append(entry)
        yield from documents


def _text_documents(path: Path, name: str, unit: str, max_gb: float) -> list[Document]:
    text = read_text(path, max_gb)
    if not text.strip():
        raise UserError(f"{path}: the file holds no text")
    if unit == "file":
        return [Document(text, name, path.stem, name)]
    pieces = text.splitlines() if unit == "line" else re.split(r"\r?\n[ \t]*\r?\n\s*", text)
    numbered = enumerate(filter(str.strip, pieces), start=1)
    return [Document(piece, f"{name}:{number}", f"{path.stem} {number}", name) for number, piece in numbered]


def _jsonl_documents(path: Path, name: str, options: CorpusOptions, log: ReadingLog) -> list[Document]:
    rows = []
    for number, line in enumerate(read_text(path, options.max_file_gb).split("\n"), start=1):
        if line.strip():
            try:
                rows.append((json.loads(line), f"{name}:{number}", f"{path}: line {number}"))
            except RecursionError as error:
                raise UserError(f"{path}: line {number} nests JSON too deeply") from error
            except ValueError as error:
                raise UserError(f"{path}: line {number} is not valid JSON ({error})") from error
    return list(_row_documents(rows, options, log))


def _row_documents(rows: Iterable[tuple], options: CorpusOptions, log: ReadingLog) -> Iterator[Document]:
    """The documents of rows, each with an id for those without one and its place for people; with --skip_bad, rows without a
    text are counted."""
    for row, fallback_id, place in rows:
        try:
            yield _row_document(row, options.text_field, fallback_id, place)
        except UserError:
            if not options.skip_bad:
                raise
            log.dropped[f"without text in {options.text_field!r}"] += 1


def _row_document(row, text_field: str, fallback_id: str, place: str) -> Document:
    if not isinstance(row, dict) or not isinstance(row.get(text_field), str):
        fields = " ".join(", ".join(map(str, row)).split())[:200] if isinstance(row, dict) else type(row).__name__
        raise UserError(
            f"{place} has no text in the field {text_field!r} (--text_field); it has: {fields or 'nothing'}"
        )
    document = Document(row[text_field], str(row.get("id", fallback_id)), str(row.get("title") or ""), fallback_id)
    try:
        (document.text + document.id + document.title).encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{place} holds half of a surrogate pair (such as \\ud800), which is no character; repair the line"
        ) from error
    return document


def _dataset_documents(options: CorpusOptions, kind: str, log: ReadingLog) -> Iterator[Document]:
    import datasets
    from tqdm.auto import tqdm

    datasets.utils.logging.set_verbosity(datasets.utils.logging.CRITICAL)  # what it reports is in the error below
    source, split = options.source, options.dataset_split
    files = [] if kind == "hub" else _files_of_kind(source_files(source), "arrow" if kind == "saved" else kind)
    try:
        if kind == "hub":
            rows = datasets.load_dataset(
                source, options.dataset_config, split=split, revision=options.revision, streaming=True
            )
        elif kind == "saved":
            rows = datasets.load_from_disk(source)
            if isinstance(rows, datasets.DatasetDict):
                if split not in rows:
                    has = ", ".join(rows)
                    raise UserError(f"--source {source}: there is no split {split!r} (--dataset_split); it has {has}")
                rows = rows[split]
        else:
            rows = datasets.load_dataset(kind, data_files=list(map(str, files)), split="train", streaming=True)
        numbered = enumerate(tqdm(rows, desc="reading", unit="row"))
        places = ((row, str(number), f"--source {source}: row {number}") for number, row in numbered)
        yield from _row_documents(places, options, log)
    except UserError:
        raise
    except Exception as error:  # of damaged files, datasets and its readers raise almost anything
        raise UserError(
            f"--source {source}: the dataset cannot be read ({one_line(error)[:300]}); replace it, or check the options "
            "--dataset_config, --dataset_split and --revision"
        ) from error
    log.files += [_log_entry(file, Path(source)) for file in files]


def _files_of_kind(files: Sequence[Path], kind: str) -> list[Path]:
    files = [file for file in files if inner_suffix(file) in _SUFFIXES[kind]]
    return [file for file in files if kind != "carolina" or file.suffix == ".gz"]


def _log_entry(path: Path, root: Path) -> dict:
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"file": _name(path, root), "bytes": path.stat().st_size, "sha256": digest}


def _name(path: Path, root: Path) -> str:
    return path.relative_to(root).as_posix() if path != root else path.name
