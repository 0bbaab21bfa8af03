"""Stages of a long preparation: reused when nothing they depend on changed, never half written, replaced all at once."""

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from cli import UserError
from hf_infini import __version__

from .stages import _part_of, flush, peak_memory_bytes, write_json

_STAGE_FILE = "stage.json"


def run_stage(folder: Path, options: dict, build: Callable[[Path], dict], waiting: Path | None = None) -> dict:
    """Makes `folder` unless it was made with the same options before, and returns its record.

    `build(partial)` writes into a new folder beside it and returns a JSON-safe result; the folder gets its name only
    when all is written, so a killed run leaves nothing that looks finished.

    Args:
        folder: what it makes.
        options: JSON-safe; what the content depends on.
        build: makes the content.
        waiting: a new folder waits in here, and the old one stays, until [`replace_stages`] is called.

    Returns:
        `{"key", "options", "result", "seconds", "reused", "folder"}`; `key` is a hash of the options, for stages that build
        on this one, `folder` is where the stage is now.

    Raises:
        UserError: `folder` exists and was not made by a stage (it stays as it is).
    """
    identity = json.dumps({"version": __version__, "options": options}, sort_keys=True)
    key = hashlib.sha256(identity.encode()).hexdigest()[:16]
    target = folder if waiting is None else waiting / folder.name
    for place in dict.fromkeys((folder, target)):
        record = _read_stage(place)
        if record is not None and record["key"] == key:
            return {**record, "reused": True, "folder": place}
    partial = _part_of(target)
    partial.mkdir(parents=True)
    start = time.perf_counter()
    try:
        result = build(partial)
        for file in partial.rglob("*"):
            if file.is_file():
                flush(file)
        record = {"key": key, "options": options, "result": result}
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
        return {**record, "key": record["key"]}
    except (OSError, ValueError, TypeError, KeyError):
        raise UserError(
            f"{folder} exists and was not written by this program, or its {_STAGE_FILE} is damaged; move it away or choose "
            "another --out"
        ) from None


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
