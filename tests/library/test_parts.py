"""What a kill leaves beside an output goes with the next that writes it, and what another process
writes at that time does not."""

import multiprocessing
import os
import signal
from pathlib import Path

import pytest

from hf_infini.cache.tensor_files import part_of, write_files
from hf_infini.tools.outputs import replacing

pytest.importorskip("fcntl")
context = multiprocessing.get_context("fork")


def write_file(out: Path) -> None:
    write_files(out.parent, {out.name: b"content"})


def write_several(out: Path) -> None:
    write_files(out.parent, {"first": b"content", out.name: b"content"})


def replace_file(out: Path) -> None:
    with replacing(out) as part, part.open("wb") as file:
        os.fsync(file.fileno())


def replace_folder(out: Path) -> None:
    with replacing(out) as part:
        part.mkdir()
        (part / "inside").write_bytes(b"content")
        os.fsync(os.open(part, os.O_RDONLY))


WRITERS = [write_file, write_several, replace_file, replace_folder]


def parts(out: Path) -> list[Path]:
    return [*out.parent.glob("*.part")]


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("killed_in", ["mkdir", "fsync", "replace"])
def test_a_part_that_a_kill_leaves_is_removed_by_the_next(write, killed_in, tmp_path):
    out = tmp_path / "out [1].x"  # with letters of a pattern
    call = getattr(os, killed_in)

    def kill(*args):
        if killed_in == "mkdir":
            call(*args)
        os.kill(os.getpid(), signal.SIGKILL)

    def writer():
        setattr(os, killed_in, kill)
        write(out)

    process = context.Process(target=writer)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL and not out.exists()
    assert [path.name[: len(out.name)] for path in parts(out)] == [out.name]
    (tmp_path / f"{out.name}.0123abcd.part").write_bytes(b"of an earlier version")
    others = [tmp_path / name for name in (f"{out.name}.mine.part", "out1.0123abcd.part")]
    for other in others:
        other.touch()
    write(out)
    assert out.exists() and sorted(parts(out)) == sorted(others)


@pytest.mark.parametrize("write", WRITERS)
def test_a_part_that_is_being_written_stays(write, tmp_path):
    out = tmp_path / "out"
    with part_of(out) as part:
        process = context.Process(target=write, args=(out,))
        process.start()
        process.join()
        assert process.exitcode == 0 and parts(out) == [part]
    assert not parts(out) and out.exists()
