"""Files and folders that the command writes: never over what it reads, and whole or not at all."""

import contextlib
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(out: Path) -> Iterator[Path]:
    """A path beside `out`, which becomes `out` when the block has written a file or a folder there,
    and is removed after an error or Ctrl-C. After a kill it is left, named `OUT.….part`, and `out`
    is as it was. OSError where it cannot be written, or where `out` is a folder with files."""
    part = out.with_name(f"{out.name}.{uuid.uuid4().hex[:8]}.part")
    try:
        yield part
        os.replace(part, out)
    except BaseException:
        if part.is_dir():
            shutil.rmtree(part)
        part.unlink(missing_ok=True)
        raise


def check_output(option: str, out: Path, *inputs: str | Path) -> None:
    """Makes the folders above `out`. ValueError where `out` is one of the inputs; OSError where
    nothing can be written there: now, and not after hours."""
    for given in inputs:
        if Path(given).exists() and out.resolve() == Path(given).resolve():
            raise ValueError(f"{option} {out} is {given}, which is read: give another place.")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=out.parent):
        pass
