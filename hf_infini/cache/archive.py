"""Keys and values of everything that a cache has read, outside of the device. Nothing attends to
them before a question recalls some of them ([`InfiniCache.recall`]).

What a document has had is held in *blocks* of 64 tokens, by their numbers, of bytes: keys and
values of one layer after the other, un-rotated, as the model computed them. They are in host
memory, or in a file of blocks one after the other ([`BlockFile`]), of which only those that are
recalled are read.
"""

import glob
import hashlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ops.recall import BLOCK_TOKENS, have_left, recall_score, recalled_numbers
from ..ops.state import InfiniState, Tokens
from ..options import Window, key_heads
from .files import KIND as MEMORY
from .files import dtype_of
from .tensor_files import part_of

# Tokens of calls after which they become blocks, which on an accelerator waits for it
PENDING_TOKENS = 256


class Part(NamedTuple):
    """Keys or values of one layer in a block, of which each token has `[kv_heads, width]`."""

    layer: int
    heads: int
    width: int
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Of one token."""
        return self.heads * self.width * self.dtype.itemsize


class Stored(NamedTuple):
    """A block in a file: its place there, counted in blocks, and its checksum."""

    file: "BlockFile"
    place: int
    sha256: bytes


class BlockFile(NamedTuple):
    """A file of blocks, all of the same size."""

    path: Path
    block_bytes: int

    def write(self, place: int, blocks: Tensor) -> list[Stored]:
        """Writes blocks, `[blocks, bytes]`, from this place on. OSError where they cannot be
        written."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(self.path, os.O_WRONLY | os.O_CREAT, 0o666)
        try:
            with os.fdopen(handle, "wb") as file:
                file.seek(place * self.block_bytes)
                file.write(blocks.numpy())
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise OSError(
                f"{self.path} cannot take {blocks.nbytes:,} bytes more: {error}. What was read "
                "before is kept; free some space, or read without an archive."
            ) from error
        sums = (hashlib.sha256(block.numpy()).digest() for block in blocks)
        return [Stored(self, place + number, each) for number, each in enumerate(sums)]

    def read(self, blocks: Iterable[Stored]) -> list[Tensor]:
        """The bytes of blocks of this file. MemoryFileError where it is gone, or damaged there."""
        found = []
        try:
            with self.path.open("rb") as file:
                for block in blocks:
                    file.seek(block.place * self.block_bytes)
                    content = bytearray(self.block_bytes)
                    length = file.readinto(content)
                    if (
                        length < self.block_bytes
                        or hashlib.sha256(content).digest() != block.sha256
                    ):
                        MEMORY.refuse(
                            self.path,
                            f"is damaged: its block {block.place} is not what was written",
                        )
                    found.append(torch.frombuffer(content, dtype=torch.uint8))
        except FileNotFoundError:
            MEMORY.refuse(self.path, "is gone, and the memory of its text needs it")
        return found

    def check(self, place: int) -> None:
        """MemoryFileError where the file has no block at this place."""
        try:
            size = self.path.stat().st_size
        except OSError:
            MEMORY.refuse(self.path, "is gone, and the memory of its text needs it")
        if size < (place + 1) * self.block_bytes:
            MEMORY.refuse(self.path, f"is cut off: it has {size:,} bytes only")


Block = Tensor | Stored  # of the bytes `[block_bytes]`, or where they are


class Row(NamedTuple):
    """What a row of a cache has read of its document."""

    ids: Tensor  # `[tokens]`, int64; −2 for embeddings
    # `[tokens]` bool: which of them may be recalled: those that a memory would take in
    eligible: Tensor
    parts: tuple[Part, ...]  # of a block: of each layer keys, then values
    blocks: tuple[Block, ...]  # those that are complete
    tail: Tensor  # `[tokens, bytes]`, of the tokens behind them

    @property
    def tokens(self) -> int:
        return len(self.ids)

    def and_then(self, new: "Row", file: BlockFile | None) -> "Row":
        """The row with more tokens, all of them in `new`'s tail; blocks go into the file."""
        tail = torch.cat([self.tail, new.tail])
        count = len(tail) // BLOCK_TOKENS
        whole, blocks = tail[: count * BLOCK_TOKENS], self.blocks
        if count:
            made = whole.view(count, BLOCK_TOKENS, -1)
            sizes = [part.bytes for part in self.parts]
            # of each layer all tokens together
            made = torch.cat([each.flatten(1) for each in made.split(sizes, 2)], 1)
            placed = made.unbind() if file is None else file.write(len(blocks), made)
            blocks = (*blocks, *placed)
            tail = tail[count * BLOCK_TOKENS :].clone()
        ids, eligible = (
            torch.cat(pair) for pair in ((self.ids, new.ids), (self.eligible, new.eligible))
        )
        return Row(ids, eligible, self.parts, blocks, tail)

    def last(self, tokens: int) -> "Row":
        """The row of so many last tokens, all of which are in the tail."""
        kept = slice(len(self.ids) - tokens, None)
        return Row(self.ids[kept], self.eligible[kept], self.parts, (), self.tail[kept])

    @property
    def block_bytes(self) -> int:
        """Of one block."""
        return BLOCK_TOKENS * sum(part.bytes for part in self.parts)

    def bytes_of(self, numbers: Iterable[int]) -> list[Tensor]:
        """The bytes of these blocks; errors as of [`BlockFile.read`]."""
        held = {number: self.blocks[number] for number in numbers}
        stored = {number: block for number, block in held.items() if isinstance(block, Stored)}
        for file in {block.file for block in stored.values()}:
            own = {number: block for number, block in stored.items() if block.file == file}
            held |= zip(own, file.read(own.values()), strict=True)
        return [*held.values()]

    def found(self, numbers: Tensor) -> dict[int, Tensor]:
        """The bytes of the blocks, by number, in which tokens with these numbers are; those of the
        tail as `[tokens · bytes]`."""
        wanted = (numbers // BLOCK_TOKENS).unique().tolist()
        whole = [number for number in wanted if number < len(self.blocks)]
        found = dict(zip(whole, self.bytes_of(whole), strict=True))
        return found | {number: self.tail.flatten() for number in wanted if number not in found}

    def taken(self, layer: int, numbers: Tensor, found: dict[int, Tensor]) -> list[Tensor]:
        """Keys and values of a layer, `[kv_heads, tokens, width]`, of the tokens with these numbers
        in ascending order; `found`: [`Row.found`] of these and perhaps others."""
        taken, begin, rest = [], 0, len(self.tail)
        for part in self.parts:
            if part.layer == layer:
                rows = []
                for number in (numbers // BLOCK_TOKENS).unique().tolist():
                    inside = numbers[numbers // BLOCK_TOKENS == number] % BLOCK_TOKENS
                    block = found[number]
                    if number < len(self.blocks):
                        of_part = block[begin * BLOCK_TOKENS :][: part.bytes * BLOCK_TOKENS]
                    else:
                        of_part = block.view(rest, -1)[:, begin : begin + part.bytes].flatten()
                    rows.append(of_part.view(-1, part.bytes)[inside])
                whole = torch.cat(rows) if rows else torch.empty(0, part.bytes, dtype=torch.uint8)
                states = whole.view(part.dtype).view(-1, part.heads, part.width)
                taken.append(states.transpose(0, 1))
            begin += part.bytes
        return taken


class Call(NamedTuple):
    """What a call has read, as the layers had it."""

    ids: Tensor  # `[batch, tokens]`
    real: Tensor  # `[batch, tokens]` bool: which are no padding
    eligible: Tensor  # `[batch, tokens]` bool, as in [`Row`]
    seen: Tensor  # `[batch]`, tokens of the row's document after it
    layers: dict[int, tuple[Tensor, Tensor]]  # `[batch, kv_heads, tokens, width]`

    def and_then(self, *calls: "Call") -> "Call":
        """This one and others after it as one."""
        every = (self, *calls)
        parts = ([getattr(call, name) for call in every] for name in ("ids", "real", "eligible"))
        layers = {
            number: tuple(
                torch.cat([call.layers[number][side] for call in every], 2) for side in (0, 1)
            )
            for number in self.layers
        }
        return Call(*(torch.cat(part, 1) for part in parts), every[-1].seen, layers)

    def rows(self) -> list[Row]:
        """The tokens of each row, without padding, in host memory."""
        states = [(number, side.detach()) for number, pair in self.layers.items() for side in pair]
        parts = tuple(
            Part(number, side.shape[1], side.shape[3], side.dtype) for number, side in states
        )
        flat = [
            side.transpose(1, 2).flatten(2).contiguous().view(torch.uint8) for _, side in states
        ]
        device = flat[0].device  # layers may be on several
        bytes_ = torch.cat([part.to(device) for part in flat], 2).to("cpu")
        ids, real, eligible = (part.to("cpu") for part in (self.ids, self.real, self.eligible))
        return [
            Row(ids[row, kept], eligible[row, kept], parts, (), bytes_[row, kept])
            for row, kept in enumerate(real)
        ]


class Archive:
    """What the rows of an [`InfiniCache`] have read of their current documents. Nothing changes
    it: `after` and `chosen` give another one, which shares what is the same, so that copies of a
    cache cost nothing.

    Args:
        rows: what has been read; none before the first call.
        file: where the blocks of the one row go; `None`: they stay in host memory.
    """

    def __init__(
        self, rows: Sequence[Row] = (), file: Path | None = None, calls: tuple[Call, ...] = ()
    ):
        self._rows, self._calls, self.file = tuple(rows), calls, file

    def rows(self) -> tuple[Row, ...]:
        """The rows, with all that was read."""
        if self._calls:
            seen = self._calls[-1].seen.tolist()
            read = self._calls[0].and_then(*self._calls[1:]).rows()
            before = self._rows or (None,) * len(read)
            triples = zip(before, read, seen, strict=True)
            self._rows = tuple(self._after(*triple) for triple in triples)
            self._calls = ()
        return self._rows

    def _after(self, before: Row | None, new: Row, seen: int) -> Row:
        """A row after new tokens; `seen`: of its document."""
        if before is None or before.tokens + new.tokens != seen:  # another document has begun
            if new.tokens < seen:
                raise ValueError(
                    f"a row has read {seen} tokens, and its archive has the last {new.tokens} of "
                    "them: make a new cache with an archive, and read the text again."
                )
            new = new.last(seen)
            before = new.last(0)
        if before.parts != new.parts:
            raise ValueError(
                f"the archive has keys and values in {before.parts[0].dtype}, and this call "
                f"computes {new.parts[0].dtype}: read the whole text under one autocast."
            )
        file = None if self.file is None else BlockFile(self.file, new.block_bytes)
        return before.and_then(new, file)

    def after(self, call: Call) -> "Archive":
        """The archive after one more call."""
        after = Archive(self._rows, self.file, (*self._calls, call))
        if sum(each.ids.shape[1] for each in after._calls) >= PENDING_TOKENS:
            after.rows()
        return after

    def chosen(self, rows: Sequence[int]) -> "Archive":
        """The archive of a cache with these rows, by number; what these read stays in memory."""
        own = self.rows()
        return Archive([own[row] for row in rows])

    def at(self, file: Path | None) -> "Archive":
        """The archive whose one row goes on in this file, which nobody else may write, with the
        blocks that it has; `None`: in host memory."""
        rows = self.rows()
        if file is not None and file.exists():
            used = sum(row.block_bytes * len(row.blocks) for row in rows)
            os.truncate(file, min(used, file.stat().st_size))
        if file is not None and rows:
            [row] = rows
            there = BlockFile(file, row.block_bytes)
            blocks = [
                block
                if isinstance(block, Stored) and block.file == there and block.place == number
                else there.write(number, row.bytes_of([number])[0][None])[0]
                for number, block in enumerate(row.blocks)
            ]
            rows = (row._replace(blocks=tuple(blocks)),)
        return Archive(rows, file)

    def nbytes(self) -> int:
        """Bytes in host memory, each block once."""
        held = {id(part): part for row in self.rows() for part in (*row[:2], *row.blocks, row.tail)}
        return sum(part.nbytes for part in held.values() if isinstance(part, Tensor))


def saved(archive: Archive, path: Path) -> tuple[Archive, dict[str, Any], dict[str, Tensor]]:
    """What a memory file at this path says of an archive: the entry of its record, and tensors. The
    blocks are written beside it first, unless they are in one file there already; into one that has
    its name from their checksums, so that the older memory file keeps its own until it is replaced.
    And the archive, those of whose blocks that were in a file are in the new one."""
    before, tensors = archive.rows(), dict[str, Tensor]()
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
        places = torch.tensor([block.place for block in row.blocks], dtype=torch.long)
        sums = b"".join(block.sha256 for block in row.blocks)
        own = {"ids": row.ids, "eligible": row.eligible, "tail": row.tail, "places": places}
        own["sha256"] = torch.tensor([*sums], dtype=torch.uint8).view(-1, 32)
        tensors |= {f"archive.{number}.{name}": tensor for name, tensor in own.items()}
    names = (block.file.path.name for row in rows for block in row.blocks)
    suffix = next(names, own_name.name).removeprefix(own_name.name)
    parts = [[*part[:3], str(part.dtype).removeprefix("torch.")] for part in rows[0].parts]
    moved = [
        own._replace(
            blocks=tuple(
                new if isinstance(old, Stored) else old
                for old, new in zip(own.blocks, row.blocks, strict=True)
            )
        )
        for own, row in zip(before, rows, strict=True)
    ]
    return Archive(moved, archive.file), {"suffix": suffix, "parts": parts}, tensors


def name_of(path: Path) -> Path:
    """The name that a memory file has in the end, when its text is read."""
    return path.with_name(path.name.removesuffix(".partial"))


def archives_of(path: Path) -> list[Path]:
    """The files of blocks that are there of a memory file of this name."""
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
            os.replace(file.path, named)
    there = BlockFile(named, rows[0].block_bytes)
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
        found = tuple(Part(*part[:3], getattr(torch, part[3])) for part in entry["parts"])
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
        file = BlockFile(path.with_name(name_of(path).name + entry["suffix"]), size)
        sums = [bytes(each.tolist()) for each in held["sha256"]]
        stored = tuple(
            Stored(file, *pair) for pair in zip(held["places"].tolist(), sums, strict=True)
        )
        if stored:
            file.check(max(block.place for block in stored))
        rows.append(Row(held["ids"], held["eligible"], found, stored, held["tail"]))
    return Archive(rows)


def archive_bytes(config: Any, tokens: int) -> int:
    """Bytes that an archive of so many tokens takes, on a disk or in host memory, for a model of
    this configuration, in its dtype (`None`: torch's default)."""
    heads, *widths = key_heads(config)
    numbers = len(config.infini_layers) * heads * sum(widths)
    # and the token's id, and whether it may be recalled
    return tokens * (numbers * dtype_of(config).itemsize + 9)


def questions_of(question: Tensor | Sequence, rows: int) -> list[Tensor]:
    """The ids of the question of each row, `[tokens]`; ValueError where there are not as many."""
    given: Any = question
    one = all(isinstance(part, int) or getattr(part, "ndim", 1) == 0 for part in given)
    each = [torch.as_tensor(ids, dtype=torch.long).cpu() for ids in ([given] if one else given)]
    each = each * rows if len(each) == 1 else each
    if len(each) != rows or any(ids.dim() != 1 for ids in each):
        raise ValueError(
            f"question must be the ids of one question, [tokens], or of {rows}, one for each row "
            f"of the cache; got {len(each)} of {[*each[0].shape]}."
        )
    return each


class Recalled(NamedTuple):
    """What a question recalls of a row's document."""

    row: Row
    relevance: Tensor  # of its blocks, [`block_relevance`]

    def numbers(self, window: Window) -> tuple[Tensor, Tensor] | None:
        """The numbers of the tokens that fill the places of a window, and the ranks of their
        blocks, [`recalled_numbers`]; `None`: all that have left it are kept."""
        first, end = have_left(self.row.tokens, window)
        eligible, places = self.row.eligible, window.kept_tokens
        if int(eligible[first:end].sum()) <= places:
            return None
        return recalled_numbers(self.relevance, eligible, first, end, places)


def with_recalled(
    states: dict[int, InfiniState],
    windows: dict[int, Window],
    recalled: Sequence[Recalled],
    displaced: bool,
) -> dict[int, InfiniState]:
    """States that keep what questions recall, by layer. Blocks are read once for all layers.

    Args:
        states, windows: by layer; windows without places of kept tokens are left out.
        recalled: of each row.
        displaced: as of [`recall_score`].
    """
    distinct = {
        window: [each.numbers(window) for each in recalled] for window in {*windows.values()}
    }
    widest = distinct[max(distinct, key=lambda window: window.kept_tokens)]
    found = [
        {} if chosen is None else each.row.found(chosen[0])
        for each, chosen in zip(recalled, widest, strict=True)
    ]
    made = {}
    for layer, window in windows.items():
        state = states[layer]
        own, of_rows = Tokens.kept_in(state, window), []
        for number, (each, chosen) in enumerate(zip(recalled, distinct[window], strict=True)):
            if chosen is None:
                parts = own.key, own.value, own.score, own.position
                of_rows.append([part[number] for part in parts])
                continue
            key, value = each.row.taken(layer, chosen[0], found[number])
            score = recall_score(chosen[1], displaced).to(own.score.dtype)
            pairs = (score, own.score), (chosen[0], own.position)
            alike = [part.view(1, -1, 1).expand(own_part.shape[1:]) for part, own_part in pairs]
            of_rows.append([part.to(own.key.device) for part in (key, value, *alike)])
        key, value, score, position = (torch.stack(parts) for parts in zip(*of_rows, strict=True))
        # what a memory never takes in again needs no weight
        weight = None if own.log_weight is None else torch.zeros_like(own.log_weight)
        kept = Tokens(key, value, weight, score, position)
        made[layer] = kept.instead(state, window)
    return made
