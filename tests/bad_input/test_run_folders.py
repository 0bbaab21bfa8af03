"""Damaged run folders: a run goes on from the last checkpoint that is whole and says so, a finished one is not believed."""

import json
import shutil

import pytest

from bad_input import refused
from cli import UserError
from running import load_recipe, losses, result
from small_runs import (
    NO_JSON,
    NO_OBJECT,
    cut,
    empty,
    entry,
    flip,
    folder,
    remove,
    small_data,
    small_run,
    stopped_run,
    text,
    training,
    without,
)
from training import setup

train, study, push = (load_recipe(name) for name in ("train", "study", "push"))


def go_on(base, run, capsys, monkeypatch) -> str:
    """What a start of the run says before it would train."""

    def reached(*_):
        raise UserError("it trains")

    monkeypatch.setattr(setup, "train_to_end", reached)
    return refused(train.main, training(small_data(base), run), capsys, "it trains", prints=True)


# --- going on ---------------------------------------------------------------------------------------------------------

FILES = ("model.safetensors", "optimizer.pt", "scheduler.pt", "trainer_state.json", "rng_state.pth", "config.json")
FILES += ("training_args.bin", "tokenizer.json", "run.json")
CHECKPOINTS = [
    (f"{damage.__name__} {name}", name, damage)
    for name in (*FILES, "complete.json")
    for damage in (empty, cut, flip, remove)
]
MARKERS = {"no files": '{"files": {}}', "number": '{"files": 3}', "list": "[]", "null": "null", "no entries": "{}"}
MARKERS |= {"sizes as words": '{"files": {"config.json": "x"}}', "three": '{"files": {"config.json": [1, 2, 3]}}'}
MARKERS |= {"unknown file": '{"files": {"none": [1, ""]}}', "NaN": '{"files": NaN}', "deep": "[" * 100_000}
CHECKPOINTS += [(f"marker {name}", "complete.json", text(content)) for name, content in MARKERS.items()]
CHECKPOINTS += [("folder for weights", "model.safetensors", folder), ("folder for marker", "complete.json", folder)]


@pytest.mark.parametrize(("name", "damage"), [case[1:] for case in CHECKPOINTS], ids=[case[0] for case in CHECKPOINTS])
def test_a_damaged_checkpoint_is_passed_over(base, tmp_path, capsys, monkeypatch, name, damage):
    run = stopped_run(base, tmp_path / "run")
    damage(run / "checkpoint-6" / name)
    said = go_on(base, run, capsys, monkeypatch)
    assert "checkpoint-6 is not whole (" in said and "going on from checkpoint-4" in said and "from step 4" in said
    assert not (run / "checkpoint-6").exists() and (run / "checkpoint-4" / "complete.json").is_file()


def test_without_a_whole_checkpoint_it_begins_again_and_says_so(base, tmp_path, capsys, monkeypatch):
    run = stopped_run(base, tmp_path / "run")
    flip(run / "checkpoint-6" / "optimizer.pt")
    (run / "checkpoint-4" / "complete.json").unlink()
    said = go_on(base, run, capsys, monkeypatch)
    assert "checkpoint-6 is not whole (optimizer.pt has changed since it was written)" in said
    assert "checkpoint-4 is not whole (it was not written to the end): going on from the start" in said


def test_what_goes_on_from_the_checkpoint_before_ends_as_if_nothing_had_happened(base, tmp_path):
    run = stopped_run(base, tmp_path / "run")
    flip(run / "checkpoint-6" / "model.safetensors")
    train.main(training(small_data(base), run))
    assert losses(run) == losses(small_run(base))
    assert result(run)["cross_entropy"] == result(small_run(base))["cross_entropy"]


def test_a_checkpoint_with_sizes_only_still_counts(base, tmp_path, capsys, monkeypatch):
    """As an earlier version wrote them."""
    run = stopped_run(base, tmp_path / "run")
    marker = run / "checkpoint-6" / "complete.json"
    sizes = {name: size for name, (size, _) in json.loads(marker.read_text())["files"].items()}
    marker.write_text(json.dumps({"files": sizes}))
    assert "from step 6" in go_on(base, run, capsys, monkeypatch)


@pytest.mark.parametrize("damage", [*NO_JSON.values(), remove], ids=[*NO_JSON, "remove"])
def test_a_damaged_run_json_is_taken_from_the_checkpoint(base, tmp_path, capsys, monkeypatch, damage):
    run = stopped_run(base, tmp_path / "run")
    damage(run / "run.json")
    refused(train.main, training(small_data(base), run, "--seed", 7), capsys, "seed was 0 and is now 7", keeps=run)
    if damage is folder:
        (run / "run.json").rmdir()
    assert "from step 6" in go_on(base, run, capsys, monkeypatch)
    assert json.loads((run / "run.json").read_text()) == json.loads((small_run(base) / "run.json").read_text())


@pytest.mark.parametrize("damage", NO_JSON.values(), ids=NO_JSON)
def test_a_damaged_run_json_without_a_checkpoint(base, tmp_path, capsys, damage):
    run = stopped_run(base, tmp_path / "run")
    for step in (4, 6):
        remove(run / f"checkpoint-{step}")
    damage(run / "run.json")
    refused(train.main, training(small_data(base), run), capsys, "run.json", "choose another --out", keeps=run)


METRICS = NO_JSON | {"remove": remove, "bad line": text('{"step": 1}\n{"st')}


@pytest.mark.parametrize("damage", METRICS.values(), ids=METRICS)
def test_damaged_metrics_of_a_stopped_run_are_written_again(base, tmp_path, damage):
    run = stopped_run(base, tmp_path / "run")
    damage(run / "metrics.jsonl")
    if damage is folder:
        (run / "metrics.jsonl").rmdir()
    train.main(training(small_data(base), run))
    assert (run / "metrics.jsonl").read_bytes() == (small_run(base) / "metrics.jsonl").read_bytes()


# --- finished runs ----------------------------------------------------------------------------------------------------

RESULT = {name: ("result.json", damage) for name, damage in (NO_JSON | NO_OBJECT).items()}
for key in ("cross_entropy", "data_fingerprint", "options", "command", "date", "gates"):
    RESULT[f"no {key}"] = ("result.json", without(key))
    RESULT[f"{key} of another type"] = ("result.json", entry(key, value=["?"]))
RESULT["NaN"] = ("result.json", entry("cross_entropy", value=float("nan")))
RESULT["Infinity"] = ("result.json", entry("perplexity", value=float("inf")))
FINISHED = RESULT | {
    f"{damage.__name__} {name}": (name, damage)
    for name in ("model.safetensors", "config.json", "tokenizer.json", "metrics.jsonl")
    for damage in (cut, flip, remove, empty)
}
every = pytest.mark.parametrize(("name", "damage"), FINISHED.values(), ids=FINISHED)


def card_words(run, tmp_path) -> list:
    words = ["--run", run, "--out", tmp_path / "card", "--language", "en", "--data_license", "none"]
    return [*words, "--prompt", "To"]


@pytest.fixture
def finished(base, tmp_path):
    return shutil.copytree(small_run(base), tmp_path / "run")


@every
def test_a_damaged_finished_run_is_not_called_finished(base, finished, capsys, name, damage):
    damage(finished / name)
    mentions = (str(finished), name, "delete", "checkpoint-6")
    refused(train.main, training(small_data(base), finished), capsys, *mentions, keeps=finished)


@every
def test_a_damaged_run_is_not_studied(base, finished, tmp_path, capsys, name, damage):
    damage(finished / name)
    words = ["--runs", finished, "--data", small_data(base), "--out", tmp_path / "study"]
    refused(study.main, words, capsys, str(finished), name, keeps=finished)


@every
def test_a_damaged_run_is_not_published(finished, tmp_path, capsys, name, damage):
    damage(finished / name)
    refused(push.main, card_words(finished, tmp_path), capsys, str(finished), name, keeps=finished)
    assert not (tmp_path / "card").exists()


def test_a_damaged_finished_run_is_made_again_from_its_checkpoint(base, finished):
    flip(finished / "model.safetensors")
    (finished / "result.json").unlink()
    train.main(training(small_data(base), finished))
    assert (finished / "model.safetensors").read_bytes() == (small_run(base) / "model.safetensors").read_bytes()
    train.main(training(small_data(base), finished))  # and is finished


def test_numbers_that_json_has_not_are_no_result(base, tmp_path, capsys, monkeypatch):
    from hf_infini.tools import metrics

    run, found = stopped_run(base, tmp_path / "run"), {"cross_entropy": float("nan"), "perplexity": 1.0, "tokens": 1}
    monkeypatch.setattr(metrics, "evaluate_rows", lambda *_, **options: found)
    refused(train.main, training(small_data(base), run), capsys, "result.json", "cross_entropy is nan", "--learning_rate")
    assert not (run / "result.json").exists()


# --- what was measured on a run ---------------------------------------------------------------------------------------

EVALUATIONS = NO_JSON | NO_OBJECT | {"no model": text('{"options": {}, "memory": "on"}')}


@pytest.mark.parametrize("damage", EVALUATIONS.values(), ids=EVALUATIONS)
def test_damaged_evaluations(base, finished, tmp_path, capsys, damage):
    file = finished / "evaluation_long.json"
    file.write_text('{"perplexity": 2.5}')
    damage(file)
    refused(push.main, card_words(finished, tmp_path), capsys, str(file), keeps=finished)
    if file.is_file():
        words = ["--runs", finished, "--data", small_data(base), "--out", tmp_path / "study"]
        refused(study.main, words, capsys, str(file), "evaluate", keeps=finished)


@pytest.mark.parametrize("damage", (NO_JSON | NO_OBJECT).values(), ids=NO_JSON | NO_OBJECT)
def test_damaged_n_grams(base, finished, tmp_path, capsys, damage):
    file = tmp_path / "ngrams.json"
    file.write_text('{"orders": []}')
    damage(file)
    words = [*card_words(finished, tmp_path), "--baseline", file]
    refused(push.main, words, capsys, str(file), "leave it out", keeps=finished)
