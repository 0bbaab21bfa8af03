"""Files and folders that the command writes: never over what it reads, and whole or not at all."""

import contextlib
import os
import tempfile
from collections.abc import Generator
from pathlib import Path

from ..cache.tensor_files import part_of


@contextlib.contextmanager
def replacing(out: Path) -> Generator[Path]:
    """A path for a file or a folder that becomes `out` when the block has written it, and is
    removed after an error or Ctrl-C. A kill leaves a [`part_of`] `out`, which the next that writes
    it removes; `out` is as it was. Of a link, what it leads to is replaced. OSError where it cannot
    be written, or where `out` is a folder with files."""
    out = Path(os.path.realpath(out))
    with part_of(out) as part:
        yield part / out.name
        os.replace(part / out.name, out)


def check_output(option: str, out: Path, *inputs: str | Path) -> None:
    """Makes the folders above `out`. ValueError, which names the `option`, where `out` is one of
    the inputs, or a device; OSError where nothing can be written there: now, and not after
    hours."""
    for given in inputs:
        # not `Path.resolve`, which fails where links go round
        if Path(given).exists() and os.path.realpath(out) == os.path.realpath(given):
            raise ValueError(f"{option} {out} is {given}, which is read: give another place.")
    if out.exists() and not (out.is_file() or out.is_dir()):
        raise ValueError(f"{option} {out} is no file and no folder: give another place.")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=out.parent):
        pass
