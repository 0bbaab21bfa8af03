"""What follows from a cache of so many tokens, and a window without a memory."""

import copy

import pytest
import torch

from decoders import decoder, fitted
from hf_infini import (
    InfiniCache,
    backend_of,
    cache_bytes,
    estimate,
    inspect_attention,
    load_adapter,
    lora_config,
    patch_model,
    save_adapter,
    unpatch_model,
)
from hf_infini.layers.memory_layer import memory_layers
from hf_infini.options import KEEP_SCORES, Window, options_of_cache
from models import FLOAT32, gpt2, token_ids

WINDOW = {"segment_length": 5, "local_segments": 1, "sink_tokens": 2, "kept_tokens": 6}


@pytest.mark.parametrize("score", KEEP_SCORES)
@pytest.mark.parametrize("tokens", [32, 33, 64, 100, 511, 512, 1024, 2047, 2048, 65_536])
def test_the_sizes_are_those_of_a_cache_of_so_many_tokens(tokens, score):
    options = options_of_cache(tokens, keep_score=score)
    sizes = [options[name] for name in Window._fields]
    assert Window(*sizes).places == tokens and min(sizes[0], sizes[2], sizes[3]) > 0 <= sizes[1]
    assert options["update_rule"] == "none" and options["sink_tokens"] < options["segment_length"]


def test_the_sizes_of_the_pages():
    """Those that were measured."""
    for tokens, score, sizes in (
        (512, "learned", (128, 1, 4, 252)),
        (2048, "learned", (128, 1, 4, 1788)),
        (1024, "attention", (64, 7, 4, 508)),
        (512, "recent", (64, 0, 4, 444)),
        (2048, "recent", (128, 1, 4, 1788)),
    ):
        options = options_of_cache(tokens, keep_score=score)
        assert tuple(options[name] for name in Window._fields) == sizes


def test_cache_tokens_is_taken_where_a_model_is_patched():
    model = decoder("llama")
    expected = estimate(model.config, 5000, cache_tokens=64)
    patch_model(model, cache_tokens=64, keep_score="half")
    assert model.config.places == 64 and not hasattr(model.config, "cache_tokens")
    assert backend_of(model) and expected.infini <= cache_bytes(model.config)
    patched = patch_model(gpt2(), cache_tokens=40)
    assert patched.config.position_encoding == "segment"
    assert patch_model(decoder("llama"), cache_tokens=64, update_rule="delta").config.gate_init == 0
    for given, message in (
        ({"cache_tokens": 31}, "at least 32"),
        ({"cache_tokens": 64, "kept_tokens": 8}, "got cache_tokens and kept_tokens"),
        ({"cache_token": 64}, "did you mean cache_tokens"),
        ({"cache_tokens": 64, "gate_init": -4.0}, "no memory: leave out .*gate_init"),
    ):
        with pytest.raises(ValueError, match=message):
            patch_model(decoder("llama"), **given)
    for wrong in ("64", 64.5, True):
        with pytest.raises(TypeError, match="cache_tokens of patch_model must be of type int"):
            patch_model(decoder("llama"), cache_tokens=wrong)
    with pytest.raises(ValueError, match="cache_tokens is for patch_model"):
        type(model.config)(cache_tokens=64)


@pytest.mark.parametrize("score", KEEP_SCORES)
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2"])
def test_without_a_memory_a_model_computes_what_it_does_with_a_closed_one(family, score, tmp_path):
    options = WINDOW | {"keep_score": score}
    options |= {"position_encoding": "segment"} if family == "gpt2" else {}
    plain = gpt2() if family == "gpt2" else decoder(family).eval()
    closed = fitted(patch_model(copy.deepcopy(plain), **options, gate_init=-1000.0))
    model = fitted(patch_model(copy.deepcopy(plain), **options, update_rule="none"))
    ids = token_ids(2, 60)
    with torch.no_grad():
        for cuts in ([60], [23, 1, 1, 35]):
            caches = InfiniCache(closed.config), InfiniCache(model.config)
            for part in ids.split(cuts, 1):
                wanted, found = (
                    each(part, cache=cache, use_cache=True).logits
                    for each, cache in zip((closed, model), caches, strict=True)
                )
                assert torch.equal(wanted, found)
    state = next(layer.state for layer in caches[1].layers if hasattr(layer, "state"))
    assert state.memory.numel() == state.normaliser.numel() == 0
    assert caches[1].nbytes() < caches[0].nbytes()
    layers = memory_layers(model).values()
    assert not any(hasattr(layer, "gate") for layer in layers)
    with pytest.raises(ValueError, match="another model: .*update_rule"):
        closed(ids, cache=caches[1])
    if score == "learned":
        save_adapter(model, tmp_path)
        loaded = load_adapter(copy.deepcopy(plain), tmp_path)
        assert torch.equal(loaded(ids).logits, model(ids).logits)
    unpatch_model(model)
    assert torch.equal(model(ids).logits, plain(ids).logits)


def test_gradients_and_inspection_are_those_of_a_closed_memory():
    plain, ids = decoder("llama").eval(), token_ids(1, 40)
    closed = patch_model(copy.deepcopy(plain), **WINDOW, gate_init=-1000.0)
    model = patch_model(copy.deepcopy(plain), **WINDOW, update_rule="none")
    for each in (closed, model):
        each(ids, labels=ids, use_cache=False).loss.backward()
    wanted = dict(closed.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name].grad, rtol=FLOAT32, atol=FLOAT32)
    shown, found = (inspect_attention(each, ids).layers[1].tensors for each in (closed, model))
    assert shown.keys() == found.keys()
    for name, part in found.items():
        torch.testing.assert_close(part, shown[name], equal_nan=True, msg=name)


@pytest.mark.slow
def test_a_lora_without_a_memory_is_trained_saved_and_loaded(tmp_path):
    peft = pytest.importorskip("peft")
    plain, ids = decoder("llama"), token_ids(1, 40)
    model = patch_model(copy.deepcopy(plain), **WINDOW, update_rule="none")
    tuned = peft.get_peft_model(model, lora_config(model, r=2))
    optimizer = torch.optim.SGD([p for p in tuned.parameters() if p.requires_grad], lr=1.0)
    tuned(ids, labels=ids).loss.backward()
    optimizer.step()
    save_adapter(tuned, tmp_path)
    loaded = load_adapter(copy.deepcopy(plain), tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(loaded.eval()(ids).logits, tuned.eval()(ids).logits)
