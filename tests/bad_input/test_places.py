"""Places that cannot be written, hold something else or are full: one line, and nothing that was there is touched."""

import builtins
import os
import re
import resource
import shutil
import signal
import subprocess
import tempfile

import pytest

from bad_input import contents, refused
from running import ROOT, load_recipe, recipe
from small_runs import remove, small_data, small_run, stopped_run, training

NAMES = ("train", "evaluate_model", "memorize", "push", "study", "ngram_baseline")
RECIPES = {name: load_recipe(name) for name in (*NAMES, "generate")}


def words_of(name: str, base, out) -> list:
    """The command line of a recipe that would write to `out`."""
    run, data = small_run(base), small_data(base)
    return {
        "train": training(data, out),
        "evaluate_model": ["--model", run, "--data", data, "--out", out],
        "memorize": ["--model", run, "--text", data.parent / "text.jsonl", "--out", out],
        "push": ["--run", run, "--out", out, "--language", "en", "--data_license", "none", "--prompt", "To"],
        "study": ["--runs", run, "--data", data, "--out", out],
        "ngram_baseline": ["--data", data, "--out", f"{out}.json"],
    }[name]


def in_a_file(folder):
    (folder / "file").write_text("mine")
    return folder / "file" / "out"


def below_a_file(folder):
    return in_a_file(folder) / "deeper" / "out"


def long_name(folder):
    return folder / ("x" * 300)


def long_folder(folder):
    return folder / ("x" * 300) / "out"


def long_path(folder):
    return folder.joinpath(*["y" * 200] * 25)


def link_to_itself(folder):
    (folder / "circle").symlink_to(folder / "circle")
    return folder / "circle" / "out"


def link_to_nothing(folder):
    (folder / "link").symlink_to(folder / "gone" / "deeper")
    return folder / "link" / "out"


def proc(folder):
    return "/proc/hf_infini/out"


def device(folder):
    return "/dev/null/out"


PLACES = (in_a_file, below_a_file, long_name, long_folder, long_path, link_to_itself, link_to_nothing, proc, device)


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
@pytest.mark.parametrize("name", NAMES)
def test_places_that_cannot_be_written(base, tmp_path, capsys, name, place):
    out = place(tmp_path)
    said = str(tmp_path) if str(out).startswith(str(tmp_path)) else str(out).removesuffix("/out")
    refused(RECIPES[name].main, words_of(name, base, out), capsys, said, keeps=tmp_path)


# --- what is there already --------------------------------------------------------------------------------------------


def a_file(folder, base):
    (folder / "out").write_text("mine")
    return folder / "out"


def letters(folder, base):
    (folder / "out").mkdir()
    for name in ("letters.txt", "README.md", "config.json", "report.md", "model.safetensors"):
        (folder / "out" / name).write_text("mine")
    return folder / "out"


def the_data(folder, base):
    return shutil.copytree(small_data(base), folder / "out")


def the_run(folder, base):
    return shutil.copytree(small_run(base), folder / "out")


FOLDERS = [(name, place) for name in ("train", "push", "study") for place in (a_file, letters, the_data, the_run)]
FOLDERS.remove(("train", the_run))  # which is finished


@pytest.mark.parametrize(("name", "place"), FOLDERS, ids=[f"{name}-{place.__name__}" for name, place in FOLDERS])
def test_folders_of_something_else(base, tmp_path, capsys, name, place):
    out = place(tmp_path, base)
    refused(RECIPES[name].main, words_of(name, base, out), capsys, str(out), "choose another", keeps=tmp_path)


def test_a_run_of_other_options(base, tmp_path, capsys):
    out = the_run(tmp_path, base)
    refused(RECIPES["train"].main, training(small_data(base), out, "--seed", 1), capsys, "seed was 0", keeps=tmp_path)


FILES = [(name, file) for name in ("evaluate_model", "ngram_baseline") for file in ("result", "config", "run", "metrics")]


@pytest.mark.parametrize(("name", "file"), FILES)
def test_files_of_something_else(base, tmp_path, capsys, name, file):
    out = the_run(tmp_path, base)
    (out / "metrics.json").write_text("mine")
    words = words_of(name, base, out / file)
    refused(RECIPES[name].main, words, capsys, f"{out / file}.json", "choose another --out", keeps=tmp_path)


def test_a_picture_of_something_else(base, tmp_path, capsys):
    (tmp_path / "holiday.png").write_bytes(b"mine")
    words = words_of("evaluate_model", base, tmp_path / "holiday")
    refused(RECIPES["evaluate_model"].main, words, capsys, "holiday.png", "choose another --out", keeps=tmp_path)


@pytest.mark.parametrize("there", ["text", "model", "folder", "partial"])
def test_memorize_replaces_nothing(base, tmp_path, capsys, there):
    run = the_run(tmp_path, base)
    (tmp_path / "plays.txt").write_text("To be")
    out = {"text": tmp_path / "plays.txt", "model": run / "model.safetensors", "folder": run}.get(there, tmp_path / "new")
    if there == "partial":
        (tmp_path / "new.partial").write_text("mine")
    words = ["--model", run, "--text", tmp_path / "plays.txt", "--out", out]
    refused(RECIPES["memorize"].main, words, capsys, str(out), keeps=tmp_path)


def test_an_evaluation_is_replaced_and_a_card_too(base, tmp_path):
    """What the recipe itself has written."""
    words = words_of("evaluate_model", base, tmp_path / "found")
    for _ in range(2):
        RECIPES["evaluate_model"].main([*map(str, words), "--device", "cpu"])
    assert sorted(os.listdir(tmp_path)) == ["found.json", "found.png"]


STOPPED = {
    "train": "from the last checkpoint",
    "evaluate_model": "are kept",
    "memorize": "FILE.partial",
    "push": "all or nothing",
}
STOPPED |= {"study": "goes on from here", "generate": "printed above", "ngram_baseline": "nothing was written"}

# --- a full disk ------------------------------------------------------------------------------------------------------

FULL = "no space left for "


@pytest.fixture
def full_disk(monkeypatch):
    """A function after whose call no file gets more than so many bytes, as on a disk that is full."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    def fill(size: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))

    yield fill
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


FILLED = [(name, size) for name in NAMES for size in (0, 3000, 20_000) if name not in ("push", "study")]
FILLED += [pytest.param(name, 3000, marks=pytest.mark.slow) for name in ("push", "study")]


@pytest.mark.parametrize(("name", "size"), FILLED)
def test_a_full_disk(base, tmp_path, capsys, full_disk, monkeypatch, name, size):
    """The line names the place and how to go on, and a second start with room does what a first one would have done."""
    monkeypatch.setattr("cards.folder.check_folder", lambda folder: None)  # an interpreter more, which test_push.py has
    words = [*map(str, words_of(name, base, tmp_path / "out"))]
    full_disk(size)
    try:
        RECIPES[name].main(words)
    except SystemExit:
        full_disk(resource.RLIM_INFINITY)
        said = capsys.readouterr().err.rstrip().rsplit("\n", 1)[-1]
        place = tempfile.gettempdir() if "tokens of the text" in said else str(tmp_path / "out")
        assert re.match("error: .*(no space left|no room|File too large)", said) and place in said, said
        assert STOPPED[name] in said
        assert not any(
            (tmp_path / name).exists() for name in ("out.json", "out/result.json", "out/README.md", "out/report.md")
        )
        RECIPES[name].main(words)
    else:
        full_disk(resource.RLIM_INFINITY)  # before pytest writes, perhaps into a file that is larger


@pytest.mark.parametrize("size", [0, 2000, 4000, 9000, 15_000])
def test_a_full_disk_keeps_the_last_checkpoint(base, tmp_path, capsys, full_disk, size):
    run = stopped_run(base, tmp_path / "run")
    remove(run / "checkpoint-6")
    before = contents(run / "checkpoint-4")
    small_data(base)
    full_disk(size)
    said = refused(RECIPES["train"].main, training(small_data(base), run), capsys, FULL, str(run), "goes on from the last")
    assert "make room" in said and contents(run / "checkpoint-4") == before
    full_disk(resource.RLIM_INFINITY)
    RECIPES["train"].main(training(small_data(base), run))
    assert (run / "model.safetensors").read_bytes() == (small_run(base) / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_a_full_disk_keeps_what_was_there(base, tmp_path, capsys, full_disk, monkeypatch):
    monkeypatch.setattr("cards.folder.check_folder", lambda folder: None)
    words = {name: words_of(name, base, tmp_path / name) for name in ("evaluate_model", "push", "ngram_baseline")}
    for name, given in words.items():
        RECIPES[name].main([*map(str, given)])
    for name, given in words.items():
        full_disk(500)
        refused(RECIPES[name].main, given, capsys, FULL, "make room", keeps=tmp_path)
        full_disk(resource.RLIM_INFINITY)


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--json", "true"]])
def test_generate_into_a_full_disk(base, options):
    """As a program: the interpreter writes what is left in the buffer when it ends."""
    words = ["--model", small_run(base), "--prompt", "To be", "--device", "cpu", "--max_new_tokens", 9, *options]
    with open("/dev/full", "w") as out:
        done = subprocess.run(
            [*recipe("generate"), *map(str, words)], cwd=ROOT, stdout=out, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 1 and "Exception ignored" not in done.stderr and "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith(f"error: {FULL}the output: make room")


@pytest.mark.slow
def test_nobody_reads_what_generate_prints(base):
    words = ["--model", small_run(base), "--prompt", "To be", "--device", "cpu", "--json", "true"]
    process = subprocess.Popen(
        [*recipe("generate"), *map(str, words)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    process.stdout.close()
    errors = process.stderr.read()
    assert process.wait(200) == 141 and "Traceback" not in errors and "Exception ignored" not in errors
    assert errors.splitlines()[-1].startswith("stopped, as nobody reads the output any more")


# --- inputs that are no files -----------------------------------------------------------------------------------------

INPUTS = {"nothing": lambda folder: folder / "none", "long": long_name, "inside": in_a_file, "folder": lambda folder: folder}
INPUTS |= {"circle": lambda folder: link_to_itself(folder).parent, "empty name": lambda folder: ""}
OPTIONS = [("generate", "--model"), ("generate", "--prompt_file"), ("generate", "--memory"), ("memorize", "--model")]
OPTIONS += [
    ("memorize", "--text"),
    ("evaluate_model", "--model"),
    ("evaluate_model", "--data"),
    ("evaluate_model", "--text"),
]
OPTIONS += [("train", "--data"), ("train", "--init_from"), ("train", "--dilute_with"), ("push", "--run"), ("push", "--data")]
OPTIONS += [("push", "--evaluation"), ("push", "--baseline"), ("push", "--notes"), ("study", "--runs"), ("study", "--data")]
OPTIONS += [("study", "--baselines"), ("study", "--study"), ("study", "--train")]


@pytest.mark.parametrize("given", INPUTS)
@pytest.mark.parametrize(("name", "option"), OPTIONS)
def test_inputs_that_are_not_there(base, tmp_path, capsys, name, option, given):
    place = INPUTS[given](tmp_path)
    if name == "generate":
        words = ["--model", small_run(base), *(["--prompt", "To"] if option != "--prompt_file" else [])]
    else:
        words = words_of(name, base, tmp_path / "out")
    if option == "--text" and name == "evaluate_model":
        words = [*words[:2], *words[4:]]
    if option in ("--study", "--train"):
        words = words[2:]
    refused(RECIPES[name].main, [*words, option, place], capsys, "" if given == "empty name" else str(place)[:60])
    assert not (tmp_path / "out").exists() or name == "study"


# --- stopped ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["Ctrl-C", "SIGTERM"])
@pytest.mark.parametrize("name", STOPPED)
def test_stopped_while_it_loads(base, tmp_path, capsys, monkeypatch, name, number, code):
    words = ["--model", small_run(base), "--prompt", "To"] if name == "generate" else words_of(name, base, tmp_path / "out")
    opened = builtins.open

    def stop(file, *args, **kwargs):
        if str(file).endswith(("tokenizer.json", "manifest.json", "result.json", "config.json")):
            os.kill(os.getpid(), number)
        return opened(file, *args, **kwargs)

    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts behind itself ignores it
    try:
        monkeypatch.setattr("io.open", stop)
        monkeypatch.setattr(builtins, "open", stop)
        with pytest.raises(SystemExit) as end:
            RECIPES[name].main([*map(str, words)])
    finally:
        signal.signal(signal.SIGINT, handler)
    errors = capsys.readouterr().err
    assert end.value.code == code and "Traceback" not in errors
    line = errors.rstrip().rsplit("\n", 1)[-1]
    assert line.startswith("stopped by ") and STOPPED[name] in line
