"""Where a file becomes checked tensors, and tensors a file: memory files and adapters.

A file is read once and whole. What it holds is compared with what it must hold (entries and types
of its JSON record, a checksum, the tensors' names, shapes and dtypes, finite numbers) before anyone
uses any of it; a [`FileKind`] says in one sentence what is wrong and what to do. Files are written
under another name first, so that a reader finds the old ones or the new ones.
"""

import contextlib
import glob
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Collection, Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any, NoReturn

import torch
from safetensors.torch import load
from torch import Tensor

try:
    import fcntl
except ImportError:  # on Windows
    fcntl: Any = None

Place = str | os.PathLike
NAMES = {dict: "an object", list: "a list", str: "a text", int: "a whole number", NoneType: "null"}
NAMES |= {bool: "true or false", float: "a number"}


@dataclass(frozen=True)
class FileKind:
    """A kind of files: its `name`, the `remedy` for a file that cannot be used, and the `error`
    that says so."""

    name: str
    remedy: str
    error: type[ValueError] = ValueError

    def refuse(self, file: Place, reason: object) -> NoReturn:
        """Raises the error, in one line: what is wrong with the `file`, the `reason`, such as "is
        damaged", and the remedy."""
        raise self.error(f"{file} {' '.join(str(reason).split())}: {self.remedy}.")

    def object_of(self, file: Place, content: bytes | str) -> dict:
        """The JSON object that a `file` holds; `content`: of the file."""
        try:
            found = json.loads(content)
        except (ValueError, RecursionError) as error:
            self.refuse(file, f"is damaged or no {self.name} ({type(error).__name__}: {error})")
        if type(found) is not dict:
            self.refuse(
                file, f"is no {self.name}: it must hold an object, and holds {NAMES[type(found)]}"
            )
        return found

    def check_entries(
        self,
        file: Place,
        record: Mapping,
        wanted: Mapping[str, Any],
        optional: Collection[str] = (),
    ) -> None:
        """Refuses the `record` of a `file` that has not the `wanted` entries, all but the
        `optional` ones, each of its type or one of its types."""
        if unknown := sorted(record.keys() - wanted.keys()):
            self.refuse(
                file,
                f"has unknown entries {', '.join(unknown)} (known are {', '.join(wanted)}) and is "
                "damaged or of a newer version of hf_infini",
            )
        if missing := [name for name in wanted if name not in {*record, *optional}]:
            self.refuse(file, f"is damaged: it has no {', '.join(missing)}")
        for name, value in record.items():
            types = wanted[name] if isinstance(wanted[name], tuple) else (wanted[name],)
            if type(value) not in types:
                must = " or ".join(NAMES[each] for each in types)
                self.refuse(file, f"is damaged: {name} must be {must}, and is {NAMES[type(value)]}")

    def tensors_of(self, file: Place, content: bytes) -> tuple[dict[str, Tensor], dict[str, str]]:
        """The tensors of a safetensors `file`, on the CPU, and its metadata; `content`: of the
        file."""
        try:
            header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
            return load(content), dict(header.get("__metadata__") or {})
        # safetensors and torch have no common class for what a header may say
        except Exception as error:
            self.refuse(file, f"is damaged or no {self.name} ({type(error).__name__}: {error})")

    def check_finite(self, file: Place, tensors: Mapping[str, Tensor]) -> None:
        """Refuses a `file` with `tensors` that have numbers that are not finite."""
        for name, tensor in tensors.items():
            if tensor.is_floating_point():
                # what is finite in float8 and its kind is finite in float32
                wide = tensor.float() if tensor.itemsize == 1 else tensor
                if count := int((~wide.isfinite()).sum()):
                    self.refuse(
                        file,
                        f"cannot be used: {name} has numbers that are not finite "
                        f"({count:,} of {tensor.numel():,})",
                    )

    def check_shapes(
        self, file: Place, tensors: Mapping[str, Tensor], wanted: Mapping[str, Tensor], reason: str
    ) -> None:
        """Refuses a `file` whose `tensors` have not the names and shapes of the `wanted` ones, and
        floating point, or the same dtype, where those have it; `reason`: who says so."""
        for name in sorted(tensors.keys() | wanted.keys()):
            forms = [_form(of.get(name)) for of in (tensors, wanted)]
            if forms[0] != forms[1]:
                self.refuse(
                    file,
                    f"does not have what {reason}: {name} is {forms[0] or 'missing'} and must "
                    f"{'be ' + forms[1] if forms[1] else 'not be there'}",
                )


def _form(tensor: Tensor | None) -> str:
    """Its shape, and its dtype unless that is of floating point, in words."""
    if tensor is None:
        return ""
    dtype = "" if tensor.is_floating_point() else f" {tensor.dtype}".replace("torch.", "")
    return f"{list(tensor.shape)}{dtype}"


def checksum(record: Mapping, tensors: Mapping[str, Tensor] | None = None) -> str:
    """SHA-256, in hexadecimal, of a JSON object, the `record`, however it is laid out, and of
    `tensors`."""
    digest = hashlib.sha256(json.dumps(record, sort_keys=True).encode())
    add_tensors(digest, tensors or {})
    return digest.hexdigest()


def add_tensors(digest, tensors: Mapping[str, Tensor]) -> None:
    """Gives a hash of hashlib, `digest`, the names, dtypes, shapes and bytes of `tensors`, in the
    order of their names."""
    for name in sorted(tensors):
        tensor = tensors[name].detach().contiguous().cpu()
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy())


def copies_of(tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """On the CPU, contiguous and whole: models and caches share tensors, and views of larger ones.
    `dtype`: theirs; `None`: their own."""
    form: dict[str, Any] = {"device": "cpu", "copy": True, "memory_format": torch.contiguous_format}
    return {
        name: tensor.detach().to(dtype=dtype or tensor.dtype, **form)
        for name, tensor in tensors.items()
    }


def write_files(folder: Path, contents: Mapping[str, bytes]) -> None:
    """Writes files, the bytes in `contents` by their names, in this order, into a `folder`, which
    is made. Each is whole on the disk, in a [`part_of`] the last, before the first gets its name.
    Of several, the last is the one that says that they go together: an old one is taken away
    before. OSError where one cannot be written; old files are still there."""
    folder.mkdir(parents=True, exist_ok=True)
    last = folder / [*contents][-1]
    with part_of(last) as part:
        for name, content in contents.items():
            with (part / name).open("xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())  # the content reaches the disk before the name does
        if len(contents) > 1:
            last.unlink(missing_ok=True)
        for name in contents:
            os.replace(part / name, folder / name)


@contextlib.contextmanager
def part_of(out: Path) -> Generator[Path]:
    """A new folder beside `out`, named `OUT.….part`, to write what becomes `out`; it is removed in
    the end. After a kill it is left, and the next process that writes `out` removes it: each locks
    its own while it lives, but for Windows, which has no such locks."""
    for left in out.parent.glob(f"{glob.escape(out.name)}.{'[0-9a-f]' * 8}.part"):
        with _locked(left, wait=False) as held:
            if held:
                _remove(left)
    with contextlib.ExitStack() as stack:
        while True:
            part = out.with_name(f"{out.name}.{uuid.uuid4().hex[:8]}.part")
            part.mkdir()
            stack.enter_context(_locked(part, wait=True))
            if part.exists():  # and was not taken for one that is left, before it was locked
                break
        stack.callback(_remove, part)
        yield part


@contextlib.contextmanager
def _locked(path: Path, wait: bool) -> Generator[bool]:
    """Whether this process has a lock on a file or folder, which it gives back after the block."""
    handle, held = None, False
    with contextlib.suppress(OSError, AttributeError):
        handle = os.open(path, os.O_RDONLY)
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        held = True
    try:
        yield held
    finally:
        if handle is not None:
            os.close(handle)


def _remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError):  # a file, as of earlier versions
        path.unlink(missing_ok=True)
