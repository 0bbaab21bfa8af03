"""What a study trains: its YAML files as one, and the runs that come of variants and seeds."""

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cli import UserError, parse_yaml, read_yaml

SECTIONS = ("data", "train", "variants", "seeds", "evaluate")
BASE = "base"  # the data of all variants but those that have their own
OWN_FOLDERS = ("data", "logs", "measured")


@dataclass(frozen=True)
class Run:
    """One training: `variant` is the label that it shares with its other seeds, `options` are those
    of train.py (None of a run that exists already), `data` is `base` or the variant whose own data
    it reads."""

    name: str
    variant: str
    folder: Path
    options: dict | None
    data: str = BASE


def read_study(
    files: Sequence[str], train: str | None = None, settings: Sequence[str] = (), **flags
) -> dict:
    """The sections of a study: `train` (a file of train.py's options) below the files, later files
    above earlier ones, `settings` (`train.max_steps=20`, the value in YAML) above these, and
    `flags` (whole sections) above all."""
    layers = [{"train": read_yaml(Path(train), f"--train {train}")}] if train else []
    layers += [read_yaml(Path(file), f"--study {file}") for file in files]
    study = functools.reduce(merge, [*layers, *map(read_setting, settings), flags], {})
    unknown = [name for name in study if name not in SECTIONS]
    if unknown:
        raise UserError(f"a study has no section {unknown[0]!r}; it may have {', '.join(SECTIONS)}")
    for name in SECTIONS:
        kind = list if name == "seeds" else dict
        if not isinstance(study.setdefault(name, kind()), kind):
            raise UserError(
                f"the section {name!r} of a study is a {kind.__name__}, got {study[name]!r}"
            )
    for name, own in study["variants"].items():
        if not (own is None or isinstance(own, dict) and isinstance(own.get("data") or {}, dict)):
            what = "give options of train.py and, in 'data', of prepare.py"
            raise UserError(f"variant {name!r}: {what}, got {own!r}")
    for name, options in study["evaluate"].items():
        if not isinstance(options, dict) or options.get("task", "perplexity") != "perplexity":
            what = "give options of evaluate_model.py's task perplexity"
            raise UserError(f"evaluate {name!r}: {what}, got {options!r}")
    return study


def read_setting(text: str) -> dict:
    """`train.max_steps=20` → `{"train": {"max_steps": 20}}`."""
    path, equals, value = text.partition("=")
    if not equals:
        raise UserError(f"--set {text}: give SECTION.NAME=VALUE, such as train.max_steps=20")
    layer = parse_yaml(value, f"--set {text}")
    for name in reversed(path.split(".")):
        layer = {name: layer}
    return layer


def merge(below: dict, above: dict) -> dict:
    """One dict of both, also of the dicts in them; otherwise what is above wins."""
    merged = dict(below)
    for name, value in above.items():
        both = isinstance(value, dict) and isinstance(merged.get(name), dict)
        merged[name] = merge(merged[name], value) if both else value
    return merged


def choose_variants(study: dict, names: Sequence[str]) -> dict:
    """The study with only these variants, in this order; the others are compared with the first."""
    unknown = [name for name in names if name not in study["variants"]]
    if unknown:
        raise UserError(
            f"--variants: there is no {unknown[0]}; the study has "
            f"{', '.join(study['variants']) or 'none'}"
        )
    return study | {"variants": {name: study["variants"][name] for name in names}}


def existing_runs(folders: Sequence[str]) -> list[Run]:
    """Finished runs by the names of their folders."""
    names = [Path(folder).resolve().name for folder in folders]
    if len({*names}) < len(names):
        raise UserError(f"--runs {' '.join(folders)}: give folders of different names")
    return [
        Run(name, name, Path(folder), None) for name, folder in zip(names, folders, strict=True)
    ]


def shared_evaluations(runs: Sequence[Run]) -> list[str]:
    """The names of the `evaluation_NAME.json` files that all runs' folders have."""
    files = [{file.stem for file in run.folder.glob("evaluation_*.json")} for run in runs]
    return [name.removeprefix("evaluation_") for name in sorted(set.intersection(*files))]


def runs_of(study: dict, out: Path) -> list[Run]:
    """A run for each variant and seed. A seed other than the usual one is part of a run's name, so
    that seeds can be added to a study later."""
    runs = []
    for variant, own in (study["variants"] or {"run": {}}).items():
        own = dict(own or {})
        data = BASE if own.pop("data", None) is None else variant
        options = study["train"] | own
        usual = options.get("seed") or 0
        for seed in study["seeds"] or [usual]:
            name = f"{variant},seed={seed}" if seed != usual else variant
            name = re.sub(r"[^\w.,=+-]", "_", name)
            runs.append(Run(name, variant, out / name, options | {"seed": seed}, data))
    names = [run.name for run in runs]
    for name in names:
        if names.count(name) > 1 or name in OWN_FOLDERS:
            raise UserError(
                f"two things would share the folder {name}: no seed or variant may come twice"
            )
    return runs


def data_settings(study: dict, runs: Sequence[Run]) -> dict[str, dict]:
    """The options of prepare.py by the name of the data, of those that the runs read."""
    own = {run.data: study["variants"][run.data]["data"] for run in runs if run.data != BASE}
    return {name: merge(study["data"], above) for name, above in ({BASE: {}} | own).items()}


def words_of(options: dict) -> list[str]:
    """Options as a command line; those without a value are left out."""
    words = []
    for name, value in options.items():
        values = value if isinstance(value, list) else [value]
        words += [f"--{name}", *map(str, values)] if value is not None else []
    return words
