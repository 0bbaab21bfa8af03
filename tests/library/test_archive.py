"""What a question recalls: as the reference says, from an archive that is the same however a text
was read, in memory and in files."""

import copy

import pytest
import torch

from decoders import decoder
from hf_infini import InfiniCache, patch_model
from hf_infini.cache.files import MemoryFileError
from hf_infini.compat.cache_name import CACHE
from hf_infini.ops.naive import naive_recalled, naive_relevance
from hf_infini.ops.recall import LEAST, have_left

WINDOW = dict(segment_length=16, local_segments=1, sink_tokens=2, kept_tokens=90)
TOKENS = 700
KINDS = (True, "int8")  # of archives


def patched(family: str = "llama", **options):
    # shares: layers with fewer and more places
    given = WINDOW | {"update_rule": "none", "keep_score": "recent"} | options
    return patch_model(decoder(family, max_position_embeddings=4096), **given).eval()


@torch.no_grad()
def read(model, ids, cuts=(), mask=None, cache=None, archive=True, **inputs) -> InfiniCache:
    """A cache with an archive, or the given one, after ids, in calls that begin at the cuts."""
    cache = InfiniCache(model.config, archive=archive) if cache is None else cache
    begins = [0, *cuts, ids.shape[1]]
    for begin, end in zip(begins, begins[1:], strict=False):
        part = slice(begin, end)
        own = {name: value[:, part] for name, value in inputs.items()}
        own |= {} if mask is None else {"attention_mask": mask[:, part]}
        model(input_ids=ids[:, part], use_cache=True, **{CACHE: cache}, **own)
    return cache


def text(rows: int, tokens: int = TOKENS, seed: int = 0):
    """Few common ids, and rare ones, which questions ask for."""
    draw = torch.Generator().manual_seed(seed)
    common = torch.randint(3, 20, (rows, tokens), generator=draw)
    rare = torch.randint(20, 97, (rows, tokens), generator=draw)
    return torch.where(torch.rand(rows, tokens, generator=draw) < 0.1, rare, common)


def kept(cache: InfiniCache) -> list[torch.Tensor]:
    states = (getattr(layer, "state", None) for layer in cache.layers)
    return [state.kept_position for state in states if state is not None]


@pytest.mark.parametrize("update_rule", ["none", "linear", "gated_delta"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3_text", "qwen3"])
def test_an_archive_does_not_depend_on_the_calls(family, update_rule):
    """Cut, alone in a row or beside padding: the same blocks and the same recall."""
    extra = {"position_encoding": "segment"} if family == "gpt2" else {}
    model = patched(family, update_rule=update_rule, **extra)
    ids = text(2)
    question = ids[0, 300:309], ids[1, 500:505]
    whole = read(model, ids)
    cut = read(model, ids, [1, 2, 3, 70, 71, 72, 400])
    padded = torch.nn.functional.pad(ids, (5, 0), value=0)
    mask = torch.ones_like(padded)
    mask[:, :5] = 0
    beside = read(model, padded, [9, 10, 320], mask)
    single = [read(model, row[None]) for row in ids]
    recalled = whole.recall(question)
    for other in (cut, beside):
        for one, two in zip(whole.archive.rows(), other.archive.rows(), strict=True):
            assert torch.equal(one.ids, two.ids) and len(one.blocks) == len(two.blocks) == 10
        assert all(map(torch.equal, *map(kept, (recalled, other.recall(question)))))
        for one, two in zip(recalled.layers, other.recall(question).layers, strict=True):
            if (state := getattr(one, "state", None)) is not None:
                torch.testing.assert_close(
                    state.local_key, two.state.local_key, atol=1e-4, rtol=1e-4
                )
    for row, own in enumerate(single):
        alone = own.recall(question[row])
        assert all(
            torch.equal(a[row], b[0]) for a, b in zip(*map(kept, (recalled, alone)), strict=True)
        )


@pytest.mark.parametrize("shares", [None, [0.5, 1.5, 1, 1]])
def test_recalled_tokens_have_the_keys_and_values_that_were_read(shares):
    """Those of the naive choice, by one pass that keeps all of them."""
    model = patched(kept_shares=shares)
    ids = text(1)
    everything = patched(kept_tokens=TOKENS)
    everything.load_state_dict(model.state_dict())
    rows = read(model, ids).archive.rows()[0]
    cache = read(model, ids).recall(ids[0, 300:309])
    relevance = naive_relevance(ids[0].tolist(), ids[0, 300:309].tolist())
    for number, window in cache.windows.items():
        numbers, _ = naive_recalled(relevance, [True] * TOKENS, TOKENS, window)
        state = cache.layers[number].state
        assert state.kept_position[0, 0].tolist() == numbers and len(numbers) == window.kept_tokens
        assert bool((state.kept_position == state.kept_position[:, :1]).all())
        wanted = torch.tensor(numbers)
        for part, own in zip(
            rows.states(number, rows.found(wanted)),
            (state.local_key, state.local_value),
            strict=True,
        ):
            assert torch.equal(own[0, :, window.sink_tokens : window.ahead], part)
    # the first layer's keys depend on no window
    first = read(everything, ids).archive.rows()[0]
    every = torch.arange(TOKENS)
    for one, two in zip(
        first.states(0, first.found(every)),
        rows.states(0, rows.found(every)),
        strict=True,
    ):
        torch.testing.assert_close(one, two, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("update_rule", ["none", "linear"])
def test_places_for_which_nothing_is_relevant_enough_stay_empty(update_rule):
    """Beside a row that fills its places: steps, and what is read then, as in one call."""
    model, ids = patched(update_rule=update_rule, kept_tokens=500), text(2)
    ids[ids == 96] = 95
    ids[0, 200:203] = 96
    cache = read(model, ids[:, :600]).recall([[96], ids[1, 40:48]])
    relevance = naive_relevance(ids[0, :600].tolist(), [96])
    for number, window in cache.windows.items():
        least = {"none": LEAST, "linear": 0}[update_rule]
        numbers, _ = naive_recalled(relevance, [True] * 600, 600, window, least)
        found = cache.layers[number].state.kept_position[:, 0]
        assert found[0][found[0] >= 0].tolist() == numbers
        filled = (found >= 0).sum(1).tolist()
        # seven blocks about the term, without sinks
        assert filled == ([446, 500] if update_rule == "none" else [500, 500])
    whole, steps, rest = copy.copy(cache), copy.copy(cache), ids[:, 600:]
    with torch.no_grad():
        wanted = model(input_ids=rest, use_cache=True, **{CACHE: whole}).logits
        found = [
            model(input_ids=rest[:, [at]], use_cache=True, **{CACHE: steps}).logits
            for at in range(rest.shape[1])
        ]
    torch.testing.assert_close(torch.cat(found, 1), wanted, atol=1e-4, rtol=1e-4)
    assert all(map(torch.equal, *map(kept, (whole, steps))))
    for number, window in cache.windows.items():  # what has left the window is there now
        first, end = have_left(700, window)
        there = whole.layers[number].state.kept_position[0, 0]
        assert update_rule != "none" or set(range(end - 50, end)) <= set(there.tolist())


@pytest.mark.parametrize("tokens", [90, 140, 170])
def test_layers_with_few_places_recall_where_those_with_many_have_all(tokens):
    model, ids = patched(kept_shares=[0.5, 1.5, 1, 1]), text(2, tokens)
    cache = read(model, ids)
    recalled = cache.recall([ids[0, 20:24], ids[1, 64:68]])
    for number, window in cache.windows.items():
        for row in range(2):
            relevance = naive_relevance(
                ids[row].tolist(), [ids[0, 20:24], ids[1, 64:68]][row].tolist()
            )
            numbers, _ = naive_recalled(relevance, [True] * tokens, tokens, window)
            found = recalled.layers[number].state.kept_position[row, 0]
            assert found[found >= 0].tolist() == numbers


def test_a_text_that_fits_is_answered_as_by_the_plain_model():
    plain, ids = decoder("llama", max_position_embeddings=4096).eval(), text(1, 110)
    model = patched()
    cache = read(model, ids[:, :100], [30])
    recalled = cache.recall(ids[0, 3:7])
    assert all(map(torch.equal, *map(kept, (cache, recalled))))
    with torch.no_grad():
        after = model(input_ids=ids[:, 100:], use_cache=True, **{CACHE: recalled}).logits
        torch.testing.assert_close(after, plain(ids).logits[:, 100:], atol=1e-4, rtol=1e-4)


def test_a_new_document_in_a_row_begins_a_new_archive():
    """Packed, in one call or in several, and for one row of two."""
    model = patched(mask_special_tokens=False)
    ids = text(2, 500)
    positions = torch.arange(500).repeat(2, 1)
    positions[0, 320:] -= 320
    cache = read(model, ids, [150, 330], position_ids=positions)
    rows = cache.archive.rows()
    assert [row.tokens for row in rows] == [180, 500] and torch.equal(rows[0].ids, ids[0, 320:])
    own = read(model, ids[:1, 320:]).recall(ids[0, 400:404])
    found = cache.recall([ids[0, 400:404], ids[1, :4]])
    assert all(torch.equal(a[0], b[0]) for a, b in zip(*map(kept, (found, own)), strict=True))


@pytest.mark.parametrize("rule", ["none", "linear"])
def test_what_is_read_next_displaces_the_least_relevant_unless_there_is_a_memory(rule):
    model, ids = patched(update_rule=rule), text(1)
    cache = read(model, ids).recall(ids[0, 300:309])
    before, order = kept(cache)[0][0, 0], cache.passages()
    assert order[0][0] // 64 == naive_first(ids[0], ids[0, 300:309])
    after = read(model, text(1, 6, 1), cache=cache)
    now = kept(after)[0][0, 0]
    if rule == "linear":
        assert torch.equal(now, before)
    else:
        gone = set(before.tolist()) - set(now.tolist())
        # with 706 tokens 672 to 687 have left the window
        assert len(gone) == 16 and gone <= set(order[-1].tolist()) and now[-1] == 687
    assert after.archive.rows()[0].tokens == TOKENS + 6
    again = after.recall(ids[0, 10:20])
    assert not torch.equal(kept(again)[0], now[None, None])


def naive_first(ids, question) -> int:
    relevance = naive_relevance(ids.tolist(), question.tolist())
    return relevance.index(max(relevance))


def test_special_and_masked_tokens_are_not_recalled():
    model, ids = patched(mask_special_tokens=True), text(1)
    ids[0, 256:320:2] = 1  # bos
    mask = torch.ones_like(ids)
    mask[0, 320:340] = 0
    cache = read(model, ids, memory_mask=mask).recall(ids[0, 257:300])
    found = set(kept(cache)[0][0, 0].tolist())
    assert 257 in found and not found & {*range(256, 320, 2), *range(320, 340)}


# --- the cache


@pytest.mark.parametrize("archive", KINDS)
def test_copies_and_rows_have_their_own_archives(archive):
    model, ids = patched(), text(2)
    cache = read(model, ids, archive=archive)
    other = copy.copy(cache)
    read(model, text(2, 100, 1), cache=other)
    assert [row.tokens for row in cache.archive.rows()] == [TOKENS] * 2
    assert [row.tokens for row in other.archive.rows()] == [TOKENS + 100] * 2
    for change in ("batch_repeat_interleave", "reorder_cache", "batch_select_indices"):
        rows = [0, 0, 1, 1] if change == "batch_repeat_interleave" else [1, 1, 0, 0]
        changed = copy.copy(cache)
        getattr(changed, change)(2 if rows[0] == 0 else torch.tensor(rows))
        found = [row.ids for row in changed.archive.rows()]
        assert all(map(torch.equal, found, ids[rows]))
        changed.recall([ids[0, :4], ids[1, :4], ids[0, 90:95], ids[1, :4]])
    changed.reset()
    assert changed.archived == archive and not changed.archive.rows()
    assert not cache.is_compileable and InfiniCache(model.config).is_compileable


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_are_copied_and_of_any_type(dtype, tmp_path):
    model, ids = patched(), text(1, 200)
    given = ids.clone().to(dtype)
    cache = read(model, given, [100])
    given.zero_()
    cache.save_pretrained(tmp_path / "text", model)
    for each in (cache, InfiniCache.from_pretrained(tmp_path / "text", model)):
        assert torch.equal(each.archive.rows()[0].ids, ids[0])


def test_an_archive_holds_no_graph():
    model, ids = patched(), text(1, 100)
    cache = InfiniCache(model.config, archive=True)
    model(input_ids=ids, use_cache=True, **{CACHE: cache}).logits.sum().backward()
    assert cache.layers[0].state.local_key.requires_grad
    [held] = cache.archive._calls
    assert not any(side.requires_grad for pair in held.layers.values() for side in pair)


@pytest.mark.parametrize("beams", [2, 3])
def test_a_beam_search_with_an_archive_is_one_without(beams):
    """And each beam's archive has the beam's own text."""
    model, ids = patched(), text(1)
    question, said = ids[:, 300:309], []
    for archived in (True, False):
        cache = read(model, ids).recall(question)
        cache.archive = cache.archive if archived else None
        cache.batch_repeat_interleave(beams)
        mask = cache.attention_mask(torch.ones_like(question))
        options = {"max_new_tokens": 70, "min_new_tokens": 70, "num_beams": beams}
        found = model.generate(
            question, attention_mask=mask, do_sample=False, **options, **{CACHE: cache}
        )
        said.append(found)
        if archived:
            for row, end in zip(cache.archive.rows(), cache.text["text_end"], strict=True):
                assert torch.equal(row.ids[-len(end) :], end)
                assert row.tokens == TOKENS + 9 + 69
    assert torch.equal(*said)


def test_generate_goes_on_from_a_recall():
    model, ids = patched(), text(1)
    cache, question = read(model, ids), ids[:, 300:309]
    recalled = cache.recall(question)
    mask = recalled.attention_mask(torch.ones_like(question))
    said = model.generate(
        question,
        attention_mask=mask,
        min_new_tokens=6,
        max_new_tokens=6,
        do_sample=False,
        **{CACHE: recalled},
    )
    assert recalled.archive.rows()[0].tokens == TOKENS + 9 + 5  # the last was not read
    by_hand = read(model, said[:, :-1], cache=cache.recall(question))
    assert torch.equal(by_hand.archive.rows()[0].ids, recalled.archive.rows()[0].ids)
    assert all(map(torch.equal, *map(kept, (by_hand, recalled))))


def test_a_call_that_fails_leaves_the_archive(monkeypatch):
    model, ids = patched(), text(1)
    cache = read(model, ids)

    def fail(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(type(model.model.layers[-1].mlp), "forward", fail)
        with pytest.raises(KeyboardInterrupt):
            read(model, ids, cache=cache)
    assert cache.archive.rows()[0].tokens == TOKENS
    assert read(model, text(1, 5), cache=cache).archive.rows()[0].tokens == TOKENS + 5


def test_what_cannot_be_recalled_is_refused():
    model, ids = patched(), text(2)
    with pytest.raises(ValueError, match="this cache has none: have InfiniCache"):
        read(model, ids, cache=InfiniCache(model.config)).recall(ids[0])
    with pytest.raises(ValueError, match="has read nothing yet"):
        InfiniCache(model.config, archive=True).recall(ids[0])
    cache = read(model, ids)
    wrong = [ids[0]] * 3, ids[None], [[[1]]], "Who?", ["Who?"] * 2, [None], ids[0, 0], ids[0] / 2
    for question in (*wrong, ids[0] > 9, [[], [1.5]]):
        with pytest.raises(ValueError, match="one question, .tokens., or of 2"):
            cache.recall(question)
    bare = patch_model(decoder("llama"), segment_length=16, update_rule="none")
    with pytest.raises(ValueError, match="for models with kept tokens"):
        InfiniCache(bare.config, archive=True)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match="one autocast"):
        read(model, text(2, 300), cache=cache)
    # filled before it had an archive
    cache = read(model, ids, cache=InfiniCache(model.config))
    cache.archive = InfiniCache(model.config, archive=True).archive
    with pytest.raises(ValueError, match="its archive has the last 300 of them"):
        read(model, text(2, 300), cache=cache)


# --- files


def changed(content: bytes, how: str, at: int) -> bytes | None:
    if how == "flipped":
        return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]
    return {"cut": content[:-1], "empty": b"", "gone": None}[how]


@pytest.mark.parametrize("archive", KINDS)
def test_a_file_has_the_archive(archive, tmp_path):
    model, ids = patched(), text(2)
    cache, question = read(model, ids, archive=archive), [ids[0, 300:309], ids[1, 9:20]]
    file = tmp_path / "text.safetensors"
    cache.save_pretrained(file, model)
    loaded = InfiniCache.from_pretrained(file, model)
    for one, two in zip(cache.recall(question).layers, loaded.recall(question).layers, strict=True):
        pairs = zip(one.state.tensors().items(), two.state.tensors().items(), strict=True)
        assert all(a[0] == b[0] and torch.equal(a[1], b[1]) for a, b in pairs)
    assert loaded.archive.nbytes() < cache.archive.nbytes() / 5
    # both go on, in memory, and are saved again: an old file of blocks goes
    more = text(2, 200, 1)
    for each in (cache, loaded):
        read(model, more, cache=each)
    assert all(map(torch.equal, *map(kept, (cache.recall(question), loaded.recall(question)))))
    loaded.save_pretrained(file, model)
    other = tmp_path / "other.safetensors"
    cache.save_pretrained(other, model)
    assert len([*tmp_path.iterdir()]) == 4
    assert other.read_bytes() == file.read_bytes()
    blocks = [path.read_bytes() for path in tmp_path.glob("*.archive")]
    assert blocks[0] == blocks[1] and len(blocks[0]) == 2 * 14 * len(blocks[0]) // 28
    found = InfiniCache.from_pretrained(other, model)
    assert all(map(torch.equal, *map(kept, (found.recall(question), loaded.recall(question)))))


def test_an_archive_that_is_not_the_caches_is_not_saved(tmp_path):
    """What is interrupted between the two leaves an older file whole."""
    model, ids = patched(), text(1)
    cache, other = read(model, ids[:, :300]), read(model, ids)
    other.archive = cache.archive
    with pytest.raises(ValueError, match="has .300. tokens and the cache .700.*read the text"):
        other.save_pretrained(tmp_path / "text", model)
    assert not [*tmp_path.iterdir()]


def test_files_are_found_from_another_folder(tmp_path, monkeypatch):
    model, ids = patched(), text(1)
    monkeypatch.chdir(tmp_path)
    cache = read(model, ids)
    cache.save_pretrained("text", model)
    loaded = InfiniCache.from_pretrained("text", model)
    monkeypatch.chdir("/")
    wanted = kept(cache.recall(ids[0, 300:309]))
    assert all(map(torch.equal, kept(loaded.recall(ids[0, 300:309])), wanted))


def test_the_memory_of_a_shorter_text_leaves_no_old_blocks(tmp_path):
    model, ids = patched(), text(1)
    for tokens, files in ((TOKENS, 2), (300, 2), (50, 1)):
        read(model, ids[:, :tokens]).save_pretrained(tmp_path / "text", model)
        assert len([*tmp_path.iterdir()]) == files
        cache = InfiniCache.from_pretrained(tmp_path / "text", model)
        assert torch.equal(cache.archive.rows()[0].ids, ids[0, :tokens])


@pytest.mark.parametrize("how", ["flipped", "cut", "empty", "gone"])
@pytest.mark.parametrize("loads_first", [False, True])
@pytest.mark.parametrize("archive", KINDS)
def test_a_damaged_archive_is_refused(archive, how, loads_first, tmp_path):
    """When it is loaded or, while it is used, when a question needs the block."""
    model, ids = patched(), text(1)
    file = tmp_path / "text.safetensors"
    read(model, ids, archive=archive).save_pretrained(file, model)
    cache = InfiniCache.from_pretrained(file, model)
    [blocks] = tmp_path.glob("*.archive")
    size = blocks.stat().st_size // 10
    place = 9 if how == "cut" else 4
    content = changed(blocks.read_bytes(), how, 4 * size + 77)
    blocks.unlink() if content is None else blocks.write_bytes(content)
    question = ids[0, 64 * place + 5 : 64 * place + 40]
    with pytest.raises(MemoryFileError, match=f"{blocks.name}.*(damaged|cut off|is gone)"):
        if not loads_first:
            cache = InfiniCache.from_pretrained(file, model)
        cache.recall(question)


def test_an_archive_of_another_text_or_model_is_refused(tmp_path):
    model = patched()
    for seed in (0, 1):
        read(model, text(1, seed=seed)).save_pretrained(tmp_path / f"{seed}.safetensors", model)
    first, second = sorted(tmp_path.glob("*.archive"))
    first.write_bytes(second.read_bytes())
    cache = InfiniCache.from_pretrained(tmp_path / "0.safetensors", model)
    with pytest.raises(MemoryFileError, match="is not what was written"):
        cache.recall(text(1)[0, 300:309])
