"""generate(): whatever is cached, cut, padded or searched gives what one uncached pass over each row gives."""

import copy

import pytest
import torch
from models import gpt2, infini_gpt2, token_ids
from transformers import DynamicCache, GenerationConfig

from hf_infini import InfiniCache

FLOAT32 = 1e-4  # of logits up to about 30, through three layers

VARIANTS = [
    {},
    {"update_rule": "delta"},
    {"local_segments": 1, "memory_init": "learned"},
    {"layers": [1], "positions": "segment"},
    {"segment_length": 3, "update_rule": "delta", "local_segments": 2, "attn_implementation": "eager"},
]


@pytest.fixture(params=VARIANTS, ids=str)
def model(request):
    return infini_gpt2(**request.param)


def left_padded(rows: list[torch.Tensor]) -> dict:
    width = max(row.shape[1] for row in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    mask = torch.zeros(len(rows), width, dtype=torch.long)
    for number, row in enumerate(rows):
        ids[number, width - row.shape[1] :] = row[0]
        mask[number, width - row.shape[1] :] = 1
    return {"input_ids": ids, "attention_mask": mask}


def generate(model, new=20, **options):
    """Always `new` tokens: rows that ended early would be compared on padding."""
    options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0} | options
    with torch.no_grad():
        return model.generate(**options)


def test_cached_logits_equal_uncached_ones(model):
    """Prefill and twenty steps: the logits of each step against one pass over the finished sequence."""
    ids = token_ids(2, 19)
    output = generate(model, input_ids=ids, return_dict_in_generate=True, output_logits=True)
    with torch.no_grad():
        whole = model(output.sequences, use_cache=False).logits
    torch.testing.assert_close(torch.stack(output.logits, 1), whole[:, 18:-1], rtol=FLOAT32, atol=FLOAT32)
    assert torch.equal(output.sequences, generate(model, input_ids=ids, use_cache=False))


def test_left_padded_batch_equals_single_rows(model):
    rows = [token_ids(1, length, seed=length) for length in (19, 8, 13, 1)]
    batch = generate(model, **left_padded(rows), return_dict_in_generate=True, output_logits=True)
    for number, row in enumerate(rows):
        single = generate(model, input_ids=row, return_dict_in_generate=True, output_logits=True)
        wanted, output = torch.stack(single.logits, 1)[0], torch.stack(batch.logits, 1)[number]
        torch.testing.assert_close(output, wanted, rtol=FLOAT32, atol=FLOAT32)
        assert torch.equal(batch.sequences[number, 19:], single.sequences[0, row.shape[1] :])


def test_beam_search_reorders_the_memory(model):
    rows = [token_ids(1, length, seed=length) for length in (14, 9)]
    options = {"num_beams": 4, "num_return_sequences": 2}
    cached = generate(model, **left_padded(rows), **options)
    assert cached.shape[0] == 4 and not torch.equal(cached[0], cached[1])
    assert torch.equal(cached, generate(model, **left_padded(rows), **options, use_cache=False))


@pytest.mark.parametrize("options", [{"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.8}])
def test_sampling(model, options):
    ids, options = token_ids(2, 11), {"do_sample": True, "num_return_sequences": 3} | options
    torch.manual_seed(0)
    cached = generate(model, input_ids=ids, **options)
    torch.manual_seed(0)
    assert torch.equal(cached, generate(model, input_ids=ids, **options, use_cache=False))
    assert len({tuple(row.tolist()) for row in cached}) == 6


def test_chunked_prefill(model):
    ids = token_ids(2, 31)
    for size in (1, 5, 8, 30):
        assert torch.equal(generate(model, input_ids=ids, prefill_chunk_size=size), generate(model, input_ids=ids))


def test_continues_a_finished_generation(model):
    rows = [token_ids(1, length, seed=length) for length in (12, 7)]
    inputs = left_padded(rows)
    whole = generate(model, 30, **inputs)
    first = generate(model, 13, **inputs, return_dict_in_generate=True)
    mask = torch.cat([inputs["attention_mask"], torch.ones(2, 13, dtype=torch.long)], 1)
    call = {"input_ids": first.sequences, "attention_mask": mask, "past_key_values": first.past_key_values}
    assert torch.equal(generate(model, 17, **call), whole)


def test_one_kept_cache_serves_many_questions(model):
    """Read a text once, then branch: copies of the cache, repeated for a batch and selected from it."""
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
            torch.testing.assert_close(together[number : number + 1], wanted, rtol=FLOAT32, atol=FLOAT32)
        batch.batch_select_indices(torch.tensor([2]))
        follow = token_ids(1, 4, seed=9)
        wanted = model(torch.cat([text, questions[2], follow], 1)).logits[:, 26:]
        output = model(follow, past_key_values=batch, use_cache=True).logits
        torch.testing.assert_close(output, wanted, rtol=FLOAT32, atol=FLOAT32)
    cache.reset()
    assert cache.get_seq_length() == 0 and torch.equal(model(text, past_key_values=cache).logits, model(text).logits)


def test_a_cache_read_in_inference_mode_goes_on_outside_of_it(model):
    ids = token_ids(1, 20)
    cache = InfiniCache(model.config)
    with torch.inference_mode():
        model(ids[:, :11], past_key_values=cache, use_cache=True)
    with torch.no_grad():
        parts = [model(ids[:, t : t + 1], past_key_values=cache, use_cache=True).logits for t in range(11, 20)]
    torch.testing.assert_close(torch.cat(parts, 1), model(ids).logits[:, 11:], rtol=FLOAT32, atol=FLOAT32)


def test_cache_does_not_grow():
    model = infini_gpt2(positions="segment")
    sizes = set()
    for tokens in (1, 7, 8, 100, 1000):
        output = generate(model, 3, input_ids=token_ids(1, tokens), return_dict_in_generate=True)
        assert output.past_key_values.get_seq_length() == tokens + 2
        sizes.add(output.past_key_values.nbytes())
    # 3 layers × (4 heads × (8·8 memory + 8 normaliser + 2·8·8 window) float32 + 2 counters of 8 bytes)
    assert sizes == {3 * (4 * (64 + 8 + 128) * 4 + 16)}
    hybrid = infini_gpt2(layers=[0, 2])
    grown = [generate(hybrid, 3, input_ids=token_ids(1, n), return_dict_in_generate=True) for n in (10, 20)]
    assert grown[1].past_key_values.nbytes() - grown[0].past_key_values.nbytes() == 10 * 2 * 32 * 4


def test_a_prompt_of_100000_tokens():
    """Read in chunks with flat memory, then continued exactly as the naive cut into other chunks continues."""
    model = infini_gpt2(positions="segment", n_layer=2, segment_length=50)
    ids = token_ids(1, 100_000)
    output = generate(model, 5, input_ids=ids, prefill_chunk_size=10_000, return_dict_in_generate=True, output_logits=True)
    assert output.past_key_values.get_seq_length() == 100_004
    other = generate(model, 5, input_ids=ids, prefill_chunk_size=33_333, return_dict_in_generate=True, output_logits=True)
    # Sums of 100,000 terms, added in the same order but for the borders of the chunks.
    torch.testing.assert_close(torch.stack(output.logits), torch.stack(other.logits), rtol=1e-3, atol=1e-3)


def test_generation_config_survives_patching(tmp_path):
    model = infini_gpt2()
    model.generation_config = GenerationConfig(max_new_tokens=4, min_new_tokens=4, do_sample=False, pad_token_id=0)
    assert model.generate(token_ids(1, 5)).shape == (1, 9)


def test_what_a_memory_cannot_do_is_refused_clearly():
    model, ids = infini_gpt2(), token_ids(1, 12)
    with pytest.raises(ValueError, match="cache_implementation='static' is not for a model with a compressive memory"):
        generate(model, input_ids=ids, cache_implementation="static")
    with pytest.raises(ValueError, match="assisted generation is not supported with stateful models"):
        generate(model, input_ids=ids, assistant_model=gpt2())
    with pytest.raises(ValueError, match="assisted generation is not supported with stateful models"):
        generate(model, input_ids=ids, prompt_lookup_num_tokens=2)
    with pytest.raises(ValueError, match="must be an InfiniCache, got DynamicCache"):
        generate(model, input_ids=ids, past_key_values=DynamicCache(config=gpt2().config))
    cache = generate(model, input_ids=ids, return_dict_in_generate=True).past_key_values
    assert not cache.is_croppable
    with pytest.raises(ValueError, match="cannot be cropped"):
        cache.crop(2)
    with pytest.raises(ValueError, match="position 64 is beyond.*n_positions.*positions='segment'"):
        generate(model, 60, input_ids=ids)
