"""Stages of a long preparation: reused when nothing they depend on changed, and never half
written."""

import hashlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from cli import UserError
from hf_infini import __version__

from .stages import OWN, checksums, damage, new_folder, peak_memory_bytes, sealed, write_json

_STAGE_FILE = "stage.json"


def run_stage(folder: Path, options: dict, build: Callable[[Path], dict]) -> dict:
    """Makes `folder` unless it was made with the same options before and its files are still those
    that were made, and returns its record. What is made again for its files is said.

    Args:
        options: JSON-safe; what the content depends on.
        build: writes into a new folder beside it and returns a JSON-safe result; the folder gets
            its name only when all is written, so a killed run leaves nothing that looks finished.

    Returns `{"key", "options", "result", "seconds", "files", "reused"}`; `key` is a hash of the
    options, for stages that depend on it. UserError where `folder` exists and was not made by a
    stage (it stays as it is).
    """
    identity = json.dumps({"version": __version__, "options": options}, sort_keys=True)
    key = hashlib.sha256(identity.encode()).hexdigest()[:16]
    record = _read_stage(folder)
    if record is not None and record["key"] == key:
        found = f"{folder} is of an earlier version, without checksums"
        if OWN in record:
            found = damage(folder / _STAGE_FILE, record)
        if not found:
            return {**record, "reused": True}
        print(f"{found}: making it again", file=sys.stderr)
    start = time.perf_counter()
    with new_folder(folder) as partial:
        record = {"key": key, "options": options, "result": build(partial)}
        record["seconds"] = round(time.perf_counter() - start, 2)
        record = sealed(record, checksums(partial))
        text = json.dumps(record, indent=1, ensure_ascii=False)
        (partial / _STAGE_FILE).write_text(text, encoding="utf-8")
        if folder.exists():
            # the folder around it is not what it says any more
            (folder.parent / "manifest.json").unlink(missing_ok=True)
    return {**record, "reused": False}


def _read_stage(folder: Path) -> dict | None:
    """The record of a stage's folder, None where there is no folder; a UserError where no stage
    made it."""
    if not folder.exists():
        return None
    try:
        record = json.loads((folder / _STAGE_FILE).read_text(encoding="utf-8"))
        return {**record, "key": record["key"]}
    except (OSError, ValueError, TypeError, KeyError):
        raise UserError(
            f"{folder} exists and was not written by this program, or its {_STAGE_FILE} is "
            "damaged; move it away or choose another --out"
        ) from None


def write_manifest(
    path: Path, *, options: dict, source: dict, record: dict, splits: Sequence[str], start: float
) -> dict:
    """Writes `manifest.json` in one step and returns it.

    Args:
        options: those of the run; source: what was read.
        record: what [`run_stage`] returned, by stage: "tokenizer" and the `splits` among them.
        start: `time.perf_counter()` at the beginning of the run.
    """
    of_stages = ("key", "seconds", "reused")
    manifest = {"hf_infini": __version__, "options": options, "source": source}
    manifest["tokenizer"] = record["tokenizer"]["result"]
    manifest["splits"] = {name: record[name]["result"] for name in splits}
    manifest["stages"] = {
        name: {key: stage[key] for key in of_stages} for name, stage in record.items()
    }
    manifest["wall_seconds"] = round(time.perf_counter() - start, 2)
    manifest["peak_memory_bytes"] = peak_memory_bytes()
    # the rows have checksums of their own
    beside = [*path.parent.glob("*_documents.jsonl"), *path.parent.glob("tokenizer/*")]
    manifest = sealed(manifest, checksums(path.parent, beside))
    write_json(path, manifest)
    return manifest
