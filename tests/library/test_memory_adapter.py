"""What a memory has learned, saved apart from the model, with PEFT's adapter beside it, and put on
the plain model again."""

import json
import shutil
import warnings

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load, load_file, save_file

from decoders import decoder
from hf_infini import load_adapter, patch_model, save_adapter
from hf_infini.layers.memory_layer import memory_layers
from hf_infini.models.adapter import LORA, LORA_WEIGHTS, RECORD, WEIGHTS, restore_adapter
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


def refused(model, folder, message):
    """`load_adapter` refuses it with such a message, and the model stays as it was."""
    before, weights = (
        state_of(model),
        {name: tensor.clone() for name, tensor in model.state_dict().items()},
    )
    with pytest.raises(ValueError, match=message):
        load_adapter(model, folder)
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


def json_with(file, **values):
    """Changes a file with one object; `None` takes a value out."""

    def change(folder):
        record = json.loads((folder / file).read_text()) | values
        kept = {name: value for name, value in record.items() if value is not None}
        (folder / file).write_text(json.dumps(kept))

    return change


def without(file):
    return lambda folder: (folder / file).unlink()


def tensors_with(file, change):
    """Changes the tensors of a file, by `change(tensors, first name)`."""

    def changed(folder):
        tensors = load((folder / file).read_bytes())
        change(tensors, min(tensors))
        save_file(tensors, folder / file, metadata={"format": "pt"})

    return changed


def pickled(folder):
    torch.save(load((folder / LORA_WEIGHTS).read_bytes()), folder / LORA_WEIGHTS)


RECORDS = {
    "record: missing": (without(RECORD), RECORD),
    "record: half a model": (json_with(RECORD, model={"model_type": "llama"}), "layers"),
    "record: unknown option": (
        json_with(RECORD, options={"segment_length": 8, "segments": 2}),
        "unknown options segments",
    ),
    "record: another score": (
        json_with(RECORD, options=OPTIONS | {"keep_score": "attention"}),
        "must be None",
    ),
    "lora: no file": (without(LORA_WEIGHTS), LORA_WEIGHTS),
    "lora: pickle": (pickled, "Error while deserializing header"),
    "lora: other rank": (json_with(LORA, r=3), r"is \[2, 32\] and must be \[3, 32\]"),
    "lora: unknown type": (json_with(LORA, peft_type="MORA"), "MORA"),
    "lora: fewer targets": (
        json_with(LORA, target_modules=["q_proj"]),
        r"v_proj.lora_A.weight is .* and must be None",
    ),
}
OF_FILES = {
    "missing tensor": (lambda tensors, name: tensors.pop(name), "is None and must be"),
    "one more": (
        lambda tensors, name: tensors.update(more=torch.ones(2)),
        r"more is \[2\] and must be None",
    ),
    "another shape": (
        lambda tensors, name: tensors.update({name: torch.ones(2, 2, 2)}),
        r"is \[2, 2, 2\] and must be",
    ),
}
DAMAGES = RECORDS | {
    f"{file}: {kind}": (tensors_with(file, change), message)
    for file in (WEIGHTS, LORA_WEIGHTS)
    for kind, (change, message) in OF_FILES.items()
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_files_are_refused(damage, saved, tmp_path):
    change, message = DAMAGES[damage]
    shutil.copytree(saved, tmp_path / "adapter")
    change(tmp_path / "adapter")
    with pytest.raises(Exception, match=message):  # also PEFT's and safetensors' own
        load_adapter(MAKERS["llama"]().eval(), tmp_path / "adapter")


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
