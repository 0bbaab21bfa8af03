"""Models with weights of 4 and 8 bits by bitsandbytes, here on a CPU: patched as they are, trained with LoRA (QLoRA)."""

import pytest
import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from decoders import decoder, token_ids
from hf_infini import AutoInfiniModelForCausalLM, patch_model, unpatch_model
from models import generate, gpt2

pytest.importorskip("bitsandbytes", reason="pip install bitsandbytes")

KINDS = {
    "4bit": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "8bit": {"load_in_8bit": True},
}
# Up to sinks, kept tokens and window the memory is not read: 40 tokens
WINDOW = {"segment_length": 8, "local_segments": 1, "sink_tokens": 2, "kept_tokens": 22, "keep_score": "half"}
SIZES = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
# Without biases, so that no parameter of a layer is of floating point; with some; Conv1D
MODELS = {"llama": lambda: decoder("llama", **SIZES), "qwen2": lambda: decoder("qwen2", **SIZES)}
MODELS |= {"gpt2": lambda: gpt2(n_embd=64)}
IDS = token_ids(2, 40) % 89


@pytest.fixture(scope="module", params=[("llama", "4bit"), ("qwen2", "8bit"), ("gpt2", "4bit")], ids="-".join)
def stored(request, tmp_path_factory):
    """A plain checkpoint, and the options to load it with weights of few bits."""
    name, kind = request.param
    folder = tmp_path_factory.mktemp(name)
    MODELS[name]().save_pretrained(folder)
    return folder, {"quantization_config": BitsAndBytesConfig(**KINDS[kind])}


def logits(model, ids=IDS):
    with torch.no_grad():
        return model(ids, use_cache=False).logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_one_segment_it_is_the_model_with_the_same_weights(stored, dtype):
    folder, options = stored
    model = AutoModelForCausalLM.from_pretrained(folder, **options, dtype=dtype)
    logits(model)  # the first call of a layer may bring its weights into another form, which rounds otherwise
    wanted, kinds = logits(model), {name: parameter.dtype for name, parameter in model.named_parameters()}
    assert {torch.uint8, torch.int8} & set(kinds.values())
    patch_model(model, **WINDOW)
    after = {name: parameter.dtype for name, parameter in model.named_parameters()}
    gates = {name: kind for name, kind in after.items() if name.endswith("attn.gate.weight")}
    assert set(gates.values()) == {dtype} and {name: after[name] for name in kinds} == kinds
    # Products of 8 bits, and sums of bfloat16, round to the next number in each of four layers
    assert (logits(model) - wanted).abs().mean() < (0.02 if dtype == torch.float32 else 0.1) * wanted.abs().mean()
    assert torch.equal(logits(unpatch_model(model)), wanted)


@pytest.mark.slow
def test_it_generates_saves_and_loads(stored, tmp_path):
    folder, options = stored
    window = WINDOW | {"kept_tokens": 6, "gate_init": -1.0}
    model = patch_model(AutoModelForCausalLM.from_pretrained(folder, **options), **window)
    model.save_pretrained(tmp_path)
    text = generate(model, inputs=IDS, attention_mask=torch.ones_like(IDS))
    given, likeliest = text[:, 40:], logits(model, text)[:, 39:-1].topk(3).indices
    # One of the three likeliest in one pass: inputs of 8 bits that are rounded otherwise are another text, sooner or later
    assert given.shape == (2, 20) and (likeliest == given.unsqueeze(-1)).any(-1).all()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    together = AutoInfiniModelForCausalLM.from_pretrained(folder, **options, **window)
    assert type(loaded) is type(together) is type(model)
    assert torch.equal(logits(loaded), logits(model)) and torch.equal(logits(together), logits(model))


def test_a_step_of_lora_has_the_gradients_of_the_plain_model(stored):
    """And so the weights were not brought into the form of a CPU that has none when the layers were compared."""
    folder, options = stored

    def gradients(patch: bool):
        model = AutoModelForCausalLM.from_pretrained(folder, **options)
        model = prepare_model_for_kbit_training(patch_model(model, **WINDOW) if patch else model)
        lora = LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, modules_to_save=["gate"] if patch else None)
        torch.manual_seed(0)
        model = get_peft_model(model, lora).train()
        for part in model.modules():
            part.p = 0.0 if isinstance(part, torch.nn.Dropout) else getattr(part, "p", None)
        model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
        return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}

    wanted, found = gradients(patch=False), gradients(patch=True)
    gates = found.keys() - wanted.keys()
    assert len(gates) >= 3 and all("gate" in name for name in gates) and wanted
    for name, gradient in wanted.items():
        assert gradient.abs().max() > 0
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-4 * float(gradient.abs().max()), msg=name)
