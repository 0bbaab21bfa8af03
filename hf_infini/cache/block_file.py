"""A file of blocks of bytes, one after the other, of which any can be read by itself: it is checked
by its own checksum when it is read, so that nothing has to go through a large file first."""

import contextlib
import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .files import KIND as MEMORY

HEADER = b"blocks of an archive of hf_infini\n".ljust(64, b"\0")
GONE = "is gone; archive=False (--no-archive) loads the memory of its text without it"


class Stored(NamedTuple):
    """A block in a file: its place there, counted in blocks, and its checksum."""

    file: "BlockFile"
    place: int
    sha256: bytes


class BlockFile(NamedTuple):
    """A file of blocks, all of the same size, behind a header by which it is known."""

    path: Path
    block_bytes: int
    begins: int = len(HEADER)  # 0: without one, as earlier versions wrote it

    @classmethod
    def at(cls, path: Path, block_bytes: int) -> "BlockFile":
        """The file at this path, as it is there or will be, of blocks of `block_bytes`."""
        return cls(path, block_bytes, len(HEADER) if is_free(path) or is_ours(path) else 0)

    def write(self, place: int, blocks: Tensor) -> list[Stored]:
        """Writes blocks, `[blocks, bytes]`, from this place on. After a power cut they are there
        only if [`BlockFile.sync`] came before it. OSError where they cannot be written."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(self.path, os.O_WRONLY | os.O_CREAT, 0o666)
        try:
            with os.fdopen(handle, "wb") as file:
                if self.begins and not file.seek(0, os.SEEK_END):
                    file.write(HEADER)
                file.seek(self._offset(place))
                file.write(bytes_of(blocks))
        except OSError as error:
            raise OSError(
                f"{self.path} cannot take {blocks.nbytes:,} bytes more: {error}. What was read "
                "before is kept; free some space, or read without an archive."
            ) from error
        sums = (hashlib.sha256(bytes_of(block)).digest() for block in blocks)
        return [Stored(self, place + number, each) for number, each in enumerate(sums)]

    def _offset(self, place: int) -> int:
        return self.begins + place * self.block_bytes

    def keep(self, blocks: int) -> None:
        """Cuts off what is behind so many blocks, if the file is there."""
        with contextlib.suppress(FileNotFoundError):
            os.truncate(self.path, min(self._offset(blocks), self.path.stat().st_size))

    def sync(self) -> None:
        """Waits until the disk has what was written. OSError where it cannot take it."""
        with self.path.open("r+b") as file:
            os.fsync(file.fileno())

    def read(self, blocks: Iterable[Stored]) -> list[Tensor]:
        """The bytes of blocks of this file. MemoryFileError where it is gone, or damaged there."""
        found = []
        try:
            with self.path.open("rb") as file:
                for block in blocks:
                    file.seek(self._offset(block.place))
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
            MEMORY.refuse(self.path, GONE)
        return found

    def check(self, place: int) -> None:
        """MemoryFileError where the file has no block at this place."""
        try:
            size = self.path.stat().st_size
        except OSError:
            MEMORY.refuse(self.path, GONE)
        if size < self._offset(place + 1):
            MEMORY.refuse(self.path, f"is cut off: it has {size:,} bytes only")


def is_free(path: Path) -> bool:
    """Whether nothing of anybody is at a path: no file, or an empty one, as a kill may leave it."""
    return not path.exists() or path.is_file() and not path.stat().st_size


def is_ours(path: Path) -> bool:
    """Whether the file at a `path` begins as those that are written here."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(HEADER)) == HEADER


def check_free(path: Path) -> None:
    """FileExistsError where a file or folder at a path is no file of blocks, which may not be
    replaced."""
    if not (is_free(path) or is_ours(path)):
        raise FileExistsError(
            f"{path} is there, and is no archive of hf_infini; what is read would go there: move "
            "it, give the memory file another name, or read without an archive (archive=False, "
            "--no-archive)."
        )


def bytes_of(block: Tensor) -> Any:
    """What a file or a hash takes of a `block`, without a copy."""
    return block.numpy()
