"""What the command keeps between its starts: memories of texts, and fitted scores. A memory's name
comes from the model's weights, the adapter's and the text, so that paths may change."""

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..models.loading import fingerprint
from .outputs import replacing

KINDS = {"memories": "memory", "scores": "score"}  # by the folder
SAMPLES = 256  # numbers of each tensor that a name depends on
# Entries of a configuration that say where it comes from, and not what it computes
ORIGINS = {"transformers_version", "architectures", "auto_map", "dtype", "quantization_config"}
UNITS = {"days": 86_400, "hours": 3_600, "minutes": 60, "seconds": 1}


class Kept(NamedTuple):
    """An entry: its `paths`, their `bytes`, when one was last written, and what is known `about`
    it."""

    name: str
    kind: str
    paths: list[Path]
    bytes: int
    written: float
    about: dict[str, Any]


def key_of(model: torch.nn.Module, *parts: object) -> str:
    """A name for what belongs to this `model`, wherever it was loaded from, and to these `parts`.
    Of each tensor some numbers count, in bfloat16: files say by all of them which model is
    theirs."""
    return _key(_digest_of(model), parts)


def memory_names(model: Any, tokenizer: Any, archive: bool | str) -> Callable[[str], str]:
    """A function that names the memory file of a text, by the text and by all that reads it: the
    weights of a `model` and their dtype, a `tokenizer` and its chat template, and whether there is
    an `archive` beside it, and of which kind. Weights and vocabulary are gone through once."""
    digest = _digest_of(model)
    before = model.dtype, fingerprint(tokenizer), tokenizer.chat_template
    behind = ["archive", *([archive] if isinstance(archive, str) else [])] if archive else []
    return lambda text: f"{_key(digest, (*before, text, *behind))}.safetensors"


def _digest_of(model: torch.nn.Module) -> Any:
    """Of a model's configuration and weights, as of [`key_of`]."""
    config: Any = model.config
    entries = {
        name: value
        for name, value in config.to_diff_dict().items()
        if name not in ORIGINS and not name.startswith("_")
    }
    digest = hashlib.sha256(json.dumps(entries, sort_keys=True, default=str).encode())
    for name, tensor in sorted(model.state_dict().items()):
        step = max(1, tensor.numel() // SAMPLES)
        some = tensor.detach().flatten()[::step].to("cpu", torch.bfloat16).contiguous()
        digest.update(f"\0{name} {list(tensor.shape)}".encode())
        digest.update(some.view(torch.uint8).numpy())
    return digest


def _key(digest: Any, parts: Iterable[object]) -> str:
    own = digest.copy()
    own.update("\0".join(["", *map(str, parts)]).encode())
    return own.hexdigest()[:32]


def note(path: Path, **about) -> None:
    """Writes beside an entry, the file or folder `path`, what it is of, `about`, for [`listed`]."""
    with replacing(path.with_name(f"{path.name.partition('.')[0]}.json")) as file:
        file.write_text(json.dumps(about), encoding="utf-8")


def entries(folder: Path) -> list[Kept]:
    """What a cache folder has, the latest first; files without a note, too."""
    found: dict[tuple[str, str], list[Path]] = {}
    for inside, kind in KINDS.items():
        for path in sorted((folder / inside).glob("*")):
            found.setdefault((path.name.partition(".")[0], kind), []).append(path)
    made = []
    for (name, kind), paths in found.items():
        files = [file for path in paths for file in (path, *path.rglob("*")) if file.is_file()]
        stats = [file.stat() for file in files]
        made.append(
            Kept(
                name,
                kind,
                paths,
                sum(stat.st_size for stat in stats),
                max((stat.st_mtime for stat in stats), default=paths[0].stat().st_mtime),
                _about(paths),
            )
        )
    return sorted(made, key=lambda one: -one.written)


def listed(kept: Iterable[Kept]) -> str:
    """A table of entries, those that are `kept`, in this order."""
    lines = [f"{'name':<12}  {'kind':<6} {'size':>11}  {'age':<10}  of"]
    for one in kept:
        age = time.time() - one.written
        unit = next((unit for unit, seconds in UNITS.items() if age >= 2 * seconds), "seconds")
        of = [one.about.get("model"), *one.about.get("documents", ())]
        words = ", ".join(map(str, filter(None, of))) or "unknown: of an earlier version"
        lines.append(
            f"{one.name[:12]:<12}  {one.kind:<6} {one.bytes / 1e6:>8,.1f} MB  "
            f"{f'{max(age, 0) / UNITS[unit]:.0f} {unit}':<10}  {words}"
        )
    return "\n".join(lines)


def chosen(kept: list[Kept], names: Iterable[str]) -> list[Kept]:
    """Those of the entries that are `kept` with these `names` or beginnings of them; "all": every
    one. ValueError where a name is of none or of several."""
    found = []
    for name in names:
        fitting = [one for one in kept if name == "all" or one.name.startswith(name)]
        if not name or (name != "all" and len(fitting) != 1):
            raise ValueError(
                f"{len(fitting) if name else 'no'} entries begin with {name!r}: give one of "
                f"{', '.join(one.name[:12] for one in kept) or 'none, as nothing is kept'}, or all."
            )
        found += [one for one in fitting if one not in found]
    return found


def remove(kept: Iterable[Kept]) -> None:
    """Removes the entries `kept` with all of their files."""
    for path in (path for one in kept for path in one.paths):
        if path.is_dir():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)


def _about(paths: list[Path]) -> dict[str, Any]:
    file = next((path for path in paths if path.suffix == ".json"), None)
    try:
        about = json.loads(file.read_text("utf-8")) if file else {}
    except (OSError, ValueError):  # damaged: listed without it
        about = {}
    return about if isinstance(about, dict) else {}
