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
    """Folders of models with their tokenizer: "learned" has 64 positions, "any" reads texts of any
    length."""
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


def without_vocabulary(folder):
    content = json.loads((folder / BPE).read_text())
    content["model"] |= {"vocab": {}, "merges": []}
    (folder / BPE).write_text(json.dumps(content))


BPE, CONFIG = "tokenizer.json", "tokenizer_config.json"
TOKENIZERS = {
    "cut": (
        lambda folder: (folder / BPE).write_bytes(b'{"version": "1.0", "tru'),
        "cannot be loaded",
    ),
    "no end of text": (lambda folder: (folder / CONFIG).unlink(), "no end-of-text token"),
}


@pytest.mark.parametrize("case", TOKENIZERS)
def test_tokenizers(case, tmp_path, capsys, monkeypatch):
    change, message = TOKENIZERS[case]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(TEXT)
    train_bpe([TEXT], 300).save_pretrained(tmp_path / "tokenizer")
    change(tmp_path / "tokenizer")
    argv = [
        *"--source text.txt --split_by block --context 8 --tokenizer ./tokenizer".split(),
        *"--out out".split(),
    ]
    refused(load_recipe("prepare").main, argv, capsys, "--tokenizer ./tokenizer", message)
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_tokenizers_that_are_none(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(TEXT)
    for name, message in (
        ("text.txt", "give bpe, characters, the folder of"),
        ("nowhere/at/all", "there is no folder"),
    ):
        argv = ["--source", "text.txt", "--split_by", "block", "--tokenizer", name, "--out", "out"]
        refused(load_recipe("prepare").main, argv, capsys, "--tokenizer", name, message)


# --- prompts ---

LONG = b"rato " * 300


def test_a_text_that_the_tokenizer_does_not_know_is_told_once(tmp_path, capsys):
    tokenizer = build_character_tokenizer([TEXT])
    said = "the tokenizer does not know all of the text: <|unk|> stands for the rest"
    assert tokenizer.unk_token_id in encode_texts(tokenizer, ["o rato", "щука"])[1]
    encode_texts(tokenizer, ["Ж"])
    assert capsys.readouterr().err.count(said) == 1


def test_prompts_of_standard_input(models, capsys, monkeypatch):
    for content, message in (
        (b"\xff", "cannot read standard input"),
        (LONG, "64 learned positions"),
    ):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
        refused(
            load_recipe("generate").main,
            ["--model", models / "learned", "--device", "cpu"],
            capsys,
            message,
        )


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
    "no file": ("generate", ["--prompt_file", "gone"], "--prompt_file gone"),
    "a long prompt": ("generate", ["--prompt_file", "long"], "this model has 64 learned positions"),
    "a prompt and what is asked for": (
        "generate",
        ["--prompt", "o", "--max_new_tokens", "64"],
        "64 learned positions",
    ),
    "binary": ("evaluate_model", ["--text", "binary", "--length", "32"], "binary"),
    "too long rows": (
        "evaluate_model",
        ["--text", "long", "--length", "500"],
        "64 learned positions",
    ),
    "no text in its lines": (
        "evaluate_model",
        ["--text", "row.jsonl", "--length", "32"],
        "no text in the field 'text'",
    ),
}


@pytest.mark.parametrize("case", TEXTS)
def test_texts(case, models, tmp_path, capsys, monkeypatch):
    recipe, options, *mentions = TEXTS[case]
    monkeypatch.chdir(tmp_path)
    files = {
        "binary": b"\x89PNG\xff\0",
        "latin": "ação".encode("latin-1"),
        "long": LONG,
        "empty": b"",
    }
    files["row.jsonl"] = b'{"txt": 1}\n'
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    out = [] if recipe == "generate" or "--out" in options else ["--out", "made"]
    argv = ["--model", models / "learned", "--device", "cpu", *out, *options]
    refused(load_recipe(recipe).main, argv, capsys, *mentions, keeps=tmp_path)
