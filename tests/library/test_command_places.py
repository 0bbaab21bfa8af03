"""Where the command finds a model and leaves what it keeps: GGUF files, names by content, and the
cache folder that it lists and empties; and how many tokens a page of the heads has."""

import json
import re
import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bad_input import contents
from commands import TEXT, command_in, save_models
from decoders import fitted
from hf_infini import command, patch_model, save_adapter
from hf_infini.models.loading import load_causal_lm, load_config, load_tokenizer, model_files
from hf_infini.tools.cache_folder import key_of

LETTERS = [chr(number) for number in range(33, 127)] + ["Ġ", "Ċ", "Ġt"]
WORDS = ["<unk>", "<s>", "<|endoftext|>", *LETTERS]
WIDTH, HIDDEN, LAYERS = 32, 48, 2


def write_gguf(path: Path) -> None:
    """A small Llama with random weights, and a tokenizer of single letters."""
    file, rng = gguf.GGUFWriter(path, "llama"), np.random.default_rng(0)
    file.add_context_length(256)
    file.add_embedding_length(WIDTH)
    file.add_block_count(LAYERS)
    file.add_feed_forward_length(HIDDEN)
    file.add_head_count(4)
    file.add_head_count_kv(2)
    file.add_layer_norm_rms_eps(1e-5)
    file.add_rope_freq_base(10_000.0)
    file.add_rope_dimension_count(WIDTH // 4)
    file.add_vocab_size(len(WORDS))
    file.add_tokenizer_model("gpt2")
    file.add_token_list(WORDS)
    file.add_token_types([3] * 3 + [1] * len(LETTERS))
    file.add_token_merges(["Ġ t"])
    file.add_bos_token_id(1)
    file.add_eos_token_id(2)
    shapes = {"token_embd": (len(WORDS), WIDTH), "output": (len(WORDS), WIDTH)}
    shapes["output_norm"] = (WIDTH,)
    for layer in (f"blk.{number}." for number in range(LAYERS)):
        shapes |= {f"{layer}{name}_norm": (WIDTH,) for name in ("attn", "ffn")}
        shapes |= {f"{layer}attn_{name}": (WIDTH, WIDTH) for name in ("q", "output")}
        shapes |= {f"{layer}attn_{name}": (WIDTH // 2, WIDTH) for name in ("k", "v")}
        shapes |= {f"{layer}ffn_{name}": (HIDDEN, WIDTH) for name in ("gate", "up")}
        shapes[f"{layer}ffn_down"] = (WIDTH, HIDDEN)
    for name, shape in shapes.items():
        file.add_tensor(f"{name}.weight", rng.normal(0, 0.3, shape).astype(np.float32))
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("command")
    folders = save_models(base)
    (base / "gguf").mkdir()
    write_gguf(base / "gguf" / "tiny.Q4.gguf")
    return folders | {"gguf": base / "gguf"}


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    return command_in(tmp_path / "kept", monkeypatch, capsys)


def told(run, *words, status: int = 1) -> str:
    return run(*words, status=status).err.splitlines()[-1]


# --- GGUF
# --------------------------------------------------------------------------------------------------


def test_a_gguf_is_a_model_by_its_name_and_by_its_folder(folders, tmp_path):
    folder = folders["gguf"]
    [file] = folder.iterdir()
    models = [load_causal_lm(path) for path in (file, folder)]
    tokenizer = load_tokenizer(folder, models[0])
    ids = torch.tensor([tokenizer("the king")["input_ids"]])
    assert tokenizer.decode(ids[0]).replace(" ", "") == "theking" and ids.max() > 2
    wanted = gguf.GGUFReader(file).tensors[0].data
    for model in models:  # plain weights, which are saved and loaded as those of any model
        torch.testing.assert_close(
            model.get_input_embeddings().weight.detach().numpy(), np.asarray(wanted)
        )
        model.save_pretrained(tmp_path / "saved")
        saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
        torch.testing.assert_close(saved(ids).logits, model(ids).logits)
    assert load_config(file).num_hidden_layers == LAYERS


def test_the_command_takes_a_gguf(folders, run, tmp_path):
    model = load_causal_lm(folders["gguf"])
    options = {"segment_length": 16, "kept_tokens": 8, "keep_score": "learned"}
    save_adapter(fitted(patch_model(model, **options)), tmp_path / "adapter")
    out = tmp_path / "whole"
    words = ["--adapter", tmp_path / "adapter", "--out", out]
    run("convert", folders["gguf"], *words)
    found = AutoModelForCausalLM.from_pretrained(out)
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(found.state_dict()[name], weight)
    assert len(run("estimate", folders["gguf"]).out.splitlines()) == 4


def test_which_file_of_a_folder_is_meant(folders, tmp_path, run):
    folder = shutil.copytree(folders["gguf"], tmp_path / "several")
    [file] = folder.iterdir()
    shutil.copy(file, folder / "other.gguf")
    line = told(run, "estimate", folder)
    assert line.startswith("error: ") and "other.gguf, tiny.Q4.gguf" in line
    assert model_files(folder / "other.gguf")["gguf_file"] == "other.gguf"
    (folder / "model.safetensors").touch()  # a whole model, which has GGUF files, too
    assert model_files(folder) == {"pretrained_model_name_or_path": str(folder)}
    file.write_bytes(file.read_bytes()[:300])
    line = told(run, "ask", file, folders["play.txt"])
    assert line.startswith("error: ") and str(file) in line


def test_a_gguf_without_its_library_names_the_extra(folders, run, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    line = told(run, "estimate", folders["gguf"])
    assert line.endswith("gguf is not installed: pip install 'hf-infini[gguf]'")


# --- names
# --------------------------------------------------------------------------------------------------


def test_a_memory_is_found_by_the_weights_and_not_by_the_path(folders, run, tmp_path):
    def ask(model: Path, document: Path = folders["play.txt"]) -> bool:
        words = ["-q", "Who?", "--max-new-tokens", 2, "--device", "cpu"]
        return "reading" in run("ask", model, document, *words).err

    assert ask(folders["memory"]) and not ask(folders["memory"])
    moved = shutil.copytree(folders["memory"], tmp_path / "moved")
    copy = shutil.copy(folders["play.txt"], tmp_path / "copy.txt")
    assert not ask(moved, copy)
    for change in ("weights", "text"):
        if change == "text":
            Path(copy).write_text(f"{TEXT} The end.", encoding="utf-8")
        else:
            model = AutoModelForCausalLM.from_pretrained(moved)
            with torch.no_grad():
                model.transformer.h[-1].mlp.c_proj.weight.mul_(1.5)
            model.save_pretrained(moved)
        assert ask(moved, copy) and not ask(moved, copy)
    assert not ask(folders["memory"])


@pytest.mark.parametrize("kind", ["plain", "memory"])
@pytest.mark.parametrize("part", ["weights", "options", "other"])
def test_a_name_depends_on_weights_and_options_only(part, kind, folders, tmp_path):
    places = (folders[kind], shutil.copytree(folders[kind], tmp_path / "elsewhere"))
    model, same = map(AutoModelForCausalLM.from_pretrained, places)
    assert model.name_or_path != same.name_or_path
    before = key_of(model, "text")
    assert before == key_of(same, "text") == key_of(same.to(torch.float64), "text")
    if part == "weights":
        next(model.parameters()).data.mul_(1.1)
    elif part == "options":
        model.config.initializer_range *= 2
    assert before != key_of(model, "text" if part != "other" else "texts")


# --- the cache folder
# --------------------------------------------------------------------------------------------------


@pytest.fixture
def kept(folders, run, tmp_path) -> Path:
    """A cache folder with two memories, files of earlier versions, and what a kill left."""
    for document in ("one.txt", "two.txt"):
        (tmp_path / document).write_text(f"{TEXT} {document}", encoding="utf-8")
        words = ["-q", "Who?", "--max-new-tokens", 1, "--device", "cpu"]
        run("ask", folders["memory"], tmp_path / document, *words)
    folder = tmp_path / "kept"
    (folder / "memories" / f"{'c' * 32}.safetensors").write_bytes(b"old")
    (folder / "memories" / f"{'d' * 32}.safetensors.partial").write_bytes(b"killed")
    (folder / "scores" / ("e" * 32)).mkdir(parents=True)
    (folder / "scores" / ("e" * 32) / "infini_adapter.json").write_text("{}")
    (folder / "scores" / f"{'e' * 32}.json").write_text('["damaged')
    (folder / "memories" / f"{'c' * 32}.json").mkdir()
    return folder


def test_the_cache_folder_is_listed(kept, run, folders):
    before = contents(kept)
    printed = run("cache")
    lines = printed.out.splitlines()[1:]
    sizes = sum(path.stat().st_size for path in kept.rglob("*") if path.is_file())
    assert f"5 in {kept}, {sizes / 1e6:,.1f} MB" in printed.err
    assert {line.split()[1] for line in lines} == {"memory", "score"} and len(lines) == 5
    for document in ("one.txt", "two.txt"):
        [line] = [line for line in lines if document in line]
        assert str(folders["memory"]) in line and re.search(r" [\d.]+ MB +\d+ seconds ", line)
    assert sum("unknown: of an earlier version" in line for line in lines) == 3
    assert contents(kept) == before
    assert run("cache", status=0).out.count("\n") == 6


@pytest.mark.parametrize(("name", "left"), [("cccc", 4), ("d" * 32, 4), ("eeee", 4), ("all", 0)])
def test_entries_are_removed_whole(name, left, kept, run):
    before = contents(kept)
    for typed in ("", "n\n", "no\n"):
        printed = run("cache", "--remove", name, typed=typed, status=1)
        assert "nothing was removed: answer y, or give --yes." in printed.err.splitlines()[-1]
    assert contents(kept) == before
    run("cache", "--remove", name, typed="y\n")
    found = {path.name.partition(".")[0] for path in kept.glob("*/*")}
    assert len(found) == left and not any(one.startswith(name) for one in found)
    assert len(run("cache").out.splitlines()) == left + 1


@pytest.mark.parametrize("name", ["", "zz", "../..", "memories", "*"])
def test_a_name_of_no_entry_removes_nothing(name, kept, run):
    before = contents(kept)
    line = told(run, "cache", "--remove", name, "--yes")
    assert line.startswith("error: ") and "cccccccccccc" in line and contents(kept) == before


def test_an_empty_cache_folder_is_listed(run, tmp_path):
    assert len(run("cache").out.splitlines()) == 1
    assert "nothing is kept" in told(run, "cache", "--remove", "x")


# --- pages
# --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_page_has_so_many_tokens_that_some_are_kept(folders, run, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "INSPECTED", 20)
    document = tmp_path / "short.txt"
    document.write_text(TEXT[:300], encoding="utf-8")
    tokens = len(AutoTokenizer.from_pretrained(folders["plain"])(TEXT[:300])["input_ids"])
    options = {"segment_length": 16, "local_segments": 1, "sink_tokens": 2}
    seen = []
    inspect = command.inspect_attention

    def counted(net, ids, tokenizer, **options):
        seen.append(ids.shape[1])
        return inspect(net, ids, tokenizer, **options)

    monkeypatch.setattr(command, "inspect_attention", counted)

    def pages(kept: int, *more) -> str:
        model = AutoModelForCausalLM.from_pretrained(folders["plain"])
        adapted = patch_model(model, **options, kept_tokens=kept, keep_score="learned")
        save_adapter(fitted(adapted), tmp_path / "adapter")
        words = ["--adapter", tmp_path / "adapter", "--out", tmp_path / "page.html", *more]
        return run("inspect", folders["plain"], document, *words).err

    pages(46)  # 80 places
    assert seen.pop() == 100
    pages(5000)  # all of the document
    assert seen.pop() == tokens > 120
    page = (tmp_path / "page.html").read_text("utf-8")
    assert "kept" in page
    line = pages(24, "--max-tokens", 34)
    assert seen.pop() == 34 and "none of the 34 tokens has left the window of 34" in line
    config = json.loads((folders["plain"] / "config.json").read_text("utf-8"))
    heads = config["num_hidden_layers"] * config["num_attention_heads"]
    monkeypatch.setattr(command, "PAGE_WEIGHTS", heads * 91**2 - 1)
    pages(5000)
    assert seen.pop() == 90
    run("inspect", folders["plain"], document, "--out", tmp_path / "page.html")
    assert seen.pop() == command.INSPECTED
