"""A reader with an archive: each question, turn and row recalls its own, and shows what."""

import collections
import concurrent.futures
import copy
import gc
import re
import shutil
import warnings
import weakref
from pathlib import Path

import pytest
import torch

from corpora.tokenization import train_bpe
from decoders import decoder
from hf_infini import InfiniCache, patch_model
from hf_infini.cache.archive_files import archive_bytes
from hf_infini.cache.block_file import HEADER, BlockFile
from hf_infini.cache.files import MemoryFileError
from hf_infini.tools.passages import term_numbers
from hf_infini.tools.reader import Reader
from running import sample_text

FILLER = sample_text()[:9000]
FACTS = ("The gardener keeps zinnias.", "A sailor hid the compass.", "Nobody saw the quarry.")
PLACES = (2000, 4000, 6500)  # where the facts are


@pytest.fixture(scope="module")
def tokenizer():
    return train_bpe([sample_text(), " ".join(FACTS)], 500)


@pytest.fixture(scope="module")
def model(tokenizer):
    window = dict(segment_length=32, local_segments=1, sink_tokens=2, kept_tokens=140)
    options = {"update_rule": "none", "keep_score": "recent", "mask_special_tokens": False}
    plain = decoder("llama", vocab_size=len(tokenizer), max_position_embeddings=4096)
    return patch_model(plain, **window, **options).eval()


@pytest.fixture(scope="module")
def document() -> str:
    text = FILLER
    for place, fact in reversed([*zip(PLACES, FACTS, strict=True)]):
        text = f"{text[:place]}\n{fact}\n{text[place:]}"
    return text


def rare(fact: str) -> str:
    """Its last word. Blocks end anywhere, also between it and the others."""
    return fact.removesuffix(".").split()[-1]


def asked(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


def test_before_anything_was_read_nothing_is_recalled(model, tokenizer, document):
    greedy = {"max_new_tokens": 6, "do_sample": False}
    reader, plain = Reader(model, tokenizer, archive=True), Reader(model, tokenizer)
    assert reader.chat(asked("Who?"), **greedy) == plain.chat(asked("Who?"), **greedy)
    texts = ["The king", "A queen"]
    assert reader.generate(texts, **greedy) == plain.generate(texts, **greedy)
    assert reader.passages == [[], []]
    reader.read_document(document, progress=False)
    reader.chat(asked("Who?"), **greedy)
    assert reader.passages[0]
    assert reader.generate(texts[0], **greedy) == plain.generate(texts[0], **greedy)
    assert reader.passages == [[]]  # not those of the answer before


def test_each_turn_recalls_what_it_asks_for(model, tokenizer, document):
    """Of a text of some 3,600 tokens 140."""
    reader = Reader(model, tokenizer, archive=True)
    reader.read_document(document, progress=False)
    messages = []
    for fact in (*FACTS, FACTS[0]):
        messages += asked(fact)
        said = reader.chat(messages, max_new_tokens=40)
        messages.append({"role": "assistant", "content": said})
        assert rare(fact) in "".join(reader.sources[0])
    # the turns were archived, too
    *_, cache = reader.turns[-1]
    assert cache.archive.rows()[0].tokens == cache.get_seq_length()


TEMPLATE = (
    "{% for turn in messages %}<|endoftext|>{{ turn.role }}\n{{ turn.content }}<|pad|>\n"
    "{% endfor %}<|endoftext|>assistant\n"
)


@pytest.mark.parametrize("sizes", [[300], [9000], [9000, 600], [60, 3000, 900]])
@pytest.mark.parametrize("template", [TEMPLATE, None])
@pytest.mark.parametrize("system", [[], [{"role": "system", "content": "Say little. " * 9}]])
def test_passages_are_of_the_documents_only(system, template, sizes, model, tokenizer, document):
    """And neither of the template nor of what was said before, wherever these are kept, too."""
    own = copy.deepcopy(tokenizer)
    own.chat_template = template
    texts = [f"<|endoftext|>{document}"[:size] for size in sizes]
    reader, messages = Reader(model, own, archive=True), [*system]
    reader.read_documents(texts, progress=False)
    shown = 0
    for fact in FACTS:
        messages += asked(fact)
        messages.append({"role": "assistant", "content": reader.chat(messages, max_new_tokens=50)})
        for passage in reader.passages[0]:
            text = texts[passage.document]
            ids = own(text, split_special_tokens=True)["input_ids"]
            of_text = own.decode(ids[passage.tokens.start : passage.tokens.stop])
            assert passage.text == of_text and of_text in text
            shown += 1
    assert shown


def test_passages_of_a_text_have_no_special_tokens(model, tokenizer, document):
    reader = Reader(model, tokenizer, archive=True)
    reader.read("<|endoftext|>".join([document[:200]] * 3), progress=False)
    reader.generate(f"{'<|endoftext|>'.join([document[:200]] * 3)} and", max_new_tokens=2)
    assert "".join(reader.sources[0]) and "<|" not in "".join(reader.sources[0])


def test_rows_of_a_batch_recall_their_own(model, tokenizer, document):
    reader = Reader(model, tokenizer, archive=True)
    reader.read(document, progress=False)
    texts = [f"{document}\n{fact}" for fact in FACTS]
    together = reader.generate(texts, max_new_tokens=4, do_sample=False)
    sources = reader.sources
    for fact, text, said, source in zip(FACTS, texts, together, sources, strict=True):
        assert rare(fact) in "".join(source[:2])
        fresh = Reader(model, tokenizer, archive=True)
        fresh.read(document, progress=False)
        assert fresh.generate(text, max_new_tokens=4, do_sample=False) == [said]
        assert fresh.sources == [source]


def test_a_file_is_read_with_its_archive_or_not_at_all(model, tokenizer, document, tmp_path):
    file = tmp_path / "text"
    plain = Reader(model, tokenizer)
    plain.read_document(document, file=file, progress=False)
    with pytest.raises(MemoryFileError, match="has no archive.*archive=False"):
        Reader(model, tokenizer, archive=True).read_document(document, file=file, progress=False)
    file.unlink()
    reader = Reader(model, tokenizer, archive=True)
    cache = reader.read_document(document, file=file, progress=False)
    size = archive_bytes(model.config, cache.get_seq_length())
    assert 0.9 * size < (tmp_path / "text.archive").stat().st_size < size
    assert cache.archive.nbytes() < size / 5
    again = Reader(model, tokenizer, archive=True)
    again.read_document(document, file=file, progress=False)
    question = asked(FACTS[1])
    assert again.chat(question, max_new_tokens=9) == reader.chat(question, max_new_tokens=9)
    assert again.sources == reader.sources
    # the answers are not written into the archive of the text
    assert (tmp_path / "text.archive").stat().st_size < size
    # without it the memory is the same, and questions get the latest tokens
    (tmp_path / "text.archive").unlink()
    with pytest.raises(MemoryFileError, match="text.archive is gone; archive=False"):
        Reader(model, tokenizer, archive=True).read_document(document, file=file, progress=False)
    without, fresh = Reader(model, tokenizer), Reader(model, tokenizer)
    with pytest.warns(UserWarning, match="without its archive: what is not in the cache cannot"):
        loaded = without.read_document(document, file=file, progress=False)
    assert loaded.archive is None
    fresh.read_document(document, progress=False)
    assert without.chat(question, max_new_tokens=9) == fresh.chat(question, max_new_tokens=9)


def make_file(place: Path) -> None:
    place.write_bytes(b"tar of my notes" * 999)


def make_folder(place: Path) -> None:
    place.mkdir()
    (place / "notes.txt").write_text("mine")


def make_link(place: Path) -> None:
    make_file(place.with_name("notes"))
    place.symlink_to(place.with_name("notes"))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("make", [make_file, make_folder, make_link])
def test_what_has_the_name_of_an_archive_and_is_somebodys_stays(
    make, model, tokenizer, document, tmp_path
):
    """A reader says it before it reads, and a cache that is saved takes another name; nothing is
    removed."""
    make(tmp_path / "text.archive")
    make_file(tmp_path / "text.20260101.archive")
    before = contents(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(model.model), "forward", None)  # nothing is read
        reader = Reader(model, tokenizer, archive=True)
        with pytest.raises(FileExistsError, match="text.archive is there, .* move it, .*another"):
            reader.read(document, file=tmp_path / "text", progress=False)
    assert before.items() <= contents(tmp_path).items()
    cache = Reader(model, tokenizer, archive=True).read(document[:900], progress=False)
    cache.save_pretrained(tmp_path / "text", model)
    assert before.items() < contents(tmp_path).items()
    [name] = {path for path in {*contents(tmp_path)} - {*before} if path.endswith(".archive")}
    # the same content has the same name
    Path(name).unlink()
    make(Path(name))
    again = Reader(model, tokenizer, archive=True).read(document[:900], progress=False)
    with pytest.raises(FileExistsError, match=f"{Path(name).name} is there"):
        again.save_pretrained(tmp_path / "text", model)
    assert before.items() < contents(tmp_path).items()


def test_archives_of_earlier_versions_have_no_header(model, tokenizer, document, tmp_path):
    """They are read, and go on."""
    file, text = tmp_path / "text", document[:2000]
    Reader(model, tokenizer, archive=True).read(text, file=file, progress=False)
    blocks = tmp_path / "text.archive"
    whole = blocks.read_bytes()
    blocks.write_bytes(whole.removeprefix(HEADER))
    assert len(blocks.read_bytes()) < len(whole)
    asked = torch.tensor(tokenizer(FACTS[0])["input_ids"])
    found = []
    for content in (blocks.read_bytes(), whole):
        blocks.write_bytes(content)
        cache = Reader(model, tokenizer, archive=True).read(text, file=file, progress=False)
        found.append(cache.recall(asked).state)
        assert torch.equal(cache.archive.at(blocks).rows()[0].ids, cache.archive.rows()[0].ids)
        assert blocks.read_bytes() == content
    pairs = zip(*(state.tensors().values() for state in found), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)
    (tmp_path / "text").unlink()  # and an archive that was left by one with a header makes room
    Reader(model, tokenizer, archive=True).read(text, file=file, progress=False)
    assert blocks.read_bytes() == whole


def test_a_disk_without_room_is_said_before_reading(
    model, tokenizer, document, tmp_path, monkeypatch
):
    usage = collections.namedtuple("usage", "total used free")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9 - 5, 5))
        patch.setattr(type(model.model), "forward", None)  # nothing is read
        with pytest.raises(OSError, match="takes [0-9,]+ MB, and .* has 0 MB left.*--no-archive"):
            reader = Reader(model, tokenizer, archive=True)
            reader.read(document, file=tmp_path / "text", progress=False)
    with pytest.raises(OSError, match="/dev/full cannot take 128 bytes more: .*No space left"):
        BlockFile(Path("/dev/full"), 64).write(0, torch.zeros(2, 64, dtype=torch.uint8))


def test_a_disk_that_gets_full_while_it_is_read_keeps_what_was_read(
    model, tokenizer, document, tmp_path, capfd
):
    """The same call goes on there, once there is room."""
    resource = pytest.importorskip("resource")
    file, before = tmp_path / "text", resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**21, before[1]))  # of one file
    try:
        with pytest.raises(
            OSError, match="text.archive cannot take .*What was read before is kept"
        ):
            Reader(model, tokenizer, archive=True, chunk=256).read(document, file=file)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    kept = int(re.search(r"kept: ([0-9,]+) tokens", capfd.readouterr().err)[1].replace(",", ""))
    partial = InfiniCache.from_pretrained(tmp_path / "text.partial", model)
    assert partial.get_seq_length() == partial.archive.rows()[0].tokens == kept > 1500
    reader = Reader(model, tokenizer, archive=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it does not begin again
        cache = reader.read(document, file=file, progress=False)
    fresh = Reader(model, tokenizer, archive=True).read(document, progress=False)
    question = reader._encode(FACTS[1])
    found = [each.recall(question).layers[1].state.local_key for each in (cache, fresh)]
    torch.testing.assert_close(*found, atol=1e-4, rtol=1e-4)


def test_terms_do_not_differ_in_case_or_a_space(tokenizer):
    terms = term_numbers(tokenizer).tokens
    words = [tokenizer.decode([token]) for token in range(len(tokenizer))]
    alike = [token for token, word in enumerate(words) if word.strip().lower() == "the"]
    assert len(alike) > 1 and len({int(terms[token]) for token in alike}) == 1
    assert terms[alike[0]] >= 0 and terms[words.index(",")] == terms[words.index("!")] == -1
    assert all(terms[token] == -1 for token in tokenizer.all_special_ids)
    assert len(terms) == len(tokenizer)


def test_words_are_those_of_the_text(tokenizer):
    text = "The opening of the Museum was opened, at 10:45, by Ms. O'Brien-Smith; it's open."
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    words = term_numbers(tokenizer).of(torch.tensor(ids))[1]
    said = [word[:5] for word in re.findall(r"[^\W_]+", text.lower())]
    found = words[words >= 0].tolist()
    assert len(said) == len(found) == 18
    assert len({*zip(said, found, strict=True)}) == len({*said}) == len({*found})


def test_terms_are_made_once_for_a_tokenizer(model, tokenizer):
    """Whoever needs them, and again where it has new tokens."""
    own, calls = copy.deepcopy(tokenizer), []

    class Counted(type(own)):
        def batch_decode(self, *args, **options):
            calls.append(1)
            return super().batch_decode(*args, **options)

    own.__class__ = Counted
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        readers = [Reader(model, own, archive=True) for _ in range(8)]
        made = [*pool.map(lambda reader: reader.terms, readers), term_numbers(own)]
    assert len(calls) == 1 and all(each is made[0] for each in made)
    own.add_tokens(["zinnias2"])
    assert len(term_numbers(own).tokens) == len(own) == len(made[0].tokens) + 1
    assert len(calls) == 2
    gone = weakref.ref(own)
    del own, readers
    gc.collect()
    assert gone() is None
