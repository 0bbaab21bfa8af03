"""A file of results to which one line after the other is added, each with its checksum: a kill
costs at most the line that was being written."""

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from cli import UserError

from .stages import OWN, sealed, to_json, write_text


class Lines:
    """Records in a file, one a line, the first of them what they depend on.

    Args:
        file: JSON lines, or none yet.
        identity: JSON-safe; a file of another one is not gone on with.

    Attributes:
        records: those in the file, in their order. A line that is damaged is passed over and said,
            so that it is measured again, and is no longer in the file.
    """

    def __init__(self, file: Path, identity: dict):
        self.file, self.records = file, []
        first = {"identity": json.loads(json.dumps(identity))}
        if not file.exists():
            write_text(file, _line(first))
            return
        found, damaged = [], []
        for number, line in enumerate(file.read_bytes().split(b"\n"), start=1):
            if line:
                record = _read(line)
                found.append(record) if record is not None else damaged.append(number)
        if not found or "identity" not in found[0]:
            raise UserError(
                f"{file} does not begin with what its results depend on: it is no file of this "
                "recipe, or damaged; move it away or choose another --out"
            )
        before = found[0]["identity"]
        names = sorted(before.keys() | first["identity"].keys())
        other = [name for name in names if before.get(name) != first["identity"].get(name)]
        if other:
            raise UserError(
                f"{file} was measured with other options ({', '.join(other)}): choose another "
                "--out, or give the same again"
            )
        self.records = found[1:]
        if damaged:
            print(
                f"{file}: line {', '.join(map(str, damaged))} is damaged: measuring it again",
                file=sys.stderr,
            )
            write_text(file, "".join(map(_line, found)))

    def add(self, record: dict) -> None:
        """Adds a record, which is on the disk when this returns."""
        with self.file.open("ab") as file:
            file.write(_line(record).encode())
            file.flush()
            os.fsync(file.fileno())
        self.records.append(record)


@contextlib.contextmanager
def only_writer(file: Path) -> Iterator[None]:
    """Within it, no other process that asks writes the file; UserError where one does."""
    from filelock import FileLock, Timeout

    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(file.with_name(f"{file.name}.lock"), timeout=0):
            yield
    except Timeout:
        raise UserError(
            f"{file}: another run is writing there; wait for it or choose another --out"
        ) from None


def _line(record: dict) -> str:
    content = {name: value for name, value in record.items() if name != OWN}
    return to_json(sealed(content), "a result") + "\n"


def _read(line: bytes) -> dict | None:
    """The record of a line, without its checksum; `None` where it is damaged."""
    try:
        record = json.loads(line)
        checksum = record.pop(OWN)
        return record if sealed(record)[OWN] == checksum else None
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        return None
