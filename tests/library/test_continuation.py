"""A cache goes on from the text it has read, and from nothing else: masks, positions, kept states,
branches, training from chunk to chunk."""

import copy

import pytest
import torch

from hf_infini import InfiniCache
from models import causal_mha, infini_gpt2, token_ids

FLOAT32 = 1e-4  # of logits up to about 30, through three layers
# dtypes
MASKS = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool)

# Between them all that a cache can hold: learned positions, full attention, starts, convolutions,
# weights, rates
MODELS = {
    "table": lambda: infini_gpt2(
        n_positions=96, segment_length=5, update_rule="delta", local_segments=1
    ),
    "mixed": lambda: infini_gpt2(layers=[1], position_encoding="segment", memory_conv=3),
    "gated_delta": lambda: infini_gpt2(
        update_rule="gated_delta", segment_length=5, memory_conv=2, position_encoding="rope"
    ),
    "causal_mha": lambda: causal_mha(
        **{
            "attention": "infini",
            "segment_length": 4,
            "local_segments": 1,
            "position_encoding": "rope",
        },
        **{"feature_map": "exp", "memory_write": "learned"},
    ),
}


@pytest.fixture(params=MODELS)
def model(request):
    model = MODELS[request.param]()
    # Special tokens enter these memories too: the state then shows every token that was taken for
    # text
    model.config.mask_special_tokens = False
    return model


def logits(model, ids, mask, **options):
    with torch.no_grad():
        return model(ids, attention_mask=mask, **options).logits


def test_a_mask_whose_past_disagrees_is_refused(model):
    ids = token_ids(2, 14)
    mask = torch.ones(2, 14, dtype=torch.long)
    mask[0, :4] = 0
    more = torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], 1)
    whole = torch.cat([ids, token_ids(2, 1, seed=9)], 1)
    message = (
        "row 0 of attention_mask has 10 real tokens .* 14 columns .* the cache has read 14 "
        "of them as real"
    )
    with torch.no_grad():
        unmasked = model(ids, use_cache=True).past_key_values
        with pytest.raises(ValueError, match=message):
            model(whole[:, 14:], attention_mask=more, past_key_values=unmasked)
        with pytest.raises(ValueError, match=message):
            model.generate(whole, attention_mask=more, past_key_values=unmasked, max_new_tokens=2)
        masked = model(ids, attention_mask=mask, use_cache=True).past_key_values
        wanted = model.generate(
            whole, attention_mask=more, past_key_values=copy.deepcopy(masked), max_new_tokens=2
        )
        # Without a mask the past is as it was read
        assert torch.equal(model.generate(whole, past_key_values=masked, max_new_tokens=2), wanted)


def test_only_the_users_positions_begin_a_document(model):
    """A 0 begins one, and the next number goes on."""
    ids = token_ids(2, 20)
    with torch.no_grad():
        cache = model(ids[:, :12], use_cache=True).past_key_values
        for positions, wanted in (
            (torch.arange(8), ids[:, 12:]),
            (torch.arange(12, 20), ids),
            (None, ids),
        ):
            positions = None if positions is None else positions[None]
            got = model(
                ids[:, 12:], position_ids=positions, past_key_values=copy.deepcopy(cache)
            ).logits
            wanted = model(wanted, use_cache=False).logits[:, -8:]
            torch.testing.assert_close(got, wanted, rtol=FLOAT32, atol=FLOAT32)


def test_positions_go_on_from_those_that_were_given(model):
    """Positions that left some out: generate() and calls without positions go on from the last
    one."""
    ids = token_ids(1, 24)
    positions = torch.cat([torch.arange(12) * 2, torch.arange(23, 35)])[None]
    with torch.no_grad():
        cache = model(ids[:, :12], position_ids=positions[:, :12], use_cache=True).past_key_values
        got = model(ids[:, 12:], past_key_values=copy.deepcopy(cache)).logits
        wanted = model(ids, position_ids=positions, use_cache=False).logits[:, 12:]
    torch.testing.assert_close(got, wanted, rtol=FLOAT32, atol=FLOAT32)
    continued = model.generate(
        ids, past_key_values=cache, max_new_tokens=4, min_new_tokens=4, do_sample=False
    )
    assert continued[0, 24] == wanted[0, -1].argmax()


def test_masks_hold_0_and_1_for_the_rows_of_the_call(model):
    ids = token_ids(2, 10)
    mask = torch.ones(2, 10)
    mask[0, :4] = 0
    for given in (mask, torch.zeros(2, 10)):
        wanted = logits(model, ids, given.bool())
        assert all(torch.equal(logits(model, ids, given.to(dtype)), wanted) for dtype in MASKS)
    options = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    wanted = model.generate(ids[:1], attention_mask=mask[:1].long(), **options)
    # one of padding
    chunks = model.generate(
        ids[:1], attention_mask=mask[:1].bool(), prefill_chunk_size=4, **options
    )
    assert torch.equal(chunks, wanted)
    additive = torch.zeros(2, 10).masked_fill(mask == 0, -torch.inf)
    for wrong in (additive, additive.clamp(min=torch.finfo(torch.float32).min), mask.long() * 2):
        with pytest.raises(ValueError, match="attention_mask must hold 1 .* 0 .*pass mask == 0"):
            logits(model, ids, wrong)
    for rows in (1, 3):
        with pytest.raises(
            ValueError,
            match=rf"attention_mask must be \[batch, tokens\] = \[2, 10\].*got \[{rows}, 10\]",
        ):
            logits(model, ids, torch.ones(rows, 10))


def test_steps_go_in_place_and_not_into_a_copy():
    model = infini_gpt2()
    with torch.no_grad():
        cache = model(token_ids(1, 9), use_cache=True).past_key_values
        place, kept = cache.state.local_key.data_ptr(), copy.deepcopy(cache.state)
        before = kept.local_key.clone()
        for _ in range(3):
            model(token_ids(1, 1), past_key_values=cache)
        assert cache.state.local_key.data_ptr() == place and not torch.equal(
            cache.state.local_key, before
        )
    assert torch.equal(kept.local_key, before)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_branches_of_a_copied_cache_do_not_meet(model, copied):
    ids, (one, other) = token_ids(2, 11), (token_ids(2, 8, seed=1), token_ids(2, 8, seed=2))
    with torch.no_grad():
        cache = model(ids, use_cache=True).past_key_values
        branch = copied(cache)
        got = [[], []]
        for token in range(8):
            for number, (text, past) in enumerate(((one, cache), (other, branch))):
                got[number].append(model(text[:, token : token + 1], past_key_values=past).logits)
        for text, past, steps in ((one, cache, got[0]), (other, branch, got[1])):
            wanted = model(torch.cat([ids, text], 1), use_cache=False).logits[:, 11:]
            torch.testing.assert_close(torch.cat(steps, 1), wanted, rtol=FLOAT32, atol=FLOAT32)
            assert past.get_seq_length() == 19


@pytest.mark.parametrize("layers", [None, [0]])
def test_a_call_that_fails_changes_nothing_also_beside_layers_of_full_attention(layers):
    model, ids = infini_gpt2(layers=layers), token_ids(2, 20)

    def fails(*_):
        raise RuntimeError("out of memory")

    with torch.no_grad():
        cache = model(ids[:, :9], use_cache=True).past_key_values
        wanted = model(ids, use_cache=False).logits
        hook = model.transformer.h[2].register_forward_hook(fails)
        for length in (2, 1):
            with pytest.raises(RuntimeError, match="out of memory"):
                model(ids[:, 9 : 9 + length], past_key_values=cache)
            assert cache.get_seq_length() == 9
        hook.remove()
        got = model(ids[:, 9:], past_key_values=cache).logits
        torch.testing.assert_close(got, wanted[:, 9:], rtol=FLOAT32, atol=FLOAT32)


@torch.no_grad()
def test_a_cache_with_other_rows_than_the_call_is_refused(model):
    for rows, batch, tokens in ((4, 1, 1), (1, 4, 5), (4, 2, 5)):
        cache = model(token_ids(rows, 9), use_cache=True).past_key_values
        message = (
            f"this call has {batch} rows and the cache {rows}: repeat .* batch_repeat_interleave"
        )
        with pytest.raises(ValueError, match=message):
            model(token_ids(batch, tokens), past_key_values=cache)


def train_in_chunks(model, ids, cuts, checkpoint: bool):
    """Loss and gradients of a text that is read chunk by chunk, the memory carried over."""
    model.train()
    model.zero_grad()
    getattr(model, f"gradient_checkpointing_{'enable' if checkpoint else 'disable'}")()
    cache, losses = None, []
    for begin, end in zip((0, *cuts), (*cuts, ids.shape[1]), strict=True):
        output = model(
            ids[:, begin:end], labels=ids[:, begin:end], past_key_values=cache, use_cache=True
        )
        cache = output.past_key_values
        losses.append(output.loss)
    sum(losses).backward()
    return torch.stack(losses).detach(), [p.grad.clone() for p in model.parameters()], cache


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_")
@pytest.mark.parametrize("name", ["table", "gated_delta", "causal_mha"])
def test_gradient_checkpointing_carries_the_memory_from_chunk_to_chunk(name):
    model, ids = MODELS[name](), token_ids(2, 40)
    for module in model.modules():  # both runs are compared, so nothing may be drawn
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    losses, gradients, cache = train_in_chunks(model, ids, (13, 29), checkpoint=False)
    again, others, other_cache = train_in_chunks(model, ids, (13, 29), checkpoint=True)
    assert torch.equal(losses, again) and all(map(torch.equal, gradients, others))
    assert other_cache.get_seq_length() == 40
    assert torch.equal(cache.state.memory, other_cache.state.memory)


def tensors_of(cache):
    """All that the cache holds, the model's start of new documents included."""
    states = [layer.state.tensors() for layer in cache.layers if hasattr(layer, "state")]
    return cache.tensors(), [tensor for state in states for tensor in state.values()]


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_a_copy_of_a_cache_in_training_goes_on_in_the_same_graph(model, copied):
    """And what is done to the copy, or to its tensors, is not done to the cache."""
    ids, losses = token_ids(2, 30), []
    for use in (lambda cache: cache, copied):
        model.zero_grad()
        cache = model(ids[:, :20], use_cache=True).past_key_values
        output = model(ids[:, 20:], labels=ids[:, 20:], past_key_values=use(cache), use_cache=True)
        output.loss.backward()
        losses.append(
            [output.loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]
        )
    assert all(map(torch.equal, *losses)) and cache.get_seq_length() == 20
    branch, before = (
        copied(cache).detach(),
        {name: tensor.clone() for name, tensor in cache.tensors().items()},
    )
    assert any(tensor.requires_grad for tensor in cache.tensors().values())
    if copied is copy.deepcopy:
        for tensor in branch.tensors().values():
            tensor.zero_()
    assert all(torch.equal(tensor, before[name]) for name, tensor in cache.tensors().items())


def test_detach_cuts_the_graph_and_nothing_else(model):
    ids = token_ids(2, 30)
    assert InfiniCache(model.config).detach().get_seq_length() == 0  # of an empty one
    cache, other = (model(ids[:, :20], use_cache=True).past_key_values for _ in range(2))
    assert cache.detach() is cache
    named, tensors = tensors_of(cache)
    assert not any(tensor.requires_grad for tensor in (*named.values(), *tensors))
    assert all(torch.equal(tensor, other.tensors()[name]) for name, tensor in named.items())
    weights = [*model.parameters()]
    outputs = [
        model(ids[:, 20:], past_key_values=each, use_cache=True).logits for each in (cache, other)
    ]
    assert torch.equal(*outputs)
    cut, whole = (
        torch.autograd.grad(logits.sin().sum(), weights, allow_unused=True) for logits in outputs
    )
    assert not all(
        one is not None and torch.equal(one, two) for one, two in zip(cut, whole, strict=True)
    )
    with torch.no_grad():  # as if all before were given
        given = model(ids[:, :20], use_cache=True).past_key_values
    alone = torch.autograd.grad(
        model(ids[:, 20:], past_key_values=given, use_cache=True).logits.sin().sum(),
        weights,
        allow_unused=True,
    )
    assert all(
        one is two is None or torch.equal(one, two) for one, two in zip(cut, alone, strict=True)
    )


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_")
def test_gradient_checkpointing_does_without_keys_and_values():
    ids = token_ids(1, 12)
    for model in (
        infini_gpt2(layers=[1]),
        causal_mha(),
        causal_mha(attention="local", sliding_window=4),
    ):
        model.train().gradient_checkpointing_enable()
        torch.manual_seed(0)
        wanted = model(ids, labels=ids, use_cache=False).loss
        torch.manual_seed(0)
        output = model(ids, labels=ids, use_cache=True)
        assert torch.equal(output.loss, wanted)
        cache = output.past_key_values
        assert cache is None or not any(
            hasattr(layer, "keys") and layer.keys is not None for layer in cache.layers
        )
        # what the configuration says does not count here
        assert model(ids, labels=ids).past_key_values is None
        with torch.no_grad():  # nothing is run twice
            assert model(ids, use_cache=True).logits.isfinite().all()
