"""Reads the rows and the tokenizer of a prepared folder, and checks that they are those of its
manifest."""

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from cli import UserError, one_line

from .stages import read_manifest

if TYPE_CHECKING:
    import datasets

REMEDY = "delete it and make it again with its command of recipes/prepare.py"
BATCH_ROWS = 512


def open_rows(data: Path, split: str) -> "datasets.Dataset":
    """A split of a prepared folder; UserError where files are missing or damaged, or the rows are
    not those that the manifest tells of."""
    from datasets import disable_progress_bars, load_from_disk

    disable_progress_bars()
    folder, manifest = Path(data) / split, read_manifest(data)
    made = manifest["splits"].get(split)
    if made is None:
        raise UserError(
            f"{folder}: {data} was prepared without a {split} split; it has "
            f"{', '.join(manifest['splits'])}"
        )
    try:
        rows = load_from_disk(str(folder))
        same = (len(rows), *digest(rows)) == (made["blocks"], made["tokens"], made["sha256"])
    # pyarrow's and datasets' are of many kinds, and some are no ValueErrors
    except Exception as error:
        raise UserError(f"{folder} cannot be read: {one_line(error)[:200]}; {REMEDY}") from error
    if not same:
        raise UserError(f"{folder} has other rows than manifest.json says; {REMEDY}")
    names = [name for name in ("input_ids", "labels") if name in rows.column_names]
    return rows.select_columns(names)


def open_folders(option: str, folders: list[str], split: str) -> "dict[str, datasets.Dataset]":
    """[`open_rows`] of several folders, by folder; a UserError that names the option unless all
    rows are of one length."""
    found = {folder: open_rows(Path(folder), split) for folder in folders}
    lengths = {folder: len(rows[0]["input_ids"]) for folder, rows in found.items()}
    if len({*lengths.values()}) > 1:
        raise UserError(f"{option}: the rows of all folders must be of one length; got {lengths}")
    return found


def read_tokenizer(data: Path):
    """The tokenizer of a prepared folder; a UserError where it cannot be loaded or is not the one
    that made the rows."""
    from transformers import AutoTokenizer

    folder, made = Path(data) / "tokenizer", read_manifest(data)["tokenizer"]["vocabulary"]
    try:
        how = {"local_files_only": True, "trust_remote_code": False}
        tokenizer = AutoTokenizer.from_pretrained(folder, **how)
    except Exception as error:  # of any library on the way
        raise UserError(f"{folder} cannot be loaded: {one_line(error)[:200]}; {REMEDY}") from error
    if len(tokenizer) != made:
        raise UserError(
            f"{folder} has {len(tokenizer)} tokens, and made the rows with {made}; {REMEDY}"
        )
    return tokenizer


def digest(rows: "datasets.Dataset") -> tuple[int, str]:
    """How many tokens the rows of a dataset as it was saved have, and the hash of its columns as
    little-endian 32-bit integers, one after the other in batches of 512 rows."""
    found, tokens = hashlib.sha256(), 0
    for start in range(0, len(rows), BATCH_ROWS):
        for name in rows.column_names:
            column = rows.data.column(name).slice(start, BATCH_ROWS).combine_chunks()
            values = column.flatten().to_numpy()
            tokens += values.size if name == "input_ids" else 0
            found.update(values.astype("<i4").tobytes())
    return tokens, found.hexdigest()
