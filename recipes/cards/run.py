"""What a card is written from: the JSON files of a run, found, read, and checked to be of the same model and data."""

import itertools
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

from cli import UserError
from evaluation.ngrams import read_baseline
from support import stages
from support.stages import check_entries, read_json
from training.run_folder import RESULT_ENTRIES, read_result
from training.setup import data_fingerprint

TASKS = ("evaluation", "perplexity", "passkey", "facts")  # how recipes/evaluate_model.py names its files

EVALUATION = {"options": dict} | dict.fromkeys(("model", "memory", "date", "hardware"), str)
MEASURED = {"perplexity": {"cross_entropy": float, "perplexity": float, "tokens": int, "by_position": list}}


@dataclass(frozen=True)
class Run:
    """The contents of the files of a run.

    Attributes:
        config, result: config.json and result.json of recipes/train.py.
        manifest: of the data, by recipes/prepare.py or prepare_recall.py; None where the data are not at hand.
        evaluations: of recipes/evaluate_model.py.
        baselines: of recipes/ngram_baseline.py.
        earlier: name and result of the runs that this one was continued from, the first one first; a result is None where
            the run is no longer there.
    """

    config: dict
    result: dict
    manifest: dict | None = None
    evaluations: list[dict] = field(default_factory=list)
    baselines: list[dict] = field(default_factory=list)
    earlier: list[tuple[str, dict | None]] = field(default_factory=list)

    def of_task(self, task: str) -> list[dict]:
        return [found for found in self.evaluations if found["options"]["task"] == task]

    @property
    def data(self) -> str:
        return data_name(self.result)


def read_run(folder: Path, data: str | None = None, evaluations: list[str] = (), baselines: list[str] = ()) -> Run:
    """Reads the files of a finished run.

    Args:
        folder: of recipes/train.py.
        data: the prepared folder that it was trained on; None takes that of its command, where it still is.
        evaluations: files of recipes/evaluate_model.py that are not in the folder.
        baselines: files of recipes/ngram_baseline.py.

    Raises:
        UserError: the run is not finished, or a file is of another model, another training or other data.
    """
    result = read_result(folder)
    own = [file for task in TASKS for file in sorted(folder.glob(f"{task}*.json")) if not file.name.endswith(".cells.json")]
    given = [Path(name) for name in evaluations if Path(name).resolve() not in {file.resolve() for file in own}]
    return Run(
        config=read_json(folder / "config.json"),
        result=result,
        manifest=read_manifest(result, data),
        evaluations=[read_evaluation(file, folder, result) for file in [*own, *given]],
        baselines=[read_baseline(Path(file), result["data_fingerprint"]) for file in baselines],
        earlier=earlier_runs(result),
    )


def read_manifest(result: dict, given: str | None = None) -> dict | None:
    """The manifest of a run's data; None where the folder that its command names is gone or holds other data now."""
    folder = Path(given or data_folder(result) or "")
    if given is None and not (folder / "manifest.json").is_file():
        return None
    manifest = stages.read_manifest(folder)
    if data_fingerprint(manifest) == result["data_fingerprint"]:
        return manifest
    if given is not None:
        raise UserError(f"--data: {given} is other data than the run's ({result['data_fingerprint']})")
    return None


def read_evaluation(file: Path, folder: Path, result: dict) -> dict:
    remedy = "it is no file of recipes/evaluate_model.py, or damaged: remove it, or evaluate again"
    content = read_json(file, EVALUATION, remedy)
    check_entries(content["options"], {"task": str, "precision": str}, f"{file}: options", remedy)
    check_entries(content, MEASURED.get(content["options"]["task"], {"cells": list}), file, remedy)
    if file.resolve().parent != folder.resolve() and last_part(content["model"]) != folder.resolve().name:
        raise UserError(f"{file} is of the model {content['model']}, not of {folder}")
    if content["date"] < result["date"]:  # in UTC, to the second
        raise UserError(f"{file} is older than the training in {folder}: evaluate the model again, or remove the file")
    return content


def earlier_runs(result: dict) -> list[tuple[str, dict | None]]:
    """The runs that `--init_from` leads back to, the first one first. Of one that is gone, or was trained again since, only
    the name is known, and nothing of what came before it."""
    runs: list[tuple[str, dict | None]] = []
    while (start := result["options"].get("init_from")) is not None:
        file = Path(start) / "result.json"
        before = read_json(file, RESULT_ENTRIES, f"train {start} again") if file.is_file() else None
        if before is None or before["date"] >= result["date"]:
            return [(shorten_path(start), None), *runs]
        runs.insert(0, (shorten_path(start), before))
        result = before
    return runs


def data_name(result: dict) -> str:
    folder = data_folder(result)
    return f"data {result['data_fingerprint']}" if folder is None else last_part(folder)


def data_folder(result: dict) -> str | None:
    """What --data was in the command of a result.json; None where a --config file named it."""
    words = [piece for word in shlex.split(result["command"]) for piece in word.split("=", 1)]
    return next((folder for word, folder in reversed([*itertools.pairwise(words)]) if word == "--data"), None)


def shorten_path(text: str) -> str:
    """The last one or two components of an absolute path, or of one that begins with `~` or `..`; other text as it is.

    The first two name a machine and its user rather than a run: they are only shown where there is no other.
    """
    if not re.match(r"([A-Za-z]:)?[\\/]|~|\.\.[\\/]", text):
        return text
    parts = [part for part in re.split(r"^[A-Za-z]:|[\\/]", text) if part not in ("", ".", "..")]
    return "/".join(parts[2:][-2:] or parts[-1:])


def last_part(path: str) -> str:
    """The last component of a path of any system."""
    return re.split(r"[\\/]", path.rstrip("\\/"))[-1]


def shorten_command(command: str) -> str:
    """A shell command with its paths shortened, an option a line."""
    text = ""
    for word in shlex.split(command):
        name, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
        text += " \\\n    " if name else " "
        text += shlex.quote(name + equals + shorten_path(value))
    return text.strip()
