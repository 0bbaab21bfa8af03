"""A cache goes on from its own text and its own model: other ids, other weights, another dtype or
depth are refused, and what a memory cannot do is said in words."""

import copy
import gc
import inspect
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.cache_utils import Cache

from decoders import decoder
from hf_infini import InfiniCache, patch_model
from hf_infini.cache.cache import TEXT_END, digest_after
from hf_infini.cache.files import read_memory_file, write_memory_file
from hf_infini.cache.identity import different_weights, sample_of
from hf_infini.cache.merged import merged, row_of
from memories import MIXED, each, read
from models import causal_mha, generate, infini_gpt2, token_ids


def long_gpt2(**options):
    return infini_gpt2(**{"position_encoding": "segment"} | options)


def kept_llama(**options):
    options = {"segment_length": 8, "kept_tokens": 6, "keep_score": "learned"} | options
    return patch_model(decoder("llama", vocab_size=89, num_hidden_layers=2), **options).eval()


# --- which text
# --------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_the_digest_knows_every_id_and_not_the_cuts(data):
    ids = token_ids(2, data.draw(st.integers(2, 200)), seed=data.draw(st.integers(0, 99)))
    tokens, whole, digest = ids.shape[1], digest_after(None, ids), None
    cuts = sorted(data.draw(st.sets(st.integers(1, tokens - 1), max_size=6)))
    for begin, end in zip((0, *cuts), (*cuts, tokens), strict=True):
        digest = digest_after(digest, ids[:, begin:end].to(data.draw(st.sampled_from(INTEGERS))))
    assert torch.equal(digest, whole) and whole[:, 0].tolist() == [tokens, tokens]
    place, other = data.draw(st.integers(0, tokens - 1)), ids.clone()
    other[0, place] += data.draw(st.sampled_from((-2, -1, 1, 2**20)))
    first, second = data.draw(st.lists(st.integers(0, tokens - 1), min_size=2, max_size=2))
    swapped = ids.clone()
    swapped[0, [first, second]] = ids[0, [second, first]]
    for changed in (other, swapped):
        found = digest_after(None, changed)
        assert torch.equal(found[0], whole[0]) == torch.equal(changed[0], ids[0])
        assert torch.equal(found[1], whole[1])


INTEGERS = (torch.int64, torch.int32)


@pytest.mark.parametrize("place", [0, 1, 40, 109])
@pytest.mark.parametrize("make", [long_gpt2, kept_llama])
def test_a_change_anywhere_in_the_text_is_refused(make, place, tmp_path):
    """Also where the last ids and the length are the same; in every row, through a file, and of a
    cache whose rows were moved."""
    model, ids = make(), token_ids(2, 110)
    cache, changed = read(model, ids), ids.clone()
    changed[1, place] += 1
    moved = copy.copy(cache)
    moved.reorder_cache(torch.tensor([1, 0]))
    cache.save_pretrained(tmp_path / "memory", model)
    loaded = InfiniCache.from_pretrained(tmp_path / "memory", model)
    new = token_ids(2, 3, seed=7)
    for kept, rows in ((cache, [0, 1]), (loaded, [0, 1]), (moved, [1, 0])):
        with pytest.raises(ValueError, match="113 ids are not the 110 .*has read another text"):
            generate(model, 2, input_ids=torch.cat([changed[rows], new], 1), past_key_values=kept)
        with pytest.raises(ValueError, match="110 ids are not the 110 .*there are no new ones"):
            generate(model, 2, input_ids=ids[rows], past_key_values=kept)
        whole = torch.cat([ids[rows], new], 1)
        assert torch.equal(
            generate(model, 2, input_ids=whole, past_key_values=kept),
            generate(model, 2, input_ids=whole),
        )


def test_beams_padding_and_embeddings_have_their_digests():
    model, ids = long_gpt2(), token_ids(2, 100)
    mask = torch.ones_like(ids)
    ids[0, :5] = mask[0, :5] = 0
    cache = read(model, ids, mask)
    cache.batch_repeat_interleave(3)
    whole = torch.cat([ids, token_ids(2, 2, seed=3)], 1)
    real = torch.cat([mask, mask[:, -2:]], 1)
    options = {"num_beams": 3, "attention_mask": real}
    changed = whole.clone()
    changed[0, 2] = 5
    with pytest.raises(ValueError, match="another text"):
        generate(model, 3, input_ids=changed, past_key_values=copy.copy(cache), **options)
    found = generate(model, 3, input_ids=whole, past_key_values=cache, **options)
    assert torch.equal(found, generate(model, 3, input_ids=whole, **options))
    with torch.no_grad():
        embedded = model(inputs_embeds=model.transformer.wte(ids[1:, :30]), use_cache=True)
        cache = model(ids[1:, 30:], past_key_values=embedded.past_key_values).past_key_values
    as_read = ids[1:].clone()
    as_read[:, :30] = -2
    assert torch.equal(cache.text["text_digest"], digest_after(None, as_read))
    with pytest.raises(ValueError, match="another text"):
        generate(model, 3, input_ids=whole[1:], past_key_values=cache)


def test_a_file_without_a_digest_is_known_by_its_end(tmp_path):
    """As earlier versions have written it; what goes on from it has no digest either."""
    model, ids, file = long_gpt2(), token_ids(1, 110), tmp_path / "memory"
    read(model, ids).save_pretrained(file, model)
    record, tensors = read_memory_file(file)
    del tensors["text_digest"], record["model"]["config"]["feature_map"]
    write_memory_file(file, tensors, record)
    cache, whole = InfiniCache.from_pretrained(file, model), torch.cat([ids, ids[:, :4]], 1)
    for _ in range(2):
        last, first = whole.clone(), whole.clone()
        last[0, cache.get_seq_length() - TEXT_END] += 1
        first[0, 0] += 1  # not known
        with pytest.raises(ValueError, match="another text"):
            generate(model, 2, input_ids=last, past_key_values=cache)
        generate(model, 2, input_ids=first, past_key_values=copy.copy(cache))
        whole = generate(model, 2, input_ids=whole, past_key_values=cache)
        whole = torch.cat([whole, ids[:, :2]], 1)
    assert "text_digest" not in cache.text


@pytest.mark.slow
def test_compiled_steps_keep_the_same_digest():
    model, ids = long_gpt2(), token_ids(2, 90)
    made = []
    for disable in (True, False):
        cache = read(model, ids)
        torch._dynamo.reset()
        options = {"disable_compile": disable, "return_dict_in_generate": True}
        whole = torch.cat([ids, ids[:, :1]], 1)
        with torch.no_grad():
            compiled = model.generate(
                whole, past_key_values=cache, max_new_tokens=12, do_sample=False, **options
            )
        made.append(compiled.past_key_values.text["text_digest"])
        assert torch.equal(made[-1], digest_after(None, compiled.sequences[:, :-1]))
    assert torch.equal(*made)


# --- which model
# --------------------------------------------------------------------------------------------------

OTHERS = {
    "weights": (long_gpt2, lambda: long_gpt2(seed=1), "has other numbers"),
    "dtype": (long_gpt2, lambda: long_gpt2().to(torch.bfloat16), "dtype is torch.float32 in the"),
    "depth": (long_gpt2, lambda: long_gpt2(n_layer=2), "num_hidden_layers is 3 in the cache and 2"),
    "window": (long_gpt2, lambda: long_gpt2(segment_length=4), "sink_tokens, kept_tokens"),
    "layers": (long_gpt2, lambda: long_gpt2(layers=[0, 2]), "by layer is"),
    "rule": (long_gpt2, lambda: long_gpt2(update_rule="delta"), "update_rule is linear in the"),
    "scratch": (
        lambda: causal_mha(attention="infini", segment_length=8, position_encoding="rope"),
        lambda: causal_mha(1, attention="infini", segment_length=8, position_encoding="rope"),
        "has other numbers",
    ),
}


@pytest.mark.parametrize("alive", [True, False])
@pytest.mark.parametrize("kind", OTHERS)
def test_a_cache_of_another_model_is_refused(kind, alive):
    """Whether the one that has filled it is still there or not, and what was read is as it was."""
    make, make_other, message = OTHERS[kind]
    model, other, ids = make(), make_other(), token_ids(2, 30)
    cache = read(model, ids[:, :20])
    wanted = model(ids[:, 20:], past_key_values=copy.copy(cache), use_cache=True).logits
    if not alive:
        del model
        gc.collect()
    for kept in (cache, pickle.loads(pickle.dumps(cache))):
        with pytest.raises(ValueError, match=f"this cache is of another model: .*{message}"):
            other(ids[:, 20:], past_key_values=kept, use_cache=True)
        again = make()
        again.train(False)
        assert torch.equal(again(ids[:, 20:], past_key_values=kept).logits, wanted)


@pytest.mark.parametrize("make", [long_gpt2, kept_llama])
def test_every_weight_counts_and_the_head_does_not(make):
    model, cache = make(), None
    cache = read(model, token_ids(1, 20))
    base = model.base_model
    for name, weight in base.named_parameters():
        other = copy.deepcopy(model)
        other.base_model.get_parameter(name).data += 0.5
        if weight.numel():
            with pytest.raises(ValueError, match=f"{name} has other numbers"):
                other(token_ids(1, 2), past_key_values=copy.copy(cache))
    other = copy.deepcopy(model)
    with torch.no_grad():
        other(token_ids(1, 2), past_key_values=copy.copy(cache))  # equal
        other.lm_head.weight = torch.nn.Parameter(other.lm_head.weight + 1)
        other(token_ids(1, 2), past_key_values=copy.copy(cache))
        other.base_model(token_ids(1, 2), past_key_values=cache)


def test_training_goes_on_with_its_cache_and_so_does_a_copy_of_the_trained():
    """Truncated backpropagation through time: updates of the weights between two calls."""
    model, ids = long_gpt2().train(), token_ids(1, 48)
    optimiser, cache = torch.optim.SGD(model.parameters(), lr=1.0), InfiniCache(model.config)
    for piece in ids.split(16, 1):
        model(piece, labels=piece, past_key_values=cache, use_cache=True).loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        cache.detach()
    copy.deepcopy(model)(ids[:, :4], past_key_values=copy.copy(cache), use_cache=True)
    with pytest.raises(ValueError, match="of another model"):
        long_gpt2()(ids[:, :4], past_key_values=cache, use_cache=True)


def test_the_same_object_with_other_options_is_another_model():
    from hf_infini import unpatch_model

    model = kept_llama()
    cache = read(model, token_ids(1, 20))
    patch_model(unpatch_model(model), segment_length=8, kept_tokens=6)
    with pytest.raises(ValueError, match="keep_score is learned in the cache and attention"):
        model(token_ids(1, 2), past_key_values=cache)


@pytest.mark.parametrize("make", [long_gpt2, kept_llama])
def test_the_same_object_in_another_dtype_is_another_model(make, tmp_path):
    model, ids = make(), token_ids(1, 20)
    cache = read(model, ids)
    wanted = model(ids[:, :2], past_key_values=copy.copy(cache)).logits
    cache.save_pretrained(tmp_path / "file", model)
    others = [copy.copy(cache), pickle.loads(pickle.dumps(cache)), row_of(cache, 0)]
    others += [merged([cache, cache]), InfiniCache.from_pretrained(tmp_path / "file", model)]
    for kept in (cache, *others):
        with pytest.raises(
            ValueError, match="dtype is torch.float32 in the cache and .*bfloat16 in"
        ):
            rows = ids[:, :2].expand(kept.batch_size, -1)
            model.to(torch.bfloat16)(rows, past_key_values=kept)
        model.to(torch.float32)
    model = make()
    assert torch.equal(model(ids[:, :2], past_key_values=cache).logits, wanted)
    with torch.autocast("cpu", torch.bfloat16):  # leaves the weights as they are
        model(ids[:, :2], past_key_values=cache)
    empty = InfiniCache(model.config)
    model.to(torch.bfloat16)(ids, past_key_values=empty, use_cache=True)


def test_weights_that_are_not_here_are_left_out():
    """Offloaded, sharded, views, empty or not a number."""
    model = long_gpt2()
    sample = sample_of(model.transformer)
    meta = copy.deepcopy(model)
    meta.transformer.h[0].to("meta")
    assert not different_weights(sample, sample_of(meta.transformer))
    names = [name for names, *_ in sample_of(meta.transformer).values() for name in names]
    assert names and not any(name.startswith("h.0.") for name in names)
    turned = copy.deepcopy(model)
    weight = turned.transformer.wte.weight
    weight.data = weight.data.T.contiguous().T
    assert sample_of(turned.transformer)
    for number in (torch.nan, torch.inf):
        odd = copy.deepcopy(model)
        odd.transformer.ln_f.weight.data.fill_(number)
        assert different_weights(sample, sample_of(odd.transformer)) == ["ln_f.weight"]
        again = copy.deepcopy(odd)
        assert not different_weights(sample_of(odd.transformer), sample_of(again.transformer))


# --- what transformers' caches offer
# --------------------------------------------------------------------------------------------------

REFUSED = {
    "crop": ((-1,), "cannot take back a token"),
    "activate_past_recording": ((), "cannot take back a token"),
    "early_initialization": ((1, 4, 8, torch.float32, "cpu"), "made by the first call"),
    "offload": ((0,), "is not offloaded"),
    "prefetch": ((0,), "is not offloaded"),
    "update": ((torch.ones(1, 4, 1, 8), torch.ones(1, 4, 1, 8), 0), "keeps no keys and values"),
    "update_indexer": ((torch.ones(1, 1, 8), 0), "no indexer"),
    "update_conv_state": ((torch.ones(1, 8), 0), "LinearAttention"),
    "update_recurrent_state": ((torch.ones(1, 8), 0), "LinearAttention"),
    "get_conv_state": ((0,), "linear attention layer"),
    "get_recurrent_state": ((0,), "linear attention layer"),
    "has_previous_state": ((0,), "does not support"),
}
GIVEN = {
    "get_seq_length": ((), 9),
    "get_max_length": ((), -1),
    "get_mask_sizes": ((2, 0), (11, 0)),
    "get_query_offset": ((), 9),
    "is_recording_past": ((0,), False),
    "get_max_cache_shape": ((), -1),
    "batch_size": ((), 2),
    "is_compileable": ((), True),
    "is_initialized": ((), True),
    "is_croppable": ((), False),
    "is_sliding": ((), [False] * 3),
    "is_linear": ((), [False] * 3),
    "is_dummy": ((), [False] * 3),
    "max_batch_size": ((), 2),
    "max_cache_len": ((), -1),
}
# shown by other tests
DONE = {"reset", "reorder_cache", "batch_repeat_interleave", "batch_select_indices"}


def test_every_public_name_of_a_cache_is_right_or_refused_in_words():
    public = {name for name, _ in inspect.getmembers(Cache) if not name.startswith("_")}
    assert public <= {*REFUSED, *GIVEN, *DONE}
    cache = read(long_gpt2(), token_ids(2, 9))
    before = {name: tensor.clone() for name, tensor in cache.tensors().items()}
    for name, (arguments, message) in REFUSED.items():
        if name in public:
            with pytest.raises((ValueError, TypeError), match=message):
                getattr(cache, name)(*arguments)
    for name, (arguments, wanted) in GIVEN.items():
        if name in public:
            found = getattr(cache, name)
            assert (found(*arguments) if callable(found) else found) == wanted, name
    cache.crop(0)
    assert all(torch.equal(tensor, before[name]) for name, tensor in cache.tensors().items())


@each(MIXED)
def test_reset_makes_a_cache_as_new(variant):
    make, options = variant
    model, ids = make(**options), token_ids(2, 30)
    cache = read(model, ids)
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.nbytes() == 0 and cache.batch_size == -1
    with torch.no_grad():
        found = model(ids[:1, :20], past_key_values=cache, use_cache=True).logits
        assert torch.equal(found, model(ids[:1, :20], use_cache=True).logits)
    again = generate(model, 3, input_ids=ids[:1], past_key_values=cache)
    assert torch.equal(again[:, :30], ids[:1])
