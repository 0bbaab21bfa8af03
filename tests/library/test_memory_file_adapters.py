"""Memory files and adapters of PEFT: a memory is bound to those that act, as they are set, wherever they were put."""

import pytest
import torch
import transformers
from transformers.integrations.peft import MIN_PEFT_VERSION, check_peft_version

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


class Adapted:
    """A model with two adapters, put in by PEFT's wrapper or by transformers in place, and what can be set."""

    def __init__(self, family: str, wrapped: bool):
        torch.manual_seed(0)
        self.model, self.wrapped = make(family), wrapped
        if wrapped:
            self.model = peft.get_peft_model(self.model, lora(family), adapter_name="one")
        else:
            try:
                check_peft_version(min_version=MIN_PEFT_VERSION)
            except ValueError as error:
                pytest.skip(f"transformers {transformers.__version__} refuses PEFT {peft.__version__}: {error}")
            self.model.add_adapter(lora(family), "one")
        self.model.add_adapter(*(("two", lora(family)) if wrapped else (lora(family), "two")))
        for name, parameter in self.model.named_parameters():
            if "modules_to_save.two" in name:
                parameter.data.add_(1.0)
        self.model.eval()
        self.activate("one")

    @property
    def tuner(self):
        return self.model.base_model if self.wrapped else self.model

    def activate(self, *names: str) -> None:
        (self.tuner.set_adapter if self.wrapped else self.model.set_adapter)(names[0] if len(names) == 1 else list(names))

    def off(self) -> None:
        self.tuner.disable_adapter_layers() if self.wrapped else self.model.disable_adapters()

    def on(self) -> None:
        self.tuner.enable_adapter_layers() if self.wrapped else self.model.enable_adapters()
        for name, module in self.model.named_modules():
            if name.endswith("attn.gate"):  # which transformers switches off with the rest, and not on again
                module.enable_adapters(True)

    def layers(self):
        return [module for module in self.model.modules() if hasattr(module, "scaling") and hasattr(module, "lora_A")]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "wrapped"), [("gpt2", True), ("mha", False)])
def test_a_memory_is_bound_to_the_adapters_that_act(family, wrapped, tmp_path):
    adapted, files = Adapted(family, wrapped), {}

    def keep(name):
        files[name] = tmp_path / name
        read(adapted.model).save_pretrained(files[name], adapted.model)
        found = [other for other, file in files.items() if taken(file, adapted.model)]
        assert found == [name], name

    keep("one")
    assert read_record(files["one"])["model"]["adapters"] == ["one"]
    adapted.off()
    keep("off")
    with pytest.raises(MemoryFileError, match="the adapters that act are one in the file and none in the model"):
        InfiniCache.from_pretrained(files["one"], adapted.model)
    adapted.on()
    assert taken(files["one"], adapted.model)
    adapted.activate("two")
    keep("two")
    with pytest.raises(MemoryFileError, match="the adapters that act are one in the file and two in the model"):
        InfiniCache.from_pretrained(files["one"], adapted.model)
    adapted.activate("one")
    adapted.layers()[0].scale_layer(0.5)
    keep("scaled")
    with pytest.raises(MemoryFileError, match="the weights, or how adapters are set, are not the same"):
        InfiniCache.from_pretrained(files["one"], adapted.model)
    adapted.layers()[0].unscale_layer(0.5)
    assert taken(files["one"], adapted.model)
    for layer in adapted.layers():
        layer.merge()
    keep("merged")
    for layer in adapted.layers()[:1]:
        layer.lora_A["one"].weight.data.add_(1.0)
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
