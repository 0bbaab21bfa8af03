"""Damaged run folders: a run goes on from the last checkpoint that is whole and says so, a finished one is not believed."""

import json
import shutil

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bad_input import refused
from cli import UserError
from running import load_recipe, losses, result
from small_runs import DAMAGES, cut, entry, flip, remove, small_data, small_run, stopped_run, text, training, without
from training import run_folder, setup

CARD = ["--language", "en", "--data_license", "none", "--prompt", "To"]
train, study, push = (load_recipe(name) for name in ("train", "study", "push"))


def go_on(base, run, capsys, monkeypatch) -> str:
    """What a start of the run says before it would train."""

    def reached(*_):
        raise UserError("it trains")

    monkeypatch.setattr(setup, "train_to_end", reached)
    return refused(train.main, training(small_data(base), run), capsys, "it trains", prints=True)


# --- going on ---------------------------------------------------------------------------------------------------------


def test_a_damaged_checkpoint_is_passed_over(base, tmp_path, capsys):
    """Whatever is damaged, and however: all files are sealed."""
    run = stopped_run(base, tmp_path / "run")
    last = run / "checkpoint-6"
    shutil.copytree(last, tmp_path / "whole")
    files = sorted(file.name for file in last.iterdir() if file.is_file() and file.stat().st_size)
    assert {"model.safetensors", "optimizer.pt", "trainer_state.json", "complete.json"} <= {*files}

    @settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(st.sampled_from(files), st.sampled_from(list(DAMAGES.values())))
    def check(name, damage):
        shutil.rmtree(last)
        shutil.copytree(tmp_path / "whole", last)
        damage(last / name)
        assert run_folder.last_complete_checkpoint(run).name == "checkpoint-4"
        said = capsys.readouterr().err
        assert "checkpoint-6 is not whole (" in said and "going on from checkpoint-4" in said

    check()


@pytest.mark.parametrize("content", ['{"files": {}}', '{"files": {"config.json": [1, 2, 3]}}'])
def test_a_marker_that_is_none(content, base, tmp_path):
    run = stopped_run(base, tmp_path / "run")
    (run / "checkpoint-6" / "complete.json").write_text(content)
    assert run_folder.last_complete_checkpoint(run).name == "checkpoint-4"


def test_without_a_whole_checkpoint_it_begins_again_and_says_so(base, tmp_path, capsys, monkeypatch):
    run = stopped_run(base, tmp_path / "run")
    flip(run / "checkpoint-6" / "optimizer.pt")
    (run / "checkpoint-4" / "complete.json").unlink()
    said = go_on(base, run, capsys, monkeypatch)
    assert "checkpoint-6 is not whole (optimizer.pt has changed since it was written)" in said
    assert "checkpoint-4 is not whole (it was not written to the end): going on from the start" in said
    assert not (run / "checkpoint-6").exists()


def test_what_goes_on_from_the_checkpoint_before_ends_as_if_nothing_had_happened(base, tmp_path):
    """Also where its metrics are damaged."""
    run = stopped_run(base, tmp_path / "run")
    flip(run / "checkpoint-6" / "model.safetensors")
    text('{"step": 1}\n{"st')(run / "metrics.jsonl")
    train.main(training(small_data(base), run))
    assert losses(run) == losses(small_run(base))
    assert result(run)["cross_entropy"] == result(small_run(base))["cross_entropy"]


def test_a_checkpoint_with_sizes_only_still_counts(base, tmp_path):
    """As an earlier version wrote them."""
    run = stopped_run(base, tmp_path / "run")
    marker = run / "checkpoint-6" / "complete.json"
    sizes = {name: size for name, (size, _) in json.loads(marker.read_text())["files"].items()}
    marker.write_text(json.dumps({"files": sizes}))
    assert run_folder.last_complete_checkpoint(run).name == "checkpoint-6"


@pytest.mark.parametrize("damage", [cut, text("[]")])
def test_a_damaged_run_json(base, tmp_path, capsys, damage):
    run = stopped_run(base, tmp_path / "run")
    damage(run / "run.json")
    refused(train.main, training(small_data(base), run), capsys, "run.json", "choose another --out", keeps=run)


# --- finished runs ----------------------------------------------------------------------------------------------------

FINISHED = {
    "result.json remove": ("result.json", remove),
    "result.json cut": ("result.json", cut),
    "changed weights": ("model.safetensors", flip),
    "no cross_entropy": ("result.json", without("cross_entropy")),
    "another type": ("result.json", entry("options", value=["?"])),
    "NaN": ("result.json", entry("cross_entropy", value=float("nan"))),
}


@pytest.fixture
def finished(base, tmp_path):
    return shutil.copytree(small_run(base), tmp_path / "run")


@pytest.mark.parametrize("case", FINISHED)
def test_a_damaged_finished_run_is_not_believed(base, finished, tmp_path, capsys, case):
    """Neither finished, nor studied, nor published."""
    name, damage = FINISHED[case]
    damage(finished / name)
    data = small_data(base)
    for main, words, *mentions in (
        (study.main, ["--runs", finished, "--data", data, "--out", tmp_path / "study"], name),
        (push.main, ["--run", finished, "--out", tmp_path / "card", *CARD], name),
        *([] if case == "result.json remove" else [(train.main, training(data, finished), name, "delete")]),
    ):
        refused(main, words, capsys, str(finished), *mentions, keeps=finished)
    assert not (tmp_path / "card").exists()


def test_numbers_that_json_has_not_are_no_result(base, tmp_path, capsys, monkeypatch):
    from hf_infini.tools import metrics

    run, found = stopped_run(base, tmp_path / "run"), {"cross_entropy": float("nan"), "perplexity": 1.0, "tokens": 1}
    monkeypatch.setattr(metrics, "evaluate_rows", lambda *_, **options: found)
    refused(train.main, training(small_data(base), run), capsys, "result.json", "cross_entropy is nan", "--learning_rate")
    assert not (run / "result.json").exists()


@pytest.mark.parametrize("damage", [cut, remove, text('{"options": {}, "memory": "on"}')])
def test_damaged_evaluations_and_n_grams(base, finished, tmp_path, capsys, damage):
    words = ["--run", finished, "--out", tmp_path / "card", *CARD]
    for file, option in ((finished / "evaluation_long.json", []), (tmp_path / "n.json", ["--baseline"])):
        file.write_text('{"perplexity": 2.5}')
        damage(file)
        if option or damage is not remove:
            refused(push.main, [*words, *option, *([file] if option else [])], capsys, str(file), keeps=finished)
        file.unlink(missing_ok=True)
