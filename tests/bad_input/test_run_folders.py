"""Damaged run folders: a run goes on from the last checkpoint that is whole and says so, a finished
one is not believed."""

import itertools
import re
import shutil

import pytest

from bad_input import handled, refused
from cli import UserError
from running import load_recipe, losses, result
from small_runs import (
    DAMAGES,
    cut,
    entry,
    flip,
    of_an_earlier_version,
    remove,
    small_data,
    small_run,
    stopped_run,
    text,
    training,
    without,
)
from training import run_folder, setup

CARD = ["--language", "en", "--data_license", "none", "--prompt", "To"]
train, study, model_card = (load_recipe(name) for name in ("train", "study", "model_card"))


def go_on(base, run, capsys, monkeypatch) -> str:
    """What a start of the run says before it would train."""

    def reached(*_):
        raise UserError("it trains")

    monkeypatch.setattr(setup, "train_to_end", reached)
    return refused(train.main, training(small_data(base), run), capsys, "it trains", prints=True)


# --- going on -------------------------------------------------------------------------------------


def test_without_a_whole_checkpoint_it_begins_again_and_says_so(
    base, tmp_path, capsys, monkeypatch
):
    run = stopped_run(base, tmp_path / "run")
    for name in ("checkpoint-4", "checkpoint-6"):
        (run / name / "complete.json").unlink()
    said = go_on(base, run, capsys, monkeypatch)
    assert "checkpoint-4 was not written to the end: going on from the start" in said
    assert "checkpoint-6 was not written to the end" in said
    assert not (run / "checkpoint-6").exists()


@pytest.mark.parametrize(
    ("lost", "said"),
    [
        ("complete.json", "checkpoint-6 was not written to the end"),
        ("optimizer.pt", "checkpoint-6/optimizer.pt is missing"),
    ],
)
def test_what_goes_on_from_the_checkpoint_before_ends_as_if_nothing_had_happened(
    base, tmp_path, capsys, lost, said
):
    """Also where its metrics are damaged."""
    run = stopped_run(base, tmp_path / "run")
    (run / "checkpoint-6" / lost).unlink()
    text('{"step": 1}\n{"st')(run / "metrics.jsonl")
    train.main(training(small_data(base), run))
    assert f"{said}: going on from checkpoint-4" in capsys.readouterr().err
    assert losses(run) == losses(small_run(base))
    assert result(run)["cross_entropy"] == result(small_run(base))["cross_entropy"]


def test_whatever_a_checkpoint_has_lost_is_named_and_it_is_passed_over(base, tmp_path, capsys):
    """Where none is whole, nothing is deleted."""
    names = [file.name for file in sorted((small_run(base) / "checkpoint-6").iterdir())]
    assert {"optimizer.pt", "scheduler.pt", "rng_state.pth", "model.safetensors"} < {*names}
    for name, damage in itertools.product(names, DAMAGES.values()):
        if (name, damage) == ("complete.json", remove):  # then it was not written to the end
            continue
        run = stopped_run(base, tmp_path / "run")
        damage(run / "checkpoint-6" / name)
        assert run_folder.last_complete_checkpoint(run) == run / "checkpoint-4"
        said = capsys.readouterr().err
        assert str(run / "checkpoint-6" / name) in said and "from checkpoint-4" in said
        remove(run / "checkpoint-4")
        words = training(small_data(base), run)
        refused(train.main, words, capsys, str(run / "checkpoint-6" / name), "delete", keeps=run)
        remove(run)


def test_checkpoints_of_an_earlier_version_are_gone_on_from(base, tmp_path, capsys):
    run = stopped_run(base, tmp_path / "run")
    (run / "checkpoint-6" / "complete.json").write_text("{}")
    assert run_folder.last_complete_checkpoint(run) == run / "checkpoint-6"
    assert "checkpoint-6 is of an earlier version" in capsys.readouterr().err


@pytest.mark.parametrize("damage", [cut, text("[]")])
def test_a_damaged_run_json(base, tmp_path, capsys, damage):
    run = stopped_run(base, tmp_path / "run")
    damage(run / "run.json")
    refused(
        train.main,
        training(small_data(base), run),
        capsys,
        "run.json",
        "choose another --out",
        keeps=run,
    )


# --- finished runs --------------------------------------------------------------------------------

FINISHED = {
    "result.json remove": ("result.json", remove),
    "result.json cut": ("result.json", cut),
    "no cross_entropy": ("result.json", without("cross_entropy")),
    "another type": ("result.json", entry("options", value=["?"])),
    "edited": ("result.json", entry("cross_entropy", value=1.0)),
    "no weights": ("model.safetensors", remove),
    "a bit of the weights": ("model.safetensors", flip),
    "another configuration": ("config.json", entry("segment_length", value=2)),
    "another tokenizer": ("tokenizer.json", flip),
    "metrics cut": ("metrics.jsonl", cut),
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
        (model_card.main, ["--run", finished, "--out", tmp_path / "card", *CARD], name),
        *(
            []
            if case == "result.json remove"
            else [(train.main, training(data, finished), name, "delete")]
        ),
    ):
        refused(main, words, capsys, str(finished), *mentions, keeps=finished)
    assert not (tmp_path / "card").exists()


def test_whatever_a_finished_run_has_lost_is_named(base, finished):
    names = [file for file in sorted(finished.iterdir()) if file.is_file()]
    for file, damage in itertools.product(names, DAMAGES.values()):
        if (file.name, damage) == ("result.json", remove):
            continue
        content = file.read_bytes()
        damage(file)
        with pytest.raises(UserError, match=re.escape(str(file))):
            run_folder.read_result(finished)
        file.write_bytes(content)
    (finished / "evaluation.json").write_text("{}")  # what comes later is not the run's
    assert run_folder.read_result(finished)


def test_finished_runs_of_an_earlier_version_are_taken_as_they_are(base, finished, capsys):
    of_an_earlier_version(finished / "result.json")
    handled(train.main, training(small_data(base), finished), capsys, "finished")


def test_what_was_deleted_after_the_end_is_made_again_from_the_last_checkpoint(base, finished):
    for name in ("result.json", "model.safetensors", "tokenizer.json"):
        remove(finished / name)
    train.main(training(small_data(base), finished))
    for name in ("model.safetensors", "tokenizer.json", "metrics.jsonl"):
        assert (finished / name).read_bytes() == (small_run(base) / name).read_bytes()


def test_numbers_that_json_has_not_are_no_result(base, tmp_path, capsys, monkeypatch):
    from evaluation import perplexity

    run, found = (
        stopped_run(base, tmp_path / "run"),
        {"cross_entropy": float("nan"), "perplexity": 1.0, "tokens": 1},
    )
    monkeypatch.setattr(perplexity, "measure_perplexity", lambda *_, **options: found)
    refused(
        train.main, training(small_data(base), run), capsys, "result.json", "NaN", "--learning_rate"
    )
    assert not (run / "result.json").exists()


@pytest.mark.parametrize("damage", [cut, text("[]")])
def test_damaged_evaluations(base, finished, tmp_path, capsys, damage):
    file = finished / "evaluation_long.json"
    file.write_text('{"perplexity": 2.5}')
    damage(file)
    refused(
        model_card.main,
        ["--run", finished, "--out", tmp_path / "card", *CARD],
        capsys,
        str(file),
        keeps=finished,
    )
