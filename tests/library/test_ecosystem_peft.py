"""An adapter of PEFT and the memory beside it: its modules are what PEFT chooses for the plain
model, no way of loading leaves the memory out without a word, and both are saved and loaded
together."""

import copy
import warnings
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, pipeline

import hf_infini
from decoders import decoder, token_ids
from hf_infini import (
    InfiniQwen2ForCausalLM,
    fit_keep_score,
    load_adapter,
    lora_config,
    patch_model,
    save_adapter,
)
from hf_infini.compat.peft_saving import UnsavedMemoryWarning
from hf_infini.layers.memory_layer import PARAMETERS
from hf_infini.models.structure import inside_of

peft = pytest.importorskip("peft", reason="pip install peft")

OPTIONS = {"segment_length": 8, "local_segments": 1, "gate_init": 0.0}
LEARNED = {"memory_conv": 2, "memory_write": "learned", "feature_map": "exp"}
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


def shaken(model, parameters=None):
    """The model, in which these, or all that is trained, are random, as after training."""
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in parameters or [p for p in model.parameters() if p.requires_grad]:
            parameter.add_(torch.randn(parameter.shape, generator=draw), alpha=0.3)
    return model


def stock(folder):
    return AutoModelForCausalLM.from_pretrained(folder)


def learned(folder):
    model = patch_model(stock(folder), **OPTIONS, **LEARNED)
    memory = [
        p for name, p in model.named_parameters() if not {*PARAMETERS}.isdisjoint(name.split("."))
    ]
    return shaken(model, memory)


def adapted(model, **options):
    return shaken(peft.get_peft_model(model, lora_config(model, **options)))


BASES = {
    "patched": lambda folder: patch_model(stock(folder), **OPTIONS),
    "loaded with a memory": lambda folder: InfiniQwen2ForCausalLM.from_pretrained(
        folder, **OPTIONS
    ),
    "patched and learned": learned,
}
LOADERS = {
    "AutoPeftModelForCausalLM": lambda folder, plain: peft.AutoPeftModelForCausalLM.from_pretrained(
        folder
    ),
    "PeftModel": lambda folder, plain: peft.PeftModel.from_pretrained(stock(plain), folder),
    "AutoModelForCausalLM": lambda folder, plain: AutoModelForCausalLM.from_pretrained(folder),
    "pipeline": lambda folder, plain: pipeline("text-generation", model=str(folder)),
    "load_adapter of transformers": lambda folder, plain: stock(plain).load_adapter(str(folder)),
    "load_adapter of PEFT": lambda folder, plain: adapted(BASES["patched"](plain)).load_adapter(
        folder, "x"
    ),
}


@pytest.mark.parametrize("model_type", ["gpt2", "llama", "gpt_neox", "gemma2"])
def test_what_lora_config_chooses_is_what_peft_chooses_for_the_plain_model(model_type):
    model, plain = patch_model(decoder(model_type), **OPTIONS), decoder(model_type)
    found, wanted = (
        {
            name: p.shape
            for name, p in peft.get_peft_model(m, config).named_parameters()
            if "lora_" in name
        }
        for m, config in (
            (model, lora_config(model)),
            (plain, peft.LoraConfig(task_type="CAUSAL_LM")),
        )
    )
    assert found == wanted and len(wanted) >= 4


def test_a_score_that_is_fitted_again_is_the_one_that_is_saved(plain, tmp_path):
    """With the LoRA in place, by the adapter's own configuration and by a copy of it."""
    options = OPTIONS | {"update_rule": "none", "kept_tokens": 8, "keep_score": "learned"}
    model = patch_model(stock(plain), **options)
    fit_keep_score(model, token_ids(3, 60, 1), distance=20, progress=False)
    model = peft.get_peft_model(model, lora_config(model)).eval()
    fit_keep_score(model, token_ids(3, 60, 2), distance=9, progress=False)
    model.save_pretrained(tmp_path / "own")
    copy.deepcopy(model).save_pretrained(tmp_path / "copied")
    wanted = {name: p for name, p in model.named_parameters() if "keep_weight" in name}
    # the configuration of two models: each saves its own
    both = patch_model(stock(plain), **options), patch_model(stock(plain), **options)
    for one in both:
        fit_keep_score(one, token_ids(3, 60, 1), distance=20, progress=False)
    config = lora_config(both[0])
    both = [peft.get_peft_model(one, config).eval() for one in both]
    fit_keep_score(both[1], token_ids(3, 60, 2), distance=9, progress=False)
    both[0].save_pretrained(tmp_path / "first")
    first = load_adapter(stock(plain), tmp_path / "first")
    for key in wanted:
        assert torch.equal(first.get_parameter(key), both[0].get_parameter(key))
        assert not torch.equal(both[0].get_parameter(key), both[1].get_parameter(key))
    assert len(wanted) >= 2
    for name in ("own", "copied"):
        found = load_adapter(stock(plain), tmp_path / name)
        assert inside_of(found).config.kept_shares == inside_of(model).config.kept_shares
        for key, parameter in wanted.items():
            assert torch.equal(found.get_parameter(key), parameter)


@pytest.mark.parametrize("base", BASES)
def test_an_adapter_of_a_model_that_was_patched_brings_its_memory(base, plain, tmp_path):
    """In a base that has learned something of its own before, this comes along as it was."""
    model = adapted(BASES[base](plain), modules_to_save=["lm_head"] if base == "patched" else None)
    model.save_pretrained(tmp_path)
    for load in LOADERS.values():
        with pytest.raises(ValueError, match=HINT):
            load(tmp_path, plain)
    found = load_adapter(stock(plain), tmp_path)
    assert type(found) is type(model) and torch.equal(logits(found), logits(model))
    with pytest.raises(ValueError, match="is put on a plain model|has Infini-attention already"):
        load_adapter(found, tmp_path)


@pytest.mark.parametrize("kind", ["ia3", "prompt"])
def test_save_adapter_saves_it_beside_any_adapter(kind, plain, tmp_path):
    model = learned(plain)
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    if kind == "ia3":
        config = peft.IA3Config(
            task_type="CAUSAL_LM", target_modules=["k_proj"], feedforward_modules=[]
        )
    model = shaken(peft.get_peft_model(model, config))
    save_adapter(model, tmp_path)
    with pytest.raises(ValueError, match=HINT):
        LOADERS["PeftModel"](tmp_path, plain)
    assert torch.equal(logits(load_adapter(stock(plain), tmp_path)), logits(model))


def test_each_of_several_adapters_brings_it(plain, tmp_path):
    model = BASES["patched"](plain)
    model = peft.get_peft_model(model, lora_config(model, r=2), adapter_name="one")
    model.add_adapter("two", lora_config(model, r=3, target_modules=["k_proj"]))
    model.set_adapter("two")
    shaken(model).save_pretrained(tmp_path)
    assert torch.equal(logits(load_adapter(stock(plain), tmp_path / "two")), logits(model))
    with pytest.raises(ValueError, match=HINT):
        LOADERS["PeftModel"](tmp_path / "one", plain)
    with pytest.raises(
        ValueError, match="one adapter is saved, named 'default'; this model has one, two"
    ):
        hf_infini.save_adapter(model, tmp_path / "both")
    assert not (tmp_path / "both").exists()


def test_of_a_base_that_is_saved_with_its_memory_peft_loads_it(plain, tmp_path):
    learned(plain).save_pretrained(tmp_path / "base")
    base = stock(tmp_path / "base")
    before = logits(base)
    model = adapted(base, r=2)
    wanted = logits(model)
    assert (wanted - before).abs().max() > 0.1
    model.save_pretrained(tmp_path / "adapter")
    for _ in range(2):  # also if it is saved again by who has not trained it
        found = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
        assert torch.equal(logits(found), wanted)
        found.save_pretrained(tmp_path / "adapter")


def test_an_adapter_that_transformers_adds_and_saves_brings_it(plain, tmp_path, monkeypatch):
    # some want what is not released
    monkeypatch.setattr("transformers.integrations.peft.MIN_PEFT_VERSION", "0.19")
    model = learned(plain)
    model.add_adapter(lora_config(model))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UnsavedMemoryWarning)
        shaken(model).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=HINT):
        LOADERS["PeftModel"](tmp_path, plain)
    assert torch.equal(logits(load_adapter(stock(plain), tmp_path)), logits(model))


def lora(**options):
    return peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], **options)


def saved_memory(folder, plain):
    """A model from a folder that has its memory."""
    learned(plain).save_pretrained(folder / "base")
    return stock(folder / "base")


def patched_inside(model):
    patch_model(model.get_base_model(), **OPTIONS)
    return model


LOSSES = {
    "own": lambda folder, plain: peft.get_peft_model(learned(plain), lora()),
    "own, with gates": lambda folder, plain: peft.get_peft_model(
        learned(plain), lora(modules_to_save=["gate"])
    ),
    "loaded by our function": lambda folder, plain: (
        save_adapter(peft.get_peft_model(learned(plain), lora()), folder / "first"),
        load_adapter(stock(plain), folder / "first"),
    )[1],
    "patched under an adapter": lambda folder, plain: patched_inside(
        peft.get_peft_model(stock(plain), lora())
    ),
}
NO_LOSSES = {
    "lora_config": lambda folder, plain: adapted(learned(plain)),
    "a base that is saved with its memory": lambda folder, plain: peft.get_peft_model(
        saved_memory(folder, plain), lora()
    ),
    "a plain model": lambda folder, plain: peft.get_peft_model(stock(plain), lora()),
    "unpatched since": lambda folder, plain: peft.get_peft_model(
        hf_infini.unpatch_model(learned(plain)), lora()
    ),
}


@pytest.mark.parametrize("make", LOSSES.values(), ids=LOSSES)
def test_peft_warns_when_it_saves_an_adapter_without_its_memory(make, plain, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UnsavedMemoryWarning)
        model = make(tmp_path, plain)
        save_adapter(model, tmp_path / "both")  # which leaves nothing out
    with pytest.warns(UnsavedMemoryWarning, match="hf_infini.save_adapter.*hf_infini.lora_config"):
        model.save_pretrained(tmp_path / "adapter")
    assert peft.PeftConfig.from_pretrained(tmp_path / "adapter").target_modules == {"q_proj"}


def test_a_configuration_for_two_models_warns_for_the_one_with_a_memory(plain, tmp_path):
    config = lora()
    patched, other = (
        peft.get_peft_model(model, config) for model in (learned(plain), stock(plain))
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error", UnsavedMemoryWarning)
        other.save_pretrained(tmp_path)
    with pytest.warns(UnsavedMemoryWarning):
        patched.save_pretrained(tmp_path)
    assert type(config) is peft.LoraConfig


@pytest.mark.parametrize("case", NO_LOSSES)
def test_nothing_is_said_where_nothing_is_lost(case, plain, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UnsavedMemoryWarning)
        NO_LOSSES[case](tmp_path, plain).save_pretrained(tmp_path / "adapter")


def test_an_adapter_that_transformers_saves_is_warned_of_too(plain, tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.integrations.peft.MIN_PEFT_VERSION", "0.19")
    model = learned(plain)
    model.add_adapter(lora())
    with pytest.warns(UnsavedMemoryWarning):
        model.save_pretrained(tmp_path)


@pytest.mark.parametrize("kind", ["LoraConfig", "AdaLoraConfig", "IA3Config", "VeraConfig"])
@pytest.mark.parametrize("model_type", ["llama", "gpt2", "qwen2"])
def test_an_adapter_without_targets_has_those_of_the_own_model(kind, model_type):
    given = {"total_step": 10} if kind == "AdaLoraConfig" else {}
    found, layer = [], peft.tuners.tuners_utils.BaseTunerLayer
    for model in (decoder(model_type), patch_model(decoder(model_type), segment_length=8)):
        config = getattr(peft, kind)(task_type="CAUSAL_LM", **given)
        modules = peft.get_peft_model(model, config).named_modules()
        found.append({name for name, part in modules if isinstance(part, layer)})
    assert found[0] == found[1] != set()


@pytest.mark.parametrize("others", ["lm_head", ["lm_head"]])
def test_a_module_to_save_may_be_one_name(others):
    model = patch_model(decoder("llama"), segment_length=8)
    config = lora_config(model, modules_to_save=others)
    assert config.modules_to_save == ["self_attn.gate", "lm_head"]
    adapted = peft.get_peft_model(model, config)
    assert any("lm_head.modules_to_save" in name for name, _ in adapted.named_parameters())
