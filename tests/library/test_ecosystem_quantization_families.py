"""8-bit weights by torchao in families, whose projections are `nn.Linear`: the plain model with the same weights."""

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, TorchAoConfig

from decoders import decoder, token_ids
from hf_infini import AutoInfiniModelForCausalLM, patch_model, unpatch_model

torchao = pytest.importorskip("torchao.quantization", reason="pip install torchao")

INT8 = torchao.Int8WeightOnlyConfig()
QUICK = ("llama", "gemma2")
# torchao replaces `nn.Linear`, whatever the family: these have joined projections, norms of queries and keys, experts, or
# layers that pass on no keywords
OTHERS = ("gpt_neox", "phi3", "qwen3", "cohere", "mixtral", "qwen3_moe", "stablelm", "smollm3")
each_type = pytest.mark.parametrize(
    "model_type", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)]
)


def quantized_layers(model) -> list[str]:
    layers = ((name, layer) for name, layer in model.named_modules() if isinstance(layer, nn.Linear))
    return [name for name, layer in layers if type(layer.weight.data) is not torch.Tensor]


@each_type
@torch.no_grad()
def test_in_one_segment_it_is_the_plain_model_with_the_same_weights(model_type, tmp_path):
    decoder(model_type).save_pretrained(tmp_path / "plain")
    options, ids = {"quantization_config": TorchAoConfig(INT8)}, token_ids(2, 40)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", **options).eval()
    loaded = AutoInfiniModelForCausalLM.from_pretrained(tmp_path / "plain", segment_length=64, **options).eval()
    assert quantized_layers(loaded) == quantized_layers(plain) != []
    assert all(gate.dtype == torch.float32 for name, gate in loaded.named_parameters() if name.endswith("attn.gate.weight"))
    wanted = plain(ids, use_cache=False).logits
    # Sums of float32 in another order, in four layers
    torch.testing.assert_close(loaded(ids, use_cache=False).logits, wanted, rtol=1e-4, atol=1e-4)
    patched = patch_model(plain, segment_length=64)
    torch.testing.assert_close(patched(ids, use_cache=False).logits, wanted, rtol=1e-4, atol=1e-4)


@each_type
def test_a_saved_model_is_loaded_in_8_bits_and_decodes(model_type, tmp_path):
    model, ids = patch_model(decoder(model_type), segment_length=8, local_segments=1, sink_tokens=2), token_ids(2, 30)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=TorchAoConfig(INT8)).eval()
    assert type(loaded) is type(model) and quantized_layers(loaded)
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 10, "do_sample": False, "eos_token_id": None}
    cached, uncached = (loaded.generate(ids, use_cache=on, **options) for on in (True, False))
    assert cached.shape == (2, 40) and torch.equal(cached, uncached)
    with torch.no_grad():
        given, exact = loaded(ids).logits, model(ids).logits
    # See test_ecosystem_quantization.py; 4 to 7 projections in each of four layers. A token may get another expert
    assert 0 < (given - exact).norm() / exact.norm() < (0.5 if hasattr(model.config, "num_experts_per_tok") else 0.1)


@torch.no_grad()
def test_inputs_of_8_bits_have_no_gradient_and_are_turned_all_the_same(tmp_path):
    """Whether a layer turns its queries is found by a gradient, and none comes through such products."""
    decoder("llama").save_pretrained(tmp_path)
    config, ids = TorchAoConfig(torchao.Int8DynamicActivationInt8WeightConfig()), token_ids(2, 40)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config).eval()
    wanted = plain(ids, use_cache=False).logits
    found = patch_model(plain, segment_length=64)(ids, use_cache=False).logits
    # An input that is rounded differently in the last place can fall to the next of its 255 numbers, in each of four layers
    assert (found - wanted).abs().mean() < 0.02 * wanted.abs().mean()


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated")
@pytest.mark.parametrize("model_type", [*QUICK, "mixtral", "stablelm"])
def test_weights_of_torch_ao_have_no_parameters(model_type):
    """Its layers hold them packed: nothing in them has a dtype or a device."""
    model = torch.ao.quantization.quantize_dynamic(decoder(model_type), {nn.Linear}, dtype=torch.qint8)
    ids = token_ids(2, 40)
    with torch.no_grad():
        wanted = model(ids, use_cache=False).logits
        found = patch_model(model, segment_length=64)(ids, use_cache=False).logits
        text = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, eos_token_id=None)
        again = unpatch_model(model)(ids, use_cache=False).logits
    # An input that is rounded differently in the last place can fall to the next of its 255 numbers, in each of four layers
    assert (found - wanted).abs().mean() < 0.02 * wanted.abs().mean()
    assert text.shape == (2, 45) and torch.equal(again, wanted)
