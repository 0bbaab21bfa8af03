"""Code that lies in a folder never runs, whatever its configuration asks for and whatever is
answered on standard input."""

import ast
import io
import json
import shutil
import sys

import pytest

from hf_infini.models.loading import load_causal_lm, load_tokenizer
from running import ROOT
from small_runs import small_run

AUTO = ("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer", "AutoModel")
CODE = """
import pathlib
pathlib.Path({ran!r}).write_text("it ran")
from transformers import GPT2Config as Config, GPT2LMHeadModel as Model
from transformers import PreTrainedTokenizerFast as Tokenizer
"""


def infect(folder, ran) -> None:
    """Makes the folder of a model and its tokenizer ask for code beside it."""
    code = {
        "AutoConfig": "foreign.Config",
        "AutoModelForCausalLM": "foreign.Model",
        "AutoModel": "foreign.Model",
    }
    for name, entries in (
        ("config.json", code),
        ("tokenizer_config.json", {"AutoTokenizer": ["foreign.Tokenizer"] * 2}),
    ):
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(content | {"auto_map": entries}))
    (folder / "foreign.py").write_text(CODE.format(ran=str(ran)))


@pytest.mark.parametrize("kind", ["known", "unknown"])
def test_no_loader_runs_it(base, tmp_path, monkeypatch, kind):
    """With a type of model that is known here the folder may be used; with another one it is
    refused."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")  # who is asked says yes
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 9))
    run = shutil.copytree(small_run(base), tmp_path / "run")
    infect(run, tmp_path / "ran")
    if kind == "unknown":
        config = json.loads((run / "config.json").read_text())
        (run / "config.json").write_text(json.dumps(config | {"model_type": "foreign"}))
        with pytest.raises(ValueError, match="contains custom code"):
            load_causal_lm(run)
    else:
        assert type(load_causal_lm(run)).__module__.startswith("hf_infini.")
    assert len(load_tokenizer(run)) > 0 and not (tmp_path / "ran").exists()


def test_every_call_of_a_recipe_says_that_code_does_not_run():
    seen = 0
    for file in sorted((ROOT / "recipes").rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        for call in ast.walk(ast.parse(text)):
            if isinstance(call, ast.Call) and ast.unparse(call.func) in [
                f"{auto}.from_pretrained" for auto in AUTO
            ]:
                given = {word.arg: ast.unparse(word.value) for word in call.keywords}
                # **settings
                default = (
                    "False" if None in given and '"trust_remote_code": False' in text else None
                )
                assert given.get("trust_remote_code", default) == "False", f"{file}:{call.lineno}"
                seen += 1
    assert seen >= 5
