"""Damaged prepared folders, by every recipe that reads them: one line with the file and the remedy, nothing written."""

import json
import shutil

import numpy as np
import pytest
from datasets import Dataset, load_from_disk

from bad_input import refused
from running import load_recipe
from small_runs import (
    NO_JSON,
    NO_OBJECT,
    binary,
    cut,
    empty,
    entry,
    flip,
    remove,
    small_data,
    small_run,
    text,
    training,
    without,
)


def rows(data, change) -> None:
    """Writes the validation rows again, changed; the manifest stays."""
    old = load_from_disk(str(data / "validation"))
    made = Dataset.from_dict(change(np.array(old["input_ids"][:])))
    shutil.rmtree(data / "validation")
    made.save_to_disk(str(data / "validation"))


def same_rows(change):
    def changed(ids):
        change(ids)
        return {"input_ids": ids}

    return lambda data: rows(data, changed)


def set_id(value):
    def change(ids):
        ids[3, 5] = value

    return same_rows(change)


def at(name, damage):
    """Damage to a file or, by a pattern, to all such files."""

    def change(data):
        for file in sorted(data.glob(name)):
            damage(file)

    return change


def other_tokenizer(data) -> None:
    """One token more than made the rows."""
    file = data / "tokenizer" / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["two tokens"] = max(vocabulary.values()) + 100
    file.write_text(json.dumps(content))


CASES = {f"manifest {name}": at("manifest.json", damage) for name, damage in (NO_JSON | NO_OBJECT).items()}
CASES["manifest removed"] = at("manifest.json", remove)
PATHS = [("splits",), ("tokenizer",), ("options",), ("tokenizer", "vocabulary"), ("splits", "train", "sha256")]
PATHS += [
    ("splits", "train"),
    ("splits", "validation"),
    ("splits", "validation", "blocks"),
    ("splits", "validation", "tokens"),
]
for path in PATHS:
    CASES[f"manifest without {'.'.join(path)}"] = at("manifest.json", without(*path))
    CASES[f"manifest with a word for {'.'.join(path)}"] = at("manifest.json", entry(*path, value="?"))
    CASES[f"manifest with a list for {'.'.join(path)}"] = at("manifest.json", entry(*path, value=[1]))
CASES["manifest of more rows"] = at("manifest.json", entry("splits", "validation", "blocks", value=1000))
CASES["manifest of other rows"] = at("manifest.json", entry("splits", "validation", "sha256", value="0" * 64))
CASES["manifest of another vocabulary"] = at("manifest.json", entry("tokenizer", "vocabulary", value=3))
CASES |= {f"arrow {damage.__name__}": at("validation/*.arrow", damage) for damage in (cut, empty, flip, remove, binary)}
for name in ("dataset_info.json", "state.json"):
    CASES |= {f"{name} {damage.__name__}": at(f"validation/{name}", damage) for damage in (cut, empty, remove, binary)}
CASES["split removed"] = at("validation", remove)
CASES["split is a file"] = lambda data: (remove(data / "validation"), (data / "validation").write_text("x"))
CASES["tokenizer removed"] = at("tokenizer", remove)
CASES |= {f"tokenizer {damage.__name__}": at("tokenizer/tokenizer.json", damage) for damage in (cut, empty, remove, binary)}
CASES |= {
    f"tokenizer config {damage.__name__}": at("tokenizer/tokenizer_config.json", damage) for damage in (cut, empty, binary)
}
CASES["tokenizer of another size"] = other_tokenizer
CASES["tokenizer that is a list"] = at("tokenizer/tokenizer.json", text("[]"))
CASES["rows of unequal lengths"] = lambda data: rows(data, lambda ids: {"input_ids": [ids[0], *ids[1:, :9]]})
CASES["a row less"] = lambda data: rows(data, lambda ids: {"input_ids": ids[1:]})
CASES["no rows"] = lambda data: rows(data, lambda ids: {"input_ids": ids[:0]})
CASES["another column"] = lambda data: rows(data, lambda ids: {"tokens": ids})
CASES["rows of words"] = lambda data: rows(data, lambda ids: {"input_ids": [["a"] * 16] * len(ids)})
CASES["rows of fractions"] = lambda data: rows(data, lambda ids: {"input_ids": ids + 0.5})
CASES |= {f"id {value}": set_id(value) for value in (-1, -100, 10_000, 2**40)}
CASES["another token"] = set_id(4)

train, evaluate, study = (load_recipe(name) for name in ("train", "evaluate_model", "study"))
OF_ROWS = {
    name: damage for name, damage in CASES.items() if not name.startswith("tokenizer ")
}  # a study reads the runs' own
every = pytest.mark.parametrize("damage", CASES.values(), ids=CASES)


@pytest.fixture
def data(base, tmp_path):
    return shutil.copytree(small_data(base), tmp_path / "data")


@every
def test_train(data, tmp_path, capsys, damage):
    damage(data)
    refused(train.main, training(data, tmp_path / "run"), capsys, str(data), "recipes/prepare.py", keeps=data)
    assert not (tmp_path / "run").exists()


@every
def test_evaluate(base, data, tmp_path, capsys, damage):
    damage(data)
    words = ["--model", small_run(base), "--data", data, "--out", tmp_path / "found"]
    refused(evaluate.main, words, capsys, str(data), "recipes/prepare.py", keeps=data)
    assert not (tmp_path / "found.json").exists()


@pytest.mark.parametrize("damage", OF_ROWS.values(), ids=OF_ROWS)
def test_study(base, data, tmp_path, capsys, damage):
    damage(data)
    words = ["--runs", small_run(base), "--data", data, "--out", tmp_path / "study"]
    refused(study.main, words, capsys, str(data), keeps=data)
    assert not (tmp_path / "study" / "report.json").exists()


@pytest.mark.parametrize("name", ["manifest null", "manifest removed", "arrow cut", "tokenizer cut", "id -1", "arrow flip"])
@pytest.mark.parametrize("recipe", ["ngram_baseline", "train --dilute_with"])
def test_the_other_readers(base, data, tmp_path, capsys, name, recipe):
    CASES[name](data)
    for file in (data / "validation").glob("*"):  # dilution reads the training rows
        if name.startswith(("arrow", "id")):
            shutil.copy(file, data / "train")
    if recipe == "ngram_baseline":
        words = ["--data", data, "--out", tmp_path / "n.json"]
        refused(load_recipe(recipe).main, words, capsys, str(data), "recipes/prepare.py", keeps=data)
    else:
        words = training(small_data(base), tmp_path / "run", "--dilute_with", data)
        refused(train.main, words, capsys, str(data), "recipes/prepare.py", keeps=data)


DOCUMENTS = NO_JSON | {"removed": remove, "no text": text('{"id": "a"}\n'), "number": text("7\n")}


@pytest.mark.parametrize("damage", DOCUMENTS.values(), ids=DOCUMENTS)
def test_held_out_documents(base, data, tmp_path, capsys, damage):
    damage(data / "validation_documents.jsonl")
    words = ["--model", small_run(base), "--data", data, "--length", 32, "--out", tmp_path / "found"]
    refused(evaluate.main, words, capsys, str(data / "validation_documents.jsonl"), keeps=data)


def test_rows_of_another_tokenizer(base, tmp_path, capsys):
    """Of as many tokens as the model's: no id is out of range."""
    source = tmp_path / "text.jsonl"
    lines = (small_data(base).parent / "text.jsonl").read_text().splitlines()
    others = [{"text": json.loads(line)["text"].translate(str.maketrans("aeiou", "äëïöü"))} for line in lines]
    source.write_text("".join(json.dumps(line) + "\n" for line in others))
    words = ["--source", source, "--tokenizer", "characters", "--context", 16, "--out", tmp_path / "data"]
    load_recipe("prepare").main([*map(str, words), "--validation", "0.15"])
    words = ["--model", small_run(base), "--data", tmp_path / "data", "--out", tmp_path / "found"]
    refused(
        evaluate.main, words, capsys, str(tmp_path / "data"), "another tokenizer", "--tokenizer", keeps=tmp_path / "data"
    )
