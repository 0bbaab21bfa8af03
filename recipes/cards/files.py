"""The files that a model card is written from: found, read, and checked to be of the same model and data."""

import datetime
import json
import os
import re
import shutil
from pathlib import Path
from urllib.parse import quote

from cli import UserError
from corpora.carolina import CAROLINA_REPOSITORY
from studies.evaluation import choose_prompt, validation_documents
from studies.planning import corpus_share
from support.stages import write_json
from training.setup import data_fingerprint

from .model import limit_of
from .run import Run, Stage, corpus_of, data_folder, of_stream
from .text import last_part, shorten_path

SETTINGS = "card.json"
CAPTIONS = {"loss_curve": "Loss over the tokens trained on", "gates": "Gates over the tokens trained on"}
TASK_CAPTIONS = {"perplexity": "Perplexity by position", "passkey": "Passkeys found", "facts": "Facts recalled"}
STUDY_CAPTIONS = {
    "loss.png": "Validation loss of the study's variants",
    "loss_difference.png": "Validation loss minus the baseline's",
    "positions.png": "Perplexity by position beyond the trained context",
    "gates_{variant}.png": "Gates of each layer at the end of training",
}


def read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {file}: {error}") from error


def read_json(file: Path) -> dict:
    try:
        return json.loads(read_text(file))
    except json.JSONDecodeError as error:
        raise UserError(f"{file} is no JSON: {error}") from error


def check_run(folder: Path, also: list[str]) -> None:
    """UserError for a run that is not finished or not whole, naming what is missing."""
    needed = ["result.json", "config.json", "tokenizer_config.json", *also]
    missing = [name for name in needed if not (folder / name).is_file()]
    missing += [] if any(folder.glob("model*.safetensors")) else ["model.safetensors"]
    if missing:
        raise UserError(
            f"--run: {folder} has no {', '.join(missing)}: it is no run of recipes/train.py, or not finished; the same "
            "train.py command finishes it"
        )


# --- what the card was told -------------------------------------------------------------------------------------------


def keep_settings(folder: Path, options: dict) -> None:
    """Writes what decides the words of a run's card into card.json, so that the same card can be written again."""
    kept = {name: value for name, value in options.items() if name not in ("out", "run", "figures", "repo_id", "device")}
    for name in ("study", "data", "notes"):  # which are then found from any folder
        kept[name] = kept[name] and os.path.abspath(kept[name])
    for name in ("evaluation", "baseline"):
        kept[name] = kept[name] and list(map(os.path.abspath, kept[name]))
    write_json(folder / SETTINGS, kept)


def kept_settings(folder: Path) -> dict:
    """What [`keep_settings`] wrote; empty where no card was written yet."""
    return read_json(folder / SETTINGS) if (folder / SETTINGS).is_file() else {}


# --- data and the runs before -----------------------------------------------------------------------------------------


def find_data(result: dict, given: str | Path | None = None) -> Path | None:
    """The prepared folder of a run: the one that was given, which must be there and be its own, or the one that its command
    names, where that still is its own; otherwise None."""
    folder = data_folder(result) if given is None else given
    if folder is None or given is None and not (Path(folder) / "manifest.json").is_file():
        return None
    found = data_fingerprint(read_json(Path(folder) / "manifest.json"))
    if found == result["data_fingerprint"]:
        return Path(folder)
    if given is None:
        return None
    raise UserError(f"{folder} is of other data ({found}) than the run ({result['data_fingerprint']})")


def share_of(manifest: dict) -> str | None:
    """How much of Carolina was read, see [`corpus_share`]; None for other corpora. Nothing is downloaded for it."""
    if corpus_of(manifest) != "carolina":
        return None
    source = manifest["options"]["source"]
    if source == CAROLINA_REPOSITORY:
        from huggingface_hub import snapshot_download

        revision = manifest["options"]["revision"]
        try:
            source = snapshot_download(source, repo_type="dataset", revision=revision, local_files_only=True)
        except (OSError, ValueError):  # no longer in the cache
            source = ""
    return corpus_share(manifest, source)


def stage_of(name: str, result: dict, data: Path | None) -> Stage:
    manifest = None if data is None else of_stream(read_json(data / "manifest.json"), result)
    return Stage(name, result, manifest, None if manifest is None else share_of(manifest))


def earlier_stages(result: dict) -> list[Stage]:
    """The runs that a run was continued from (`--init_from`), the first one first.

    A folder that is no longer there, or holds a run that was finished after the one that started from it, is a stage of
    which nothing but the name is known; what came before it is not known either.
    """
    stages, seen = [], set()
    while (start := result["options"].get("init_from")) is not None:
        folder, before = Path(start), None
        if folder.resolve() not in seen and (folder / "result.json").is_file():
            seen.add(folder.resolve())
            before = read_json(folder / "result.json")
        if before is None or when(before) > when(result):
            return [Stage(shorten_path(start)), *stages]
        stages.insert(0, stage_of(shorten_path(start), before, find_data(before)))
        result = before
    return stages


def when(content: dict) -> datetime.datetime:
    return datetime.datetime.fromisoformat(content["date"])


def data_prompt(data: Path, folder: Path, words: int) -> dict | None:
    """The first words of a validation document (see [`choose_prompt`]), so few that half of the positions of the model in
    `folder` are left; None where the data hold no documents."""
    from transformers import AutoTokenizer

    documents, limit = validation_documents(data), limit_of(read_json(folder / "config.json"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    while documents:
        prompt = choose_prompt(documents, words)
        taken = len(tokenizer(prompt["prompt"], add_special_tokens=False)["input_ids"])
        if limit is None or taken <= limit // 2 or words == 1:
            return prompt
        words //= 2
    return None


# --- evaluations and baselines ----------------------------------------------------------------------------------------


def evaluation_files(folder: Path, given: list[str]) -> list[Path]:
    """The JSONs of recipes/evaluate_model.py in a run's folder, and those that were given."""
    stems = ("evaluation", "perplexity", "passkey", "facts")
    found = [file for stem in stems for file in sorted(folder.glob(f"{stem}*.json"))]
    found = [file for file in found if not file.name.endswith(".cells.json")]  # of a task that is not finished
    return found + [Path(name) for name in given if Path(name).resolve() not in {file.resolve() for file in found}]


def read_evaluations(files: list[Path], folder: Path, result: dict) -> list[dict]:
    """The contents of the files. Those that cannot be of this training are a UserError."""
    contents = []
    for file in files:
        content = read_json(file)
        absent = [name for name in ("options", "model", "date") if name not in content]
        if absent:
            raise UserError(f"{file} has no {', '.join(absent)}: it is no file of recipes/evaluate_model.py")
        if file.resolve().parent != folder.resolve() and last_part(content["model"]) != folder.resolve().name:
            raise UserError(f"{file} is of the model {content['model']}, not of {folder}")
        if when(content) < when(result):
            raise UserError(f"{file} is older than the training in {folder}: evaluate the model again, or remove the file")
        contents.append(content)
    return contents


def read_baselines(files: list[str], folder: Path, result: dict) -> list[dict]:
    contents = [read_json(Path(file)) for file in files]
    for file, content in zip(files, contents, strict=True):
        found, own = content.get("data_fingerprint"), result["data_fingerprint"]
        if found != own:
            raise UserError(f"{file} is of other data ({found}) than {folder} ({own})")
    return contents


# --- studies ----------------------------------------------------------------------------------------------------------


def read_study(folder: Path, name: str | None) -> tuple[dict, dict]:
    """The content of a study's report.json, and what it says of a variant. UserError unless that was finished."""
    if not (folder / "report.json").is_file():
        raise UserError(f"--study: {folder} has no report.json; the same command of recipes/study.py finishes it")
    content = read_json(folder / "report.json")
    variants = {variant["name"]: variant for variant in content["variants"]}
    if name not in variants:
        raise UserError(f"--variant {name}: the study in {folder} has {', '.join(variants)}")
    if "cross_entropy" not in variants[name]:
        reasons = "; ".join(f"{run}: {reason}" for run, reason in variants[name]["reasons"].items())
        raise UserError(f"--variant {name} was not finished: {reasons}")
    return content, variants[name]


def variant_run(study: Path, variant: dict) -> Path:
    """The run of a variant's first finished seed, of which the study has samples and all other measurements."""
    return study / variant["folders"][next(iter(variant["by_seed"]))] / "run"


def check_study(study: Path, content: dict, variant: dict, result: dict) -> None:
    """UserError where the report is of another training or other data than the run's folder now holds."""
    fingerprint = content["data"][variant["data"]]["fingerprint"]
    if variant["sample"]["settings"]["trained"] != result["date"] or fingerprint != result["data_fingerprint"]:
        raise UserError(f"{study / 'report.json'} is of another training of {variant['name']}: start recipes/study.py again")


def study_samples(content: dict, variant: dict, limit: int | None) -> tuple[dict, dict]:
    """The study's sample of a variant in the form of samples.json, and where its prompt is from."""
    prompt, found, settings = content["prompt"], variant["sample"], dict(content["sampling"])
    seed, room = settings.pop("seed"), settings.pop("new_tokens")
    if limit is not None and found["text"] is not None:
        room = min(room, limit - found["prompt_tokens"])
    arguments = {"do_sample": True, **settings, "top_k": 0, "max_new_tokens": room}
    sample = {"prompt": prompt["prompt"], "method": "Top-p", "arguments": arguments, "seed": seed}
    return {"samples": [sample | found]}, {prompt["prompt"]: prompt}


# --- figures ----------------------------------------------------------------------------------------------------------


def copy_figures(run: Run, folder: Path, files: list[Path], study: Path | None, figures: Path, out: Path) -> dict:
    """Copies the plots of a run, of its evaluations and of its study under names of their own.

    Args:
        files: of the run's evaluations, in their order, each with its plot beside it.
        study: the folder of the study or None; its figures are the same for all of its cards, and copied under its name.
        out: the card.

    Returns caption and link, relative to the card, of each, by the place where it belongs.
    """
    own = re.sub(r"[^A-Za-z0-9]+", "_", run.name)
    wanted = [("training", caption, folder / f"{stem}.png", own) for stem, caption in CAPTIONS.items()]
    for file, content in zip(files, run.evaluations, strict=True):
        task = content["options"].get("task", "perplexity")
        caption = TASK_CAPTIONS[task] + (", memory off" if content.get("memory") == "off" else "")
        caption += {None: "", "validation": ""}.get(content.get("split"), f", {content.get('split')} split")
        wanted.append((task, caption, file.with_suffix(".png"), own))
    if study is not None:
        for name, caption in STUDY_CAPTIONS.items():
            file = study / "figures" / name.format(variant=run.variant["name"])
            wanted.append(("study", caption, file, re.sub(r"[^A-Za-z0-9]+", "_", study.resolve().name)))
    figures.mkdir(parents=True, exist_ok=True)
    links: dict[str, list[tuple[str, str]]] = {}
    copies: list[Path] = []
    for place, caption, file, prefix in wanted:
        if file.is_file():
            copy = figures / f"{prefix}_{file.name}"
            if copy in copies:  # two evaluations of one name, from two folders
                copy = figures / f"{prefix}_{len(copies)}_{file.name}"
            copies.append(copy)
            shutil.copyfile(file, copy)
            links.setdefault(place, []).append((caption, quote(Path(os.path.relpath(copy, out.parent)).as_posix())))
    return links
