"""Files and folders that are never half written, that have one writer at a time, and that are checked when they are read."""

import contextlib
import hashlib
import json
import math
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from uuid import uuid4

from cli import UserError, describe

LOCK_FOLDER = ".stages"
WAITING = "new"  # in it: what takes the place of finished folders, see [`preparation.replace_stages`]
_OWNER_FILE = "made_by"  # in it
# What readers of a manifest.json use of it
MANIFEST = {
    "options": {"source": str, "tokenizer": str, "context": int, "split_by": str},
    "source": {"documents": int},
    "tokenizer": {"vocabulary": int},
    "splits": {"train": dict, "validation": dict},
}
LEFTOVER = f"*.{'[0-9a-f]' * 32}.part"  # what a killed process was writing, see [`_part_of`]


@contextlib.contextmanager
def locked_folder(path: Path, owner: str | None = None) -> Iterator[Path]:
    """Makes the folder, holds a lock in it that dies with the process, and clears away what a killed run left.

    Args:
        path: the folder.
        owner: the recipe that writes there, see [`claim_folder`]; `None`: the caller sees to that itself.

    Raises:
        UserError: the folder cannot be made, another process holds it, or it is not the owner's.
    """
    if owner is not None:
        claim_folder(path, owner)
    from filelock import FileLock, Timeout

    try:
        (path / LOCK_FOLDER).mkdir(parents=True, exist_ok=True)
        lock = FileLock(path / LOCK_FOLDER / "lock", timeout=0).acquire()
    except Timeout:
        raise UserError(f"--out {path}: another run is writing there; wait for it or choose another folder") from None
    except OSError as error:
        raise UserError(f"--out {path}: {describe(error)}") from error
    with lock:
        places = (path, path / LOCK_FOLDER, path / LOCK_FOLDER / WAITING)
        for leftover in [leftover for place in places for leftover in place.glob(LEFTOVER)]:
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
        yield path


def claim_folder(path: Path, owner: str) -> None:
    """Makes the folder and notes which recipe writes there; a UserError where it has anything else in it, or is another
    recipe's."""
    note = path / LOCK_FOLDER / _OWNER_FILE
    try:
        if note.is_file():
            if (found := note.read_text(encoding="utf-8", errors="replace")) != owner:
                raise UserError(f"--out {path} is a folder of {found}: choose another one")
            return
        others = [entry.name for entry in path.iterdir() if entry.name != LOCK_FOLDER] if path.exists() else []
        if others:
            raise UserError(f"--out {path} holds other files, such as {min(others)}: choose another one, new or empty")
        note.parent.mkdir(parents=True, exist_ok=True)
        write_text(note, owner)
    except OSError as error:
        raise UserError(f"--out {path}: {describe(error)}") from error


def source_files(source: str) -> list[Path]:
    """The file `source`, or all files under the folder `source` that are not hidden, nor in a hidden folder of it, sorted;
    empty where it is a name and not a path.

    Links that lead nowhere are among them: a text that is missing is not passed over.
    """
    path = Path(source)
    if path.is_file():
        return [path]
    files = (file for file in path.rglob("*") if not any(part.startswith(".") for part in file.relative_to(path).parts))
    return sorted(file for file in files if file.is_file() or file.is_symlink() and not file.is_dir())


def state_of_files(source: str) -> list[tuple[str, int, int]]:
    """Name, size in bytes and time of change of the files of [`source_files`]: whether a source has changed."""
    states = ((str(file), file.stat(follow_symlinks=file.exists())) for file in source_files(source))
    return [(name, state.st_size, state.st_mtime_ns) for name, state in states]


def read_manifest(data: Path, split: str | None = None) -> dict:
    """The `manifest.json` of a prepared folder, which is there once it is finished; a UserError where it is not, is damaged,
    or has no rows of `split`."""
    file = Path(data) / "manifest.json"
    if not file.is_file():
        raise UserError(f"{data} has no manifest.json; make the folder with recipes/prepare.py")
    remedy = "delete it and make the folder again with its command of recipes/prepare.py"
    manifest = read_json(file, dict.fromkeys(MANIFEST, dict), remedy)
    for name, entries in MANIFEST.items():
        check_entries(manifest[name], entries, f"{file}: {name}", remedy)
    for name, found in manifest["splits"].items():
        check_entries(found, {"blocks": int, "tokens": int, "sha256": str}, f"{file}: the split {name}", remedy)
        if len(found["sha256"]) != 64:
            raise UserError(f"{file}: the split {name} has the sha256 {shown(found['sha256'])}, which is no hash; {remedy}")
    if split is not None and manifest["splits"].get(split, {"blocks": 0})["blocks"] == 0:
        raise UserError(
            f"--split {split}: {data} has no {split} rows; prepare it again with --{split} SHARE, and train on what that "
            "leaves"
        )
    return manifest


def read_json(path: Path, entries: dict[str, type] | None = None, remedy: str = ""):
    """The content of a JSON file.

    Args:
        path: the file.
        entries: names and types that its content, an object, must have at least; None takes any content.
        remedy: what the user can do about a file that is not so.

    Raises UserError, which names the file and what is wrong with it.
    """
    return _parse(_text_of(path, remedy), entries, path, remedy)


def read_jsonl(path: Path, entries: dict[str, type] | None = None, remedy: str = "") -> list[dict]:
    """The objects of a JSON-lines file, checked like that of [`read_json`]."""
    lines = enumerate(_text_of(path, remedy).split("\n"), start=1)
    return [_parse(line, entries or {}, f"{path}: line {number}", remedy) for number, line in lines if line]


def _text_of(path: Path, remedy: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UserError(_with_remedy(f"cannot read {path}: {error}", remedy)) from error


def _parse(text: str, entries: dict[str, type] | None, where: Path | str, remedy: str):
    try:
        content = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise UserError(_with_remedy(f"cannot read {where}: {error or type(error).__name__}", remedy)) from error
    if entries is not None:
        check_entries(content, entries, where, remedy)
    return content


def check_entries(content, entries: dict[str, type], where: Path | str, remedy: str = "") -> None:
    """UserError unless `content` is an object with these names, and values of these types (an int is a float as well)."""
    if not isinstance(content, dict):
        raise UserError(_with_remedy(f"{where} must hold an object of JSON, got {shown(content)}", remedy))
    if missing := [name for name in entries if name not in content]:
        raise UserError(_with_remedy(f"{where} has no {', '.join(missing)}", remedy))
    for name, kind in entries.items():
        value = content[name]
        if not isinstance(value, (int, float) if kind is float else kind) or isinstance(value, bool):
            text = f"{where} has {name} {shown(value)}, which must be of the type {kind.__name__}"
            raise UserError(_with_remedy(text, remedy))


def shown(value) -> str:
    """A value as JSON, cut to what fits into a message."""
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


def _with_remedy(text: str, remedy: str) -> str:
    return f"{text}; {remedy}" if remedy else text


def _refuse_constant(name: str):
    raise ValueError(f"{name} is no number of JSON")


def to_json(content, where: Path, **how) -> str:
    """JSON of finite numbers; a UserError that names the first other one, as readers of other languages stop at NaN."""
    for name, number in _numbers(content):
        if not math.isfinite(number):
            raise UserError(
                f"{where} is not written: {name} is {number}, so the model or its training is broken; train at a lower "
                "--learning_rate or with --precision float32, or use another model"
            )
    return json.dumps(content, ensure_ascii=False, allow_nan=False, **how)


def _numbers(content, name: str = "the content") -> Iterator[tuple[str, float]]:
    """Every float in JSON-safe content, and the names that lead to it."""
    if isinstance(content, float):
        yield name, content
    elif isinstance(content, dict | list | tuple):
        items = content.items() if isinstance(content, dict) else enumerate(content)
        for key, value in items:
            yield from _numbers(value, str(key) if name == "the content" else f"{name}.{key}")


def write_json(path: Path, content) -> None:
    """Writes JSON so that a reader finds the old file or the new one, never half of it."""
    write_text(path, to_json(content, path, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Writes UTF-8 text as [`write_json`] does."""
    with new_file(path) as part:
        part.write_text(text, encoding="utf-8")


def check_place(file: Path, entries: dict[str, type], others: Sequence[Path] = ()) -> None:
    """UserError unless a recipe can write its files, and would replace only what it wrote itself; checked before hours of
    work. Makes the folder of the files.

    Args:
        file: the JSON file.
        entries: what the recipe's own JSON has, see [`read_json`].
        others: files that are written together with it.
    """
    part = _part_of(file)
    try:
        if file.exists():
            read_json(file, entries, "it is no such file of this recipe: choose another --out, or move it away")
        elif there := [str(other) for other in others if other.exists()]:
            raise UserError(f"--out: {', '.join(there)} is there without {file}: choose another --out, or move it away")
        file.parent.mkdir(parents=True, exist_ok=True)
        part.touch()
    except OSError as error:
        raise UserError(f"--out {file}: {describe(error)}") from error
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """Gives the path of a file to write, which replaces `path` at the end, when all of it is on the disk; after an error,
    `path` is as it was."""
    part = _part_of(Path(path))
    try:
        yield part
        flush(part)
        os.replace(part, path)
        flush(part.parent)
    finally:
        with contextlib.suppress(OSError):  # where the name itself is the error
            part.unlink(missing_ok=True)


def flush(path: Path) -> None:
    """Returns when what was written into a file, or which names a folder has, is on the disk and outlives a power cut."""
    is_folder = path.is_dir()
    if is_folder and os.name == "nt":  # where folders cannot be opened
        return
    place = os.open(path, os.O_RDONLY if is_folder else os.O_RDWR)
    try:
        os.fsync(place)
    finally:
        os.close(place)


def seal(folder: Path, files: Iterable[Path]) -> dict[str, list]:
    """Flushes files in a folder and their folders, and returns `[bytes, SHA-256]` of each by its name from there, for
    [`damage`]."""
    seals, folders = {}, {folder}
    for file in sorted(files):
        flush(file)
        seals[file.relative_to(folder).as_posix()] = [file.stat().st_size, sha256(file)]
        folders.update(parent for parent in file.parents if parent.is_relative_to(folder))
    for place in folders:
        flush(place)
    return seals


def damage(folder: Path, seals: dict[str, list]) -> str | None:
    """What the first file is that is not as [`seal`] found it, and how; None where all are whole. Of versions before the
    hashes, a seal is the size."""
    for name, sealed in seals.items():
        size, digest = sealed if isinstance(sealed, list) else (sealed, None)
        file = folder / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size:,} bytes of {size:,}"
        if digest is not None and sha256(file) != digest:
            return f"{name} has changed since it was written"
    return None


def sha256(file: Path) -> str:
    with open(file, "rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


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
