"""An adapter of PEFT and the memory beside it: no way of loading leaves the memory out without a word, and both are trained,
saved, resumed and loaded together."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, pipeline

import hf_infini
from decoders import decoder, token_ids
from hf_infini import AutoInfiniModelForCausalLM, load_adapter, lora_config, patch_model

peft = pytest.importorskip("peft", reason="pip install peft")
adapted = peft.get_peft_model

OPTIONS = {"segment_length": 8, "local_segments": 1, "gate_init": 0.0}
LEARNED = {"memory_init": "learned", "memory_conv": 2, "memory_write": "learned", "feature_map": "learned"}
LEARNED |= {"kept_tokens": 4, "keep_score": "half"}
IDS = token_ids(2, 50)
HINT = "hf_infini.load_adapter"


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    """The folder of a stock Qwen2."""
    folder = tmp_path_factory.mktemp("plain")
    decoder("qwen2").save_pretrained(folder)
    return folder


@torch.no_grad()
def logits(model):
    return model.eval()(input_ids=IDS).logits


def shaken(model):
    """The model, in which all that is trained or fitted is random, as after training."""
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad or name.endswith("keep_weight"):
                parameter.add_(torch.randn(parameter.shape, generator=draw), alpha=0.3)
    return model


def stock(folder):
    return AutoModelForCausalLM.from_pretrained(folder)


BASES = {
    "patched": lambda folder: patch_model(stock(folder), **OPTIONS),
    "loaded with a memory": lambda folder: AutoInfiniModelForCausalLM.from_pretrained(folder, **OPTIONS),
    "patched with learned parts": lambda folder: patch_model(stock(folder), **OPTIONS, **LEARNED),
}
CONFIGS = {
    "lora": lambda model: peft.LoraConfig(task_type="CAUSAL_LM"),
    "embeddings": lambda model: peft.LoraConfig(target_modules=["embed_tokens", "q_proj"], modules_to_save=["lm_head"]),
    "lora and memory": lora_config,
    "ia3": lambda model: peft.IA3Config(task_type="CAUSAL_LM"),
    "prompt": lambda model: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
}
LOADERS = {
    "AutoPeftModelForCausalLM": lambda folder, plain: peft.AutoPeftModelForCausalLM.from_pretrained(folder),
    "PeftModel": lambda folder, plain: peft.PeftModel.from_pretrained(stock(plain), folder),
    "AutoModelForCausalLM": lambda folder, plain: AutoModelForCausalLM.from_pretrained(folder),
    "pipeline": lambda folder, plain: pipeline("text-generation", model=str(folder)),
    "load_adapter of transformers": lambda folder, plain: stock(plain).load_adapter(str(folder)),
    "load_adapter of PEFT": lambda folder, plain: adapted(stock(plain), peft.LoraConfig()).load_adapter(folder, "x"),
}


@pytest.mark.parametrize(
    "base, kind", [*((name, "lora and memory") for name in [*BASES][1:]), *(("patched", name) for name in CONFIGS)]
)
def test_an_adapter_of_a_model_that_was_patched_brings_its_memory(base, kind, plain, tmp_path):
    model = BASES[base](plain)
    model = shaken(adapted(model, CONFIGS[kind](model), adapter_name="default"))
    model.save_pretrained(tmp_path)
    for load in LOADERS.values():
        with pytest.raises(ValueError, match=HINT):
            load(tmp_path, plain)
    found = load_adapter(stock(plain), tmp_path)
    assert type(found) is type(model) and torch.equal(logits(found), logits(model))
    with pytest.raises(ValueError, match="is put on a plain model|has Infini-attention already"):
        load_adapter(found, tmp_path)


def test_each_of_several_adapters_brings_it(plain, tmp_path):
    model = adapted(BASES["patched"](plain), peft.LoraConfig(r=2), adapter_name="one")
    model.add_adapter("two", peft.LoraConfig(r=3, target_modules=["k_proj"]))
    model.set_adapter("two")
    shaken(model).save_pretrained(tmp_path)
    assert torch.equal(logits(load_adapter(stock(plain), tmp_path / "two")), logits(model))
    for name in ("one", "two"):
        with pytest.raises(ValueError, match=HINT):
            LOADERS["PeftModel"](tmp_path / name, plain)
    with pytest.raises(ValueError, match="this model has one, two: use its save_pretrained"):
        hf_infini.save_adapter(model, tmp_path / "both")
    assert not (tmp_path / "both").exists()


def test_the_state_that_is_given_may_be_a_part(plain, tmp_path):
    model = BASES["patched with learned parts"](plain)
    model = shaken(adapted(model, lora_config(model)))
    part = {name: tensor for name, tensor in model.state_dict().items() if "lora_" in name or "modules_to_save" in name}
    model.save_pretrained(tmp_path, state_dict=part)
    assert torch.equal(logits(load_adapter(stock(plain), tmp_path)), logits(model))


def test_once_unpatched_it_is_an_adapter_as_any_other(plain, tmp_path):
    model = adapted(BASES["patched"](plain), peft.LoraConfig(init_lora_weights=False))
    hf_infini.unpatch_model(model.get_base_model())
    model.save_pretrained(tmp_path)
    for name in ("PeftModel", "AutoModelForCausalLM"):
        assert torch.equal(logits(LOADERS[name](tmp_path, plain)), logits(model))


def test_of_a_base_that_is_saved_with_its_memory_peft_loads_it(plain, tmp_path):
    """The file of the adapter has all that was trained of the memory, also what PEFT cannot copy."""
    BASES["patched with learned parts"](plain).save_pretrained(tmp_path / "base")
    base = stock(tmp_path / "base")
    before = logits(base)
    model = shaken(adapted(base, lora_config(base, r=2)))
    wanted = logits(model)
    assert (wanted - before).abs().max() > 0.1
    model.save_pretrained(tmp_path / "adapter")
    for _ in range(2):  # also if it is saved again by who has not trained it
        found = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
        assert torch.equal(logits(found), wanted)
        assert not any(parameter.requires_grad for parameter in found.parameters())
        found.save_pretrained(tmp_path / "adapter")
    trainable = peft.PeftModel.from_pretrained(stock(tmp_path / "base"), tmp_path / "adapter", is_trainable=True)
    assert {name for name, parameter in trainable.named_parameters() if parameter.requires_grad} == {
        name for name, parameter in model.named_parameters() if parameter.requires_grad
    }
    with pytest.raises(ValueError, match="leave safe_serialization=False out"):
        model.save_pretrained(tmp_path / "pickle", safe_serialization=False)
    assert not (tmp_path / "pickle").exists()


def test_an_adapter_that_transformers_adds_and_saves_brings_it(plain, tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.integrations.peft.MIN_PEFT_VERSION", "0.19")  # some want what is not released
    model = BASES["patched with learned parts"](plain)
    model.add_adapter(lora_config(model))
    shaken(model).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=HINT):
        LOADERS["PeftModel"](tmp_path, plain)
    assert torch.equal(logits(load_adapter(stock(plain), tmp_path)), logits(model))


FRESH = """
import sys, peft
from transformers import AutoModelForCausalLM
for load in (
    lambda: peft.AutoPeftModelForCausalLM.from_pretrained(sys.argv[1]),
    lambda: peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(sys.argv[2]), sys.argv[1]),
):
    try:
        load()
    except ValueError as error:
        print(error)
assert "hf_infini" not in sys.modules
"""


@pytest.mark.slow
def test_without_this_package_it_is_refused_too(plain, tmp_path):
    adapted(BASES["patched"](plain), CONFIGS["lora"](None)).save_pretrained(tmp_path)
    done = subprocess.run([sys.executable, "-c", FRESH, tmp_path, plain], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.count(HINT) == 2, done.stderr
