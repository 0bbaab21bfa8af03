"""Sections of README.md inside the site's pages, so that one text is kept up: a hook of mkdocs.

A line `<!-- readme: Options -->` in a page becomes the text under `## Options`. Pictures of the repository go with the pages
that show them. A link to a file of the repository becomes the file's path, because the site does not hold the repository.
"""

import re
from pathlib import Path

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs"
PLACE = re.compile(r"^<!-- readme: (.+) -->$", re.MULTILINE)
HEADING = re.compile(r"^## (.+)\n", re.MULTILINE)
FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
RELATIVE_LINK = re.compile(r"(!?)\[([^\]\n]+)\]\((?!https?:|#)([^)\s]+)\)")
PICTURES = "readme"  # the site's folder of them


def sections(text: str) -> dict[str, str]:
    """Heading of the second level → the text below it."""
    _, *parts = HEADING.split(FENCE.sub(lambda code: code[0].replace("\n## ", "\n\0## "), text))
    return {heading: body.replace("\0", "").strip() for heading, body in zip(parts[::2], parts[1::2], strict=True)}


def for_the_site(text: str, folder: Path = ROOT) -> str:
    """Relative links out of the site, seen from `folder`, turned into what a page can show; code blocks stay as they are."""

    def rewrite(link: re.Match) -> str:
        picture, label, path = link.groups()
        file = (folder / path).resolve()
        if file.is_relative_to(PAGES):
            return link[0] if folder != ROOT else f"{picture}[{label}]({file.relative_to(PAGES)})"
        if picture:
            return f"![{label}]({PICTURES}/{file.name})"
        return f"`{file.relative_to(ROOT)}`" if file.name in label else f"{label} (`{file.relative_to(ROOT)}`)"

    parts = FENCE.split(text)
    return "".join(part if number % 2 else RELATIVE_LINK.sub(rewrite, part) for number, part in enumerate(parts))


def on_files(files, config):
    """Adds the pictures of README and pages that lie elsewhere in the repository to the site."""
    pictures = set()
    for text in (ROOT / "README.md", *PAGES.glob("*.md")):
        links = RELATIVE_LINK.findall(text.read_text(encoding="utf-8"))
        pictures |= {(text.parent / path).resolve() for picture, _, path in links if picture}
    for picture in sorted(picture for picture in pictures if not picture.is_relative_to(PAGES)):
        files.append(File.generated(config, f"{PICTURES}/{picture.name}", abs_src_path=str(picture)))
    return files


def on_page_markdown(markdown, page, config, files):
    found = sections((ROOT / "README.md").read_text(encoding="utf-8"))

    def section(place: re.Match) -> str:
        if place[1] not in found:
            known = ", ".join(found)
            raise PluginError(f"{page.file.src_uri} asks for the README's section {place[1]!r}, but it has: {known}")
        return for_the_site(found[place[1]])

    return PLACE.sub(section, for_the_site(markdown, PAGES / Path(page.file.src_uri).parent))
