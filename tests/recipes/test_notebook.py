"""Each notebook runs from top to bottom, its own checks hold, what it shows in the repository is
what it prints, and its translation differs only in the text between the cells."""

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

RECIPES = Path(__file__).parents[2] / "recipes"
TRANSLATIONS = {
    "attention_step_by_step": "atencao_passo_a_passo",
    "kept_and_recalled": "guardado_e_lembrado",
    "quickstart": "inicio_rapido",
}
LANGUAGES = 'language = "en"', 'language = "pt"'  # of the text that a lesson reads


def read(name: str):
    return nbformat.read(RECIPES / f"{name}.ipynb", as_version=4)


def printed(notebook, stream: str = "stdout") -> dict[str, str]:
    """What the cells printed, without the line breaks of a progress bar around it."""
    return {
        cell.id: output.text.strip()
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if output.output_type == "stream" and output.name == stream
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "prints", "pictures", "beside", "writes"),
    [
        ("attention_step_by_step", 5, 8, False, {}),
        ("guardado_e_lembrado", 12, 3, False, {}),
        ("kept_and_recalled", 12, 3, False, {}),
        ("quickstart", 7, 1, True, {"cell-09": "[A cidade de São Paulo]", "cell-11": "…"}),
    ],
)
def test_notebook_runs_and_prints_what_it_shows(
    name, prints, pictures, beside, writes, tmp_path, monkeypatch
):
    """The last needs what is beside it, where Jupyter starts it, the others no file of the
    repository."""
    monkeypatch.setenv("HF_HOME", str(tmp_path))  # neither the Hub nor what somebody kept of it
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    stored, fresh = read(name), read(name)
    resources = {"metadata": {"path": str(RECIPES if beside else tmp_path)}}
    NotebookClient(
        fresh, timeout=300, kernel_name="python3", resources=resources, coalesce_streams=True
    ).execute()
    shown, now = printed(stored), printed(fresh)
    assert len(shown) == prints and now.keys() == shown.keys()
    # What a model writes that was trained here is not the same on every machine
    assert {
        cell: text for cell, text in now.items() if cell not in writes and text != shown[cell]
    } == {}
    assert all(
        now[cell].startswith(text) and len(now[cell]) > len(text) + 40
        for cell, text in writes.items()
    )
    assert (
        sum(
            "image/png" in o.get("data", {})
            for cell in fresh.cells
            for o in cell.get("outputs", [])
        )
        == pictures
    )
    # What else libraries say, such as an installed torchao of its kernels, is of the environment
    assert not printed(stored, "stderr")
    assert not re.findall(
        r".*(?:Warning|\[transformers\]).*", "".join(printed(fresh, "stderr").values())
    )


@pytest.mark.parametrize(("name", "translation"), TRANSLATIONS.items())
def test_a_translation_has_the_same_cells_and_outputs(name, translation):
    """Only one of the two is executed, and a changed cell is copied into the other with what it
    shows; but a lesson that reads a text in its own language is executed in both."""
    original, translated = read(name).cells, read(translation).cells
    own_text = any(LANGUAGES[0] in cell.source for cell in original)
    for one, other in zip(original, translated, strict=True):
        assert one.cell_type == other.cell_type and one.id == other.id
        if one.cell_type == "code":
            assert one.source.replace(*LANGUAGES) == other.source, one.id
            assert own_text or one.outputs == other.outputs, one.id
        else:
            assert one.source != other.source
            # The same sections, formulas and code
            for kind in (r"^#+", r"\$\$.*?\$\$", r"`hf_infini[^`]*`|`[a-z_]+=[^`]*`"):
                flags = re.MULTILINE | re.DOTALL
                assert re.findall(kind, one.source, flags) == re.findall(
                    kind, other.source, flags
                ), one.id
