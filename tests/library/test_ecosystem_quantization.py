"""8-bit weights by torchao: the model computes with the rounded projections, and the memory's parameters stay float32."""

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, TorchAoConfig
from transformers.pytorch_utils import Conv1D

from decoders import decoder
from hf_infini import AutoInfiniModelForCausalLM, patch_model, unpatch_model
from models import causal_mha, infini_gpt2, token_ids

torchao = pytest.importorskip("torchao.quantization", reason="pip install torchao")

INT8 = torchao.Int8WeightOnlyConfig()
# Up to sinks, kept tokens and window the memory is not read: 40 tokens
WINDOW = {"segment_length": 8, "local_segments": 1, "sink_tokens": 2, "kept_tokens": 22, "keep_score": "half"}
MEMORY = ("gate.weight", "start_memory", "start_normaliser", "memory_conv")


def with_linear_projections(model):
    """GPT-2's projections are `Conv1D`, which torchao passes over: the same weights as `nn.Linear`, transposed."""
    for owner in list(model.modules()):
        for name, layer in list(owner.named_children()):
            if isinstance(layer, Conv1D):
                linear = nn.Linear(layer.nx, layer.nf, device="meta")
                linear.weight, linear.bias = nn.Parameter(layer.weight.detach().T.contiguous()), layer.bias
                setattr(owner, name, linear)
    return model


def quantized_gpt2(folder):
    model = infini_gpt2(position_encoding="segment", memory_conv=3, memory_init="learned")
    for name, parameter in model.named_parameters():
        if name.endswith(MEMORY[1:]):  # away from their starts at zero
            parameter.data.add_(torch.randn_like(parameter), alpha=0.3)
    model.save_pretrained(folder)
    quantized = with_linear_projections(AutoModelForCausalLM.from_pretrained(folder))
    torchao.quantize_(quantized, INT8, filter_fn=lambda layer, name: isinstance(layer, nn.Linear) and name != "lm_head")
    return model, quantized.eval()


def quantized_causal_mha(folder):
    model = causal_mha(attention="infini", segment_length=8, position_encoding="rope")
    model.save_pretrained(folder)
    return model, AutoModelForCausalLM.from_pretrained(folder, quantization_config=TorchAoConfig(INT8)).eval()


def is_quantized(layer) -> bool:
    return isinstance(layer, nn.Linear) and type(layer.weight.data) is not torch.Tensor


@pytest.fixture(scope="module", params=[quantized_gpt2, quantized_causal_mha])
def models(request, tmp_path_factory):
    return request.param(tmp_path_factory.mktemp("float"))


def test_projections_are_8_bit_and_memory_parameters_float32(models):
    model, quantized = models
    layers = [layer for layer in quantized.modules() if is_quantized(layer)]
    assert len(layers) == (3 * 4 if model.config.model_type == "infini_gpt2" else 3 * 6)
    assert {layer.weight.qdata.dtype for layer in layers} == {torch.int8}
    expected = dict(model.named_parameters())
    kept = {name: parameter for name, parameter in quantized.named_parameters() if name.endswith(MEMORY)}
    assert len(kept) == sum(name.endswith(MEMORY) for name in expected) >= 3
    for name, parameter in kept.items():
        assert parameter.dtype == torch.float32 and torch.equal(parameter, expected[name])


@torch.no_grad()
def test_logits_are_those_of_the_rounded_weights_and_near_the_float_ones(models):
    model, quantized = models
    ids = token_ids(2, 50)
    given, exact = quantized(ids).logits, model(ids).logits
    # A weight moves by half a step of max|row| / 127 at most. A step's rounding has the size 1 / sqrt(12) of it, a row of
    # normal weights reaches to about 2.5 times their size: 0.6 % of relative error in a projection, and errors of 12 to 18
    # projections add up as their root, to 2 to 3 %
    assert 0 < (given - exact).norm() / exact.norm() < 0.05
    for layer in [layer for layer in quantized.modules() if is_quantized(layer)]:
        layer.weight = nn.Parameter(layer.weight.dequantize())
    torch.testing.assert_close(given, quantized(ids).logits, rtol=1e-4, atol=1e-4)  # float32 in another order


@torch.no_grad()
def test_torchao_leaves_gpt2_as_it_is_where_its_projections_are_not_linear(tmp_path):
    model = infini_gpt2()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=TorchAoConfig(INT8))
    assert torch.equal(loaded(token_ids(1, 20)).logits, model(token_ids(1, 20)).logits)


# --- families, whose projections are `nn.Linear` -----------------------------------------------------------------------


def quantized_layers(model) -> list[str]:
    layers = ((name, layer) for name, layer in model.named_modules() if isinstance(layer, nn.Linear))
    return [name for name, layer in layers if type(layer.weight.data) is not torch.Tensor]


@pytest.mark.parametrize("model_type", ["gemma2", "qwen3_moe"])
@torch.no_grad()
def test_in_one_segment_it_is_the_plain_model_with_the_same_weights(model_type, tmp_path):
    decoder(model_type).save_pretrained(tmp_path / "plain")
    options, ids = {"quantization_config": TorchAoConfig(INT8)}, token_ids(2, 40)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", **options).eval()
    loaded = AutoInfiniModelForCausalLM.from_pretrained(tmp_path / "plain", **WINDOW, **options).eval()
    assert quantized_layers(loaded) == quantized_layers(plain) != []
    assert all(gate.dtype == torch.float32 for name, gate in loaded.named_parameters() if name.endswith("attn.gate.weight"))
    wanted = plain(ids, use_cache=False).logits
    # Sums of float32 in another order, in four layers
    torch.testing.assert_close(loaded(ids, use_cache=False).logits, wanted, rtol=1e-4, atol=1e-4)
    patched = patch_model(plain, **WINDOW)
    torch.testing.assert_close(patched(ids, use_cache=False).logits, wanted, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_inputs_of_8_bits_have_no_gradient_and_are_turned_all_the_same(tmp_path):
    """Whether a layer turns its queries is found by a gradient, and none comes through such products."""
    decoder("llama").save_pretrained(tmp_path)
    config, ids = TorchAoConfig(torchao.Int8DynamicActivationInt8WeightConfig()), token_ids(2, 40)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config).eval()
    wanted = plain(ids, use_cache=False).logits
    found = patch_model(plain, **WINDOW)(ids, use_cache=False).logits
    # An input that is rounded differently in the last place can fall to the next of its 255 numbers, in each of four layers
    assert (found - wanted).abs().mean() < 0.02 * wanted.abs().mean()


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated")
def test_weights_of_torch_ao_have_no_parameters():
    """Its layers hold them packed: nothing in them has a dtype or a device."""
    model = torch.ao.quantization.quantize_dynamic(decoder("mixtral"), {nn.Linear}, dtype=torch.qint8)
    ids = token_ids(2, 40)
    with torch.no_grad():
        wanted = model(ids, use_cache=False).logits
        found = patch_model(model, **WINDOW)(ids, use_cache=False).logits
        text = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, eos_token_id=None)
        again = unpatch_model(model)(ids, use_cache=False).logits
    # An input that is rounded differently in the last place can fall to the next of its 255 numbers, in each of four layers
    assert (found - wanted).abs().mean() < 0.02 * wanted.abs().mean()
    assert text.shape == (2, 45) and torch.equal(again, wanted)
