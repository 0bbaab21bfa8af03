"""Links and pictures of the pages, which are read in the repository and on the site: a hook of
mkdocs.

A link to a text file of the repository becomes a link to a page of the site that shows it, and one
to a notebook a link to its lesson (notebooks.py). What remains, folders, becomes the path. Pictures
that are elsewhere in the repository go with the pages that show them.
"""

import re
from functools import cache
from pathlib import Path

from mkdocs.structure.files import File, InclusionLevel

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs"
FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
RELATIVE_LINK = re.compile(r"(!?)\[([^\]\n]+)\]\((?!https?:|#)([^)\s]+)\)")
PICTURES, SOURCES, LESSONS = "pictures", "source", "lessons"  # the site's folders of them
LANGUAGES = {".py": "python", ".yaml": "yaml", ".sh": "bash", ".md": "markdown"}


def for_the_site(text: str, page: Path) -> str:
    """Relative links out of the site, seen from the `page`, turned into what a page can show; code
    blocks stay."""
    up = "../" * len(page.parent.relative_to(PAGES).parts)

    def rewrite(link: re.Match) -> str:
        picture, label, path = link.groups()
        file = (page.parent / path).resolve()
        if file.is_relative_to(PAGES):
            return link[0]
        if picture:
            return f"![{label}]({up}{PICTURES}/{file.name})"
        if file.suffix == ".ipynb":
            return f"[{label}]({up}{LESSONS}/{file.stem}.md)"
        if file.suffix in LANGUAGES:
            return f"[{label}]({up}{SOURCES}/{file.relative_to(ROOT)}.md)"
        return (
            f"`{file.relative_to(ROOT)}`"
            if file.name in label
            else (f"{label} (`{file.relative_to(ROOT)}`)")
        )

    parts = FENCE.split(text)
    return "".join(
        part if number % 2 else RELATIVE_LINK.sub(rewrite, part)
        for number, part in enumerate(parts)
    )


@cache
def linked() -> tuple[set[Path], set[Path]]:
    """The pictures and the text files outside of docs/ that a page shows or links to."""
    pictures, sources = set(), set()
    for page in PAGES.rglob("*.md"):
        for picture, _, path in RELATIVE_LINK.findall(
            FENCE.sub("", page.read_text(encoding="utf-8"))
        ):
            file = (page.parent / path).resolve()
            if not file.is_relative_to(PAGES):
                (pictures if picture else sources).add(file)
    return pictures, {file for file in sources if file.suffix in LANGUAGES}


def source_page(file: Path) -> str:
    """A text file of the repository as a page, which the search leaves out."""
    code, name = file.read_text(encoding="utf-8"), file.relative_to(ROOT)
    head = (
        f"---\ntitle: {name}\nhide: [navigation]\nsearch: {{exclude: true}}\n---\n\n# `{name}`\n\n"
    )
    return f"{head}````{LANGUAGES[file.suffix]}\n{code}\n````\n"


def on_files(files, config):
    """Adds the pictures and the text files to the site."""
    pictures, sources = linked()
    for picture in sorted(pictures):
        files.append(
            File.generated(config, f"{PICTURES}/{picture.name}", abs_src_path=str(picture))
        )
    for file in sorted(sources):
        path, hidden = f"{SOURCES}/{file.relative_to(ROOT)}.md", InclusionLevel.NOT_IN_NAV
        files.append(File.generated(config, path, content=source_page(file), inclusion=hidden))
    return files


def on_page_markdown(markdown, page, config, files):
    if page.file.generated_by:
        return markdown
    return for_the_site(markdown, PAGES / page.file.src_uri)
