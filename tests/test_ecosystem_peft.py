"""LoRA by PEFT on a patched GPT-2: trained with Trainer, the gates beside it, saved, loaded, merged."""

from pathlib import Path

import pytest
import torch
from models import gpt2, token_ids
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments, default_data_collator

from hf_infini import InfiniGPT2LMHeadModel, patch_model

peft = pytest.importorskip("peft", reason="pip install peft")
from safetensors.torch import load_file, save_file  # noqa: E402

PROJECTIONS = ["attn.c_attn", "attn.c_proj"]


def save_with_gates(model, folder: Path) -> None:
    """As the README says: PEFT saves its own weights alone, and loads whatever the file of the adapter holds."""
    model.save_pretrained(folder)
    file = folder / "adapter_model.safetensors"
    gates = {name: gate.detach() for name, gate in model.named_parameters() if name.endswith(".gate")}
    save_file(load_file(file) | gates, file, metadata={"format": "pt"})


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """The folder of a patched model, which the adapter names as its base."""
    folder = tmp_path_factory.mktemp("base")
    patch_model(gpt2(), segment_length=8, positions="segment", gate_init=-1.0).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def trained(base, tmp_path_factory):
    """The model after 6 steps of Trainer, and the folder of its adapter."""
    model = AutoModelForCausalLM.from_pretrained(base)
    frozen = {name: weight.clone() for name, weight in model.state_dict().items()}
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=PROJECTIONS, fan_in_fan_out=True)
    torch.manual_seed(0)
    model = peft.get_peft_model(model, config)
    for name, parameter in model.named_parameters():
        parameter.requires_grad |= name.endswith(".gate")
    folder = tmp_path_factory.mktemp("adapter")
    rows = [{"input_ids": row, "labels": row} for row in token_ids(24, 40)]
    arguments = TrainingArguments(
        str(folder / "run"), max_steps=6, learning_rate=0.01, lr_scheduler_type="constant", report_to="none", use_cpu=True,
        per_device_train_batch_size=4, disable_tqdm=True, save_strategy="no", logging_steps=1,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=rows, data_collator=default_data_collator)
    trainer.train()
    save_with_gates(model, folder)
    return model.eval(), folder, frozen


@torch.no_grad()
def logits(model):
    return model.eval()(input_ids=token_ids(2, 40, seed=1)).logits


def gates(model) -> torch.Tensor:
    return torch.stack([weight.detach() for name, weight in model.named_parameters() if name.endswith(".gate")])


def test_adapter_and_gates_train_and_the_rest_stays(trained):
    model, folder, frozen = trained
    learned = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert len(learned) == 3 * (2 * len(PROJECTIONS) + 1)  # A and B of each projection, and the gate, in 3 layers
    moved = (gates(model) + 1).abs()
    assert moved.min() > 0 and moved.max() > 0.01  # all heads have left gate_init
    now = {name.replace(".base_layer", ""): weight for name, weight in model.get_base_model().state_dict().items()}
    assert all(torch.equal(now[name], weight) for name, weight in frozen.items() if not name.endswith(".gate"))
    saved = load_file(folder / "adapter_model.safetensors")
    assert len(saved) == len(learned)  # nothing of the base model is in the adapter's file


def test_a_saved_adapter_gives_the_same_logits_on_a_fresh_base(base, trained):
    model, folder, _ = trained
    loaded = peft.AutoPeftModelForCausalLM.from_pretrained(folder)  # finds the base by its folder
    fresh = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)
    for other in (loaded, fresh):
        assert torch.equal(gates(other), gates(model))
        assert torch.equal(logits(other), logits(model))
    assert (logits(AutoModelForCausalLM.from_pretrained(base)) - logits(model)).abs().max() > 0.1


def test_merged_it_is_an_ordinary_infini_model(trained, tmp_path):
    model, folder, _ = trained
    peft.AutoPeftModelForCausalLM.from_pretrained(folder).merge_and_unload().save_pretrained(tmp_path)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(merged) is InfiniGPT2LMHeadModel
    assert torch.equal(gates(merged), gates(model))
    torch.testing.assert_close(logits(merged), logits(model), rtol=1e-4, atol=1e-4)  # W x + B A x against (W + B A) x


def test_generation_with_an_adapter_is_cached_as_without(trained):
    model = trained[0]
    prompt = dict(input_ids=token_ids(1, 30, seed=2), attention_mask=torch.ones(1, 30))
    cached, uncached = (model.generate(**prompt, max_new_tokens=12, do_sample=False, use_cache=on) for on in (True, False))
    assert torch.equal(cached, uncached)
