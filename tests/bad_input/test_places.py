"""Places that cannot be written, hold something else or are full: one line, and nothing that was
there is touched."""

import contextlib
import resource
import shutil
import signal

import pytest

from bad_input import contents, refused
from running import load_recipe
from small_runs import remove, small_data, small_run, stopped_run, training

NAMES = ("train", "evaluate_model", "model_card", "study", "prepare", "prepare_recall")
CARD = ["--language", "en", "--data_license", "none", "--prompt", "To"]
OPTIONS = {
    "generate": ["--model", "--prompt_file"],
    "evaluate_model": ["--model", "--data", "--text"],
    "train": ["--data", "--init_from", "--dilute_with"],
    "model_card": ["--run", "--notes"],
    "study": ["--runs", "--data", "--study", "--train"],
    "prepare_recall": ["--data"],
}


def words_of(name: str, base, out) -> list:
    """The command line of a recipe that would write to `out`."""
    run, data = small_run(base), small_data(base)
    return {
        "train": training(data, out),
        "evaluate_model": ["--model", run, "--data", data, "--out", out],
        "model_card": ["--run", run, "--out", out, *CARD],
        "study": ["--runs", run, "--data", data, "--out", out],
        "prepare": [
            *f"--source {data.parent / 'text.jsonl'} --tokenizer characters --context 16".split(),
            *f"--out {out}".split(),
        ],
        "prepare_recall": f"--data {data} --out {out} --rows 2 --mix text=1 --context 8".split(),
        "generate": ["--model", run],
    }[name]


@pytest.mark.parametrize("name", NAMES)
def test_places_that_cannot_be_written(base, tmp_path, capsys, name):
    (tmp_path / "file").write_text("mine")
    for out in (tmp_path / "file" / "out", tmp_path / ("x" * 300), "/proc/hf_infini/out"):
        refused(
            load_recipe(name).main,
            words_of(name, base, out),
            capsys,
            str(out).removesuffix("/out"),
            keeps=tmp_path,
        )


@pytest.mark.parametrize("name", ["train", "model_card", "study", "prepare", "prepare_recall"])
def test_folders_of_something_else(base, tmp_path, capsys, name):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "letters").mkdir()
    for file in ("letters.txt", "README.md", "config.json", "report.md", "model.safetensors"):
        (tmp_path / "letters" / file).write_text("mine")
    shutil.copytree(small_run(base), tmp_path / "run")
    for out in ("file", "letters", *(["run"] if name != "train" else [])):  # there it is finished
        words = words_of(name, base, tmp_path / out)
        refused(load_recipe(name).main, words, capsys, str(tmp_path / out), keeps=tmp_path)


def test_files_of_something_else(base, tmp_path, capsys):
    out = shutil.copytree(small_run(base), tmp_path / "out")
    for content, file in (
        ("mine", "notes.json"),
        ('{"mine": 1}', "mine.json"),
        ("[" * 100_000, "deep.json"),
    ):
        (out / file).write_text(content)
        words = words_of("evaluate_model", base, out / file.partition(".")[0])
        refused(
            load_recipe("evaluate_model").main,
            words,
            capsys,
            str(out / file),
            "choose another --out",
            keeps=tmp_path,
        )


@pytest.mark.parametrize("name", OPTIONS)
def test_inputs_that_are_not_there(base, tmp_path, capsys, name):
    (tmp_path / "file").write_text("mine")
    for option in OPTIONS[name]:
        words = words_of(name, base, tmp_path / "out")
        if name == "generate" and option != "--prompt_file":
            words += ["--prompt", "To"]
        if (name, option) == ("evaluate_model", "--text"):
            words = [*words[:2], *words[4:]]
        if option in ("--study", "--train"):
            words = words[2:]
        for place in (tmp_path / "none", tmp_path / "file" / "inside", tmp_path):
            refused(load_recipe(name).main, [*words, option, place], capsys, str(place))


# --- a full disk ----------------------------------------------------------------------------------


@contextlib.contextmanager
def full_disk(size: int):
    """Within it, no file gets more than so many bytes, as on a disk that is full."""
    before, handler = (
        resource.getrlimit(resource.RLIMIT_FSIZE),
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN),
    )
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


FULL = {"evaluate_model": 0}


@pytest.mark.parametrize("name", FULL)
def test_a_full_disk(base, tmp_path, capsys, name):
    """A second start with room does what a first one would have done."""
    main, words = load_recipe(name).main, [*map(str, words_of(name, base, tmp_path / "out"))]
    with full_disk(FULL[name]), pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 1 and "error: " in capsys.readouterr().err
    main(words)


@pytest.mark.parametrize("size", [0, 4000])
def test_a_full_disk_keeps_the_last_checkpoint(base, tmp_path, capsys, size):
    run = stopped_run(base, tmp_path / "run")
    remove(run / "checkpoint-6")
    before = contents(run / "checkpoint-4")
    with full_disk(size), pytest.raises(SystemExit):
        load_recipe("train").main(training(small_data(base), run))
    assert contents(run / "checkpoint-4") == before
    load_recipe("train").main(training(small_data(base), run))
    assert (run / "model.safetensors").read_bytes() == (
        small_run(base) / "model.safetensors"
    ).read_bytes()
