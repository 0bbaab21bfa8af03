"""Stages of a long preparation: reused when nothing they depend on changed, never half written, one run at a time."""

import contextlib
import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from uuid import uuid4

from cli import UserError
from hf_infini import __version__

LOCK_FOLDER = ".stages"
LEFTOVER = f"*.{'[0-9a-f]' * 32}.part"  # what a killed process was writing, see [`_part_of`]
_STAGE_FILE = "stage.json"


@contextlib.contextmanager
def locked_folder(path: Path) -> Iterator[Path]:
    """Makes the folder, holds a lock in it that dies with the process, and clears away what a killed run left.

    Raises:
        UserError: the folder cannot be made, or another process holds it.
    """
    from filelock import FileLock, Timeout

    try:
        (path / LOCK_FOLDER).mkdir(parents=True, exist_ok=True)
        lock = FileLock(path / LOCK_FOLDER / "lock", timeout=0).acquire()
    except Timeout:
        raise UserError(f"--out {path}: another run is writing there; wait for it or choose another folder") from None
    except OSError as error:
        raise UserError(f"--out {path}: the folder cannot be written ({error})") from error
    with lock:
        for leftover in [*path.glob(LEFTOVER), *path.glob(f"{LOCK_FOLDER}/{LEFTOVER}")]:
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
        yield path


def source_files(source: str) -> list[Path]:
    """The file `source`, or all files under the folder `source`, sorted; empty where it is a name and not a path."""
    path = Path(source)
    return [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())


def state_of_files(source: str) -> list[tuple[str, int, int]]:
    """Name, size in bytes and time of change of the files of [`source_files`]: whether a source has changed."""
    return [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in source_files(source)]


def run_stage(folder: Path, options: dict, build: Callable[[Path], dict]) -> dict:
    """Makes `folder` unless it was made with the same options before, and returns its record.

    `build(partial)` writes into a new folder beside it and returns a JSON-safe result; the folder gets its name only
    when all is written, so a killed run leaves nothing that looks finished.

    Returns:
        `{"key", "options", "result", "seconds", "reused"}`; `key` is a hash of the options, for stages that
        build on this one.

    Raises:
        UserError: `folder` exists and was not made by a stage (it stays as it is).
    """
    identity = json.dumps({"version": __version__, "options": options}, sort_keys=True)
    key = hashlib.sha256(identity.encode()).hexdigest()[:16]
    if folder.exists():
        try:
            record = json.loads((folder / _STAGE_FILE).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            raise UserError(
                f"{folder} exists and was not written by this program; move it away or choose another --out"
            ) from None
        if record["key"] == key:
            return {**record, "reused": True}
    partial = _part_of(folder)
    partial.mkdir(parents=True)
    start = time.perf_counter()
    try:
        result = build(partial)
        record = {"key": key, "options": options, "result": result, "seconds": round(time.perf_counter() - start, 2)}
        (partial / _STAGE_FILE).write_text(json.dumps(record, indent=1, ensure_ascii=False), encoding="utf-8")
        if folder.exists():
            shutil.rmtree(folder)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return {**record, "reused": False}


def drop_stage(folder: Path, *files: Path) -> None:
    """Deletes `files` and the folder of a stage that is no longer wanted; a folder that no stage made stays."""
    if (folder / _STAGE_FILE).is_file():
        for file in files:
            file.unlink(missing_ok=True)
        shutil.rmtree(folder)


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
    """The `manifest.json` of a prepared folder, which is there once it is finished; a UserError where it is not, or where
    there are no rows of `split`."""
    file = Path(data) / "manifest.json"
    if not file.is_file():
        raise UserError(f"--data: {data} has no manifest.json; make the folder with recipes/prepare.py")
    manifest = json.loads(file.read_text(encoding="utf-8"))
    if split is not None and manifest["splits"].get(split, {"blocks": 0})["blocks"] == 0:
        raise UserError(
            f"--split {split}: {data} has no {split} rows; prepare it again with --{split} SHARE, and train on what that "
            "leaves"
        )
    return manifest


def read_json(path: Path):
    """The content of a JSON file; a UserError where it cannot be read."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {error}") from error


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
