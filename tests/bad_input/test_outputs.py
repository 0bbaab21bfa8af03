"""What is finished stays as it is until the new work is there, and files of something else are never written over."""

import json
import shutil
from pathlib import Path

import pytest

from bad_input import contents, handled, refused
from corpora.biographies import biography_documents
from models import infini_gpt2
from running import load_recipe

PREPARE = ["--vocab_size", "400", "--context", "64", "--validation", "0.2"]
RECALL = ["--context", "64", "--rows", "8", "--validation_rows", "2", "--mix", "text=0.5", "codes=0.5"]


def main_of(recipe: str):
    return load_recipe(recipe).main


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """A corpus, the folder prepared of it, rows of recall made of that, and a model with its tokenizer."""
    base = tmp_path_factory.mktemp("outputs")
    rows = [{"id": d.id, "text": d.text} for d in biography_documents(20, seed=3, distance=600)]
    (base / "text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    main_of("prepare")(["--source", str(base / "text.jsonl"), "--out", str(base / "data"), *PREPARE])
    main_of("prepare_recall")(["--data", str(base / "data"), "--out", str(base / "recall"), *RECALL])
    shutil.copytree(base / "data" / "tokenizer", base / "model")
    infini_gpt2(vocab_size=400).save_pretrained(base / "model")
    return base


@pytest.fixture
def made(base, tmp_path) -> Path:
    """A copy of it, to spoil."""
    shutil.copytree(base, tmp_path, dirs_exist_ok=True)
    return tmp_path


def without_lock(folder: Path) -> dict[str, str]:
    return {name: value for name, value in contents(folder).items() if "manifest" not in name}


# --- commands that cannot work, over a finished folder ---


def other(made: Path, name: str, content: bytes = b"") -> Path:
    (made / name).write_bytes(content)
    return made / name


def damaged_tokenizer(made: Path, content: bytes) -> Path:
    folder = shutil.copytree(made / "data" / "tokenizer", made / "damaged")
    (folder / "tokenizer.json").write_bytes(content)
    return folder


OVER_PREPARED = {
    "small vocabulary": lambda made: (["--vocab_size", "40"], "--vocab_size must be at least 258"),
    "no tokenizer": lambda made: (["--tokenizer", made / "none"], "cannot be loaded as a tokenizer"),
    "an unknown tokenizer": lambda made: (["--tokenizer", "owner/none"], "cannot be loaded as a tokenizer"),
    "a cut tokenizer": lambda made: (["--tokenizer", damaged_tokenizer(made, b'{"version"')], "cannot be loaded"),
    "an empty tokenizer": lambda made: (["--tokenizer", damaged_tokenizer(made, b"")], "cannot be loaded"),
    "long rows": lambda made: (["--context", "640000"], "too few for a block of 640,000; lower --context"),
    "long rows by block": lambda made: (["--split_by", "block", "--context", "640000"], "lower --context"),
    "no room for training": lambda made: (["--validation", "0.6", "--test", "0.5"], "leave nothing for training"),
    "all held out": lambda made: (["--max_documents", "1"], "leaves none to train on"),
    "few tokens": lambda made: (["--max_tokens", "5"], "too few for a block"),
    "no test rows": lambda made: (["--test", "0.01", "--context", "3000"], "lower --context"),
    "no source": lambda made: (["--source", made / "none.jsonl"], "there is no file or folder"),
    "empty source": lambda made: (["--source", other(made, "empty.txt")], "the file is empty"),
    "damaged source": lambda made: (["--source", other(made, "bad.jsonl", b"{")], "is not valid JSON"),
    "another field": lambda made: (["--text_field", "body"], "no text in the field 'body'"),
    "a strict filter": lambda made: (["--prose_filter", "--prose_min_characters", "100000"], "no document is left"),
    "source around it": lambda made: (["--source", made], "is inside --source"),
    "source is it": lambda made: (["--source", made / "data"], "is inside --source"),
}


@pytest.mark.parametrize("case", OVER_PREPARED)
def test_a_finished_folder_stays(case, made, capsys):
    options, message = OVER_PREPARED[case](made)
    argv = ["--source", made / "text.jsonl", "--out", made / "data", *PREPARE, *options]
    refused(main_of("prepare"), argv, capsys, message, keeps=made)


OVER_RECALL = {
    "rows of two tokens": (["--context", "2"], "give a longer --context"),
    "rows of codes without room": (["--context", "50", "--mix", "codes=1"], "give a longer --context"),
    "rows in which nothing comes again": (["--context", "9", "--mix", "echo=1"], "no token of these rows would be learned"),
    "rows of one token": (["--context", "1"], "--context must be at least 2"),
    "no room for a fact": (["--context", "48", "--mix", "facts=1"], "give a longer --context"),
    "no room for a passkey": (["--context", "48", "--mix", "passkey=1"], "give a longer --context"),
    "no row of text": (["--context", "1000000", "--mix", "text=1"], "has no row of --context 1,000,000"),
    "a bad mix": (["--mix", "facts=2"], "--mix facts=2"),
    "no data": (["--data", "none"], "has no manifest.json"),
    "rows of recall as data": (["--data", "recall"], "holds recall rows itself"),
    "itself as data": (["--data", "data", "--out", "data"], "is --data itself"),
    "over a prepared folder": (["--out", "data2"], "is a folder of prepare.py"),
    "over a model": (["--out", "model"], "holds other files"),
    "over a file": (["--out", "text.jsonl"], "--out text.jsonl"),
}


@pytest.mark.parametrize("case", OVER_RECALL)
def test_finished_rows_of_recall_stay(case, made, capsys, monkeypatch):
    options, message = OVER_RECALL[case]
    monkeypatch.chdir(made)
    shutil.copytree(made / "data", made / "data2")
    argv = ["--data", "data", "--out", "recall", *RECALL, *options]
    refused(main_of("prepare_recall"), argv, capsys, message, keeps=made)


# --- folders and files of something else ---


@pytest.mark.parametrize("out", ["recall", "model", "text.jsonl", "notes"])
def test_prepare_writes_over_nothing_else(out, made, capsys):
    (made / "notes").mkdir()
    (made / "notes" / "README.md").write_text("mine")
    argv = ["--source", made / "text.jsonl", "--out", made / out, *PREPARE]
    refused(main_of("prepare"), argv, capsys, f"--out {made / out}", keeps=made)


@pytest.mark.parametrize("out", ["data", "recall", "model", "README.md", "report.md", "report.json", "loss.png", "table.md",
                                 "accuracy.png", "run.json"])  # fmt: skip
@pytest.mark.parametrize("recipe", ["study", "mqar", "prepare_recall"])
def test_folders_of_something_else(recipe, out, made, capsys):
    """A file, and a folder with such a file in it, also where something has been locked there."""
    data = ["--data", made / "data"]
    argv = {"study": ["--runs", made / "model", made / "data", *data], "mqar": ["--use_cpu", "true"], "prepare_recall": data}
    places = [made / out]
    if not places[0].exists():
        (made / out).write_text("{}")
        places.append(made / "notes")
        (made / "notes" / ".stages").mkdir(parents=True)
        (made / "notes" / out).write_text("{}")
    for place in places:
        if (recipe, out) != ("prepare_recall", "recall"):
            refused(main_of(recipe), [*argv[recipe], "--out", place], capsys, f"--out {place}", keeps=made)


FOREIGN = {
    "text": b"mine",
    "json": b'{"mine": 1}',
    "list": b"[]",
    "binary": b"\xff\0",
    "empty": b"",
    "deep": b"[" * 100_000,
    "other recipe's": b'{"options": {}, "command": "", "versions": {}}',
}


@pytest.mark.parametrize("case", FOREIGN)
@pytest.mark.parametrize("recipe", ["benchmark", "ngram_baseline", "evaluate_model"])
def test_files_of_something_else(recipe, case, made, capsys):
    file = made / "result.json"
    file.write_bytes(FOREIGN[case])
    argv = {
        "benchmark": ["--size", "tiny", "--parts", "decoding", "--out", file],
        "ngram_baseline": ["--data", made / "data", "--out", file],
        "evaluate_model": ["--model", made / "model", "--data", made / "data", "--out", made / "result"],
    }[recipe]
    refused(main_of(recipe), argv, capsys, str(file), "choose another --out", keeps=made)


@pytest.mark.parametrize("name", ["config", "generation_config", "tokenizer_config"])
def test_an_evaluation_is_no_part_of_the_model(name, made, capsys):
    argv = ["--model", made / "model", "--data", made / "data", "--out", made / "model" / name]
    refused(main_of("evaluate_model"), argv, capsys, f"{name}.json", "choose another --out", keeps=made)


def test_a_page_of_something_else(made, capsys):
    (made / "heads").mkdir()
    (made / "heads" / "heads.html").write_bytes(b"mine")
    argv = ["--model", made / "model", "--text", "a b c", "--out", made / "heads"]
    refused(main_of("inspect_heads"), argv, capsys, "heads.html exists", "move it away", keeps=made)


def test_own_files_are_written_again(made, capsys):
    for _ in range(2):
        handled(main_of("ngram_baseline"), ["--data", made / "data", "--orders", "0", "--out", made / "n.json"], capsys)
        argv = ["--model", made / "model", "--text", "a b", "--layers", "0", "--out", made / "heads"]
        handled(main_of("inspect_heads"), argv, capsys)
        argv = ["--model", made / "model", "--data", made / "data", "--max_tokens", "64", "--out", made / "e"]
        handled(main_of("evaluate_model"), argv, capsys)
    assert "heads.html" in {file.name for file in (made / "heads").iterdir()}


@pytest.mark.parametrize("out", ["plain", "run", "notes"])
def test_push_writes_over_nothing_else(out, made, capsys):
    (made / "notes").mkdir()
    (made / "notes" / "README.md").write_text("mine")
    (made / "plain").mkdir()
    (made / "plain" / "config.json").write_text("{}")
    (shutil.copytree(made / "model", made / "run") / "run.json").write_text("{}")
    argv = ["--run", made / "none", "--out", made / out, "--language", "pt", "--data_license", "x", "--prompt", "a"]
    refused(main_of("push"), argv, capsys, f"--out {made / out}", keeps=made)


# --- a finished folder that was damaged since ---


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-40])


def flipped(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def emptied(file: Path) -> None:
    file.write_bytes(b"")


def missing(file: Path) -> None:
    file.unlink()


FILES = ["train/data-00000-of-00001.arrow", "train/dataset_info.json", "train/state.json", "tokenizer/tokenizer.json",
         "tokenizer/tokenizer_config.json", "validation/data-00000-of-00001.arrow",
         ".stages/documents/documents.arrow"]  # fmt: skip


@pytest.mark.parametrize("damage", [cut, flipped, emptied, missing], ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("name", FILES)
def test_damaged_stages_are_made_again(name, damage, made, capsys):
    before = without_lock(made / "data")
    manifest = json.loads((made / "data" / "manifest.json").read_text())
    damage(made / "data" / name)
    argv = ["--source", manifest["options"]["source"], "--out", made / "data", *PREPARE]
    handled(main_of("prepare"), argv, capsys, f"{Path(name).name} ", "so it is made again")
    now = json.loads((made / "data" / "manifest.json").read_text())
    assert now["splits"] == manifest["splits"] and now["stages"][Path(name).parent.name]["reused"] is False
    stages = {key for key in before if not key.endswith(("stage.json", "state.json"))}  # with seconds, a random name
    after = without_lock(made / "data")
    assert {key: after[key] for key in stages} == {key: before[key] for key in stages}


@pytest.mark.parametrize("damage", [cut, flipped, emptied, missing], ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("name", ["train/data-00000-of-00001.arrow", "tokenizer/tokenizer.json"])
@pytest.mark.parametrize("recipe", ["ngram_baseline", "prepare_recall"])
def test_damaged_data_is_not_read(recipe, name, damage, made, capsys):
    damage(made / "data" / name)
    argv = ["--data", made / "data", "--out", made / ("n.json" if recipe == "ngram_baseline" else "new"), *RECALL]
    argv = argv[:4] if recipe == "ngram_baseline" else argv
    refused(main_of(recipe), argv, capsys, str(made / "data" / name.split("/")[0]), "recipes/prepare.py")


@pytest.mark.parametrize("content", ["[]", "{}", '{"splits": []}', '{"splits": {"train": 1}}', "null", "\ufffd", "[" * 9999])
def test_manifests_that_are_none(content, made, capsys):
    (made / "data" / "manifest.json").write_text(content)
    argv = ["--data", made / "data", "--out", made / "n.json"]
    refused(main_of("ngram_baseline"), argv, capsys, "manifest.json", "recipes/prepare.py", keeps=made)


def test_a_stage_whose_record_is_damaged(made, capsys):
    (made / "data" / "train" / "stage.json").write_text("{")
    argv = ["--source", made / "text.jsonl", "--out", made / "data", *PREPARE]
    refused(main_of("prepare"), argv, capsys, "its stage.json is damaged", "move it away", keeps=made)


def test_a_run_that_is_stopped_in_between_leaves_the_old_folder(made, capsys, monkeypatch):
    """New rows wait until all are there; the same command then takes those that were made."""
    from corpora import blocks

    before, real, calls = contents(made / "data"), blocks.write_rows, []

    def stops_at_the_second(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*arguments)

    argv = [str(word) for word in ("--source", made / "text.jsonl", "--out", made / "data", *PREPARE, "--context", "32")]
    monkeypatch.setattr(blocks, "write_rows", stops_at_the_second)
    with pytest.raises(SystemExit) as stop:
        main_of("prepare")(argv)
    assert stop.value.code == 130 and contents(made / "data") == before
    monkeypatch.setattr(blocks, "write_rows", real)
    handled(main_of("prepare"), argv, capsys)
    manifest = json.loads((made / "data" / "manifest.json").read_text())
    assert manifest["stages"]["train"]["reused"] and not manifest["stages"]["validation"]["reused"]
    assert manifest["options"]["context"] == 32 and not (made / "data" / ".stages" / "new").exists()


def test_a_folder_half_replaced_has_no_manifest_and_is_finished_later(made, capsys, monkeypatch):
    from support import preparation

    real = preparation._replace

    def stops_at_validation(folder, new):
        if folder == made / "data" / "validation":
            raise KeyboardInterrupt
        real(folder, new)

    argv = [str(word) for word in ("--source", made / "text.jsonl", "--out", made / "data", *PREPARE, "--context", "32")]
    monkeypatch.setattr(preparation, "_replace", stops_at_validation)
    with pytest.raises(SystemExit):
        main_of("prepare")(argv)
    assert not (made / "data" / "manifest.json").exists()
    monkeypatch.setattr(preparation, "_replace", real)
    handled(main_of("prepare"), argv, capsys)
    manifest = json.loads((made / "data" / "manifest.json").read_text())
    assert all(manifest["stages"][name]["reused"] for name in ("tokenizer", "train", "validation"))
