"""The command: documents in, answers out; the second start reads nothing. And what it is made
of."""

import re
import shlex
import string
import tomllib
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from commands import TEXT, command_in, save_models
from corpora.tokenization import build_character_tokenizer
from decoders import begin_with_bos, decoder
from hf_infini import InfiniCache, command, estimate, load_adapter, patch_model
from hf_infini.cache.files import read_memory_file
from hf_infini.compat.cache_name import CACHE
from hf_infini.tools import ready
from hf_infini.tools.asking_rows import asking_rows, fact_forms
from hf_infini.tools.documents import read_document
from hf_infini.tools.text_rows import text_rows
from models import gpt2, token_ids
from running import ROOT, sample_text

PDF = """1 0 obj<</Type/Catalog/Pages 2 0 R>>endobj
2 0 obj<</Type/Pages/Kids[3 0 R]/Count 1>>endobj
3 0 obj<</Type/Page/Parent 2 0 R/MediaBox[0 0 300 100]/Contents 4 0 R
/Resources<</Font<</F1 5 0 R>>>>>>endobj
4 0 obj<</Length {length}>>stream
{words}
endstream endobj
5 0 obj<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>endobj
"""


def pdf(words: str) -> bytes:
    """A page with these drawing instructions."""
    lines = ["%PDF-1.4", *PDF.format(words=words, length=len(words)).splitlines()]
    begins = [number for number, line in enumerate(lines) if " 0 obj" in line]
    places = [sum(len(line) + 1 for line in lines[:number]) for number in begins]
    table = ["xref", "0 6", "0000000000 65535 f ", *(f"{place:010} 00000 n " for place in places)]
    end = [
        "trailer<</Root 1 0 R/Size 6>>",
        "startxref",
        str(sum(len(line) + 1 for line in lines)),
        "%%EOF",
    ]
    return "\n".join([*lines, *table, *end]).encode()


# --- documents
# --------------------------------------------------------------------------------------------------


def test_text_of_each_kind_of_document(tmp_path):
    page = (
        "<html><head><meta "
        "charset='latin-1'><title>Rio</title><script>no()</script></head><p>Água &amp; "
        "sal</p></html>"
    )
    files = {
        "text.txt": ("\ufeffAs duas\r\nlinhas \n".encode(), "As duas\nlinhas"),
        "page.html": (page.encode("latin-1"), "Rio\nÁgua & sal"),
        "note.md": (b"# One\n\n*two*", "# One\n\n*two*"),
        "book.PDF": (pdf("BT /F1 24 Tf 20 40 Td (The river flows.) Tj ET"), "The river flows."),
    }
    for name, (content, text) in files.items():
        (tmp_path / name).write_bytes(content)
        assert read_document(tmp_path / name).replace("\n\n", "\n") == text.replace("\n\n", "\n")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "latin.txt",
            "Água".encode("latin-1"),
            "no text in UTF-8 .byte 0.: give text, Markdown, HTML or PDF.*iconv",
        ),
        ("empty.md", b" \n", "has no text.$"),
        ("scan.pdf", pdf("0 0 10 10 re f"), "has no text. Pages that are pictures need OCR first"),
        ("bad.pdf", b"nothing", "is damaged, encrypted or no PDF"),
    ],
)
def test_a_document_without_text_is_refused(name, content, message, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_document(tmp_path / name)


# --- rows to fit on
# --------------------------------------------------------------------------------------------------


def test_rows_ask_at_their_end_for_what_they_state():
    tokenizer = build_character_tokenizer([sample_text(), str(fact_forms()), string.printable])
    rows = asking_rows(tokenizer, sample_text(), rows=6, length=600, seed=3)
    assert rows == asking_rows(tokenizer, sample_text(), rows=6, length=600, seed=3)
    for number, row in enumerate(rows):
        text, known = (
            tokenizer.decode(row),
            fact_forms()[list(fact_forms())[number % len(fact_forms())]]["forms"],
        )
        asked = text.split("\n")[-3::2]  # two facts, with an empty line between
        assert len(row) == 600 and all(
            text.count(f"\n{one.removesuffix('.')}") == 2 for one in asked
        )
        patterns = [re.sub(r"\\{\w+\\}", ".+", re.escape(" ".join(form))) for form in known]
        assert all(
            any(re.fullmatch(pattern, one.removesuffix(".")) for pattern in patterns)
            for one in asked
        )
    with pytest.raises(ValueError, match="rows are made of running text, and this one is empty"):
        asking_rows(tokenizer, "")
    with pytest.raises(ValueError, match="fact.* and their questions take .* tokens, more than 30"):
        asking_rows(tokenizer, "text", length=30)
    begin_with_bos(tokenizer)
    begun = asking_rows(tokenizer, sample_text(), rows=6, length=601, seed=3)
    assert begun == [[tokenizer.bos_token_id, *row] for row in rows]


def test_passages_are_of_all_parts_of_a_text():
    text = sample_text()
    tokenizer = build_character_tokenizer([text, string.printable])
    rows = text_rows(tokenizer, text, rows=7, length=150, seed=3)
    assert rows == text_rows(tokenizer, text, rows=7, length=150, seed=3)
    assert rows != text_rows(tokenizer, text, rows=7, length=150, seed=4)
    pieces = [tokenizer.decode(row) for row in rows]
    assert all(len(row) == 150 for row in rows) and all(piece in text for piece in pieces)
    begins, part = [text.index(piece) for piece in pieces], (len(text) - 149) / 7
    assert all(int(number * part) <= at < (number + 1) * part for number, at in enumerate(begins))
    [whole] = text_rows(tokenizer, text, rows=1, length=len(text))
    assert tokenizer.decode(whole) == text
    [again] = text_rows(tokenizer, "abc", rows=1, length=8)
    assert tokenizer.decode(again) == "abcabcab"
    with pytest.raises(ValueError, match="rows are made of running text, and this one is empty"):
        text_rows(tokenizer, "")
    begin_with_bos(tokenizer)
    with pytest.raises(ValueError, match="length must be at least 2; got 1"):
        text_rows(tokenizer, text, length=1)
    begun = text_rows(tokenizer, text, rows=7, length=151, seed=3)
    assert begun == [[tokenizer.bos_token_id, *row] for row in rows]


# --- bytes
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "gpt2"])
@torch.no_grad()
def test_an_estimate_is_what_the_caches_hold(model_type, tokens=40):
    model = (gpt2() if model_type == "gpt2" else decoder(model_type)).eval()
    if model_type == "gemma2":
        model.config.sliding_window = 8
    options = {"segment_length": 8, "kept_tokens": 4}
    found, config = estimate(model.config, tokens, **options), model.config
    cache = DynamicCache(config=config)
    model(token_ids(1, tokens), use_cache=True, **{CACHE: cache})
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert found.plain == held
    cache = InfiniCache(patch_model(model, **options).config)
    model(token_ids(1, tokens), use_cache=True, **{CACHE: cache})
    small = sum(
        tensor.nbytes
        for name, tensor in cache.layers[-1].state.tensors().items()
        if tensor.dtype == torch.long
    )
    assert found.infini == pytest.approx(cache.nbytes(), abs=8 * small)
    assert estimate(model.config, tokens) == found
    if model_type != "gemma2":  # whose model has no kept tokens in its sliding layers
        cache = InfiniCache(model.config, archive=True)
        model(token_ids(1, tokens), use_cache=True, **{CACHE: cache})
        assert found.archive == cache.archive.nbytes()
    with pytest.raises(ValueError, match="leave out segment_length"):
        estimate(model.config, tokens, segment_length=8)
    with pytest.raises(ValueError, match="tokens must be at least 1; got 0"):
        estimate(config, 0, **options)


# --- the command
# --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    return save_models(tmp_path_factory.mktemp("command"))


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    return command_in(tmp_path / "kept", monkeypatch, capsys)


def answer(folder: Path, *turns: str, tokens: int = 5) -> str:
    """The answer to a chat of whole texts, read anew."""
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(folder),
        AutoTokenizer.from_pretrained(folder),
    )
    roles = ["user", "assistant"] * len(turns)
    messages = [{"role": role, "content": turn} for role, turn in zip(roles, turns, strict=False)]
    ids = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**ids, max_new_tokens=tokens, do_sample=False)
    return tokenizer.decode(output[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)


def test_ask_reads_once(folders, run, tmp_path):
    words = [
        "ask",
        folders["memory"],
        folders["play.txt"],
        "--max-new-tokens",
        5,
        "--device",
        "cpu",
    ]
    first = run(*words, "-q", "Who speaks?", "-q", "Where?")
    wanted = [
        answer(folders["memory"], f"{TEXT}\n\nQuestion: {asked}")
        for asked in ("Who speaks?", "Where?")
    ]
    assert first.out == "".join(f"{text}\n" for text in wanted)
    assert "100%" in first.err and "> Who speaks?" in first.err
    [file] = (tmp_path / "kept" / "memories").glob("*.safetensors")
    assert f"memory file: {file}" in first.err
    # A chat, in which the memory is there already
    second = run(*words, typed="Who speaks?\nWhere?\n")
    assert "reading" not in second.err
    [one, two] = [
        wanted[0],
        answer(folders["memory"], f"{TEXT}\n\nQuestion: Who speaks?", wanted[0].strip(), "Where?"),
    ]
    assert second.out == f"{one}\n{two}\n"
    file.write_bytes(b"damaged")
    third = run(*words, "-q", "Where?")
    assert third.out == f"{wanted[1]}\n" and "reading again" in third.err and "damaged" in third.err
    plain = run(*words, "-q", "Where?", "--no-chat-template")
    assert len([*file.parent.glob("*.safetensors")]) == 2 and plain.err.count("reading") >= 1


def test_a_plain_model_recalls_without_a_fit(folders, run, tmp_path):
    """A text that fits into its places is answered as by the plain model, with no fit; one that
    does not says what it looked at, from an archive that the next start finds."""
    asked = ["--device", "cpu", "-q", "Who is the king?", "--max-new-tokens", 5]
    done = run("ask", folders["plain"], folders["play.txt"], *asked)
    assert "fitting" not in done.err and "MB of archive" in done.err
    text = read_document(folders["play.txt"])
    said = answer(folders["plain"], f"{text}\n\nQuestion: Who is the king?")
    assert done.out.strip() == said.strip()

    words = [folders["plain"], folders["play.txt"], *asked, "--kept-tokens", 70, "--sources"]
    first, second = run("ask", *words), run("ask", *words)
    assert "reading:" in first.err and "reading:" not in second.err
    assert first.out == second.out and "  [1] " in first.err
    run("read", *words[:4], "--kept-tokens", 70, "--out", tmp_path / "m")
    assert (tmp_path / "m.archive").stat().st_size > 0
    next_words = [folders["plain"], tmp_path / "m", " The king", *asked[:2], *asked[4:]]
    went_on = run("continue", *next_words)
    assert went_on.out.strip()
    (tmp_path / "m.archive").unlink()
    line = run("continue", *next_words, status=1).err.splitlines()[-1]
    assert "m.archive is gone; archive=False (--no-archive) loads" in line
    without = run("continue", *next_words, "--no-archive")
    assert without.out.strip() and "cannot be recalled" in without.err
    words = ["ask", *words[:-1], "--memory", tmp_path / "own"]
    run(*words)
    (tmp_path / "own.archive").unlink()
    assert "own.archive is gone" in run(*words, status=1).err
    without = run(*words, "--no-archive")
    assert "reading:" not in without.err and "cannot be recalled" in without.err


def test_an_archive_in_8_bits_has_its_own_files(folders, run, tmp_path):
    """Which are found again, named where they do not fit, and gone on from; a default start reads
    another."""
    asked = ["--device", "cpu", "-q", "Who is the king?", "--max-new-tokens", 5]
    words = ["ask", folders["plain"], folders["play.txt"], *asked, "--kept-tokens", 70]
    whole = run(*words)
    first, second = run(*words, "--archive-int8"), run(*words, "--archive-int8", "--archive")
    assert "reading:" in first.err and "reading:" not in second.err and first.out == second.out
    exact, small = (
        float(re.search(r"([\d.]+) MB of archive", each.err)[1]) for each in (whole, first)
    )
    assert small < exact and "--archive-int8: fewer MB" in whole.err
    archives = (tmp_path / "kept" / "memories").glob("*.archive")
    sizes = sorted(path.stat().st_size for path in archives)
    assert len(sizes) == 2 and sizes[0] < sizes[1] / 2  # of float32
    read = ["read", folders["plain"], folders["play.txt"], "--kept-tokens", 70, "--device", "cpu"]
    run(*read, "--archive-int8", "--out", tmp_path / "m")
    went_on = run("continue", folders["plain"], tmp_path / "m", " The king", *asked[:2], *asked[4:])
    assert went_on.out.strip() and "cannot be recalled" not in went_on.err
    line = run(*read, "--out", tmp_path / "m", status=1).err.splitlines()[-1]
    assert (
        "m has archive='int8', and archive=True is asked for: read it with archive='int8'" in line
    )
    line = run(*words, "--archive-int8", "--no-archive", status=1).err.splitlines()[-1]
    assert line == "error: give one of --no-archive and --archive-int8, not both."
    tables = [
        run("estimate", folders["plain"], "--tokens", 10_000, *how).out.split()
        for how in ((), ("--archive-int8",))
    ]
    assert tables[0][:-2] == tables[1][:-2] and float(tables[1][-2]) < float(tables[0][-2]) / 2


def damage(archive: Path) -> None:
    """One bit of each of its blocks, which no load reads."""
    content = bytearray(archive.read_bytes())
    for place in range(1000, len(content), 1000):
        content[place] ^= 1
    archive.write_bytes(content)


@pytest.mark.parametrize("documents", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_damage_that_a_question_finds_is_mended(documents, folders, run, tmp_path):
    """By reading the document again, once; but a file that was given is the user's."""
    names = [tmp_path / f"{number}.txt" for number in range(documents)]
    for name in names:
        name.write_text(f"{name.name} {TEXT * 2}", encoding="utf-8")
    words = [
        "ask",
        folders["plain"],
        *names,
        "--device",
        "cpu",
        "-q",
        "Who speaks?",
        "-q",
        "Where?",
    ]
    words += ["--max-new-tokens", 5, "--kept-tokens", 64 if documents == 1 else 300]
    first = run(*words)
    archives = sorted((tmp_path / "kept" / "memories").glob("*.archive"))
    whole = {archive: archive.read_bytes() for archive in archives}
    assert len(archives) == documents
    for archive in archives[:2]:
        damage(archive)
    second = run(*words)
    assert second.out == first.out and second.err.count("reading again, for") == min(documents, 2)
    assert all(archive.read_bytes() == content for archive, content in whole.items())
    assert "reading" not in run(*words).err
    own = [*words, "--memory", tmp_path / "own"]
    run(*own)
    damage(tmp_path / "own.archive")
    damaged = (tmp_path / "own.archive").read_bytes()
    line = run(*own, status=1).err.splitlines()[-1]
    assert line.startswith("error: ") and "own.archive is damaged: its block" in line
    assert (tmp_path / "own.archive").read_bytes() == damaged


def test_a_plain_model_is_fitted_once(folders, run, tmp_path, monkeypatch):
    monkeypatch.setattr(ready, "WINDOW", ready.WINDOW | {"segment_length": 16, "sink_tokens": 2})
    monkeypatch.setattr(ready, "KEPT_TOKENS", 24)
    words = [folders["plain"], folders["play.txt"], "--device", "cpu"]
    asked = ["--no-archive", "-q", "Who?", "--max-new-tokens", 3]
    first = run("ask", *words, *asked)
    assert "fitting which tokens are worth keeping" in first.err
    [scores] = filter(Path.is_dir, (tmp_path / "kept" / "scores").iterdir())
    second = run("ask", *words, *asked)
    assert second.out == first.out and "fitting" not in second.err
    # The same score as an adapter, a memory file that goes on, and a model of one folder
    run("fit", *words, "--out", tmp_path / "adapter", "--kept-tokens", 24)
    model = load_adapter(
        AutoModelForCausalLM.from_pretrained(folders["plain"]), tmp_path / "adapter"
    )
    again = load_adapter(AutoModelForCausalLM.from_pretrained(folders["plain"]), scores)
    names = [name for name in model.state_dict() if name.endswith("keep_weight")]
    assert names and all(model.state_dict()[name].any() for name in names)
    for name in names:
        torch.testing.assert_close(model.state_dict()[name], again.state_dict()[name])
    run("convert", folders["plain"], "--out", tmp_path / "whole", "--adapter", tmp_path / "adapter")
    run("read", *words, "--no-archive", "--out", tmp_path / "m", "--adapter", tmp_path / "adapter")
    texts = [" The king", " and then a queen"]
    options = ["--adapter", tmp_path / "adapter", "--max-new-tokens", 4, "--device", "cpu"]
    several = run("continue", folders["plain"], tmp_path / "m", *texts, *options)
    whole, tokenizer = (
        kind.from_pretrained(tmp_path / "whole") for kind in (AutoModelForCausalLM, AutoTokenizer)
    )
    assert read_memory_file(tmp_path / "m")[0]["columns"] == len(tokenizer(TEXT).input_ids)
    wanted = []
    for text in texts:
        ids = torch.tensor([tokenizer(TEXT)["input_ids"] + tokenizer(text)["input_ids"]])
        output = whole.generate(ids, max_new_tokens=4, do_sample=False)
        wanted.append(tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True))
    assert several.out == "".join(f"{text}\n" for text in wanted)
    one = run(
        "continue", folders["plain"], tmp_path / "m", texts[0], *options, "--temperature", 0.001
    )
    assert one.out == f"{wanted[0]}\n"
    page = tmp_path / "page.html"
    run("inspect", *words, "--out", page, "--adapter", tmp_path / "adapter", "--max-tokens", 40)
    assert "Attention heads: plain" in page.read_text(encoding="utf-8")


def test_a_gpt2_reads_texts_longer_than_its_positions(folders, run, tmp_path, monkeypatch):
    monkeypatch.setattr(ready, "WINDOW", ready.WINDOW | {"segment_length": 16, "sink_tokens": 2})
    tokenizer = AutoTokenizer.from_pretrained(folders["plain"])
    model = gpt2(vocab_size=400, n_positions=300, pad_token_id=tokenizer.pad_token_id)
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "gpt2")
    (tmp_path / "long.txt").write_text(sample_text()[:2000], encoding="utf-8")
    printed = run(
        "ask",
        tmp_path / "gpt2",
        tmp_path / "long.txt",
        "--device",
        "cpu",
        "-q",
        "Who?",
        "--max-new-tokens",
        3,
    )
    assert int(re.search(r"([\d,]+) tokens in a cache", printed.err)[1].replace(",", "")) > 300


def test_estimate_prints_a_table(folders, run):
    printed = run(
        "estimate", folders["plain"], "--tokens", 1000, "--tokens", 10_000, "--kept-tokens", 8
    )
    first, second = (line.split() for line in printed.out.splitlines()[1:])
    assert float(second[5]) >= float(second[1])  # of the archive, which has ids as well
    model = AutoModelForCausalLM.from_pretrained(folders["plain"])
    size = sum(weight.nbytes for weight in model.parameters())
    assert f"weights: {size / 1e6:,.1f} MB; " in printed.err
    assert first[0] == "1,000" and float(second[1]) == pytest.approx(10 * float(first[1]), abs=0.6)
    assert first[3] == second[3]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["ask", "nowhere", "DOC"], "while loading the model nowhere: "),
        (
            ["ask", "MEMORY", "DOC", "--kept-tokens", 8],
            "has the options of its memory: leave --adapter and",
        ),
        (["ask", "PLAIN", "DOC", "--adapter", "nowhere"], "there is no folder nowhere here"),
        (["ask", "MEMORY", "DOC", "--device", "gpu"], "while using --device gpu: "),
        (["fit", "MEMORY", "DOC", "--out", "x"], "has a memory already"),
        (["demo", "PLAIN", "--no-archive"], "give the --adapter with which the text was read"),
        (["ask", "MEMORY", "DOC", "--sources"], "leave out --sources, or --no-archive"),
        (["continue", "PLAIN", "DOC", "text"], "damaged or no memory file"),
        (["continue", "MEMORY", "DOC", "text"], "damaged or no memory file"),
    ],
)
def test_errors_are_one_line(words, message, folders, run):
    names = {"DOC": folders["play.txt"], "MEMORY": folders["memory"], "PLAIN": folders["plain"]}
    printed = run(*(names.get(word, word) for word in words), status=1)
    last = printed.err.splitlines()[-1]
    assert message in last and last.startswith("error: ") and printed.out == ""


def test_every_command_of_the_page_runs(folders, run, tmp_path, monkeypatch):
    """With a small model and text in the place of the page's."""
    monkeypatch.chdir(tmp_path)
    for name in ("book.txt", "page.txt"):
        (tmp_path / name).write_text(TEXT, encoding="utf-8")
    run(
        "fit",
        folders["plain"],
        "book.txt",
        "--out",
        "model_cards/qwen2.5_coder_1.5b",
        "--kept-tokens",
        24,
    )
    page = (ROOT / "docs" / "ask.md").read_text("utf-8")
    blocks = re.findall(r"```(?:bash|text)\n(.*?)```", page, re.DOTALL)
    commands = [
        line.removeprefix("$ ")
        for line in "".join(blocks).replace("\\\n", "").splitlines()
        if "hf-infini " in line
    ]
    known = {one.name or one.callback.__name__ for one in command.app.registered_commands}
    assert {line.split()[1] for line in commands} | {"demo", "cache", "serve"} == known
    for line in commands:
        name, _, *words = shlex.split(line)[1:]
        run(name, folders["plain"], *words, typed="Who?\n")


def test_it_is_installed_with_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert project["scripts"] == {"hf-infini": f"{command.__name__}:{command.main.__name__}"}
