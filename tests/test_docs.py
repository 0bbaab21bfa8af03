"""The documentation's site builds without a warning and without a network, its links lead somewhere, it has every option and
recipe, and its figures and commands are no others than those of the pages of results and the recipes'."""

import html.parser
import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest
import torch
from transformers import AutoModelForCausalLM

from decoders import decoder
from hf_infini.configuration_infini_gpt2 import OPTIONS
from models import token_ids

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
NO_NETWORK = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
# The pages on which figures are given with their commands; the first draws on those behind the third
RESULTS = "measured quickstart memory-files study recall speed shakespeare notes/recall notes/study notes/speed robustness"
RESULTS = RESULTS.split()
RESULTS = [ROOT / "docs" / f"{name}.md" for name in RESULTS]
OTHERS = [page for page in (ROOT / "README.md", *PAGES) if page not in RESULTS]
CODE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def decimals(text: str) -> set[str]:
    """The decimal numbers outside of code, versions and arXiv's names, that is what a reader takes for a measurement."""
    return set(re.findall(r"(?<![\w.])(?!\d{4}\.\d{5})\d+\.\d+(?![\w.]*`|\.?\d)", CODE.sub("", text)))


def test_the_first_lines_of_the_readme_run(tmp_path):
    """With a small model of the same kind in the place of the one that would be downloaded."""
    model = decoder("llama")
    model.save_pretrained(tmp_path / "stock")
    code = re.search("```python\n(.*?)\n```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)[1]
    assert code.count("HuggingFaceTB/SmolLM2-135M-Instruct") == 1
    names = {}
    exec(code.replace("HuggingFaceTB/SmolLM2-135M-Instruct", str(tmp_path / "stock")), names)
    patched, ids = names["model"], token_ids(1, 400)
    with torch.no_grad():  # beyond one segment, inside the window
        torch.testing.assert_close(patched(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)
    assert patched.generate(ids, max_new_tokens=3, do_sample=False).shape == (1, 403)
    patched.save_pretrained(tmp_path / "patched")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "patched")
    assert type(again) is type(patched) and again.config.sink_tokens == 4
    names["hf_infini"].unpatch_model(patched)
    with torch.no_grad():
        assert type(patched) is type(model) and torch.equal(patched(ids).logits, model(ids).logits)


class Page(html.parser.HTMLParser):
    """A page's anchors, its links, and what a browser loads with it."""

    def __init__(self, file: Path):
        super().__init__()
        self.anchors, self.links, self.loaded = set(), [], []
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.anchors |= {attributes[name] for name in ("id", "name") if attributes.get(name)}
        if tag == "a" and "href" in attributes:
            self.links.append(attributes["href"])
        elif tag == "link" or "src" in attributes:
            self.loaded.append(attributes.get("src") or attributes["href"])


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, **NO_NETWORK, "NO_MKDOCS_2_WARNING": "1"}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert not re.search(r"^(WARNING|ERROR)", run.stderr, re.MULTILINE), run.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site) -> dict[Path, Page]:
    return {file: Page(file) for file in sorted(site.rglob("*.html"))}


@pytest.mark.slow
def test_every_link_resolves_and_nothing_comes_from_elsewhere(site, pages):
    assert len(pages) == len(PAGES) + 1  # and 404.html
    lost, foreign, followed = [], [], 0
    for file, page in pages.items():
        foreign += [(file.name, address) for address in page.loaded if re.match(r"(https?:)?//", address)]
        for address in page.links + page.loaded:
            if re.match(r"[a-z]+:", address):
                continue
            path, anchor = urldefrag(unquote(address))
            start = site if path.startswith("/") else file.parent
            target = (start / path.lstrip("/")).resolve() if path else file
            target = target / "index.html" if target.is_dir() else target
            followed += 1
            if not target.is_file() or (anchor and target.suffix == ".html" and anchor not in pages[target].anchors):
                lost.append((file.name, address))
    assert not foreign and not lost and followed > 1000


def test_every_option_has_its_section():
    text = (ROOT / "docs" / "options.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## `(\w+)`$", text, re.MULTILINE)
    assert sorted(headings) == sorted(OPTIONS)
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        if section.startswith("`"):
            assert "*Cost*" in section or "costs" in section or "Choosing the segment length" in section, section


@pytest.mark.slow
def test_every_recipe_is_on_its_page(site):
    text = (site / "recipes.html").read_text(encoding="utf-8")
    missing = [recipe.name for recipe in sorted((ROOT / "recipes").glob("*.py")) if f"<code>{recipe.name}" not in text]
    missing = [name for name in missing if f"<code>recipes/{name}" not in text]
    assert not missing


def test_every_public_name_is_on_an_api_page(pages):
    import hf_infini

    anchors = set().union(*(page.anchors for page in pages.values()))
    assert not [name for name in hf_infini.__all__ if f"hf_infini.{name}" not in anchors]


def test_figures_and_tables_are_made_from_the_package(site):
    assert {file.stem for file in (site / "figures").glob("*.png")} == {"reach", "growth", "memory"}
    text = re.sub(r"<[^>]+>", " ", (site / "options.html").read_text(encoding="utf-8"))
    # float32; 4 layers of 128 keys and values, a memory of 64 × 64 + 64 a head, and 24 bytes of counters
    size = 4 * (2 * 128 * 128 + 2 * (64 * 64 + 64)) * 4 + 4 * 24
    assert f"{size / 1024:,.1f}" in text and "<!-- table" not in text and "readme:" not in text


@pytest.mark.parametrize("page", OTHERS, ids=lambda page: page.stem)
def test_figures_in_the_text_are_those_of_the_results(page):
    """A decimal number that no page of results has is one that nobody keeps up."""
    known = set(re.findall(r"\d+\.\d+", "\n".join(file.read_text(encoding="utf-8") for file in RESULTS)))
    assert not decimals(page.read_text(encoding="utf-8")) - known


def test_the_figures_of_measured_are_those_of_the_pages_that_tell_how():
    measured, _, _, *pages = (file.read_text(encoding="utf-8") for file in RESULTS)
    known = set(re.findall(r"\d+\.\d+", "\n".join(pages)))
    assert not decimals(measured) - known


def commands() -> dict[str, set[str]]:
    """Recipe → the flags that README and pages give it."""
    found = {}
    for file in (ROOT / "README.md", *PAGES):
        for block in re.findall(r"^```bash\n(.*?)^```$", file.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                for recipe, words in re.findall(r"recipes/(\w+)\.py( .*)?", line):
                    flags = (word for word in shlex.split(words, comments=True) if word.startswith("--"))
                    found.setdefault(recipe, set()).update(flags)
    return found


@pytest.mark.parametrize(("recipe", "flags"), commands().items(), ids=lambda value: value if isinstance(value, str) else "")
def test_commands_have_flags_that_exist(recipe, flags, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", [recipe, "--help_all" if recipe == "train" else "--help"])
    specification = importlib.util.spec_from_file_location(recipe, ROOT / "recipes" / f"{recipe}.py")
    module = importlib.util.module_from_spec(specification)
    monkeypatch.setitem(sys.modules, recipe, module)  # dataclasses look their module up; others may have loaded their own
    specification.loader.exec_module(module)
    with pytest.raises(SystemExit):
        module.main()
    assert not flags - set(re.findall(r"--\w+", capsys.readouterr().out))


@pytest.mark.slow
def test_the_counts_of_bad_inputs_are_those_of_the_suites():
    page = (ROOT / "docs" / "robustness.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| .*\(\.\./(tests/\S+\.py)\).* \| (\d+) \|$", page, re.MULTILINE)
    shown = {file: int(count) for file, count in rows}
    assert shown.keys() >= {str(file.relative_to(ROOT)) for file in (ROOT / "tests" / "bad_input").glob("test_*.py")}
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *shown]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    lines = [line.partition("::")[0] for line in run.stdout.splitlines() if "::" in line]
    found = {file: lines.count(file) for file in shown}
    # A twentieth, so that not every new case has to change the page
    assert {file: count for file, count in found.items() if abs(shown[file] - count) > count / 20} == {}
