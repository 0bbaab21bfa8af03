"""Damaged prepared folders: one line with the file and the remedy, nothing written."""

import json
import shutil

import numpy as np
import pytest
from datasets import Dataset, load_from_disk
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bad_input import refused
from cli import UserError
from running import load_recipe
from small_runs import (
    DAMAGES,
    cut,
    entry,
    flip,
    remove,
    resealed,
    small_data,
    small_run,
    text,
    training,
    without,
)
from support.prepared import open_rows, read_tokenizer


@pytest.fixture
def data(base, tmp_path):
    return shutil.copytree(small_data(base), tmp_path / "data")


def test_whatever_is_damaged_is_named(base, data, tmp_path):
    files = [
        file for split in ("validation", "tokenizer") for file in sorted((data / split).iterdir())
    ]
    files = [file.relative_to(data) for file in files if file.name != "stage.json"] + [
        "manifest.json"
    ]
    assert len(files) > 5
    # of rows, the tokens count
    harmless = {"dataset_info.json", "state.json"}

    @settings(
        max_examples=50, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
    )
    @given(st.sampled_from(files), st.sampled_from(list(DAMAGES.values())))
    def check(name, damage):
        shutil.rmtree(data)
        shutil.copytree(small_data(base), data)
        damage(data / name)
        try:
            open_rows(data, "validation")
            read_tokenizer(data)
        except UserError as error:
            assert str(data) in str(error) and "recipes/prepare.py" in str(error)
        else:
            assert name.name in harmless

    check()


def changed(change):
    """Writes the validation rows again; the manifest stays."""

    def write(data):
        ids = np.array(load_from_disk(str(data / "validation"))["input_ids"][:])
        made = Dataset.from_dict(change(ids) or {"input_ids": ids})
        shutil.rmtree(data / "validation")
        made.save_to_disk(str(data / "validation"))

    return write


def other_tokenizer(data) -> None:
    """One token more than made the rows."""
    file = data / "tokenizer" / "tokenizer.json"
    content = json.loads(file.read_text())
    content["model"]["vocab"]["two tokens"] = max(content["model"]["vocab"].values()) + 100
    file.write_text(json.dumps(content))


def manifest(damage):
    """Of a manifest that a recipe could have written."""
    return lambda data: resealed(damage)(data / "manifest.json")


CASES = {
    "no manifest": lambda data: remove(data / "manifest.json"),
    "a manifest that was edited": lambda data: entry("options", "seed", value=9)(
        data / "manifest.json"
    ),
    "manifest without a split": manifest(without("splits", "validation")),
    "manifest of other rows": manifest(entry("splits", "validation", "sha256", value="0" * 64)),
    "manifest of another vocabulary": manifest(entry("tokenizer", "vocabulary", value=3)),
    "no split": lambda data: remove(data / "validation"),
    "tokenizer of another size": other_tokenizer,
    "rows of unequal lengths": changed(lambda ids: {"input_ids": [ids[0], *ids[1:, :9]]}),
    "a row less": changed(lambda ids: {"input_ids": ids[1:]}),
    "another column": changed(lambda ids: {"tokens": ids}),
    "another token": changed(lambda ids: ids.__setitem__((3, 5), 4)),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_no_prepared_folder(case, base, data, tmp_path, capsys):
    CASES[case](data)
    words = ["--model", small_run(base), "--data", data, "--out", tmp_path / "found"]
    remedy = (
        "prepare it again with --validation"
        if case == "manifest without a split"
        else "recipes/prepare.py"
    )
    refused(load_recipe("evaluate_model").main, words, capsys, str(data), remedy, keeps=data)
    assert not (tmp_path / "found.json").exists()


@pytest.mark.parametrize("recipe", ["train", "study", "dilute", "prepare_recall"])
def test_all_readers_refuse(recipe, base, data, tmp_path, capsys):
    for file in data.glob("*/*.arrow"):
        flip(file)
    out = tmp_path / "out"
    words = {
        "train": training(data, out),
        "study": ["--runs", small_run(base), "--data", data, "--out", out],
        "dilute": training(small_data(base), out, "--dilute_with", data),
        "prepare_recall": f"--data {data} --out {out} --rows 2 --mix text=1 --context 8".split(),
    }[recipe]
    main = load_recipe("train" if recipe == "dilute" else recipe).main
    refused(main, words, capsys, str(data), keeps=data)
    assert not list(tmp_path.glob("out*/*.json"))


@pytest.mark.parametrize("damage", [cut, remove, flip, text('{"id": "a"}\n')])
def test_held_out_documents(base, data, tmp_path, capsys, damage):
    damage(data / "validation_documents.jsonl")
    words = [
        "--model",
        small_run(base),
        *f"--data {data} --length 32 --out {tmp_path / 'found'}".split(),
    ]
    refused(
        load_recipe("evaluate_model").main,
        words,
        capsys,
        str(data / "validation_documents.jsonl"),
        keeps=data,
    )


def test_rows_of_another_tokenizer(base, tmp_path, capsys):
    """Of as many tokens as the model's: no id is out of range."""
    source = tmp_path / "text.jsonl"
    lines = (small_data(base).parent / "text.jsonl").read_text().splitlines()
    others = [
        {"text": json.loads(line)["text"].translate(str.maketrans("aeiou", "äëïöü"))}
        for line in lines
    ]
    source.write_text("".join(json.dumps(line) + "\n" for line in others))
    words = [
        *f"--source {source} --tokenizer characters --context 16".split(),
        *f"--out {tmp_path / 'data'}".split(),
    ]
    load_recipe("prepare").main([*map(str, words), "--validation", "0.15"])
    words = ["--model", small_run(base), "--data", tmp_path / "data", "--out", tmp_path / "found"]
    main = load_recipe("evaluate_model").main
    refused(
        main,
        words,
        capsys,
        str(tmp_path / "data"),
        "another tokenizer",
        "--tokenizer",
        keeps=tmp_path / "data",
    )
