"""A study's commands: data that it prepares, runs that it trains, evaluations of them. What is
finished is passed over."""

import runpy
import shlex
import sys
from pathlib import Path

from cli import UserError, parse_options
from support.stages import read_json, read_manifest

from .plan import BASE, Run, data_settings, words_of
from .processes import FINISHED, IMPOSSIBLE, Task, run_tasks

RECIPES = Path(__file__).parents[1]
PARTS = {  # what the options of each recipe are made of
    "prepare": ("CorpusOptions", "TokenizerOptions", "BlockOptions"),
    "train": ("RunOptions", "ModelOptions", "OptimizerOptions"),
    "evaluate_model": ("Options",),
}


def evaluation_file(run: Run, name: str) -> Path:
    return run.folder / f"evaluation_{name}.json"


class Tasks:
    """The tasks of a study. Building them parses every option with the recipes' own parsers, before
    anything runs.

    Args:
        study, runs: of [`plan.read_study`] and [`plan.runs_of`]; runs that exist already have no
            commands.
        data: the folder of each prepared data; source: the corpus that they are made of, None where
            they are there.
        out: the study's folder; how: `jobs`, processes at the same time, and `threads` of each.
    """

    def __init__(
        self,
        study: dict,
        runs: list[Run],
        data: dict[str, Path],
        out: Path,
        source: str | None,
        **how: int,
    ):
        self.runs, self.data, self.out, self._how = runs, data, out, how
        self._prepare, self._train, self._evaluate = {}, {}, []
        for name, settings in (data_settings(study, runs) if source else {}).items():
            places = {"source": source, "out": data[name]}
            self._prepare[name] = self._task(f"data-{name}", "prepare", settings, places)
        for run in [run for run in runs if run.options is not None]:
            places = {"data": data[run.data], "out": run.folder}
            self._train[run.name] = self._task(run.name, "train", run.options, places)
            for name, settings in study["evaluate"].items():
                file = evaluation_file(run, name)
                places = {"model": run.folder, "data": data[run.data], "out": file.with_suffix("")}
                task = self._task(f"{run.name}-{name}", "evaluate_model", settings, places)
                self._evaluate.append((run, settings, file, task))

    def _task(self, name: str, recipe: str, options: dict, places: dict) -> Task:
        if taken := [option for option in places if option in options]:
            raise UserError(
                f"{taken[0]!r} cannot be an option of {recipe}.py in a study: study.py sets it"
            )
        module, words = runpy.run_path(str(RECIPES / f"{recipe}.py")), words_of(options | places)
        parsed = parse_options(
            *(module[part] for part in PARTS[recipe]), description=module["__doc__"], argv=words
        )
        if recipe == "prepare":
            module["check_options"](*parsed)
        return Task(name, [sys.executable, str(RECIPES / f"{recipe}.py"), *words], self.log(name))

    def log(self, name: str) -> Path:
        return self.out / "logs" / f"{name}.log"

    @property
    def commands(self) -> list[str]:
        """All commands as lines to type, with paths below the current folder from there."""
        tasks = [
            *self._prepare.values(),
            *self._train.values(),
            *(task for *_, task in self._evaluate),
        ]
        lines = [shlex.join([Path(sys.executable).name, *task.command[1:]]) for task in tasks]
        return [line.replace(f"{Path.cwd()}/", "") for line in lines]

    @property
    def outcomes(self) -> list[dict]:
        """Name, variant, options, status and reason of every run that this study was to train."""
        return [
            {name: getattr(run, name) for name in ("name", "variant", "options")}
            | {"status": task.status, "reason": task.reason}
            for run in self.runs
            if (task := self._train.get(run.name))
        ]

    def prepare(self) -> None:
        """Makes the data. UserError if the study's own cannot be made; a variant whose data cannot
        be made is not possible."""
        run_tasks(list(self._prepare.values()), "preparing", **self._how)
        failed = {name: task for name, task in self._prepare.items() if task.status != FINISHED}
        if task := failed.get(BASE):
            raise UserError(f"the data cannot be prepared: {task.reason} ({task.log})")
        for run in self.runs:
            if task := failed.get(run.data):
                self._train[run.name].status = IMPOSSIBLE
                self._train[run.name].reason = f"its data cannot be made: {task.reason}"
        read_manifest(self.data[BASE])

    def train(self) -> list[Run]:
        """Trains, and returns the finished runs. train.py ends at once where a run is finished, and
        refuses a folder that holds a run with other options or other data."""
        waiting = [task for task in self._train.values() if not task.status]
        run_tasks(waiting, "training", **self._how)
        done = [
            run
            for run in self.runs
            if run.options is None or self._train[run.name].status == FINISHED
        ]
        if not done:
            reasons = [
                f"\n  {run['name']}: {run['status']}: {run['reason']}" for run in self.outcomes
            ]
            raise UserError("no run was finished:" + "".join(reasons))
        return done

    def evaluate(self, runs: list[Run]) -> list[str]:
        """Evaluates these runs, unless that was done with the same options. Returns what was not
        possible, and why."""
        left = []
        for run, settings, file, task in self._evaluate:
            done = {}
            if file.is_file():
                remedy = f"delete it: {run.folder} is evaluated again"
                done = read_json(file, {"options": dict}, remedy)["options"]
            if run in runs and not (done and settings.items() <= done.items()):
                left.append(task)
        run_tasks(left, "evaluating", **self._how)
        return [f"{task.name}: {task.reason}" for task in left if task.status != FINISHED]
