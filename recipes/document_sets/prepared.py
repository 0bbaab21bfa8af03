"""Writing and reading the prepared sets of documents."""

import json
import sys
from collections import Counter
from pathlib import Path

from cli import UserError
from support.stages import (
    checksums,
    damage,
    read_json,
    read_jsonl,
    sealed,
    write_json,
    write_text,
)

MANIFEST = "documents.json"
_KINDS = {"id": str, "set": str, "language": str, "half": str, "text": str, "questions": list}
_REMEDY = "make it again with recipes/prepare_documents.py, or prepare_facts.py, which made it"


def write_set(folder: Path, name: str, lines: list[dict], **made_from) -> dict:
    """Writes a set, or writes it again, and its entry in the folder's list of sets.

    Args:
        folder: where to, which is locked.
        name: of the set.
        lines: its documents.
        made_from: what its entry says beside the numbers of documents, questions and characters.

    Returns:
        the entry.
    """
    manifest = folder / MANIFEST
    remedy = "delete it and make its sets again, or choose another --out"
    sets = read_json(manifest, {"sets": dict}, remedy)["sets"] if manifest.exists() else {}
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    write_text(folder / f"{name}.jsonl", text)
    sets[name] = made_from | {
        "documents": dict(Counter(line["half"] for line in lines)),
        "questions": sum(len(line["questions"]) for line in lines),
        "characters": sum(len(line["text"]) for line in lines),
    }
    prepared = [folder / f"{known}.jsonl" for known in sets]
    write_json(manifest, sealed({"sets": sets}, checksums(folder, prepared)))
    return sets[name]


def read_prepared(data: str, sets: list[str], half: str, other: str = "") -> list[dict]:
    """The documents of one half, in the order of the files.

    Args:
        data: folder that recipes/prepare_documents.py made, `--data` of a recipe.
        sets: names of the sets to read, `--sets` of a recipe; empty: all that are there.
        half: "development" or "test".
        other: how the recipe reads the other half, such as "--half test"; empty: it does not.

    Raises:
        UserError: a set is named twice, or has no document in this half; the folder is not such a
            folder, is damaged, or has no such documents.
    """
    if len(set(sets)) < len(sets):
        raise UserError(f"--sets {' '.join(sets)}: name each once")
    manifest = Path(data) / MANIFEST
    if not manifest.is_file():
        raise UserError(
            f"{data} has no {MANIFEST}; make the folder with recipes/prepare_documents.py"
        )
    there = read_json(manifest, {"sets": dict, "files": dict}, _REMEDY)
    if found := damage(manifest, there):
        raise UserError(f"{found}; {_REMEDY}")
    if missing := [name for name in sets if name not in there["sets"]]:
        raise UserError(f"--sets {' '.join(missing)}: {data} has {', '.join(there['sets'])}")
    if not there["sets"]:
        raise UserError(f"{manifest} has no sets; {_REMEDY}")
    empty = [name for name in sets or there["sets"] if half not in there["sets"][name]["documents"]]
    if empty and (sets or len(empty) == len(there["sets"])):
        raise UserError(
            f"{data} has no documents of the {half} half of {', '.join(empty)}: name other --sets"
            + (f", or give {other}" if other else "")
        )
    if empty:
        names = ", ".join(empty)
        print(f"sets without a document of the {half} half: {names}", file=sys.stderr)
    return [
        document
        for name in sets or there["sets"]
        for document in read_jsonl(Path(data) / f"{name}.jsonl", _KINDS, _REMEDY)
        if document["half"] == half
    ]


def check_not_invented(data: str, sets: list[str]) -> None:
    """UserError where a set of recipes/prepare_facts.py is among these of a folder: its facts
    measure scores, and would measure nothing that was fitted on them."""
    there = read_json(Path(data) / MANIFEST, {"sets": dict}, _REMEDY)["sets"]
    if invented := [name for name in sets if there[name].get("invented")]:
        raise UserError(
            f"--sets {' '.join(invented)}: no score may be fitted on facts that measure it; give "
            "sets of recipes/prepare_documents.py"
        )
