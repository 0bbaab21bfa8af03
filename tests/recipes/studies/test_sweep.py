"""The sweep recipe: its grid and tables, and whole sweeps of tiny models with what cannot be and what fails among them."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from functools import partial

import psutil
import pytest

from cli import UserError
from running import ROOT, SIZES, load_recipe, prepared_data, recipe, run
from studies import sweeps
from studies.processes import Task, run_tasks

sweep = load_recipe("sweep")
TINY = [*SIZES, "--model", "causal_mha", "--batch_size", "8", "--max_steps", "2", "--eval_rows", "8"]


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    return prepared_data(tmp_path_factory.getbasetemp())


def swept(data, out, *options, passed=(), **kwargs) -> subprocess.CompletedProcess:
    return run(*recipe("sweep"), "--data", data, "--out", out, *options, "--", *TINY, *passed, **kwargs)


# --- whole sweeps -----------------------------------------------------------------------------------------------------


def test_a_grid_of_two_options(data, tmp_path):
    options = ["--grid", "attention=global,none", "position_encoding=alibi,sinusoidal", "--jobs", 2]
    done = swept(data, tmp_path / "sweep", *options)
    names = {f"attention={a},position_encoding={p}" for a in ("global", "none") for p in ("alibi", "sinusoidal")}
    impossible = "attention=none,position_encoding=alibi"
    content = json.loads((tmp_path / "sweep" / "sweep.json").read_text(encoding="utf-8"))
    assert {found["folder"]: found["status"] for found in content["runs"]} == {
        name: "not possible" if name == impossible else "finished" for name in names
    }
    results = {}
    for name in names - {impossible}:
        results[name] = json.loads((tmp_path / "sweep" / name / "result.json").read_text(encoding="utf-8"))
        assert f"position_encoding={results[name]['options']['position_encoding']}" in name
        assert results[name]["steps"] == 2
    assert not (tmp_path / "sweep" / impossible).exists()
    text = (tmp_path / "sweep" / "sweep.md").read_text(encoding="utf-8")
    assert done.stdout == text
    assert f"- {impossible}: position_encoding='alibi' acts inside the attention" in text
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    losses = {name: f"{found['cross_entropy']:.4f}" for name, found in results.items()}
    best = min(losses, key=lambda name: results[name]["cross_entropy"])
    losses[best] = f"**{losses[best]}**"
    assert lines[0] == ["attention \\ position_encoding", "alibi", "sinusoidal"]
    assert lines[2][1:] == [losses["attention=global,position_encoding=" + name] for name in ("alibi", "sinusoidal")]
    assert lines[3][1:] == ["not possible", losses["attention=none,position_encoding=sinusoidal"]]
    ranking = lines[6:]
    assert [line[2] for line in ranking[:3]] == sorted(losses.values(), key=lambda text: text.strip("*"))
    assert ranking[3] == ["none", "alibi", "not possible", "", "", "", ""]
    assert (tmp_path / "sweep" / "sweep.png").read_bytes().startswith(b"\x89PNG")

    # Asked for again, a finished run is read and not trained
    one = "attention=global,position_encoding=alibi"
    before = (tmp_path / "sweep" / one / "result.json").stat().st_mtime_ns
    again = swept(data, tmp_path / "sweep", "--grid", "attention=global", "position_encoding=alibi")
    assert f"**{losses[one].strip('*')}**" in again.stdout
    assert before == (tmp_path / "sweep" / one / "result.json").stat().st_mtime_ns


def test_a_failed_run_stops_no_other(data, tmp_path):
    options = ["--grid", "save_steps=0,1", "--seeds", 0, 1, "--jobs", 2]
    done = swept(data, tmp_path / "sweep", *options, check=False)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    failed = "save_steps=0,seed=1"
    assert "error: 2 of 4 runs failed:" in done.stderr
    assert f"  {failed}: --save_steps must be greater than 0, got 0 ({tmp_path}/sweep/logs/{failed}.log)" in done.stderr
    content = json.loads((tmp_path / "sweep" / "sweep.json").read_text(encoding="utf-8"))
    losses = [found["result"]["cross_entropy"] for found in content["runs"] if found["status"] == "finished"]
    assert len(losses) == 2 and losses[0] != losses[1]  # the seeds
    mean, deviation = sum(losses) / 2, abs(losses[0] - losses[1]) / math.sqrt(2)
    assert f"{mean:.4f} ± {deviation:.4f}" in done.stdout
    assert [found["seed"] for found in content["runs"][:2]] == [0, 1]
    assert (tmp_path / "sweep" / "sweep.png").read_bytes().startswith(b"\x89PNG")


def test_interrupted_it_stops_its_children(data, tmp_path):
    command = [*recipe("sweep"), "--data", data, "--out", tmp_path, "--grid", "n_inner=16,24,32", "--jobs", 2, "--", *TINY]
    command += ["--max_steps", 1_000_000]
    with open(tmp_path / "output", "w") as output:
        # What a shell starts behind itself ignores interrupts
        listens = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
        process = subprocess.Popen(list(map(str, command)), cwd=ROOT, stdout=output, stderr=output, preexec_fn=listens)
    try:
        deadline = time.monotonic() + 120
        while len(list(tmp_path.glob("*/metrics.jsonl"))) < 2:
            assert process.poll() is None and time.monotonic() < deadline, (tmp_path / "output").read_text()
            time.sleep(0.05)
        children = psutil.Process(process.pid).children()
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130
    finally:
        process.kill()
    assert len(children) == 2 and not any(child.is_running() for child in children)
    text = (tmp_path / "output").read_text()
    assert "the same command goes on from here" in text and "Traceback" not in text
    assert not (tmp_path / "n_inner=32").exists()


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--grid", "score"], "--grid score: give OPTION=VALUE,VALUE"),
        (["--grid", "score=dot,"], "--grid score=dot,: give OPTION=VALUE,VALUE"),
        (["--grid", "score=dot,dot"], "a value is named twice"),
        (["--grid", "score=dot", "score=general"], "score is named twice"),
        (["--grid", "seed=0,1"], "give --seeds to the sweep itself"),
        (["--grid", "data=a,b"], "give --data to the sweep itself"),
        (["--grid", "init_from=a/b,a:b"], "two combinations would share a folder"),
        (["--grid", "score=dot", "--seeds", "1", "1"], "--seeds 1 1: a seed is named twice"),
        (["--grid", "score=dot", "--jobs", "0"], "--jobs must be at least 1, got 0"),
        (["--grid", "score=dot", "--config", "no.yaml"], "--config: there is no file no.yaml"),
        (["--grid", "score=dot", "--", "--score", "general"], "--score is set by the sweep"),
        (["--grid", "score=dot", "--seeds", "1", "--", "--seed=3"], "--seed is set by the sweep"),
    ],
)
def test_user_errors(data, tmp_path, capsys, options, message):
    with pytest.raises(SystemExit) as stopped:
        sweep.main(["--data", str(data), "--out", str(tmp_path / "out"), *options])
    assert stopped.value.code == 1 and message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_two_sweeps_do_not_share_a_folder(data, tmp_path, capsys):
    from support.stages import locked_folder

    with locked_folder(tmp_path), pytest.raises(SystemExit):
        sweep.main(["--data", str(data), "--out", str(tmp_path), "--grid", "score=dot"])
    assert "another run is writing there" in capsys.readouterr().err


# --- parts ------------------------------------------------------------------------------------------------------------


def ended(values: dict, seed=None, loss: float | None = None, status="finished", data="same") -> sweeps.Run:
    result = {"cross_entropy": loss, "parameters": 1000, "tokens_per_second": 50.0, "seconds": 2.0, "data_fingerprint": data}
    return sweeps.Run(values, seed, status, "" if loss else "why", result if loss else {})


def test_names_of_combinations():
    runs = sweeps.combinations({"init_from": ["runs/a", "none"], "gate_init": ["-1", "2.5"]}, [3, 4])
    assert len(runs) == 8 and [run.seed for run in runs[:3]] == [3, 4, 3]
    assert runs[0].name == "init_from=runs_a,gate_init=-1,seed=3"
    assert runs[-1].options == {"init_from": "none", "gate_init": "2.5", "seed": "4"}
    assert sweeps.combinations({"score": ["dot"]}, None)[0].name == "score=dot"


@pytest.mark.parametrize(
    ("status", "failure", "log", "expected"),
    [
        (0, None, "error: of an earlier start", ("finished", "")),
        (1, ("not possible", "n_head=3"), "10%|\r20%|\nerror: no\n", ("not possible", "n_head=3")),
        (1, ("failed", "the training loss is nan"), "error: no\n", ("failed", "the training loss is nan")),
        (1, None, "Traceback\n  raise\nValueError: no\n", ("failed", "exit status 1: ValueError: no")),
        (-9, None, "", ("failed", "exit status -9: no output")),
    ],
)
def test_outcomes(status, failure, log, expected):
    failure = failure and dict(zip(("status", "reason"), failure, strict=True))
    assert sweeps.outcome(status, failure, log) == expected


REFUSALS = """
import sys
from dataclasses import dataclass
from cli import NotPossible, UserError, exit_on_user_error, parse_options

@dataclass
class Options:
    score: float = 1.0

@exit_on_user_error
def main():
    parse_options(Options, description="", argv=sys.argv[2:])
    if sys.argv[1] == "package":
        import no_such_package
    raise {"failed": UserError, "impossible": NotPossible}[sys.argv[1]]("n_head=3")

main()
"""


def test_a_recipe_tells_why_it_failed_without_words_to_be_matched(tmp_path, monkeypatch):
    """In a file of JSON, through a launcher as well, whose exit status is its own."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (ROOT / "recipes", ROOT))))
    (tmp_path / "refuses.py").write_text(REFUSALS)
    (tmp_path / "launcher.py").write_text("import subprocess, sys; sys.exit(9 * bool(subprocess.call(sys.argv[1:])))")
    command = [sys.executable, str(tmp_path / "refuses.py")]
    launched = [sys.executable, str(tmp_path / "launcher.py"), *command]
    tasks = [
        Task("a", [*command, "failed"], tmp_path / "logs" / "a.log"),
        Task("b", [*launched, "impossible"], tmp_path / "logs" / "b.log"),
        Task("c", [*command, "failed", "--score", "high"], tmp_path / "logs" / "c.log"),
        Task("d", [*launched, "package"], tmp_path / "logs" / "d.log"),
    ]
    run_tasks(tasks, "test", jobs=2)
    assert [(task.status, task.reason) for task in tasks] == [
        ("failed", "n_head=3"),
        ("not possible", "n_head=3"),
        ("failed", "argument --score: invalid float value: 'high'"),
        ("failed", "no_such_package is not installed: pip install 'hf-infini[recipes]'"),
    ]
    assert "error: these model options do not go together: n_head=3" in tasks[1].log.read_text()
    assert "usage:" in tasks[2].log.read_text()
    assert sorted(file.name for file in (tmp_path / "logs").iterdir()) == ["a.log", "b.log", "c.log", "d.log"]


def test_seeds_are_summed_up_and_the_best_mean_is_marked():
    grid = {"score": ["dot", "general"], "n_layer": ["1", "2"]}
    dot, general = ({"score": "dot", "n_layer": "1"}, {"score": "general", "n_layer": "1"})
    runs = [ended(dot, 0, 2.0), ended(dot, 1, 2.2), ended({**dot, "n_layer": "2"}, 0, 1.9)]
    runs += [ended({**dot, "n_layer": "2"}, 1, status="failed"), ended(general, 0, 1.0), ended(general, 1, 3.4)]
    runs += [ended({**general, "n_layer": "2"}, seed, status="not possible") for seed in (0, 1)]
    rows = sweeps.rows_of(runs)
    assert sweeps.pivot_table(rows, grid).splitlines() == [
        "| score \\ n_layer |               1 |                         2 |",
        "| --------------- | --------------: | ------------------------: |",
        "| dot             | 2.1000 ± 0.1414 | **1.9000 (1 of 2 seeds)** |",
        "| general         | 2.2000 ± 1.6971 |              not possible |",
    ]
    ranking = sweeps.ranking_table(rows, grid).splitlines()[2:]
    assert [line.split("|")[3].strip(" *") for line in ranking] == [
        "1.9000 (1 of 2 seeds)",
        "2.1000 ± 0.1414",
        "2.2000 ± 1.6971",
        "not possible",
    ]
    assert [cell.strip() for cell in ranking[1].split("|")[4:-1]] == ["8.17", "1,000", "50", "2.0"]  # exp(2.1) = 8.17


def test_runs_on_different_data_make_no_table():
    runs = [ended({"n_layer": "1"}, loss=2.0), ended({"n_layer": "2"}, loss=2.0, data="other")]
    with pytest.raises(UserError, match="different data"):
        sweeps.rows_of(runs)


def test_the_commands_of_the_docstring():
    blocks = sweep.__doc__.replace("\\\n", " ").splitlines()
    commands = [line.split()[2:] for line in blocks if line.startswith("    python recipes/sweep.py")]
    assert len(commands) == 2
    for command in commands:
        options, passed = sweep.parse(command)
        assert sweeps.parse_grid(options.grid) and (ROOT / options.config).is_file()
    assert passed == ["--attention", "local", "--max_steps", "600"]


def test_the_command_of_a_run():
    options, _ = sweep.parse(["--data", "d", "--out", "o", "--grid", "score=dot", "--config", "c.yaml"])
    command = sweep.command_of(sweeps.Run({"score": "dot"}, 3), options, ["--dropout", "0.1"])
    assert command[2:] == ["--data", "d", "--config", "c.yaml", "--dropout", "0.1", "--score=dot", "--seed=3", "--out",
                           os.path.join("o", "score=dot,seed=3")]  # fmt: skip
