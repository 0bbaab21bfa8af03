"""Sections of README.md inside the site's pages, so that one text is kept up: a hook of mkdocs.

A line `<!-- readme: Options -->` in a page becomes the text under `## Options`. Pictures go with it. A link to a file of the
repository becomes the file's path, because the site does not hold the repository.
"""

import re
from pathlib import Path

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
PLACE = re.compile(r"^<!-- readme: (.+) -->$", re.MULTILINE)
HEADING = re.compile(r"^## (.+)\n", re.MULTILINE)
FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
RELATIVE_LINK = re.compile(r"(!?)\[([^\]\n]+)\]\((?!https?:|#)([^)\s]+)\)")
PICTURES = "readme"  # the site's folder of them


def sections(text: str) -> dict[str, str]:
    """Heading of the second level → the text below it."""
    _, *parts = HEADING.split(FENCE.sub(lambda code: code[0].replace("\n## ", "\n\0## "), text))
    return {heading: body.replace("\0", "").strip() for heading, body in zip(parts[::2], parts[1::2], strict=True)}


def for_the_site(text: str) -> str:
    """Relative links turned into what a page of the site can show; code blocks stay as they are."""

    def rewrite(link: re.Match) -> str:
        picture, label, path = link.groups()
        if picture:
            return f"![{label}]({PICTURES}/{Path(path).name})"
        return f"`{path}`" if Path(path).name in label else f"{label} (`{path}`)"

    parts = FENCE.split(text)
    return "".join(part if number % 2 else RELATIVE_LINK.sub(rewrite, part) for number, part in enumerate(parts))


def on_files(files, config):
    """Adds the README's pictures to the site."""
    for picture, _, path in RELATIVE_LINK.findall((ROOT / "README.md").read_text(encoding="utf-8")):
        if picture:
            name = f"{PICTURES}/{Path(path).name}"
            files.append(File.generated(config, name, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown, page, config, files):
    found = sections((ROOT / "README.md").read_text(encoding="utf-8"))

    def section(place: re.Match) -> str:
        if place[1] not in found:
            known = ", ".join(found)
            raise PluginError(f"{page.file.src_uri} asks for the README's section {place[1]!r}, but it has: {known}")
        return for_the_site(found[place[1]])

    return PLACE.sub(section, markdown)
