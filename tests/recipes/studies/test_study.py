"""The study recipe: a real study at toy size, killed and resumed, and its numbers checked against others."""

import json
import math
import re
import shutil
import signal
import subprocess
import time

import psutil
import pytest
from test_study_plan import recipe_study, refused
from transformers import AutoTokenizer

from cli import UserError
from running import ROOT, load_recipe, recipe, result, sample_text
from studies import planning, results, runs
from studies.evaluation import trained_on, validation_documents
from studies.processes import Task
from studies.sweeps import FINISHED
from study_runs import STEPS, arguments

# --- a whole study ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A corpus, and variants with data of their own: one that is possible, one whose tokenizer is not there."""
    base = tmp_path_factory.mktemp("study")
    lines = sample_text().splitlines()
    texts = ["\n".join(lines[start : start + 30]) for start in range(0, len(lines), 30)]
    rows = [json.dumps({"id": f"{number:03}", "text": text}) + "\n" for number, text in enumerate(texts)]
    (base / "text.jsonl").write_text("".join(rows), encoding="utf-8")
    own = "attention: infini\nsegment_length: 16\nposition_encoding: segment\ndata_fraction: 0.6\ndata_tokenizer: "
    (base / "letters.yaml").write_text(own + "characters\n", encoding="utf-8")
    (base / "nowhere.yaml").write_text(own + "no/such_tokenizer\n", encoding="utf-8")
    return base


@pytest.fixture(scope="module")
def finished(base):
    """The study, killed while its second variant trains, and finished by the same command with two more variants. Returns
    the modification times of the files that the first start left."""
    out = base / "out"
    with open(base / "first.log", "w") as log:
        command = [*recipe("study"), *arguments(base)]
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
        deadline = time.monotonic() + 200
        while not (out / "best" / "run" / "checkpoint-8" / "complete.json").exists() and time.monotonic() < deadline:
            assert process.poll() is None, (base / "first.log").read_text()
            time.sleep(0.005)
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGKILL)
        process.wait()
    psutil.wait_procs(children, timeout=30)
    assert children and not any(child.is_running() for child in children)  # nobody else writes there any more
    assert (out / "s1" / "run" / "result.json").is_file() and not (out / "best" / "run" / "result.json").exists()
    times = {file: file.stat().st_mtime_ns for file in [*out.glob("data/base/**/*"), *out.glob("s1/run/*")]}
    more = ["s1", "best", str(base / "letters.yaml"), str(base / "nowhere.yaml")]
    recipe_study.main(arguments(base, "--jobs", 2, variants=more))
    return times


@pytest.fixture(scope="module")
def content(base, finished):
    return json.loads((base / "out" / "report.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def text(base, finished):
    return (base / "out" / "report.md").read_text(encoding="utf-8")


def variant(content, name: str) -> dict:
    return next(found for found in content["variants"] if found["name"] == name)


def test_killed_it_goes_on_and_repeats_nothing(base, finished):
    assert all(file.stat().st_mtime_ns == before for file, before in finished.items())
    log = (base / "out" / "logs" / "best.log").read_text()
    assert "from the start" not in log and " from step " in log
    lines = [json.loads(line) for line in (base / "out" / "best" / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["step"] == STEPS


def test_started_again_it_measures_nothing_twice(base, content, text):
    """With a variant less, and the reports that the other tests look at read already."""
    out = base / "out"
    folders = [out / name for name in ("s1", "best", "letters")]
    files = [file for folder in folders for file in [*folder.glob("*"), *folder.glob("run/*")]]
    before = {file: file.stat().st_mtime_ns for file in files if file.name != "train.yaml"}
    recipe_study.main(arguments(base, variants=["s1", "best", str(base / "letters.yaml")]))
    assert all(file.stat().st_mtime_ns == time for file, time in before.items())
    again = json.loads((out / "report.json").read_text(encoding="utf-8"))
    assert again["variants"] == [found for found in content["variants"] if found["name"] != "nowhere"]
    assert "nowhere" in text and "nowhere" not in (out / "report.md").read_text(encoding="utf-8")


def test_the_numbers_are_those_of_evaluate_model(base, content, tmp_path):
    for name in ("s1", "best"):
        folder, found = base / "out" / name / "run", variant(content, name)
        assert found["tokens_evaluated"] == result(folder)["validation_tokens"]
        # The batches are of another size, so float32 products are summed in another order
        assert found["cross_entropy"]["value"] == pytest.approx(result(folder)["cross_entropy"], rel=1e-5)
        assert found["perplexity"]["value"] == pytest.approx(math.exp(found["cross_entropy"]["value"]))
        assert found["cross_entropy"]["low"] < found["cross_entropy"]["value"] < found["cross_entropy"]["high"]
    options = ["--model", str(folder), "--data", str(base / "out" / "data" / "base"), "--device", "cpu"]
    load_recipe("evaluate_model").main([*options, "--out", str(tmp_path / "evaluation")])
    evaluated = json.loads((tmp_path / "evaluation.json").read_text(encoding="utf-8"))
    assert found["cross_entropy"]["value"] == pytest.approx(evaluated["cross_entropy"], rel=1e-5)
    assert found["tokens_evaluated"] == evaluated["tokens"]
    kept = json.loads((base / "out" / name / "row_losses.json").read_text(encoding="utf-8"))
    assert sum(loss for loss, _, _ in kept["rows"]) / sum(n for _, n, _ in kept["rows"]) == kept["cross_entropy"]
    assert len(kept["rows"]) == content["data"]["base"]["splits"]["validation"]["blocks"]


def test_the_difference_is_paired(content):
    s1, best = variant(content, "s1"), variant(content, "best")
    assert s1["difference"] is None
    difference, entropies = best["difference"], (best["cross_entropy"], s1["cross_entropy"])
    assert difference["value"] == pytest.approx(entropies[0]["value"] - entropies[1]["value"])
    assert difference["high"] - difference["low"] < min(entropy["high"] - entropy["low"] for entropy in entropies)
    assert best["curve_difference"] == [[at, loss - dict(s1["curve"])[at]] for at, loss in best["curve"]]
    assert best["curve"][-1][0] == best["tokens"] == s1["tokens"] == STEPS * 4 * 64


def test_characters_are_counted_on_documents_that_nobody_learned(base, content):
    out, letters = base / "out", variant(content, "letters")
    assert letters["difference"] is None and letters["data"] == "fraction=0.6,tokenizer=characters"
    held_out = {document["id"]: document["text"] for document in validation_documents(out / "data" / "base")}
    common = held_out.keys() - trained_on(out / "data" / letters["data"])
    assert content["documents"] == len(common) < len(held_out)  # or another seed is needed, for this test to say anything
    kept = json.loads((out / "letters" / "row_losses.json").read_text(encoding="utf-8"))
    assert {name for name, *_ in kept["documents"]} == common
    # A token is a character here
    assert letters["per_character"]["characters"] == letters["tokens_evaluated"]
    assert letters["per_character"]["nats"]["value"] == pytest.approx(letters["cross_entropy"]["value"])
    assert letters["per_character"]["bits"]["value"] == pytest.approx(letters["cross_entropy"]["value"] / math.log(2))
    tokenizer = AutoTokenizer.from_pretrained(out / "data" / "base" / "tokenizer")
    documents = json.loads((out / "s1" / "row_losses.json").read_text(encoding="utf-8"))["documents"]
    found = {name: (loss, characters) for name, loss, _, characters in documents}
    longest = max(map(len, tokenizer.get_vocab()))
    for name in common - {[*held_out][-1]}:  # whose tail fills no row
        tokens = len(tokenizer(held_out[name])["input_ids"])
        missing = len(held_out[name]) - found[name][1]  # the first token of each row
        assert 0 <= missing <= (tokens // 64 + 1) * longest
    nats = sum(found[name][0] for name in common) / sum(found[name][1] for name in common)
    assert variant(content, "s1")["per_character"]["nats"]["value"] == pytest.approx(nats)


def test_what_is_measured_beside_the_losses(base, content):
    s1, best = variant(content, "s1"), variant(content, "best")
    # Keys and values of 2 layers of 32 in float32; and of a window of 2 segments of 16, whose keys are kept turned and as
    # they were, with 2 heads of 16 x 16 and 16
    assert s1["state_bytes"]["bytes"] == {"32": 32 * 2 * 2 * 32 * 4, "256": None}
    memory = 2 * (32 * 3 * 32 + 2 * 16 * 16 + 2 * 16) * 4
    taps = planning.read_settings(ROOT / "recipes" / "configs" / "study_best.yaml")["memory_conv"]
    memory += 2 * (taps - 1) * 32 * 4  # what the convolution still needs
    assert memory <= best["state_bytes"]["bytes"]["32"] == best["state_bytes"]["bytes"]["256"] < memory + 200
    assert s1["positions"]["long"] is None and s1["positions"]["context"]["length"] == 64
    assert best["positions"]["long"]["by_position"][-1]["last"] == 511
    assert best["positions"]["context"]["tokens"] == s1["positions"]["context"]["tokens"]
    assert s1["gates"] == {} and best["gates"] == {"best": result(base / "out" / "best" / "run")["gates"]}
    assert len(best["sample"]["text"]) > 0 and best["sample"]["new_tokens"] <= 20
    assert content["prompt"]["prompt"].split() == held_out_words(base)[:8]


def held_out_words(base) -> list[str]:
    return max((d["text"] for d in validation_documents(base / "out" / "data" / "base")), key=len).split()


def test_the_report_says_what_there_is_to_say(base, content, text):
    assert f"**CUT SHORT: every run was stopped after at most {STEPS} optimiser steps" in text
    assert re.search("(best and s1|s1 and best) were trained on the same tokens in the same order", text)
    assert "- nowhere: not possible: its data cannot be made: --tokenizer: 'no/such_tokenizer'" in text
    assert "- i1: not asked for" in text and "one seed per variant" in text
    assert "can be compared across tokenizers" in text and "Data: 1 file." in text
    for name in ("s1", "best", "letters"):
        entropy = variant(content, name)["cross_entropy"]
        assert f"{entropy['value']:.4f} ({entropy['low']:.4f} to {entropy['high']:.4f})" in text
    for name in ("loss", "loss_difference", "gates_best", "gates_letters", "positions"):
        assert f"](figures/{name}.png)" in text
        assert (base / "out" / "figures" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    for name in ("torch", "transformers"):
        assert f"{name} {content['versions'][name]}" in text


def test_the_commands_run_by_hand(base, finished):
    """The file of a run's options is one that train.py takes: it finds the run finished, and the options the same."""
    out = base / "out"
    first_line = (out / "best" / "train.yaml").read_text(encoding="utf-8").splitlines()[0]
    words = first_line.removeprefix("# ").split()
    assert words[1].endswith("recipes/train.py") and words[2:4] == ["--config", str(out / "best" / "train.yaml")]
    load_recipe("train").main(words[2:])


def test_seeds_are_averaged_row_by_row(base, content, tmp_path):
    plan = recipe_study.make_plan(recipe_study.Options("mini", str(base / "text.jsonl"), str(base / "out"), ["s1"]), [])
    run = plan.runs[0]
    other = planning.Run("s1", 1, tmp_path / "s1-seed1", run.options, run.data)
    shutil.copytree(run.folder, other.folder)
    losses = json.loads((run.folder / "row_losses.json").read_text(encoding="utf-8"))
    for name in ("rows", "documents"):
        losses[name] = [[*row[:-3], row[-3] + 0.5 * row[-2], *row[-2:]] for row in losses[name]]
    (other.folder / "row_losses.json").write_text(json.dumps(losses), encoding="utf-8")
    plan.runs.append(other)
    run.status = other.status = FINISHED
    (found,) = results.collect(plan, {"base": "f"}, seed=0)["variants"]
    alone = variant(content, "s1")["cross_entropy"]
    # Half a nat more on every token of one of two seeds is a quarter in their mean, and nothing in its spread
    assert found["cross_entropy"] == {name: pytest.approx(value + 0.25) for name, value in alone.items()}
    assert found["folders"] == {"0": "s1", "1": "s1-seed1"} and list(found["by_seed"]) == [0, 1]


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "flags", "message"),
    [
        (["--scale", "small"], [], "scale was 'mini' and is now 'small'"),
        (["--source", str(ROOT / "LICENSE")], [], "source_files was '1 of "),
        ([], ["--data_vocab_size", "400"], "data base: vocab_size was 300 and is now 400"),
        ([], ["--data_seed", "1"], "data base: seed was 0 and is now 1"),
        ([], ["--learning_rate", "0.5"], " and is now 0.5"),
        (["--max_steps", "9"], [], f"best: max_steps was {STEPS} and is now 9"),
    ],
)
def test_other_data_or_options_are_refused(base, finished, capsys, options, flags, message):
    before = (base / "out" / "study.json").read_bytes()
    said = refused(capsys, arguments(base, *options, flags=flags))
    assert "was started with other settings" in said and message in said
    assert (base / "out" / "study.json").read_bytes() == before


def test_runs_and_folders_of_other_data_are_refused(base, finished, tmp_path, capsys):
    out = tmp_path / "out"
    shutil.copytree(base / "out", out, ignore=shutil.ignore_patterns("checkpoint-*"))
    file = out / "best" / "run" / "result.json"
    file.write_text(json.dumps(result(file.parent) | {"data_fingerprint": "0123456789abcdef"}), encoding="utf-8")
    argv = [word.replace(str(base / "out"), str(out)) for word in arguments(base)]
    assert f"{file.parent} was trained on other data (0123456789abcdef) than" in refused(capsys, argv)
    plan = recipe_study.make_plan(recipe_study.Options("mini", str(base / "text.jsonl"), str(out), ["s1"]), [])
    task = Task("data base", [], out / "log", FINISHED)
    with pytest.raises(UserError, match="came out different .* from when the study began \\(0123456789abcdef\\)"):
        runs.note_data(plan, {"fingerprints": {"base": "0123456789abcdef"}}, "base", task)


def test_a_launcher_that_is_not_there(base, finished, capsys):
    assert "--launcher: there is no program no_launcher" in refused(capsys, arguments(base, "--launcher", "no_launcher"))
