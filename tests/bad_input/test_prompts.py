"""Tokenizers and prompts: damaged or foreign tokenizers, texts and prompts that are none."""

import io
import json
import shutil
import sys
from pathlib import Path

import pytest

from bad_input import handled, refused
from corpora.tokenization import build_character_tokenizer, encode_texts, train_bpe
from models import infini_gpt2
from running import load_recipe

TEXT = "o rato roeu a roupa do rei de roma\n" * 60


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """Folders of models with their tokenizer: "learned" has 64 positions, "any" reads texts of any length."""
    base = tmp_path_factory.mktemp("models")
    tokenizer = train_bpe([TEXT], 300)
    for name, model in (
        ("learned", infini_gpt2(vocab_size=300)),
        ("any", infini_gpt2(vocab_size=300, position_encoding="segment")),
    ):
        model.save_pretrained(base / name)
        tokenizer.save_pretrained(base / name)
    return base


# --- tokenizers ---


def written(name: str, content: bytes):
    return lambda folder: (folder / name).write_bytes(content)


def removed(*names: str):
    return lambda folder: [(folder / name).unlink() for name in names]


def changed(**entries):
    def change(folder):
        content = json.loads((folder / "tokenizer.json").read_text())
        for name, value in entries.items():
            content[name] = value(content[name])
        (folder / "tokenizer.json").write_text(json.dumps(content))

    return change


def code_of_its_own(folder):
    config = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text("open('executed', 'w')\n")


BPE, CONFIG = "tokenizer.json", "tokenizer_config.json"
TOKENIZERS = {
    "cut": (written(BPE, b'{"version": "1.0", "tru'), "cannot be loaded"),
    "no end of text": (removed(CONFIG), "no end-of-text token"),
    "code of its own": (code_of_its_own, "cannot be loaded"),
}


@pytest.mark.parametrize("case", TOKENIZERS)
def test_tokenizers(case, tmp_path, capsys, monkeypatch):
    change, message = TOKENIZERS[case]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 100))  # what `yes` would answer
    (tmp_path / "text.txt").write_text(TEXT)
    train_bpe([TEXT], 300).save_pretrained(tmp_path / "tokenizer")
    change(tmp_path / "tokenizer")
    argv = ["--source", "text.txt", "--split_by", "block", "--context", "8", "--tokenizer", "./tokenizer", "--out", "out"]
    refused(load_recipe("prepare").main, argv, capsys, "--tokenizer ./tokenizer", message)
    assert not (tmp_path / "out" / "manifest.json").exists() and not (tmp_path / "executed").exists()


def test_tokenizers_that_are_none(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(TEXT)
    for name, message in (
        ("text.txt", "give bpe, characters, the folder of"),
        ("owner/name", "give bpe, characters, the folder of"),
        ("https://example.org", "there is no folder"),
        ("nowhere/at/all", "there is no folder"),
        ("../x", "there is no folder"),
    ):
        argv = ["--source", "text.txt", "--split_by", "block", "--tokenizer", name, "--out", "out"]
        refused(load_recipe("prepare").main, argv, capsys, "--tokenizer", name, message)


# --- prompts ---

LONG = "rato " * 300
PROMPTS = {
    "a file that leads nowhere": (["--prompt_file", "link"], "--prompt_file link"),
    "too long in a file": (["--prompt_file", "long"], "this model has 64 learned positions"),
    "too long with what is asked for": (["--prompt", "o rato", "--max_new_tokens", "64"], "64 learned positions"),
    "a text as memory": (["--prompt", "a", "--memory", "long"], "no memory file"),
}


def test_a_text_that_the_tokenizer_does_not_know_is_told_once(tmp_path, capsys):
    tokenizer = build_character_tokenizer([TEXT])
    said = "the tokenizer does not know all of the text: <|unk|> stands for the rest"
    assert tokenizer.unk_token_id in encode_texts(tokenizer, ["o rato", "щука"])[1]
    encode_texts(tokenizer, ["Ж"])
    assert capsys.readouterr().err.count(said) == 1


def write_files(folder: Path) -> None:
    (folder / "binary").write_bytes(b"\x89PNG\xff\0")
    (folder / "latin").write_bytes("ação".encode("latin-1"))
    (folder / "long").write_text(LONG)
    (folder / "empty").write_bytes(b"")
    (folder / "link").symlink_to(folder / "gone")
    (folder / "folder").mkdir()


@pytest.mark.parametrize("case", PROMPTS)
def test_prompts(case, models, tmp_path, capsys, monkeypatch):
    options, message = PROMPTS[case]
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path)
    argv = ["--model", models / "learned", "--device", "cpu", "--max_new_tokens", "2", *options]
    refused(load_recipe("generate").main, argv, capsys, message, keeps=tmp_path)


def test_prompts_of_standard_input(models, capsys, monkeypatch):
    for content, message in ((b"\xff", "cannot read standard input"), (LONG.encode(), "64 learned positions")):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
        refused(load_recipe("generate").main, ["--model", models / "learned", "--device", "cpu"], capsys, message)


def test_odd_prompts_are_continued(models, capsys):
    odd = ["", " \n\t ", "a\x01b", "<|endoftext|><|pad|>", "😀\U0010ffff", "r" * 5000]
    argv = ["--model", models / "any", "--device", "cpu", "--max_new_tokens", "2", "--prompt", *odd]
    handled(load_recipe("generate").main, argv, capsys)


@pytest.mark.parametrize("needs", ["pad_token", "eos_token"])
def test_tokenizers_without_special_tokens(needs, models, tmp_path, capsys):
    folder = shutil.copytree(models / "any", tmp_path / "model")
    config = json.loads((folder / CONFIG).read_text())
    for name in ("pad_token", "eos_token")[: 1 if needs == "pad_token" else 2]:
        del config[name]
    (folder / CONFIG).write_text(json.dumps(config))
    argv = ["--model", folder, "--device", "cpu", "--max_new_tokens", "2", "--prompt", "", "o rato"]
    main = load_recipe("generate").main
    if needs == "pad_token":
        handled(main, argv, capsys)
    else:
        refused(main, argv, capsys, "has no end-of-text token (eos_token)", keeps=folder)


TEXTS = {
    "inspect_heads": {
        "empty file": (["--text_file", "empty"], "the text is empty"),
    },
    "memorize": {
        "latin-1": (["--text", "latin"], "latin", "not UTF-8"),
        "empty": (["--text", "empty"], "the file is empty"),
        "too long": (["--text", "long"], "64 learned positions"),
        "the text itself": (["--text", "long", "--out", "long"], "long", "--out: choose another name"),
    },
    "evaluate_model": {
        "binary": (["--text", "binary", "--length", "32"], "binary"),
        "too long": (["--text", "long", "--length", "500"], "64 learned positions"),
        "no text in its lines": (["--text", "row.jsonl", "--length", "32"], "no text in the field 'text'"),
    },
}
TEXT_CASES = [(recipe, case) for recipe, cases in TEXTS.items() for case in cases]


@pytest.mark.parametrize(("recipe", "case"), TEXT_CASES)
def test_texts(recipe, case, models, tmp_path, capsys, monkeypatch):
    options, *mentions = TEXTS[recipe][case]
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path)
    (tmp_path / "row.jsonl").write_text('{"txt": 1}\n')
    argv = ["--model", models / "learned", "--device", "cpu", *([] if "--out" in options else ["--out", "made"]), *options]
    refused(load_recipe(recipe).main, argv, capsys, *mentions, keeps=tmp_path)
