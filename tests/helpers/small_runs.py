"""A tiny prepared folder and a tiny run on it, made in this process, and how their files are
damaged."""

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path

from running import load_recipe, sample_text, write_documents
from support import stages

WORDS = (
    "--n_layer 1 --n_embd 16 --n_head 2 --segment_length 4 --position_encoding rope "
    "--max_steps 6 --batch_size 4"
)
WORDS += (
    " --gradient_accumulation 1 --save_steps 2 --eval_steps 3 --eval_rows 4 --use_cpu true "
    "--precision float32"
)


@functools.cache
def small_data(base: Path) -> Path:
    """By recipes/prepare.py: characters, rows of 16 tokens, all three splits."""
    folder = base / "small"
    folder.mkdir()
    write_documents(folder / "text.jsonl", sample_text()[:8000], 10)
    words = ["--source", folder / "text.jsonl", "--tokenizer", "characters", "--context", 16]
    words += ["--validation", 0.15, "--test", 0.15, "--out", folder / "data"]
    load_recipe("prepare").main([*map(str, words)])
    return folder / "data"


def training(data: Path, out: Path, *more) -> list[str]:
    """The command line of the run."""
    return [*map(str, ["--data", data, "--out", out, *WORDS.split(), *more])]


@functools.cache
def small_run(base: Path) -> Path:
    """A finished run with Infini-attention; checkpoint-4 and checkpoint-6, the last one, are still
    there."""
    load_recipe("train").main(training(small_data(base), base / "small" / "run"))
    return base / "small" / "run"


def stopped_run(base: Path, folder: Path) -> Path:
    """The run as a kill behind its last step leaves it."""
    shutil.copytree(small_run(base), folder)
    for name in ("result.json", "model.safetensors", "config.json"):
        (folder / name).unlink()
    return folder


# --- damage: each makes a function of a file
# --------------------------------------------------------------------------------------------------

Damage = Callable[[Path], object]


def text(content: str) -> Damage:
    return lambda file: file.write_text(content, encoding="utf-8")


def empty(file: Path) -> None:
    file.write_bytes(b"")


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def flip(file: Path) -> None:
    """One bit in the middle: the size stays."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def remove(file: Path) -> None:
    shutil.rmtree(file) if file.is_dir() else file.unlink()


def binary(file: Path) -> None:
    file.write_bytes(bytes(range(256)))


def entry(*path, value) -> Damage:
    """Another value in JSON."""

    def change(file: Path) -> None:
        content = json.loads(file.read_text(encoding="utf-8"))
        place = content
        for name in path[:-1]:
            place = place[name]
        place[path[-1]] = value
        file.write_text(json.dumps(content), encoding="utf-8")

    return change


def without(*path) -> Damage:
    """JSON that lacks an entry."""

    def change(file: Path) -> None:
        content = json.loads(file.read_text(encoding="utf-8"))
        place = content
        for name in path[:-1]:
            place = place[name]
        del place[path[-1]]
        file.write_text(json.dumps(content), encoding="utf-8")

    return change


def resealed(damage: Damage) -> Damage:
    """The damage of a record as a recipe itself would have written it: its own checksum is
    right."""

    def change(file: Path) -> None:
        damage(file)
        content = json.loads(file.read_text(encoding="utf-8"))
        content.pop(stages.OWN)
        file.write_text(json.dumps(stages.sealed(content, content[stages.FILES])))

    return change


def of_an_earlier_version(file: Path) -> None:
    """A record without checksums."""
    content = json.loads(file.read_text(encoding="utf-8"))
    for name in (stages.FILES, stages.OWN):
        del content[name]
    file.write_text(json.dumps(content), encoding="utf-8")


DAMAGES = {
    "empty": empty,
    "cut": cut,
    "flip": flip,
    "remove": remove,
    "binary": binary,
    "words": text("see above"),
}
