"""What of a run's folder goes to the Hub, and why the rest stays: model, tokenizer, card, and the files that these name."""

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from urllib.parse import unquote

from cards.files import read_json
from cli import UserError

CARD, CONFIG, FIGURES = "README.md", "config.json", "figures"
WEIGHTS = "model*.safetensors"
CODE = f"hf_infini_{'[0-9a-f]' * 8}_*.py"  # that a model was saved with
VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", "merges.txt", "added_tokens.json", "tokenizer.model")
MODEL = (CARD, CONFIG, "generation_config.json", WEIGHTS, "model.safetensors.index.json", "tokenizer_config.json")
MODEL += ("special_tokens_map.json", "chat_template.jinja", *VOCABULARIES)
REASONS = {  # the first pattern that fits says why a file stays
    "checkpoint-*": "checkpoint: weights and optimiser in the middle of training",
    "training_args.bin": "pickled options of the Trainer, with the paths of this machine",
    "optimizer*": "state of the optimiser",
    "scheduler*": "state of the schedule",
    "scaler.pt": "state of mixed precision",
    "rng_state*": "state of the random numbers",
    "trainer_state.json": "state of the Trainer",
    "metrics.jsonl": "log of the training",
    "*.log": "log",
    "runs": "logs of the training",
    "*tfevents*": "log of the training",
    "wandb": "logs of the training",
    "*.lock": "lock",
    "*.part": "file that was not finished",
    "*.cells.json": "evaluation that was not finished",
    ".*": "hidden",
    "*.png": "figure that the card does not show",
    "*.json": "record of the run: its figures are in the card, its commands hold paths of this machine",
    "*.py": "code that auto_map in config.json does not need",
    "*": "no part of the model",
}
# By the .gitattributes of a new repository; besides, whatever is large or no text
LFS_SUFFIXES = (".safetensors", ".model")
LARGEST_REGULAR = 10_000_000  # bytes


@dataclass(frozen=True)
class Published:
    """A file that goes up.

    Attributes:
        path: in the repository.
        size: bytes.
        sha256: hexadecimal digits.
        lfs: whether the Hub is expected to keep it as a large file; it has the last word.
    """

    path: str
    file: Path
    size: int
    sha256: str
    lfs: bool


def plan(folder: Path) -> tuple[list[Published], dict[str, str]]:
    """The files of a run's folder that go up, and why the others stay (folders of which nothing goes up with a / behind).

    Of the figures those that the card shows, of the code what `auto_map` in config.json needs.
    """
    wanted = {*code_files(folder), *(path for _, path in card_images(folder))}
    files, left_out = [], {}
    for path in _paths(folder, {PurePosixPath(name).parts[0] for name in wanted if "/" in name}):
        file = folder / path
        if file.is_file() and (path in wanted or any(fnmatchcase(path, pattern) for pattern in MODEL)):
            files.append(_published(path, file))
        else:
            reason = next(why for pattern, why in REASONS.items() if fnmatchcase(PurePosixPath(path).name, pattern))
            left_out[f"{path}/" if file.is_dir() else path] = reason
    return files, left_out


def is_replaced(path: str) -> bool:
    """Whether a file of the repository is one of those that only a push writes, to go where a new version has it no more."""
    if "/" in path:
        return fnmatchcase(path, f"{FIGURES}/*.png")
    return any(fnmatchcase(path, pattern) for pattern in (*MODEL, CODE))


def is_binary(file: Path) -> bool:
    """As git tells it: text has no zero byte."""
    with file.open("rb") as stream:
        return b"\0" in stream.read(512)


def code_files(folder: Path) -> list[str]:
    """The .py files that `auto_map` in config.json names and those that they import from beside them, there or not."""
    from transformers.dynamic_module_utils import get_relative_imports

    try:
        named = read_json(folder / CONFIG).get("auto_map", {}).values()
    except UserError:  # which loading the model says better
        return []
    values = [value for entry in named for value in (entry if isinstance(entry, list) else [entry])]
    # `user/name--module.Class` is code of another repository
    waiting = [value.split(".")[0] for value in values if value is not None and "--" not in value]
    found: list[str] = []
    while waiting:
        name = f"{waiting.pop()}.py"
        if name not in found:
            found.append(name)
            waiting += get_relative_imports(folder / name) if (folder / name).is_file() else []
    return sorted(found)


def card_images(folder: Path) -> list[tuple[int, str]]:
    """Line and path of the images that the card shows, web addresses left out."""
    if not (folder / CARD).is_file():
        return []
    found = []
    for number, line in _outside_fences((folder / CARD).read_text(encoding="utf-8", errors="replace")):
        links = (unquote(link) for link in re.findall(r"!\[[^\]]*\]\(([^)\s]+)", line))
        found += [(number, link) for link in links if "://" not in link]
    return found


def _outside_fences(text: str) -> Iterator[tuple[int, str]]:
    """The numbered lines of Markdown that stand in no fenced block: what a model wrote is no link."""
    fence = None
    for number, line in enumerate(text.split("\n"), start=1):
        ticks = re.match("`{3,}", line)
        if fence is None and ticks is None:
            yield number, line
        elif fence is None:
            fence = ticks[0]
        elif line.strip() == fence:
            fence = None


def _paths(folder: Path, opened: set[str]) -> Iterator[str]:
    """What is in a folder, and in those of its folders that are `opened`, each in alphabetical order."""
    for entry in sorted(folder.iterdir()):
        if entry.is_dir() and entry.name in opened:
            yield from (f"{entry.name}/{path}" for path in _paths(entry, set()))
        else:
            yield entry.name


def _published(path: str, file: Path) -> Published:
    size = file.stat().st_size
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    lfs = size > 0 and (path.endswith(LFS_SUFFIXES) or size > LARGEST_REGULAR or is_binary(file))
    return Published(path, file, size, digest, lfs)
