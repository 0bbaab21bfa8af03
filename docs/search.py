"""What the site's search shows first: the pages that people use, before the API, the lessons and
the research log. A hook of mkdocs."""

# Factors of a page's rank, by its folder; a page's own `search` in its front matter goes above
BOOST = {"": 4, "api": 0.5, "lessons": 0.5, "notes": 0.25}


def on_page_markdown(markdown, page, config, files):
    folder = page.file.src_uri.rpartition("/")[0]
    if folder in BOOST:
        page.meta.setdefault("search", {"boost": BOOST[folder]})
    return markdown
