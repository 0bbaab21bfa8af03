"""What ends the command early: whatever is broken, one line that says what and where, a status, and
no file of the user's is changed."""

import functools
import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from bad_input import contents
from commands import command_in, save_models
from decoders import fitted
from hf_infini import command, patch_model, save_adapter
from hf_infini.cache.files import read_memory_file
from hf_infini.models.loading import find_folder
from hf_infini.tools import reader
from hf_infini.tools.one_line import Ended, one_line, while_
from models import causal_mha, gpt2

WEIGHTS = "model.safetensors"
OPTIONS = {"segment_length": 16, "local_segments": 1, "sink_tokens": 2, "kept_tokens": 24}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("command")
    folders = save_models(base)
    model = AutoModelForCausalLM.from_pretrained(folders["plain"])
    save_adapter(fitted(patch_model(model, **OPTIONS, keep_score="learned")), base / "adapter")
    return folders | {"adapter": base / "adapter"}


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    return command_in(tmp_path / "kept", monkeypatch, capsys)


def refused(run, words, *mentions: str, status: int = 1, typed: str | None = "") -> str:
    """The only line that is no bar, of a command that ends early and prints nothing else."""
    printed = run(*words, status=status, typed=typed)
    lines = [line.rpartition("\r")[2] for line in printed.err.split("\n")]
    lines = [
        # gradio, where it was imported, has bars count steps
        line
        for line in lines
        if line.strip() and not any(f"{unit}/s" in line for unit in ("it", "token", "steps"))
    ]
    assert len(lines) == 1 and lines[0].startswith("error: ") and printed.out == "", printed
    assert all(str(mention) in lines[0] for mention in mentions), lines[0]
    return lines[0]


def commands_of(model, folders, tmp_path, *options):
    """Each command that reads a model, by its name."""
    document, plain = folders["play.txt"], ["--device", "cpu", *options]
    return {
        "ask": ["ask", model, document, "-q", "Who?", "--max-new-tokens", 2, *plain],
        "read": ["read", model, document, "--out", tmp_path / "memory", *plain],
        "inspect": ["inspect", model, document, "--out", tmp_path / "page.html", *plain],
        "convert": ["convert", model, "--out", tmp_path / "whole", *options],
    }


def cut(name: str, share: float):
    """Keeps this share of a file."""

    def damage(folder: Path) -> None:
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: int(len(content) * share)])

    return damage


def text(name: str, content: str):
    return lambda folder: (folder / name).write_text(content, encoding="utf-8")


def entries(name: str, **changes):
    def damage(folder: Path) -> None:
        values = json.loads((folder / name).read_text("utf-8"))
        (folder / name).write_text(json.dumps(values | changes), encoding="utf-8")

    return damage


def pickled(content: bytes):
    """Weights of the older kind."""

    def damage(folder: Path) -> None:
        (folder / WEIGHTS).unlink()
        (folder / "pytorch_model.bin").write_bytes(content)

    return damage


def not_finite(folder: Path) -> None:
    weights = load_file(folder / WEIGHTS)
    weights[max(weights)].view(-1)[3] = math.nan
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})


OWN_CODE = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
BROKEN_MODELS = {
    **{f"weights cut to {share}": cut(WEIGHTS, share) for share in (0, 0.001, 0.5, 0.99)},
    "weights of text": text(WEIGHTS, "Hello" * 50),
    "weights with NaN": not_finite,
    "pickle of nothing": pickled(b""),
    "pickle of text": pickled(b"version https://git-lfs.github.com/spec/v1\n"),
    "more tokens": entries("config.json", vocab_size=500),
    "fewer tokens": entries("config.json", vocab_size=100),
    "wider": entries("config.json", hidden_size=96),
    "configuration []": text("config.json", "[]"),
    "configuration null": text("config.json", "null"),
    "configuration cut": cut("config.json", 0.5),
    "unknown family": entries("config.json", model_type="teapot"),
    "own code": entries("config.json", model_type="own", auto_map=OWN_CODE),
    **{
        f"family {kind}": entries("config.json", model_type=kind) for kind in ("t5", "clip", "bert")
    },
    "layers of text": entries("config.json", num_hidden_layers="two"),
    "tokenizer cut": cut("tokenizer.json", 0.7),
    "tokenizer {}": text("tokenizer.json", "{}"),
}


JSON_FILES = ("config.json", "tokenizer_config.json", "tokenizer.json", "generation_config.json")


@pytest.mark.slow
@pytest.mark.parametrize("content", ["[]", "null", "3", "{"])
@pytest.mark.parametrize("name", [*JSON_FILES, WEIGHTS])
def test_the_damaged_file_of_a_model_is_named(name, content, folders, run, tmp_path):
    model = shutil.copytree(folders["memory"], tmp_path / "model")
    text(name, content)(model)
    words = ["ask", model, folders["play.txt"], "-q", "Who?", "--max-new-tokens", 2]
    if (name, content) == (JSON_FILES[-1], "{"):  # which transformers does without
        run(*words)
    else:
        refused(run, words, f" {model / name} is ", "get it again, or save it again")


SHAPES = ("more tokens", "fewer tokens", "wider")  # in the configuration


@pytest.mark.slow
@pytest.mark.parametrize("kind", BROKEN_MODELS)
def test_a_broken_model_is_told_in_one_line(kind, folders, run, tmp_path):
    model = shutil.copytree(folders["plain"], tmp_path / "model")
    BROKEN_MODELS[kind](model)
    before = contents(model)
    for words in commands_of(model, folders, tmp_path, "--adapter", folders["adapter"]).values():
        line = refused(run, words, model)
        assert "huggingface.co" not in line and "above" not in line
        if kind in SHAPES:
            assert re.search(r" [\w.]+ is \[\d+, \d+\], and must be \[\d+, \d+\]\.", line)
    assert contents(model) == before and not (tmp_path / "kept").exists()
    assert {path.name for path in tmp_path.iterdir()} <= {"model"}


def of_record(content: str):
    return text("infini_adapter.json", content)


BROKEN_ADAPTERS = {
    **{f"record {content}": of_record(content) for content in ("", "[]", "null", "3", "{}", "{a")},
    "no options": entries("infini_adapter.json", options=None),
    "other options": entries("infini_adapter.json", options={"segment_length": "many"}),
    "no model": entries("infini_adapter.json", model=[]),
    "record cut": cut("infini_adapter.json", 0.5),
    "weights cut": cut("infini_adapter.safetensors", 0.5),
    "no weights": lambda folder: (folder / "infini_adapter.safetensors").unlink(),
    "LoRA of nothing": text("adapter_config.json", "{}"),
    "LoRA null": text("adapter_config.json", "null"),
    "a file": lambda folder: [shutil.rmtree(folder), folder.write_text("x")],
    "nothing": lambda folder: [file.unlink() for file in folder.iterdir()],
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", BROKEN_ADAPTERS)
def test_a_broken_adapter_is_told_in_one_line(kind, folders, run, tmp_path):
    adapter = shutil.copytree(folders["adapter"], tmp_path / "adapter")
    BROKEN_ADAPTERS[kind](adapter)
    before, model = contents(tmp_path), folders["plain"]
    for words in commands_of(model, folders, tmp_path, "--adapter", adapter).values():
        assert "huggingface.co" not in refused(run, words, adapter)
    assert contents(tmp_path) == before


TEMPLATES = (
    "{% if",
    "{{ 1 / 0 }}",
    "{{ raise_exception('no') }}",
    "{{ messages.x() }}",
    "{{ {}.a.b }}",
)


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_broken_chat_template_names_the_option_without_it(template, folders, run, tmp_path):
    model = shutil.copytree(folders["memory"], tmp_path / "model")
    text("chat_template.jinja", template)(model)
    words = ["ask", model, folders["play.txt"], "--max-new-tokens", 2, "-q", "Who?"]
    refused(run, words, model, "--no-chat-template")
    assert not (tmp_path / "kept").exists()
    run(*words, "--no-chat-template")


# --- options
# --------------------------------------------------------------------------------------------------

BAD_WORDS = {
    ("--device", "meta"): (1, "--device meta"),
    ("--device", "gpu"): (1, "--device gpu"),
    ("--device", "cuda:99"): (1, "--device cuda:99"),
    ("--device", ""): (1, "--device"),
    ("--dtype", "int3"): (2, "--dtype"),
    ("-q", "\udcff"): (2, "--question"),
    ("--max-new-tokens", "0"): (2, "--max-new-tokens"),
    ("--kept-tokens", "8"): (1, "leave --adapter and --kept-tokens out"),
    ("--memory", "FOLDER"): (2, "--memory"),
    ("--memory", "DOCUMENT"): (1, "--memory"),
    ("--memory", "DOCUMENT/memory"): (1, "DOCUMENT"),
    ("--bla",): (2, "--bla"),
}


@pytest.mark.parametrize("words", BAD_WORDS)
@pytest.mark.parametrize("how", [(), ("--traceback",)])
def test_words_that_are_wrong_are_named(words, how, folders, run, tmp_path):
    status, mention = BAD_WORDS[words]
    names = {"DOCUMENT": str(folders["play.txt"]), "FOLDER": str(tmp_path)}
    for name, path in names.items():
        words, mention = [word.replace(name, path) for word in words], mention.replace(name, path)
    before = contents(folders["memory"].parent)
    words = ["ask", folders["memory"], folders["play.txt"], *words]
    if how:  # before and after the command's name
        for shown in ([*how, *words], [*words, *how]):
            printed = run(*shown, status=status)
            assert "Traceback (most recent call last)" in printed.err
            assert mention in printed.err.splitlines()[-1]
    else:
        refused(run, words, mention, status=status)
    assert contents(folders["memory"].parent) == before


@pytest.mark.parametrize("value", ["1e-40", "1e-5", "inf", "nan", "-1", "1e30"])
def test_a_temperature_at_which_nothing_can_be_drawn_is_refused(value, folders, run):
    words = ["continue", folders["memory"], folders["play.txt"], "x", "--temperature", value]
    refused(run, words, "--temperature", "0", status=2)


def test_the_coldest_temperature_draws(folders, run, tmp_path):
    run("read", folders["memory"], folders["play.txt"], "--out", tmp_path / "memory")
    for value in (reader.COLDEST, reader.HOTTEST):
        words = ["--temperature", value, "--max-new-tokens", 2]
        run("continue", folders["memory"], tmp_path / "memory", " The", *words)


@pytest.mark.parametrize(
    "name", ["./m", "../m", "~/m-none", "/m/none", "a/b/c", "there/none", "a b", "", "a\\b"]
)
def test_a_path_that_is_not_there_is_no_name_on_the_hub(name, folders, run, tmp_path, monkeypatch):
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match="no such folder: "):
        find_folder(name)
    model, document = folders["plain"], folders["play.txt"]
    refused(run, ["estimate", name], "no such model folder")
    refused(run, ["ask", model, document, "--adapter", name], "no such adapter folder")


@pytest.mark.parametrize("name", ["gpt2", "org/name"])
def test_a_name_that_nobody_has_says_both(name, run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_folder(name) is None
    refused(run, ["estimate", name], name, f"There is no folder {name} in {tmp_path}, either.")


OTHER_FAMILIES = ["bert", "roberta", "electra", "t5", "bart", "opt", "mamba"]
OTHER_FAMILIES += ["bloom", "mpt", "ctrl", "cpmant", "xlnet"]  # without rotary positions


@pytest.mark.parametrize("kind", OTHER_FAMILIES)
def test_an_estimate_of_a_model_without_such_layers_is_refused(kind, run, tmp_path):
    text("config.json", json.dumps({"model_type": kind}))(tmp_path)
    refused(run, ["estimate", tmp_path], "cannot have Infini-attention")


def test_pages_that_cannot_be_are_refused(folders, run, tmp_path, monkeypatch):
    tokenizer, document = AutoTokenizer.from_pretrained(folders["plain"]), folders["play.txt"]
    for model in (gpt2(vocab_size=400), causal_mha(attention="none", vocab_size=400)):
        for part in (model, tokenizer):
            part.save_pretrained(tmp_path / model.config.model_type)
    page = tmp_path / "page.html"
    words = ["--out", page, "--max-tokens"]
    run("inspect", tmp_path / "gpt2", document, *words, 64, "--layers", 2, "--layers", 0)
    found = re.findall(r'"layer": ?(\d+)', page.read_text("utf-8"))
    assert found == ["0", "2"]
    run("inspect", tmp_path / "gpt2", document, *words[:2])  # as many tokens as it has positions
    page.unlink()
    for name, more, mention in (
        ("gpt2", [65], "64 positions: give at most so many --max-tokens"),
        ("gpt2", [9, "--layers", 3], "layers must be numbers from 0 to 2"),
        ("causal_mha", [9], "no attention heads in these layers"),
    ):
        refused(run, ["inspect", tmp_path / name, document, *words, *more], mention)
    monkeypatch.setattr(command, "LARGEST_PAGE", 1000)
    refused(run, ["inspect", tmp_path / "gpt2", document, *words, 9], "fewer --layers or --max-")
    assert not page.exists()


def test_a_page_has_a_choice_of_layers_unless_others_are_asked_for(
    folders, run, tmp_path, monkeypatch
):
    monkeypatch.setattr(command, "PAGE_LAYERS", 1)
    page = tmp_path / "page.html"
    words = ["inspect", folders["plain"], folders["play.txt"], "--out", page, "--max-tokens", 20]

    def shown(*more) -> tuple[int, bool]:
        said = run(*words, *more).err
        found = re.findall(r'"layer": ?(\d+)', page.read_text("utf-8"))
        return len(found), "--all-layers shows all" in said

    count = json.loads((folders["plain"] / "config.json").read_text("utf-8"))["num_hidden_layers"]
    assert count > 1 and shown() == (1, True) and shown("--all-layers") == (count, False)
    assert shown("--layers", 0, "--layers", 1) == (2, False)
    refused(run, [*words, "--all-layers", "--layers", 0], "give one of the two")


def test_options_that_would_do_nothing_are_refused(folders, run, tmp_path):
    page = ["--out", tmp_path / "page.html", "--kept-tokens", 8]
    for name, mention in (("plain", "give an --adapter"), ("memory", "leave --adapter and")):
        refused(run, ["inspect", folders[name], folders["play.txt"], *page], mention)
    refused(run, ["estimate", folders["memory"], "--kept-tokens", 8], "leave --adapter and")
    assert not [*tmp_path.iterdir()]


def test_without_words_it_shows_its_help_and_fails(run):
    for words in ([], ["--traceback"]):
        assert "Usage: hf-infini" in run(*words, status=2).out


# --- outputs
# --------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/dev/null").is_char_device(), reason="needs /dev/null")
def test_a_device_is_neither_read_nor_written(folders, run):
    """Some never end."""
    device, model, document = "/dev/null", folders["memory"], folders["play.txt"]
    refused(run, ["ask", model, document, "--memory", device], device, "is no file and no folder")
    for name in ("read", "inspect"):
        refused(run, [name, model, document, "--out", device], device, "is no file and no folder")
        refused(run, [name, model, device, "--out", "out"], device, "is a device and no file")
    refused(run, ["continue", model, device, "more"], device, "is a device and no file")


def test_nothing_is_written_over_what_is_read(folders, run, tmp_path):
    base = folders["plain"].parent
    before = contents(base)
    convert = ["convert", folders["plain"], "--adapter", folders["adapter"], "--out"]
    for out in (folders["plain"], folders["adapter"], base / "plain" / ".." / "plain"):
        refused(run, [*convert, out], "--out", "which is read")
    refused(run, [*convert, base], "has files already")
    for name in ("inspect", "read"):
        words = [name, folders["memory"], folders["play.txt"], "--out", folders["play.txt"]]
        refused(run, words, "--out", "which is read")
    assert contents(base) == before


@pytest.mark.parametrize("fails", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_folder_is_whole_or_not_there(fails, folders, run, tmp_path, monkeypatch):
    from transformers import PreTrainedTokenizerFast

    def save_pretrained(*_, **__):  # after the weights were written
        raise fails

    monkeypatch.setattr(PreTrainedTokenizerFast, "save_pretrained", save_pretrained)
    adapter, out = folders["adapter"], tmp_path / "whole"
    words = ["convert", folders["plain"], "--adapter", adapter, "--out", out]
    status = 1 if isinstance(fails, OSError) else 130
    printed = run(*words, status=status)
    line = printed.err.splitlines()[-1]
    assert f"while writing {out}: " in line and not [*tmp_path.iterdir()]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_and_a_closed_pipe_end_quietly(folders):
    """In real processes."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    program = "from hf_infini.command import main; main()"
    words = f"{sys.executable} -c '{program}' estimate {folders['plain']}"
    for shell, status, lines in (
        (f"{words} | true; exit ${{PIPESTATUS[0]}}", (0, 1), 0),
        (f"{words} > /dev/full", (1,), 1),
        (f"{words} >&-", (0,), 0),
    ):
        done = subprocess.run(
            ["bash", "-c", shell], env=environment, capture_output=True, text=True
        )
        assert done.returncode in status, done.stderr
        said = [line for line in done.stderr.splitlines() if line.startswith(("error", "Exc"))]
        assert len(said) == lines and "Traceback" not in done.stderr, done.stderr


def test_what_a_link_leads_to_is_written(folders, run, tmp_path):
    words = ["inspect", folders["memory"], folders["play.txt"], "--max-tokens", 9, "--out"]
    (tmp_path / "page.html").write_text("old")
    (tmp_path / "link").symlink_to("page.html")
    run(*words, tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "page.html").stat().st_size > 1000
    (tmp_path / "round").symlink_to("round")
    run(*words, tmp_path / "round")  # to nothing
    assert not (tmp_path / "round").is_symlink() and (tmp_path / "round").is_file()


# --- interruptions
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "words", "left"),
    [
        (
            "tools.ready.fit_keep_score",
            ["fit", "plain", "DOC", "--out", "OUT"],
            "nothing is kept of a fit",
        ),
        ("command.read_documents", ["read", "memory", "DOC", "--out", "OUT"], "nothing was kept"),
        ("tools.ready.load_causal_lm", ["ask", "memory", "DOC"], "while loading the model"),
        (
            "command.Reader.read",
            ["read", "memory", "DOC", "--out", "OUT"],
            "the same command begins again",
        ),
        (
            "command.Reader.chat",
            ["ask", "memory", "DOC", "-q", "Who?"],
            "is kept: nothing is read again",
        ),
        (
            "command.inspect_attention",
            ["inspect", "memory", "DOC", "--out", "OUT"],
            "nothing was kept",
        ),
        ("command.load_config", ["estimate", "memory"], "while reading the configuration"),
    ],
)
def test_every_step_says_what_an_interruption_leaves(
    target, words, left, folders, run, tmp_path, monkeypatch
):
    def stopped(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(f"hf_infini.{target}", stopped)
    names = {"DOC": folders["play.txt"], "OUT": tmp_path / "out"} | folders
    printed = run(*(names.get(word, word) for word in words), status=130)
    last = printed.err.splitlines()[-1]
    assert last.startswith("stopped while ") and left in last and not (tmp_path / "out").exists()


def test_an_interrupted_reading_says_what_is_kept_and_goes_on(folders, run, tmp_path, monkeypatch):
    calls, decoder_of = [], reader.decoder_of

    def stopped(model, *_):
        calls.append(model)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return decoder_of(model)

    monkeypatch.setattr(reader, "decoder_of", stopped)
    monkeypatch.setattr(command, "Reader", functools.partial(reader.Reader, chunk=64))
    out, partial = tmp_path / "memory", tmp_path / "memory.partial"
    words = ["read", folders["memory"], folders["play.txt"], "--out", out]
    last = run(*words, status=130).err.splitlines()[-1]
    assert f"{partial} has what was read" in last and read_memory_file(partial)[0]["columns"] == 64
    run(*words)
    assert [*tmp_path.iterdir()] == [out]
    calls[:] = [None]
    monkeypatch.setattr(reader.TextFile, "_load", stopped)
    assert f"{out} is kept" in run(*words, status=130).err.splitlines()[-1]


def test_a_chat_goes_on_after_a_stopped_answer_and_ends_as_input_does(folders, run, monkeypatch):
    asked, chat = [], command.Reader.chat

    def answer(self, messages, **options):
        asked.append([turn["content"] for turn in messages])
        if len(asked) == 1:
            raise KeyboardInterrupt
        return chat(self, messages, **options)

    monkeypatch.setattr(command.Reader, "chat", answer)
    words = ["ask", folders["memory"], folders["play.txt"], "--max-new-tokens", 2]
    printed = run(*words, typed="First?\nSecond?\n\nNever?\n")
    assert asked == [["First?"], ["Second?"]] and "the chat goes on without" in printed.err
    for typed in ("", None):  # at its end, and closed
        assert run(*words, typed=typed).out == ""
    assert len(asked) == 2


# --- the mechanism
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("raised", [KeyError("x"), torch.OutOfMemoryError("much"), MemoryError()])
def test_the_innermost_step_and_the_kind_are_told(raised):
    with pytest.raises(Ended) as ended, while_("reading", "all"), while_("using", "X", "Buy one."):
        raise raised
    name = type(raised).__name__
    status, line = one_line(ended.value)
    assert status == 1 and line.startswith(f"error: while using X: {name}")
    assert line.endswith("Buy one. (--traceback shows more)") and "\n" not in line


def test_an_error_outside_of_all_steps_is_called_a_bug(folders, run, monkeypatch):
    def wrong(*_):
        raise KeyError("x")

    monkeypatch.setattr(command, "check_output", wrong)
    words = ["inspect", folders["memory"], folders["play.txt"], "--out", "x"]
    refused(run, words, "a bug of hf-infini: KeyError: 'x' (--traceback shows where")
