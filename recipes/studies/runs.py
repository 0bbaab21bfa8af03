"""A study's processes: the data that it prepares, and the runs that it trains, each passed over once it is finished."""

import json
import shutil
from pathlib import Path

from cli import UserError
from support.stages import write_json

from .planning import (
    BASE,
    STUDY_FILE,
    Plan,
    Run,
    corpus_share,
    fingerprint_of,
    prepare_command,
    settings_text,
    shown,
    train_command,
)
from .processes import Task, run_tasks
from .sweeps import FINISHED, IMPOSSIBLE


def commands_text(plan: Plan, recipes: Path) -> str:
    """The files of options, each with the command that reads it in its first line."""
    data = plan.data.items()
    texts = [(f"{plan.data_folder(name)}.yaml", options, prepare_command(plan, name, recipes)) for name, options in data]
    texts += [(run.folder / "train.yaml", run.options, train_command(plan, run, recipes)) for run in plan.runs]
    return "\n".join(f"# {file}\n{settings_text(options, command)}" for file, options, command in texts)


def check_launcher(plan: Plan) -> None:
    """UserError when the program that is to start recipes/train.py is not there."""
    if plan.launcher and shutil.which(plan.launcher[0]) is None:
        raise UserError(f"--launcher: there is no program {plan.launcher[0]}; is its environment activated?")


def prepare_data(plan: Plan, record: dict, recipes: Path, jobs: int) -> None:
    """Prepares each data that is not there yet, the scale's first. Without that there is no study (a UserError); runs whose
    own data cannot be made are not possible.

    Args:
        record: the content of study.json, which takes the fingerprints and is written when they are known.
        recipes: the folder of prepare.py.
    """
    for names in ([BASE], [name for name in plan.data if name != BASE]):
        tasks = {}
        for name in names:
            known = record["fingerprints"].get(name)
            if known is None or fingerprint_of(plan.data_folder(name)) != known:
                tasks[name] = Task(f"data {name}", prepare_command(plan, name, recipes), plan.log(f"data-{name}"))
        run_tasks(list(tasks.values()), "preparing", jobs)
        for name, task in tasks.items():
            note_data(plan, record, name, task)
        write_json(plan.out / STUDY_FILE, record)


def note_data(plan: Plan, record: dict, name: str, task: Task) -> None:
    """Takes what a preparation came to into the plan and the record; other data than those that were recorded before, and
    no data for the scale, are a UserError."""
    if task.status != FINISHED:
        if name == BASE:
            raise UserError(f"the data cannot be prepared: {task.reason} ({task.log})")
        for run in plan.runs:
            if run.data == name:
                run.status, run.reason = IMPOSSIBLE, f"its data cannot be made: {task.reason.rstrip('.')}"
                if plan.data[name].get("tokenizer") != plan.data[BASE].get("tokenizer"):
                    run.reason += "; --ready_tokenizer takes another tokenizer for it"
        return
    folder, known = plan.data_folder(name), record["fingerprints"].get(name)
    found = fingerprint_of(folder)
    if known not in (None, found):
        raise UserError(f"{folder} came out different ({found}) from when the study began ({known}): use another --out")
    record["fingerprints"][name] = found
    if name == BASE:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        record["corpus"] = corpus_share(manifest, plan.source)


def train_runs(plan: Plan, record: dict, recipes: Path, jobs: int, threads: int) -> list[str]:
    """Trains the runs that are possible and not finished, notes what became of each, and returns the commands that made
    the study's data and runs. A finished run of other data than the study's (`record`) is a UserError."""
    possible = [run for run in plan.runs if not run.status]
    tasks = {run.name: Task(run.name, train_command(plan, run, recipes), plan.log(run.name)) for run in possible}
    left = [tasks[run.name] for run in possible if not (run.trained / "result.json").is_file()]
    run_tasks(left, "training", jobs, threads)
    for run in possible:
        run.status, run.reason = tasks[run.name].status or FINISHED, tasks[run.name].reason
        if run.status == FINISHED:
            made_of = json.loads((run.trained / "result.json").read_text(encoding="utf-8"))["data_fingerprint"]
            if made_of != record["fingerprints"][run.data]:
                raise UserError(f"{run.trained} was trained on other data ({made_of}) than {plan.data_folder(run.data)} has")
    commands = [prepare_command(plan, name, recipes) for name in plan.data]
    return [shown(command) for command in (*commands, *(task.command for task in tasks.values()))]


def finished_runs(plan: Plan) -> list[Run]:
    """The runs that are finished; a UserError, with the reasons of all, when there is none."""
    finished = [run for run in plan.runs if run.status == FINISHED]
    if not finished:
        raise UserError("no run was finished:\n" + "\n".join(f"  {run.name}: {run.reason}" for run in plan.runs))
    return finished
