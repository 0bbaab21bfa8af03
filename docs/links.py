"""Links and pictures of the pages, which are read in the repository and on the site: a hook of mkdocs.

A link to a file of the repository becomes the file's path, because the site does not hold the repository. Pictures that lie
elsewhere in the repository go with the pages that show them.
"""

import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs"
FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
RELATIVE_LINK = re.compile(r"(!?)\[([^\]\n]+)\]\((?!https?:|#)([^)\s]+)\)")
PICTURES = "pictures"  # the site's folder of them


def for_the_site(text: str, folder: Path) -> str:
    """Relative links out of the site, seen from the page's `folder`, turned into what a page can show; code blocks stay as
    they are."""

    def rewrite(link: re.Match) -> str:
        picture, label, path = link.groups()
        file = (folder / path).resolve()
        if file.is_relative_to(PAGES):
            return link[0]
        if picture:
            return f"![{label}]({PICTURES}/{file.name})"
        return f"`{file.relative_to(ROOT)}`" if file.name in label else f"{label} (`{file.relative_to(ROOT)}`)"

    parts = FENCE.split(text)
    return "".join(part if number % 2 else RELATIVE_LINK.sub(rewrite, part) for number, part in enumerate(parts))


def on_files(files, config):
    """Adds the pictures of the pages that lie elsewhere in the repository to the site."""
    pictures = set()
    for text in PAGES.glob("*.md"):
        links = RELATIVE_LINK.findall(text.read_text(encoding="utf-8"))
        pictures |= {(text.parent / path).resolve() for picture, _, path in links if picture}
    for picture in sorted(picture for picture in pictures if not picture.is_relative_to(PAGES)):
        files.append(File.generated(config, f"{PICTURES}/{picture.name}", abs_src_path=str(picture)))
    return files


def on_page_markdown(markdown, page, config, files):
    return for_the_site(markdown, PAGES / Path(page.file.src_uri).parent)
