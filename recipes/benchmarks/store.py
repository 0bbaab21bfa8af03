"""The JSON file of a benchmark: every cell is written as soon as it is measured, and not measured again after a kill.

`{"options", "date", "hardware", "versions", "device", "threads", "parts": {part: [{"cell", "rows"}, …]}}`. A cell is the
dict that says what was measured and how, so other options make other cells, and stand in the file beside the first.
"""

import json
from collections.abc import Callable
from pathlib import Path

from cli import UserError
from support.stages import write_json

SAME = ("hardware", "versions", "device", "threads")


class Results:
    """
    Args:
        file: read where it exists, written after every cell.
        setting: where things are measured: `hardware`, `versions`, `device` and `threads`, JSON-safe. A file of another
            setting is a UserError, since its figures would stand in one table with these.
        again: measure anew what the file holds.
    """

    def __init__(self, file: Path, setting: dict, options: dict, again: bool = False):
        self.file, self.again = Path(file), again
        self.content = {"options": options, **setting, "parts": {}}
        if self.file.is_file():
            self.content["parts"] = self._parts_of_file(setting)

    def _parts_of_file(self, setting: dict) -> dict:
        try:
            found = json.loads(self.file.read_text(encoding="utf-8"))
            parts = found["parts"]
        except (OSError, ValueError, KeyError, TypeError):
            raise UserError(f"{self.file} was not written by this recipe: choose another --out") from None
        changed = [name for name in SAME if found.get(name) != setting[name]]
        different = [f"{name} {found.get(name)!r}, now {setting[name]!r}" for name in changed]
        if different:
            raise UserError(f"{self.file} was measured with {'; '.join(different)}: choose another --out")
        return parts

    def rows(self, part: str, cell: dict, measure: Callable[[], list[dict]]) -> list[dict]:
        """The rows of a cell, measured by `measure()` unless the file holds them."""
        cells = self.content["parts"].setdefault(part, [])
        kept = next((entry for entry in cells if entry["cell"] == cell), None)
        if kept and not self.again:
            return kept["rows"]
        rows = measure()
        if kept:
            cells.remove(kept)
        cells.append({"cell": cell, "rows": rows})
        self.file.parent.mkdir(parents=True, exist_ok=True)
        write_json(self.file, self.content)
        return rows
