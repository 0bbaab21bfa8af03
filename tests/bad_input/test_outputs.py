"""Prepared folders of an earlier command: what another one would do to them, and that the first
finds its rows again."""

import itertools
import json
import shutil
from pathlib import Path

import pytest

from bad_input import handled, refused
from corpora.biographies import biography_documents
from running import load_recipe
from small_runs import DAMAGES, cut, entry, flip, of_an_earlier_version, remove
from support.preparation import run_stage
from support.prepared import open_rows, read_tokenizer

PREPARE = ["--vocab_size", "400", "--context", "64", "--validation", "0.2"]
RECALL = "--context 64 --rows 8 --validation_rows 2 --mix text=0.5 codes=0.5".split()
prepare, prepare_recall = (load_recipe(name).main for name in ("prepare", "prepare_recall"))


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A corpus, the folder prepared of it, and rows of recall made of that."""
    base = tmp_path_factory.mktemp("outputs")
    rows = [{"id": d.id, "text": d.text} for d in biography_documents(20, seed=3, distance=600)]
    (base / "text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prepare(["--source", str(base / "text.jsonl"), "--out", str(base / "data"), *PREPARE])
    prepare_recall(["--data", str(base / "data"), "--out", str(base / "recall"), *RECALL])
    return base


@pytest.fixture
def made(finished, tmp_path, monkeypatch) -> Path:
    """A copy of it, to spoil."""
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


REFUSED = {
    "no tokenizer": (prepare, ["--tokenizer", "./none"], "--tokenizer: there is no folder ./none"),
    "long rows": (
        prepare,
        ["--context", "640000"],
        "too few for a block of 640,000; lower --context",
    ),
    "all held out": (prepare, ["--max_documents", "1"], "leaves none to train on"),
    "no test rows": (prepare, ["--test", "0.01", "--context", "3000"], "lower --context"),
    "another field": (prepare, ["--text_field", "body"], "no text in the field 'body'"),
    "a strict filter": (
        prepare,
        ["--prose_filter", "--prose_min_characters", "100000"],
        "no document is left",
    ),
    "source around it": (prepare, ["--source", "."], "is inside --source"),
    "over recall": (prepare, ["--out", "recall"], "is a folder of prepare_recall.py"),
    "rows of two tokens": (prepare_recall, ["--context", "2"], "give a longer --context"),
    "rows in which nothing comes again": (
        prepare_recall,
        ["--context", "9", "--mix", "echo=1"],
        "would be learned",
    ),
    "no room for a fact": (
        prepare_recall,
        ["--context", "48", "--mix", "facts=1"],
        "give a longer --context",
    ),
    "no row of text": (
        prepare_recall,
        ["--context", "1000000", "--mix", "text=1"],
        "has no row of --context 1,000,000",
    ),
    "an unknown kind": (
        prepare_recall,
        ["--mix", "facts=0.5", "poems=0.5"],
        "--mix poems=0.5: give a kind (passkey,",
    ),
    "rows of recall as data": (
        prepare_recall,
        ["--data", "recall"],
        "holds recall rows itself; give",
    ),
    "itself as data": (prepare_recall, ["--out", "data"], "is --data itself"),
}


def sums(folder: Path) -> dict:
    """The hashes of the rows of a finished folder."""
    return {
        name: split["sha256"]
        for name, split in json.loads((folder / "manifest.json").read_text())["splits"].items()
    }


@pytest.mark.parametrize("case", REFUSED)
def test_the_same_command_finds_its_rows_after_one_that_failed(case, made, capsys):
    main, options, message = REFUSED[case]
    usual, folder = ["--source", "text.jsonl", "--out", "data", *PREPARE], made / "data"
    if main is prepare_recall:
        usual, folder = ["--data", "data", "--out", "recall", *RECALL], made / "recall"
    before = sums(folder)
    refused(main, [*usual, *options], capsys, message)
    main(usual)
    assert sums(folder) == before


def test_a_stage_whose_record_is_damaged(made, capsys):
    (made / "data" / "train" / "stage.json").write_text("{")
    argv = ["--source", "text.jsonl", "--out", "data", *PREPARE]
    refused(prepare, argv, capsys, "its stage.json is damaged", "move it away")


def test_whatever_a_stage_has_lost_is_named_and_made_again(tmp_path, capsys):
    def build(folder: Path) -> dict:
        (folder / "inside").mkdir()
        for name in ("rows", "inside/state"):
            (folder / name).write_text(f"what {name} holds")
        return {"rows": 2}

    stage = tmp_path / "stage"
    made = run_stage(stage, {"seed": 1}, build)
    for name, damage in itertools.product(("rows", "inside/state"), DAMAGES.values()):
        damage(stage / name)
        again = run_stage(stage, {"seed": 1}, build)
        assert not again["reused"] and again["files"] == made["files"]
        assert f"{stage / name} " in capsys.readouterr().err
        assert run_stage(stage, {"seed": 1}, build)["reused"]
    entry("result", "rows", value=3)(stage / "stage.json")
    assert run_stage(stage, {"seed": 1}, build)["result"] == {"rows": 2}
    of_an_earlier_version(stage / "stage.json")
    assert not run_stage(stage, {"seed": 1}, build)["reused"]
    assert "of an earlier version" in capsys.readouterr().err


LOST = {
    "data": (prepare, ["--source", "text.jsonl", "--out", "data", *PREPARE]),
    "recall": (prepare_recall, ["--data", "data", "--out", "recall", *RECALL]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LOST)
def test_whatever_a_prepared_folder_has_lost_is_made_again(name, made, capsys):
    (main, words), folder = LOST[name], made / name
    main(words)  # by the names that the files have here
    before = sums(folder)
    files = [
        file.relative_to(folder)
        for part in (".stages/documents", "tokenizer", "train", "validation", ".")
        for file in sorted((folder / part).glob("*.*"))
        if file.is_file() and file.name != "stage.json"
    ]
    assert len(files) > 9
    for file, damage in zip(files, itertools.cycle((remove, cut, flip)), strict=False):
        damage(folder / file)
        said = handled(main, words, capsys)
        # these are written every time
        assert f"{file} " in said or str(file).endswith(("_documents.jsonl", "manifest.json"))
        assert sums(folder) == before
        open_rows(folder, "train")
        read_tokenizer(folder)


def test_a_run_that_is_stopped_in_between_goes_on(made, capsys, monkeypatch):
    """The folder is not finished meanwhile; the same command takes the stages that were made."""
    from corpora import blocks

    real, calls = blocks.write_rows, []

    def stops_at_the_second(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*arguments)

    argv = [
        str(word)
        for word in (
            "--source",
            made / "text.jsonl",
            "--out",
            made / "data",
            *PREPARE,
            "--context",
            "32",
        )
    ]
    monkeypatch.setattr(blocks, "write_rows", stops_at_the_second)
    with pytest.raises(SystemExit) as stop:
        prepare(argv)
    assert stop.value.code == 130 and not (made / "data" / "manifest.json").exists()
    monkeypatch.setattr(blocks, "write_rows", real)
    handled(prepare, argv, capsys)
    manifest = json.loads((made / "data" / "manifest.json").read_text())
    assert manifest["stages"]["train"]["reused"] and not manifest["stages"]["validation"]["reused"]
    assert manifest["options"]["context"] == 32
