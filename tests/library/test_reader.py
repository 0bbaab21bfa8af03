"""A reader: what it has read once, it goes on from, with the same answers as the whole text read
anew."""

import copy
import multiprocessing
import time

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from corpora.tokenization import build_character_tokenizer
from decoders import begin_with_bos, decoder
from hf_infini import InfiniCache, patch_model
from hf_infini.cache.files import MemoryFileError, read_memory_file
from hf_infini.tools import reader as module
from hf_infini.tools.reader import Reader
from models import infini_gpt2
from running import sample_text

TEXT = sample_text()[:400]
TEMPLATE = "{% for turn in messages %}<{{ turn.role }}>{{ turn.content }}{% endfor %}<assistant>"


@pytest.fixture(scope="module")
def tokenizer():
    made = build_character_tokenizer([sample_text(), TEMPLATE])
    made.chat_template = TEMPLATE
    return made


@pytest.fixture(scope="module")
def model(tokenizer):
    options = {
        "segment_length": 8,
        "local_segments": 1,
        "sink_tokens": 2,
        "kept_tokens": 12,
        "layers": [0, 2],
    }
    return patch_model(
        decoder("llama", vocab_size=len(tokenizer), num_hidden_layers=3), **options
    ).eval()


@pytest.fixture
def reader(model, tokenizer, monkeypatch):
    """A reader in small chunks, with the number of tokens that each call of its model has read."""
    made, called = Reader(model, tokenizer, chunk=50, turns=2), []
    monkeypatch.setattr(made, "called", called, raising=False)
    hook = model.model.register_forward_pre_hook(
        lambda m, args, given: called.append(
            (given.get("input_ids") if not args else args[0]).shape[1]
        ),
        with_kwargs=True,
    )
    yield made
    hook.remove()


@torch.no_grad()
def anew(model, tokenizer, text: str, tokens: int = 6, **options) -> str:
    """What follows the whole text, greedily."""
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
    options |= {"max_new_tokens": tokens, "do_sample": False}
    output = model.generate(ids, pad_token_id=tokenizer.pad_token_id, **options)
    return tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)


GREEDY = {"max_new_tokens": 6, "do_sample": False}


def test_what_was_read_is_not_read_again(reader, model, tokenizer):
    cache = reader.read(TEXT, progress=False)
    assert reader.called == [50] * 8 and cache.get_seq_length() == len(TEXT)
    assert reader.read(TEXT) is cache and len(reader.called) == 8
    for more in ("The king", "A queen of " * 10):  # the second is longer than a chunk
        reader.called.clear()
        assert reader.generate(TEXT + more, **GREEDY) == [anew(model, tokenizer, TEXT + more)]
        assert cache.get_seq_length() == len(TEXT)
    reader.called.clear()
    texts = [TEXT + more for more in ("The king", "and", "a long way from here")]
    assert reader.generate(texts, **GREEDY) == [anew(model, tokenizer, text) for text in texts]
    assert reader.called[0] == len("a long way from here")
    longer = TEXT + "And so on."
    reader.called.clear()
    assert reader.read(longer, progress=False) is not cache and sum(reader.called) == 10
    with pytest.raises(ValueError, match="by one token at least"):
        reader.generate(longer)


def test_texts_of_which_nothing_was_read(reader, model, tokenizer):
    for texts in ([TEXT], ["The king", "A queen"]):
        assert reader.generate(texts, **GREEDY) == [anew(model, tokenizer, text) for text in texts]
    assert reader.called[:8] == [50] * 8  # a single text is read in chunks


MANY = {
    "beams": {"num_beams": 3, "do_sample": False},
    "several sequences": {"num_beams": 4, "num_return_sequences": 2, "do_sample": False},
    "a configuration": {"generation_config": GenerationConfig(num_beams=3, do_sample=False)},
}


@pytest.mark.parametrize("texts", [["The king"], ["The king", "A queen of"]], ids=len)
@pytest.mark.parametrize("options", MANY.values(), ids=MANY)
def test_beams_go_on_from_what_was_read(model, tokenizer, options, texts):
    reader, texts = Reader(model, tokenizer), [TEXT + more for more in texts]
    wanted = Reader(model, tokenizer).generate(texts, max_new_tokens=6, **options)
    assert len(wanted) == len(texts) * options.get("num_return_sequences", 1)
    reader.read(TEXT, progress=False)
    assert reader.generate(texts, max_new_tokens=6, **options) == wanted
    assert not reader.turns  # a cache of beams is not of the text


def test_beams_that_the_model_is_configured_for(model, tokenizer, monkeypatch):
    monkeypatch.setattr(model.generation_config, "num_beams", 3)
    reader, texts = Reader(model, tokenizer), [TEXT[place : place + 99] for place in range(9)]
    for text in texts:
        longer = f"{text}{reader.generate(text, max_new_tokens=9)[0]} And"
        fresh = Reader(model, tokenizer).generate(longer, max_new_tokens=6)
        assert reader.generate(longer, max_new_tokens=6) == fresh
    reader.read(TEXT, progress=False)
    [one] = reader.generate(TEXT + "The", num_beams=1, **GREEDY)  # what is given comes first
    assert one == anew(model, tokenizer, TEXT + "The", num_beams=1) and len(reader.turns) == 1


def test_a_text_begins_as_the_tokenizer_has_it_begin(model, tokenizer, tmp_path):
    other = copy.deepcopy(tokenizer)
    begin_with_bos(other)
    reader = Reader(model, other)
    for text in (TEXT, other.bos_token + TEXT):  # once only
        ids = other(TEXT, return_tensors="pt")["input_ids"]
        assert ids[0, 0] == other.bos_token_id
        output = model.generate(ids, pad_token_id=other.pad_token_id, **GREEDY)
        wanted = other.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
        assert reader.generate(text, **GREEDY) == [wanted]
    cache = reader.read(TEXT, file=tmp_path / "text.safetensors", progress=False)
    assert int(cache.state.tokens_seen) == ids.shape[1]
    assert reader.generate(TEXT + "And", **GREEDY) != [anew(model, tokenizer, TEXT + "And")]
    # what goes on from a file does not begin
    loaded = InfiniCache.from_pretrained(tmp_path / "text.safetensors", model)
    reader = Reader(model, other, cache=loaded)
    assert int(reader.read("And", progress=False).state.tokens_seen) == ids.shape[1] + 3


def test_a_chat_goes_on_from_the_last_turn_that_is_the_same(reader, model, tokenizer):
    reader.read_document(TEXT, progress=False)
    messages, answers = [{"role": "user", "content": "Who?"}], []

    def whole() -> str:
        first, *rest = messages
        return reader.rendered(
            [{"role": "user", "content": f"{TEXT}\n\nQuestion: {first['content']}"}, *rest]
        )

    for question in ("When?", "Where?", "Why?", "How?"):
        reader.called.clear()
        answers.append(reader.chat(messages, **GREEDY))
        assert answers[-1] == anew(model, tokenizer, whole()).strip()
        assert reader.called[0] < 60  # of more than 400
        messages += [
            {"role": "assistant", "content": answers[-1]},
            {"role": "user", "content": question},
        ]
    assert len(reader.turns) == 2
    # Of an answer that comes back otherwise, the reader goes on from the turn before
    messages[-2] = {"role": "assistant", "content": "Nobody knows."}
    reader.called.clear()
    assert reader.chat(messages, **GREEDY) == anew(model, tokenizer, whole()).strip()
    assert reader.called[0] < 100


def test_what_spells_a_special_token_is_text_where_that_is_asked(model, tokenizer):
    end = tokenizer.eos_token
    readers = [Reader(model, tokenizer) for _ in range(2)]
    lengths = [
        one.read(f"a{end}b", split_special_tokens=split, progress=False).get_seq_length()
        for one, split in zip(readers, (False, True), strict=True)
    ]
    assert lengths == [3, 2 + len(end)]


def test_a_memory_file_is_read_where_it_is_there(model, tokenizer, tmp_path):
    file, whole = tmp_path / "sub" / "text.safetensors", Reader(model, tokenizer)
    read = whole.read(TEXT, file=file, progress=False)
    written = file.stat().st_mtime_ns
    again = Reader(model, tokenizer)
    found = again.read(TEXT, file=file, progress=False)
    assert file.stat().st_mtime_ns == written and [*file.parent.iterdir()] == [file]
    for name, tensor in read.tensors().items():
        torch.testing.assert_close(found.tensors()[name], tensor, rtol=0, atol=0)
    assert again.generate(TEXT + "The king", **GREEDY) == [
        anew(model, tokenizer, TEXT + "The king")
    ]
    with pytest.raises(MemoryFileError, match="memory of another text: give another name"):
        Reader(model, tokenizer).read(TEXT + "!", file=file)
    continued = Reader(model, tokenizer, cache=InfiniCache.from_pretrained(file, model))
    texts = ["The king", "and"]
    assert continued.generate(texts, **GREEDY) == [
        anew(model, tokenizer, TEXT + text) for text in texts
    ]


def read_slowly(folder: str, file: str, text: str) -> None:
    """A process that keeps what it has read after every chunk."""
    module.SAVE_SECONDS = -1
    model, tokenizer = (
        kind.from_pretrained(folder) for kind in (AutoModelForCausalLM, AutoTokenizer)
    )
    Reader(model, tokenizer, chunk=24).read(text, file=file)


@pytest.mark.slow
def test_killed_it_goes_on_and_ends_with_the_same_bytes(tmp_path):
    """A real process, killed in the middle of the text."""
    tokenizer, text = build_character_tokenizer([sample_text()]), sample_text()[:3000]
    options = {"position_encoding": "segment", "update_rule": "delta", "memory_conv": 3}
    model = infini_gpt2(vocab_size=len(tokenizer), **options).eval()
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "model")
    Reader(model, tokenizer, chunk=24).read(text, file=tmp_path / "straight", progress=False)
    file, partial = tmp_path / "text", tmp_path / "text.partial"
    process = multiprocessing.get_context("spawn").Process(
        target=read_slowly, args=(tmp_path / "model", file, text)
    )
    process.start()
    while not partial.exists() or read_memory_file(partial)[0]["columns"] < 600:
        assert process.is_alive()
        time.sleep(0.002)
    process.kill()
    process.join()
    done = read_memory_file(partial)[0]["columns"]
    assert 0 < done < len(text) and done % 24 == 0 and not file.exists()
    Reader(model, tokenizer, chunk=24).read(text, file=file, progress=False)
    assert file.read_bytes() == (tmp_path / "straight").read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {"model", "straight", "text"}
