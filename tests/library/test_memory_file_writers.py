"""Memory files and those who write them: several at a time, killed ones, and what has the file's name already."""

import multiprocessing
import os
import stat
import time

import pytest
import torch

from hf_infini.cache import files as memory_files
from hf_infini.cache.files import delete_memory_file, describe_model, read_memory_file, read_record, write_memory_file
from models import infini_gpt2

LEFT = "memory.safetensors.0123456789abcdef.part"  # as a killed writer leaves it
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


def test_a_link_where_a_temporary_file_could_be_is_not_followed(file, record, tmp_path, monkeypatch):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    names = ["0" * 16, "1" * 16]
    for name in (f"{file.name}.part", f"{file.name}.{names[0]}.part"):
        (tmp_path / name).symlink_to(victim)
    write(file, record)
    monkeypatch.setattr(memory_files.secrets, "token_hex", lambda count: names[0])
    with pytest.raises(memory_files.MemoryFileError, match="File exists"):  # even where the name was guessed
        write(file, record, 2)
    assert read_record(file)["columns"] == 1 and victim.read_text() == "precious"


@pytest.mark.parametrize("tidy", [write, lambda file, record: delete_memory_file(file)], ids=["write", "delete"])
def test_what_a_killed_writer_left_goes_and_a_live_writer_stays(file, record, tidy, tmp_path):
    pytest.importorskip("fcntl")
    for name in (LEFT, "other.safetensors.0123456789abcdef.part", "memory.safetensors.part.txt"):
        (tmp_path / name).write_bytes(b"half")
    (tmp_path / "memory.safetensors.ffffffffffffffff.part").mkdir()
    live, opened = memory_files._new_part(file)
    with opened:
        tidy(file, record)
        kept = {path.name for path in tmp_path.iterdir()} - {file.name}
        others = {"other.safetensors.0123456789abcdef.part", "memory.safetensors.part.txt"}
        assert kept == others | {"memory.safetensors.ffffffffffffffff.part", live.name}
    tidy(file, record)  # it was killed
    assert not live.exists()


def begin_to_write(file, begun) -> None:
    kept = memory_files._new_part(file)
    begun.set()
    time.sleep(100)
    kept[1].close()


def test_a_process_that_is_killed_while_it_writes_leaves_nothing_for_long(file, record, tmp_path):
    """A real one: the lock goes with the process."""
    pytest.importorskip("fcntl")
    begun = processes.Event()
    writer = processes.Process(target=begin_to_write, args=(file, begun))
    writer.start()
    try:
        assert begun.wait(100)
        write(file, record)
        assert len(list(tmp_path.iterdir())) == 2
    finally:
        writer.kill()
        writer.join()
    write(file, record)
    assert list(tmp_path.iterdir()) == [file]


def test_a_writer_whose_file_is_taken_for_a_leftover_makes_another(file, record, monkeypatch):
    """Between its creation and its lock a temporary file looks like one that a killed writer left."""
    fcntl, tidied = pytest.importorskip("fcntl"), []
    lock = fcntl.flock

    def late(opened, kind):
        if kind == fcntl.LOCK_EX and not tidied:
            tidied.append(opened.name)
            memory_files._delete_leftovers(file)
        lock(opened, kind)

    monkeypatch.setattr(memory_files.fcntl, "flock", late)
    write(file, record)
    assert tidied and not os.path.exists(tidied[0]) and read_record(file)["columns"] == 1


@pytest.mark.parametrize("mask, mode", [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_permissions_are_those_of_any_new_file(file, record, mask, mode):
    before = os.umask(mask)
    try:
        write(file, record)
    finally:
        os.umask(before)
    assert stat.S_IMODE(file.stat().st_mode) == mode


def test_without_locks_it_writes_and_tidies_nothing_up(file, record, tmp_path, monkeypatch):
    """As on Windows, where an open file cannot be renamed: no file is open when it gets its name."""
    monkeypatch.setattr(memory_files, "fcntl", None)
    (tmp_path / LEFT).write_bytes(b"half")
    write(file, record)
    delete_memory_file(tmp_path / "nothing")
    assert read_record(file)["columns"] == 1 and {path.name for path in tmp_path.iterdir()} == {file.name, LEFT}


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
    file.unlink()
    file.symlink_to(tmp_path / "target")
    delete_memory_file(file)
    assert {path.name for path in tmp_path.iterdir()} == {"folder", "target"}


def test_a_record_that_no_reader_would_take_is_not_written(file, record):
    for entry, value in {"model": {}, "columns": -1, "tokens_seen": [1.0], "text_sha256": "abc"}.items():
        with pytest.raises(ValueError, match=f"this is not a record of a memory: {entry} is "):
            write_memory_file(file, {}, record | {entry: value})
    assert not list(file.parent.iterdir())
