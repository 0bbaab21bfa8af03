"""What a memory has learned, saved apart from the model, with PEFT's adapter beside it, and put on the plain model again."""

import json
import shutil

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from decoders import decoder
from hf_infini import load_adapter, patch_model, save_adapter
from hf_infini.models.adapter import RECORD, WEIGHTS, restore_adapter
from models import gpt2, token_ids

IDS = token_ids(2, 50)
OPTIONS = {"segment_length": 8, "local_segments": 1, "sink_tokens": 2, "feature_map": "learned", "memory_conv": 2}
MAKERS = {"llama": lambda: decoder("llama"), "gemma2": lambda: decoder("gemma2"), "gpt2": gpt2}


def trained(make):
    """A patched model whose memories are not as they began."""
    model = patch_model(make(), **OPTIONS).eval()
    known = {name for name, _ in make().named_parameters()}
    draw = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if name not in known:
            parameter.data.add_(torch.randn(parameter.shape, generator=draw), alpha=0.3)
    return model


@torch.no_grad()
def logits(model):
    return model(IDS).logits


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_an_adapter_comes_back_on_the_plain_model(make, tmp_path):
    model = trained(make)
    save_adapter(model, tmp_path / "adapter")
    found = load_adapter(make().eval(), tmp_path / "adapter")
    assert type(found) is type(model) and torch.equal(logits(found), logits(model))
    assert not torch.allclose(logits(found), logits(patch_model(make().eval(), **OPTIONS)))
    size = sum(file.stat().st_size for file in (tmp_path / "adapter").iterdir())
    assert size < sum(p.numel() for p in model.parameters()) * 4 / 2  # without the model


def test_a_lora_comes_along_and_can_be_merged(tmp_path):
    lora = LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = get_peft_model(trained(MAKERS["llama"]), lora)
    save_adapter(model, tmp_path)
    found = load_adapter(MAKERS["llama"]().eval(), tmp_path)
    assert isinstance(found, PeftModel) and torch.equal(logits(found), logits(model.eval()))
    again = get_peft_model(patch_model(MAKERS["llama"]().eval(), **OPTIONS), lora).eval()
    assert not torch.allclose(logits(again), logits(model))
    restore_adapter(again, tmp_path)
    assert torch.equal(logits(again), logits(model))
    other = get_peft_model(patch_model(MAKERS["llama"]().eval(), **OPTIONS), LoraConfig(r=3, target_modules=["q_proj"]))
    with pytest.raises(ValueError, match="has no LoRA like that of the model: .*size mismatch"):
        restore_adapter(other, tmp_path)
    merged = found.merge_and_unload()
    # Adding a product of thin matrices before and not after a product rounds differently
    torch.testing.assert_close(logits(merged), logits(model), rtol=1e-4, atol=1e-4)
    merged.save_pretrained(tmp_path / "whole")
    assert torch.equal(logits(type(merged).from_pretrained(tmp_path / "whole")), logits(merged))


def test_bfloat16_halves_the_file_and_fits_a_model_of_any_dtype(tmp_path):
    model = trained(MAKERS["llama"])
    save_adapter(model, tmp_path / "wide")
    save_adapter(model, tmp_path / "narrow", torch.bfloat16)
    wide, narrow = ((tmp_path / name / WEIGHTS).stat().st_size for name in ("wide", "narrow"))
    assert narrow < 0.6 * wide
    found = load_adapter(MAKERS["llama"]().to(torch.bfloat16), tmp_path / "narrow")
    assert all(parameter.dtype == torch.bfloat16 for parameter in found.parameters())


def other_weights():
    model = decoder("llama")
    model.get_input_embeddings().weight.data.add_(0.1)
    return model


def damage(folder, what):
    file = folder / WEIGHTS
    if what == "no record":
        (folder / RECORD).unlink()
    elif what == "no weights":
        file.unlink()
    elif what == "cut":
        file.write_bytes(file.read_bytes()[:-50])
    elif what == "empty record":
        (folder / RECORD).write_text("{}")
    elif what == "other options":
        record = json.loads((folder / RECORD).read_text())
        record["options"]["memory_conv"] = 5
        (folder / RECORD).write_text(json.dumps(record))
    elif what == "nan":
        bad = trained(MAKERS["llama"])
        bad.model.layers[1].self_attn.gate.weight.data[0] = torch.nan
        shutil.rmtree(folder)
        save_adapter(bad, folder)


@pytest.mark.parametrize(
    ("what", "make", "message"),
    [
        ("nothing", gpt2, "was trained with another model: model_type is 'gpt2', not 'llama'"),
        ("nothing", lambda: decoder("llama", num_hidden_layers=2), "layers is 2, not 4"),
        ("nothing", other_weights, "was trained with another model: weights is"),
        ("no record", None, "is no adapter of a memory"),
        ("no weights", None, "is no adapter of a memory"),
        ("cut", None, "is damaged or no safetensors file"),
        ("empty record", None, "has no options and model"),
        ("other options", None, "does not have what its options say: look at 0.memory_conv"),
        ("nan", None, "holds NaN or infinity in 1.gate.weight"),
    ],
)
def test_what_is_refused_leaves_the_model_as_it_was(what, make, message, tmp_path):
    save_adapter(trained(MAKERS["llama"]), tmp_path / "adapter")
    damage(tmp_path / "adapter", what)
    model = (make or MAKERS["llama"])().eval()
    kind, wanted = type(model), logits(model)
    with pytest.raises(ValueError, match=message) as error:
        load_adapter(model, tmp_path / "adapter")
    assert "\n" not in str(error.value)
    assert type(model) is kind and torch.equal(logits(model), wanted)


def test_only_a_model_with_a_memory_has_something_to_save(tmp_path):
    with pytest.raises(ValueError, match="a LlamaForCausalLM has no Infini-attention"):
        save_adapter(MAKERS["llama"](), tmp_path / "adapter")
    assert not (tmp_path / "adapter").exists()
