"""Training a memory beside a LoRA, in any kind of loop: the gates move, and what was learned is
saved and resumed."""

import re
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    default_data_collator,
)

from corpora.tokenization import build_character_tokenizer
from decoders import decoder, fitted, token_ids
from hf_infini import load_adapter, lora_config, patch_model
from hf_infini.layers.memory_layer import gates_of
from models import causal_mha
from ranks import on_ranks

peft = pytest.importorskip("peft", reason="pip install peft")
trl = pytest.importorskip("trl", reason="pip install trl")

OPTIONS = {"segment_length": 8, "local_segments": 1}
LEARNED = {"memory_conv": 2, "memory_write": "learned", "feature_map": "exp"}
KEEPING = {"kept_tokens": 4, "keep_score": "half"}
ROOT = Path(__file__).parents[2]
RUN = {
    "use_cpu": True,
    "report_to": "none",
    "disable_tqdm": True,
    "save_strategy": "no",
    "logging_strategy": "no",
}


def patched(**options):
    return fitted(patch_model(decoder("llama"), **OPTIONS, **options))


def with_lora(config=lambda model: peft.LoraConfig(target_modules=["q_proj"]), **options):
    model = patched(**options)
    return peft.get_peft_model(model, config(model))


def gates(model):
    return torch.stack([gate().detach() for gate in gates_of(model).values()])


@pytest.mark.parametrize(
    "options", [LEARNED | KEEPING, {"layers": [1, 3]}], ids=["learned", "layers"]
)
def test_lora_config_trains_the_gates(options):
    model = with_lora(lora_config, **options)
    learned = {
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and "lora_" not in name
    }
    gates = {f"{name}.weight" for name in gates_of(patched(**options))}
    assert len(gates) == len(model.config.infini_layers)
    assert {
        name.removeprefix("base_model.model.").replace(".modules_to_save.default", "")
        for name in learned
    } == gates


def test_lora_config_takes_the_options_of_peft_s():
    model = patched()
    config = lora_config(model, r=3, modules_to_save=["lm_head"], target_modules=["k_proj"])
    assert isinstance(config, peft.LoraConfig) and config.task_type == "CAUSAL_LM" and config.r == 3
    assert config.modules_to_save == ["self_attn.gate", "lm_head"] and config.target_modules == {
        "k_proj"
    }
    assert lora_config(peft.get_peft_model(model, config)).modules_to_save == ["self_attn.gate"]
    assert lora_config(causal_mha(attention="infini", segment_length=8)).modules_to_save == [
        "attn.gate"
    ]
    experts = patch_model(decoder("qwen3_moe"), **OPTIONS)  # whose routers are named "gate" too
    model = peft.get_peft_model(experts, lora_config(experts, target_modules=["q_proj"]))
    assert (
        sum(
            parameter.requires_grad
            for name, parameter in model.named_parameters()
            if "gate" in name
        )
        == 4
    )
    for nothing in (decoder("llama"), torch.nn.Linear(2, 2)):
        with pytest.raises(ValueError, match="has no memory to train beside a LoRA: patch_model"):
            lora_config(nothing)


def loop(model, steps):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    model.train()
    for step in range(steps):
        ids = token_ids(2, 20, seed=step)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def by_two() -> list[list]:
    """DDP does without `find_unused_parameters`: whatever is to be trained has a gradient in every
    step."""
    torch.manual_seed(0)
    model = with_lora(lora_config)
    loop(torch.nn.parallel.DistributedDataParallel(model), steps=3)
    return [parameter.tolist() for parameter in model.parameters() if parameter.requires_grad]


def test_all_that_lora_config_trains_has_a_gradient_on_two_processes():
    one, other = on_ranks(by_two, 2)
    assert not isinstance(one, Exception), one
    assert len(one) > 10 and one == other


@pytest.mark.slow
def test_a_checkpoint_is_resumed_with_its_memory(tmp_path):
    ended = []
    for resume in (None, tmp_path / "checkpoint-2"):
        torch.manual_seed(0)
        model = with_lora(lora_config, **LEARNED)
        rows = [{"input_ids": row, "labels": row} for row in token_ids(8, 40)]
        saving = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "learning_rate": 0.01}
        arguments = TrainingArguments(tmp_path, per_device_train_batch_size=2, **RUN | saving)
        trainer = Trainer(model, arguments, train_dataset=rows, data_collator=default_data_collator)
        trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
        ended.append(dict(model.named_parameters()))
    assert all(torch.equal(parameter, ended[0][name]) for name, parameter in ended[1].items())


@pytest.mark.slow
def test_the_documented_program_with_trl_runs(tmp_path, monkeypatch):
    """With a small model in the place of the one that would be downloaded, and three steps on a
    CPU."""
    decoder("llama").save_pretrained(tmp_path / "stock")
    tokenizer = build_character_tokenizer(["abcdefgh"])
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    tokenizer.save_pretrained(tmp_path / "stock")
    (tmp_path / "textos.jsonl").write_text(
        f'{{"text": "{"abacadefhg" * 200}"}}\n' * 4, encoding="utf-8"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    pages = (ROOT / "docs" / "fine-tune.md").read_text(encoding="utf-8")
    _, train, load, *_ = re.findall("```python\n(.*?)\n```", pages, re.DOTALL)
    on_cpu = 'max_steps=3, use_cpu=True, report_to="none", disable_tqdm=True'
    for shown, here in (
        ("HuggingFaceTB/SmolLM2-135M", str(tmp_path / "stock")),
        ('SFTConfig("tuned"', f'SFTConfig("tuned", {on_cpu}'),
    ):
        assert train.count(shown) == 1
        train = train.replace(shown, here)
    names = {}
    exec(train, names)
    trained = names["trainer"].model.eval()
    # Adam's steps are about the learning rate, which falls to a third in three steps
    assert (gates(trained) + 4).abs().min() > 0.005 and names["trainer"].state.global_step == 3
    ids = token_ids(1, 900)
    with torch.no_grad():
        wanted = trained(input_ids=ids).logits
        found = load_adapter(AutoModelForCausalLM.from_pretrained("stock"), "tuned")
        assert torch.equal(found(input_ids=ids).logits, wanted)
        exec(load, names)
        torch.testing.assert_close(names["model"](ids).logits, wanted, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="load_adapter"):
        peft.AutoPeftModelForCausalLM.from_pretrained("tuned")
