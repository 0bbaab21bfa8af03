"""Files and folders that are never half written, have one writer at a time, and are checked when
they are read."""

import contextlib
import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

import xxhash

from cli import UserError, one_line

LOCK_FOLDER = ".stages"
_OWNER_FILE = "made_by"  # in it
# What readers of a manifest.json use of it
MANIFEST = dict.fromkeys(("options", "source", "tokenizer", "splits"), dict)
RESULT = "result.json"  # of a finished run
FILES, OWN = "files", "checksum"  # entries of a sealed record
LEFTOVER = f"*.{'[0-9a-f]' * 32}.part"  # what a killed process was writing, see [`_part_of`]


@contextlib.contextmanager
def locked_folder(path: Path, owner: str | None = None) -> Iterator[Path]:
    """Makes the folder, holds a lock in it that dies with the process, and clears away what a
    killed run left.

    Args:
        owner: the recipe that writes there, see [`claim_folder`]; `None`: the caller sees to that
            itself.

    Raises UserError where another process holds the folder, or it is not the owner's.
    """
    if owner is not None:
        claim_folder(path, owner)
    from filelock import FileLock, Timeout

    (path / LOCK_FOLDER).mkdir(parents=True, exist_ok=True)
    try:
        lock = FileLock(path / LOCK_FOLDER / "lock", timeout=0).acquire()
    except Timeout:
        raise UserError(
            f"--out {path}: another run is writing there; wait for it or choose another folder"
        ) from None
    with lock:
        for leftover in [*path.glob(LEFTOVER), *(path / LOCK_FOLDER).glob(LEFTOVER)]:
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
        yield path


def claim_folder(path: Path, owner: str) -> None:
    """Makes the folder and notes which recipe writes there; a UserError where it has anything else
    in it, or is another recipe's."""
    note = path / LOCK_FOLDER / _OWNER_FILE
    if note.is_file():
        if (found := note.read_text(encoding="utf-8", errors="replace")) != owner:
            raise UserError(f"--out {path} is a folder of {found}: choose another one")
        return
    entries = path.iterdir() if path.exists() else ()
    if others := [entry.name for entry in entries if entry.name != LOCK_FOLDER]:
        raise UserError(
            f"--out {path} holds other files, such as {min(others)}: choose another one, new or "
            "empty"
        )
    note.parent.mkdir(parents=True, exist_ok=True)
    write_text(note, owner)


def source_files(source: str) -> list[Path]:
    """The file `source`, or all files under the folder `source` that are not hidden, nor in a
    hidden folder of it, sorted; empty where it is a name and not a path.

    Links that lead nowhere are among them: a text that is missing is not passed over.
    """
    path = Path(source)
    if path.is_file():
        return [path]
    found = [file for file in path.rglob("*") if file.is_file() or not file.exists()]
    return sorted(
        file
        for file in found
        if not any(part.startswith(".") for part in file.relative_to(path).parts)
    )


def state_of_files(source: str) -> list[tuple[str, int, int]]:
    """Name, size in bytes and time of change of the files of [`source_files`]: whether a source has
    changed."""
    files = source_files(source)
    states = [(str(file), file.stat(follow_symlinks=file.exists())) for file in files]
    return [(name, state.st_size, state.st_mtime_ns) for name, state in states]


def read_manifest(data: Path, split: str | None = None) -> dict:
    """The `manifest.json` of a prepared folder, which is there once it is finished; a UserError
    where it is not, is damaged, has no rows of `split`, or the files beside the rows are not those
    that were prepared."""
    file, again = Path(data) / "manifest.json", "with its command of recipes/prepare.py"
    if not file.is_file():
        raise UserError(f"{data} has no manifest.json; make the folder with recipes/prepare.py")
    manifest = read_json(file, MANIFEST, f"delete it and make the folder again {again}")
    if found := damage(file, manifest):
        raise UserError(f"{found}; make it again {again}")
    if split is not None and manifest["splits"].get(split, {"blocks": 0})["blocks"] == 0:
        raise UserError(
            f"--split {split}: {data} has no {split} rows; prepare it again with --{split} SHARE, "
            "and train on what that leaves"
        )
    return manifest


def read_json(path: Path, entries: dict[str, type] | None = None, remedy: str = ""):
    """The content of a JSON file.

    Args:
        entries: names and types that its content, an object, must have at least; None takes any
            content.
        remedy: what the user can do about a file that is not so.

    Raises UserError, which names the file and what is wrong with it; also where the checksum that
    [`sealed`] gave it is another.
    """
    content = _read(path, json.loads, remedy)
    if isinstance(content, dict) and OWN in content and content[OWN] != _own_checksum(content):
        raise UserError(f"{path} has changed since it was written; {remedy}".removesuffix("; "))
    if entries is not None:
        check_entries(content, entries, path, remedy)
    return content


def read_jsonl(path: Path, entries: dict[str, type] | None = None, remedy: str = "") -> list[dict]:
    """The objects of a JSON-lines file, checked like that of [`read_json`]."""

    def parse(text: str) -> list:
        return [json.loads(line) for line in text.split("\n") if line]

    found = _read(path, parse, remedy)
    for number, content in enumerate(found, start=1):
        check_entries(content, entries or {}, f"{path}: line {number}", remedy)
    return found


def _read(path: Path, parse: Callable[[str], Any], remedy: str):
    try:
        return parse(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        text = f"cannot read {path}: {one_line(error)}; {remedy}"
        raise UserError(text.removesuffix("; ")) from error


def check_entries(content, entries: dict[str, type], where: Path | str, remedy: str = "") -> None:
    """UserError unless `content` is an object with these names, and values of these types (an int
    is a float as well)."""
    if not isinstance(content, dict):
        what = f"must hold an object of JSON, got a {type(content).__name__}"
        raise UserError(f"{where} {what}; {remedy}".removesuffix("; "))
    for name, kind in entries.items():
        if not isinstance(content.get(name), (int, float) if kind is float else kind):
            has = f"no {name}"
            if name in content:
                has = f"{name} of the type {type(content[name]).__name__}"
            what = f"has {has}, and needs {name} of the type {getattr(kind, '__name__', kind)}"
            raise UserError(f"{where} {what}; {remedy}".removesuffix("; "))


def to_json(content, where: Path, **how) -> str:
    """JSON of finite numbers; a UserError for others, as readers of other languages stop at NaN."""
    try:
        return json.dumps(content, ensure_ascii=False, allow_nan=False, **how)
    except ValueError as error:
        raise UserError(
            f"{where} is not written: a number in it is NaN or infinite, so the model or its "
            "training is broken; train at a lower --learning_rate or with --precision float32, or "
            "use another model"
        ) from error


def write_json(path: Path, content) -> None:
    """Writes JSON so that a reader finds the old file or the new one, never half of it."""
    write_text(path, to_json(content, path, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Writes UTF-8 text as [`write_json`] does."""
    with new_file(path) as part:
        part.write_text(text, encoding="utf-8")


def check_place(file: Path, entries: dict[str, type], others: Sequence[Path] = ()) -> None:
    """UserError unless a recipe can write its files, and would replace only what it wrote itself;
    checked before hours of work. Makes the folder of the files.

    Args:
        file: the JSON file.
        entries: what the recipe's own JSON has, see [`read_json`].
        others: files that are written together with it.
    """
    remedy = "choose another --out, or move it away"
    if file.exists():
        read_json(file, entries, f"it is no such file of this recipe: {remedy}")
    elif there := [str(other) for other in others if other.exists()]:
        raise UserError(f"--out: {', '.join(there)} is there without {file}: {remedy}")
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=file.parent):
        pass


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """Gives the path of a file to write, which replaces `path` at the end, when all of it is on the
    disk; after an error, `path` is as it was."""
    part = _part_of(Path(path))
    try:
        yield part
        flush(part)
        os.replace(part, path)
    finally:
        with contextlib.suppress(OSError):  # where the name itself is the error
            part.unlink(missing_ok=True)


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Gives an empty folder to write into, which replaces `path` at the end, when all of it is on
    the disk; after an error, `path` is as it was."""
    part = _part_of(Path(path))
    part.mkdir(parents=True)
    try:
        yield part
        flush_all(part)
        if path.exists():
            shutil.rmtree(path)
        part.rename(path)
    finally:
        shutil.rmtree(part, ignore_errors=True)


@contextlib.contextmanager
def new_files(folder: Path) -> Iterator[Path]:
    """Gives an empty folder to write into, whose files move into `folder` at the end, when all of
    them are on the disk; what has other names there stays."""
    part = _part_of(folder / "files")
    part.mkdir(parents=True)
    try:
        yield part
        for file in flush_all(part):
            target = folder / file.relative_to(part)
            target.parent.mkdir(exist_ok=True)
            os.replace(file, target)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def checksums(folder: Path, files: Iterable[Path] | None = None) -> dict[str, str]:
    """The checksums of files by their names in `folder`, for [`sealed`]; `None`: of all, also those
    of the folders in it."""
    found = [
        path for path in sorted(folder.rglob("*") if files is None else files) if path.is_file()
    ]
    return {path.relative_to(folder).as_posix(): _checksum(path) for path in found}


def sealed(record: dict, files: dict[str, str] | None = None) -> dict:
    """A record, JSON-safe, with its own checksum, which [`read_json`] compares, and the
    [`checksums`] of the files beside it that it is about, if any, for [`damage`]."""
    whole = record if files is None else {**record, FILES: files}
    return {**whole, OWN: _own_checksum(json.loads(json.dumps(whole)))}  # as it will be read


def damage(file: Path, record: dict) -> str:
    """What has become of a [`sealed`] record in `file` and of its files, in words: "a/b is missing,
    a/c has changed"; "" where they are as they were, and for records of earlier versions, which
    have no checksums."""
    if OWN not in record and FILES not in record:
        return ""
    if record.get(OWN) != _own_checksum(record):
        return f"{file} has changed"
    what = []
    for path, checksum in (
        (file.parent / name, own) for name, own in record.get(FILES, {}).items()
    ):
        if not path.is_file():
            what.append(f"{path} is missing")
        elif _checksum(path) != checksum:
            what.append(f"{path} has changed")
    return ", ".join(what)


def check_unchanged(folder: Path) -> None:
    """UserError where `folder` is one of a finished run, and files that the run left are gone or
    have changed."""
    file = folder / RESULT
    if file.is_file() and (found := damage(file, read_json(file, {}))):
        raise UserError(
            f"{found} since the run was finished: put back what it left, or delete {file}, and the "
            "run's own command makes it again from the last checkpoint"
        )


def _own_checksum(record: dict) -> str:
    content = {name: value for name, value in record.items() if name != OWN}
    return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True).encode())


def _checksum(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, xxhash.xxh3_128).hexdigest()


def flush(file: Path) -> None:
    """Returns when what was written into a file is on the disk and outlives a power cut."""
    with open(file, "rb+") as written:
        os.fsync(written.fileno())


def flush_all(folder: Path) -> list[Path]:
    """All files of a folder, when they are on the disk."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    for file in files:
        flush(file)
    return files


def _part_of(path: Path) -> Path:
    """A name beside `path` that no other writer of `path` uses."""
    return path.with_name(f"{path.name}.{uuid4().hex}.part")


def peak_memory_bytes() -> int:
    """The most memory (resident set) that this process has held so far."""
    try:
        import resource
    except ImportError:  # Windows
        import psutil

        return psutil.Process().memory_info().peak_wset
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux KiB
