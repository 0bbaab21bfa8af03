"""What a training says: one aligned line a step, a clear end, no bars and dictionaries."""

import json
from types import SimpleNamespace

from running import CONTEXT, infini_options, load_recipe, prepared_data
from training import console, run_folder

TRAIN = {"step": 10, "train_loss": 4.25, "tokens_per_second": 12_345.6}
GATES = {"gate_min": 0.125, "gate_max": 0.5}


def said(events, monkeypatch, capsys) -> list[str]:
    """The lines of a table after these lines of metrics, each with whether an evaluation follows; 10 s go by for each."""
    clock = iter(range(0, 10_000, 10))
    monkeypatch.setattr(console, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    table, history = console.StepTable(), []
    state = SimpleNamespace(global_step=0, max_steps=1000, is_world_process_zero=True, log_history=history)
    table.on_train_begin(None, state, None)
    for line, evaluated in events:
        history.append({} if line is None else {"line": line})
        table.on_log(None, state, SimpleNamespace(should_evaluate=evaluated))
    found = capsys.readouterr()
    assert not found.out
    return found.err.splitlines()


def test_the_columns_are_aligned_and_a_step_has_one_line(monkeypatch, capsys):
    events = [(TRAIN, False), (TRAIN | {"step": 500}, True), ({"step": 500, "eval_loss": 3.5}, False)]
    events += [({"step": 1000, "eval_loss": 3.25}, False), (None, False)]  # the last is the Trainer's own summary
    assert said([(line and line | GATES, follows) for line, follows in events], monkeypatch, capsys) == [
        "     step    loss validation  tokens/s      gates  time left",
        "       10  4.2500               12,346  0.12–0.50    0:16:30",
        "      500  4.2500     3.5000    12,346  0.12–0.50    0:00:20",
        "    1,000             3.2500            0.12–0.50    0:00:00",
    ]


def test_a_training_says_what_it_reached_and_what_comes_next(base, tmp_path, capfd):
    data, out = prepared_data(base), tmp_path / "a run"
    load_recipe("train").main([*map(str, infini_options(data)), "--max_steps", "4", "--out", str(out)])
    shown, errors = capfd.readouterr()
    found = json.loads((out / "result.json").read_text(encoding="utf-8"))
    assert run_folder.trained_length_of(out) == CONTEXT and run_folder.trained_length_of(tmp_path) is None
    lines = shown.splitlines()
    assert [line[:9].strip() for line in lines] == ["reached", "trained", "sample", "files", "next", ""]
    assert f"cross-entropy {found['cross_entropy']:.4f} nats per token, perplexity {found['perplexity']:.2f}, " in lines[0]
    assert (
        f"on {found['validation_tokens']:,} validation tokens" in lines[0] and f"{found['tokens']:,} tokens in" in lines[1]
    )
    prompt, goes_on = map(json.loads, lines[2][9:].split(" goes on "))
    assert len(prompt) == console.PROMPT_TOKENS and 0 < len(goes_on) <= console.NEW_TOKENS  # characters are tokens here
    assert (
        lines[3]
        == f"files    {out}: model.safetensors, tokenizer.json, result.json, metrics.jsonl, gates.png, loss_curve.png"
    )
    assert lines[4] == f"next     python recipes/evaluate_model.py --model '{out}' --data {data}"
    assert lines[5].startswith(f"         python recipes/generate.py --model '{out}' --prompt ")
    table = errors[errors.index("     step ") :].splitlines()
    logged = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = sorted({line["step"] for line in logged})
    rows = [line for line in table if line[:9].strip().replace(",", "").isdigit()]
    assert [int(row[:9].replace(",", "")) for row in rows] == steps and f"{logged[0]['train_loss']:.4f}" in rows[0]
    assert not any(word in errors for word in ("{'", "it/s", "Loading weights", "Writing model"))


def test_gates_that_no_token_reads_are_not_shown(base, tmp_path, capsys):
    """A segment as long as the rows: every token finds the memory empty."""
    words = [*map(str, infini_options(prepared_data(base))), "--segment_length", str(CONTEXT), "--max_steps", "2"]
    load_recipe("train").main([*words, "--out", str(tmp_path / "run")])
    result = json.loads((tmp_path / "run" / "result.json").read_text(encoding="utf-8"))
    assert result["gates"] == {} and not [*(tmp_path / "run").glob("gates*")]
    assert "gate" not in (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8")
    table = capsys.readouterr().err.partition("     step ")[2]
    assert table and "gates" not in table.splitlines()[0]
