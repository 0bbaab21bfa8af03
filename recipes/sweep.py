r"""Runs recipes/train.py over a grid of its options and puts the losses into one table.

    python recipes/sweep.py --config recipes/configs/shakespeare_published.yaml --data data/shakespeare --out runs/sweep \
        --grid score=scaled_dot,dot,general,additive position_encoding=learned,rope,alibi,none --jobs 2
    python recipes/sweep.py --config recipes/configs/shakespeare_published.yaml --data data/shakespeare --out runs/windows \
        --grid sliding_window=4,8,16,32 --seeds 0 1 2 -- --attention local --max_steps 600

What stands behind -- goes to every run, above the --config file. Each run is a process of its own with a folder in --out
(OUT/score=dot,position_encoding=rope) and a log in OUT/logs. Stopped and started again with the same command, the sweep
passes over what is finished and goes on with what is not. Combinations that no model can have are listed as not possible
with the reason; one that fails does not stop the others, and is reported at the end (exit status 1).

Writes sweep.md (the printed tables), sweep.json (every run) and sweep.png: a heat map of the validation cross-entropy for
two options, otherwise a ranking.
"""

import json
import shlex
import signal
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from cli import UserError, exit_on_user_error, option

if TYPE_CHECKING:
    from studies import sweeps


@dataclass
class Options:
    data: str = field(metadata={"help": "Folder made by recipes/prepare.py, the same for all runs.", "group": "data"})
    out: str = field(metadata={"help": "Folder for the runs, their logs and the tables.", "group": "output"})
    grid: list[str] = field(metadata={"help": "OPTION=VALUE,VALUE,… for one or more options of train.py.", "group": "runs"})
    config: str | None = option(None, "YAML file with the other options of train.py.")
    seeds: list[int] | None = option(None, "Seeds to run every combination with; default: one run, with train.py's seed.")
    jobs: int = option(1, "Runs at the same time.", group="machine")
    threads: int = option(1, "CPU threads of each run (OMP_NUM_THREADS).")


@exit_on_user_error
def main(argv: list[str] | None = None) -> None:
    options, passed = parse(sys.argv[1:] if argv is None else argv)

    from plots.sweep import plot_heat_map, plot_ranking
    from studies import sweeps
    from support import measurement
    from support.stages import locked_folder, write_json

    grid = sweeps.parse_grid(options.grid)
    runs = sweeps.combinations(grid, options.seeds)
    check(options, passed, grid)
    out = Path(options.out)
    with locked_folder(out):
        (out / "logs").mkdir(exist_ok=True)
        run_all(runs, options, passed)
        for run in runs:
            if run.status == sweeps.FINISHED:
                run.result = json.loads((out / run.name / "result.json").read_text(encoding="utf-8"))
        rows = sweeps.rows_of(runs)
        text = report(rows, grid)
        (out / "sweep.md").write_text(text + "\n", encoding="utf-8")
        content = {"grid": grid, "runs": [{"folder": run.name, **asdict(run)} for run in runs]}
        content |= {"command": shlex.join([Path(sys.executable).name, *sys.argv]), **measurement.environment()}
        write_json(out / "sweep.json", content)
        print(text)
        finished = any(row.finished for row in rows)
        if finished and len(grid) == 2:
            plot_heat_map(rows, grid, out / "sweep.png")
        elif finished:
            plot_ranking(rows, grid, out / "sweep.png")
    print(f"{out}: sweep.md, sweep.json{', sweep.png' * finished}", file=sys.stderr)
    if all(run.status == sweeps.IMPOSSIBLE for run in runs):
        raise UserError("none of these combinations is possible")
    failed = [run for run in runs if run.status == sweeps.FAILED]
    if failed:
        lines = [f"  {run.name}: {run.reason} ({log_file(out, run)})" for run in failed]
        raise UserError(f"{len(failed)} of {len(runs)} runs failed:\n" + "\n".join(lines))


def parse(argv: list[str]) -> tuple[Options, list[str]]:
    """The sweep's own options, and what stands behind `--`. `--config` is train.py's, and not read here."""
    from cli.parser import OptionParser

    own, passed = argv, []
    if "--" in argv:
        own, passed = argv[: argv.index("--")], argv[argv.index("--") + 1 :]
    (options,) = OptionParser([Options], __doc__).parse_args_into_dataclasses(own)
    return options, passed


def check(options: Options, passed: list[str], grid: dict) -> None:
    """UserError for files that are missing and options that are given twice."""
    from support.stages import read_manifest

    read_manifest(Path(options.data))
    if options.config is not None and not Path(options.config).is_file():
        raise UserError(f"--config: there is no file {options.config}")
    for name in ("jobs", "threads"):
        if getattr(options, name) < 1:
            raise UserError(f"--{name} must be at least 1, got {getattr(options, name)}")
    given = {word.removeprefix("--").partition("=")[0] for word in passed if word.startswith("--")}
    twice = sorted(given & {*grid, "data", "out", "config", *(["seed"] if options.seeds else [])})
    if twice:
        raise UserError(f"--{twice[0]} is set by the sweep: leave it out behind --")


def log_file(out: Path, run: "sweeps.Run") -> Path:
    return out / "logs" / f"{run.name}.log"


def run_all(runs: "list[sweeps.Run]", options: Options, passed: list[str]) -> None:
    """Runs train.py for every run, `--jobs` at a time, and notes what became of it. Stopped, it stops its children."""
    from studies.processes import Task, run_tasks

    out = Path(options.out)
    tasks = [Task(run.name, command_of(run, options, passed), log_file(out, run)) for run in runs]
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a polite kill is Ctrl-C
    try:
        run_tasks(tasks, "sweep", options.jobs, options.threads)
    except KeyboardInterrupt:
        print("\nstopped: the same command goes on from here", file=sys.stderr)
        raise SystemExit(130) from None
    for run, task in zip(runs, tasks, strict=True):
        run.status, run.reason = task.status, task.reason


def command_of(run: "sweeps.Run", options: Options, passed: list[str]) -> list[str]:
    words = [sys.executable, str(Path(__file__).with_name("train.py")), "--data", options.data]
    words += [] if options.config is None else ["--config", options.config]
    words += [*passed, *(f"--{name}={value}" for name, value in run.options.items())]
    return [*words, "--out", str(Path(options.out) / run.name)]


def report(rows: "list[sweeps.Row]", grid: dict) -> str:
    """The tables, and under them the combinations that did not finish."""
    from studies import sweeps

    parts = ["Validation cross-entropy, nats per token"]
    parts += [sweeps.pivot_table(rows, grid)] if len(grid) == 2 else []
    parts.append(sweeps.ranking_table(rows, grid))
    for status in (sweeps.IMPOSSIBLE, sweeps.FAILED):
        runs = [run for row in rows for run in row.runs if run.status == status]
        if status == sweeps.IMPOSSIBLE:  # with whatever seed
            runs = [sweeps.Run(run.values, reason=run.reason) for run in runs]
        lines = dict.fromkeys(f"- {run.name}: {run.reason}" for run in runs)
        parts += ["\n".join([f"{status.capitalize()}:", "", *lines])] if lines else []
    return "\n\n".join(parts)


if __name__ == "__main__":
    main()
