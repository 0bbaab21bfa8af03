"""What a card is written from: the JSON files of a run, found and read; and paths without the names
of a machine."""

import itertools
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

from support.stages import read_json, read_manifest
from training.run_folder import RESULT_ENTRIES, read_result
from training.setup import data_fingerprint

# how recipes/evaluate_model.py names its files
TASKS = ("evaluation", "perplexity", "passkey", "facts")
EVALUATION = {"options": dict} | dict.fromkeys(("memory", "date", "hardware"), str)


@dataclass(frozen=True)
class Run:
    """The contents of the files of a run.

    Attributes:
        config, result: config.json and result.json of recipes/train.py.
        manifest: of the data, by prepare.py or prepare_recall.py; None where it is not at hand.
        evaluations: of recipes/evaluate_model.py.
        earlier: name and result of the runs that this one was continued from, the first one
            first; a result is None where the run is no longer there."""

    config: dict
    result: dict
    manifest: dict | None = None
    evaluations: list[dict] = field(default_factory=list)
    earlier: list[tuple[str, dict | None]] = field(default_factory=list)

    def of_task(self, task: str) -> list[dict]:
        return [found for found in self.evaluations if found["options"]["task"] == task]

    @property
    def data(self) -> str:
        return data_name(self.result)


def read_run(folder: Path) -> Run:
    """Reads the files of a finished run of recipes/train.py; a UserError where it is not finished
    or one is damaged."""
    result = read_result(folder)
    data = Path(data_folder(result) or "")
    manifest = read_manifest(data) if (data / "manifest.json").is_file() else None
    if manifest and data_fingerprint(manifest) != result["data_fingerprint"]:
        manifest = None  # the folder holds other data now
    files = [file for task in TASKS for file in sorted(folder.glob(f"{task}*.json"))]
    remedy = "it is damaged: remove it, or evaluate again"
    evaluations = [
        read_json(file, EVALUATION, remedy)
        for file in files
        if not file.name.endswith(".cells.json")
    ]
    config = read_json(folder / "config.json")
    return Run(config, result, manifest, evaluations, earlier_runs(result))


def earlier_runs(result: dict) -> list[tuple[str, dict | None]]:
    """The runs that `--init_from` leads back to, the first one first. Of one that is gone, or was
    trained again since, only the name is known, and nothing of what came before it."""
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
    found = [after for word, after in itertools.pairwise(words) if word == "--data"]
    return found[-1] if found else None


def shorten_path(text: str) -> str:
    """The last one or two components of an absolute path, or of one that begins with `~` or `..`;
    other text as it is.

    The first two name a machine and its user rather than a run: they are only shown where there is
    no other.
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
