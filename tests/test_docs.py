"""The documentation's site builds without a warning and without a network, it has every option and
public name, its programs run, and its figures and commands are no others than those of the pages of
results and the recipes'."""

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import lunr
import lunr.stemmer
import pytest
import torch
from transformers import BatchEncoding

import hf_infini
from corpora.tokenization import train_bpe
from decoders import decoder
from hf_infini import InfiniCache, InfiniGPT2Config, patch_model
from models import token_ids
from pages import PAGES, ROOT, blocks, programs
from running import sample_text

NO_NETWORK = dict.fromkeys(
    ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9"
)
# The pages on which figures are given with their commands
RESULTS = sorted((ROOT / "docs" / "notes").glob("*.md"))
OTHERS = [page for page in (ROOT / "README.md", *PAGES) if page not in RESULTS]
CODE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def decimals(text: str) -> set[str]:
    """The decimal numbers outside of code, versions and arXiv's names, that is what a reader takes
    for a measurement."""
    return set(
        re.findall(r"(?<![\w.])(?!\d{4}\.\d{5})\d+\.\d+(?![\w.]*`|\.?\d)", CODE.sub("", text))
    )


def test_many_questions_of_one_text(tmp_path, monkeypatch):
    """The page's two programs: an answer is that to the whole text."""
    monkeypatch.chdir(tmp_path)
    reading, copying = (
        code
        for code in programs("docs/memory-files.md")
        if "import Reader" in code or "deepcopy" in code
    )
    options = {"segment_length": 8, "local_segments": 1, "kept_tokens": 4}
    model, ids = patch_model(decoder("llama", vocab_size=400), **options).eval(), token_ids(1, 50)
    asked = BatchEncoding(
        {"input_ids": ids[:, 45:], "attention_mask": torch.ones(1, 5, dtype=torch.long)}
    )
    names = {"model": model, "ids": ids[:, :45], "tokenizer": lambda text, return_tensors: asked}
    with torch.no_grad():
        exec(
            copying.replace("4096", "16").replace(
                "max_new_tokens=200", "max_new_tokens=6, do_sample=False"
            ),
            names,
        )
        wanted = model.generate(ids, max_new_tokens=6, do_sample=False)
    assert torch.equal(names["output"][0, -6:], wanted[0, -6:])
    names |= {"text": sample_text()[:400], "tokenizer": train_bpe([sample_text()], 400)}
    exec(reading.replace("max_new_tokens=200", "max_new_tokens=6, do_sample=False"), names)
    one = names["reader"].generate(
        names["text"] + "\nThe author", max_new_tokens=6, do_sample=False
    )
    assert (
        names["answers"][:1] == one
        and InfiniCache.from_pretrained("book.safetensors", model).nbytes()
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, **NO_NETWORK, "NO_MKDOCS_2_WARNING": "1"}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert not re.search(r"^(WARNING|ERROR)", run.stderr, re.MULTILINE), run.stderr
    return folder


@pytest.mark.slow
def test_every_page_is_there_and_loads_nothing_from_elsewhere(site):
    """That links lead somewhere mkdocs says itself (`validation` and `strict` in mkdocs.yml)."""
    wanted = {page.relative_to(ROOT / "docs").with_suffix(".html") for page in PAGES}
    wanted |= {
        Path("lessons", f"{notebook.stem}.html") for notebook in (ROOT / "recipes").glob("*.ipynb")
    }
    pages = {
        file.relative_to(site): file.read_text(encoding="utf-8") for file in site.rglob("*.html")
    }
    assert len(wanted) > 30 and not wanted - pages.keys()
    loaded = re.compile(r'<(?:link|script|img|iframe)\b[^>]*(?:src|href)="((?:https?:)?//[^"]*)"')
    assert not {page: found for page, text in pages.items() if (found := loaded.findall(text))}
    shown = {name for text in pages.values() for name in re.findall(r'id="hf_infini\.(\w+)"', text)}
    assert not {*hf_infini.__all__} - shown  # every public name is on an API page


# What people look for, and the page that answers
FOUND = {
    "summarise": "limits ask",
    "summarize": "limits",
    "summaries": "limits index",
    "LangChain": "libraries",
    "RAG": "libraries",
    "Ollama": "libraries",
    "GPU": "quickstart",
    "batch": "memory-files",
    "multi-turn": "ask",
    "chat": "ask",
    "LoRA": "fine-tune",
    "vLLM": "libraries",
    "PDF": "ask inicio-rapido",
    "kvpress": "which",
    "GGUF": "ask libraries",
    "traceback": "ask",
    "cache_tokens": "options",
}


@pytest.mark.slow
def test_search_leads_to_the_pages_that_people_use(site):
    """By lunr, as in the browser: no stems, all words, the last one as a beginning."""
    found = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    names = ("location", "title", "text")
    sections = [
        ({name: re.sub("<[^>]+>", " ", part[name]) for name in names}, {"boost": part["boost"]})
        for part in found["docs"]
    ]
    builder = lunr.get_default_builder()
    for pipeline in (builder.pipeline, builder.search_pipeline):
        pipeline.remove(lunr.stemmer.stemmer)
    weights = [
        {"field_name": name, "boost": found["config"]["fields"][name]["boost"]}
        for name in ("title", "text")
    ]
    index = lunr.lunr("location", weights, sections, builder=builder)
    first = {}
    for words in FOUND:
        query = " ".join(f"+{word}" for word in words.lower().split("-")) + "*"
        first[words] = index.search(query)[0]["ref"].partition(".html")[0]
    wrong = {words: page for words, page in first.items() if page not in FOUND[words].split()}
    assert not wrong, wrong


def test_every_option_has_its_section():
    text = (ROOT / "docs" / "options.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## `(\w+)`$", text, re.MULTILINE)
    assert sorted(headings) == sorted(["cache_tokens", *InfiniGPT2Config.own_options()])


def test_figures_in_the_text_are_those_of_the_results():
    """A decimal number that no page of results has is one that nobody keeps up."""
    # Python's
    known = {"3.13"}.union(
        *(re.findall(r"\d+\.\d+", file.read_text(encoding="utf-8")) for file in RESULTS)
    )
    unknown = {page.name: decimals(page.read_text(encoding="utf-8")) - known for page in OTHERS}
    assert not any(unknown.values()), unknown


def test_what_people_use_is_eleven_short_pages():
    """Everything else is the research log, or made from docstrings."""
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = re.findall(
        r": ([\w-]+\.md)$", text.partition("- Use:")[2].partition("- Lessons:")[0], re.MULTILINE
    )
    words = {
        page: len((ROOT / "docs" / page).read_text(encoding="utf-8").split()) for page in pages
    }
    assert 8 <= len(pages) <= 11 and max(words.values()) <= 900, words
    assert {page.name for page in (ROOT / "docs").glob("*.md")} - words.keys() == {"families.md"}


def given_flags() -> dict[str, set[str]]:
    """Recipe → the flags that README and pages give it."""
    found = {}
    for page in (ROOT / "README.md", *PAGES):
        for text in (text for language, text in blocks(page) if language == "bash"):
            for line in text.replace("\\\n", " ").splitlines():
                for recipe, words in re.findall(r"recipes/(\w+)\.py( .*)?", line):
                    flags = (
                        word for word in shlex.split(words, comments=True) if word.startswith("--")
                    )
                    found.setdefault(recipe, set()).update(flags)
    return found


def test_commands_have_flags_that_exist(capsys, monkeypatch):
    unknown = {}
    for recipe, flags in given_flags().items():
        specification = importlib.util.spec_from_file_location(
            recipe, ROOT / "recipes" / f"{recipe}.py"
        )
        module = importlib.util.module_from_spec(specification)
        # dataclasses look their module up; others may have their own
        monkeypatch.setitem(sys.modules, recipe, module)
        specification.loader.exec_module(module)
        # a recipe without rare options says in stderr that it has no second one
        for flag in ("--help", "--help_all"):
            monkeypatch.setattr(sys, "argv", [recipe, flag])
            with pytest.raises(SystemExit):
                module.main()
        unknown[recipe] = flags - set(re.findall(r"--\w+", capsys.readouterr().out))
    assert len(unknown) > 10 and not any(unknown.values()), unknown
