"""The study recipe: a real study at toy size, killed and resumed, and its numbers checked against
others."""

import contextlib
import json
import math
import multiprocessing
import re
import shutil
import sys
import traceback
from pathlib import Path
from unittest import mock

import psutil
import pytest

from bad_input import refused
from running import kill_when, load_recipe, result, sample_text, write_documents
from studies import execution, measure

pytestmark = pytest.mark.slow  # they share trained runs


study = load_recipe("study")
STEPS = 12
STUDY = """
data: {vocab_size: 300, context: 64, validation: 0.2}
train: {n_layer: 2, n_embd: 32, n_head: 2, batch_size: 4, gradient_accumulation: 1, max_steps: 12,
        eval_steps: 4, save_steps: 4, use_cpu: true, precision: float32}
variants:
  s1: {attention: self}
  best: {attention: infini, segment_length: 16, position_encoding: rope}
  letters: {attention: self, data: {fraction: 0.6, tokenizer: characters}}
  nowhere: {attention: self, data: {tokenizer: no/such_tokenizer}}
  odd: {n_head: 3}
evaluate: {long: {length: 512, min_characters: 500, device: cpu}}
"""


def arguments(base, *options) -> list[str]:
    words = [
        *f"--study {base / 'toy.yaml'} --source {base / 'text.jsonl'}".split(),
        *f"--out {base / 'out'}".split(),
        *options,
    ]
    return [*map(str, words)]


def run_here(tasks, title, jobs=1, threads=1) -> None:
    """Stands in for `studies.processes.run_tasks`: every command in this process, one after the
    other."""
    for task in tasks:
        task.log.parent.mkdir(parents=True, exist_ok=True)
        name, status = Path(task.command[1]).stem, 0
        with (
            open(task.log, "w", encoding="utf-8") as log,
            contextlib.redirect_stdout(log),
            contextlib.redirect_stderr(log),
            mock.patch.object(sys, "argv", task.command[1:]),
        ):
            try:
                load_recipe(name).main()
            except SystemExit as stopped:
                status = stopped.code
            except Exception:
                traceback.print_exc()
                status = 1
        task.finish(status)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    base = tmp_path_factory.mktemp("study")
    write_documents(base / "text.jsonl", sample_text(), 30)
    (base / "toy.yaml").write_text(STUDY, encoding="utf-8")
    return base


@pytest.fixture(scope="module")
def finished(base):
    """The study, killed while a variant trains, and finished with four more, without the time that
    processes take to start. Returns the modification times of the data that the first start
    left."""
    out, children = base / "out", []

    def ready() -> bool:
        if (out / "best" / "checkpoint-4" / "complete.json").exists():
            started = max(multiprocessing.active_children(), key=lambda child: child.pid)
            children.extend(psutil.Process(started.pid).children(recursive=True))
        return bool(children)

    kill_when(ready, "study", *arguments(base, "--variants", "best"))
    psutil.wait_procs(children, timeout=30)
    # nobody else writes there any more
    assert children and not any(child.is_running() for child in children)
    assert not (out / "best" / "result.json").exists()
    times = {file: file.stat().st_mtime_ns for file in out.glob("data/base/train/*")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(execution, "run_tasks", run_here)
        study.main(arguments(base))
        yield times


@pytest.fixture(scope="module")
def content(base, finished):
    return json.loads((base / "out" / "report.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def text(base, finished):
    return (base / "out" / "report.md").read_text(encoding="utf-8")


def variant(content, name: str) -> dict:
    return next(found for found in content["variants"] if found["name"] == name)


def test_killed_it_goes_on_and_repeats_nothing(base, finished):
    assert len(finished) > 2 and all(
        file.stat().st_mtime_ns == before for file, before in finished.items()
    )
    log = (base / "out" / "logs" / "best.log").read_text()
    assert "from the start" not in log and " from step " in log
    lines = [
        json.loads(line)
        for line in (base / "out" / "best" / "metrics.jsonl").read_text().splitlines()
    ]
    assert lines[-1]["step"] == STEPS


def test_started_again_it_measures_nothing_twice(base, content, text):
    """With fewer variants, and the reports that the other tests look at read already."""
    out = base / "out"
    files = [
        file
        for name in ("s1", "letters", "measured")
        for file in (out / name).glob("*")
        if file.is_file()
    ]
    before = {file: file.stat().st_mtime_ns for file in files}
    study.main(arguments(base, "--variants", "s1", "letters"))
    assert all(file.stat().st_mtime_ns == time for file, time in before.items())
    again = json.loads((out / "report.json").read_text(encoding="utf-8"))
    assert [found["name"] for found in again["variants"]] == ["s1", "letters"]
    assert variant(again, "s1")["cross_entropy"] == variant(content, "s1")["cross_entropy"]
    assert "nowhere" in text and "nowhere" not in (out / "report.md").read_text(encoding="utf-8")


def test_the_numbers_are_those_of_training_and_the_difference_is_paired(base, content):
    """They are those of evaluate_model.py, as other tests say."""
    for name in ("s1", "best", "letters"):
        folder, found = base / "out" / name, variant(content, name)
        assert found["tokens_evaluated"] == result(folder)["validation_tokens"]
        # The batches are of another size, so float32 products are summed in another order
        assert found["cross_entropy"]["value"] == pytest.approx(
            result(folder)["cross_entropy"], rel=1e-5
        )
        assert found["perplexity"]["value"] == pytest.approx(
            math.exp(found["cross_entropy"]["value"])
        )
        assert (
            found["cross_entropy"]["low"]
            < found["cross_entropy"]["value"]
            < found["cross_entropy"]["high"]
        )
        assert (
            found["tokens"] == STEPS * 4 * 64
            and found["parameters"] == result(folder)["parameters"]
        )
    s1, best = variant(content, "s1"), variant(content, "best")
    # of other rows
    assert s1["difference"] is None and variant(content, "letters")["difference"] is None
    difference, entropies = best["difference"], (best["cross_entropy"], s1["cross_entropy"])
    assert difference["value"] == pytest.approx(entropies[0]["value"] - entropies[1]["value"])
    assert difference["high"] - difference["low"] < min(
        entropy["high"] - entropy["low"] for entropy in entropies
    )


def test_characters_are_counted_on_documents_that_nobody_learned(base, content):
    out, letters = base / "out", variant(content, "letters")
    held_out = {
        document["id"]: document["text"]
        for document in measure.unseen_documents(out / "data" / "base", [])
    }
    common = held_out.keys() - measure.trained_on(out / "data" / "letters")
    # or another seed is needed, for this test to say anything
    assert 0 < len(common) < len(held_out)
    measured = {
        name: json.loads((out / "measured" / f"{name}.json").read_text())
        for name in ("s1", "letters")
    }
    assert set(measured["s1"]["documents"]) == set(measured["letters"]["documents"]) == common
    # A token is a character there, but for the first one of a row and the tail that fills no row
    characters = sum(len(held_out[name]) for name in common)
    found = letters["bits_per_character"]
    assert characters - characters // 64 - 64 - len(common) <= found["characters"] < characters
    for name in ("s1", "letters"):
        nats, counted = (
            sum(column) for column in zip(*measured[name]["documents"].values(), strict=True)
        )
        assert variant(content, name)["bits_per_character"]["value"]["value"] == pytest.approx(
            nats / counted / math.log(2)
        )
    bits = [
        variant(content, name)["bits_per_character"]["value"]["value"] for name in ("letters", "s1")
    ]
    assert found["difference"]["value"] == pytest.approx(bits[0] - bits[1])


def test_what_is_measured_beside_the_losses(content):
    s1, best = variant(content, "s1"), variant(content, "best")
    # Keys and values of 2 layers of 32 in float32; and of a segment of 16, with 2 heads of 16 x 16
    # and 16
    assert s1["cache_bytes"] == {"64": 64 * 2 * 2 * 32 * 4, "512": None}
    memory = 2 * (16 * 2 * 32 + 2 * 16 * 16 + 2 * 16) * 4
    assert memory <= best["cache_bytes"]["64"] == best["cache_bytes"]["512"] < memory + 200
    assert s1["evaluations"] == {} and best["evaluations"]["long"]["by_position"][-1]["last"] == 511
    assert any(
        problem.startswith("s1-long: 512 tokens, but this model has 64")
        for problem in content["problems"]
    )


def test_the_report_says_what_there_is_to_say(base, content, text):
    assert (
        "- nowhere: not possible: its data cannot be made: --tokenizer no/such_tokenizer "
        "cannot be loaded"
    ) in text
    assert "- odd: not possible: " in text
    assert f"{variant(content, 'best')['perplexity']['value']:,.2f}" in text
    assert text.index("not** in one ranking") < text.index("| **letters**")  # in the second table
    options = variant(content, "best")["options"]
    assert {
        "attention": "infini",
        "segment_length": 16,
        "position_encoding": "rope",
    }.items() <= options.items()
    assert ", ".join(f"{name} {value}" for name, value in options.items()) in text
    assert (base / "out" / "loss.png").is_file() and "(loss.png)" in text
    assert all(command in text for command in content["commands"][1:])
    assert "| cache after 64 tokens, bytes | cache after 512 tokens, bytes |\n| --- |" in text
    assert re.search(
        rf"^\| s1 \| {variant(content, 's1')['parameters']:,} \| 3,072 \|.* \| 32,768 \| – \|$",
        text,
        re.M,
    )


# --- finished runs --------------------------------------------------------------------------------


def test_finished_runs_are_compared(base, content, tmp_path, capsys):
    data, runs = base / "out" / "data" / "base", [base / "out" / name for name in ("s1", "best")]
    words = ["--runs", *runs, "--data", data, "--out", tmp_path / "comparison"]
    study.main([*map(str, words)])
    compared = json.loads((tmp_path / "comparison" / "report.json").read_text(encoding="utf-8"))
    for name in ("s1", "best"):
        for number in ("cross_entropy", "difference", "cache_bytes", "parameters"):
            assert variant(compared, name)[number] == variant(content, name)[number]
    assert (tmp_path / "comparison" / "loss.png").read_bytes().startswith(b"\x89PNG")

    copies = [
        shutil.copytree(run, tmp_path / run.name, ignore=shutil.ignore_patterns("checkpoint-*"))
        for run in runs
    ]
    for run in copies:
        place = {"first": 1, "last": 128, "tokens": 9, "cross_entropy": 2.5, "perplexity": 12.345}
        evaluation = {
            "perplexity": 12.345,
            "length": 128,
            "split": "validation",
            "memory": "on",
            "by_position": [place],
        }
        (run / "evaluation_long.json").write_text(json.dumps(evaluation))
    study.main([*map(str, ["--runs", *copies, "--data", data, "--out", tmp_path / "evaluated"])])
    report = (tmp_path / "evaluated" / "report.md").read_text(encoding="utf-8")
    assert "| variant | long |\n| --- | ---: |\n| s1 | 12.35 |\n| best | 12.35 |\n" in report

    refused(
        study.main,
        [*words[:3], base / "out" / "letters", *words[3:]],
        capsys,
        "was trained on different data",
    )
    refused(study.main, ["--runs", base, *words[3:]], capsys, "has no result.json")


# --- seeds ----------------------------------------------------------------------------------------


def test_variants_with_seeds_go_on_when_one_fails(base, finished, tmp_path, capsys):
    options = "model: causal_mha, n_layer: 1, n_embd: 16, n_head: 2, batch_size: 8, max_steps: 2"
    (tmp_path / "train.yaml").write_text(f"{{{options}, use_cpu: true}}")
    words = ["--train", tmp_path / "train.yaml", "--data", base / "out" / "data" / "base"]
    words += ["--out", tmp_path / "out", "--set", "train.position_encoding=alibi"]
    words += ["variants.all.attention=global"]
    study.main([*map(str, words), "variants.none.attention=none", "--seeds", "0", "1"])
    text = (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    content = json.loads((tmp_path / "out" / "report.json").read_text(encoding="utf-8"))
    statuses = {run["name"]: run["status"] for run in content["runs"]}
    assert len(statuses) == 4
    assert {n for n, s in statuses.items() if s != "finished"} == {"none", "none,seed=1"}
    assert "- none: not possible: position_encoding='alibi' acts inside the attention" in text
    # A row's loss is the mean over the seeds, whose spread has its own column
    found = variant(content, "all")
    each = [result(tmp_path / "out" / name)["cross_entropy"] for name in ("all", "all,seed=1")]
    assert each[0] != each[1]
    assert found["cross_entropy"]["value"] == pytest.approx(sum(each) / 2, rel=1e-5)
    assert found["deviation"] == pytest.approx(abs(each[0] - each[1]) / math.sqrt(2), rel=1e-3)
    assert f"± {found['deviation']:.4f} (2)" in text

    # Asked for with other options, a finished run is refused, and the others go on
    words += ["variants.new.n_inner=8", "variants.new.attention=global", "train.max_steps=3"]
    with pytest.raises(SystemExit):
        study.main([*map(str, words)])
    said = capsys.readouterr().err
    assert "1 of 2 runs failed" in said and "max_steps was 2 and is now 3" in said
    assert (tmp_path / "out" / "new" / "result.json").is_file()
