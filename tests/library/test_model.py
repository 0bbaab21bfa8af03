"""InfiniGPT2LMHeadModel: equal to GPT-2 where it must be, the naive function inside, saving, precision, outputs."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import hf_infini.layers.memory_layer
from hf_infini import (
    InfiniCache,
    InfiniGPT2Config,
    InfiniGPT2LMHeadModel,
    patch_model,
)
from models import gpt2, infini_gpt2, naive_attend, token_ids

FLOAT32 = 1e-5  # of logits of size 1 to 10: rounding in another order of additions


@pytest.mark.parametrize(
    ("implementation", "options"),
    [
        ("sdpa", {"scale_attn_by_inverse_layer_idx": True}),
        ("sdpa", {"scale_attn_weights": False}),
        ("eager", {"scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True}),
    ],
)
def test_one_segment_equals_gpt2(implementation, options):
    stock = gpt2(attn_implementation=implementation, **options)
    ids = token_ids(2, 40)
    wanted = stock(ids).logits
    model = patch_model(stock, segment_length=64)
    assert model.config._attn_implementation == implementation
    torch.testing.assert_close(model(ids).logits, wanted, rtol=FLOAT32, atol=FLOAT32)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_attention_dropout_matches_gpt2_in_distribution(implementation):
    """In training the local weights are dropped as GPT-2 drops them: same mean over many draws, and not without spread."""
    stock = gpt2(attn_implementation=implementation, attn_pdrop=0.3, resid_pdrop=0.0, embd_pdrop=0.0, n_layer=1)
    ids = token_ids(1, 12).expand(256, -1)

    def draws(model):
        model.train()
        with torch.no_grad():
            return model(ids, use_cache=False).logits

    torch.manual_seed(0)
    wanted = draws(stock)
    output = draws(patch_model(stock, segment_length=64))
    error = (wanted.var(0) / 256 + output.var(0) / 256).sqrt()[:, :].clamp(min=1e-6)
    assert float(((wanted.mean(0) - output.mean(0)).abs() / error).mean()) < 1.5  # about 0.8 if the means agree
    assert float(output.std(0)[2:].mean()) > 0.05


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "feature_map", "denominator", "memory_init", "local_segments", "position_encoding"),
    [
        ("linear", "elu", "separate", "noise", 0, "learned"),
        ("linear", "exp", "shared", "learned", 1, "rope"),
        ("delta", "elu", "separate", "zeros", 1, "learned"),
        ("delta", "exp", "separate", "learned", 0, "rope"),
        ("gated_delta", "exp", "separate", "learned", 1, "rope"),
    ],
)
def test_equals_the_naive_function_inside_the_model(
    rule, feature_map, denominator, memory_init, local_segments, position_encoding, monkeypatch
):
    options = {"update_rule": rule, "feature_map": feature_map, "denominator": denominator}
    options["position_encoding"] = position_encoding
    model = infini_gpt2(**options, memory_init=memory_init, local_segments=local_segments)
    ids = token_ids(2, 37)
    output = model(ids, labels=ids, use_cache=False)
    output.loss.backward()
    slopes = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    monkeypatch.setattr(hf_infini.layers.memory_layer, "attend", naive_attend)
    wanted = model(ids, labels=ids, use_cache=False)
    wanted.loss.backward()
    torch.testing.assert_close(output.logits, wanted.logits, rtol=1e-4, atol=1e-4)
    for name, parameter in model.named_parameters():
        scale = float(parameter.grad.abs().max())
        assert scale > 0, f"{name} has no gradient"
        # Three layers of weights ten times the usual size enlarge the differences of the function (1e-4) a little.
        assert float((slopes[name] - parameter.grad).abs().max()) <= 1e-3 * scale, name


@pytest.mark.parametrize("memory_init", ["zeros", "learned", "noise"])
def test_loads_a_plain_gpt2_checkpoint(memory_init, tmp_path):
    stock = gpt2()
    stock.save_pretrained(tmp_path)
    options = {"segment_length": 8, "gate_init": -1.5, "memory_init": memory_init}
    model = InfiniGPT2LMHeadModel.from_pretrained(tmp_path, **options)
    for name, tensor in stock.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name
    for block in model.transformer.h:
        assert torch.equal(block.attn.gate(), torch.full((4,), -1.5))
        if memory_init == "learned":
            assert not block.attn.start_memory.any()
            torch.testing.assert_close(block.attn.start()["start_normaliser"], torch.ones(4, 8), rtol=1e-3, atol=0)
        if memory_init == "noise":
            noise = block.attn.start_normaliser
            assert 0 < float(noise.max()) <= 1e-10 and len(noise.unique()) > 16
    ids = token_ids(2, 8)
    torch.testing.assert_close(model(ids).logits, (model if memory_init != "zeros" else stock)(ids).logits)
    # And back: the checkpoint of the model with memory is a GPT-2 with gates to spare.
    model.save_pretrained(tmp_path / "infini")
    back = GPT2LMHeadModel.from_pretrained(tmp_path / "infini")
    assert torch.equal(back(ids).logits, stock(ids).logits)


def test_new_models_start_as_gpt2_does():
    sizes = {"vocab_size": 89, "n_embd": 128, "n_layer": 8, "n_head": 4, "bos_token_id": None, "eos_token_id": None}
    torch.manual_seed(0)
    model = InfiniGPT2LMHeadModel(InfiniGPT2Config(**sizes, segment_length=8, layers=[0, 3]))
    starts = dict(model.named_parameters())
    for name, parameter in GPT2LMHeadModel(GPT2Config(**sizes)).named_parameters():
        ours, theirs = starts.pop(name).std().item(), parameter.std().item()
        # Both are drawn: 11,392 numbers and more, whose standard deviations are off by 0.7 % each (one standard error)
        assert ours == pytest.approx(theirs, rel=0.04), name
    assert set(starts) == {f"transformer.h.{layer}.attn.gate.weight" for layer in (0, 3)}


@pytest.mark.parametrize(("implementation", "local_segments"), [("sdpa", 1), ("eager", 0)])
def test_output_attentions_are_the_local_weights(implementation, local_segments):
    model = infini_gpt2(attn_implementation=implementation, local_segments=local_segments)
    ids = token_ids(2, 21)
    output = model(ids, output_attentions=True, output_hidden_states=True)
    assert len(output.attentions) == 3 and len(output.hidden_states) == 4
    for weights in output.attentions:
        assert weights.shape == (2, 4, 21, (local_segments + 1) * 8)
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 21))
    # Token 18 is place 2 of segment 2: column c of its own segment is token 16 + c.
    one_segment = patch_model(gpt2(seed=0), segment_length=64)
    one_segment.load_state_dict(model.state_dict())
    first = model.transformer.h[0].attn
    hidden = model.transformer.h[0].ln_1(output.hidden_states[0])
    query, key, _ = first.c_attn(hidden)[0].split(32, -1)
    begin = 16 - 8 * local_segments
    scores = query[18, :8] @ key[begin:19, :8].T / 8**0.5
    torch.testing.assert_close(output.attentions[0][0, 0, 18, : 19 - begin], scores.softmax(-1), rtol=1e-4, atol=1e-5)
    assert not output.attentions[0][0, 0, 18, 19 - begin :].any()


@pytest.mark.slow
def test_half_precision_stays_finite_over_100000_tokens():
    model = infini_gpt2(n_layer=2, position_encoding="segment", segment_length=50, initializer_range=0.02)
    model = model.to(torch.bfloat16)
    cache = InfiniCache(model.config)
    with torch.no_grad():
        for number in range(10):
            logits = model(token_ids(1, 10_000, seed=number), past_key_values=cache, use_cache=True).logits
            assert torch.isfinite(logits).all()
    for layer in cache.layers:
        assert layer.state.memory.dtype == torch.float32 and torch.isfinite(layer.state.memory).all()
        # Written were all segments, each token adding a σ of about 1 (projections of small weights): nothing was lost to
        # rounding, as it would be in half precision, where 2,048 + 1 (or 256 + 1) is 2,048 (256) again.
        assert 70_000 < float(layer.state.normaliser.mean()) < 200_000


def test_errors():
    model = infini_gpt2()
    ids = token_ids(2, 10)
    with pytest.raises(ValueError, match="position 69 is beyond this model's 64 .*position_encoding='segment'"):
        model(token_ids(1, 70))
    with pytest.raises(ValueError, match="must be an InfiniCache of .*this DynamicCache is of"):
        from transformers import DynamicCache

        model(ids, past_key_values=DynamicCache(config=model.config))
    with pytest.raises(ValueError, match=r"attention_mask must be \[batch, tokens\] = \[2, 10\].*got \[2, 12\]"):
        model(ids, attention_mask=torch.ones(2, 12))
    with pytest.raises(ValueError, match="cross-attention"):
        model(ids, encoder_hidden_states=torch.zeros(2, 3, 32))
    with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
        model(ids, inputs_embeds=torch.zeros(2, 10, 32))
