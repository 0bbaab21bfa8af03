"""Weights of 4 and 8 bits, by bitsandbytes, torchao and torch itself, here on a CPU: models are
patched as they are, their memory keeps the model's dtype, and they are trained with LoRA
(QLoRA)."""

import functools

import pytest
import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TorchAoConfig
from transformers.pytorch_utils import Conv1D

import hf_infini
from decoders import decoder, fitted, token_ids
from hf_infini import lora_config, patch_model, unpatch_model
from models import generate, gpt2, infini_gpt2

pytest.importorskip("bitsandbytes", reason="pip install bitsandbytes")
torchao = pytest.importorskip("torchao.quantization", reason="pip install torchao")

SIZES = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
FOUR_BITS = BitsAndBytesConfig(
    load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
)
INT8 = torchao.Int8WeightOnlyConfig()
# Up to sinks, kept tokens and window the memory is not read: 40 tokens
WINDOW = {
    "segment_length": 8,
    "local_segments": 1,
    "sink_tokens": 2,
    "kept_tokens": 22,
    "keep_score": "half",
}
# Without biases, so that no parameter of a layer is of floating point; with some; Conv1D
BITSANDBYTES = {
    "llama": (lambda: decoder("llama", **SIZES), FOUR_BITS),
    "qwen2": (lambda: decoder("qwen2", **SIZES), BitsAndBytesConfig(load_in_8bit=True)),
    "gpt2": (lambda: gpt2(n_embd=64), FOUR_BITS),
}
# Layers of two kinds; experts; inputs of 8 bits: by a gradient it is found whether queries are
# turned, and none comes through such products
TORCHAO = {
    "gemma2": (lambda: decoder("gemma2"), TorchAoConfig(INT8)),
    "qwen3_moe": (lambda: decoder("qwen3_moe"), TorchAoConfig(INT8)),
    "inputs": (
        lambda: decoder("llama"),
        TorchAoConfig(torchao.Int8DynamicActivationInt8WeightConfig()),
    ),
}
IDS = token_ids(2, 40) % 89


def loaded(kind, folder, dtype=torch.float32):
    """A plain model whose checkpoint is in the folder, with weights of few bits, and the options to
    load it so."""
    make, config = kind
    make().save_pretrained(folder)
    options = {"quantization_config": config, "dtype": dtype}
    return AutoModelForCausalLM.from_pretrained(folder, **options).eval(), options


def logits(model, ids=IDS):
    with torch.no_grad():
        return model(ids, use_cache=False).logits


def near(found, wanted, dtype) -> bool:
    """Inputs of 8 bits, and sums of bfloat16, round to the next number in each of four layers."""
    return (found - wanted).abs().mean() < (
        0.02 if dtype == torch.float32 else 0.1
    ) * wanted.abs().mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", BITSANDBYTES | TORCHAO)
def test_in_one_segment_it_is_the_model_with_the_same_weights(name, dtype, tmp_path):
    model, options = loaded((BITSANDBYTES | TORCHAO)[name], tmp_path, dtype)
    # the first call of a layer may bring its weights into another form, which rounds otherwise
    logits(model)
    wanted, kinds = (
        logits(model),
        {name: (type(p.data), p.dtype) for name, p in model.named_parameters()},
    )
    assert any(
        kind is not torch.Tensor or stored in (torch.uint8, torch.int8)
        for kind, stored in kinds.values()
    )
    patch_model(model, **WINDOW)
    after = {name: (type(p.data), p.dtype) for name, p in model.named_parameters()}
    gates = {after[name] for name in after.keys() - kinds.keys()}
    assert gates == {(torch.Tensor, dtype)} and {name: after[name] for name in kinds} == kinds
    assert near(logits(model), wanted, dtype)
    together = (
        getattr(hf_infini, type(model).__name__)
        .from_pretrained(tmp_path, **options, **WINDOW)
        .eval()
    )
    assert type(together) is type(model) and near(logits(together), wanted, dtype)
    assert torch.equal(logits(unpatch_model(model)), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("name", BITSANDBYTES)
def test_it_generates_saves_and_loads(name, tmp_path):
    window = WINDOW | {"kept_tokens": 6, "gate_init": -1.0}
    model = patch_model(loaded(BITSANDBYTES[name], tmp_path / "plain")[0], **window)
    model.save_pretrained(tmp_path / "saved")
    text = generate(model, inputs=IDS, attention_mask=torch.ones_like(IDS))
    given, likeliest = text[:, 40:], logits(model, text)[:, 39:-1].topk(3).indices
    # One of the three likeliest in one pass: inputs of 8 bits that are rounded otherwise are
    # another text, sooner or later
    assert given.shape == (2, 20) and (likeliest == given.unsqueeze(-1)).any(-1).all()
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert type(again) is type(model) and torch.equal(logits(again), logits(model))


@pytest.mark.parametrize("name", BITSANDBYTES)
def test_a_step_of_lora_has_the_gradients_of_the_plain_model(name, tmp_path):
    """And so the weights were not brought into the form of a CPU that has none when the layers were
    compared."""

    def gradients(patch: bool):
        model, _ = loaded(BITSANDBYTES[name], tmp_path)
        model = fitted(patch_model(model, **WINDOW)) if patch else model
        model = prepare_model_for_kbit_training(model)
        make = (
            functools.partial(lora_config, model)
            if patch
            else functools.partial(LoraConfig, task_type="CAUSAL_LM")
        )
        torch.manual_seed(0)
        model = get_peft_model(model, make(init_lora_weights=False)).train()
        for part in model.modules():
            part.p = 0.0 if isinstance(part, nn.Dropout) else getattr(part, "p", None)
        model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
        return {
            name: parameter.grad
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }

    wanted, found = gradients(patch=False), gradients(patch=True)
    gates = found.keys() - wanted.keys()
    assert len(gates) >= 3 and all("gate" in name for name in gates) and wanted
    for name, gradient in wanted.items():
        assert gradient.abs().max() > 0
        torch.testing.assert_close(
            found[name], gradient, rtol=1e-4, atol=1e-4 * float(gradient.abs().max()), msg=name
        )


def with_linear_projections(model):
    """GPT-2's projections are `Conv1D`, which torchao passes over: the same weights as `nn.Linear`,
    transposed."""
    for owner in list(model.modules()):
        for name, layer in list(owner.named_children()):
            if isinstance(layer, Conv1D):
                linear = nn.Linear(layer.nx, layer.nf, device="meta")
                linear.weight, linear.bias = (
                    nn.Parameter(layer.weight.detach().T.contiguous()),
                    layer.bias,
                )
                setattr(owner, name, linear)
    return model


def test_torchao_leaves_gpt2_as_it_is_unless_its_projections_are_linear(tmp_path):
    model, ids = infini_gpt2(position_encoding="segment", memory_conv=3), token_ids(2, 50) % 89
    model.save_pretrained(tmp_path)
    quantized = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=TorchAoConfig(INT8)
    ).eval()
    assert torch.equal(logits(quantized, ids), logits(model, ids))
    with_linear_projections(quantized)
    torchao.quantize_(
        quantized,
        INT8,
        filter_fn=lambda layer, name: isinstance(layer, nn.Linear) and name != "lm_head",
    )
    # A weight moves by half a step of max|row| / 127 at most. A step's rounding has the size 1 /
    # sqrt(12) of it, a row of normal weights reaches to about 2.5 times their size: 0.6 % of
    # relative error in a projection, and errors of 12 projections add up as their root, to 2 %
    assert (
        0 < (logits(quantized, ids) - logits(model, ids)).norm() / logits(model, ids).norm() < 0.05
    )


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated")
def test_weights_of_torch_ao_have_no_parameters():
    """Its layers hold them packed: nothing in them has a dtype or a device."""
    model = torch.ao.quantization.quantize_dynamic(
        decoder("mixtral"), {nn.Linear}, dtype=torch.qint8
    )
    wanted = logits(model)
    patch_model(model, **WINDOW)
    assert near(logits(model), wanted, torch.float32)
    assert model.generate(
        IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=5, eos_token_id=None
    ).shape == (2, 45)
    assert torch.equal(logits(unpatch_model(model)), wanted)
