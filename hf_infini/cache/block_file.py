"""A file of blocks of bytes, one after the other, of which any can be read by itself: it is checked
by its own checksum when it is read, so that nothing has to go through a large file first."""

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .files import KIND as MEMORY


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
        """Writes blocks, `[blocks, bytes]`, from this place on. After a power cut they are there
        only if [`BlockFile.sync`] came before it. OSError where they cannot be written."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(self.path, os.O_WRONLY | os.O_CREAT, 0o666)
        try:
            with os.fdopen(handle, "wb") as file:
                file.seek(place * self.block_bytes)
                file.write(bytes_of(blocks))
        except OSError as error:
            raise OSError(
                f"{self.path} cannot take {blocks.nbytes:,} bytes more: {error}. What was read "
                "before is kept; free some space, or read without an archive."
            ) from error
        sums = (hashlib.sha256(bytes_of(block)).digest() for block in blocks)
        return [Stored(self, place + number, each) for number, each in enumerate(sums)]

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


def bytes_of(block: Tensor) -> Any:
    """What a file or a hash takes of a `block`, without a copy."""
    return block.numpy()
