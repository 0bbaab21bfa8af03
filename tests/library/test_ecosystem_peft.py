"""LoRA by PEFT on both families: the projections and, as `modules_to_save`, the gates; trained, saved, loaded, merged."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments, default_data_collator

from hf_infini import CausalMHAForCausalLM, InfiniGPT2LMHeadModel, patch_model
from hf_infini.layers.gates import gates_of
from hf_infini.tools import training
from models import causal_mha, gpt2, infini_gpt2, token_ids

peft = pytest.importorskip("peft", reason="pip install peft")
from safetensors.torch import load_file  # noqa: E402

STEPS = 6
FAMILIES = {
    "gpt2": (InfiniGPT2LMHeadModel, {"target_modules": ["attn.c_attn", "attn.c_proj"], "fan_in_fan_out": True}),
    "causal_mha": (CausalMHAForCausalLM, {"target_modules": ["W_query", "W_key"]}),
}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def base(family, tmp_path_factory) -> Path:
    """The folder of a model with a memory, which the adapter names as its base."""
    folder = tmp_path_factory.mktemp("base")
    if family == "gpt2":
        model = patch_model(gpt2(), segment_length=8, position_encoding="segment", gate_init=-1.0)
    else:
        model = causal_mha(attention="infini", segment_length=8, position_encoding="rope")
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def trained(family, base, tmp_path_factory):
    """The model after 6 steps of Trainer, and the folder of its adapter."""
    torch.manual_seed(0)
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, modules_to_save=["gate"], **FAMILIES[family][1])
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    folder = tmp_path_factory.mktemp("adapter")
    rows = [{"input_ids": row, "labels": row} for row in token_ids(24, 40)]
    arguments = TrainingArguments(
        str(folder / "run"), max_steps=STEPS, learning_rate=0.01, lr_scheduler_type="constant", use_cpu=True,
        per_device_train_batch_size=4, disable_tqdm=True, save_steps=STEPS, logging_steps=1, report_to="none",
    )  # fmt: skip
    Trainer(model, arguments, train_dataset=rows, data_collator=default_data_collator).train()
    model.save_pretrained(folder)
    return model.eval(), folder


@torch.no_grad()
def logits(model):
    return model.eval()(input_ids=token_ids(2, 40, seed=1)).logits


def gates(model) -> torch.Tensor:
    """`[layers, heads]`: those that the forward pass takes."""
    return torch.stack([gate().detach() for gate in gates_of(model).values()])


@pytest.mark.slow
def test_adapter_and_gates_train_and_the_rest_stays(family, base, trained):
    model, folder = trained
    before = AutoModelForCausalLM.from_pretrained(base)
    learned = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert len(learned) == 3 * (2 * 2 + 1)  # A and B of the two projections, and the gate, in 3 layers
    moved = (gates(model) - gates(before)).abs()
    assert moved.min() > 0 and moved.max() > 0.01  # those of all heads
    now = {
        name.replace(".base_layer", "").replace(".original_module", ""): weight
        for name, weight in model.get_base_model().state_dict().items()
    }
    assert all(torch.equal(now[name], weight) for name, weight in before.state_dict().items())
    saved = load_file(folder / "adapter_model.safetensors")
    assert len(saved) == len(learned)  # nothing of the base model is in the adapter's file


@pytest.mark.slow
def test_a_saved_adapter_gives_the_same_logits_on_a_fresh_base(base, trained):
    model, folder = trained
    loaded = peft.AutoPeftModelForCausalLM.from_pretrained(folder)  # finds the base by its folder
    fresh = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)
    of_trainer = peft.AutoPeftModelForCausalLM.from_pretrained(folder / "run" / f"checkpoint-{STEPS}")
    for other in (loaded, fresh, of_trainer):
        assert torch.equal(gates(other), gates(model))
        assert torch.equal(logits(other), logits(model))
    plain = logits(AutoModelForCausalLM.from_pretrained(base))
    assert (plain - logits(model)).abs().max() > 0.1
    with model.disable_adapter():  # the base model's gates, too
        assert torch.equal(logits(model), plain)


def test_merged_it_is_an_ordinary_infini_model(family, trained, tmp_path):
    model, folder = trained
    peft.AutoPeftModelForCausalLM.from_pretrained(folder).merge_and_unload().save_pretrained(tmp_path)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(merged) is FAMILIES[family][0]
    assert torch.equal(gates(merged), gates(model))
    torch.testing.assert_close(logits(merged), logits(model), rtol=1e-4, atol=1e-4)  # W x + B A x against (W + B A) x


def test_generation_with_an_adapter_is_cached_as_without(trained):
    model = trained[0]
    prompt = dict(input_ids=token_ids(1, 30, seed=2), attention_mask=torch.ones(1, 30))
    cached, uncached = (model.generate(**prompt, max_new_tokens=12, do_sample=False, use_cache=on) for on in (True, False))
    assert torch.equal(cached, uncached)


def test_the_optimiser_s_groups_and_the_gates_to_show_know_an_adapter_s_gates():
    model = infini_gpt2()
    start = training.gate_values(model)
    config = peft.LoraConfig(task_type="CAUSAL_LM", modules_to_save=["gate"], **FAMILIES["gpt2"][1])
    model = peft.get_peft_model(model, config)
    assert training.gate_values(model) == start
    groups = {group["name"]: group for group in training.parameter_groups(model, 1e-3, 0.01, 0.1)}
    own = {parameter for gate in gates_of(model).values() for parameter in gate.modules_to_save.parameters()}
    assert len(own) == 3 and own <= set(groups["gates"]["params"])
    for parameter in own:
        parameter.data.fill_(-100.0)
    assert training.gate_values(model) == {layer: [0.0] * 4 for layer in start}
