"""A reader's memory file: by another tokenizer, after another beginning, damaged, or written by
several processes that are killed at any time."""

import copy
import multiprocessing
import os
import random
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch

from corpora.tokenization import build_character_tokenizer
from hf_infini import InfiniCache
from hf_infini.cache.files import MemoryFileError, read_memory_file, write_memory_file
from hf_infini.tools import reader as module
from hf_infini.tools.reader import Reader
from models import infini_gpt2
from running import sample_text

TEXT = sample_text()[:1200]
CHUNK = 24


@pytest.fixture(scope="module")
def tokenizer():
    return build_character_tokenizer([sample_text()])


@pytest.fixture(scope="module")
def other_tokenizer():
    """Of the same size, with other ids."""
    made = build_character_tokenizer([sample_text()])
    vocab = made.get_vocab()
    turned = build_character_tokenizer(["".join(chr(0x4E00 + n) for n in range(len(vocab)))])
    assert len(turned) >= len(vocab)
    return turned


@pytest.fixture(scope="module", params=["memory", "archive"])
def model(tokenizer, request):
    """Whose readers keep an archive beside the file, where it has places for what is recalled."""
    options = {"position_encoding": "segment", "memory_conv": 3}
    if request.param == "archive":
        options |= {"update_rule": "none", "keep_score": "recent", "kept_tokens": 20}
    return infini_gpt2(vocab_size=len(tokenizer), **options).eval()


def make_reader(model, tokenizer, **options) -> Reader:
    return Reader(model, tokenizer, chunk=CHUNK, archive=model.config.kept_tokens > 0, **options)


def after(model, tokenizer, text: str, **options) -> dict[str, torch.Tensor]:
    return make_reader(model, tokenizer).read(text, progress=False, **options).tensors()


def left_in(folder: Path) -> list[str]:
    """The files of a folder but for archives."""
    return sorted(path.name for path in folder.iterdir() if path.suffix != ".archive")


def agree(cache: InfiniCache, wanted: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(cache.tensors()[name], tensor) for name, tensor in wanted.items())


@pytest.fixture
def partial_way(model, tokenizer, tmp_path, capsys):
    """A file that is not there, and what a reader has kept that was interrupted at column 240."""
    reader = make_reader(model, tokenizer)

    def interrupt(module, args, given):
        if given["past_key_values" if "past_key_values" in given else "cache"].get_seq_length():
            calls.append(1)
        if len(calls) == 10:
            raise KeyboardInterrupt

    calls, file = [], tmp_path / "text"
    hook = model.transformer.register_forward_pre_hook(interrupt, with_kwargs=True)
    with pytest.raises(KeyboardInterrupt):
        reader.read(TEXT, file=file)
    hook.remove()
    # long before the next file was due
    assert "kept: 240 tokens; the same call goes on" in capsys.readouterr().err
    return file, tmp_path / "text.partial"


def test_interrupted_it_keeps_what_is_read_and_goes_on(partial_way, model, tokenizer):
    file, partial = partial_way
    assert read_memory_file(partial)[0]["columns"] == 240 and not file.exists()
    reader, calls = make_reader(model, tokenizer), []
    hook = model.transformer.register_forward_pre_hook(lambda *_: calls.append(1))
    cache = reader.read(TEXT, file=file, progress=False)
    hook.remove()
    assert len(calls) == (len(TEXT) - 240) // CHUNK
    assert agree(cache, after(model, tokenizer, TEXT))
    assert left_in(file.parent) == ["text"]


DAMAGES = {
    "empty": lambda content: b"",
    "cut": lambda content: content[: len(content) // 2],
    "cut by one": lambda content: content[:-1],
    "other bytes": lambda content: bytes(1000),
    "a bit": lambda content: content[:-100] + bytes([content[-100] ^ 4]) + content[-99:],
    "a bit in front": lambda content: content[:100] + bytes([content[100] ^ 4]) + content[101:],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_part_is_passed_over(partial_way, model, tokenizer, damage):
    file, partial = partial_way
    partial.write_bytes(DAMAGES[damage](partial.read_bytes()))
    with pytest.warns(UserWarning, match=r"reading from the start, for .*text\.partial is damaged"):
        cache = make_reader(model, tokenizer).read(TEXT, file=file, progress=False)
    assert agree(cache, after(model, tokenizer, TEXT)) and left_in(file.parent) == ["text"]


@pytest.mark.parametrize("kind", ["text", "model", "tokenizer", "beginning", "more", "version"])
def test_what_is_anothers_is_passed_over_as_a_part_and_refused_as_a_file(
    tmp_path, model, tokenizer, other_tokenizer, kind
):
    """Even where the name and the hash of the text are the same."""
    file, partial, text, begin = tmp_path / "text", tmp_path / "text.partial", TEXT[:240], None
    reader = make_reader(model, tokenizer)
    if kind == "text":
        text = text[::-1]
    elif kind == "model":
        weights = infini_gpt2(1, vocab_size=len(tokenizer), position_encoding="segment")
        reader = make_reader(weights.eval(), tokenizer)
    elif kind == "tokenizer":
        reader = make_reader(copy.deepcopy(model), tokenizer)
        reader.tokenizer = other_tokenizer
    elif kind == "beginning":
        begin = make_reader(model, tokenizer).read("Before it.", progress=False)
        reader = make_reader(model, tokenizer, cache=begin)
    reader.read(text, file=file, progress=False)
    if kind in ("more", "version"):
        record, tensors = read_memory_file(file)
        if kind == "more":  # a file of a longer text under the hash of this one
            longer = make_reader(model, tokenizer).read(TEXT, progress=False)
            tensors, record["columns"] = longer.tensors(), len(TEXT)
            record["tokens_seen"] = longer.state.tokens_seen.tolist()
        else:
            record["format_version"] = 1
        write_memory_file(file, tensors, record)
    if kind == "version":
        from safetensors.torch import load_file, save_file

        tensors = load_file(file)
        save_file(tensors, file, {"hf_infini_memory": '{"format_version": 1}'})
    file.rename(partial)
    with pytest.warns(UserWarning, match="reading from the start, for "):
        cache = make_reader(model, tokenizer).read(TEXT[:240], file=file, progress=False)
    assert agree(cache, after(model, tokenizer, TEXT[:240]))
    file.unlink()
    reader.texts = dict(list(reader.texts.items())[:1])
    reader.read(text, file=file, progress=False)
    if kind in ("more", "version"):
        return
    with pytest.raises(MemoryFileError, match="another (text|model|beginning)"):
        make_reader(model, tokenizer).read(TEXT[:240], file=file, progress=False)


def test_a_reader_of_another_tokenizer_refuses_the_cache(
    tmp_path, model, tokenizer, other_tokenizer
):
    file = tmp_path / "text"
    make_reader(model, tokenizer).read(TEXT, file=file, progress=False)
    cache = InfiniCache.from_pretrained(file, model)
    assert make_reader(model, tokenizer, cache=cache).generate("A", max_new_tokens=2)
    with pytest.raises(ValueError, match="read by another tokenizer"):
        make_reader(model, other_tokenizer, cache=cache)


def test_files_of_earlier_versions_are_read(tmp_path, model, tokenizer, other_tokenizer):
    """They have neither a digest nor a tokenizer, and the last ids only."""
    file, text = tmp_path / "text", TEXT[:240]
    make_reader(model, tokenizer).read(text, file=file, progress=False)
    record, tensors = read_memory_file(file)
    for name in ("text_digest", "tokenizer"):
        del tensors[name]
    write_memory_file(file, tensors, record)
    cache = make_reader(model, tokenizer).read(text, file=file, progress=False)
    of_cache = {name for name in tensors if not name.startswith("archive.")}
    assert cache.tensors().keys() == of_cache and agree(cache, {n: tensors[n] for n in of_cache})
    reader = make_reader(model, tokenizer)
    reader.tokenizer = other_tokenizer
    with pytest.raises(MemoryFileError, match="another beginning, or by another tokenizer"):
        reader.read(text, file=file, progress=False)


def test_what_was_read_is_written_where_a_file_is_asked_for(tmp_path, model, tokenizer):
    reader = make_reader(model, tokenizer)
    cache = reader.read(TEXT, progress=False)
    written = reader.read(TEXT, file=tmp_path / "text", progress=False)
    assert agree(written, cache.tensors()) and reader.read(TEXT) is written
    assert agree(InfiniCache.from_pretrained(tmp_path / "text", model), cache.tensors())


def test_no_room_for_a_part_is_said_and_the_reading_goes_on(
    tmp_path, model, tokenizer, monkeypatch
):
    monkeypatch.setattr(module, "SAVE_SECONDS", -1)
    file, folder, reader = tmp_path / "text", tmp_path / "text.partial", None
    folder.mkdir()
    with pytest.raises(OSError, match=r"text\.partial is a folder, .*remove it"):
        make_reader(model, tokenizer).read(TEXT, file=file, progress=False)
    folder.rmdir()
    save, failed = InfiniCache.save_pretrained, []

    def full(cache, *args, **options):
        if cache.get_seq_length() < 100:
            failed.append(cache.get_seq_length())
            raise OSError("No space left on device")
        save(cache, *args, **options)

    monkeypatch.setattr(InfiniCache, "save_pretrained", full)
    with pytest.warns(UserWarning, match="what was read so far is not kept: No space left"):
        reader = make_reader(model, tokenizer)
        reader.read(TEXT, file=file, progress=False)
    assert failed == [24, 48, 72, 96] and left_in(tmp_path) == ["text"]


# --- real processes
# --------------------------------------------------------------------------------------------------

context = multiprocessing.get_context("fork") if hasattr(os, "fork") else None
needs_fork = pytest.mark.skipif(context is None, reason="processes are forked")


def read_slowly(model, tokenizer, file, passed) -> None:
    """Keeps what it has read after every chunk; `passed`: columns that the model has read."""
    torch.set_num_threads(1)  # what forks must not share
    warnings.simplefilter("ignore")
    module.SAVE_SECONDS = -1

    def count(*_):
        time.sleep(0.005)
        passed.value += CHUNK

    model.transformer.register_forward_hook(count)
    make_reader(model, tokenizer).read(TEXT, file=file, progress=False)


@needs_fork
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_killed_at_any_time_it_loses_no_more_than_it_may(tmp_path, model, tokenizer, seed):
    draw, file, starts, kept = random.Random(seed), tmp_path / "text", 0, 0
    make_reader(model, tokenizer).read(TEXT, file=tmp_path / "straight", progress=False)
    while not file.exists():
        passed = context.Value("q", 0)
        process = context.Process(target=read_slowly, args=(model, tokenizer, file, passed))
        process.start()
        process.join(draw.uniform(0, 0.6))
        process.kill()
        process.join()
        if not file.exists():
            partial = tmp_path / "text.partial"
            before, kept = kept, read_memory_file(partial)[0]["columns"] if partial.exists() else 0
            assert kept >= before + passed.value - 2 * CHUNK
        starts += 1
        assert starts < 300
    cache = make_reader(model, tokenizer).read(TEXT, file=file, progress=False)
    assert agree(cache, after(model, tokenizer, TEXT))
    assert file.read_bytes() == (tmp_path / "straight").read_bytes()
    assert left_in(tmp_path) == ["straight", "text"]
    blocks = [path.read_bytes() for path in tmp_path.glob("*.archive")]
    assert len(blocks) == 2 * (model.config.kept_tokens > 0) and blocks[:1] == blocks[1:]


@needs_fork
@pytest.mark.slow
@pytest.mark.parametrize("killed", [None, 0, 1])
@pytest.mark.parametrize("seed", range(3))
def test_two_readers_of_one_file_end_with_the_same(tmp_path, model, tokenizer, killed, seed):
    draw, file, passed = random.Random(seed), tmp_path / "text", context.Value("q", 0)
    make_reader(model, tokenizer).read(TEXT, file=tmp_path / "straight", progress=False)
    pair = [
        context.Process(target=read_slowly, args=(model, tokenizer, file, passed)) for _ in range(2)
    ]
    for process in pair:
        process.start()
        time.sleep(draw.uniform(0, 0.2))
    if killed is not None:
        time.sleep(draw.uniform(0, 0.4))
        pair[killed].kill()
    for process in pair:
        process.join(120)
    assert [process.exitcode for number, process in enumerate(pair) if number != killed] in (
        [0],
        [0, 0],
    )
    assert file.read_bytes() == (tmp_path / "straight").read_bytes()
    make_reader(model, tokenizer).read(TEXT, file=file, progress=False)
    assert left_in(tmp_path) == ["straight", "text"]
    blocks = [path.read_bytes() for path in tmp_path.glob("*.archive")]
    assert len(blocks) == 2 * (model.config.kept_tokens > 0) and blocks[:1] == blocks[1:]
    # what one has read the other has not
    assert passed.value <= len(TEXT) + 2 * CHUNK


def test_two_threads_read_once(tmp_path, model, tokenizer):
    file, calls = tmp_path / "text", []
    hook = model.transformer.register_forward_pre_hook(lambda *_: calls.append(1))
    threads = [
        threading.Thread(
            target=make_reader(model, tokenizer).read,
            args=(TEXT,),
            kwargs={"file": file, "progress": False},
        )
        for _ in range(2)
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    hook.remove()
    assert len(calls) == len(TEXT) // CHUNK and left_in(tmp_path) == ["text"]


@pytest.mark.parametrize("name", ["", ".", "/"])
def test_a_file_has_a_name(name, model, tokenizer):
    reader = make_reader(model, tokenizer)
    with pytest.raises(ValueError, match="file must name a memory file"):
        reader.read(TEXT, file=name, progress=False)
