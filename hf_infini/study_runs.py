"""A study's processes: the data that it prepares, and the runs that it trains, each passed over once it is finished."""

import json
from pathlib import Path

from .cli import UserError
from .processes import Task, run_tasks
from .stages import write_json
from .study import BASE, STUDY_FILE, Plan, corpus_share, fingerprint_of, prepare_command, shown, train_command
from .sweeps import FINISHED, IMPOSSIBLE


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
            _note_data(plan, record, name, task)
        write_json(plan.out / STUDY_FILE, record)


def _note_data(plan: Plan, record: dict, name: str, task: Task) -> None:
    """Takes what a preparation came to into the plan and the record."""
    if task.status != FINISHED:
        if name == BASE:
            raise UserError(f"the data cannot be prepared: {task.reason} ({task.log})")
        for run in plan.runs:
            if run.data == name:
                run.status, run.reason = IMPOSSIBLE, f"its data cannot be made: {task.reason}"
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
