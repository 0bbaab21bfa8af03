"""What a study is asked for: options, files of scales and variants, refusals; its processes, texts and curves."""

import subprocess
import sys

import pytest

from cli import UserError
from corpora.tokenization import train_bpe
from running import ROOT, load_recipe
from studies import planning, results
from studies.evaluation import choose_prompt, encode_documents
from studies.processes import Task, run_tasks

recipe_study = load_recipe("study")
CONFIGS = ROOT / "recipes" / "configs"


def refused(capsys, argv: list[str]) -> str:
    with pytest.raises(SystemExit) as stopped:
        recipe_study.main(argv)
    message = capsys.readouterr().err
    assert stopped.value.code in (1, 2) and "Traceback" not in message
    return message


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
        ([], ["--max_steps", "3"], "leave it out behind --, and give --max_steps to the study"),
        ([], ["--out=x"], "--out is set by the study: leave it out behind --"),
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


def test_the_files_of_all_variants_are_taken(tmp_path, capsys):
    variants = sorted(path.stem.removeprefix("study_") for path in CONFIGS.glob("study_*.yaml"))
    variants = [name for name in variants if not name.startswith(("scale_", "data_"))]
    argv = ["--scale", "mini", "--source", "biographies", "--out", str(tmp_path / "out"), "--dry_run", "true"]
    recipe_study.main([*argv, "--variants", *variants])
    said = capsys.readouterr().out
    assert len(variants) == 6 and said.count("recipes/train.py --config ") == 6


# --- parts ------------------------------------------------------------------------------------------------------------


def plan_of(tmp_path, **settings) -> planning.Plan:
    settings = {"scale": "mini", "source": "x", "variants": ["s1", "i1", "i2", "best"], "flags": {}} | settings
    return planning.make_plan(out=tmp_path / "out", configs=CONFIGS, **settings)


def test_flags_go_above_variants_and_variants_above_the_scale(tmp_path):
    (tmp_path / "own.yaml").write_text("learning_rate: 0.5\nn_layer: 3\ndata_fraction: 0.25\ndata_context: 512\n")
    words = ["--n_layer=7", "--data_context", "256", "--layers", "0", "2", "--use_cpu", "--gate_init", "-4"]
    flags = planning.read_flags(words)
    plan = plan_of(tmp_path, variants=["s1", str(tmp_path / "own.yaml")], flags=flags)
    s1, own = (run.options for run in plan.runs)
    assert s1["learning_rate"] == planning.read_settings(CONFIGS / "study_scale_mini.yaml")["learning_rate"] != 0.5
    assert (own["learning_rate"], own["n_layer"], own["n_embd"]) == (0.5, 7, 256)
    assert own["layers"] == [0, 2] and own["use_cpu"] is True and own["gate_init"] == -4
    assert plan.data["fraction=0.25"] == plan.data["base"] | {"fraction": 0.25} and plan.data["base"]["context"] == 256
    assert [run.data for run in plan.runs] == ["base", "fraction=0.25"]
    assert planning.read_flags(planning.words_of(flags | {"use_cpu": "true"})) == flags


def test_one_length_of_segments_replaces_the_other(tmp_path):
    plan = plan_of(tmp_path, variants=["i1"], flags={"segment_length": 8})
    assert plan.runs[0].options["segment_length"] == 8 and "n_segments" not in plan.runs[0].options
    assert plan_of(tmp_path, variants=["i1"]).runs[0].options["n_segments"] == 64


def test_lengths_seeds_and_tokenizers(tmp_path):
    plan = plan_of(tmp_path, scale="full", tokens=5000, seeds=[0, 3], ready_tokenizer="some/tokenizer")
    assert [run.name for run in plan.runs] == ["s1", "s1-seed3", "i1", "i1-seed3", "i2", "i2-seed3", "best", "best-seed3"]
    assert all(run.options["max_tokens"] == 5000 for run in plan.runs)
    assert [run.variant for run in plan.runs if "epochs" in run.options] == ["i2", "i2"]  # one pass over its tenth at most
    assert [run.options["seed"] for run in plan.runs[:2]] == [0, 3]
    assert plan.data.keys() == {"base", "fraction=0.1,tokenizer=tokenizer"}
    assert plan.data[plan.runs[4].data]["tokenizer"] == "some/tokenizer"
    cut = plan_of(tmp_path, scale="full", max_steps=3, launcher="torchrun --nproc_per_node=2").runs[0].options
    assert cut["max_steps"] == 3 and cut["epochs"] == 1 and cut["num_processes"] == 2


@pytest.mark.parametrize("scale", planning.SCALES)
def test_every_scale_and_variant_is_taken_by_the_recipes(scale, tmp_path):
    """Building the plan parses all options with the parsers of prepare.py and train.py."""
    options = recipe_study.Options(scale, "CAROLINA", str(tmp_path / "out"))
    plan = recipe_study.make_plan(options, [])
    assert [run.name for run in plan.runs] == list(planning.VARIANTS) and len(plan.data) == 2
    assert {run.options["n_layer"] for run in plan.runs} == {"mini": {4}, "small": {12, 4}, "full": {12, 4}}[scale]


def test_configs_name_their_command():
    for file in sorted(CONFIGS.glob("study_*.yaml")):
        words = file.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ").split()
        assert words[:2] == ["python", "recipes/study.py"], file
        scale = words[words.index("--scale") + 1]
        name = file.stem.removeprefix("study_").removeprefix("scale_").removeprefix("data_")
        assert scale in planning.SCALES and name in words, file


def test_shards_are_counted_against_the_corpus_s_own_list(tmp_path):
    wikis = tmp_path / "corpus" / "wikis"
    (wikis / "pt").mkdir(parents=True)
    names = [f"pt/WIK{letter}.xml" for letter in "abcde"]
    (wikis / "checksum.sha256").write_text("".join(f"{'0' * 64}\t{name}\n" for name in names), encoding="utf-8")
    manifest = {"options": {"taxonomy": ["wik"], "revision": None}, "source": {"files": []}}
    manifest["source"]["files"] = [{"file": f"corpus/wikis/{name}.gz"} for name in names[:2]]
    assert planning.corpus_share(manifest, str(tmp_path)) == "2 of 5 `wik` shards"
    manifest["source"]["files"] = [{"file": f"{name}.gz"} for name in names[:3]]
    assert planning.corpus_share(manifest, str(wikis)) == "3 of 5 `wik` shards"
    (wikis / "checksum.sha256").unlink()
    assert planning.corpus_share(manifest, str(wikis)) == "3 files"
    manifest["source"]["files"] = []
    assert planning.corpus_share(manifest, "biographies") == "`biographies`"


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
    assert results.curve(runs) == [(4, 3.0), (8, 1.5)]
    assert results.turning_points([(1, 0.3), (2, 0.1), (3, -0.1), (4, -0.2), (5, 0.0)]) == [3, 5]
    assert results.turning_points([(1, -0.3), (2, -0.1)]) == []


def test_processes_end_with_what_became_of_them(tmp_path):
    say = "import os, sys; print(os.environ['OMP_NUM_THREADS']); sys.exit('no luck' if len(sys.argv) > 1 else 0)"
    commands = {"a": [sys.executable, "-c", say], "b": [sys.executable, "-c", say, "x"]}
    tasks = [Task(name, command, tmp_path / "logs" / name) for name, command in commands.items()]
    run_tasks(tasks, "test", jobs=2, threads=3)
    assert [(task.status, task.reason) for task in tasks] == [("finished", ""), ("failed", "exit status 1: no luck")]
    assert tasks[0].log.read_text() == "3\n"


def test_interrupted_the_processes_end_too(tmp_path):
    """In a process of its own: it is the main thread that an interrupt reaches."""
    code = """
import os, pathlib, psutil, signal, sys, threading
from studies.processes import Task, run_tasks
signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts behind itself ignores interrupts
tasks = [Task(name, ["sleep", "600"], pathlib.Path(sys.argv[1]) / name) for name in ("a", "b")]
threading.Timer(1, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
try:
    run_tasks(tasks, "test", jobs=2)
except KeyboardInterrupt:
    sys.exit(42 if not [child for child in psutil.Process().children() if "sleep" in child.cmdline()] else 1)
"""
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], timeout=120, cwd=ROOT / "recipes").returncode == 42


def test_a_yaml_file_that_is_none(tmp_path):
    (tmp_path / "list.yaml").write_text("- 1\n- 2\n")
    with pytest.raises(UserError, match="must hold `option: value` lines"):
        planning.read_settings(tmp_path / "list.yaml")
