"""InfiniGPT2LMHeadModel: equal to GPT-2 where it must be."""

import contextlib

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from decoders import decoder
from hf_infini import (
    InfiniGPT2Config,
    InfiniGPT2LMHeadModel,
    patch_model,
)
from models import causal_mha, gpt2, infini_gpt2, token_ids

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
    """In training the local weights are dropped as GPT-2 drops them: same mean over many draws, and
    not without spread."""
    stock = gpt2(
        attn_implementation=implementation,
        attn_pdrop=0.3,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        n_layer=1,
    )
    ids = token_ids(1, 12).expand(256, -1)

    def draws(model):
        model.train()
        with torch.no_grad():
            return model(ids, use_cache=False).logits

    torch.manual_seed(0)
    wanted = draws(stock)
    output = draws(patch_model(stock, segment_length=64))
    error = (wanted.var(0) / 256 + output.var(0) / 256).sqrt()[:, :].clamp(min=1e-6)
    # about 0.8 if the means agree
    assert float(((wanted.mean(0) - output.mean(0)).abs() / error).mean()) < 1.5
    assert float(output.std(0)[2:].mean()) > 0.05


def test_loads_a_plain_gpt2_checkpoint(tmp_path):
    stock = gpt2()
    stock.save_pretrained(tmp_path)
    model = InfiniGPT2LMHeadModel.from_pretrained(tmp_path, segment_length=8, gate_init=-1.5)
    for block in model.transformer.h:
        assert torch.equal(block.attn.gate(), torch.full((4,), -1.5))
    ids = token_ids(2, 8)
    torch.testing.assert_close(model(ids).logits, stock(ids).logits)
    # And back: the checkpoint of the model with memory is a GPT-2 with gates to spare.
    model.save_pretrained(tmp_path / "infini")
    back = GPT2LMHeadModel.from_pretrained(tmp_path / "infini")
    assert torch.equal(back(ids).logits, stock(ids).logits)


def test_new_models_start_as_gpt2_does():
    sizes = {
        "vocab_size": 89,
        "n_embd": 128,
        "n_layer": 8,
        "n_head": 4,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    torch.manual_seed(0)
    model = InfiniGPT2LMHeadModel(InfiniGPT2Config(**sizes, segment_length=8, layers=[0, 3]))
    starts = dict(model.named_parameters())
    for name, parameter in GPT2LMHeadModel(GPT2Config(**sizes)).named_parameters():
        ours, theirs = starts.pop(name).std().item(), parameter.std().item()
        # Both are drawn: 11,392 numbers and more, whose standard deviations are off by 0.7 % each
        # (one standard error)
        assert ours == pytest.approx(theirs, rel=0.04), name
    assert set(starts) == {f"transformer.h.{layer}.attn.gate.weight" for layer in (0, 3)}


def test_errors():
    model = infini_gpt2()
    ids = token_ids(2, 10)
    with pytest.raises(
        ValueError, match="position 69 is beyond this model's 64 .*position_encoding='segment'"
    ):
        model(token_ids(1, 70))
    with pytest.raises(ValueError, match="cross-attention"):
        model(ids, encoder_hidden_states=torch.zeros(2, 3, 32))


TRAINED = {
    "GPT-2": lambda: infini_gpt2(memory_conv=2),
    "GPT-2 that keeps tokens": lambda: infini_gpt2(
        kept_tokens=5, keep_score="half", position_encoding="rope"
    ),
    "gated delta rule": lambda: infini_gpt2(
        update_rule="gated_delta", sink_tokens=2, position_encoding="segment"
    ),
    "from scratch": lambda: causal_mha(attention="infini", segment_length=8, local_segments=1),
    "Llama": lambda: patch_model(decoder("llama"), segment_length=8, sink_tokens=2, kept_tokens=4),
}


@pytest.mark.parametrize("name", TRAINED)
def test_a_training_step_reads_no_number_back_from_its_device(name, monkeypatch):
    """Tensors on the meta device have none: what would wait for a GPU is an error there, as for
    positions of documents."""
    # there is none for it
    monkeypatch.setattr(torch, "autocast", lambda *given, **options: contextlib.nullcontext())
    model, ids = (
        TRAINED[name]().train().to("meta"),
        torch.zeros(2, 45, dtype=torch.long, device="meta"),
    )
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    assert all(
        parameter.grad is not None for parameter in model.parameters() if parameter.requires_grad
    )
    with pytest.raises((NotImplementedError, RuntimeError), match="meta tensor"):
        model(input_ids=ids, position_ids=torch.zeros_like(ids), use_cache=False)
