"""Code that lies in a folder never runs, whatever its configuration asks for and whatever is answered on standard input."""

import ast
import io
import json
import shutil
import sys

import pytest

from running import ROOT, load_recipe
from small_runs import small_data, small_run, training

AUTO = ("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer", "AutoModel")
CODE = """
import pathlib
pathlib.Path({ran!r}).write_text("it ran")
from transformers import GPT2Config as Config, GPT2LMHeadModel as Model, PreTrainedTokenizerFast as Tokenizer
"""


def infect(folder, ran) -> None:
    """Makes the folder of a model or a tokenizer ask for code beside it."""
    names = {"AutoConfig": "Config", "AutoModel": "Model", "AutoModelForCausalLM": "Model", "AutoTokenizer": "Tokenizer"}
    entries = {auto: f"foreign.{name}" for auto, name in names.items()}
    for file in (folder / "config.json", folder / "tokenizer_config.json"):
        if file.is_file():
            content = json.loads(file.read_text())
            tokenizer = file.name != "config.json"
            content["auto_map"] = entries | (
                {"AutoTokenizer": ["foreign.Tokenizer", "foreign.Tokenizer"]} if tokenizer else {}
            )
            file.write_text(json.dumps(content))
    (folder / "foreign.py").write_text(CODE.format(ran=str(ran)))


@pytest.fixture
def yes(monkeypatch):
    """Who is asked says yes."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 9))


def commands(base, tmp_path) -> dict[str, list]:
    run, data, out = tmp_path / "run", tmp_path / "data", tmp_path / "out"
    return {
        "generate": ["--model", run, "--prompt", "To", "--device", "cpu", "--max_new_tokens", 1],
        "train": [*training(data, out, "--init_from", run)],
        "study": ["--runs", run, "--data", data, "--out", out],
        "prepare": ["--source", base / "small" / "text.jsonl", "--tokenizer", data / "tokenizer", "--out", out],
    }


CASES = [(name, kind) for name in ("generate", "train", "study") for kind in ("known", "unknown")] + [("prepare", "known")]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_no_recipe_runs_it(base, tmp_path, capsys, yes, name, kind):
    """With a type of model that is known here the folder may be used; with another one it is refused."""
    run, data = shutil.copytree(small_run(base), tmp_path / "run"), shutil.copytree(small_data(base), tmp_path / "data")
    (tmp_path / "text.txt").write_text("To be or not to be")
    for folder in (run, data / "tokenizer"):
        infect(folder, tmp_path / "ran")
    if kind == "unknown":
        config = json.loads((run / "config.json").read_text())
        (run / "config.json").write_text(json.dumps(config | {"model_type": "foreign"}))
    ended = 0
    try:
        load_recipe(name).main([*map(str, commands(base, tmp_path)[name])])
    except SystemExit as end:
        ended = end.code
    errors = capsys.readouterr().err
    assert not (tmp_path / "ran").exists() and "Traceback" not in errors and "shows where" not in errors, errors
    assert ended in (0, 1) and (kind == "known" or ended == 1), errors


def calls() -> list[tuple[str, ast.Call]]:
    """Every call of an Auto class in recipes/, with its place."""
    found = []
    for file in sorted((ROOT / "recipes").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "from_pretrained":
                owner = node.func.value
                if isinstance(owner, ast.Name) and owner.id in AUTO:
                    found.append((f"{file.relative_to(ROOT)}:{node.lineno}", node))
    return found


def test_every_call_says_that_code_does_not_run():
    assert len(calls()) >= 5
    for place, call in calls():
        given = {word.arg: ast.unparse(word.value) for word in call.keywords}
        if None in given and "trust_remote_code" not in given:  # **settings
            assert '"trust_remote_code": False' in (ROOT / place.split(":")[0]).read_text(encoding="utf-8"), place
        else:
            assert given.get("trust_remote_code") == "False", place


