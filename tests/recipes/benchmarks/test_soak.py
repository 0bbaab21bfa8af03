"""The soak of recipes/benchmark.py on 9,000 tokens: its promises hold, and one that does not is named."""

import contextlib
import io
import itertools
import json

import pytest

from bad_input import refused
from benchmarks import measuring, soak
from running import load_recipe

pytestmark = pytest.mark.slow

ARGV = ["--parts", "soak", "--size", "tiny", "--threads", "1", "--out"]
TOKENS = 9000


def test_memory_and_results_stay_what_they_were(tmp_path):
    out = tmp_path / "soak.json"
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        load_recipe("benchmark").main([*ARGV, str(out)])
    content = json.loads(out.read_text())
    rows = content["parts"]["soak"]
    assert [(row["name"], row["tokens"], row["broken"]) for row in rows] == [(name, TOKENS, []) for name in soak.MODELS]
    assert {"command", "date", "hardware"} <= content.keys() and "| delta " in printed.getvalue()
    for row in rows:
        # float32 has 6e-8, in sums of 560 segments that go through one layer; measured: 1e-6
        assert max(row["output_error"], row["normaliser_drift"], row["memory_drift"]) < 1e-5
        # One layer with 2 heads of 16: a window of 16 keys and values, M and z, three counters and the row's weights
        normaliser, weights = {"gated delta": (0, 2), "linear, exp, learned weights": (16, 1)}.get(row["name"], (16, 0))
        assert row["cache_bytes"] == 4 * (2 * 16 * 32 + 2 * (16 * 16 + normaliser) + 2 * 16 * weights) + 3 * 8


def other_features(monkeypatch):
    monkeypatch.setattr(soak.Reference, "features", lambda self, x, log_rates=0: x.sigmoid())


def growing(monkeypatch):
    held = itertools.count(1000)
    monkeypatch.setattr(measuring, "held_bytes", lambda device: next(held))


def a_segment_less(monkeypatch):
    stream = soak.stream
    monkeypatch.setattr(soak, "stream", lambda model, ids, chunk: stream(model, ids[:, :-16], chunk))


@pytest.mark.parametrize(
    ("change", "mentions"),
    [
        (other_features, ["output_error", "normaliser_drift", "memory_drift", "is above 0.001"]),
        (growing, ["held_growth", "is above 0.01"]),
        (a_segment_less, ["of 9,000 tokens 8,984 are counted, and 8,976 in the memory"]),
    ],
)
def test_what_does_not_hold_is_named(change, mentions, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(soak, "MODELS", {"linear": {}})
    change(monkeypatch)
    out = tmp_path / "soak.json"
    refused(load_recipe("benchmark").main, [*ARGV, out], capsys, "the soak shows a defect: linear: ", *mentions, str(out))
    assert json.loads(out.read_text())["parts"]["soak"][0]["broken"]
