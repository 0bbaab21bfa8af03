"""accelerate and FSDP with families: the layers that stay in one piece, weights on disk, layers on
several devices."""

import contextlib

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.trainer_pt_utils import get_module_class_from_name

from decoders import decoder, token_ids
from hf_infini import patch_model, unpatch_model
from hf_infini.models.structure import decoder_of

accelerate = pytest.importorskip("accelerate", reason="pip install accelerate")

WINDOW = {
    "segment_length": 8,
    "local_segments": 1,
    "sink_tokens": 2,
    "kept_tokens": 6,
    "keep_score": "half",
}
QUICK = ("gpt2", "gemma2", "smollm3")


def layers_of(model) -> torch.nn.ModuleList:
    return next(
        child for child in decoder_of(model).children() if isinstance(child, torch.nn.ModuleList)
    )


def names_of_layers(model) -> list[str]:
    layers = layers_of(model)
    return [
        name for name, module in model.named_modules() if any(module is layer for layer in layers)
    ]


def device_map(model, layer) -> dict[str, str]:
    """Everything on disk but the layers, of which `layer(number)` says where each is."""
    places = {name: layer(number) for number, name in enumerate(names_of_layers(model))}
    for name, module in model.named_modules():
        if next(module.parameters(recurse=False), None) is not None and not any(
            name.startswith(p + ".") for p in places
        ):
            places[name] = "disk"
    return places


@pytest.mark.parametrize("model_type", [*QUICK, "qwen3_moe"])
def test_layers_are_kept_in_one_piece_as_in_the_plain_model(model_type):
    own, model = decoder(model_type), patch_model(decoder(model_type), **WINDOW, layers=[1])
    assert own._no_split_modules and model._no_split_modules == own._no_split_modules
    for name in own._no_split_modules:
        found, plain = (get_module_class_from_name(each, name) for each in (model, own))
        assert found is plain or (
            issubclass(found, plain) and all(isinstance(layer, found) for layer in layers_of(model))
        )


@pytest.mark.parametrize("model_type", ["gpt2", "qwen3_moe"])
def test_weights_may_be_on_disk_until_they_are_needed(model_type, tmp_path):
    own, ids = decoder(model_type), token_ids(2, 40)
    own.save_pretrained(tmp_path / "plain")
    model = patch_model(own, **WINDOW)
    model.save_pretrained(tmp_path / "model")
    options = {
        "attention_mask": torch.ones_like(ids),
        "max_new_tokens": 5,
        "do_sample": False,
        "eos_token_id": None,
    }
    with torch.no_grad():
        wanted, texts = model(ids).logits, model.generate(ids, **options)
    maps = (
        ("auto", {"max_memory": {"cpu": "60KB"}}),
        (device_map(model, lambda number: "disk"), {}),
        (device_map(model, lambda number: ("disk", "cpu")[number % 2]), {}),
        ({"": "cpu"}, {}),
    )
    for places, sizes in maps:
        loaded = AutoModelForCausalLM.from_pretrained(
            tmp_path / "model", device_map=places, offload_folder=tmp_path / "disk", **sizes
        )
        kept = any(parameter.is_meta for parameter in loaded.parameters())
        assert kept == (places != {"": "cpu"})
        with torch.no_grad():
            assert torch.equal(loaded(ids).logits, wanted)
        assert torch.equal(loaded.generate(ids, **options), texts)
    plain = {"device_map": maps[1][0], "offload_folder": tmp_path / "own"}
    patched = patch_model(
        AutoModelForCausalLM.from_pretrained(tmp_path / "plain", **plain), **WINDOW
    )
    with torch.no_grad():
        assert torch.equal(patched(ids).logits, wanted)
        assert torch.equal(unpatch_model(patched)(ids).logits, unpatch_model(model)(ids).logits)


@pytest.mark.parametrize("model_type", [*QUICK, "stablelm"])
def test_layers_may_be_on_several_devices(model_type, monkeypatch):
    """The second half of them is on "meta", whose operations refuse tensors of other devices, as a
    second GPU's do."""
    # "meta" has none
    monkeypatch.setattr(torch, "autocast", lambda *args, **kwargs: contextlib.nullcontext())
    model, ids = patch_model(decoder(model_type), **WINDOW), token_ids(2, 40)
    base, layers = decoder_of(model), layers_of(model)
    after = [child for name, child in base.named_children() if "norm" in name or name == "ln_f"]
    after += [child for child in model.children() if child is not base]
    for module in (*layers, *base.children(), *model.children()):
        if module is not base and module is not layers:
            device = "meta" if any(module is each for each in (*layers[2:], *after)) else "cpu"
            hook = accelerate.hooks.AlignDevicesHook(
                device, skip_keys=model._skip_keys_device_placement
            )
            accelerate.hooks.add_hook_to_module(module.to(device), hook)
    with torch.no_grad():
        output = model(ids, use_cache=True)
        cache = output.past_key_values
        for more in (1, 20):
            output = model(ids[:, :more], past_key_values=cache)
            assert output.logits.is_meta
    for layer, device in ((0, "cpu"), (3, "meta")):
        tensors = cache.tensors().items()
        assert {
            tensor.device.type for name, tensor in tensors if name.startswith(f"layers.{layer}.")
        } == {device}
