"""The plan of a study: a scale and variants, their merged options, the data they need, the commands that make them.

A scale is what all runs share, a variant what one of them has of its own; a YAML file each. Options whose names begin with
`data_` are recipes/prepare.py's (`data_fraction: 0.1`), the others recipes/train.py's. Flags go above variants, variants
above the scale.
"""

import hashlib
import json
import re
import shlex
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from cli import UserError
from support.stages import source_files, write_text

SCALES = ("mini", "small", "full")
VARIANTS = ("s1", "i1", "i2", "best")
BASE = "base"  # the data of the scale; a variant with data of its own gets a folder beside it
BASELINE = "s1"  # the variant that the others are compared with
DATA_PREFIX = "data_"
EITHER = (("segment_length", "n_segments"),)  # one of them replaces the other
STUDY_FILE = "study.json"
# Options of recipes/train.py that the study sets, and what stands for them in its own
OWN_OPTIONS = {"data": "", "out": "", "config": "", "max_steps": "--max_steps to the study", "max_tokens": "--tokens"}


@dataclass
class Run:
    """A variant with one seed, in a folder of its own.

    Attributes:
        variant, seed; options: of recipes/train.py, merged; data: the name of its prepared data.
        status, reason: what became of it, as in [`sweeps.outcome`]; empty before it is known.
    """

    variant: str
    seed: int
    folder: Path
    options: dict
    data: str
    status: str = ""
    reason: str = ""

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def trained(self) -> Path:
        """The out folder of recipes/train.py."""
        return self.folder / "run"


@dataclass
class Plan:
    """A study: `data` are the settings of recipes/prepare.py by the name of the data, `runs` come variant by variant."""

    scale: str
    source: str
    out: Path
    data: dict[str, dict]
    runs: list[Run]
    launcher: list[str] = field(default_factory=list)

    def data_folder(self, name: str) -> Path:
        return self.out / "data" / name

    def log(self, name: str) -> Path:
        return self.out / "logs" / f"{name}.log"

    @property
    def context(self) -> int:
        return int(self.data[BASE].get("context", 1024))


# --- options ----------------------------------------------------------------------------------------------------------


def read_settings(file: Path) -> dict:
    """The options in a YAML file; those without a value are left out."""
    import yaml

    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"cannot read {file}: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"{file} must hold `option: value` lines")
    return {name: value for name, value in content.items() if value is not None}


def variant_file(name: str, configs: Path) -> Path:
    """The file of a variant: `i1` is `study_i1.yaml` in `configs`, and what ends in `.yaml` a file of the user's."""
    file = Path(name) if name.endswith(".yaml") else configs / f"study_{name}.yaml"
    if not file.is_file():
        raise UserError(f"--variants: there is no {file}; give {', '.join(VARIANTS)} or a .yaml file of your own")
    return file


def read_flags(words: list[str]) -> dict:
    """Options from the command line: `--n_layer 2 --layers 0 1 --use_cpu` → `{"n_layer": 2, "layers": [0, 1], …}`."""
    options: dict = {}
    name = None
    for word in words:
        if word.startswith("--"):
            name, has_value, value = word.removeprefix("--").partition("=")
            options[name] = [value] if has_value else []
        elif name is None:
            raise UserError(f"{word!r} stands behind -- and belongs to no option")
        else:
            options[name].append(word)
    return {
        name: True if not values else _typed(values[0]) if len(values) == 1 else [_typed(value) for value in values]
        for name, values in options.items()
    }


def _typed(word: str):
    """A number or truth value where the word is exactly how it is written, otherwise the word."""
    if word in ("true", "false"):
        return word == "true"
    for kind in (int, float):
        try:
            if str(kind(word)) == word:
                return kind(word)
        except ValueError:
            pass
    return word


def merge(*layers: dict) -> dict:
    """One dict of all; later layers win, also where they set an option that excludes an earlier one."""
    merged: dict = {}
    for layer in layers:
        for pair in EITHER:
            if any(name in layer for name in pair):
                merged = {name: value for name, value in merged.items() if name not in pair}
        merged |= layer
    return merged


def split_options(options: dict) -> tuple[dict, dict]:
    """The options of recipes/train.py and those of recipes/prepare.py, whose prefix is taken off."""
    data = {name.removeprefix(DATA_PREFIX): value for name, value in options.items() if name.startswith(DATA_PREFIX)}
    return {name: value for name, value in options.items() if not name.startswith(DATA_PREFIX)}, data


def words_of(options: dict) -> list[str]:
    """Options as a command line: the inverse of [`read_flags`]."""
    lists = {name: value if isinstance(value, list) else [value] for name, value in options.items()}
    return [word for name, values in lists.items() for word in (f"--{name}", *map(str, values))]


# --- the plan ---------------------------------------------------------------------------------------------------------


def make_plan(
    *,
    scale: str,
    source: str,
    out: Path,
    variants: list[str],
    configs: Path,
    flags: dict,
    seeds: list[int] | None = None,
    tokens: int | None = None,
    max_steps: int | None = None,
    ready_tokenizer: str | None = None,
    launcher: str = "",
) -> Plan:
    """The study that the options of recipes/study.py ask for; nothing is written.

    Args:
        configs: the folder with the files of scales and variants.
        flags: the options behind `--`, above all others.
        tokens, max_steps: replace the scale's length; each run ends with the first that is reached.
        ready_tokenizer: takes the place of every ready tokenizer that a variant names.
    """
    names = [Path(variant).stem for variant in variants]
    if len(set(names)) < len(names):
        raise UserError(f"--variants {' '.join(variants)}: a variant is named twice")
    reserved = [name for name in names if name in ("data", "logs", "figures")]
    if reserved:
        raise UserError(f"--variants: {reserved[0]} is the name of another folder of the study; rename the file")
    if seeds is not None and len(set(seeds)) < len(seeds):
        raise UserError(f"--seeds {' '.join(map(str, seeds))}: a seed is named twice")
    flag_training, flag_data = split_options(flags)
    for name, own in OWN_OPTIONS.items():
        if name in flag_training:
            raise UserError(f"--{name} is set by the study: leave it out behind --" + (f", and give {own}" if own else ""))
    shared = read_settings(configs / f"study_scale_{scale}.yaml")
    base = merge(read_settings(configs / f"study_data_{scale}.yaml"), flag_data)
    if base.get("split_by", "document") != "document":
        raise UserError("--data_split_by: a study compares its runs on documents, which `document` alone keeps apart")
    length = {} if max_steps is None else {"max_steps": max_steps}
    if tokens is not None:
        length["max_tokens"] = tokens
        shared = {name: value for name, value in shared.items() if name != "epochs"}
    processes = re.search(r"--(?:num_processes|nproc[_-]per[_-]node)[ =](\d+)", launcher)
    length |= {"num_processes": int(processes[1])} if processes else {}
    plan = Plan(scale, source, Path(out), {BASE: base}, [], shlex.split(launcher))
    for variant, name in zip(variants, names, strict=True):
        own, own_data = split_options(read_settings(variant_file(variant, configs)))
        if ready_tokenizer is not None and own_data.get("tokenizer", "bpe") not in ("bpe", "characters"):
            own_data["tokenizer"] = ready_tokenizer
        settings = merge(base, own_data, flag_data)
        data = data_name(base, settings)
        plan.data.setdefault(data, settings)
        options = merge(shared, own, length, flag_training)
        usual = int(options.get("seed", 0))
        for seed in [usual] if seeds is None else seeds:
            folder = plan.out / (name if seed == usual else f"{name}-seed{seed}")
            plan.runs.append(Run(name, seed, folder, options | {"seed": seed}, data))
    return plan


def data_name(base: dict, settings: dict) -> str:
    """`base`, or what differs from it: `fraction=0.1,tokenizer=gpt2`. Of a tokenizer's folder only the last part counts."""
    own = {name: value for name, value in settings.items() if base.get(name) != value}
    words = [f"{name}={Path(value).name if name == 'tokenizer' else value}" for name, value in own.items()]
    return re.sub(r"[^\w.,=+-]", "_", ",".join(words)) or BASE


def prepare_command(plan: Plan, name: str, recipes: Path) -> list[str]:
    """What prepares the data of this name, with the options in a file beside its folder."""
    folder = plan.data_folder(name)
    words = ["--config", f"{folder}.yaml", "--source", plan.source, "--out", str(folder)]
    return [sys.executable, str(recipes / "prepare.py"), *words]


def train_command(plan: Plan, run: Run, recipes: Path) -> list[str]:
    words = ["--config", str(run.folder / "train.yaml"), "--data", str(plan.data_folder(run.data))]
    return [*(plan.launcher or [sys.executable]), str(recipes / "train.py"), *words, "--out", str(run.trained)]


def shown(command: list[str]) -> str:
    """A command as a line to type: this interpreter by its name, paths below the current folder from there."""
    words = [Path(word).name if word == sys.executable else word for word in command]
    below = f"{Path.cwd()}/"
    return shlex.join(word.removeprefix(below) for word in words)


def settings_text(options: dict, command: list[str]) -> str:
    """The YAML file of options, with its command in the first line."""
    import yaml

    return f"# {shown(command)}\n{yaml.safe_dump(options, sort_keys=False, allow_unicode=True)}"


# --- the folder of a study --------------------------------------------------------------------------------------------


def identity(plan: Plan) -> dict:
    """What a folder that holds a study was started with: its scale, its source and the settings of its data."""
    path = Path(plan.source)
    files = [(str(file.relative_to(path)), file.stat().st_size) for file in source_files(plan.source)]
    listing = hashlib.sha256(json.dumps(files).encode()).hexdigest()[:8]
    return {
        "scale": plan.scale,
        "source": str(path.resolve()) if path.exists() else plan.source,
        "source_files": f"{len(files):,} of {sum(size for _, size in files):,} bytes, names and sizes {listing}",
        "data": plan.data,
    }


def check_same_study(plan: Plan) -> dict:
    """The content of the folder's `study.json`, with the data that this plan adds. A folder that was started with other
    data, scale or options of a run is a UserError that says what differs."""
    now = identity(plan)
    file = plan.out / STUDY_FILE
    if not file.is_file():
        if plan.out.is_dir() and any(entry.name != ".stages" for entry in plan.out.iterdir()):
            raise UserError(f"--out {plan.out} is not empty and holds no study: choose another folder")
        return now | {"fingerprints": {}}
    before = json.loads(file.read_text(encoding="utf-8"))
    different = _differences(before, now, [name for name in now if name != "data"])
    for name in before["data"].keys() & now["data"].keys():
        different += _differences(before["data"][name], now["data"][name], label=f"data {name}: ")
    for run in plan.runs:
        if (run.folder / "train.yaml").is_file():
            options = read_settings(run.folder / "train.yaml")
            different += _differences(options, run.options, label=f"{run.name}: ")
    if different:
        raise UserError(
            f"--out {plan.out} was started with other settings: {'; '.join(different)}. Go on with its own, or choose "
            "another --out"
        )
    return before | {"data": before["data"] | now["data"]}


def _differences(before: dict, now: dict, names=None, label: str = "") -> list[str]:
    names = sorted(before.keys() | now.keys()) if names is None else names
    return [
        f"{label}{name} was {before.get(name)!r} and is now {now.get(name)!r}"
        for name in names
        if before.get(name) != now.get(name)
    ]


def write_settings(plan: Plan, recipes: Path) -> None:
    """Writes the files of options that the commands name."""
    for name, settings in plan.data.items():
        plan.data_folder(name).parent.mkdir(parents=True, exist_ok=True)
        write_text(Path(f"{plan.data_folder(name)}.yaml"), settings_text(settings, prepare_command(plan, name, recipes)))
    for run in plan.runs:
        run.folder.mkdir(parents=True, exist_ok=True)
        write_text(run.folder / "train.yaml", settings_text(run.options, train_command(plan, run, recipes)))


def fingerprint_of(folder: Path) -> str | None:
    """The fingerprint of a prepared folder, None while it is not finished."""
    from training.setup import data_fingerprint

    file = folder / "manifest.json"
    return data_fingerprint(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else None


def corpus_share(manifest: dict, source: str) -> str:
    """How much of Carolina a prepared folder was made of, as its files and the corpus's own list of them say: `15 of 193
    wik shards`. Of another source, how many files, or its name."""
    from corpora.carolina import CAROLINA_FOLDERS, CAROLINA_REPOSITORY, download_carolina

    options, names = manifest["options"], [entry["file"] for entry in manifest["source"]["files"]]
    if source == CAROLINA_REPOSITORY:  # in the Hub's cache by now
        source = download_carolina(options["taxonomy"], options["revision"])
    files = [Path(source) / name if Path(source).is_dir() else Path(source) for name in names]
    parents = (next((p for p in file.absolute().parents[:4] if (p / "checksum.sha256").is_file()), None) for file in files)
    codes, parts = {folder: code for code, folder in CAROLINA_FOLDERS.items()}, []
    for folder, count in Counter(parents).items():
        if folder is not None and folder.name in codes:
            lines = (folder / "checksum.sha256").read_text(encoding="utf-8").splitlines()
            listed = sum(line.rstrip().endswith(".xml") for line in lines)
            parts.append(f"{count} of {listed} `{codes[folder.name]}` shards")
    return ", ".join(parts) or (f"{len(files)} file{'s' * (len(files) != 1)}" if files else f"`{source}`")
