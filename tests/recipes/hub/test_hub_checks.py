"""What is looked for in a run's folder before it goes to the Hub: each mistake is found, with its place and its remedy."""

import json
import re
import shlex
import shutil
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_push import NAME, push, run_with_card

from card_runs import INFINI, cell, recall, run_of
from cards import files as cards_files
from cards.card import metadata
from cli import parse_options
from hub import checks
from hub.files import plan
from running import result


@pytest.fixture
def folder(tmp_path_factory, tmp_path):
    return shutil.copytree(run_with_card(tmp_path_factory.getbasetemp()), tmp_path / "runs" / "trained")


def found(folder, *allowed) -> list[str]:
    return [*map(str, checks.check_files(folder, plan(folder)[0], NAME, allowed))]


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("AKIA" + "A1" * 8, "an AWS access key"),
        ("-----BEGIN RSA PRIVATE KEY-----", "a private key"),
        ("api_key = 'abcdefgh12'", "a password"),
        ("ghp_" + "a1" * 18, "a GitHub token"),
        (r"C:\\Users\\maria\\x", "a path of this machine"),
        ("file:///scratch/x", "a path of this machine"),
        ("loaded from " + sys.prefix + "/lib", "a path of this machine"),
        ("by mariana on it", "the name of this machine or its user (mariana)"),
        ("ssh mariana@gpu-node-7 it", "the name of this machine or its user (gpu-node-7)"),
    ],
)
def test_what_must_not_be_in_a_text(tmp_path, monkeypatch, text, what):
    monkeypatch.setattr("getpass.getuser", lambda: "mariana")
    monkeypatch.setattr("socket.gethostname", lambda: "gpu-node-7")
    (tmp_path / "config.json").write_text(f"{{\n{text}\n}}")
    messages = found(tmp_path)
    assert any(message.startswith(f"config.json:2: {what}") for message in messages), messages
    exact = re.findall(r"\((?!.*…)([^)]*)\)", " ".join(messages)) or [text]
    assert found(tmp_path, *exact, text) == []  # --allow
    harmless = '{"eos_token": "<|endoftext|>", "url": "https://a.org/home/x", "share": "1/2 and/or"}'
    (tmp_path / "config.json").write_text(harmless)
    assert found(tmp_path) == []


def test_words_of_a_vocabulary_are_no_names(tmp_path, monkeypatch):
    monkeypatch.setattr("getpass.getuser", lambda: "mariana")
    (tmp_path / "vocab.txt").write_text("mariana\n")
    assert found(tmp_path) == []
    (tmp_path / "config.json").write_text("mariana/name")
    assert checks.check_files(tmp_path, plan(tmp_path)[0], "mariana/name") == []


def test_files_that_are_not_as_they_should_be(tmp_path):
    (tmp_path / "config.json").write_bytes(b'{"a": "\xe9"}')
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate(checks.LARGEST_FILE + 1)
    messages = found(tmp_path)
    assert messages[0].startswith("config.json: it is no UTF-8 text (byte 7)") and len(messages) == 2
    assert messages[1].startswith("tokenizer.json: it has 50 MB, more than 50")


def test_models_that_are_not_whole(folder):
    def messages() -> str:
        return "\n".join(map(str, checks.check_model(folder)))

    assert messages() == ""
    weights = load_file(folder / "model.safetensors")
    numbers = result(folder)
    (folder / "result.json").write_text(json.dumps(numbers | {"parameters": 7}))
    assert f"the model has {numbers['parameters']:,} parameters, result.json says 7" in messages()
    (folder / "result.json").write_text(json.dumps(numbers))
    save_file({"more": torch.zeros(10**6)}, folder / "model-00002-of-00002.safetensors", {"format": "pt"})
    assert "Remove the weight files that are not of this model" in messages()
    (folder / "model-00002-of-00002.safetensors").unlink()
    (folder / "tokenizer_config.json").rename(folder / "gone")
    assert "tokenizer_config.json: there is no tokenizer" in messages()
    save_file(dict([*weights.items()][1:]), folder / "model.safetensors", {"format": "pt"})
    assert f"missing keys: {[*weights][0]}" in messages()
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-9])
    assert "AutoModelForCausalLM cannot load the folder" in messages()
    (folder / "model.safetensors").unlink()
    assert "model.safetensors: there is none" in messages()


def test_cards_that_are_not_complete(folder, tmp_path, capsys):
    def errors() -> str:
        with pytest.raises(SystemExit) as stopped:
            push.main(["--run", str(folder), "--repo_id", NAME, "--device", "cpu", "--dry_run"])
        assert stopped.value.code == 1
        return capsys.readouterr().err

    settings = json.loads((folder / "card.json").read_text())
    (tmp_path / "notes.md").write_text("![a](figures/none.png) and ![b](../x.png), not ![c](https://a.org/c.png)\n")
    changes = {"data_license": None, "notes": str(tmp_path / "notes.md")}
    (folder / "card.json").write_text(json.dumps(settings | changes))
    numbers = result(folder)
    (folder / "result.json").write_text(json.dumps(numbers | {"perplexity": float("inf")}))
    messages = errors()
    assert "holds another training" in str(checks.check_card(folder, run_of(result=numbers))[0])  # as that of a study may
    assert re.search(r"README.md:\d+: the licence of the text is not stated. --data_license says it", messages)
    assert "README.md:1: Perplexity is inf, no number" in messages and "4 finding(s)" in messages
    assert "the image figures/none.png is not in the folder" in messages and "../x.png" in messages
    (folder / "result.json").write_text(json.dumps(numbers | {"command": "python train.py"}))  # nobody knows the data
    (folder / "card.json").write_text(json.dumps(settings | {"data": None, "language": "en"}))
    messages = errors()
    assert "the data are not described. --data names the prepared folder" in messages and "1 finding(s)" in messages
    (folder / "result.json").unlink()
    (folder / "card.json").write_text(json.dumps(settings | {"of": "another version"}))
    messages = errors()
    assert "README.md: the card cannot be written" in messages and "Write the card with recipes/write_card.py" in messages


def test_the_metadata_say_what_a_model_recalls():
    asked = [cell(48, length=64, depth=0.5), {"length": 256, "depth": 0.5, "not_possible": "too long"}]
    facts, off = recall("facts", [cell(12, distance=3)]), recall("facts", [cell(6, distance=3)], "off")
    run = run_of(INFINI, evaluations=[recall("passkey", asked, data="d"), facts, off])
    found = [entry for entry in metadata(run).eval_results if entry.metric_type == "accuracy"]
    assert [(e.metric_name, e.dataset_name, e.dataset_split, e.dataset_config, e.metric_value) for e in found] == [
        ("Passkeys found", "plays", "validation", "64 tokens, depth 0.5", 1.0),
        ("Facts recalled", "generated biographies", None, "3 segments between", 0.25),
    ]


def test_a_card_is_told_the_same_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = {"data": "data/x", "study": None, "notes": "n.md", "evaluation": None, "baseline": ["b.json"], "name": "n"}
    not_kept = {"out": "c.md", "run": "r", "figures": "f", "repo_id": "a/b", "device": "cpu"}
    cards_files.keep_settings(tmp_path, given | not_kept)
    paths = {"data": str(tmp_path / "data/x"), "notes": str(tmp_path / "n.md"), "baseline": [str(tmp_path / "b.json")]}
    assert cards_files.kept_settings(tmp_path) == given | paths
    assert cards_files.kept_settings(tmp_path / "nowhere") == {}


def test_code_beside_the_configuration_goes_along(tmp_path):
    sources = {"modeling_x": "from .memory import read\n", "memory": "import torch\nfrom .state import x\n", "state": "",
               "configuration_x": "from transformers import GPT2Config\n", "unused": ""}  # fmt: skip
    for name, text in sources.items():
        (tmp_path / f"{name}.py").write_text(text)
    (tmp_path / "config.json").write_text("{}")
    files, left_out = plan(tmp_path)
    assert [file.path for file in files] == ["config.json"] and "unused.py" in left_out
    maps = {"AutoConfig": "configuration_x.X", "AutoModel": ["modeling_x.X", None], "AutoTokenizer": "user/other--gone.X"}
    (tmp_path / "config.json").write_text(json.dumps({"auto_map": maps}))
    files, left_out = plan(tmp_path)
    code = ["config.json", "configuration_x.py", "memory.py", "modeling_x.py", "state.py"]
    assert [file.path for file in files] == code and [*left_out] == ["unused.py"]


def test_the_commands_of_the_docstring_are_parsed():
    commands = [line for line in push.__doc__.splitlines() if line.startswith("    python ")]
    assert len(commands) == 3
    for command in commands:
        (options,) = parse_options(push.Options, description="", argv=shlex.split(command)[2:])
        assert options.repo_id.startswith("user/")
