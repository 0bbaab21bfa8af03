"""What PEFT chooses by the type of a model: an adapter without target modules is that of the plain model."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import hf_infini
from decoders import decoder, token_ids
from hf_infini import patch_model

peft = pytest.importorskip("peft", reason="pip install peft")

QUICK = ("gpt2", "llama", "gemma2", "gpt_neox")
WINDOW = {"segment_length": 8, "local_segments": 1, "sink_tokens": 2}
CONFIGS = {
    "lora": lambda: peft.LoraConfig(task_type="CAUSAL_LM", r=4),
    "ia3": lambda: peft.IA3Config(task_type="CAUSAL_LM"),
    "adalora": lambda: peft.AdaLoraConfig(task_type="CAUSAL_LM", total_step=10),
    "vera": lambda: peft.VeraConfig(task_type="CAUSAL_LM", r=4),
    "norms": lambda: peft.LNTuningConfig(task_type="CAUSAL_LM"),
    # Mixtral's experts by the names of their checkpoints, which transformers joins into parameters
    "experts": lambda: peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "w1", "w2", "w3"]),
}


def adapter(model, config) -> dict[str, torch.Size] | str:
    """The shapes of what is trained, by name, or why nothing is."""
    try:
        model = peft.get_peft_model(model, config)
    except ValueError as error:
        return str(error).partition(":")[0]
    return {name: parameter.shape for name, parameter in model.named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize(
    "model_type, kind",
    [
        *((name, "lora") for name in QUICK),
        ("llama", "ia3"),
        *(("mistral", kind) for kind in ("adalora", "vera", "norms")),
        ("mixtral", "experts"),
    ],
)
def test_an_adapter_is_that_of_the_plain_model(model_type, kind):
    wanted = adapter(decoder(model_type), CONFIGS[kind]())
    assert adapter(patch_model(decoder(model_type), **WINDOW), CONFIGS[kind]()) == wanted
    assert model_type not in QUICK or len(wanted) >= 4


@pytest.mark.slow
@pytest.mark.parametrize("model_type, kind", [("gpt2", "lora"), ("gemma2", "lora"), ("mixtral", "experts")])
def test_it_is_saved_loaded_and_merged(model_type, kind, tmp_path):
    patch_model(decoder(model_type), **WINDOW).save_pretrained(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    ids = token_ids(2, 40)
    plain = model(ids).logits.detach()
    model = peft.get_peft_model(model, CONFIGS[kind]()).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:  # zero at first
                parameter.normal_(0, 0.3)
        wanted = model(input_ids=ids).logits
        assert (wanted - plain).abs().max() > 0.1
        model.save_pretrained(tmp_path / "adapter")
        loaded = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter").eval()
        assert torch.equal(loaded(input_ids=ids).logits, wanted)
        loaded.merge_and_unload().save_pretrained(tmp_path / "merged")
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
        # W x + B A x against (W + B A) x, in four layers
        torch.testing.assert_close(merged(ids).logits, wanted, rtol=1e-4, atol=1e-4)


ORDER = """
import sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
assert not any(name.startswith("peft.") for name in sys.modules)
import peft
model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM"))
assert {name.split(".")[-2] for name in model.state_dict() if "lora_" in name} == {"default"}
print(sorted(model.peft_config["default"].target_modules))
"""


@pytest.mark.slow
def test_peft_may_be_imported_after_the_model_is_loaded(tmp_path):
    patch_model(decoder("qwen2"), **WINDOW).save_pretrained(tmp_path / "model")
    root = {"PYTHONPATH": str(Path(hf_infini.__file__).parents[1]), "HF_HOME": str(tmp_path)}
    command = [sys.executable, "-c", ORDER, tmp_path / "model"]
    done = subprocess.run(command, env=os.environ | root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "['q_proj', 'v_proj']"


@pytest.mark.parametrize("loaded", ["patched", "with its memory"])
def test_an_adapter_of_a_plain_checkpoint_is_saved(loaded, tmp_path):
    """PEFT reads the checkpoint's configuration again, by the class of the model's, to see whether the vocabulary grew."""
    decoder("llama").save_pretrained(tmp_path / "plain")
    if loaded == "patched":
        model = patch_model(AutoModelForCausalLM.from_pretrained(tmp_path / "plain"), segment_length=8)
    else:
        model = hf_infini.AutoInfiniModelForCausalLM.from_pretrained(tmp_path / "plain", segment_length=8)
    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM"))
    adapted.save_pretrained(tmp_path / "adapter")
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()
    with pytest.raises(ValueError, match="give segment_length="):
        type(model).from_pretrained(tmp_path / "plain")
