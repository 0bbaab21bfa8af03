"""Memory files and adapters of PEFT: a memory is bound to those that act, as they are set, wherever they were put."""

import pytest
import torch

from hf_infini import InfiniCache
from hf_infini.cache.files import MemoryFileError, describe_model, read_record
from models import causal_mha, infini_gpt2, token_ids

peft = pytest.importorskip("peft", reason="pip install peft")

TARGETS = {"gpt2": ["attn.c_attn"], "mha": ["W_query", "W_value"]}


def make(family: str):
    if family == "gpt2":
        return infini_gpt2(layers=[0, 2])
    return causal_mha(attention="infini", segment_length=8, position_encoding="rope")


def lora(family: str, **options):
    kind = {"r": 2, "init_lora_weights": False, "modules_to_save": ["gate"], "target_modules": TARGETS[family]}
    return peft.LoraConfig(task_type="CAUSAL_LM", **kind | options)


@torch.no_grad()
def read(model) -> InfiniCache:
    return model(input_ids=token_ids(1, 30), use_cache=True).past_key_values


def taken(file, model) -> bool:
    """Whether the model goes on from the file: then it must compute what the memory was written by, bit for bit."""
    try:
        loaded = InfiniCache.from_pretrained(file, model)
    except MemoryFileError:
        return False
    again, ids = read(model), token_ids(1, 9, seed=1)
    with torch.no_grad():
        assert torch.equal(*(model(input_ids=ids, past_key_values=cache).logits for cache in (loaded, again)))
    return True


@pytest.mark.parametrize("family", TARGETS)
def test_a_memory_is_bound_to_the_adapters_that_act(family, tmp_path):
    torch.manual_seed(0)
    model, files = peft.get_peft_model(make(family), lora(family), adapter_name="one").eval(), {}
    model.add_adapter("two", lora(family))
    for name, parameter in model.named_parameters():
        if "modules_to_save.two" in name:
            parameter.data.add_(1.0)
    layers = [module for module in model.modules() if hasattr(module, "scaling") and hasattr(module, "lora_A")]

    def keep(name):
        files[name] = tmp_path / name
        read(model).save_pretrained(files[name], model)
        found = [other for other, file in files.items() if taken(file, model)]
        assert found == [name], name

    def refused(message):
        with pytest.raises(MemoryFileError, match=message):
            InfiniCache.from_pretrained(files["one"], model)

    keep("one")
    assert read_record(files["one"])["model"]["adapters"] == ["one"]
    model.base_model.disable_adapter_layers()
    keep("off")
    refused("the adapters that act are one in the file and none in the model")
    model.base_model.enable_adapter_layers()
    assert taken(files["one"], model)
    model.set_adapter("two")
    keep("two")
    refused("the adapters that act are one in the file and two in the model")
    model.set_adapter("one")
    layers[0].scale_layer(0.5)
    keep("scaled")
    refused("the weights, or how adapters are set, are not the same")
    layers[0].unscale_layer(0.5)
    assert taken(files["one"], model)
    for layer in layers:
        layer.merge()
    keep("merged")
    layers[0].lora_A["one"].weight.data.add_(1.0)
    keep("trained on")


def test_the_wrapper_does_not_count(tmp_path):
    """An adapter in place, in a PeftModel, and loaded from its folder into either, is the same adapter."""
    torch.manual_seed(0)
    model = peft.get_peft_model(make("gpt2"), lora("gpt2")).eval()
    model.save_pretrained(tmp_path / "adapter")
    read(model).save_pretrained(tmp_path / "m", model)
    loaded = peft.PeftModel.from_pretrained(make("gpt2"), tmp_path / "adapter").eval()
    for other in (model, model.get_base_model(), loaded, loaded.get_base_model(), loaded.get_base_model().base_model):
        assert describe_model(other) == describe_model(model)
    assert taken(tmp_path / "m", loaded) and taken(tmp_path / "m", model.get_base_model())
    with model.disable_adapter():
        assert not taken(tmp_path / "m", model)
    assert not taken(tmp_path / "m", make("gpt2"))
    merged = loaded.merge_and_unload()
    assert not taken(tmp_path / "m", merged)
    read(merged).save_pretrained(tmp_path / "merged", merged)
    assert taken(tmp_path / "merged", merged) and describe_model(merged)["adapters"] == []


def test_what_is_not_inside_of_layers_is_refused(tmp_path):
    model = make("gpt2")
    cache = read(model)
    prompted = peft.get_peft_model(model, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    with pytest.raises(ValueError, match=r"'default' \(PromptTuningConfig\) puts learned tokens before every text"):
        cache.save_pretrained(tmp_path / "m", prompted)
    cache.save_pretrained(tmp_path / "m", prompted.get_base_model())
    with pytest.raises(ValueError, match="puts learned tokens before every text"):
        InfiniCache.from_pretrained(tmp_path / "m", prompted)

    class Unknown(torch.nn.Identity):
        pass

    Unknown.__module__ = "peft.tuners.unknown"
    model.transformer.h[1].mlp.act = Unknown()
    with pytest.raises(ValueError, match="h.1.mlp.act is a Unknown of PEFT, which does not say whether it acts"):
        describe_model(model)
