"""recipes/benchmark.py, run as a user runs it: all parts on tiny sizes, broken off, refused."""

import contextlib
import io
import json
import re

import pytest
import torch

from benchmarks import measuring, models
from benchmarks.parts import PARTS
from decoders import decoder
from running import ROOT, load_recipe

pytestmark = pytest.mark.slow  # they share trained runs


benchmark = load_recipe("benchmark")
TINY = ["--model", "tiny", "--dtypes", "float32", "--rounds", 2, "--threads", 1]


def rows_of(file, part: str, work: str = "") -> list[dict]:
    return [
        row for row in json.loads(file.read_text())["parts"][part] if row["work"].startswith(work)
    ]


def measure(*argv) -> str:
    """Runs the recipe in this process, and returns what it printed."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        benchmark.main([*map(str, argv)])
    return printed.getvalue()


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    """One run of all parts on tiny sizes: what it printed, and its --out."""
    out = tmp_path_factory.mktemp("benchmark") / "deep" / "all.json"
    options = "--contexts 40 90 --batches 1 3 --contestants infini loop-split causal-sdpa".split()
    return measure(*TINY, *options, "--out", out), out


def test_the_layer_beside_others(everything):
    printed, out = everything
    rows = rows_of(out, "attention", "one layer")
    assert [row["name"] for row in rows] == ["infini", "loop-split", "causal-sdpa"]
    for row in rows:
        assert (
            len(row["samples"]) == 2
            and row["seconds_lowest"] <= row["seconds"] <= row["seconds_highest"]
        )
        assert row["ratio"] > 0 and "graph" not in row and "peak_bytes" not in row  # on a GPU only
    assert rows[0]["ratio"] == 1
    assert (
        "**one layer, forward and backward**" in printed
        and ("| causal-sdpa |     64 |       8 | float32 |") in printed
    )


def test_training_steps(everything):
    _, out = everything
    rows = rows_of(out, "model", "training step, tiny")
    assert [(row["tokens"], row["name"]) for row in rows] == [
        (n, name) for n in (40, 90) for name in models.KINDS
    ]
    assert all(
        row["tokens_per_second"] == pytest.approx(row["tokens"] / row["seconds"]) for row in rows
    )


def test_a_training_step_in_bfloat16_is_autocast():
    model = models.build("infini", "tiny", 40, "cpu")
    ids, seen = models.random_ids(model, 1, 40, 0), []
    model.lm_head.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    for dtype in ("float32", "bfloat16"):
        before = model.lm_head.weight.detach().clone()
        models.training_step(model, ids, dtype)()
        assert model.lm_head.weight.dtype == torch.float32 and not torch.equal(
            model.lm_head.weight, before
        )
    assert seen == [torch.float32, torch.bfloat16]


def test_a_new_token_after_long_contexts(everything):
    _, out = everything
    rows = rows_of(out, "decoding")
    cases = [(batch, n, name) for batch in (1, 3) for n in (40, 90) for name in models.KINDS]
    assert [(row["rows"], row["tokens"], row["name"]) for row in rows] == cases
    assert rows[0]["cache_bytes"] == rows[2]["cache_bytes"]
    for row in rows[1::2]:  # tokens, keys and values, width, float32; one layer
        assert row["cache_bytes"] == row["rows"] * (row["tokens"] + 8 * 5) * 2 * 32 * 4
        assert row["tokens_per_second"] == pytest.approx(row["rows"] / row["seconds"])


def test_a_recall_from_archives(everything):
    _, out = everything
    rows = rows_of(out, "recall", "reading")
    names = ["without an archive", "with an archive", "with an archive in 8 bits"]
    assert [row["name"] for row in rows] == names
    rows = rows_of(out, "recall", "recall")
    names = ["recall, in memory", "recall, in a file", "recall, in memory, in 8 bits", "answer"]
    # 40 tokens are read, once and twice
    assert [(row["tokens"], row["name"]) for row in rows] == [
        (tokens, name) for tokens in (40, 80) for name in names
    ]
    assert all(row["seconds"] > 0 for row in rows) and rows[3]["ratio"] == 1
    # keys and values, width, float32, or 8 bits and two heads' steps; one layer
    assert [row["archive_bytes"] for row in rows if row["name"] != "answer"] == [
        tokens * 2 * size for tokens in (40, 80) for size in (32 * 4, 32 * 4, 32 + 2 * 4)
    ]


def test_a_checkpoint(tmp_path):
    decoder("llama").save_pretrained(tmp_path / "llama")
    settings = [
        *f"--parts decoding --model {tmp_path / 'llama'} --contexts 50".split(),
        *f"--out {tmp_path / 'x.json'}".split(),
    ]
    measure(*TINY[2:], *settings)
    assert [row["name"] for row in rows_of(tmp_path / "x.json", "decoding")] == ["infini", "stock"]


@pytest.mark.parametrize("name", ["smollm2-135m", "smollm2-360m", "smollm2-1.7b", "gpt2"])
def test_models_have_the_sizes_of_their_names(name):
    with torch.device("meta"):
        config = models.build("stock", name, 1024, "meta").config
    heads, width = models.heads_of(name)
    assert heads * width == config.hidden_size and width == 64


def test_what_needs_too_much_memory_is_skipped(monkeypatch, tmp_path):
    """And the other of the two is measured."""
    cache_after = models.cache_after

    def short(model, kind, *others):
        return torch.empty(2**60) if kind == "stock" else cache_after(model, kind, *others)

    monkeypatch.setattr(models, "cache_after", short)
    measure(*TINY, "--parts", "decoding", "--contexts", 50, "--out", tmp_path / "x.json")
    infini, stock = rows_of(tmp_path / "x.json", "decoding")
    assert infini["seconds"] > 0 and stock["skipped"] == "not enough memory"


def test_files_of_a_run(everything):
    printed, out = everything
    content = json.loads(out.read_text())
    assert {"date", "hardware", "versions", "options", "threads"} <= content.keys()
    assert list(content["parts"]) == benchmark.PARTS and printed.endswith(f"{out}\n")
    widths = [
        len({line.count("|") for line in table.splitlines() if "|" in line})
        for table in printed.split("\n\n")
    ]
    # attention, model, decoding, and of recall two
    assert max(widths) == 1 and sum(widths) == 5


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
        (
            ["--contestants", "infini", "loops"],
            "there is no loops; allowed are infini, infini-delta, ",
        ),
        (["--device", "cuda"], "torch finds no GPU here"),
    ],
)
def test_refused_options(tmp_path, capsys, monkeypatch, argv, message):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit) as stopped:
        benchmark.main([*argv, "--out", str(tmp_path / "x")])
    assert stopped.value.code == 1 and message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_nothing_else_imports_the_benchmarks():
    """Whoever imports hf_infini waits for none of it."""
    files = [*(ROOT / "hf_infini").rglob("*.py"), *(ROOT / "recipes").glob("*/*.py")]
    files = [file for file in files if file.parent.name != "benchmarks"]
    found = [
        file.name
        for file in files
        if re.search(r"^\s*(from|import) .*benchmark", file.read_text(), re.MULTILINE)
    ]
    assert len(files) > 50 and not found


def test_rounds():
    calls = []
    runs = {name: (lambda name=name: calls.append(name)) for name in "abc"}
    times = measuring.alternate(runs, rounds=20, device="cpu", seed=1)
    assert all(len(values) == 20 for values in times.values())
    orders = {tuple(calls[begin : begin + 3]) for begin in range(6, 66, 3)}
    assert (
        calls[:6] == ["a", "b", "c"] * 2
        and len(orders) > 2
        and all(set(order) == set("abc") for order in orders)
    )
    calls.clear()
    measuring.alternate({"a": runs["a"]}, rounds=1, device="cpu", sample_seconds=0.5)
    assert len(calls) > 3
