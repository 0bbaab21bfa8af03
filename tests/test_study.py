"""The study recipe: a real one at toy size, killed and resumed, its numbers checked against others; plans and refusals."""

import json
import math
import re
import shutil
import signal
import subprocess
import time

import psutil
import pytest
from test_train import ROOT, load_recipe, recipe, result, sample_text
from transformers import AutoTokenizer

from hf_infini import study, study_results
from hf_infini.cli import UserError
from hf_infini.study_evaluation import choose_prompt, encode_documents, trained_on, validation_documents
from hf_infini.sweeps import FINISHED
from hf_infini.tokenization import train_bpe

recipe_study = load_recipe("study")
CONFIGS = ROOT / "recipes" / "configs"
STEPS = 40
FLAGS = ["--n_layer", 2, "--n_embd", 32, "--n_head", 2, "--segment_length", 16, "--eval_steps", 10, "--save_steps", 4]
FLAGS += ["--use_cpu", "--precision", "float32", "--data_prose_filter", "false", "--data_context", 64]
FLAGS += ["--data_validation", 0.2]


# --- a whole study ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A corpus, and variants with data of their own: one that is possible, one whose tokenizer is not there."""
    base = tmp_path_factory.mktemp("study")
    lines = sample_text().splitlines()
    texts = ["\n".join(lines[start : start + 30]) for start in range(0, len(lines), 30)]
    rows = [json.dumps({"id": f"{number:03}", "text": text}) + "\n" for number, text in enumerate(texts)]
    (base / "text.jsonl").write_text("".join(rows), encoding="utf-8")
    own = "attention: infini\npositions: segment\ndata_fraction: 0.6\ndata_tokenizer: "
    (base / "letters.yaml").write_text(own + "characters\n", encoding="utf-8")
    (base / "nowhere.yaml").write_text(own + "no/such_tokenizer\n", encoding="utf-8")
    return base


def arguments(base, *options, variants=("s1", "best"), flags=()) -> list[str]:
    own = ["--scale", "mini", "--source", base / "text.jsonl", "--out", base / "out", "--max_steps", STEPS]
    own += ["--variants", *variants, "--largest_batch", "false", "--state_tokens", 32, 256, "--new_tokens", 20]
    own += ["--long_characters", 500, "--long_length", 512, "--prompt_words", 8, *options]
    return [*map(str, own), "--", *map(str, [*FLAGS, "--data_vocab_size", 300, *flags])]


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
    # Keys and values of 2 layers of 32 in float32; and of a window of 2 segments of 16, with 2 heads of 16 x 16 and 16
    assert s1["state_bytes"]["bytes"] == {"32": 32 * 2 * 2 * 32 * 4, "256": None}
    memory = 2 * (32 * 2 * 32 + 2 * 16 * 16 + 2 * 16) * 4
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
    other = study.Run("s1", 1, tmp_path / "s1-seed1", run.options, run.data)
    shutil.copytree(run.folder, other.folder)
    losses = json.loads((run.folder / "row_losses.json").read_text(encoding="utf-8"))
    for name in ("rows", "documents"):
        losses[name] = [[*row[:-3], row[-3] + 0.5 * row[-2], *row[-2:]] for row in losses[name]]
    (other.folder / "row_losses.json").write_text(json.dumps(losses), encoding="utf-8")
    plan.runs.append(other)
    run.status = other.status = FINISHED
    (found,) = study_results.collect(plan, {"base": "f"}, seed=0)["variants"]
    alone = variant(content, "s1")["cross_entropy"]
    # Half a nat more on every token of one of two seeds is a quarter in their mean, and nothing in its spread
    assert found["cross_entropy"] == {name: pytest.approx(value + 0.25) for name, value in alone.items()}
    assert found["folders"] == {"0": "s1", "1": "s1-seed1"} and list(found["by_seed"]) == [0, 1]


# --- refusals ---------------------------------------------------------------------------------------------------------


def refused(capsys, argv: list[str]) -> str:
    with pytest.raises(SystemExit) as stopped:
        recipe_study.main(argv)
    message = capsys.readouterr().err
    assert stopped.value.code in (1, 2) and "Traceback" not in message
    return message


@pytest.mark.parametrize(
    ("options", "flags", "message"),
    [
        (["--scale", "small"], [], "scale was 'mini' and is now 'small'"),
        (["--source", str(ROOT / "LICENSE")], [], "source_files was 1"),
        ([], ["--data_vocab_size", "400"], "data base: vocab_size was 300 and is now 400"),
        ([], ["--data_seed", "1"], "data base: seed was 0 and is now 1"),
        ([], ["--learning_rate", "0.5"], "s1: learning_rate was 0.002 and is now 0.5"),
        (["--max_steps", "9"], [], f"best: max_steps was {STEPS} and is now 9"),
    ],
)
def test_other_data_or_options_are_refused(base, finished, capsys, options, flags, message):
    before = (base / "out" / "study.json").read_bytes()
    said = refused(capsys, arguments(base, *options, flags=flags))
    if "source" in message:
        message = f"source was '{base / 'text.jsonl'}' and is now '{ROOT / 'LICENSE'}'"
    assert "was started with other settings" in said and message in said
    assert (base / "out" / "study.json").read_bytes() == before


def test_data_that_came_out_different_are_refused(base, finished, tmp_path, capsys):
    """The source keeps its name and size, but not its text; the prepared data are gone."""
    out = tmp_path / "out"
    shutil.copytree(base / "out", out)
    shutil.copy(base / "text.jsonl", tmp_path / "text.jsonl")
    record = json.loads((out / "study.json").read_text(encoding="utf-8"))
    (out / "study.json").write_text(json.dumps(record | {"source": str(tmp_path / "text.jsonl")}), encoding="utf-8")
    shutil.rmtree(out / "data" / "base")
    text = (tmp_path / "text.jsonl").read_text(encoding="utf-8")
    (tmp_path / "text.jsonl").write_text(text.replace(" the ", " eht "), encoding="utf-8")
    argv = [word.replace(str(base), str(tmp_path)) for word in arguments(base)]
    assert "came out different" in refused(capsys, argv)


@pytest.mark.parametrize(
    ("options", "flags", "message"),
    [
        (["--variants", "s1", "i9"], [], "give s1, i1, i2, best or a .yaml file of your own"),
        (["--variants", "s1", "s1"], [], "a variant is named twice"),
        (["--seeds", "1", "1"], [], "a seed is named twice"),
        (["--tokens", "0"], [], "--tokens must be greater than 0, got 0"),
        ([], ["--n_layr", "3"], "unrecognised arguments: --n_layr 3; did you mean --n_layer?"),
        ([], ["--attention", "quadratic"], "invalid choice: 'quadratic'"),
        ([], ["--data_fraction", "2"], "--fraction is 2"),
        ([], ["--data_split_by", "block"], "--data_split_by"),
        (["--long_length", "1"], [], "--long_length must be at least 2"),
    ],
)
def test_user_errors(tmp_path, capsys, options, flags, message):
    argv = ["--scale", "mini", "--source", "biographies", "--out", str(tmp_path / "out"), *options, "--", *flags]
    assert message in refused(capsys, argv)
    assert not (tmp_path / "out").exists()


def test_a_folder_of_something_else_is_left_alone(tmp_path, capsys):
    (tmp_path / "letter.txt").write_text("dear")
    said = refused(capsys, ["--scale", "mini", "--source", "biographies", "--out", str(tmp_path)])
    assert "is not empty and holds no study" in said and (tmp_path / "letter.txt").read_text() == "dear"


def test_a_dry_run_prints_and_writes_nothing(tmp_path, capsys):
    argv = ["--scale", "full", "--source", "CAROLINA", "--out", str(tmp_path / "out"), "--dry_run", "true"]
    recipe_study.main([*argv, "--launcher", "accelerate launch --multi_gpu --num_processes 8"])
    said = capsys.readouterr().out
    assert said.count("recipes/prepare.py --config ") == 2
    launched = [line for line in said.splitlines() if line.startswith("# accelerate launch --multi_gpu --num_processes 8 ")]
    assert len(launched) == 4 and said.count("num_processes: 8\n") == 4 and said.count("epochs: 1\n") == 4
    assert not (tmp_path / "out").exists()


# --- parts ------------------------------------------------------------------------------------------------------------


def plan_of(tmp_path, **settings) -> study.Plan:
    settings = {"scale": "mini", "source": "x", "variants": ["s1", "i1", "i2", "best"], "flags": {}} | settings
    return study.make_plan(out=tmp_path / "out", configs=CONFIGS, **settings)


def test_flags_go_above_variants_and_variants_above_the_scale(tmp_path):
    (tmp_path / "own.yaml").write_text("learning_rate: 0.5\nn_layer: 3\ndata_fraction: 0.25\ndata_context: 512\n")
    words = ["--n_layer=7", "--data_context", "256", "--layers", "0", "2", "--use_cpu", "--gate_init", "-4"]
    flags = study.read_flags(words)
    plan = plan_of(tmp_path, variants=["s1", str(tmp_path / "own.yaml")], flags=flags)
    s1, own = (run.options for run in plan.runs)
    assert (s1["learning_rate"], own["learning_rate"], own["n_layer"], own["n_embd"]) == (0.002, 0.5, 7, 256)
    assert own["layers"] == [0, 2] and own["use_cpu"] is True and own["gate_init"] == -4
    assert plan.data["fraction=0.25"] == plan.data["base"] | {"fraction": 0.25} and plan.data["base"]["context"] == 256
    assert [run.data for run in plan.runs] == ["base", "fraction=0.25"]
    assert study.read_flags(study.words_of(flags | {"use_cpu": "true"})) == flags


def test_one_length_of_segments_replaces_the_other(tmp_path):
    plan = plan_of(tmp_path, variants=["i1"], flags={"segment_length": 8})
    assert plan.runs[0].options["segment_length"] == 8 and "n_segments" not in plan.runs[0].options
    assert plan_of(tmp_path, variants=["i1"]).runs[0].options["n_segments"] == 64


def test_lengths_seeds_and_tokenizers(tmp_path):
    plan = plan_of(tmp_path, scale="full", tokens=5000, seeds=[0, 3], ready_tokenizer="some/tokenizer")
    assert [run.name for run in plan.runs] == ["s1", "s1-seed3", "i1", "i1-seed3", "i2", "i2-seed3", "best", "best-seed3"]
    assert all(run.options["max_tokens"] == 5000 and "epochs" not in run.options for run in plan.runs)
    assert [run.options["seed"] for run in plan.runs[:2]] == [0, 3]
    assert plan.data.keys() == {"base", "fraction=0.1,tokenizer=tokenizer"}
    assert plan.data[plan.runs[4].data]["tokenizer"] == "some/tokenizer"
    cut = plan_of(tmp_path, scale="full", max_steps=3, launcher="torchrun --nproc_per_node=2").runs[0].options
    assert cut["max_steps"] == 3 and cut["epochs"] == 1 and cut["num_processes"] == 2


@pytest.mark.parametrize("scale", study.SCALES)
def test_every_scale_and_variant_is_taken_by_the_recipes(scale, tmp_path):
    """Building the plan parses all options with the parsers of prepare.py and train.py."""
    options = recipe_study.Options(scale, "CAROLINA", str(tmp_path / "out"))
    plan = recipe_study.make_plan(options, [])
    assert [run.name for run in plan.runs] == list(study.VARIANTS) and len(plan.data) == 2
    assert {run.options["n_layer"] for run in plan.runs} == {"mini": {4}, "small": {12, 4}, "full": {12, 4}}[scale]


def test_configs_name_their_command():
    for file in sorted(CONFIGS.glob("study_*.yaml")):
        words = file.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ").split()
        assert words[:2] == ["python", "recipes/study.py"], file
        scale = words[words.index("--scale") + 1]
        assert scale in study.SCALES and (file.stem.split("_")[-1] in words)


def test_shards_are_counted_against_the_corpus_s_own_list(tmp_path):
    wikis = tmp_path / "corpus" / "wikis"
    (wikis / "pt").mkdir(parents=True)
    names = [f"pt/WIK{letter}.xml" for letter in "abcde"]
    (wikis / "checksum.sha256").write_text("".join(f"{'0' * 64}\t{name}\n" for name in names), encoding="utf-8")
    manifest = {"options": {"taxonomy": ["wik"], "revision": None}, "source": {"files": []}}
    manifest["source"]["files"] = [{"file": f"corpus/wikis/{name}.gz"} for name in names[:2]]
    assert study.corpus_share(manifest, str(tmp_path)) == "2 of 5 `wik` shards"
    manifest["source"]["files"] = [{"file": f"{name}.gz"} for name in names[:3]]
    assert study.corpus_share(manifest, str(wikis)) == "3 of 5 `wik` shards"
    (wikis / "checksum.sha256").unlink()
    assert study.corpus_share(manifest, str(wikis)) == "3 files"
    manifest["source"]["files"] = []
    assert study.corpus_share(manifest, "biographies") == "`biographies`"


def test_characters_of_tokens_add_up_to_the_text():
    texts = ["ação é não, coração 🙂🙂 ok", "", "<|endoftext|> ó"]
    tokenizer = train_bpe(["não é a ação do coração 🙂"] * 3, 290)
    tokens, characters = encode_documents(tokenizer, texts)
    assert [piece.sum() for piece in characters] == [len(text) for text in texts]
    assert [len(piece) for piece in tokens] == [len(piece) for piece in characters]
    assert all(piece[-1] == tokenizer.eos_token_id for piece in tokens)
    assert tokenizer.eos_token_id not in tokens[2][:-1]  # spelled out, it is text


def test_the_prompt_is_of_the_first_long_article():
    wiki, other = "https://pt.wikipedia.org/wiki?curid=1", "https://pt.wiktionary.org/wiki?curid=2"
    text = "um dois\ntrês  quatro " * 100
    documents = [{"text": text, "source": other, "title": "a"}]
    documents += [{"text": text, "source": wiki, "title": title} for title in ("b", "c")]
    found = choose_prompt(documents, 3, characters=2000)
    assert (found["title"], found["prompt"]) == ("b", "um dois\ntrês")
    assert found["continuation"].split() == ["quatro", "um", "dois", "três", "quatro", "um"]
    assert text.startswith(found["prompt"] + found["continuation"])
    assert choose_prompt(documents[:1], 3)["title"] == "a"
    short = [{"text": "só isto", "source": "", "title": "s"}]
    assert choose_prompt(short, 60)["prompt"] == "só isto" and choose_prompt(short, 60)["continuation"] == ""


def test_curves_and_their_turns():
    runs = [[{"tokens": 4, "eval_loss": 2.0}, {"tokens": 8, "train_loss": 1.0}, {"tokens": 8, "eval_loss": 1.0}],
            [{"tokens": 4, "eval_loss": 4.0}, {"tokens": 6, "eval_loss": 9.0}, {"tokens": 8, "eval_loss": 2.0}]]  # fmt: skip
    assert study_results.curve(runs) == [(4, 3.0), (8, 1.5)]
    assert study_results.turning_points([(1, 0.3), (2, 0.1), (3, -0.1), (4, -0.2), (5, 0.0)]) == [3, 5]
    assert study_results.turning_points([(1, -0.3), (2, -0.1)]) == []


def test_a_yaml_file_that_is_none(tmp_path):
    (tmp_path / "list.yaml").write_text("- 1\n- 2\n")
    with pytest.raises(UserError, match="must hold `option: value` lines"):
        study.read_settings(tmp_path / "list.yaml")
