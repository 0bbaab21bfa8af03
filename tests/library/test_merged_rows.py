"""Rows of several caches as one batch: each goes on as it would alone, whatever the others are."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cases import examples
from decoders import decoder, fitted
from hf_infini import InfiniCache, patch_model
from hf_infini.cache.merged import merged, row_of
from hf_infini.compat.cache_name import CACHE
from memories import VARIANTS
from models import token_ids

WINDOW = {"segment_length": 4, "local_segments": 1, "sink_tokens": 2}
RECALLING = WINDOW | {"kept_tokens": 9, "update_rule": "none", "keep_score": "recent"}
PATCHED = {
    "llama, recent": lambda: patch_model(decoder("llama"), **RECALLING),
    "qwen2, learned": lambda: fitted(
        patch_model(decoder("qwen2"), **WINDOW, kept_tokens=9, keep_score="learned")
    ),
    "gpt2, attention": lambda: patch_model(
        decoder("gpt2"), **WINDOW, kept_tokens=5, keep_score="attention"
    ),
}
MADE = PATCHED | {
    f"{make.__name__} {number}": lambda make=make, options=options: make(**options)
    for number, (make, options) in enumerate(VARIANTS)
    if "layers" not in options
}


@pytest.fixture(scope="module")
def models():
    return {name: make().double().eval() for name, make in MADE.items()}


@torch.no_grad()
def call(model, cache, ids, mask=None):
    return model(ids, attention_mask=mask, use_cache=True, **{CACHE: cache}).logits


def same(one: InfiniCache, other: InfiniCache) -> None:
    """The states of every layer, but for the order of sums."""
    for mine, its in zip(one.layers, other.layers, strict=True):
        assert mine.state.tensors().keys() - {"local_skipped"} == its.state.tensors().keys() - {
            "local_skipped"
        }
        for name, tensor in its.state.tensors().items():
            if tensor.dtype == torch.bool and name not in mine.state.tensors():
                assert not tensor.any()
            else:
                torch.testing.assert_close(mine.state.tensors()[name], tensor, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("name", MADE)
@examples(10)
@given(data=st.data())
def test_rows_go_on_as_each_alone(models, name, data):
    """Each has read so many tokens; then, by calls of any width, some rows have padding."""
    model = models[name]
    lengths = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=4))
    alone = []
    for number, length in enumerate(lengths):
        cache = InfiniCache(model.config)
        call(model, cache, token_ids(1, length, seed=number))
        alone.append(cache)
    batch = merged([copy.copy(cache) for cache in alone])
    for seed, width in enumerate(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))):
        rows = len(alone)
        real = data.draw(st.lists(st.integers(0, width), min_size=rows, max_size=rows))
        mask = torch.arange(width).expand(rows, -1) >= width - torch.tensor(real)[:, None]
        ids = token_ids(rows, width, seed=100 + seed)
        found = call(model, batch, ids, mask.long())
        for row, cache in enumerate(alone):
            if real[row]:
                wanted = call(model, cache, ids[row : row + 1, width - real[row] :])
                torch.testing.assert_close(
                    found[row : row + 1, width - real[row] :], wanted, rtol=1e-9, atol=1e-9
                )
        kept = data.draw(st.lists(st.sampled_from(range(rows)), min_size=1, unique=True))
        batch.batch_select_indices(torch.tensor(kept))
        alone = [alone[row] for row in kept]
    for row, cache in enumerate(alone):
        same(row_of(batch, row), cache)
    assert row_of(batch, 0).state.local_key.data_ptr() != batch.state.local_key.data_ptr()


@torch.no_grad()
def test_a_row_with_tokens_that_the_memory_leaves_out_beside_one_without():
    model = patch_model(decoder("llama"), **WINDOW, mask_special_tokens=False).double().eval()
    caches = []
    for number, mask in enumerate((None, torch.arange(11)[None] % 3 > 0)):
        caches.append(InfiniCache(model.config))
        ids = token_ids(1, 11, seed=number)
        model(ids, memory_mask=mask, use_cache=True, **{CACHE: caches[-1]})
    assert caches[0].state.local_skipped is None
    assert caches[1].state.local_skipped.any()
    batch, new = merged(caches), token_ids(2, 9, seed=5)
    call(model, batch, new)
    for row, cache in enumerate(caches):
        call(model, cache, new[row : row + 1])
        same(row_of(batch, row), cache)


def test_archives_are_merged_and_each_row_recalls_from_its_own(models):
    model, alone = models["llama, recent"], []
    for number, length in enumerate((300, 70, 410)):
        cache = InfiniCache(model.config, archive=True)
        call(model, cache, token_ids(1, length, seed=number))
        alone.append(cache)
    batch, questions = merged(alone), [token_ids(1, 5, seed=9 + n)[0] for n in range(3)]
    together = batch.recall(questions)
    for row, (cache, question) in enumerate(zip(alone, questions, strict=True)):
        same(row_of(together, row), cache.recall(question))
        assert torch.equal(row_of(batch, row).archive.rows()[0].ids, cache.archive.rows()[0].ids)


def test_what_cannot_be_merged_is_refused(models):
    model = models["llama, recent"]
    read, archived = InfiniCache(model.config), InfiniCache(model.config, archive=True)
    for cache in (read, archived):
        call(model, cache, token_ids(1, 5))
    other = models["gpt2, attention"]
    with pytest.raises(ValueError, match="give one at least"):
        merged([])
    with pytest.raises(ValueError, match="cache 2 has read nothing yet"):
        merged([read, InfiniCache(model.config)])
    with pytest.raises(ValueError, match="cache 1 has archive=True, and cache 2 False"):
        merged([archived, read])
    with pytest.raises(ValueError, match="of another model"):
        merged([read, InfiniCache(other.config)])
    partly = patch_model(decoder("llama"), **WINDOW, layers=[0])
    cache = InfiniCache(partly.config)
    call(partly, cache, token_ids(1, 5))
    with pytest.raises(ValueError, match="patch all layers"):
        merged([cache])
    with pytest.raises(ValueError, match="one of the 1 rows; got 1"):
        row_of(read, 1)


def test_a_merged_cache_says_how_it_goes_on_where_ids_are_given_as_a_whole_text(models):
    """Its rows have passed different numbers of columns, so no ids are the whole text of all."""
    model, caches = models["llama, recent"], []
    for number, length in enumerate((9, 14)):
        caches.append(InfiniCache(model.config))
        call(model, caches[-1], token_ids(1, length, seed=number))
    batch, new = merged(caches), token_ids(2, 3, seed=5)
    with pytest.raises(ValueError, match="attention_mask=cache.attention_mask"):
        model.generate(torch.cat([token_ids(2, 14), new], 1), **{CACHE: batch}, max_new_tokens=3)
    whole = batch.attention_mask(torch.ones_like(new))
    how = {"max_new_tokens": 6, "do_sample": False, "disable_compile": True}
    found = model.generate(new, attention_mask=whole, **{CACHE: batch}, **how)
    for row, cache in enumerate(caches):
        one = new[row : row + 1]
        mask = cache.attention_mask(torch.ones_like(one))
        assert torch.equal(
            found[row : row + 1], model.generate(one, attention_mask=mask, **{CACHE: cache}, **how)
        )
