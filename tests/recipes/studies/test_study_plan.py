"""What a study is asked for: files of variants, settings, refusals; its processes and the
characters of texts."""

import os
import subprocess
import sys

import pytest

from cli import NotPossible
from corpora.tokenization import train_bpe
from running import ROOT, load_recipe
from studies import plan
from studies.measure import encode_documents
from studies.processes import Task, run_tasks

study = load_recipe("study")
CONFIGS = ROOT / "recipes" / "configs"
VARIANTS = str(CONFIGS / "study_variants.yaml")


def planned(tmp_path, *files, **settings) -> list[plan.Run]:
    return plan.runs_of(plan.read_study([str(file) for file in files], **settings), tmp_path)


# --- the files of the published study -------------------------------------------------------------


def test_every_scale_and_variant_is_taken_by_the_recipes(tmp_path, capsys):
    """Planning parses all options with the parsers of prepare.py, train.py and evaluate_model.py; a
    dry run only plans."""
    for scale in ("mini", "small", "full"):
        words = [
            "--study",
            VARIANTS,
            str(CONFIGS / f"study_{scale}.yaml"),
            *"--source CAROLINA --dry_run".split(),
        ]
        study.main([*words, "--out", str(tmp_path / "out")])
        lines = capsys.readouterr().out.splitlines()
        for name, count in (("prepare", 2), ("train", 6), ("evaluate_model", 12)):
            assert sum(f"recipes/{name}.py" in line for line in lines) == count
        i2 = next(line for line in lines if "recipes/train.py" in line and line.endswith("out/i2"))
        assert "--n_layer 4 " in i2 and "--learning_rate 0.0001 " in i2 and i2.count("data/i2") == 1
        assert not (tmp_path / "out").exists()


def test_configs_name_their_command():
    for file in sorted(CONFIGS.glob("study_*.yaml")):
        words = file.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ").split()
        assert (
            words[:2] == ["python", "recipes/study.py"] and f"recipes/configs/{file.name}" in words
        ), file
        assert all((ROOT / word).is_file() for word in words if word.startswith("recipes/")), file


# --- parts ----------------------------------------------------------------------------------------


def test_settings_go_above_files_and_variants_above_what_all_share(tmp_path):
    (tmp_path / "train.yaml").write_text("learning_rate: 0.5\nn_layer: 3\nn_head: 1\n")
    (tmp_path / "study.yaml").write_text(
        "train: {n_layer: 5, n_embd: 64}\nvariants: {a: , b: {n_layer: 7, layers: [0]}}\n"
    )
    settings = ["train.n_embd=32", "variants.b.gate_init=-4", "variants.b.data={fraction: 0.25}"]
    runs = planned(
        tmp_path, tmp_path / "study.yaml", train=str(tmp_path / "train.yaml"), settings=settings
    )
    shared = {"learning_rate": 0.5, "n_head": 1, "n_embd": 32, "seed": 0}
    assert [(run.name, run.data) for run in runs] == [("a", "base"), ("b", "b")]
    assert runs[0].options == shared | {"n_layer": 5}
    assert runs[1].options == shared | {"n_layer": 7, "layers": [0], "gate_init": -4}
    words = plan.words_of({"layers": [0, 2], "use_cpu": True, "n_inner": None, "gate_init": -4.5})
    assert words == ["--layers", "0", "2", "--use_cpu", "True", "--gate_init", "-4.5"]


def test_variants_and_seeds_make_names(tmp_path):
    runs = planned(tmp_path, settings=["variants={s1: , 'a b': {n_layer: 1}}", "seeds=[0, 3]"])
    names = [run.name for run in runs]
    assert names == ["s1", "s1,seed=3", "a_b", "a_b,seed=3"]
    assert runs[3].options == {"n_layer": 1, "seed": 3} and runs[3].variant == "a b"
    assert runs[3].folder == tmp_path / names[3]
    (only,) = planned(tmp_path, settings=["seeds=[5]", "train.seed=5"])
    assert only.name == "run"


REFUSED = [
    (["--variants", "s1", "i9"], "there is no i9; the study has s1, i1, i2, best, s1_rope, window"),
    (["--variants", "s1", "s1", "--seeds", "1", "1"], "would share the folder s1,seed=1"),
    (["--set", "variants.data={}"], "would share the folder data"),
    (["--set", "train.n_layr=3"], "unrecognised arguments: --n_layr 3"),
    (["--set", "variants.s1.attention=quadratic"], "invalid choice: 'quadratic'"),
    (["--set", "evaluate.long.lenght=2"], "unrecognised arguments: --lenght 2"),
    (
        ["--set", "evaluate.far.task=facts"],
        "evaluate 'far': give options of evaluate_model.py's task perplexity",
    ),
    (
        ["--set", "train.out=x"],
        "'out' cannot be an option of train.py in a study: study.py sets it",
    ),
    (
        ["--set", "training.n_layer=3"],
        "has no section 'training'; it may have data, train, variants",
    ),
    (["--set", "train=3"], "the section 'train' of a study is a dict, got 3"),
    (["--set", "train.n_layer"], "give SECTION.NAME=VALUE"),
    (["--set", "train.n_layer=[1"], "is not valid YAML"),
    (
        ["--set", "variants.s1=3"],
        "variant 's1': give options of train.py and, in 'data', of prepare.py, got 3",
    ),
    (
        ["--set", "data.source=x"],
        "'source' cannot be an option of prepare.py in a study: study.py sets it",
    ),
    (
        ["--set", "evaluate.long.data=x"],
        "'data' cannot be an option of evaluate_model.py in a study: study.py sets it",
    ),
    (["--data", "data/x"], "exactly one of --source and --data"),
    (["--runs", "a", "b"], "--study is for runs to be trained"),
]
REFUSED_ALONE = [
    (
        ["--data", "x"],
        "give what is to be trained with --study, --train or --set, or finished runs with --runs",
    ),
    (["--runs", "x/a", "y/a", "--data", "x"], "give folders of different names"),
    (["--runs", "a", "--data", "x", "--jobs", "2"], "--jobs is for runs to be trained"),
    (
        ["--data", "x", "--set", "train.n_layer=1", "data.context=8"],
        "would have no effect, as --data is given",
    ),
    (
        ["--study", VARIANTS, "--data", "x"],
        "i2 has data of its own: give --source instead of --data",
    ),
    (["--study", "none.yaml", "--data", "x"], "cannot be read"),
]


def test_what_is_refused(tmp_path, capsys):
    words = ["--study", VARIANTS, "--source", "biographies", "--dry_run"]
    for argv, message in [
        *(([*words, *options], message) for options, message in REFUSED),
        *REFUSED_ALONE,
    ]:
        with pytest.raises(SystemExit) as stopped:
            study.main([*argv, "--out", str(tmp_path / "out")])
        said = capsys.readouterr().err
        assert stopped.value.code in (1, 2) and message in said and "Traceback" not in said
    assert not (tmp_path / "out").exists()


def test_what_is_given_later_goes_above(tmp_path, capsys):
    words = ["--study", VARIANTS, "--source", "biographies", "--dry_run", "--out", str(tmp_path)]
    settings = (
        "train.learning_rate=2 variants.i2.learning_rate=3 variants.s1= variants.s1.n_layer=5"
    )
    settings += " data.fraction=0.5 evaluate.long.length=99"
    study.main([*words, "--set", *settings.split()])
    text = capsys.readouterr().out
    counts = {"learning_rate 3 ": 1, "learning_rate 2 ": 5, "n_layer 5 ": 1, "length 99 ": 6}
    counts["fraction 0.5 "] = 1
    assert {option: text.count(f"--{option}") for option in counts} == counts


def test_characters_of_tokens_add_up_to_the_text():
    texts = ["ação é não, coração 🙂🙂 ok", "", "<|endoftext|> ó"]
    tokenizer = train_bpe(["não é a ação do coração 🙂"] * 3, 290)
    tokens, characters = encode_documents(tokenizer, texts)
    assert [piece.sum() for piece in characters] == [len(text) for text in texts]
    assert [len(piece) for piece in tokens] == [len(piece) for piece in characters]
    assert all(piece[-1] == tokenizer.eos_token_id for piece in tokens)
    assert tokenizer.eos_token_id not in tokens[2][:-1]  # spelled out, it is text


# --- processes ------------------------------------------------------------------------------------


OUTCOMES = [
    (0, "error: of an earlier start", ("finished", "")),
    (
        1,
        f"10%|\r20%|\nerror: {NotPossible('n_head=3')}\nlauncher: failed\n",
        ("not possible", "n_head=3"),
    ),
    (1, "error: no data\n", ("failed", "no data")),
    (1, "Traceback\n  raise\nValueError: no\n", ("failed", "exit status 1: ValueError: no")),
    (-9, "", ("failed", "exit status -9: no output")),
]


def test_outcomes(tmp_path):
    for status, log, expected in OUTCOMES:
        task = Task("a", [], tmp_path / "a.log")
        task.log.write_text(log)
        task.finish(status)
        assert (task.status, task.reason) == expected


REFUSES = """
import os, sys
from cli import NotPossible, exit_on_error

@exit_on_error(when_stopped="")
def main(argv=None):
    print(os.environ["OMP_NUM_THREADS"])
    if len(sys.argv) > 1:
        raise NotPossible("n_head=3")

main()
"""


def test_processes_tell_why_they_failed(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (ROOT / "recipes", ROOT))))
    (tmp_path / "refuses.py").write_text(REFUSES)
    command = [sys.executable, str(tmp_path / "refuses.py")]
    commands = {"a": command, "b": [*command, "x"], "c": ["false"]}
    tasks = [
        Task(name, command, tmp_path / "logs" / f"{name}.log") for name, command in commands.items()
    ]
    run_tasks(tasks, "test", jobs=2, threads=3)
    expected = [
        ("finished", ""),
        ("not possible", "n_head=3"),
        ("failed", "exit status 1: no output"),
    ]
    assert [(task.status, task.reason) for task in tasks] == expected
    assert tasks[0].log.read_text() == "3\n"


def test_interrupted_the_processes_end_too(tmp_path):
    """In a process of its own: it is the main thread that an interrupt reaches."""
    code = """
import os, pathlib, psutil, signal, sys, threading
from studies.processes import Task, run_tasks
# What a shell starts behind itself ignores interrupts
signal.signal(signal.SIGINT, signal.default_int_handler)
tasks = [Task(name, ["sleep", "600"], pathlib.Path(sys.argv[1]) / name) for name in ("a", "b")]
threading.Timer(1, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
try:
    run_tasks(tasks, "test", jobs=2)
except KeyboardInterrupt:
    left = [child for child in psutil.Process().children() if "sleep" in child.cmdline()]
    sys.exit(42 if not left else 1)
"""
    assert (
        subprocess.run(
            [sys.executable, "-c", code, str(tmp_path)], timeout=120, cwd=ROOT / "recipes"
        ).returncode
        == 42
    )
