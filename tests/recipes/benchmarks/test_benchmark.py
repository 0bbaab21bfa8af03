"""recipes/benchmark.py, run as a user runs it: all parts on tiny sizes, broken off, refused; and its peaks."""

import contextlib
import functools
import io
import json
import os
import re
import sys

import pytest
import torch

from benchmarks import contestants, measuring, models
from benchmarks.contestants import Shape
from benchmarks.models import ModelSpec
from benchmarks.parts import CHANGES, PARTS, UNCHANGED
from decoders import decoder
from running import ROOT, load_recipe

pytestmark = pytest.mark.slow  # they share trained runs


benchmark = load_recipe("benchmark")
TINY = ["--size", "tiny", "--dtypes", "float32", "--rounds", 2, "--threads", 1]


def rows_of(file, part: str, work: str = "") -> list[dict]:
    return [row for row in json.loads(file.read_text())["parts"][part] if row["work"].startswith(work)]


def measure(*argv) -> str:
    """Runs the recipe in this process, and returns what it printed."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        benchmark.main([*map(str, argv)])
    return printed.getvalue()


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    """One run of all parts on tiny sizes: what it printed, and its --out. What is compiled is captured, but not turned into
    machine code, which takes a minute."""
    out = tmp_path_factory.mktemp("benchmark") / "deep" / "all.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
        return measure(*TINY, "--contestants", "infini", "loop-split", "causal-eager", "--out", out), out


def test_the_layer_beside_others(everything):
    printed, out = everything
    rows = rows_of(out, "attention")
    assert [row["name"] for row in rows] == ["infini", "loop-split", "causal-eager"]
    for row in rows:
        assert len(row["samples"]) == 2 and row["seconds_lowest"] <= row["seconds"] <= row["seconds_highest"]
        assert row["ratio"] > 0 and row["peak_bytes"] >= 0
    assert rows[0]["ratio"] == 1
    assert "**one layer, forward and backward**" in printed and "| causal-eager |     64 |       8 | float32 |" in printed


def test_lengths_that_double_and_memory_over_segments(everything):
    _, out = everything
    rows = rows_of(out, "scaling", "one layer")
    assert [(row["name"], row["tokens"], "ratio" in row) for row in rows] == [
        ("infini", 64, False),
        ("infini", 128, True),
        ("infini-delta", 64, False),
        ("infini-delta", 128, True),
    ]
    memory = rows_of(out, "scaling", "memory")
    assert [(row["name"], row["segment"]) for row in memory] == [("infini", 8), ("infini-delta", 8)]
    assert all(row["extra"] == pytest.approx(row["peak_bytes"] / (8 * 128 * 32 * 4) - 1) for row in memory)


def test_whole_models(everything):
    _, out = everything
    file = out
    for row in rows_of(file, "model", "training step"):
        assert row["peak_bytes"] > 30_000 * 16  # weights, gradients and two moments of 30,000 parameters
        assert row["tokens_per_second"] == pytest.approx(40 / row["seconds"])
    prompts = rows_of(file, "model", "prompt")
    assert [(row["name"], row["tokens"]) for row in prompts] == [("infini", 90), ("infini", 200), ("gpt2", 90)]
    padded = rows_of(file, "model", "new token")
    assert [row["name"] for row in padded] == ["infini", "gpt2"] and padded[1]["ratio"] > 0
    assert padded[1]["cache_bytes"] == 3 * (20 + 8 * 3) * 2 * 32 * 4  # rows, tokens, keys and values, …
    assert padded[1]["tokens_per_second"] == pytest.approx(3 / padded[1]["seconds"])


def test_a_training_step_in_bfloat16_is_autocast():
    spec = ModelSpec(n_layer=1, n_embd=16, n_head=2, vocab_size=31, segment_length=8)
    model, ids = models.build("infini", spec, 40), models.random_ids(spec, 1, 40)
    seen = []
    model.lm_head.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    for dtype in ("float32", "bfloat16"):
        before = model.lm_head.weight.detach().clone()
        models.training_step(model, ids, dtype)()
        assert model.lm_head.weight.dtype == torch.float32 and not torch.equal(model.lm_head.weight, before)
    assert seen == [torch.float32, torch.bfloat16]


def test_options_one_by_one(everything):
    printed, out = everything
    rows = rows_of(out, "options")
    assert [row["name"] for row in rows] == [*CHANGES, "gpt2"] and rows[0]["ratio"] == 1
    assert all(row["ratio_lowest"] <= row["ratio"] <= row["ratio_highest"] for row in rows)
    assert "| memory_conv=3 " in printed


def test_compiled(everything):
    _, out = everything
    for work in ("training step", "new token"):
        rows = rows_of(out, "compiled", work)
        assert [row["name"] for row in rows] == ["as it is", "compiled"]
        assert rows[0]["ratio"] == 1 and len(rows[1]["samples"]) == 2 and rows[1]["ratio"] > 0


def test_every_change_changes_what_is_computed():
    """A step of a name that did nothing would be timed as well."""
    spec = ModelSpec(n_layer=1, n_embd=16, n_head=2, vocab_size=31, segment_length=8)
    ids = models.random_ids(spec, 1, 40)
    found = {name: models.build("infini", spec, 40, changes=changes) for name, changes in CHANGES.items()}
    for name, model in found.items():
        if name == "memory_conv=3":  # starts at zero
            torch.nn.init.ones_(model.transformer.h[0].attn.memory_conv)
        if name == "memory_write=learned":
            torch.nn.init.normal_(model.transformer.h[0].attn.memory_write)
        if name == "feature_map=learned":
            torch.nn.init.normal_(model.transformer.h[0].attn.query_map)
    logits = {name: model(ids).logits for name, model in found.items()}
    assert all(not torch.allclose(logits[name], logits[UNCHANGED]) for name in CHANGES if name != UNCHANGED)


def test_a_new_token_after_long_contexts(everything):
    _, out = everything
    rows = rows_of(out, "decoding")
    assert [(row["tokens"], row["name"]) for row in rows] == [(n, name) for n in (50, 400) for name in ("infini", "gpt2")]
    assert rows[0]["cache_bytes"] == rows[2]["cache_bytes"]
    assert rows[1]["cache_bytes"] == (50 + 8 * 3) * 2 * 32 * 4  # tokens, keys and values, width, float32; one layer
    assert all(0 < row["seconds_lowest"] <= row["seconds"] <= row["seconds_highest"] for row in rows)


def test_a_checkpoint_as_it_is_and_with_a_memory(tmp_path):
    model = decoder("llama")
    model.save_pretrained(tmp_path / "llama")
    settings = ["--parts", "pretrained", "--model", tmp_path / "llama", "--contexts", "50", "150"]
    measure(*TINY, *settings, "--out", tmp_path / "x.json", "--dtypes", "float32", "int8")
    prompts = rows_of(tmp_path / "x.json", "pretrained", "prompt")
    both = [(tokens, name) for tokens in (50, 150) for name in ("infini", "stock")]
    assert [(row["tokens"], row["name"]) for row in prompts] == 2 * (both[:2] + both[2:3])  # 150 are too many for stock
    assert all(row["peak_bytes"] >= 0 and row["tokens_per_second"] > 0 for row in prompts)
    tokens = rows_of(tmp_path / "x.json", "pretrained", "new token")
    assert [(row["tokens"], row["name"], row["dtype"]) for row in tokens] == [
        (*case, dtype) for dtype in ("float32", "int8") for case in both
    ]
    config, added = model.config, 8 * 3
    keys = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    assert tokens[1]["cache_bytes"] == (50 + added) * keys * 4 and tokens[3]["cache_bytes"] == (150 + added) * keys * 4
    assert tokens[5]["cache_bytes"] == (50 + added) * keys * 2
    assert tokens[0]["cache_bytes"] == tokens[2]["cache_bytes"]


def test_files_of_a_run(everything):
    printed, out = everything
    content = json.loads(out.read_text())
    assert {"date", "hardware", "versions", "options", "threads"} <= content.keys()
    assert list(content["parts"]) == benchmark.PARTS and printed.endswith(f"{out}\n")
    widths = [len({line.count("|") for line in table.splitlines() if "|" in line}) for table in printed.split("\n\n")]
    assert max(widths) == 1 and sum(widths) == 10  # attention, scaling 2, model 3, decoding, options, compiled 2


def test_what_was_measured_before_an_error_is_kept(tmp_path, monkeypatch):
    def broken(how):
        yield [{"work": "a", "name": "b", "tokens": 3}]
        raise RuntimeError("of a contestant")

    monkeypatch.setitem(PARTS, "decoding", broken)
    with pytest.raises(SystemExit):
        measure(*TINY, "--parts", "decoding", "--out", tmp_path / "x.json")
    assert [row["name"] for row in rows_of(tmp_path / "x.json", "decoding")] == ["b"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--shapes", "64"], "--shapes 64: give TOKENSxSEGMENT"),
        (["--shapes", "64x0"], "--shapes 64x0: give TOKENSxSEGMENT"),
        (["--rounds", "0"], "--rounds must be at least 1, got 0"),
        (["--contexts", "5", "-1"], "--contexts must be at least 1, got -1"),
        (["--contestants", "infini", "loops"], "there is no loops; allowed are infini, infini-delta, "),
        (["--parts", "pretrained"], "--parts pretrained and --model NAME go together"),
        (["--dtypes", "int8"], "--dtypes int8 is for --parts pretrained only"),
        (["--parts", "soak", "--size", "tiny", "--contexts", "2799"], "--contexts 2799: a soak of this size takes"),
        (["--device", "cuda"], "torch finds no GPU here"),
    ],
)
def test_refused_options(tmp_path, capsys, monkeypatch, argv, message):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit) as stopped:
        benchmark.main([*argv, "--out", str(tmp_path / "x")])
    assert stopped.value.code == 1 and message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def peak(contestant, shape, limit_seconds=300):
    how = {"device": "cpu", "threads": 1, "limit_seconds": limit_seconds}
    return measuring.peak_of(contestants.prepare_layer, contestant, shape, "cpu", **how)


def test_nothing_else_imports_the_benchmarks():
    """Whoever imports hf_infini waits for none of it."""
    files = [*(ROOT / "hf_infini").rglob("*.py"), *(ROOT / "recipes").glob("*/*.py")]
    files = [file for file in files if file.parent.name != "benchmarks"]
    found = [file.name for file in files if re.search(r"^\s*(from|import) .*benchmark", file.read_text(), re.MULTILINE)]
    assert len(files) > 50 and not found


@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="peaks cannot be set back here")
def test_peaks_of_fresh_processes():
    """Full attention written out holds squares of n, this package a multiple of its inputs; a second measurement in a new
    process finds nothing left of the first."""
    square = 2 * 2048 * 2048 * 4
    large = peak("causal-eager", Shape(2048, 64, 2, 16))["peak_bytes"]
    assert 2 * square < large < 6 * square  # weights, a gradient, and what was not freed before
    tensor = 2 * 16 * 2048 * 4
    small = peak("infini", Shape(2048, 64, 2, 16))["peak_bytes"]
    assert 6 * tensor < small < square


def test_processes_that_do_not_end_well(monkeypatch):
    assert "ended after 1 s" in peak("infini", Shape(2**22, 64, 2, 16), limit_seconds=1)["skipped"]
    monkeypatch.setitem(sys.modules, "local_attention", None)  # as if it were not installed
    skipped = {"skipped": "not installed: pip install local-attention"}
    assert measuring._peak_here(contestants.prepare_layer, ("local-attention", Shape(8, 4), "cpu"), "cpu") == skipped
    assert "float16x" in peak("infini", Shape(64, 64, 2, 16, dtype="float16x"))["skipped"]
    assert peak("causal-eager", Shape(2**20, 64, 2, 16))["skipped"] == "not enough memory"  # 8 TiB of scores
