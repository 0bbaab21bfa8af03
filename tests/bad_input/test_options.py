"""Options and YAML files: every number has a range, and what is malformed is refused before
anything is read or written."""

import dataclasses
import typing

import pytest

from bad_input import refused
from cli import bounds_in_words
from running import ROOT, load_recipe

NEEDED = {
    "benchmark": ["--out", "x.json"],
    "benchmark_serving": "--url x --model x --tokenizer x --text x --out x".split(),
    "compare_caches": ["--model", "x", "--out", "x", "--text", "x"],
    "evaluate_documents": ["--model", "x", "--data", "x", "--out", "x"],
    "evaluate_model": ["--model", "x"],
    "finetune_lora": ["--model", "x", "--adapter", "x", "--data", "x", "--out", "x"],
    "fit_documents": ["--model", "x", "--data", "x", "--sets", "x", "--out", "x"],
    "generate": ["--model", "x"],
    "mqar": ["--out", "x"],
    "prepare": ["--source", "x", "--out", "x"],
    "prepare_documents": ["--source", "x", "--out", "x"],
    "prepare_facts": ["--source", "x", "--out", "x"],
    "prepare_recall": ["--data", "x", "--out", "x"],
    "model_card": "--run x --out x --language pt --data_license x --prompt x".split(),
    "study": ["--out", "x"],
    "train": ["--data", "x", "--out", "x"],
}
RECIPES = sorted(file.stem for file in (ROOT / "recipes").glob("*.py"))


def numbers_of(recipe: str) -> dict[str, tuple[type, dict]]:
    """The type and the metadata of each option that is a number, or a list of them, of a recipe's
    own and the corpora's."""
    found = {}
    for name, kind in vars(load_recipe(recipe)).items():
        if not (
            dataclasses.is_dataclass(kind) and name.endswith("Options") and name != "ModelOptions"
        ):
            continue  # the model's options are the library's
        hints = typing.get_type_hints(kind)
        for entry in dataclasses.fields(kind):
            types = {hints[entry.name], *typing.get_args(hints[entry.name])}
            types |= {inner for one in types for inner in typing.get_args(one)}
            if number := types & {int, float}:
                found[entry.name] = number.pop(), entry.metadata
    return found


def beyond(kind: type, bounds: dict) -> list:
    """The numbers just outside of each bound."""
    step = 1 if kind is int else 0.5
    found = [bounds["at_least"] - step] if "at_least" in bounds else []
    found += [bounds["at_most"] + step] if "at_most" in bounds else []
    found += [bounds[name] for name in ("greater_than", "below") if name in bounds]
    return [kind(value) for value in found]


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_number_has_a_range_that_help_shows_and_that_is_kept(recipe, capsys):
    main, numbers = load_recipe(recipe).main, numbers_of(recipe)
    with pytest.raises(SystemExit):
        main(["--help_all"])
    shown = capsys.readouterr()
    if shown.err:  # it has no rare options
        with pytest.raises(SystemExit):
            main(["--help"])
        shown = capsys.readouterr()
    shown = " ".join(shown.out.split())
    assert numbers
    for name, (kind, bounds) in numbers.items():
        assert f"{bounds_in_words(bounds).capitalize()}." in shown and beyond(kind, bounds)
        for value in [*beyond(kind, bounds), *(["nan", "inf"] if kind is float else [])]:
            words = [*NEEDED[recipe], f"--{name}={value}"]
            refused(main, words, capsys, f"--{name} must be {bounds_in_words(bounds)}, got {value}")
        refused(
            main,
            [*NEEDED[recipe], f"--{name}={'many' if kind is float else 1.5}"],
            capsys,
            f"--{name}",
            code=2,
        )


# --- malformed words of a command line ---

WORDS = {
    "unknown option": ("prepare", ["--sorce", "x"], ["--sorce"], 2),
    "abbreviated option": ("train", ["--learning", "1"], ["--learning"], 2),
    "choice": ("prepare", ["--split_by", "line"], ["--split_by", "document"], 2),
    "needed option empty": ("prepare", ["--out", ""], ["--out '' is empty"], 1),
    "shares of all": (
        "prepare",
        ["--validation", "0.5", "--test", "0.5"],
        ["leave nothing for training"],
        1,
    ),
    "a mix of too much": (
        "prepare_recall",
        ["--mix", "facts=0.9", "text=0.2"],
        ["the shares sum to 1.1"],
        1,
    ),
    "no shape": ("benchmark", ["--shapes", "4096"], ["--shapes 4096", "4096x256"], 1),
    "depths": (
        "evaluate_model",
        ["--task", "passkey", "--depths", "0.5", "3"],
        ["--depths 0.5 3.0", "from 0 to 1"],
        1,
    ),
    "nothing to study": ("study", [], ["--study"], 1),
    "set of broken YAML": (
        "study",
        ["--data", "x", "--set", "train.seed=[1"],
        ["--set train.seed=[1", "not valid YAML"],
        1,
    ),
}
DEVICES = {
    "benchmark": [],
    "generate": ["--prompt", "x"],
    "model_card": ["--out", "y"],
}
DEVICES["evaluate_model"] = ["--text", "text"]
for name, more in DEVICES.items():
    WORDS[f"device of {name}"] = (
        name,
        [*more, "--device", "cuda:77"],
        ["--device: cannot use cuda:77", "give cpu"],
        1,
    )


@pytest.mark.parametrize("case", WORDS)
def test_words(case, capsys, tmp_path, monkeypatch):
    """Devices are tried before anything is loaded: model and data are missing, too, and that is not
    said."""
    recipe, words, mentions, code = WORDS[case]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_text("x")
    refused(
        load_recipe(recipe).main,
        [*NEEDED[recipe], *words],
        capsys,
        *mentions,
        keeps=tmp_path,
        code=code,
    )


# --- YAML ---

YAML = {
    "twice": ("context: 64\nseed: 1\ncontext: 128\n", "'context' twice: keep one"),
    "unknown": ("contxt: 64\n", "unknown option 'contxt'"),
    "an entry in an entry": ("context: {a: 1}\n", "context must be a value or a list of values"),
    "a list for a number": (
        "context: [64, 128]\n",
        "config.yaml: context takes one value, got a list",
    ),
    "list": ("- context\n- 64\n", "got a list"),
    "deep": ("context: " + "[" * 5000, "not valid YAML"),
    "binary": (b"\x89PNG\r\n\x1a\n\0\0", "cannot be read"),
    "a folder": (None, "cannot be read"),
}


@pytest.mark.parametrize("case", YAML)
def test_yaml(case, capsys, tmp_path):
    content, message = YAML[case]
    file = tmp_path / "config.yaml"
    if content is None:
        file.mkdir()
    else:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    refused(
        load_recipe("prepare").main,
        [*NEEDED["prepare"], "--config", file],
        capsys,
        message,
        keeps=tmp_path,
    )


def test_values_of_yaml_are_checked_as_flags_are(capsys, tmp_path):
    argv, main = (
        [*NEEDED["prepare"], "--config", tmp_path / "config.yaml"],
        load_recipe("prepare").main,
    )
    (tmp_path / "config.yaml").write_text("validation: nan\n")
    refused(main, argv, capsys, "--validation must be greater than 0 and below 1, got nan")
    for text, message in (("context: 64.0\n", "'64.0'"), ("split_by: line\n", "'line'")):
        (tmp_path / "config.yaml").write_text(text)
        refused(main, argv, capsys, message, code=2)


STUDIES = {
    "section twice": ("train: {}\ntrain: {}\n", "has 'train' twice"),
    "unknown section": ("trian: {}\n", "no section 'trian'"),
    "section of another kind": ("train: [1]\n", "the section 'train'"),
    "a list for one value": (
        "train: {seed: [1, 2]}\n",
        "unrecognised arguments: 2",
    ),
}


@pytest.mark.parametrize("case", STUDIES)
def test_studies(case, capsys, tmp_path):
    content, message = STUDIES[case]
    file = tmp_path / "study.yaml"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    argv = ["--study", file, "--data", tmp_path, "--out", tmp_path / "out"]
    code = 2 if "unrecognised" in message else 1
    refused(load_recipe("study").main, argv, capsys, message, keeps=tmp_path, code=code)
