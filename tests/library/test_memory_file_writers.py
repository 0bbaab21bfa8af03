"""Memory files and those who write them: several at a time, those that fail, and what has the file's name already."""

import multiprocessing

import pytest
import torch

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


def test_folders_and_links_of_the_name(file, record, tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        write(tmp_path / "folder", record)
    write(tmp_path / "target", record)
    before = (tmp_path / "target").read_bytes()
    for target in ("target", "nowhere"):
        file.unlink(missing_ok=True)
        file.symlink_to(tmp_path / target)
        write(file, record, 2)
        assert not file.is_symlink() and read_record(file)["columns"] == 2
    assert (tmp_path / "target").read_bytes() == before and not (tmp_path / "nowhere").exists()
