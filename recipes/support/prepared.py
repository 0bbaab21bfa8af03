"""Reads the rows and the tokenizer of a prepared folder, and checks that they are those of its manifest."""

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from cli import UserError

from .stages import read_manifest

if TYPE_CHECKING:
    import datasets

REMEDY = "delete manifest.json there and make the folder again with its command of recipes/prepare.py"
BATCH_ROWS = 512  # of what the hash in a manifest is made of, see `corpora.blocks.save_rows`


def open_rows(data: Path, split: str) -> "datasets.Dataset":
    """A split of a prepared folder.

    Raises UserError where files are missing or damaged, or rows are not those that were written: of another number, of
    unequal lengths, with ids beyond the vocabulary, or of another hash than the manifest's.
    """
    from datasets import disable_progress_bars, load_from_disk

    disable_progress_bars()
    folder, manifest = Path(data) / split, read_manifest(data)
    if split not in manifest["splits"]:
        raise UserError(f"{folder}: {data} was prepared without a {split} split; it has {', '.join(manifest['splits'])}")
    if not folder.is_dir():
        raise UserError(f"{folder} is missing, though manifest.json has it; {REMEDY}")
    try:
        rows = load_from_disk(str(folder))
        columns = rows.column_names
        problem = _problem_of(rows, manifest["splits"][split], manifest["tokenizer"]["vocabulary"])
    except Exception as error:  # pyarrow's and datasets' are of many kinds, and some are no ValueErrors
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"{folder} cannot be read: {reason[:200]}; {REMEDY}") from error
    if problem:
        raise UserError(f"{folder} {problem}; {REMEDY}")
    return rows.select_columns([name for name in ("input_ids", "labels") if name in columns])


def open_folders(option: str, folders: list[str], split: str) -> "dict[str, datasets.Dataset]":
    """[`open_rows`] of several folders, by folder; a UserError that names the option unless all rows are of one length."""
    found = {folder: open_rows(Path(folder), split) for folder in folders}
    lengths = {folder: len(rows[0]["input_ids"]) for folder, rows in found.items()}
    if len({*lengths.values()}) > 1:
        raise UserError(f"{option}: the rows of all folders must be of one length; got {lengths}")
    return found


def read_tokenizer(data: Path):
    """The tokenizer of a prepared folder; a UserError where it cannot be loaded or is not the one that made the rows."""
    from transformers import AutoTokenizer

    folder, made = Path(data) / "tokenizer", read_manifest(data)["tokenizer"]
    if not folder.is_dir():
        raise UserError(f"{folder} is missing; {REMEDY}")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # of any library on the way
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"{folder} cannot be loaded: {reason[:200]}; {REMEDY}") from error
    found = {"vocabulary": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    for name, value in found.items():
        if made.get(name, value) != value:
            raise UserError(f"{folder} has {name} {value}, but made the rows with {made[name]}: it is another one; {REMEDY}")
    return tokenizer


def _problem_of(rows: "datasets.Dataset", made: dict, vocabulary: int) -> str | None:
    """What is not as the manifest says; None where all is."""
    if len(rows) != made["blocks"]:
        return f"has {len(rows):,} rows, and manifest.json says {made['blocks']:,}"
    if "input_ids" not in rows.column_names:
        return f"has no column input_ids, but {', '.join(rows.column_names) or 'none'}"
    digest, tokens = hashlib.sha256(), 0
    width = getattr(rows.features["input_ids"], "length", -1)
    for start in range(0, len(rows), BATCH_ROWS):
        for name in rows.column_names:
            values = rows.data.column(name).slice(start, BATCH_ROWS).combine_chunks().flatten().to_numpy()
            if name == "input_ids":
                tokens += values.size
                if len(values) != width * min(BATCH_ROWS, len(rows) - start):
                    return "has rows of unequal length"
                if values.size and not 0 <= values.min() <= values.max() < vocabulary:
                    return f"has ids from {values.min()} to {values.max()}, beyond the vocabulary of {vocabulary:,}"
            digest.update(values.astype("<i4").tobytes())
    if (tokens, digest.hexdigest()) != (made["tokens"], made["sha256"]):
        return "has other tokens than manifest.json says"
    return None
