"""Tokenizers and prompts: damaged or foreign tokenizers, texts and prompts that are none."""

import io
import json
import shutil
import sys
from pathlib import Path

import pytest

from bad_input import handled, refused
from cards.folder import generate_samples
from corpora.tokenization import build_character_tokenizer, train_bpe
from models import gpt2, infini_gpt2
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
        ("plain", gpt2(vocab_size=300)),
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


def only_config(model_type: str):
    def change(folder):
        for file in folder.iterdir():
            file.unlink()
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))

    return change


def code_of_its_own(folder):
    config = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text("open('executed', 'w')\n")


BPE, CONFIG = "tokenizer.json", "tokenizer_config.json"
TOKENIZERS = {
    "cut": (written(BPE, b'{"version": "1.0", "tru'), "cannot be loaded"),
    "empty file": (written(BPE, b""), "cannot be loaded"),
    "binary": (written(BPE, b"\xff\xfe\0"), "cannot be loaded"),
    "empty object": (written(BPE, b"{}"), "cannot be loaded"),
    "list": (written(BPE, b"[]"), "cannot be loaded"),
    "null": (written(BPE, b"null"), "cannot be loaded"),
    "deep": (written(BPE, b"[" * 50_000), "cannot be loaded"),
    "missing": (removed(BPE), "cannot be loaded"),
    "nothing": (removed(BPE, CONFIG), "cannot be loaded"),
    "unknown kind": (changed(model=lambda model: {"type": "None"}), "cannot be loaded"),
    "merges of unknown tokens": (changed(model=lambda model: model | {"merges": [["qq", "zz"]]}), "cannot be loaded"),
    "no vocabulary": (changed(model=lambda model: model | {"vocab": {}, "merges": []}), "empty vocabulary"),
    "cut configuration": (written(CONFIG, b"{"), "cannot be loaded"),
    "configuration of another kind": (written(CONFIG, b"[]"), "cannot be loaded"),
    "a number for a token": (written(CONFIG, b'{"eos_token": 5}'), "cannot be loaded"),
    "no end of text": (removed(CONFIG), "no end-of-text token"),
    "no end of text in the configuration": (written(CONFIG, b"{}"), "no end-of-text token"),
    "configuration of GPT-2 only": (only_config("gpt2"), "vocabulary"),
    "configuration of T5 only": (only_config("t5"), "vocabulary"),
    "configuration of BERT only": (only_config("bert"), "--tokenizer"),
    "unknown architecture": (only_config("none"), "cannot be loaded"),
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


NO_TOKENIZERS = ["text.txt", "nowhere/at/all", "nowhere", "owner/name", "https://example.org", "../x", "a b"]


@pytest.mark.parametrize("name", NO_TOKENIZERS)
def test_tokenizers_that_are_none(name, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(TEXT)
    argv = ["--source", "text.txt", "--split_by", "block", "--tokenizer", name, "--out", "out"]
    refused(load_recipe("prepare").main, argv, capsys, f"--tokenizer {name}", "give bpe, characters, the folder of")


def test_other_tokenizers_are_taken(tmp_path, capsys):
    """Of words that a character tokenizer has never seen there is one token each: unknown."""
    (tmp_path / "text.txt").write_text("щука " * 50)
    build_character_tokenizer([TEXT]).save_pretrained(tmp_path / "tokenizer")
    argv = ["--source", tmp_path / "text.txt", "--split_by", "block", "--context", "8", "--out", tmp_path / "out"]
    handled(load_recipe("prepare").main, [*argv, "--tokenizer", tmp_path / "tokenizer"], capsys)


# --- prompts ---

LONG = "rato " * 300
PROMPTS = {
    "two sources": (["--prompt", "a", "--prompt_file", "x"], "--prompt or --prompt_file"),
    "no file": (["--prompt_file", "none.txt"], "none.txt"),
    "a folder": (["--prompt_file", "."], "--prompt_file ."),
    "a file that leads nowhere": (["--prompt_file", "link"], "--prompt_file link"),
    "binary": (["--prompt_file", "binary"], "--prompt_file binary"),
    "latin-1": (["--prompt_file", "latin"], "--prompt_file latin"),
    "half a character": (["--prompt", "a\ud83d"], "--prompt 'a\\ud83d' is not UTF-8"),
    "half a character of several": (["--prompt", "a", "\udcff"], "--prompt '\\udcff' is not UTF-8"),
    "too long": (["--prompt", LONG], "this model has 64 learned positions"),
    "too long in a file": (["--prompt_file", "long"], "this model has 64 learned positions"),
    "too long with what is asked for": (["--prompt", "o rato", "--max_new_tokens", "64"], "64 learned positions"),
    "no memory": (["--prompt", "a", "--memory", "none"], "--memory"),
    "a text as memory": (["--prompt", "a", "--memory", "long"], "--memory"),
    "a folder as memory": (["--prompt", "a", "--memory", "."], "--memory"),
    "no model": (["--model", "nowhere", "--prompt", "a"], "--model: cannot load nowhere"),
    "a text as model": (["--model", "long", "--prompt", "a"], "--model: cannot load long"),
    "an empty folder as model": (["--model", "folder", "--prompt", "a"], "--model: cannot load folder"),
    "no device": (["--prompt", "a", "--device", "nope"], "--device: cannot use nope"),
    "a device that is not there": (["--prompt", "a", "--device", "cuda:77"], "--device: cannot use cuda:77"),
}


def test_what_the_tokenizer_does_not_know_is_named_once(tmp_path, capsys):
    tokenizer = build_character_tokenizer([TEXT])
    infini_gpt2(vocab_size=len(tokenizer), position_encoding="segment").save_pretrained(tmp_path / "m")
    tokenizer.save_pretrained(tmp_path / "m")
    said = "the tokenizer has no token for 'Ж', '日': <|unk|> stands there"
    (tmp_path / "text.txt").write_text(("o 日 rato\n\nЖ 日 roeu\n" + TEXT) * 2)
    (tmp_path / "known.txt").write_text(TEXT)
    for recipe, options in (
        ("generate", ["--prompt", "o 日 <|unk|>", "o Ж 日", "o", "--max_new_tokens", 1, "--batch_size", 1]),
        ("memorize", ["--text", tmp_path / "text.txt", "--out", tmp_path / "m.safetensors"]),
        ("inspect_heads", ["--text_file", tmp_path / "text.txt", "--max_tokens", 8]),
        ("evaluate_model", ["--text", tmp_path / "text.txt", "--length", 64]),
        ("prepare", ["--source", tmp_path / "text.txt", "--tokenizer", tmp_path / "m", "--split_by", "block"]),
    ):
        model = ["--out", tmp_path / "data"] if recipe == "prepare" else ["--model", tmp_path / "m"]
        assert handled(load_recipe(recipe).main, [*model, *options], capsys, said).count("no token for") == 1, recipe
    generate_samples(tmp_path / "m", ["o 日", "Ж 日"], 1, 0)
    assert capsys.readouterr().err.count(said) == 1
    known = ["--text", tmp_path / "known.txt", "--out", tmp_path / "k.safetensors"]
    for recipe, options in (("memorize", known), ("generate", ["--prompt", "o <|unk|> rato", "--max_new_tokens", 1])):
        assert "no token for" not in handled(load_recipe(recipe).main, ["--model", tmp_path / "m", *options], capsys)


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


@pytest.mark.parametrize("stdin", [b"\xff", "ação".encode("latin-1"), LONG.encode()], ids=["binary", "latin-1", "long"])
def test_prompts_of_standard_input(stdin, models, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
    message = "64 learned positions" if stdin.isascii() else "cannot read standard input"
    refused(load_recipe("generate").main, ["--model", models / "learned", "--device", "cpu"], capsys, message)


ODD_PROMPTS = {
    "empty": ["--prompt", ""],
    "empty among others": ["--prompt", "", "o rato", ""],
    "empty file": ["--prompt_file", "empty"],
    "white space": ["--prompt", " \n\t "],
    "NUL": ["--prompt", "a\x01b"],
    "a hyphen": ["--prompt=-x"],
    "special tokens": ["--prompt", "<|endoftext|><|pad|>"],
    "emoji": ["--prompt", "😀\U0010ffff"],
    "long": ["--prompt_file", "long"],
    "one long word": ["--prompt", "r" * 20_000],
}


@pytest.mark.parametrize("case", ODD_PROMPTS)
def test_odd_prompts_are_continued(case, models, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path)
    argv = ["--model", models / "any", "--device", "cpu", "--max_new_tokens", "2", *ODD_PROMPTS[case]]
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
        "both": (["--text", "a", "--text_file", "long"], "give one of --text and --text_file, not both"),
        "no file": (["--text_file", "none"], "cannot read none"),
        "a folder": (["--text_file", "folder"], "cannot read folder"),
        "binary": (["--text_file", "binary"], "cannot read binary"),
        "empty": (["--text", ""], "--text '' is empty"),
        "empty file": (["--text_file", "empty"], "the text is empty"),
        "half a character": (["--text", "\ud800"], "--text '\\ud800' is not UTF-8"),
        "too long": (["--text_file", "long", "--max_tokens", "100"], "64 learned positions"),
        "no such layer": (["--text", "a", "--layers", "7"], "layers"),
    },
    "memorize": {
        "no file": (["--text", "none"], "--text: there is no file none"),
        "a folder": (["--text", "folder"], "--text: there is no file folder"),
        "one of two": (["--text", "long", "none"], "--text: there is no file none"),
        "binary": (["--text", "binary"], "binary", "not UTF-8"),
        "latin-1": (["--text", "latin"], "latin", "not UTF-8"),
        "empty": (["--text", "empty"], "the file is empty"),
        "too long": (["--text", "long"], "64 learned positions"),
        "the text itself": (["--text", "long", "--out", "long"], "long", "--out: choose another name"),
        "a folder as file": (["--text", "long", "--out", "folder"], "--out folder is a folder"),
        "twice": (["--text", "long", "long"], "one memory file"),
    },
    "evaluate_model": {
        "no text": (["--text", "none"], "--text: there is no file none"),
        "no source": ([], "exactly one of --data and --text"),
        "binary": (["--text", "binary", "--length", "32"], "binary"),
        "empty": (["--text", "empty", "--length", "32"], "the file is empty"),
        "too long": (["--text", "long", "--length", "500"], "64 learned positions"),
        "no data": (["--data", "folder"], "has no manifest.json"),
        "no text in its lines": (["--text", "row.jsonl", "--length", "32"], "no text in the field 'text'"),
        "half a pair in its lines": (["--text", "half.jsonl", "--length", "32"], "half.jsonl", "half of a surrogate pair"),
    },
}
TEXT_CASES = [(recipe, case) for recipe, cases in TEXTS.items() for case in cases]


@pytest.mark.parametrize(("recipe", "case"), TEXT_CASES)
def test_texts(recipe, case, models, tmp_path, capsys, monkeypatch):
    options, *mentions = TEXTS[recipe][case]
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path)
    (tmp_path / "row.jsonl").write_text('{"txt": 1}\n')
    (tmp_path / "half.jsonl").write_text('{"text": "\\ud800"}\n')
    argv = ["--model", models / "learned", "--device", "cpu", *([] if "--out" in options else ["--out", "made"]), *options]
    refused(load_recipe(recipe).main, argv, capsys, *mentions, keeps=tmp_path)
