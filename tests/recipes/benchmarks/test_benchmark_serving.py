"""recipes/benchmark_serving.py against a server of a small model: its rows, and what ends it."""

import json
import os

import psutil
import pytest

pytest.importorskip("openai", reason="pip install '.[test]'")
pytest.importorskip("prometheus_client", reason="pip install '.[serve]'")

from running import run_recipe  # noqa: E402
from serving import TEXT, TOKENIZER, running  # noqa: E402


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A text and a tokenizer."""
    folder = tmp_path_factory.mktemp("benchmark")
    (folder / "text.txt").write_text(TEXT, "utf-8")
    TOKENIZER.save_pretrained(folder / "tokenizer")
    return folder


def measure(folder, address: str, *options, **how):
    words = ["--url", f"{address}/v1", "--model", "small", "--tokenizer", folder / "tokenizer"]
    words += ["--text", folder / "text.txt", "--out", folder / "out.json", *options]
    return run_recipe("benchmark_serving", *words, **how)


def test_every_row_has_its_answers(folder):
    with running(folder / "kept", slots=2) as server:
        options = ["--requests", 1, 3, "--tokens", 20, 300, "--sent", "together", "in_turn"]
        done = measure(folder, server.address, *options, "--new_tokens", 5)
        rows = json.loads((folder / "out.json").read_text())["rows"]
        places = [(row["tokens"], row["requests"], row["together"]) for row in rows]
        assert places == [(t, n, how) for t in (20, 300) for n in (1, 3) for how in (True, False)]
        for row in rows:
            assert len(row["answers"]) == row["requests"]
            for answer in row["answers"]:
                assert row["tokens"] < answer["prompt_tokens"] < row["tokens"] + 100
                assert 1 <= answer["new_tokens"] <= 5 and answer["first"] <= answer["end"]
        assert done.stdout.count("\n|") == len(rows) + 1
        # of no prompt the beginning had been read
        assert server.api.metrics.tokens.labels("cached")._value.get() == 0
        wrong = measure(folder, server.address, "--model", "large", check=False)
        assert wrong.returncode == 1 and "said 404" in wrong.stderr
        short = measure(folder, server.address, "--tokens", 10**6, check=False)
        assert short.returncode == 1 and "--text has" in short.stderr


def test_a_minute_of_load_has_its_row(folder):
    with running(folder / "load", slots=2) as server:
        options = ["--requests", 3, "--tokens", 20, 60, "--new_tokens", 2, "--minutes", 0.1]
        measure(folder, server.address, *options, "--process", os.getpid())
        (row,) = json.loads((folder / "out.json").read_text())["rows"]
        answered = server.api.metrics.tokens.labels("new")._value.get()
        assert row["minute"] == 0.1 and row["answers"] > 3
        assert 0 < row["tokens_per_second"] * 6 <= answered
        assert row["resident"] == pytest.approx(psutil.Process().memory_info().rss, rel=0.5)
        lonely = measure(folder, server.address, "--minutes", 1, check=False)
        assert lonely.returncode == 1 and "belong together" in lonely.stderr
        several = ["--minutes", 1, "--process", os.getpid()]
        for more in ([], ["--requests", 2, "--sent", "in_turn"]):
            refused = measure(folder, server.address, *several, *more, check=False)
            assert refused.returncode == 1 and "leave out --sent" in refused.stderr
        gone = measure(folder, server.address, *options, "--process", 2**22 + 1, check=False)
        assert gone.returncode == 1 and "--process 4194305" in gone.stderr
