"""What a memory has learned, saved apart from the model, with PEFT's adapter beside it, and put on
the plain model again."""

import json
import os
import shutil
import warnings

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file

from decoders import decoder
from hf_infini import load_adapter, lora_config, patch_model, save_adapter
from hf_infini.layers.memory_layer import memory_layers
from hf_infini.models.adapter import (
    LORA,
    LORA_WEIGHTS,
    RECORD,
    WEIGHTS,
    read_record,
    restore_adapter,
)
from hf_infini.models.description import describe
from models import gpt2, token_ids

IDS = token_ids(2, 50)
OPTIONS = {"segment_length": 8, "local_segments": 1, "sink_tokens": 2, "memory_conv": 2}
OPTIONS |= {"kept_tokens": 4, "keep_score": "half"}
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
    other = get_peft_model(
        patch_model(MAKERS["llama"]().eval(), **OPTIONS), LoraConfig(r=3, target_modules=["q_proj"])
    )
    with pytest.raises(
        ValueError, match=r"q_proj.lora_A.weight is \[8, 32\] and must be \[3, 32\]"
    ):
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
    wide, narrow = (load_file(tmp_path / name / WEIGHTS) for name in ("wide", "narrow"))
    assert all(2 * narrow[name].nbytes == tensor.nbytes for name, tensor in wide.items())
    found = load_adapter(MAKERS["llama"]().to(torch.bfloat16), tmp_path / "narrow")
    assert all(parameter.dtype == torch.bfloat16 for parameter in found.parameters())


def other_weights():
    model = decoder("llama")
    model.get_input_embeddings().weight.data.add_(0.1)
    return model


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """An adapter with a LoRA."""
    folder = tmp_path_factory.mktemp("saved")
    lora = LoraConfig(
        task_type="CAUSAL_LM", r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False
    )
    save_adapter(get_peft_model(trained(MAKERS["llama"]), lora), folder)
    return folder


def state_of(model):
    """All that may be seen of a model from outside."""
    return {
        "modules": {name: type(module) for name, module in model.named_modules()},
        "attributes": {name: sorted(vars(module)) for name, module in model.named_modules()},
        "trained": {name: parameter.requires_grad for name, parameter in model.named_parameters()},
        "hooks": [len(module._forward_hooks) for module in model.modules()],
        "config": (type(model.config), model.config.to_dict()),
    }


def refused(model, folder, message, **options):
    """`load_adapter` refuses it with such a message, and the model stays as it was."""
    before, weights = (
        state_of(model),
        {name: tensor.clone() for name, tensor in model.state_dict().items()},
    )
    with pytest.raises(ValueError, match=message):
        load_adapter(model, folder, **options)
    assert state_of(model) == before
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (gpt2, "was trained with another model: model_type is 'gpt2', not 'llama'"),
        (lambda: decoder("llama", num_hidden_layers=2), "layers is 2, not 4"),
        (other_weights, "was trained with another model: its weights are others"),
        (lambda: patch_model(MAKERS["llama"](), segment_length=8), "has Infini-attention already"),
        (lambda: torch.nn.Linear(2, 2), "is put on a plain model of transformers; got a Linear"),
        (lambda: get_peft_model(MAKERS["llama"](), LoraConfig()), "got a PeftModel"),
    ],
)
def test_another_model_is_refused(make, message, saved):
    model = make()
    if hasattr(model, "state_dict") and hasattr(model, "config"):
        refused(model, saved, message)
    else:
        with pytest.raises(ValueError, match=message):
            load_adapter(model, saved)


def rounded(model, steps: int):
    """The model with weights of so many steps for each block of 32 numbers, as 4-bit files have
    15."""
    for parameter in model.parameters():
        if parameter.numel() % 32 == 0:
            blocks = parameter.data.view(-1, 32)
            low, high = blocks.amin(1, keepdim=True), blocks.amax(1, keepdim=True)
            step = ((high - low) / steps).clamp(min=1e-12)
            parameter.data = ((blocks - low) / step).round().mul(step).add(low).view_as(parameter)
    return model


def test_a_quantized_twin_takes_it_with_a_warning(saved, tmp_path):
    with pytest.warns(UserWarning, match=r"the weights differ a little .* \([1-9]% of the signs"):
        found = load_adapter(rounded(MAKERS["llama"](), 15), saved)
    assert memory_layers(found)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        load_adapter(MAKERS["llama"](), saved)


def test_quantized_layers_are_known_as_well(saved):
    """Of a model with an embedding that stays as it is."""
    model = rounded(MAKERS["llama"](), 15)
    model.get_input_embeddings().weight.data = MAKERS["llama"]().get_input_embeddings().weight.data
    with pytest.warns(UserWarning, match=r"the weights differ a little .* \([1-9]% of the signs"):
        load_adapter(model, saved)


def with_layers(model, change):
    for number, layer in enumerate(model.model.layers):
        for name, parameter in layer.named_parameters():
            if parameter.dim() > 1 and change(number, name):
                torch.nn.init.normal_(
                    parameter, std=0.2, generator=torch.Generator().manual_seed(9)
                )
    return model


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda number, name: True, "layer 0, "),
        (lambda number, name: number == 2, "layer 2"),
        (lambda number, name: "down_proj" in name, "mlp.down_proj.weight of all layers"),
    ],
    ids=["all", "one layer", "one kind"],
)
def test_a_model_with_the_same_embedding_and_other_layers_is_another(change, named, saved):
    model = with_layers(MAKERS["llama"](), change)
    refused(model, saved, f"another model: its weights are others, those of .*{named}")


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_model_is_described_as_the_plain_one_whatever_is_in_it(make):
    wanted = describe(make())
    model = trained(make)
    assert describe(model) == wanted == describe(make().to(torch.bfloat16))
    targets = ["c_attn"] if make is gpt2 else ["q_proj", "down_proj"]
    lora = LoraConfig(target_modules=targets, init_lora_weights=False, modules_to_save=["gate"])
    assert describe(get_peft_model(model, lora)) == wanted
    assert len(wanted["layer_signs"]) >= 4 and "-" not in "".join(wanted["layer_signs"].values())


def test_a_model_without_weights_cannot_be_described():
    with torch.device("meta"), pytest.raises(ValueError, match="is on the meta device"):
        describe(MAKERS["llama"]())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"kept_token": 5},
            r"unknown options kept_token \(did you mean kept_tokens\?\); load_adap",
        ),
        ({"revison": "main"}, r"revison \(did you mean revision\?\); .* on the Hub cache_dir, "),
        ({"keep_score": "attention"}, "only 'learned' and 'half' share scores"),
        ({"keep_score": "norm"}, "keep_score"),
        ({"kept_tokens": -3}, "kept_tokens must be at least 0"),
        ({"kept_tokens": 0}, "says which tokens are kept: give kept_tokens"),
    ],
    ids=str,
)
def test_options_that_do_not_go_are_refused_before_anything_changes(given, message, saved):
    refused(MAKERS["llama"](), saved, message, **given)


@pytest.mark.parametrize("place", ["nowhere", "a/b", "a/b/c", "no folder\nof this name"])
def test_a_place_without_an_adapter_is_named_in_one_line(place, tmp_path):
    for path in (place, tmp_path / place):
        for action in (read_record, lambda at: load_adapter(MAKERS["llama"](), at)):
            with pytest.raises(OSError, match=f"there is no folder .*; cannot read {RECORD}") as at:
                action(path)
            assert "\n" not in str(at.value)
    (tmp_path / RECORD).write_text("[]")
    with pytest.raises(ValueError, match="it must hold an object, and holds a list"):
        read_record(tmp_path)


# --- saving
# --------------------------------------------------------------------------------------------------


def test_a_record_names_every_file_beside_it(saved):
    record = read_record(saved)
    assert {*record["files"]} == {WEIGHTS, LORA, LORA_WEIGHTS}
    # laid out otherwise, as a tool may do it, it is the same
    assert json.loads((saved / RECORD).read_text()) == record


@pytest.mark.parametrize("old", [True, False], ids=["earlier version", "this version"])
@pytest.mark.parametrize("done", [0, 1, 2])
def test_a_kill_leaves_no_mixture(done, old, saved, tmp_path, monkeypatch):
    """Of the new adapter so many files have got their names."""
    shutil.copytree(saved, tmp_path / "adapter")
    if old:
        record = json.loads((saved / RECORD).read_text())
        del record["files"], record["sha256"], record["model"]["layer_signs"]
        (tmp_path / "adapter" / RECORD).write_text(json.dumps(record))
    model = load_adapter(MAKERS["llama"](), saved)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * parameter.requires_grad
        for layer in memory_layers(model).values():
            layer.keep_weight += 1.0
    calls, replace = [], os.replace

    def killed(*paths):
        calls.append(paths)
        if len(calls) > done:
            raise KeyboardInterrupt
        replace(*paths)

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        save_adapter(model, tmp_path / "adapter")
    assert len(calls) == done + 1
    assert not [*(tmp_path / "adapter").glob("*.part")]
    with pytest.raises((ValueError, OSError), match=RECORD):
        load_adapter(MAKERS["llama"](), tmp_path / "adapter")
    monkeypatch.undo()
    save_adapter(model, tmp_path / "adapter")
    found = load_adapter(MAKERS["llama"](), tmp_path / "adapter")
    assert torch.equal(logits(found), logits(model.eval()))


@pytest.mark.parametrize("by", ["PEFT", "transformers"])
def test_what_peft_or_transformers_save_has_the_right_checksums(by, tmp_path, monkeypatch):
    """PEFT writes weights first, and transformers the configuration first; a second time over the
    files of the first."""
    # some want what is not released
    monkeypatch.setattr("transformers.integrations.peft.MIN_PEFT_VERSION", "0.19")
    model = trained(MAKERS["llama"])
    if by == "PEFT":
        model = get_peft_model(model, lora_config(model))
    else:
        model.add_adapter(lora_config(model))
    for _ in range(2):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.1 * parameter.requires_grad
        model.save_pretrained(tmp_path)
        found = load_adapter(MAKERS["llama"](), tmp_path)
        assert torch.equal(logits(found), logits(model.eval()))
        assert {*read_record(tmp_path)["files"]} == {WEIGHTS, LORA, LORA_WEIGHTS}
    for name in (LORA_WEIGHTS, LORA):  # of another adapter
        content = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(content.replace(b"q_proj", b"k_proj"))
        refused(MAKERS["llama"](), tmp_path, f"{name} is damaged, or was not saved with")
        (tmp_path / name).write_bytes(content)


@pytest.mark.parametrize("lora", [False, True], ids=["alone", "with a LoRA"])
@pytest.mark.parametrize("case", ["unfitted", "nan", "overflow"])
def test_what_nobody_could_use_is_not_saved(case, lora, tmp_path):
    model = trained(MAKERS["llama"])
    layer = [*memory_layers(model).values()][1]
    dtype, message = None, "the adapter cannot be used: 1.gate.weight has numbers that are not fin"
    with torch.no_grad():
        if case == "unfitted":
            layer.keep_weight.zero_()
            message = (
                r"learned keep_score of layers 1 was not fitted.*: fit_keep_score\(model, rows"
            )
        if case == "nan":
            layer.gate.weight[1] = float("nan")
        if case == "overflow":
            layer.gate.weight[1], dtype = 1e5, torch.float16
    if lora:
        model = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(ValueError, match=message):
        save_adapter(model, tmp_path / "adapter", dtype)
    assert not (tmp_path / "adapter").exists()


def test_a_lora_that_is_not_finite_is_not_saved(tmp_path):
    model = get_peft_model(trained(MAKERS["llama"]), LoraConfig(target_modules=["q_proj"]))
    next(p for p in model.parameters() if p.requires_grad).data[0, 0] = float("inf")
    with pytest.raises(ValueError, match="the LoRA cannot be used: .*lora_A.weight has numbers"):
        save_adapter(model, tmp_path / "adapter")
    assert not (tmp_path / "adapter").exists()


def test_a_score_that_was_not_fitted_is_no_part_of_a_lora_config():
    model = patch_model(MAKERS["llama"](), **OPTIONS)
    with pytest.raises(ValueError, match="layers 0, 1, 2, 3 was not fitted"):
        lora_config(model)
    lora_config(patch_model(MAKERS["llama"](), **OPTIONS | {"keep_score": "attention"}))


@pytest.mark.parametrize("make", [MAKERS["llama"], lambda: torch.nn.Linear(2, 2)])
def test_only_a_model_with_a_memory_has_something_to_save(make, tmp_path):
    with pytest.raises(ValueError, match="a (LlamaForCausalLM|Linear) has no Infini-attention"):
        save_adapter(make(), tmp_path / "adapter")
    assert not (tmp_path / "adapter").exists()


def test_what_cannot_be_saved_leaves_the_folder_as_it_was(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "adapter")
    model = trained(MAKERS["llama"])
    with pytest.raises(ValueError, match="dtype must be one of floating point, .*; got torch.int8"):
        save_adapter(model, tmp_path / "adapter", torch.int8)
    with pytest.raises(ValueError, match="has an adapter of PEFT, and this model has none"):
        save_adapter(model, tmp_path / "adapter")  # which would be loaded with that LoRA
    assert all(
        (tmp_path / "adapter" / file.name).read_bytes() == file.read_bytes()
        for file in saved.iterdir()
    )
