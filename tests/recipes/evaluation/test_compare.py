"""recipes/compare.py, run as a user runs it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from running import load_recipe

compare = load_recipe("compare")
RECIPES = Path(__file__).parents[3] / "recipes"

GPT2 = {"model_type": "gpt2"}


def run(recipe, *argv):
    command = [sys.executable, str(RECIPES / recipe), *map(str, argv)]
    return subprocess.run(command, capture_output=True, text=True)


def finished_run(folder: Path, perplexity: float, fingerprint: str, config: dict = GPT2) -> Path:
    folder.mkdir()
    result = {"cross_entropy": 1.25, "perplexity": perplexity, "tokens": 4096, "parameters": 1234, "tokens_per_second": 9.0}
    result |= {"peak_rss_mib": 500.0, "data_fingerprint": fingerprint, "options": {}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "result.json").write_text(json.dumps(result))
    lines = [{"tokens": 10, "train_loss": 2.0}, {"tokens": 10, "eval_loss": 2.1}, {"tokens": 20, "eval_loss": 1.25}]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return folder


def test_table_and_plot_of_two_runs(tmp_path):
    one = finished_run(tmp_path / "one", 3.49, "same")
    infini = {"model_type": "infini_gpt2", "segment_length": 128, "update_rule": "delta", "position_encoding": "segment"}
    two = finished_run(tmp_path / "two", 3.21, "same", infini)
    done = run("compare.py", "--runs", one, two, "--out", tmp_path / "deep" / "comparison")
    assert done.returncode == 0, done.stderr
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in done.stdout.splitlines()[:4]]
    assert cells[2] == ["one", "self-attention", "1,234", "4,096", "1.2500", "3.49", "9", "500"]
    assert cells[3][1] == "infini, segments of 128, update rule delta, segment positions" and cells[3][5] == "3.21"
    assert (tmp_path / "deep" / "comparison.md").read_text().splitlines() == done.stdout.splitlines()[:4]
    assert (tmp_path / "deep" / "comparison.png").read_bytes().startswith(b"\x89PNG")


def test_runs_on_different_data_and_unfinished_runs_are_refused(tmp_path):
    one = finished_run(tmp_path / "one", 3.49, "same")
    two = finished_run(tmp_path / "two", 3.21, "other")
    (tmp_path / "three").mkdir()
    for other, message in ((two, "different data"), (tmp_path / "three", "has no result.json")):
        done = run("compare.py", "--runs", one, other, "--out", tmp_path / "comparison")
        assert done.returncode == 1 and message in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "comparison.md").exists()


@pytest.fixture(scope="module")
def baseline(tmp_path_factory):
    """A function that writes a file as recipes/ngram_baseline.py does."""

    def write(name: str, fingerprint="same", split="validation") -> Path:
        orders = [
            {"order": order, "name": name, "cross_entropy": 3.0 - order / 2, "perplexity": 20.0, "tokens": 7}
            for order, name in ((1, "bigram"), (3, "4-gram"))
        ]
        content = {"orders": orders, "split": split, "data_fingerprint": fingerprint, "training_tokens": 9000}
        file = tmp_path_factory.mktemp("ngrams") / name
        file.write_text(json.dumps(content))
        return file

    return write


def test_models_from_scratch_beside_n_grams(tmp_path, baseline, capsys):
    config = {"attention": "local", "sliding_window": 6, "score": "general", "position_encoding": "rope"}
    memory = {"attention": "infini", "segment_length": 4, "update_rule": "delta", "local_segments": 0, "score": "dot"}
    configs = {"local": config, "infini": memory | {"position_encoding": "none", "sliding_window": None}}
    configs["nothing"] = config | {"attention": "none", "position_encoding": "learned"}
    for name, values in configs.items():
        finished_run(tmp_path / name, 3.49, "same", {"model_type": "causal_mha", "segment_length": None} | values)
    runs = ["--runs", *(str(tmp_path / name) for name in configs)]
    compare.main([*runs, "--baselines", str(baseline("n.json")), "--out", str(tmp_path / "comparison")])
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()[2:7]]
    assert [line[1] for line in cells[:3]] == [
        "local, window of 6, score general, rope positions",
        "infini, segments of 4, update rule delta, score dot, no positions",
        "no attention, learned positions",
    ]
    assert cells[3] == ["bigram", "counts after 1 token", "", "9,000", "2.5000", "20.00", "", ""]
    assert cells[4] == ["4-gram", "counts after 3 tokens", "", "9,000", "1.5000", "20.00", "", ""]
    compare.main([*runs, "--out", str(tmp_path / "plain")])
    assert "bigram" not in capsys.readouterr().out
    assert (tmp_path / "plain.png").read_bytes() != (tmp_path / "comparison.png").read_bytes()  # the lines


def test_baselines_that_say_nothing_about_the_runs_are_refused(tmp_path, baseline, capsys):
    one = finished_run(tmp_path / "one", 3.49, "same")
    files = [(baseline("a.json", fingerprint="other"), "of other data"), (baseline("b.json", split="test"), "test rows")]
    for file, message in [*files, (one / "result.json", "not written by"), (tmp_path / "none.json", "not written by")]:
        with pytest.raises(SystemExit) as stopped:
            compare.main(["--runs", str(one), "--baselines", str(file), "--out", str(tmp_path / "comparison")])
        assert stopped.value.code == 1 and message in capsys.readouterr().err
    assert not (tmp_path / "comparison.md").exists()
