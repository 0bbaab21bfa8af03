"""The start of a run: one process at a time holds its folder, and a start that came to nothing can
be tried again."""

import json

import pytest
from filelock import FileLock

from ranks import on_ranks, run_as_rank
from running import load_recipe, prepared_data, self_options

train = load_recipe("train")


def options(base, out) -> list[str]:
    return [*map(str, self_options(prepared_data(base))), "--max_steps", "1", "--out", str(out)]


@pytest.mark.slow
def test_all_processes_of_a_launch_learn_that_the_folder_is_held(base, tmp_path):
    (tmp_path / ".stages").mkdir()
    command = [*options(base, tmp_path), "--batch_size", "2"]
    with FileLock(tmp_path / ".stages" / "lock"):
        # Not by a launcher, which would end the second process as soon as the first has failed
        answers = on_ranks(run_as_rank, 2, "train", command)
    for (done,) in answers:
        assert (
            done.returncode == 1 and "another run is writing there" in done.stderr.splitlines()[-1]
        )
    assert [path.name for path in tmp_path.iterdir()] == [".stages"]


def test_options_that_make_no_model_can_be_corrected(base, tmp_path, monkeypatch):
    def fail(*_):
        raise ZeroDivisionError

    with monkeypatch.context() as patched, pytest.raises(SystemExit):
        patched.setattr(train, "build_model", fail)
        train.main([*options(base, tmp_path), "--seed", "7"])
    assert not (tmp_path / "run.json").exists()
    train.main([*options(base, tmp_path), "--seed", "8"])
    assert (
        json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))["options"]["seed"] == 8
    )
