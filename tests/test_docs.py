"""The documentation's site builds without a warning and without a network, it has every option and
public name, its programs run, and its figures and commands are no others than those of the pages of
results and the recipes'."""

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    BatchEncoding,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)

import hf_infini
from cases import assert_same_gradients
from corpora.tokenization import train_bpe
from decoders import decoder
from hf_infini import InfiniCache, InfiniGPT2Config, patch_model
from models import token_ids
from running import sample_text

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
NO_NETWORK = dict.fromkeys(
    ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9"
)
# The pages on which figures are given with their commands
RESULTS = (
    "study study-options recall recall-steps speed speed-tables shakespeare robustness "
    "kept-tokens pretrained"
).split()
RESULTS += ["conversion", "mqar", "recipes", "memory-files", "fine-tune"]
RESULTS = [ROOT / "docs" / "notes" / f"{name}.md" for name in RESULTS]
OTHERS = [page for page in (ROOT / "README.md", *PAGES) if page not in RESULTS]
CODE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def decimals(text: str) -> set[str]:
    """The decimal numbers outside of code, versions and arXiv's names, that is what a reader takes
    for a measurement."""
    return set(
        re.findall(r"(?<![\w.])(?!\d{4}\.\d{5})\d+\.\d+(?![\w.]*`|\.?\d)", CODE.sub("", text))
    )


def programs(page: str) -> list[str]:
    return re.findall("```python\n(.*?)\n```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)


def test_the_first_lines_of_the_readme_run(tmp_path):
    """With a small model of the same kind in the place of the one that would be downloaded."""
    model, tokenizer = decoder("llama", vocab_size=400), train_bpe([sample_text()], 400)
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "stock")
    code = programs("README.md")[0]
    assert code == programs("docs/index.md")[0]
    names = {"text": sample_text()}
    for shown, here in (
        ("HuggingFaceTB/SmolLM2-135M-Instruct", str(tmp_path / "stock")),
        ("text)", "text, rows=2)"),
    ):
        assert code.count(shown) == 1
        code = code.replace(shown, here)
    exec(code, names)
    # no bos, no eos: those are not kept
    patched, ids = names["model"], token_ids(1, 500).clamp(min=3)
    assert all(layer.self_attn.keep_weight.any() for layer in patched.model.layers)
    with torch.no_grad():  # beyond one segment, inside the cache
        torch.testing.assert_close(patched(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)
    assert patched.generate(ids, max_new_tokens=3, do_sample=False).shape == (1, 503)
    patched.save_pretrained(tmp_path / "patched")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "patched")
    assert type(again) is type(patched) and again.config.sink_tokens == 4
    names["hf_infini"].unpatch_model(patched)
    with torch.no_grad():
        assert type(patched) is type(model) and torch.equal(patched(ids).logits, model(ids).logits)


def test_many_questions_of_one_text(tmp_path, monkeypatch):
    """The page's two programs: an answer is that to the whole text."""
    monkeypatch.chdir(tmp_path)
    reading, copying = (
        code for code in programs("docs/memory-files.md") if "Reader(" in code or "deepcopy" in code
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


@pytest.mark.slow
def test_the_program_that_fine_tunes_runs(tmp_path, monkeypatch):
    """With a small model of the same kind in the place of the one that would be downloaded."""
    letters = Tokenizer(
        models.WordLevel(
            {letter: number for number, letter in enumerate("?abcdefgh")}, unk_token="?"
        )
    )
    letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=letters).save_pretrained(tmp_path / "stock")
    decoder("llama").save_pretrained(tmp_path / "stock")
    (tmp_path / "livro.txt").write_text("abacadefhg" * 500, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    code = programs("docs/fine-tune.md")[0]
    assert code.count("HuggingFaceTB/SmolLM2-135M") == 1
    names = {}
    exec(code.replace("HuggingFaceTB/SmolLM2-135M", str(tmp_path / "stock")), names)
    assert len(names["rows"]) == 2 and names["trainer"].state.global_step == 3
    tuned, stock = (
        AutoModelForCausalLM.from_pretrained("tuned"),
        AutoModelForCausalLM.from_pretrained("stock"),
    )
    moved = [(layer.self_attn.gate.weight + 4).abs().max().item() for layer in tuned.model.layers]
    # Adam's steps are about the learning rate, which falls to a third in three steps: 0.01 for the
    # gates, 1e-4 for the rest
    assert min(moved) > 0.005
    assert 0 < (tuned.lm_head.weight - stock.lm_head.weight).abs().max().item() < 0.001
    assert tuned.config.segment_length == 256 and names["tokenizer"]("ab").input_ids == [1, 2]


def long_document(tokens: int):
    """A patched model without dropout, and one text of so many tokens, of which each has a
    target."""
    model = patch_model(decoder("llama"), segment_length=8, local_segments=1).train()
    return model, token_ids(1, tokens + 1)[0]


def one_pass(model, ids) -> list[torch.Tensor]:
    """The gradients of a whole row."""
    target = ids[None, 1:]
    loss = model(ids[None, :-1], labels=target, shift_labels=target, use_cache=False).loss
    return [
        *torch.autograd.grad(loss, [*model.parameters()], allow_unused=True, materialize_grads=True)
    ]


@pytest.mark.parametrize("window", [4, 1])
def test_the_loop_over_chunks_has_the_gradients_of_one_pass_within_a_window(window):
    """A step of stochastic gradient descent at rate 1 moves the weights by the gradient."""
    (code,) = (text for text in programs("docs/fine-tune.md") if "chunk_tokens, window" in text)
    changes = (
        "torch.optim.AdamW(groups), 1024, 4",
        f"torch.optim.SGD(model.parameters(), 1.0), 16, {window}",
    )
    assert code.count(changes[0]) == code.count("optimizer.step()") == 1
    code = code.replace(*changes).replace("optimizer.step()", "optimizer.step(), moved(model)")
    model, ids = long_document(64)
    wanted, gradients, before = (
        one_pass(model, ids),
        [],
        [parameter.detach().clone() for parameter in model.parameters()],
    )

    def moved(model):
        gradients.append(
            [old - new.detach() for old, new in zip(before, model.parameters(), strict=True)]
        )
        for old, new in zip(before, model.parameters(), strict=True):
            new.data.copy_(old)  # the next window has the same weights

    exec(code, {"torch": torch, "model": model, "ids": ids, "moved": moved})
    assert len(gradients) == 4 // window
    found = [sum(parts) / len(gradients) for parts in zip(*gradients, strict=True)]
    if window == 4:
        assert_same_gradients(found, wanted, 1e-4)  # float32, in other groups
    else:  # what was cut off is missing
        with pytest.raises(AssertionError, match="gradient"):
            assert_same_gradients(found, wanted, 1e-2)


@pytest.mark.slow
def test_the_trainer_that_reads_long_rows_in_chunks(tmp_path):
    (code,) = (text for text in programs("docs/fine-tune.md") if "class LongRowTrainer" in text)
    names = {"torch": torch, "Trainer": Trainer, "InfiniCache": InfiniCache}
    exec(code.replace("split(1024", "split(32"), names)
    arguments = TrainingArguments(
        tmp_path,
        max_steps=1,
        per_device_train_batch_size=2,
        use_cpu=True,
        max_grad_norm=0,
        gradient_accumulation_steps=2,
        report_to=[],
        disable_tqdm=True,
    )
    for tokens in (32, 80):
        found = []
        for trainer_class in (Trainer, names["LongRowTrainer"]):
            model, _ = long_document(1)
            before = [parameter.detach().clone() for parameter in model.parameters()]
            rows = [{"input_ids": row, "labels": row} for row in token_ids(4, tokens)]
            optimizer = torch.optim.SGD(model.parameters(), 1.0)
            loss = (
                trainer_class(model, arguments, train_dataset=rows, optimizers=(optimizer, None))
                .train()
                .training_loss
            )
            change = [
                old - new.detach() for old, new in zip(before, model.parameters(), strict=True)
            ]
            found.append((loss, change))
        (loss, wanted), (loss_in_chunks, change) = found
        assert loss_in_chunks == pytest.approx(loss, rel=1e-5)
        if tokens == 32:
            assert_same_gradients(change, wanted, 1e-4)
        else:
            with pytest.raises(AssertionError, match="gradient"):
                assert_same_gradients(change, wanted, 1e-2)


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


def test_every_option_has_its_section():
    text = (ROOT / "docs" / "options.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## `(\w+)`$", text, re.MULTILINE)
    assert sorted(headings) == sorted(InfiniGPT2Config.own_options())


def test_figures_in_the_text_are_those_of_the_results():
    """A decimal number that no page of results has is one that nobody keeps up."""
    # Python's
    known = {"3.13"}.union(
        *(re.findall(r"\d+\.\d+", file.read_text(encoding="utf-8")) for file in RESULTS)
    )
    unknown = {page.name: decimals(page.read_text(encoding="utf-8")) - known for page in OTHERS}
    assert not any(unknown.values()), unknown


def test_what_people_use_is_ten_short_pages():
    """Everything else is the research log, or made from docstrings."""
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = re.findall(
        r": ([\w-]+\.md)$", text.partition("- Use:")[2].partition("- Lessons:")[0], re.MULTILINE
    )
    words = {
        page: len((ROOT / "docs" / page).read_text(encoding="utf-8").split()) for page in pages
    }
    assert 8 <= len(pages) <= 10 and max(words.values()) <= 900, words
    assert {page.name for page in (ROOT / "docs").glob("*.md")} - words.keys() == {"families.md"}


def commands() -> dict[str, set[str]]:
    """Recipe → the flags that README and pages give it."""
    found = {}
    for file in (ROOT / "README.md", *PAGES):
        for block in re.findall(
            r"^```bash\n(.*?)^```$", file.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
        ):
            for line in block.replace("\\\n", " ").splitlines():
                for recipe, words in re.findall(r"recipes/(\w+)\.py( .*)?", line):
                    flags = (
                        word for word in shlex.split(words, comments=True) if word.startswith("--")
                    )
                    found.setdefault(recipe, set()).update(flags)
    return found


def test_commands_have_flags_that_exist(capsys, monkeypatch):
    unknown = {}
    for recipe, flags in commands().items():
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
