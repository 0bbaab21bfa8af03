"""The lessons: the notebooks of recipes/ as pages of the site, with their outputs, and as files: a
hook of mkdocs.

Formulas become MathML, which browsers show without a script.
"""

import html
import json
import re
from pathlib import Path

from latex2mathml.converter import convert
from mkdocs.structure.files import File

RECIPES, LESSONS = Path(__file__).parents[1] / "recipes", "lessons"
FORMULA = re.compile(r"\$\$(.+?)\$\$|\$([^$\n]+)\$", re.DOTALL)
TITLE = re.compile(r"^# .*$", re.MULTILINE)
# Language of the page → what its title is followed by
OFFERS = {"en": "Download the notebook", "pt-BR": "Baixe o notebook"}
PORTUGUESE = {"atencao_passo_a_passo", "guardado_e_lembrado", "inicio_rapido", "inicio-rapido"}


def language_of(name: str) -> str:
    """Of a page or a notebook, by its name."""
    return "pt-BR" if Path(name).stem in PORTUGUESE else "en"


def with_formulas(text: str) -> str:
    """Markdown whose TeX has become MathML."""

    def formula(match: re.Match) -> str:
        display, inline = match.groups()
        made = convert(
            " ".join((display or inline).split()), display="block" if display else "inline"
        )
        # at a line's beginning <math> would be a block of HTML
        return made if display else f"<span>{made}</span>"

    return FORMULA.sub(formula, text)


def output(data: dict) -> str:
    """An output of a cell as HTML: a picture, a table, or text."""
    if data["output_type"] == "stream":
        return f"<pre>{html.escape(''.join(data['text']).rstrip())}</pre>"
    shown = {kind: "".join(content) for kind, content in data["data"].items()}
    if "image/png" in shown:
        return (
            f'<img alt="{html.escape(shown["text/plain"])}" '
            f'src="data:image/png;base64,{shown["image/png"].strip()}">'
        )
    return (
        shown["text/html"]
        if "text/html" in shown
        else f"<pre>{html.escape(shown['text/plain'])}</pre>"
    )


def lesson(file: Path) -> str:
    """The notebook's page."""
    parts = []
    for cell in json.loads(file.read_text(encoding="utf-8"))["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(with_formulas(text))
            continue
        parts.append(f"```python\n{text}\n```")
        outputs = "\n".join(map(output, cell["outputs"]))
        if outputs:
            # Blank lines would end the block of HTML
            parts.append('<div class="output">\n' + re.sub(r"\n\s*\n", "\n", outputs) + "\n</div>")
    offer = f"[{OFFERS[language_of(file.name)]}]({file.name}): `recipes/{file.name}`"
    return TITLE.sub(lambda title: f"{title[0]}\n\n{offer}", "\n\n".join(parts), count=1)


def on_files(files, config):
    for file in sorted(RECIPES.glob("*.ipynb")):
        files.append(File.generated(config, f"{LESSONS}/{file.stem}.md", content=lesson(file)))
        files.append(File.generated(config, f"{LESSONS}/{file.name}", abs_src_path=str(file)))
    return files


def on_post_page(output, page, config):
    """A page in another language says so, to screen readers and browsers that translate."""
    return output.replace('<html lang="en"', f'<html lang="{language_of(page.file.src_uri)}"', 1)
