"""What is in the folder of a saved model."""

import json
from pathlib import Path


def code_of(folder: Path) -> dict[str, bytes]:
    """All code, by its path in the folder."""
    files = [*folder.glob("*.py"), *folder.glob("hf_infini_*/*.py")]
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in files}


def modules_of(folder: Path) -> list[str]:
    """The modules of the package that were copied there."""
    return sorted(file.name for file in folder.glob("hf_infini_*/*.py"))


def config_of(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())
