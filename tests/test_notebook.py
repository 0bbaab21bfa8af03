"""The notebook runs from top to bottom, its own checks hold, and what it shows in the repository is what it prints."""

from pathlib import Path

import nbformat
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[1] / "recipes" / "attention_step_by_step.ipynb"


def printed(notebook) -> list[str]:
    """What the cells printed, without warnings of the environment."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return [output.text for output in outputs if output.output_type == "stream" and output.name == "stdout"]


def test_notebook_runs_and_prints_what_it_shows(tmp_path):
    stored, fresh = (nbformat.read(NOTEBOOK, as_version=4) for _ in range(2))
    resources = {"metadata": {"path": str(tmp_path)}}  # it needs no file of the repository
    NotebookClient(fresh, timeout=300, kernel_name="python3", resources=resources).execute()
    assert len(printed(stored)) == 3 and printed(fresh) == printed(stored)
    pictures = [o for cell in fresh.cells for o in cell.get("outputs", []) if "image/png" in o.get("data", {})]
    assert len(pictures) == 4
