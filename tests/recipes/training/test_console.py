"""What a training says: a line for each step that it logs, a clear end, no bars and
dictionaries."""

import json
from types import SimpleNamespace

from running import CONTEXT, infini_options, load_recipe, prepared_data
from training import console

TRAIN = {"step": 10, "train_loss": 4.25, "tokens_per_second": 12_345.6}


def test_a_logged_step_is_a_line(monkeypatch, capsys):
    clock = iter(range(0, 10_000, 10))
    # 10 s go by for each
    monkeypatch.setattr(console, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    lines, history = console.StepLines(), []
    state = SimpleNamespace(
        global_step=0, max_steps=1000, is_world_process_zero=True, log_history=history
    )
    lines.on_train_begin(None, state, None)
    gates = {"gate_min": 0.125, "gate_max": 0.5}
    for line in (TRAIN | gates, TRAIN | {"step": 500}, {"step": 1000, "eval_loss": 3.25}, None):
        # the last is the Trainer's own summary
        history.append({} if line is None else {"line": line})
        lines.on_log(None, state, None)
    assert capsys.readouterr().err.splitlines() == [
        "step     10   loss 4.2500   12,346 tokens/s   gates 0.12 to 0.50   0:16:30 left",
        "step    500   loss 4.2500   12,346 tokens/s   0:00:20 left",
        "step  1,000   validation 3.2500   0:00:00 left",
    ]


def test_a_training_says_what_it_reached_and_what_comes_next(base, tmp_path, capfd):
    data, out = prepared_data(base), tmp_path / "a run"
    load_recipe("train").main(
        [*map(str, infini_options(data)), "--max_steps", "4", "--out", str(out)]
    )
    shown, errors = capfd.readouterr()
    found = json.loads((out / "result.json").read_text(encoding="utf-8"))
    lines = shown.splitlines()
    assert [line[:9].strip() for line in lines] == ["reached", "trained", "model", "next", ""]
    assert (
        f"cross-entropy {found['cross_entropy']:.4f} nats per token, perplexity "
        f"{found['perplexity']:.2f}, "
    ) in lines[0]
    assert f"{found['tokens']:,} tokens in" in lines[1]
    assert lines[3] == f"next     python recipes/evaluate_model.py --model '{out}' --data {data}"
    logged = [
        json.loads(line)
        for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    said = [line for line in errors.splitlines() if line.startswith("step ")]
    assert [int(line[5:11].replace(",", "")) for line in said] == [line["step"] for line in logged]
    assert f"loss {logged[0]['train_loss']:.4f}" in said[0]
    assert not any(word in errors for word in ("{'", "it/s", "Loading weights", "Writing model"))


def test_gates_that_no_token_reads_are_not_shown(base, tmp_path, capsys):
    """A segment as long as the rows: every token finds the memory empty."""
    words = [
        *map(str, infini_options(prepared_data(base))),
        *f"--segment_length {CONTEXT} --max_steps 2".split(),
    ]
    load_recipe("train").main([*words, "--out", str(tmp_path / "run")])
    result = json.loads((tmp_path / "run" / "result.json").read_text(encoding="utf-8"))
    assert result["gates"] == {}
    assert "gate" not in (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8")
    said = capsys.readouterr().err
    assert "step      2   loss" in said and "gates" not in said
