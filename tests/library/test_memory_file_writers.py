"""Memory files and those who write them: several at a time, those that fail, and what has the file's name already."""

import multiprocessing
import os
import stat

import pytest
import torch

from hf_infini.cache import files as memory_files
from hf_infini.cache.files import describe_model, read_memory_file, read_record, write_memory_file
from models import infini_gpt2

processes = multiprocessing.get_context("fork" if "fork" in multiprocessing.get_all_start_methods() else None)


@pytest.fixture(scope="module")
def record():
    return {"model": describe_model(infini_gpt2()), "columns": 1, "tokens_seen": [1], "text_sha256": None}


@pytest.fixture
def file(tmp_path):
    return tmp_path / "memory.safetensors"


def write(file, record, number=1) -> None:
    write_memory_file(file, {"numbers": torch.full((3,), number)}, record | {"columns": number})


def write_often(file, record, number) -> None:
    for _ in range(150):
        write_memory_file(file, {"numbers": torch.full((50_000,), number)}, record | {"columns": number})


def test_a_reader_finds_a_whole_file_whoever_writes(file, record):
    """Real processes: neither a file of which a part is another's, nor the header of one and the tensors of another."""
    write_memory_file(file, {"numbers": torch.full((50_000,), 1)}, record)
    writers = [processes.Process(target=write_often, args=(file, record, number)) for number in (2, 3)]
    for writer in writers:
        writer.start()
    reads = []
    while any(writer.is_alive() for writer in writers):
        found, tensors = read_memory_file(file)
        assert (tensors["numbers"] == found["columns"]).all()
        reads.append(found["columns"])
        assert read_record(file)["columns"] in (1, 2, 3)
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert set(reads) >= {2, 3}  # both have written while it was read
    assert list(file.parent.iterdir()) == [file]


@pytest.mark.parametrize("mask, mode", [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_permissions_are_those_of_any_new_file(file, record, mask, mode):
    before = os.umask(mask)
    try:
        write(file, record)
    finally:
        os.umask(before)
    assert stat.S_IMODE(file.stat().st_mode) == mode


def test_folders_and_links_of_the_name(file, record, tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(memory_files.MemoryFileError, match="folder is a folder: give the name of a file, such as .*memory"):
        write(tmp_path / "folder", record)
    write(tmp_path / "target", record)
    before = (tmp_path / "target").read_bytes()
    for target in ("target", "nowhere"):
        file.unlink(missing_ok=True)
        file.symlink_to(tmp_path / target)
        write(file, record, 2)
        assert not file.is_symlink() and read_record(file)["columns"] == 2
    assert (tmp_path / "target").read_bytes() == before and not (tmp_path / "nowhere").exists()


def test_a_write_that_fails_leaves_the_old_file_and_nothing_beside_it(file, record, monkeypatch):
    write(file, record)
    monkeypatch.setattr(memory_files.os, "replace", lambda *names: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write(file, record, 2)
    assert read_record(file)["columns"] == 1 and list(file.parent.iterdir()) == [file]


def test_a_record_that_no_reader_would_take_is_not_written(file, record):
    for entry, value in {"model": {}, "columns": -1, "tokens_seen": [1.0], "text_sha256": "abc"}.items():
        with pytest.raises(ValueError, match=f"this is not a record of a memory: {entry} is "):
            write_memory_file(file, {}, record | {entry: value})
    assert not list(file.parent.iterdir())
