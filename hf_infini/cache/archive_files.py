"""An archive beside a memory file: `NAME.archive`, or `NAME.….archive`, has the blocks, and the
memory file all else, with the checksums of the blocks. Its record has the `parts` of a block, of
each its layer, heads, width and dtype, and "int8" where it is rounded."""

import glob
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from ..ops.checks import check_types
from ..ops.recall import BLOCK_TOKENS
from ..options import key_heads
from .archive import Archive, Part, Row, form_of
from .block_file import BlockFile, Stored, check_free, is_ours
from .files import KIND as MEMORY
from .files import dtype_of
from .tensor_files import part_of


class Saved(NamedTuple):
    """What a memory file says of an archive."""

    entry: dict[str, Any]  # of its record
    tensors: dict[str, Tensor]
    archive: Archive  # whose blocks are in the new file, where they were in one

    def remove_others(self, path: Path) -> None:
        """Removes the files of blocks of an older memory file of this name, `path`."""
        for old in archives_of(path):
            if old.name != name_of(path).name + self.entry["suffix"] and is_ours(old):
                old.unlink(missing_ok=True)


def saved(archive: Archive, path: Path, seen: Tensor) -> Saved:
    """What a memory file at this path says of an archive of so many tokens, `seen` `[batch]`. The
    blocks are written beside it first, unless they are in one file there already; into one that has
    its name from their checksums, so that an older memory file keeps its own until it is replaced.
    ValueError where the archive has other tokens."""
    before, tensors = archive.rows_of(seen), dict[str, Tensor]()
    rows: Sequence[Row] = before
    own_name = name_of(path)
    there = {
        block.file.path if isinstance(block, Stored) else None
        for row in rows
        for block in row.blocks
    }
    if not (len(there) < 2 and all(file in archives_of(own_name) for file in there)):
        rows = _written(rows, path)
    for number, row in enumerate(rows):
        of_row: Any = row.blocks
        places = torch.tensor([block.place for block in of_row], dtype=torch.long)
        sums = b"".join(block.sha256 for block in of_row)
        own = {"ids": row.ids, "eligible": row.eligible, "tail": row.tail, "places": places}
        own["sha256"] = torch.tensor([*sums], dtype=torch.uint8).view(-1, 32)
        tensors |= {f"archive.{number}.{name}": tensor for name, tensor in own.items()}
    stored: Any = [block for row in rows for block in row.blocks]
    for file in {block.file for block in stored}:
        file.sync()  # before a memory file says what is in it
    names = (block.file.path.name for block in stored)
    suffix = next(names, own_name.name).removeprefix(own_name.name)
    parts = [
        [*part[:3], str(part.dtype).removeprefix("torch."), *([part.form] if part.form else [])]
        for part in rows[0].parts
    ]
    moved = [
        own._replace(
            blocks=tuple(
                new if isinstance(old, Stored) else old
                for old, new in zip(own.blocks, row.blocks, strict=True)
            )
        )
        for own, row in zip(before, rows, strict=True)
    ]
    entry = {"suffix": suffix, "parts": parts}
    return Saved(entry, tensors, Archive(moved, archive.file))


def name_of(path: Path) -> Path:
    """The name that the memory file `path` has in the end, when its text is read."""
    return path.with_name(path.name.removesuffix(".partial"))


def archives_of(path: Path) -> list[Path]:
    """Where the memory file `path` has its blocks: in the one of a reader, or in others that are
    there. A user may have files of these names, too: see [`is_ours`]."""
    names = glob.escape(path.name)
    return [
        path.with_name(f"{path.name}.archive"),
        *path.parent.glob(f"{names}.{'[0-9a-f]' * 8}.archive"),
    ]


def _written(rows: Sequence[Row], path: Path) -> list[Row]:
    """The rows with their blocks in a new file beside a memory file."""
    places: dict[int, Stored] = {}
    path.parent.mkdir(parents=True, exist_ok=True)
    with part_of(path) as part:
        file, digest = BlockFile(part / "blocks", rows[0].block_bytes), hashlib.sha256()
        for row in rows:
            for number, block in enumerate(row.blocks):
                if id(block) not in places:
                    [bytes_] = row.bytes_of([number])
                    [places[id(block)]] = file.write(len(places), bytes_[None])
                    digest.update(places[id(block)].sha256)
        named = path.with_name(f"{path.name}.{digest.hexdigest()[:8]}.archive")
        if places:
            check_free(named)
            os.replace(file.path, named)
    there = file._replace(path=named)
    return [
        row._replace(blocks=tuple(places[id(block)]._replace(file=there) for block in row.blocks))
        for row in rows
    ]


def loaded(
    path: Path,
    entry: dict[str, Any],
    tensors: dict[str, Tensor],
    parts: list[tuple[int, int, int]],
    tokens: Sequence[int],
) -> Archive:
    """The archive that a memory file at this path speaks of; MemoryFileError where what it says
    does not fit.

    Args:
        path: of the memory file.
        entry: of its record.
        tensors: of the file.
        parts: layer, heads and width of keys and values, as the model has them.
        tokens: of the document of each row.
    """
    MEMORY.check_entries(path, entry, {"suffix": str, "parts": list})
    try:
        found = tuple(
            Part(layer, heads, width, getattr(torch, dtype), *map(form_of, form))
            for layer, heads, width, dtype, *form in entry["parts"]
        )
        size = BLOCK_TOKENS * sum(part.bytes for part in found)
    except (TypeError, ValueError, IndexError, AttributeError) as error:
        MEMORY.refuse(path, f"is damaged: its archive has other parts ({error})")
    if [part[:3] for part in found] != parts:
        MEMORY.refuse(path, "has the archive of another model")
    rows = []
    for number, count in enumerate(tokens):
        blocks, rest = divmod(count, BLOCK_TOKENS)
        own = {
            name: tensors.get(f"archive.{number}.{name}")
            for name in ("ids", "eligible", "tail", "places", "sha256")
        }
        wanted = {
            "ids": torch.empty(count, dtype=torch.long),
            "eligible": torch.empty(count, dtype=torch.bool),
            "tail": torch.empty(rest, size // BLOCK_TOKENS, dtype=torch.uint8),
            "places": torch.empty(blocks, dtype=torch.long),
            "sha256": torch.empty(blocks, 32, dtype=torch.uint8),
        }
        held = {name: tensor for name, tensor in own.items() if tensor is not None}
        MEMORY.check_shapes(path, held, wanted, "its archive has")
        file = BlockFile.at(path.with_name(name_of(path).name + entry["suffix"]), size)
        sums = [bytes(each.tolist()) for each in held["sha256"]]
        stored = tuple(
            Stored(file, *pair) for pair in zip(held["places"].tolist(), sums, strict=True)
        )
        if stored:
            file.check(max(block.place for block in stored))
        rows.append(Row(held["ids"], held["eligible"], found, stored, held["tail"]))
    return Archive(rows)


@check_types
def archive_bytes(config: PreTrainedConfig, tokens: int, archive: bool | str = True) -> int:
    """Bytes that an archive takes, on a disk or in host memory.

    Args:
        config: of a model with kept tokens, whose dtype counts (`None`: torch's default).
        tokens: that are read.
        archive: as of [`InfiniCache`]; ValueError for another.
    """
    form, dtype = form_of(archive), dtype_of(config)
    if not archive:
        return 0
    heads, *widths = key_heads(config)
    layers: Any = getattr(config, "infini_layers", ())
    of_layer = sum(Part(0, heads, width, dtype, form).bytes for width in widths)
    # and the token's id, and whether it may be recalled
    return tokens * (len(layers) * of_layer + 9)
