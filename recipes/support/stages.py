"""Stages of a long preparation: reused when nothing they depend on changed, never half written, one run at a time."""

import contextlib
import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from uuid import uuid4

from cli import UserError
from hf_infini import __version__

LOCK_FOLDER = ".stages"
_OWNER_FILE = "made_by"  # in it
LEFTOVER = f"*.{'[0-9a-f]' * 32}.part"  # what a killed process was writing, see [`_part_of`]
_STAGE_FILE = "stage.json"


@contextlib.contextmanager
def locked_folder(path: Path, owner: str | None = None) -> Iterator[Path]:
    """Makes the folder, holds a lock in it that dies with the process, and clears away what a killed run left.

    Args:
        path: the folder.
        owner: the recipe that writes there. A folder that has anything else in it, or is another recipe's, is refused;
            `None`: the caller sees to that itself.

    Raises:
        UserError: the folder cannot be made, another process holds it, or it is not the owner's.
    """
    if owner is not None:
        _check_owner(path, owner)
    from filelock import FileLock, Timeout

    try:
        (path / LOCK_FOLDER).mkdir(parents=True, exist_ok=True)
        lock = FileLock(path / LOCK_FOLDER / "lock", timeout=0).acquire()
    except Timeout:
        raise UserError(f"--out {path}: another run is writing there; wait for it or choose another folder") from None
    except OSError as error:
        raise UserError(f"--out {path}: the folder cannot be written ({error})") from error
    with lock:
        if owner is not None:
            write_text(path / LOCK_FOLDER / _OWNER_FILE, owner)
        for leftover in [*path.glob(LEFTOVER), *path.glob(f"{LOCK_FOLDER}/{LEFTOVER}")]:
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
        yield path


def _check_owner(path: Path, owner: str) -> None:
    """UserError unless the folder is missing, empty, or one that the recipe `owner` has begun."""
    try:
        there = next(path.iterdir(), None)
        file = path / LOCK_FOLDER / _OWNER_FILE
        found = file.read_text(encoding="utf-8") if file.is_file() else None
    except (OSError, UnicodeDecodeError):  # what is wrong with the folder is said when it is locked
        return
    if found is None and there is not None and not (path / LOCK_FOLDER).is_dir():
        raise UserError(f"--out {path} holds other files, such as {there.name}: choose a new or empty folder")
    if found not in (None, owner):
        raise UserError(f"--out {path} is a folder of {found}: choose another one")


def source_files(source: str) -> list[Path]:
    """The file `source`, or all files under the folder `source`, sorted; empty where it is a name and not a path.

    Links that lead nowhere are among them: a text that is missing is not passed over.
    """
    path = Path(source)
    return [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file() or _leads_nowhere(file))


def _leads_nowhere(file: Path) -> bool:
    return file.is_symlink() and not file.exists()


def state_of_files(source: str) -> list[tuple[str, int, int]]:
    """Name, size in bytes and time of change of the files of [`source_files`]: whether a source has changed."""
    states = ((str(file), file.lstat() if _leads_nowhere(file) else file.stat()) for file in source_files(source))
    return [(name, state.st_size, state.st_mtime_ns) for name, state in states]


def run_stage(folder: Path, options: dict, build: Callable[[Path], dict], waiting: Path | None = None) -> dict:
    """Makes `folder` unless it was made with the same options before and is whole, and returns its record.

    `build(partial)` writes into a new folder beside it and returns a JSON-safe result; the folder gets its name only
    when all is written, so a killed run leaves nothing that looks finished.

    Args:
        folder: what it makes.
        options: JSON-safe; what the content depends on.
        build: makes the content.
        waiting: a new folder waits in here, and the old one stays, until [`replace_stages`] is called.

    Returns:
        `{"key", "options", "result", "files", "seconds", "reused", "folder"}`; `key` is a hash of the options, for stages
        that build on this one, `files` has the hash of each file, `folder` is where the stage is now.

    Raises:
        UserError: `folder` exists and was not made by a stage (it stays as it is).
    """
    identity = json.dumps({"version": __version__, "options": options}, sort_keys=True)
    key = hashlib.sha256(identity.encode()).hexdigest()[:16]
    target = folder if waiting is None else waiting / folder.name
    for place in dict.fromkeys((folder, target)):
        record = _read_stage(place)
        if record is not None and record["key"] == key:
            changed = _changed_files(place, record["files"])
            if not changed:
                return {**record, "reused": True, "folder": place}
            print(f"{place}: {changed[0]} is damaged or missing, the folder is made again", file=sys.stderr)
    partial = _part_of(target)
    partial.mkdir(parents=True)
    start = time.perf_counter()
    try:
        result = build(partial)
        record = {"key": key, "options": options, "result": result, "files": _hashes(partial)}
        record["seconds"] = round(time.perf_counter() - start, 2)
        (partial / _STAGE_FILE).write_text(json.dumps(record, indent=1, ensure_ascii=False), encoding="utf-8")
        _replace(target, partial)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return {**record, "reused": False, "folder": target}


def replace_stages(out: Path, waiting: Path, records: Iterable[dict], unwanted: Sequence[Path] = ()) -> None:
    """Puts the stages that wait for it into `out`, whose manifest goes before the first of them.

    Args:
        out: the prepared folder.
        waiting: that of [`run_stage`]; it is deleted.
        records: what [`run_stage`] returned; `folder` of those that waited becomes the folder in `out`.
        unwanted: files and folders of an earlier version, which are deleted; a folder that no stage made stays.
    """
    new = [record for record in records if record["folder"].parent == waiting]
    old = [path for path in unwanted if path.is_file() or (path / _STAGE_FILE).is_file()]
    if new or old:
        (out / "manifest.json").unlink(missing_ok=True)
    for record in new:
        folder = out / record["folder"].name
        _replace(folder, record["folder"])
        record["folder"] = folder
    for path in old:
        path.unlink() if path.is_file() else shutil.rmtree(path)
    shutil.rmtree(waiting, ignore_errors=True)


def _read_stage(folder: Path) -> dict | None:
    """The record of a stage's folder, None where there is no folder; a UserError where no stage made it."""
    if not folder.exists():
        return None
    try:
        record = json.loads((folder / _STAGE_FILE).read_text(encoding="utf-8"))
        return {"files": None, **record, "key": record["key"]}
    except (OSError, ValueError, TypeError, KeyError):
        raise UserError(
            f"{folder} exists and was not written by this program, or its {_STAGE_FILE} is damaged; move it away or choose "
            "another --out"
        ) from None


def check_stage(folder: Path, remedy: str) -> None:
    """UserError, with the remedy, where a file of a stage's folder is damaged or missing; other folders pass."""
    if (folder / _STAGE_FILE).is_file() and (recorded := _read_stage(folder)["files"]) is not None:
        for name in _changed_files(folder, recorded):
            raise UserError(f"{folder / name} is damaged or missing; {remedy}")


def _hashes(folder: Path) -> dict[str, str]:
    """The hash of every file under a stage's folder by its relative name, but that of its record."""
    hashes = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and path.name != _STAGE_FILE):
        with open(path, "rb") as file:
            hashes[path.relative_to(folder).as_posix()] = hashlib.file_digest(file, "sha256").hexdigest()
    return hashes


def _changed_files(folder: Path, recorded: dict[str, str] | None) -> list[str]:
    """The recorded files that are missing or have another content; an older record, without hashes, is one of them."""
    if recorded is None:
        return [_STAGE_FILE]
    found = _hashes(folder)
    return [name for name, value in recorded.items() if found.get(name) != value]


def _replace(folder: Path, new: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
    new.rename(folder)


def write_manifest(path: Path, *, options: dict, source: dict, record: dict, splits: Sequence[str], start: float) -> dict:
    """Writes `manifest.json` in one step and returns it.

    Args:
        path: the file.
        options: those of the run.
        source: what was read.
        record: what [`run_stage`] returned, by stage: "tokenizer" and the splits among them.
        splits: the stages that are splits.
        start: `time.perf_counter()` at the beginning of the run.
    """
    manifest = {
        "hf_infini": __version__,
        "options": options,
        "source": source,
        "tokenizer": record["tokenizer"]["result"],
        "splits": {name: record[name]["result"] for name in splits},
        "stages": {name: {key: stage[key] for key in ("key", "seconds", "reused")} for name, stage in record.items()},
        "wall_seconds": round(time.perf_counter() - start, 2),
        "peak_memory_bytes": peak_memory_bytes(),
    }
    write_json(path, manifest)
    return manifest


def read_manifest(data: Path, split: str | None = None) -> dict:
    """The `manifest.json` of a prepared folder, which is there once it is finished; a UserError where it is missing or
    damaged, or where there are no rows of `split`."""
    file, remedy = Path(data) / "manifest.json", "make the folder with recipes/prepare.py"
    if not file.is_file():
        raise UserError(f"--data: {data} has no manifest.json; {remedy}")
    manifest = read_json(file, f"; {remedy} again")
    try:
        blocks = {name: (entry["blocks"], entry["tokens"], entry["sha256"]) for name, entry in manifest["splits"].items()}
        complete = {"train", "validation"} <= blocks.keys() and manifest["options"]["split_by"]
        complete = complete and isinstance(manifest["tokenizer"]["vocabulary"], int)
    except (KeyError, TypeError, AttributeError):
        complete = False
    if not complete:
        raise UserError(f"--data: {file} is no manifest of a prepared folder; {remedy} again")
    if split is not None and (split not in blocks or blocks[split][0] == 0):
        raise UserError(
            f"--split {split}: {data} has no {split} rows; prepare it again with --{split} SHARE, and train on what that "
            "leaves"
        )
    return manifest


def read_json(path: Path, remedy: str = ""):
    """The content of a JSON file; a UserError, with the remedy, where it cannot be read."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"cannot read {path}: {error}{remedy}") from error


def check_own_files(path: Path, is_own: Callable[[str], bool], others: Iterable[Path] = ()) -> None:
    """UserError where files that are to be written exist and are something else.

    Args:
        path: the file, a text; is_own: whether this is an earlier version of it.
        others: are written after it, so that they are the same recipe's if it is.
    """
    there = [file for file in (path, *others) if file.exists() or file.is_symlink()]
    try:
        own = not there or is_own(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        own = False
    if not own:
        raise UserError(f"--out: {there[0]} exists and is not from this recipe: move it away, or choose another --out")


def has_entries(*names: str) -> Callable[[str], bool]:
    """Whether a text is a JSON object with all of these entries."""

    def check(text: str) -> bool:
        content = json.loads(text)
        return isinstance(content, dict) and content.keys() >= set(names)

    return check


def write_json(path: Path, content) -> None:
    """Writes JSON so that a reader finds the old file or the new one, never half of it."""
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Writes UTF-8 text as [`write_json`] does."""
    with new_file(path) as part:
        part.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """Gives the path of a file to write, which replaces `path` at the end; after an error, `path` is as it was."""
    part = _part_of(Path(path))
    try:
        yield part
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


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
