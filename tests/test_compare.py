"""recipes/compare.py and recipes/benchmark.py, run as a user runs them."""

import json
import subprocess
import sys
from pathlib import Path

RECIPES = Path(__file__).parent.parent / "recipes"

OPTIONS = dict.fromkeys(
    ("segment_length", "n_segments", "update_rule", "local_segments", "memory_init", "layers", "positions")
)


def run(recipe, *argv):
    command = [sys.executable, str(RECIPES / recipe), *map(str, argv)]
    return subprocess.run(command, capture_output=True, text=True)


def finished_run(folder: Path, perplexity: float, fingerprint: str, **options) -> Path:
    folder.mkdir()
    result = {"cross_entropy": 1.25, "perplexity": perplexity, "tokens": 4096, "parameters": 1234, "tokens_per_second": 9.0}
    result |= {"peak_rss_mib": 500.0, "data_fingerprint": fingerprint, "options": OPTIONS | options}
    (folder / "result.json").write_text(json.dumps(result))
    lines = [{"tokens": 10, "train_loss": 2.0}, {"tokens": 10, "eval_loss": 2.1}, {"tokens": 20, "eval_loss": 1.25}]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return folder


def test_table_and_plot_of_two_runs(tmp_path):
    one = finished_run(tmp_path / "one", 3.49, "same", attention="self")
    infini = {"attention": "infini", "segment_length": 128, "update_rule": "delta", "positions": "segment"}
    two = finished_run(tmp_path / "two", 3.21, "same", **infini)
    done = run("compare.py", "--runs", one, two, "--out", tmp_path / "deep" / "comparison")
    assert done.returncode == 0, done.stderr
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in done.stdout.splitlines()[:4]]
    assert cells[2] == ["one", "self-attention", "1,234", "4,096", "1.2500", "3.49", "9", "500"]
    assert cells[3][1] == "infini, segments of 128, update rule delta, segment positions" and cells[3][5] == "3.21"
    assert (tmp_path / "deep" / "comparison.md").read_text().splitlines() == done.stdout.splitlines()[:4]
    assert (tmp_path / "deep" / "comparison.png").read_bytes().startswith(b"\x89PNG")


def test_runs_on_different_data_and_unfinished_runs_are_refused(tmp_path):
    one = finished_run(tmp_path / "one", 3.49, "same", attention="self")
    two = finished_run(tmp_path / "two", 3.21, "other", attention="self")
    (tmp_path / "three").mkdir()
    for other, message in ((two, "different data"), (tmp_path / "three", "has no result.json")):
        done = run("compare.py", "--runs", one, other, "--out", tmp_path / "comparison")
        assert done.returncode == 1 and message in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "comparison.md").exists()


def test_benchmark_of_small_models(tmp_path):
    sizes = ("--n_layer", 2, "--n_embd", 32, "--n_head", 2, "--segment_length", 16, "--chunk", 70)
    timing = ("--contexts", 50, 400, "--stock_limit", 100, "--steps", 2, "--rounds", 2)
    done = run("benchmark.py", *sizes, *timing, "--out", tmp_path / "benchmark")
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "benchmark.json").read_text())["rows"]
    assert [(row["context"], row["model"]) for row in rows] == [(50, "infini"), (50, "gpt2"), (400, "infini")]
    assert rows[0]["cache_bytes"] == rows[2]["cache_bytes"]
    assert rows[1]["cache_bytes"] == (50 + 2 * 3) * 2 * 2 * 32 * 4  # tokens, layers, keys and values, width, float32
    assert all(row["fastest"] <= row["seconds_per_token"] <= row["slowest"] for row in rows)
    assert (tmp_path / "benchmark.png").read_bytes().startswith(b"\x89PNG")
