"""Files and folders that appear when they are complete, also where two writers make the same
one."""

import json
import os

import pytest

from cli import UserError
from support import preparation, stages


def test_one_writer_of_a_file_inside_another(tmp_path):
    file = tmp_path / "result.json"
    with stages.new_file(file) as part:
        part.write_text("outer")
        stages.write_json(file, {"inner": 1})
        assert json.loads(file.read_text()) == {"inner": 1} and part.read_text() == "outer"
    assert file.read_text() == "outer" and os.listdir(tmp_path) == ["result.json"]


def test_an_error_leaves_the_old_file(tmp_path):
    stages.write_text(tmp_path / "a", "old")
    with pytest.raises(ZeroDivisionError), stages.new_file(tmp_path / "a") as part:
        part.write_text("half")
        raise ZeroDivisionError
    assert (tmp_path / "a").read_text() == "old" and os.listdir(tmp_path) == ["a"]


def test_one_writer_of_a_stage_inside_another(tmp_path):
    folder = tmp_path / "rows"

    def build(partial, text, also=lambda: None):
        (partial / "first").write_text(text)
        also()
        (partial / "second").write_text(text)
        return {"text": text}

    def inner():
        preparation.run_stage(folder, {"text": "inner"}, lambda partial: build(partial, "inner"))
        assert {file.name: file.read_text() for file in folder.glob("*d")} == {"second": "inner"}
        assert (folder / "first").read_text() == "inner"

    record = preparation.run_stage(
        folder, {"text": "outer"}, lambda partial: build(partial, "outer", inner)
    )
    assert record["result"] == {"text": "outer"} and not record["reused"]
    assert (folder / "first").read_text() == (folder / "second").read_text() == "outer"
    assert os.listdir(tmp_path) == ["rows"]
    assert preparation.run_stage(folder, {"text": "outer"}, build)["reused"]


def test_a_lock_clears_what_was_left_and_keeps_others_out(tmp_path):
    left = stages._part_of(tmp_path / "rows"), stages._part_of(tmp_path / ".stages" / "documents")
    for folder in left:
        folder.mkdir(parents=True)
    part = stages._part_of(tmp_path / "manifest.json")
    for file in (part, tmp_path / "mine.part"):
        file.write_text("{")
    with stages.locked_folder(tmp_path):
        assert (
            not any(path.exists() for path in (*left, part)) and (tmp_path / "mine.part").exists()
        )
        with (
            pytest.raises(UserError, match="another run is writing there"),
            stages.locked_folder(tmp_path),
        ):
            pass
    with stages.locked_folder(tmp_path) as held:
        assert held == tmp_path
