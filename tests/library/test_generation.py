"""generate(): whatever is cached, cut, padded or searched gives what one uncached pass over each
row gives."""

import copy

import pytest
import torch
from transformers import DynamicCache
from transformers.generation.continuous_batching import ContinuousBatchingManager
from transformers.utils import logging

from decoders import decoder
from hf_infini import InfiniCache, patch_model
from models import FLOAT32, causal_mha, generate, gpt2, infini_gpt2, left_padded, token_ids

VARIANTS = [
    {"layers": [1], "position_encoding": "segment"},
    {
        "segment_length": 3,
        "update_rule": "delta",
        "local_segments": 2,
        "attn_implementation": "eager",
    },
    {
        "segment_length": 10,
        "update_rule": "gated_delta",
        "memory_conv": 2,
        "sink_tokens": 2,
        "kept_tokens": 4,
    },
]


@pytest.fixture(params=VARIANTS, ids=str)
def model(request):
    return infini_gpt2(**request.param)


@pytest.mark.slow
def test_cached_logits_equal_uncached_ones(model):
    """Prefill and twenty steps: the logits of each step against one pass over the finished
    sequence; prefill in chunks; and going on from a finished generation."""
    ids = token_ids(2, 19)
    output = generate(model, input_ids=ids, return_dict_in_generate=True, output_logits=True)
    with torch.no_grad():
        whole = model(output.sequences, use_cache=False).logits
    torch.testing.assert_close(
        torch.stack(output.logits, 1), whole[:, 18:-1], rtol=FLOAT32, atol=FLOAT32
    )
    assert torch.equal(output.sequences, generate(model, input_ids=ids, use_cache=False))
    assert torch.equal(output.sequences, generate(model, input_ids=ids, prefill_chunk_size=5))
    first = generate(model, 7, input_ids=ids, return_dict_in_generate=True)
    again = generate(model, 13, input_ids=first.sequences, past_key_values=first.past_key_values)
    assert torch.equal(again, output.sequences)


@pytest.mark.slow
def test_left_padded_batch_equals_single_rows(model):
    rows = [token_ids(1, length, seed=length) for length in (19, 8, 13, 1)]
    batch = generate(model, **left_padded(rows), return_dict_in_generate=True, output_logits=True)
    for number, row in enumerate(rows):
        single = generate(model, input_ids=row, return_dict_in_generate=True, output_logits=True)
        wanted, output = torch.stack(single.logits, 1)[0], torch.stack(batch.logits, 1)[number]
        torch.testing.assert_close(output, wanted, rtol=FLOAT32, atol=FLOAT32)
        assert torch.equal(batch.sequences[number, 19:], single.sequences[0, row.shape[1] :])


@pytest.mark.slow
def test_beam_search_reorders_the_memory(model):
    rows = [token_ids(1, length, seed=length) for length in (14, 9)]
    options = {"num_beams": 4, "num_return_sequences": 2}
    cached = generate(model, **left_padded(rows), **options)
    assert cached.shape[0] == 4 and not torch.equal(cached[0], cached[1])
    assert torch.equal(cached, generate(model, **left_padded(rows), **options, use_cache=False))


def test_one_kept_cache_serves_many_questions(model):
    """Read a text once, then branch: copies of the cache, repeated for a batch and selected from
    it."""
    text, questions = token_ids(1, 21), [token_ids(1, 5, seed=seed) for seed in (1, 2, 3)]
    cache = InfiniCache(model.config)
    with torch.no_grad():
        model(text, past_key_values=cache, use_cache=True)
        batch = copy.deepcopy(cache)
        batch.batch_repeat_interleave(3)
        together = model(torch.cat(questions), past_key_values=batch, use_cache=True).logits
        for number, question in enumerate(questions):
            wanted = model(torch.cat([text, question], 1)).logits[:, 21:]
            own = model(question, past_key_values=copy.deepcopy(cache), use_cache=True).logits
            torch.testing.assert_close(own, wanted, rtol=FLOAT32, atol=FLOAT32)
            torch.testing.assert_close(
                together[number : number + 1], wanted, rtol=FLOAT32, atol=FLOAT32
            )
        batch.batch_select_indices(torch.tensor([2]))
        follow = token_ids(1, 4, seed=9)
        wanted = model(torch.cat([text, questions[2], follow], 1)).logits[:, 26:]
        output = model(follow, past_key_values=batch, use_cache=True).logits
        torch.testing.assert_close(output, wanted, rtol=FLOAT32, atol=FLOAT32)


def test_cache_does_not_grow():
    model = infini_gpt2(position_encoding="segment")
    sizes = set()
    for tokens in (1, 7, 8, 100, 1000):
        output = generate(model, 3, input_ids=token_ids(1, tokens), return_dict_in_generate=True)
        assert output.past_key_values.get_seq_length() == tokens + 2
        sizes.add(output.past_key_values.nbytes())
    # 3 layers × (4 heads × (8·8 memory + 8 normaliser + 2·8·8 window) float32 + 3 counters of 8
    # bytes)
    assert sizes == {3 * (4 * (64 + 8 + 128) * 4 + 24)}
    hybrid = infini_gpt2(layers=[0, 2])
    grown = [
        generate(hybrid, 3, input_ids=token_ids(1, n), return_dict_in_generate=True)
        for n in (10, 20)
    ]
    assert grown[1].past_key_values.nbytes() - grown[0].past_key_values.nbytes() == 10 * 2 * 32 * 4


def test_what_a_memory_cannot_do_is_refused_clearly():
    model, ids = infini_gpt2(), token_ids(1, 12)
    with pytest.raises(
        ValueError,
        match="cache_implementation='static' is not for a model with a compressive memory",
    ):
        generate(model, input_ids=ids, cache_implementation="static")
    with pytest.raises(
        ValueError, match="assisted generation is not supported with stateful models"
    ):
        generate(model, input_ids=ids, assistant_model=gpt2())
    with pytest.raises(
        ValueError, match="assisted generation is not supported with stateful models"
    ):
        generate(model, input_ids=ids, prompt_lookup_num_tokens=2)
    with pytest.raises(ValueError, match="must be an InfiniCache of .*this DynamicCache is of"):
        generate(model, input_ids=ids, past_key_values=DynamicCache(config=gpt2().config))
    cache = generate(model, input_ids=ids, return_dict_in_generate=True).past_key_values
    assert not cache.is_croppable
    with pytest.raises(
        ValueError, match="position 64 is beyond.*n_positions.*position_encoding='segment'"
    ):
        generate(model, 60, input_ids=ids)


def test_returned_beams_go_on_without_the_cache():
    """It holds the beams that were running, in their order: here no returned text is in its own
    rows."""
    model, ids, returned = infini_gpt2(), token_ids(2, 14), 2
    beams = {"num_beams": 3, "num_return_sequences": returned, "return_dict_in_generate": True}
    first = generate(model, 9, input_ids=ids, **beams)
    assert (
        len(first.past_key_values.state.tokens_seen) == 6 and len(first.sequences) == 2 * returned
    )
    for width in (1, 3):
        call = {"input_ids": first.sequences, "num_beams": width}
        with pytest.raises(
            ValueError, match="23 ids are not the 22 that the cache has read and new ones"
        ):
            generate(model, 5, **call, past_key_values=first.past_key_values)
        assert generate(model, 5, **call).shape == (2 * returned, 28)


@pytest.mark.parametrize("first", [True, False], ids=["first under autocast", "first without"])
@pytest.mark.parametrize(
    ("make", "options"),
    [
        (infini_gpt2, VARIANTS[-1]),
        (infini_gpt2, {"memory_conv": 2, "feature_map": "exp", "memory_write": "learned"}),
        (
            causal_mha,
            {
                "attention": "infini",
                "segment_length": 8,
                "position_encoding": "rope",
                "sink_tokens": 3,
            },
        ),
        (causal_mha, {"attention": "local", "sliding_window": 5, "position_encoding": "alibi"}),
    ],
)
def test_a_cache_goes_on_from_autocast_and_back(make, options, first):
    model, ids = make(**options), token_ids(2, 30)
    with torch.no_grad():
        wanted, cache, parts = model(ids).logits, None, []
        for number, (begin, end) in enumerate(
            [(0, 13), (13, 14), (14, 15), (15, 16), (16, 27), (27, 28), (28, 30)]
        ):
            with torch.autocast("cpu", torch.bfloat16, enabled=first == (number % 2 == 0)):
                output = model(ids[:, begin:end], past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            parts.append(output.logits.float())
    # bfloat16 has 8 bits; three layers add up their errors: 10 % of the spread of the logits is
    # ample
    assert (torch.cat(parts, 1) - wanted).abs().mean() < 0.1 * wanted.std()
    if isinstance(cache, InfiniCache):  # the wider of both is kept
        assert cache.state.local_key.dtype == cache.state.local_value.dtype == torch.float32


# --- which of the ids are new
# --------------------------------------------------------------------------------------------------


def read(model, **inputs) -> InfiniCache:
    with torch.no_grad():
        return model(
            **inputs, past_key_values=InfiniCache(model.config), use_cache=True
        ).past_key_values


@pytest.mark.slow
def test_new_ids_alone_go_on_behind_the_cache(model):
    text, prompts = (
        token_ids(1, 21),
        [token_ids(1, tokens, seed=tokens) for tokens in (1, 5, 20, 21)],
    )
    for prompt in prompts:
        whole = generate(model, 6, input_ids=torch.cat([text, prompt], 1))
        whole_by_beams = generate(model, 6, input_ids=torch.cat([text, prompt], 1), num_beams=3)
        cache = read(model, input_ids=text)
        mask, beams = cache.attention_mask(torch.ones_like(prompt)), copy.deepcopy(cache)
        found = generate(model, 6, input_ids=prompt, attention_mask=mask, past_key_values=cache)
        assert torch.equal(found[:, -6:], whole[:, -6:])
        beams.batch_repeat_interleave(3)
        found = generate(
            model, 6, input_ids=prompt, attention_mask=mask, past_key_values=beams, num_beams=3
        )
        assert torch.equal(found[:, -6:], whole_by_beams[:, -6:])


def test_new_ids_behind_a_padded_batch(model):
    texts, prompts = (
        [token_ids(1, tokens, seed=tokens) for tokens in lengths] for lengths in ((17, 11), (4, 9))
    )
    cache = read(model, **left_padded(texts))
    given = left_padded(prompts)
    given["attention_mask"] = cache.attention_mask(given["attention_mask"])
    found = generate(model, 6, **given, past_key_values=cache)
    whole = left_padded([torch.cat(pair, 1) for pair in zip(texts, prompts, strict=True)])
    assert torch.equal(found[:, -6:], generate(model, 6, **whole)[:, -6:])


@pytest.mark.slow
@pytest.mark.parametrize("how", [{"num_beams": 3}, {"prefill_chunk_size": 4}], ids=str)
def test_a_whole_text_goes_on_where_the_cache_stands(model, how):
    """The usual way of transformers: the ids that the cache has read, and more behind them."""
    ids, width = token_ids(2, 30), how.get("num_beams", 1)
    cache = read(model, input_ids=ids[:, :13])
    with torch.no_grad():  # in which pieces it was read does not matter
        model(ids[:, 13:14], past_key_values=cache, use_cache=True)
        model(ids[:, 14:21], past_key_values=cache, use_cache=True)
    cache.batch_repeat_interleave(width)
    found = generate(
        model, 6, input_ids=ids, past_key_values=cache, **how, return_dict_in_generate=True
    )
    assert torch.equal(found.sequences, generate(model, 6, input_ids=ids, **how))
    assert found.past_key_values.get_seq_length() == 35


def test_ids_that_do_not_go_on_are_refused(model, tmp_path):
    text, other = token_ids(1, 10), token_ids(1, 14, seed=5)
    cache = read(model, input_ids=text)
    cache.save_pretrained(tmp_path / "memory", model)
    embedded = read(model, inputs_embeds=model.transformer.wte(text))
    for kept in (cache, InfiniCache.from_pretrained(tmp_path / "memory", model), embedded):
        for call in ({}, {"attention_mask": torch.ones_like(other)}):
            with pytest.raises(
                ValueError, match="14 ids are not the 10 .*attention_mask=cache.attention_mask"
            ):
                generate(model, input_ids=other, past_key_values=kept, **call)
    for less in (text, text[:, :4]):
        with pytest.raises(
            ValueError,
            match=f"these {less.shape[1]} ids are not the 10 that the cache has read and new",
        ):
            generate(model, input_ids=less, past_key_values=cache)
    assert cache.get_seq_length() == 10  # as it was
    mask = cache.attention_mask(torch.ones_like(other))
    found = generate(model, 6, input_ids=other, attention_mask=mask, past_key_values=cache)
    assert torch.equal(
        found[:, -6:], generate(model, 6, input_ids=torch.cat([text, other], 1))[:, -6:]
    )


def test_a_mask_of_new_ids_has_the_rows_of_the_cache():
    model, mask = infini_gpt2(), torch.ones(2, 5, dtype=torch.long)
    assert torch.equal(InfiniCache(model.config).attention_mask(mask), mask)
    cache = read(model, input_ids=token_ids(1, 20))
    with pytest.raises(ValueError, match=r"\[1, tokens\].*got \[2, 5\].* repeat the cache's"):
        cache.attention_mask(mask)
    cache.batch_repeat_interleave(4)
    assert cache.attention_mask(mask).shape == (2, 25)  # of two beams each
    given = {"attention_mask": torch.ones(2, 25), "past_key_values": cache}
    with pytest.raises(
        ValueError, match="this call has 2 rows and the cache 4: repeat the cache's"
    ):
        generate(model, input_ids=mask, **given)


def test_the_text_is_known_row_by_row(model):
    """Rows that were reordered, chosen or repeated take their text along."""
    ids = token_ids(3, 12)
    cache = read(model, input_ids=ids[:, :9])
    cache.reorder_cache(torch.tensor([2, 0, 1]))
    cache.batch_select_indices(torch.tensor([0, 1]))
    whole = generate(model, 4, input_ids=ids[[2, 0]])
    assert torch.equal(
        generate(model, 4, input_ids=ids[[2, 0]], past_key_values=copy.deepcopy(cache)), whole
    )
    with pytest.raises(ValueError, match="are not the 9 that the cache has read"):
        generate(model, 4, input_ids=ids[[0, 1]], past_key_values=cache)


@pytest.mark.parametrize("make", [infini_gpt2, causal_mha])
def test_continuous_batching_is_refused_at_once(make, monkeypatch):
    """Before anything is allocated: without sizes, the pages would take most of the memory that is
    free."""
    model = make()
    monkeypatch.setattr(
        ContinuousBatchingManager, "__init__", lambda *args, **kwargs: pytest.fail("allocates")
    )
    with pytest.raises(
        ValueError, match="continuous batching keeps keys and values in pages.*left-padded batch"
    ):
        model.generate_batch([[3, 4, 5]])
    with pytest.raises(ValueError, match="continuous batching"):
        model.init_continuous_batching()
    with (
        pytest.raises(ValueError, match="continuous batching"),
        model.continuous_batching_context_manager(),
    ):
        pass


def test_no_reminder_of_a_maximum_length_that_positions_do_not_have(caplog):
    logging.enable_propagation()
    try:
        for patched in (True, False):
            model = decoder("llama", max_position_embeddings=12)
            model = patch_model(model, segment_length=4) if patched else model
            generate(model, input_ids=token_ids(1, 10), max_new_tokens=6)
            assert ("exceeded the model's predefined maximum length" in caplog.text) != patched
    finally:
        logging.disable_propagation()
