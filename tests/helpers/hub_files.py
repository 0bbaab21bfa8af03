"""What is in the folder of a saved model."""

import json
import re
from pathlib import Path


def code_of(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.glob("*.py")}


def modules_of(folder: Path) -> list[str]:
    """The modules of the package that were copied there: all have one prefix."""
    names = [file.name for file in folder.glob("*.py")]
    prefix = re.match("hf_infini_[0-9a-f]{8}_", names[0])[0]
    assert all(name.startswith(prefix) for name in names)
    return sorted(name.removeprefix(prefix) for name in names)


def config_of(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())
