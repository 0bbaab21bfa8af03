"""A text through its memory file: loaded where the file is there, read and written where not. While
it is read, a part beside it has what was read so far, from which the next process goes on."""

import contextlib
import copy
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from filelock import FileLock, Timeout
from torch import Tensor

from ..cache.archive_files import archive_bytes, archives_of
from ..cache.cache import InfiniCache, text_after
from ..cache.files import MemoryFileError

# Has a cache read ids `[tokens]` from a number on, and calls a function from time to time, and when
# it is interrupted
ReadOn = Callable[[InfiniCache, Tensor, int, Callable[[], None]], InfiniCache]


def remove_files(file: Path) -> None:
    """Removes a memory `file`, the part of it that was read, and its archives."""
    for path in (file, _partial(file), *archives_of(file)):
        path.unlink(missing_ok=True)


def _partial(file: Path) -> Path:
    """What was read so far, while the text is read."""
    return file.with_name(f"{file.name}.partial")


class TextFile(NamedTuple):
    """The memory file of a text."""

    file: Path
    model: Any  # that reads it
    described: dict[str, Any]  # what [`describe_model`] says of the model
    before: InfiniCache  # after which the text goes on
    ids: Tensor  # `[tokens]`, of what is new
    sha256: str  # of the whole text
    tokenizer: Tensor  # `[1, 32]`, the bytes of its fingerprint

    @property
    def partial(self) -> Path:
        """What was read so far, while the text is read."""
        return _partial(self.file)

    @property
    def lock(self) -> Path:
        """Held by the process that reads the text."""
        return self.file.with_name(f"{self.file.name}.lock")

    def cache(self, read_on: ReadOn) -> InfiniCache:
        """The cache after the text, from the file, or from the model, by `read_on`, and then the
        file is written. Errors as of [`Reader.read`]."""
        if not self.file.exists():
            # now, if it cannot be made, and not after hours
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with self._only_reader():
                if not self.file.exists():
                    return self._read(read_on)
        cache = self._load(self.file)
        if cache.get_seq_length() != self.before.get_seq_length() + len(self.ids):
            raise MemoryFileError(f"{self.file} holds a part of the text: delete it.")
        if self.lock.exists():  # of a reader that was killed when it had written the file
            with contextlib.suppress(OSError), self._only_reader():
                pass
        return cache

    def _read(self, read_on: ReadOn) -> InfiniCache:
        """The cache after the text, which the model reads, and the file, which is then written."""
        if self.partial.is_dir():
            raise OSError(
                f"{self.partial} is a folder, and what is read so far goes there: remove it."
            )
        cache, done = copy.copy(self.before), 0
        try:
            if self.partial.exists():
                cache = self._load(self.partial)
                done = cache.get_seq_length() - self.before.get_seq_length()
        except (MemoryFileError, OSError) as error:
            warnings.warn(f"reading from the start, for {error}", stacklevel=2)
        if cache.archive is not None:
            self._check_room(len(self.ids) - done)
            place = self.file.absolute().with_name(f"{self.file.name}.archive")
            cache.archive = cache.archive.at(place)

        def save() -> None:
            if cache.text:
                cache.text["tokenizer"] = self.tokenizer.to(cache.text["text_end"].device)
            cache.save_pretrained(self.partial, self.described, text_sha256=[self.sha256])

        read_on(cache, self.ids, done, save)
        save()
        os.replace(self.partial, self.file)
        if cache.archive is not None:
            cache.archive = cache.archive.at(None)  # what comes next is not of this file
        return cache

    def _load(self, file: Path) -> InfiniCache:
        """What a file or a part has of the text, all or the first."""
        archived = self.before.archived
        cache = InfiniCache.from_pretrained(
            file,
            self.model,
            text_sha256=[self.sha256],
            description=self.described,
            archive=bool(archived),
        )
        if archived and cache.archive is None:
            raise MemoryFileError(
                f"{file} has no archive, from which questions could recall anything: delete it, or "
                "read with archive=False."
            )
        if cache.archived != archived:
            raise MemoryFileError(
                f"{file} has archive={cache.archived!r}, and archive={archived!r} is asked for: "
                f"read it {'without' if archived == 'int8' else 'with'} archive='int8' "
                "(--archive-int8), give another name, or delete it."
            )
        done = cache.get_seq_length() - self.before.get_seq_length()
        known = {"tokenizer": self.tokenizer}
        if 0 <= done <= len(self.ids):
            end = self.before.text.get("text_end", self.ids)
            known |= text_after(self.before.text, self.ids[None, :done].to(end.device))
        # a file of earlier versions has the last ids only
        if "text_end" not in known or not all(
            torch.equal(cache.text[name].cpu(), part.cpu())
            for name, part in known.items()
            if name in cache.text
        ):
            raise MemoryFileError(
                f"{file} is the memory of this text after another beginning, or by another "
                "tokenizer: give another name, or delete it."
            )
        return cache

    def _check_room(self, tokens: int) -> None:
        """OSError where the disk has no room for the archive of so many `tokens` more."""
        folder, archived = self.file.parent, self.before.archived
        needed = archive_bytes(self.model.config, tokens, archived)
        smaller = "" if archived == "int8" else "in 8 bits (archive='int8', --archive-int8), or "
        free = shutil.disk_usage(folder).free
        if needed > free:
            raise OSError(
                f"the archive of this text takes {needed / 1e6:,.0f} MB, and {folder} has "
                f"{free / 1e6:,.0f} MB left: free some, give a file on another disk, or read "
                f"{smaller}without an archive (archive=False, --no-archive)."
            )

    @contextlib.contextmanager
    def _only_reader(self) -> Iterator[None]:
        """Within it, no other process writes the file or its part: waits for one that does, or was
        killed. After it, nothing is beside a finished file."""
        lock = FileLock(self.lock)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            warnings.warn(
                f"another process reads this text into {self.file}: waiting for it", stacklevel=2
            )
            lock.acquire()
        try:
            yield
        finally:
            if self.file.exists():
                self.partial.unlink(missing_ok=True)
                with contextlib.suppress(OSError):  # on Windows an open file cannot be removed
                    self.lock.unlink(missing_ok=True)
            lock.release()
