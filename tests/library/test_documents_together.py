"""Documents that are read apart and asked together: what a question recalls of each, and that only
those that are new are read."""

import copy
import itertools

import pytest
import torch

from commands import command_in, save_models
from corpora.tokenization import train_bpe
from decoders import decoder
from hf_infini import InfiniCache, patch_model
from hf_infini.cache.archive import FIRST_OF_OTHERS
from hf_infini.cache.files import MemoryFileError
from hf_infini.cache.joined import joined
from hf_infini.compat.cache_name import CACHE
from hf_infini.ops.naive import naive_relevance
from hf_infini.ops.recall import BLOCK_TOKENS, have_left
from hf_infini.tools.documents import files_in
from hf_infini.tools.reader import Reader
from running import sample_text

WINDOW = dict(segment_length=16, local_segments=1, sink_tokens=2, kept_tokens=90)
LENGTHS = (700, 65, 10, 300)  # of documents


def patched(**options):
    given = WINDOW | {"update_rule": "none", "keep_score": "recent", "mask_special_tokens": False}
    family = options.pop("family", "llama")
    layers = options.pop("layers", 4)
    model = decoder(family, max_position_embeddings=4096, num_hidden_layers=layers)
    return patch_model(model, **given | options).eval()


@torch.no_grad()
def read(model, ids, cache=None, **inputs) -> InfiniCache:
    cache = InfiniCache(model.config, archive=True) if cache is None else cache
    model(input_ids=ids[None], use_cache=True, **{CACHE: cache}, **inputs)
    return cache


def document(tokens: int, seed: int = 0):
    """Few common ids, and rare ones, which questions ask for."""
    draw = torch.Generator().manual_seed(seed)
    common = torch.randint(3, 20, (tokens,), generator=draw)
    rare = torch.randint(20, 90, (tokens,), generator=draw)
    return torch.where(torch.rand(tokens, generator=draw) < 0.1, rare, common)


def several(lengths=LENGTHS):
    return [document(tokens, seed) for seed, tokens in enumerate(lengths)]


def order_of(documents) -> list[int]:
    """Their numbers, that of the last which fills the window at the end."""
    [*_, own] = [number for number, ids in enumerate(documents) if len(ids) >= 32]
    return [*(number for number in range(len(documents)) if number != own), own]


def naive_choice(documents, question, window):
    """Of all tokens that the window does not have anyway, by document and number, those of the
    most relevant blocks, in order."""
    order = order_of(documents)
    terms = [documents[number].tolist() for number in order]
    relevance = iter(naive_relevance(terms, question.tolist()))
    blocks, first = [], 0
    for number in order:
        ids, (_, end) = documents[number], have_left(len(documents[number]), window)
        end = end if number == order[-1] else len(ids)
        for at in range(0, len(ids), BLOCK_TOKENS):
            tokens = range(at, min(at + BLOCK_TOKENS, len(ids)))
            own = [(number, token) for token in tokens if window.sink_tokens <= token < end]
            blocks.append((next(relevance), first, own))
            first += 1
    ranked = sorted(blocks, key=lambda b: (-b[0], b[1] if b[0] else -b[1]))
    chosen = [place for _, _, own in ranked for place in own][: window.kept_tokens]
    return sorted(chosen, key=lambda place: (order.index(place[0]), place[1]))


def kept_places(cache, layer: int = 0):
    """Of what a cache keeps, the document and the number there of each token, in order."""
    row, numbers = cache.archive.rows()[0], cache.layers[layer].state.kept_position[0, 0]
    places = []
    for number in numbers[numbers >= 0].tolist():
        where, _ = row.located(torch.tensor([number]))
        begin = 0
        if number >= FIRST_OF_OTHERS:
            place = [each.number for each in row.others].index(where)
            begin = row.begins[place] + FIRST_OF_OTHERS
        places.append((where, number - begin))
    return places


# --- the recall


@pytest.mark.parametrize("last", range(len(LENGTHS)))
@pytest.mark.parametrize("shares", [None, [0.5, 1.5, 1, 1]])
def test_a_question_recalls_what_the_documents_have(shares, last):
    """The naive choice over all of them; of each the keys and values of its own archive; whichever
    comes last."""
    model, documents = patched(kept_shares=shares), several()
    documents.append(documents.pop(last))  # of which one does not fill the window
    caches = [read(model, ids) for ids in documents]
    question = torch.cat([documents[0][20:25], documents[-1][-9:], documents[2][3:6]])
    cache = joined(caches).recall(question)
    rows = [each.archive.rows()[0] for each in caches]
    for layer, window in cache.windows.items():
        wanted = naive_choice(documents, question, window)
        assert kept_places(cache, layer) == wanted and len(wanted) == window.kept_tokens
        parts = [
            rows[where].states(layer, rows[where].found(torch.tensor([n for _, n in own])))
            for where, own in itertools.groupby(wanted, key=lambda place: place[0])
            for own in [list(own)]
        ]
        state, places = cache.layers[layer].state, slice(window.sink_tokens, window.ahead)
        pairs = zip((state.local_key, state.local_value), zip(*parts, strict=True), strict=True)
        for held, own in pairs:
            assert torch.equal(held[0, :, places], torch.cat(own, 1))
    for block in cache.passages():
        where, ids = cache.archive.rows()[0].located(block)
        begins = range(len(documents[where]))
        assert any(torch.equal(ids, documents[where][at : at + len(block)]) for at in begins)


def test_one_document_is_recalled_as_by_itself():
    model, ids = patched(), document(700)
    cache = read(model, ids)
    for one, two in zip(
        cache.recall(ids[300:309]).layers, joined([cache]).recall(ids[300:309]).layers, strict=True
    ):
        pairs = zip(one.state.tensors().values(), two.state.tensors().values(), strict=True)
        assert all(torch.equal(*pair) for pair in pairs)


def test_the_order_does_not_change_what_is_found():
    model, documents = patched(kept_tokens=512), several((400, 500, 300))
    documents[0][100:103], documents[1][200:203] = 95, 96
    caches = [read(model, ids) for ids in documents]
    question = torch.tensor([95, 95, 96, 96, 3])
    found = []
    for order in itertools.permutations(range(3)):
        cache = joined(caches[number] for number in order).recall(question)
        found.append({(order[where], number) for where, number in kept_places(cache)})
    assert all(each == found[0] for each in found) and {where for where, _ in found[0]} >= {0, 1}


@pytest.mark.parametrize("lengths", [(30, 45), (40, 30, 2), (9, 60)])
def test_documents_that_fit_are_all_in_sight(lengths):
    """With one layer, whose keys know no other token, as the plain model sees the documents one
    after the other, behind the sinks of the last."""
    model, documents = patched(layers=1), several(lengths)
    *others, last = (documents[number] for number in order_of(documents))
    cache = joined(read(model, ids) for ids in documents).recall(torch.tensor([5]))
    question, sinks = document(8, 9), WINDOW["sink_tokens"]
    text = torch.cat([last[:sinks], *(ids[sinks:] for ids in others), last[sinks:], question])
    plain = decoder("llama", max_position_embeddings=4096, num_hidden_layers=1).eval()
    with torch.no_grad():
        wanted = plain(text[None]).logits[:, -8:]
        found = model(input_ids=question[None], use_cache=True, **{CACHE: cache}).logits
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("lengths", [(700, 300), (20, 40), (300, 3), (32, 32)])
def test_reading_goes_on_however_it_is_cut(lengths):
    """Also where places are empty yet; and each question recalls anew."""
    model, documents, more = patched(), several(lengths), document(120, 9)
    cache = joined(read(model, ids) for ids in documents).recall(documents[0][5:15])
    first, second = cache, copy.copy(cache)
    logits = []
    with torch.no_grad():
        for part, own in ((120, first), (7, second)):
            calls = more.split(part) if part > 7 else [*more[:40].split(1), *more[40:].split(7)]
            outputs = [model(input_ids=c[None], use_cache=True, **{CACHE: own}) for c in calls]
            logits.append(torch.cat([output.logits for output in outputs], 1))
    torch.testing.assert_close(*logits, atol=1e-4, rtol=1e-4)
    assert torch.equal(first.state.kept_position, second.state.kept_position)
    again = first.recall(more[:8])
    own = order_of(documents)[-1]
    documents[own] = torch.cat([documents[own], more])
    window = again.windows[0]
    assert kept_places(again) == naive_choice(documents, more[:8], window)


def test_generate_goes_on_and_rows_ask_their_own():
    model, documents = patched(), several((500, 400))
    caches = [read(model, ids) for ids in documents]
    cache, questions = joined(caches), [documents[0][200:206], documents[1][100:106]]
    cache.batch_repeat_interleave(2)
    recalled, ids = cache.recall(questions), torch.stack(questions)
    options = {"min_new_tokens": 6, "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    mask = recalled.attention_mask(torch.ones_like(ids))
    said = model.generate(ids, attention_mask=mask, **options, **{CACHE: recalled})
    for row, question in enumerate(questions):
        own = joined(caches).recall(question)
        mask = own.attention_mask(torch.ones_like(question[None]))
        alone = model.generate(question[None], attention_mask=mask, **options, **{CACHE: own})
        assert torch.equal(alone[0], said[row])
    assert [row.tokens for row in recalled.archive.rows()] == [400 + 6 + 5] * 2


# --- what cannot be joined


def test_caches_that_cannot_be_joined_are_refused(tmp_path):
    model, ids = patched(), document(100)
    cache = read(model, ids)
    for given, message in {
        (): "caches has none",
        (cache, InfiniCache(model.config, archive=True)): "cache 2 has 0 rows",
        (read(model, ids, InfiniCache(model.config)), cache): "cache 1 has no archive",
    }.items():
        with pytest.raises(ValueError, match=message):
            joined(given)
    with pytest.raises(TypeError, match="number 1 is 'text'"):
        joined(["text"])
    both = copy.copy(cache)
    both.batch_repeat_interleave(2)
    with pytest.raises(ValueError, match="cache 1 has 2 rows"):
        joined([both])
    with pytest.raises(ValueError, match="none of the documents has the 32 tokens.*as one text"):
        joined([read(model, document(31)), read(model, document(5))])
    rule = patched(update_rule="linear")
    with pytest.raises(ValueError, match="has a memory .update_rule='linear'.*read them as one"):
        joined([read(rule, ids)])
    for options in ({"kept_tokens": 80}, {"layers": 2}):
        with pytest.raises(ValueError, match="model"):
            joined([cache, read(patched(**options), ids)])
    other = patched()
    with torch.no_grad():
        other.model.layers[1].mlp.up_proj.weight += 1
    with pytest.raises(ValueError, match="of another model"):
        joined([cache, read(other, ids)])
    with pytest.raises(ValueError, match="save the caches that were joined"):
        joined([cache, cache]).save_pretrained(tmp_path / "file", model)


def test_files_are_joined_as_what_was_saved(tmp_path):
    model, documents = patched(), several()
    caches = [read(model, ids) for ids in documents]
    for number, cache in enumerate(caches):
        cache.save_pretrained(tmp_path / f"{number}", model)
    names = [tmp_path / f"{number}" for number in range(len(caches))]
    question = documents[0][300:309]
    loaded = joined(InfiniCache.from_pretrained(name, model) for name in names)
    one, two = joined(caches).recall(question), loaded.recall(question)
    assert kept_places(one) == kept_places(two)
    assert torch.equal(one.state.local_key, two.state.local_key)
    assert loaded.archive.nbytes() < one.archive.nbytes() / 2
    twice = joined([joined(caches[:2]), *caches[2:]]).recall(question)
    assert torch.equal(twice.state.local_key, one.state.local_key)


# --- a reader

FACTS = ("The gardener keeps zinnias.", "A sailor hid the compass.", "Nobody saw the quarry.")
QUESTION = " ".join(FACTS[:2])


@pytest.fixture(scope="module")
def tokenizer():
    return train_bpe([sample_text(), " ".join(FACTS)], 500)


@pytest.fixture(scope="module")
def model(tokenizer):
    options = {"segment_length": 32, "sink_tokens": 2, "kept_tokens": 320, "update_rule": "none"}
    options |= {"local_segments": 1, "keep_score": "recent", "mask_special_tokens": False}
    plain = decoder("llama", vocab_size=len(tokenizer), max_position_embeddings=4096)
    return patch_model(plain, **options).eval()


@pytest.fixture(scope="module")
def texts() -> list[str]:
    # a fact twice, as a word may lie on the border of two blocks
    words = "".join(filter(lambda each: each.isprintable() or each == "\n", sample_text()))
    pieces = [words[at : at + 800] for at in (0, 1600, 3200)]
    return [
        f"{piece[:400]}\n{fact} {fact}\n{piece[400:]}"
        for piece, fact in zip(pieces, FACTS, strict=True)
    ]


@pytest.fixture
def tokens_read(model):
    """Of each call of the model how many tokens."""
    called = []
    hook = model.model.register_forward_pre_hook(
        lambda module, args, given: called.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    yield called
    hook.remove()


def asked(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


def sources_of(reader: Reader) -> dict[int, str]:
    found: dict[int, str] = {}
    for passage in reader.passages[0]:
        found[passage.document] = found.get(passage.document, "") + passage.text
    return found


def test_only_new_documents_are_read(model, tokenizer, texts, tokens_read, tmp_path):
    """In any order, and each question recalls from all."""

    def told(own: list[str]) -> tuple[Reader, str]:
        reader = Reader(model, tokenizer, archive=True)
        files = [tmp_path / f"{hash(text)}" for text in own]
        reader.read_documents(own, files=files, progress=False)
        assert len(reader.texts) < 4  # one state, however many documents
        return reader, reader.chat(asked(QUESTION), max_new_tokens=5)

    first, said = told(texts)
    found = sources_of(first)
    assert "zinnias" in found[0] and "compass" in found[1]
    reading = sum(tokens_read)
    for given, again in ((texts, 0), ([texts[0] + " And more.", *texts[1:]], 1), (texts[::-1], 0)):
        tokens_read.clear()
        reader, other = told(given)
        assert (sum(tokens_read) > 100) == again and sum(tokens_read) < reading / 2
        if given is texts:
            assert other == said and reader.sources == first.sources
    found = sources_of(reader)  # of the texts in reverse
    assert "zinnias" in found[2] and "compass" in found[1]
    # the chat goes on, and each turn recalls anew
    messages = [*asked(QUESTION), {"role": "assistant", "content": other}]
    tokens_read.clear()
    reader.chat([*messages, *asked(FACTS[2])], max_new_tokens=3)
    assert "quarry" in sources_of(reader)[0] and sum(tokens_read) < 120


def test_a_chat_with_another_beginning_reads_each_document_after_it(
    model, tokenizer, texts, tokens_read
):
    system = {"role": "system", "content": "Be brief."}
    reader = Reader(model, tokenizer, archive=True)
    reader.read_documents(texts, progress=False)
    said = reader.chat([system, *asked(FACTS[1])], max_new_tokens=5)
    fresh = Reader(model, tokenizer, archive=True)
    fresh.read_documents(texts, progress=False, before=[system])
    tokens_read.clear()
    assert fresh.chat([system, *asked(FACTS[1])], max_new_tokens=5) == said
    assert fresh.sources == reader.sources and "compass" in sources_of(fresh)[1]
    assert sum(tokens_read) < 120


def test_documents_that_cannot_be_read_apart(model, tokenizer, texts):
    with pytest.raises(ValueError, match="archive=True, or have it read them as one text"):
        Reader(model, tokenizer).read_documents(texts, progress=False)
    reader = Reader(model, tokenizer, archive=True)
    for given, files in (([], None), (texts, ["one"])):
        with pytest.raises(ValueError, match="the texts of one or more documents"):
            reader.read_documents(given, files=files)
    assert reader.reads_apart(texts) and not reader.reads_apart(["short", "texts"])
    one = Reader(model, tokenizer, archive=True)
    one.read_documents(texts[:1], progress=False)
    reader.read_document(texts[0], progress=False)
    assert one.chat(asked("Who?"), max_new_tokens=4) == reader.chat(asked("Who?"), max_new_tokens=4)
    assert one.sources == reader.sources and one.document == reader.document == texts[0]


# --- the command


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return save_models(tmp_path_factory.mktemp("together"))


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    return command_in(tmp_path / "kept", monkeypatch, capsys)


@pytest.mark.slow
def test_the_command_reads_what_is_new_in_a_folder(folders, run, tmp_path, texts):
    folder = tmp_path / "folder"
    (folder / "deep").mkdir(parents=True)
    for name, text in zip(("a.txt", "b.md", "deep/c.txt"), texts, strict=True):
        (folder / name).write_text(text * 2, encoding="utf-8")
    (folder / ".hidden.txt").write_text("hidden", encoding="utf-8")
    (folder / "numbers.csv").write_text("1,2", encoding="utf-8")
    words = ["ask", folders["plain"], folder, "-q", "zinnias compass", "--max-new-tokens", 3]
    words += ["--device", "cpu", "--sources", "--kept-tokens", 200]
    first = run(*words)
    assert first.err.count("100%") >= 3 and "3 memory files" in first.err
    assert f"[1] {folder}" in first.err and "0 of them from before" in first.err
    kept = sorted((tmp_path / "kept" / "memories").glob("*.safetensors"))
    second = run(*words)
    assert "reading:" not in second.err and second.out == first.out and len(kept) == 3
    (folder / "b.md").write_text(texts[1] + texts[0], encoding="utf-8")
    assert "2 of them from before" in run(*words).err
    kept[0].write_bytes(b"damaged")
    kept[1].unlink()
    mended = run(*words)
    assert "reading again" in mended.err and kept[0].name in mended.err
    (tmp_path / "copy.txt").write_text(texts[0] * 2, encoding="utf-8")
    both = run(*words[:2], folder / "a.txt", tmp_path / "copy.txt", *words[3:])
    assert "memory file: " in both.err  # the same text is one document
    one = run(*words, "--memory", tmp_path / "one")  # as one text
    assert f"memory file: {tmp_path / 'one'}" in one.err and (tmp_path / "one").exists()


def test_the_files_of_a_folder(tmp_path, texts):
    names = ["b.TXT", "a.md", "deep/er/c.html", "deep/.git/d.txt", ".e.txt", "f.csv", "g", "h.py"]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("text", encoding="utf-8")
    found = [file.relative_to(tmp_path).as_posix() for file in files_in([tmp_path])]
    assert found == ["a.md", "b.TXT", "deep/er/c.html", "h.py"]
    (tmp_path / "h.py").write_text("")
    assert [file.name for file in files_in([tmp_path])] == ["a.md", "b.TXT", "c.html"]
    assert files_in([tmp_path / "h.py"])[0].name == "h.py"  # who names it is told
    (tmp_path / "h.py").write_text("\n")
    (tmp_path / "video.ts").write_bytes(bytes(range(256)) * 9)
    (tmp_path / "node_modules").mkdir()
    (tmp_path / "node_modules" / "i.js").write_text("text")
    with pytest.warns(UserWarning, match="left out: .*video.ts is no text"):
        assert [file.name for file in files_in([tmp_path])] == ["a.md", "b.TXT", "c.html"]
    assert files_in([tmp_path / "f.csv", tmp_path / "deep"])[0].name == "f.csv"
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        ValueError, match="empty has no documents: .* not empty are read .*.txt, .*.pdf, "
    ):
        files_in([tmp_path / "empty"])


@pytest.mark.parametrize("damages", [1, 2])
def test_a_damaged_file_of_several_is_named(damages, model, tokenizer, texts, tmp_path):
    files = [tmp_path / name for name in ("one", "two", "three")]
    Reader(model, tokenizer, archive=True).read_documents(texts, files=files, progress=False)
    files[damages].write_bytes(b"damaged")
    with pytest.raises(MemoryFileError, match=files[damages].name):
        Reader(model, tokenizer, archive=True).read_documents(texts, files=files, progress=False)
