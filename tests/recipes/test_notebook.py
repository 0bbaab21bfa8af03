"""Each notebook runs from top to bottom, its own checks hold, and what it shows in the repository is what it prints."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

RECIPES = Path(__file__).parents[2] / "recipes"


def printed(notebook) -> list[str]:
    """What the cells printed, without warnings of the environment and the line breaks of a progress bar."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    texts = [output.text for output in outputs if output.output_type == "stream" and output.name == "stdout"]
    return [text for text in texts if text.strip()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "prints", "pictures", "beside"), [("attention_step_by_step", 3, 4, False), ("quickstart", 4, 1, True)]
)
def test_notebook_runs_and_prints_what_it_shows(name, prints, pictures, beside, tmp_path, monkeypatch):
    """The first needs no file of the repository, the second what is beside it, where Jupyter starts it."""
    monkeypatch.setenv("HF_HOME", str(tmp_path))  # neither the Hub nor what somebody kept of it
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    stored, fresh = (nbformat.read(RECIPES / f"{name}.ipynb", as_version=4) for _ in range(2))
    resources = {"metadata": {"path": str(RECIPES if beside else tmp_path)}}
    NotebookClient(fresh, timeout=300, kernel_name="python3", resources=resources).execute()
    assert len(printed(stored)) == prints and printed(fresh) == printed(stored)
    assert sum("image/png" in o.get("data", {}) for cell in fresh.cells for o in cell.get("outputs", [])) == pictures
