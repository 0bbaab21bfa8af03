"""Kept tokens in models: all families up to sinks, kept tokens and window, and one answer however a
text is read."""

import copy

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM

import hf_infini
from decoders import TYPES, decoder
from decoders import token_ids as ids_of_decoder
from hf_infini import InfiniCache, cache_bytes, patch_model
from hf_infini.cache.step_cache import StepCache
from hf_infini.compat.cache_name import cache_of
from hf_infini.layers.memory_layer import memory_layers
from hf_infini.options import KEEP_SCORES
from models import causal_mha, infini_gpt2, token_ids

WINDOW = {"segment_length": 8, "local_segments": 1, "sink_tokens": 2}
# Logits of size 5 from four layers in float32, summed in another order
FLOAT32 = {"rtol": 1e-5, "atol": 1e-4}
SHARES = {"alike": None, "some": [0.5, 1.7, 0.8], "not in the first": [0, 2, 1]}
QUICK = ("gpt2", "llama", "gemma2", "smollm3")
each_type = pytest.mark.parametrize(
    "model_type",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in TYPES],
)


def with_scores(model):
    """The model in float64, in which nothing but ties is near, with learned scores that differ from
    token to token."""
    draw = torch.Generator().manual_seed(5)
    for layer in memory_layers(model).values():
        for weight in layer.keep_weights.values():
            with torch.no_grad():
                weight.copy_(torch.randn(weight.shape, generator=draw))
    return model.double()


def scratch(keep_score="half", **options):
    """With three layers, and six kept tokens in the mean of them."""
    window = {"attention": "infini", "position_encoding": "rope", **WINDOW, "kept_tokens": 6}
    return with_scores(causal_mha(**window | {"keep_score": keep_score} | options))


def read(model, ids, cuts, cache=None):
    """Logits, and the cache, of calls between the cuts."""
    logits = []
    for begin, end in zip([0, *cuts], [*cuts, ids.shape[1]], strict=True):
        output = model(ids[:, begin:end], cache=cache, use_cache=True)
        cache = cache_of(output)
        logits.append(output.logits)
    return torch.cat(logits, 1), cache


@each_type
def test_is_the_plain_model_up_to_sinks_kept_tokens_and_window(model_type):
    """2 + 22 + 16 tokens; with one more segment it is another."""
    ids = ids_of_decoder(2, 48)
    model = decoder(model_type)
    with torch.no_grad():
        wanted = model(ids).logits
        patch_model(model, **WINDOW, kept_tokens=22)
        found, cache = read(model, ids, ())
        steps, _ = read(model, ids[:1], range(1, 40))
    torch.testing.assert_close(found[:, :40], wanted[:, :40], **FLOAT32)
    torch.testing.assert_close(steps[:, :40], wanted[:1, :40], **FLOAT32)
    assert not torch.allclose(found[:, 40:], wanted[:, 40:], **FLOAT32)
    assert int(cache.state.memory_tokens[0]) == 48 - 2 - 22 - 8


@pytest.mark.parametrize("keep_score", KEEP_SCORES)
@pytest.mark.parametrize("rule", ["linear", "gated_delta"])
@pytest.mark.parametrize("shares", SHARES)
def test_chunks_and_steps_are_one_pass(keep_score, rule, shares):
    model, ids = scratch(keep_score, update_rule=rule, kept_shares=SHARES[shares]), token_ids(2, 75)
    with torch.no_grad():
        whole, cache = read(model, ids, ())
        for cuts in ((1, 7, 8, 9, 40, 41), range(1, 75)):
            found, other = read(model, ids, cuts)
            torch.testing.assert_close(found, whole, rtol=1e-9, atol=1e-9)
            for name, tensor in other.tensors().items():
                torch.testing.assert_close(
                    tensor, cache.tensors()[name], rtol=1e-9, atol=1e-9, msg=name
                )


@pytest.mark.parametrize(
    ("keep_score", "shares"),
    [*((score, "alike") for score in KEEP_SCORES), ("half", "not in the first")],
)
def test_padded_and_packed_rows_are_rows_of_their_own(keep_score, shares):
    model = scratch(keep_score, kept_shares=SHARES[shares])
    first, second = token_ids(1, 60), token_ids(1, 45, seed=1)
    padded = torch.cat([first, torch.cat([torch.zeros(1, 15, dtype=torch.long), second], 1)])
    mask = torch.ones_like(padded)
    mask[1, :15] = 0
    with torch.no_grad():
        wanted = [model(ids, use_cache=False).logits[0] for ids in (first, second)]
        batch = model(padded, attention_mask=mask, use_cache=False).logits
        positions = torch.cat([torch.arange(60), torch.arange(45)])[None]
        packed = model(
            torch.cat([first, second], 1), position_ids=positions, use_cache=False
        ).logits[0]
    torch.testing.assert_close(batch[0], wanted[0], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(batch[1, 15:], wanted[1], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(packed, torch.cat(wanted), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "model",
    [
        lambda: patch_model(
            decoder("gemma3_text"),
            **WINDOW,
            kept_tokens=6,
            update_rule="gated_delta",
            memory_conv=3,
        ),
        lambda: patch_model(decoder("llama"), **WINDOW, kept_tokens=6, keep_score="half").to(
            torch.bfloat16
        ),
        lambda: infini_gpt2(),
        lambda: scratch(kept_shares=SHARES["some"], head_dim=6, value_dim=10),
    ],
)
def test_cache_bytes_are_those_of_a_cache(model):
    model = model()
    model.config.dtype = model.dtype
    cache = InfiniCache(model.config)
    with torch.no_grad():
        for tokens in (3, 40):
            model(token_ids(1, tokens).clamp(min=3), cache=cache)  # none is special
            own = sum(layer.state.nbytes() for layer in cache.layers if hasattr(layer, "state"))
            assert cache_bytes(model.config) == own
    model.config.dtype = str(model.dtype).removeprefix("torch.")  # as saving leaves it
    assert cache_bytes(model.config) == own
    with pytest.raises(ValueError, match="grows with every token"):
        cache_bytes(decoder("llama").config)


@pytest.mark.parametrize("shares", SHARES.values(), ids=SHARES)
def test_beams_memory_files_and_copies_go_on_alike(tmp_path, shares):
    model, ids = scratch(kept_shares=shares), token_ids(2, 70)
    with torch.no_grad():
        wanted = model(ids, use_cache=False).logits[:, 60:]
        _, cache = read(model, ids[:, :60], ())
        cache.save_pretrained(tmp_path / "memory.safetensors", model)
        others = [
            InfiniCache.from_pretrained(tmp_path / "memory.safetensors", model),
            copy.deepcopy(cache),
        ]
        for other in others:
            torch.testing.assert_close(
                read(model, ids[:, 60:], (), other)[0], wanted, rtol=1e-9, atol=1e-9
            )
        cache.reorder_cache(torch.tensor([1, 1]))
        found = read(model, ids[[1, 1], 60:], range(1, 10), cache)[0]
    torch.testing.assert_close(found, wanted[[1, 1]], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("shares", SHARES.values(), ids=SHARES)
def test_generation_with_beams_is_that_of_the_whole_text_read_again(shares):
    model, ids = scratch("attention", kept_shares=shares), token_ids(1, 40)
    options = {
        "max_new_tokens": 30,
        "min_new_tokens": 30,
        "num_beams": 3,
        "do_sample": False,
        "pad_token_id": 0,
    }
    with torch.no_grad():
        cached, again = (
            model.generate(ids, use_cache=use_cache, **options) for use_cache in (True, False)
        )
    assert torch.equal(cached, again)


def test_a_layer_keeps_its_share_and_sees_nothing_of_the_others():
    """Each layer, fed what it was fed, does what it does in a model all of whose layers keep as
    many."""
    shared, ids, fed = scratch(kept_shares=SHARES["not in the first"]), token_ids(2, 60), {}
    for number, block in enumerate(shared.transformer.h):
        block.register_forward_pre_hook(
            lambda _, args, number=number: fed.update({number: args[0]})
        )
        block.register_forward_hook(
            lambda _, args, output, number=number: fed.update({f"after {number}": output})
        )
    with torch.no_grad():
        cache = cache_of(shared(ids, use_cache=True))
        for number, count in enumerate((0, 12, 6)):
            alike = scratch(kept_tokens=count) if count else scratch("attention", kept_tokens=0)
            alike.transformer.h[number].register_forward_pre_hook(
                lambda _, args, number=number: (fed[number], *args[1:])
            )
            after = []
            alike.transformer.h[number].register_forward_hook(
                lambda _, args, output, after=after: after.append(output)
            )
            of_alike = cache_of(alike(ids, use_cache=True)).layers[number].state.tensors()
            torch.testing.assert_close(after[0], fed[f"after {number}"], rtol=1e-9, atol=1e-9)
            found = cache.layers[number].state.tensors()
            assert found.keys() == of_alike.keys() and found["local_key"].shape[2] == 2 + count + 16
            for name, tensor in found.items():
                torch.testing.assert_close(tensor, of_alike[name], rtol=1e-9, atol=1e-9, msg=name)


@pytest.mark.parametrize("shares", [None, [0.5, 1.5, 2, 0]])
def test_checkpoints_and_adapters_have_the_learned_score(tmp_path, shares):
    options = {"kept_tokens": 6, "keep_score": "half", "kept_shares": shares}
    model = with_scores(patch_model(decoder("llama"), **WINDOW, **options))
    ids = ids_of_decoder(1, 60)
    wanted = model(ids).logits
    model.save_pretrained(tmp_path / "model")
    hf_infini.save_adapter(model, tmp_path / "adapter")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    adapted = hf_infini.load_adapter(decoder("llama").double(), tmp_path / "adapter")
    for other in (loaded, adapted):
        assert torch.equal(other(ids).logits, wanted)
        layer = next(iter(memory_layers(other).values()))
        assert layer.keep_weight.any() and not layer.keep_weight.requires_grad


@pytest.mark.parametrize("keep_score", KEEP_SCORES)
def test_gradients_go_through_kept_tokens_with_and_without_checkpoints(keep_score):
    ids, found = token_ids(2, 60), []
    for checkpoints in (False, True):
        model = scratch(keep_score, dropout=0.0).train()
        if checkpoints:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model(ids, labels=ids, use_cache=False).loss.backward()
        found.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, gradient in found[0].items():
        if name.endswith("keep_weight"):
            assert gradient is None
        else:
            torch.testing.assert_close(found[1][name], gradient, rtol=1e-9, atol=1e-12, msg=name)


def test_the_last_token_has_gradients_of_sinks_kept_tokens_and_window_only():
    """With the memory shut, in one layer."""
    model = scratch("half", n_layer=1)
    memory_layers(model)["transformer.h.0.attn"].gate.weight.data.fill_(-800.0)
    embeddings = model.get_input_embeddings()(token_ids(1, 79)).detach().requires_grad_()
    output = model(inputs_embeds=embeddings, use_cache=True)
    kept = cache_of(output).state.kept_position.unique().tolist()
    output.logits[0, -1].sum().backward()
    assert len(kept) > 6  # heads differ
    assert embeddings.grad[0].abs().sum(-1).nonzero().flatten().tolist() == [
        0,
        1,
        *kept,
        *range(64, 79),
    ]


@pytest.mark.parametrize("keep_score", KEEP_SCORES)
def test_bfloat16_reads_about_the_same(keep_score):
    """Near ties may go either way: most logits are those of float32, to bfloat16's rounding through
    three layers."""
    model, ids = scratch(keep_score).float(), token_ids(2, 75)
    with torch.no_grad():
        wanted = model(ids).logits
        model.bfloat16()
        whole, cache = read(model, ids, ())
        steps, _ = read(model, ids, range(1, 75))
    assert (
        cache.state.local_key.dtype == torch.bfloat16
        and cache.state.local_score.dtype == torch.float32
    )
    for found in (whole, steps):
        close = (found.float() - wanted).abs().amax(-1) < 0.1 * wanted.abs().max()
        assert close.float().mean() > 0.9


@pytest.mark.slow
def test_steps_compile_once():
    torch._dynamo.reset()
    model, ids, graphs = scratch(n_layer=2, kept_shares=[0, 1]), token_ids(2, 60), []
    compiled = torch.compile(model, fullgraph=True)
    with torch.no_grad():
        wanted, _ = read(model, ids, ())
        _, cache = read(model, ids[:, :1], ())
        for token in range(1, 60):
            logits = compiled(ids[:, token : token + 1], cache=cache, use_cache=True).logits
            torch.testing.assert_close(logits[:, 0], wanted[:, token], rtol=1e-9, atol=1e-9)
            graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[-1] == graphs[1]  # the first one's window was not made by a graph


@pytest.mark.slow
def test_padded_rows_compile():
    torch._dynamo.reset()
    model, ids = scratch(n_layer=1), token_ids(2, 60)
    mask = (torch.arange(60) >= torch.tensor([[0], [9]])).long()
    wanted, found = (
        function(ids, labels=ids, attention_mask=mask, use_cache=False).loss
        for function in (model, torch.compile(model, fullgraph=True))
    )
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0)  # a loss in float32
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for one, other in zip(
        *(torch.autograd.grad(loss, parameters) for loss in (found, wanted)), strict=True
    ):
        # the loss is in float32
        assert float((one - other).abs().max()) <= 1e-5 * float(other.abs().max())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kept_tokens": -1}, "kept_tokens must be at least 0"),
        ({"kept_shares": [1, 1, 1, 1]}, "kept_shares must be 4 numbers .* with kept_tokens"),
        ({"kept_tokens": 6, "kept_shares": [1, 1]}, "kept_shares must be 4 numbers from 0 to 99"),
        ({"kept_tokens": 2, "kept_shares": [0.4, 0, 0, 0.4]}, "some layer keeps any; got .* and 2"),
        (
            {"kept_tokens": 6, "kept_shares": [1, -1, 3, 1]},
            "kept_shares must be 4 numbers from 0 to 99",
        ),
        ({"kept_tokens": 2.5}, "kept_tokens"),
        ({"keep_score": "half", "kept_tokens": 1}, "give kept_tokens, at least 2, such"),
        ({"keep_score": "two_learned", "kept_tokens": 3}, "give kept_tokens, at least 4, such"),
        ({"keep_score": "learned"}, "give kept_tokens"),
        ({"keep_score": "size", "kept_tokens": 4}, "keep_score"),
    ],
)
def test_options_that_mean_nothing_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        patch_model(decoder("llama"), **WINDOW, **options)


def test_a_share_is_rounded_down_as_it_is_written():
    """Of floating point, 0.29 of 100 is a little less than 29."""
    config = patch_model(
        decoder("llama"), **WINDOW, kept_tokens=100, kept_shares=[0.29, 0.57, 0.299, 2]
    ).config
    assert [window.kept_tokens for window in config.windows.values()] == [29, 57, 29, 200]
    assert config.places == 2 + 200 + 16


def test_steps_of_other_shares_get_another_cache():
    config = patch_model(decoder("llama"), **WINDOW, kept_tokens=6).config
    cache = StepCache(config)
    assert cache.is_for(config)
    config.kept_shares = [0.5, 1.5, 1, 1]
    assert not cache.is_for(config) and StepCache(config).is_for(config)


def test_more_kept_than_text():
    """What is never full evicts nothing, so that the memory stays empty."""
    model, ids = scratch(kept_tokens=500), token_ids(1, 60)
    with torch.no_grad():
        whole, cache = read(model, ids, ())
        steps, _ = read(model, ids, range(1, 60))
    torch.testing.assert_close(steps, whole, rtol=1e-9, atol=1e-9)
    state = cache.layers[0].state
    assert int(state.memory_tokens) == 0 and not state.normaliser.any()


@pytest.mark.parametrize("other", [{"keep_score": "learned"}, {"kept_tokens": 4}])
def test_a_state_of_other_options_is_refused(other):
    _, cache = read(scratch(), token_ids(1, 20), ())
    with pytest.raises(ValueError, match="another model: .*(kept_tokens|keep_score)"):
        read(scratch(**other), token_ids(1, 20), (), cache)
