"""A change of a model is whole or none: interrupted anywhere, each leaves the model as it was, and
succeeds when it is asked for again."""

import json
import shutil
import sys
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import PreTrainedConfig

import hf_infini
from decoders import decoder, token_ids
from hf_infini import fit_keep_score, load_adapter, patch_model, save_adapter, unpatch_model
from hf_infini.layers.memory_layer import InfiniAttentionMixin
from hf_infini.models.adapter import LORA_WEIGHTS, RECORD, WEIGHTS
from models import gpt2

ROOT = str(Path(hf_infini.__file__).parent)
OPTIONS = {"segment_length": 8, "sink_tokens": 2, "kept_tokens": 6, "keep_score": "half"}
ROPE = OPTIONS | {"position_encoding": "rope"}
IDS, ROWS = token_ids(2, 40) % 89, [token_ids(1, 60)[0].tolist()]
SMALL = {"num_hidden_layers": 2}


def hooked(model):
    for part in model.modules():
        add_hook_to_module(part, AlignDevicesHook(execution_device="cpu"))
    return model


def with_lora(model):
    torch.manual_seed(0)
    return get_peft_model(model, LoraConfig(target_modules=["q_proj"], init_lora_weights=False))


def llama(**options):
    return decoder("llama", **SMALL | options)


def in_16_bits():
    return llama().to(torch.bfloat16)


def adapted(model):
    return load_adapter(model, adapted.folder)


def fitted(model):
    return fit_keep_score(model, ROWS, distance=12, progress=False)


# What each takes, and what it does to that
CHANGES = {
    "patch llama": (llama, lambda model: patch_model(model, **OPTIONS)),
    "patch in 16 bits": (in_16_bits, lambda model: patch_model(model, **OPTIONS)),
    "patch gpt2": (lambda: gpt2(n_layer=2), lambda model: patch_model(model, **ROPE)),
    "patch qwen2": (
        lambda: decoder("qwen2", **SMALL).train(),
        lambda model: patch_model(model, **OPTIONS),
    ),
    "patch stablelm": (
        lambda: decoder("stablelm", **SMALL),
        lambda model: patch_model(model, **OPTIONS),
    ),
    "patch hooked": (lambda: hooked(llama()), lambda model: patch_model(model, **OPTIONS)),
    "patch with lora": (
        lambda: with_lora(llama()).base_model.model,
        lambda model: patch_model(model, **OPTIONS),
    ),
    "unpatch llama": (lambda: patch_model(llama(), **OPTIONS), unpatch_model),
    "unpatch gpt2": (
        lambda: patch_model(gpt2(n_layer=2), **ROPE).to(torch.bfloat16),
        unpatch_model,
    ),
    "unpatch hooked": (lambda: patch_model(hooked(llama()), **OPTIONS), unpatch_model),
    "load": (llama, adapted),
    "load hooked": (lambda: hooked(llama()), adapted),
    "fit": (lambda: patch_model(llama(), **OPTIONS), fitted),
    "fit with lora": (lambda: with_lora(patch_model(llama(), **OPTIONS)).train(), fitted),
}


@pytest.fixture(scope="module", autouse=True)
def adapter(tmp_path_factory):
    """One with a LoRA."""
    adapted.folder = tmp_path_factory.mktemp("adapter")
    model = patch_model(llama(), **OPTIONS)
    fitted(model)
    save_adapter(with_lora(model), adapted.folder)


def contents(value):
    """Containers and configurations by what is in them, everything else by itself."""
    if isinstance(value, PreTrainedConfig):
        return type(value), value.to_dict(), {**vars(value)}.keys()
    if isinstance(value, (dict, OrderedDict)):
        return type(value), [(key, contents(part)) for key, part in value.items()]
    if isinstance(value, (list, set)):
        return type(value), [*map(contents, value)]
    return id(value)


def bits(tensor):
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).tolist()


def print_of(model):
    """All that there is of a model: what its modules are and hold, and each bit of its tensors."""
    found = {
        name: (type(module), id(module), contents(vars(module)))
        for name, module in model.named_modules()
    }
    tensors = {
        name: (id(tensor), tensor.data_ptr(), tensor.dtype, tensor.requires_grad, bits(tensor))
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]
    }
    aside = vars(model).get("_unpatched_embedding")
    return found, tensors, None if aside is None else (aside.weight.dtype, bits(aside.weight))


def outputs(model):
    with torch.no_grad():
        return model(IDS).logits


class Interrupted(KeyboardInterrupt):
    """What a user's Ctrl-C is here."""


def run(change, model, after: int | None = None) -> int:
    """Runs a change, interrupted before line `after` of the library's, and counts its lines."""
    lines = 0

    def trace(frame, event, _):
        nonlocal lines
        if not frame.f_code.co_filename.startswith(ROOT):
            return None
        lines += event == "line"
        if lines == after and event == "line":
            sys.settrace(None)
            raise Interrupted
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        change(model)
    finally:
        sys.settrace(before)
    return lines


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANGES)
def test_after_ctrl_c_in_any_line_the_model_is_as_it_was(name):
    make, change = CHANGES[name]
    change(make())  # imports, and classes that are made once for a process
    model, twin = make(), make()
    expected, before = outputs(model), print_of(model)
    outputs(twin)  # what is said once for a model was said
    lines = run(change, twin)
    assert lines > 50
    for after in sorted({1 + number * (lines - 1) // 59 for number in range(60)}):
        with pytest.raises(Interrupted):
            run(change, model, after)
        assert print_of(model) == before, f"line {after} of {lines}"
    assert torch.equal(outputs(model), expected)
    changed, whole = change(model) or model, make()
    assert torch.equal(outputs(changed), outputs(change(whole) or whole))


BAD = {
    "unknown option": lambda model: patch_model(model, **OPTIONS, kept_toknes=5),
    "another type": lambda model: patch_model(model, **OPTIONS | {"kept_tokens": "5"}),
    "beyond a limit": lambda model: patch_model(model, segment_length=0),
    "not together": lambda model: patch_model(model, segment_length=8, keep_score="half"),
    "no layer": lambda model: patch_model(model, **OPTIONS, layers=[7]),
    "no adapter": lambda model: load_adapter(model, adapted.folder / "nowhere"),
    "another score": lambda model: load_adapter(model, adapted.folder, keep_score="attention"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_refused_changes_nothing(name):
    model = llama()
    before = print_of(model)
    with pytest.raises((ValueError, OSError)):
        BAD[name](model)
    assert print_of(model) == before


def a_share(data, name):
    """Another layer's share of the places than there are layers."""
    record = json.loads((data / RECORD).read_text())
    record["options"]["kept_shares"] = [1.0]
    (data / RECORD).write_text(json.dumps(record))


def a_tensor(data, name):
    """One of another shape in the memory's or in the LoRA's file."""
    tensors = load_file(data / name)
    last = max(tensors)
    save_file(tensors | {last: torch.ones(3, 3)}, data / name, metadata={"format": "pt"})


@pytest.mark.parametrize("name", [RECORD, WEIGHTS, LORA_WEIGHTS])
def test_a_damaged_adapter_changes_nothing_and_the_whole_one_goes_on_then(name, tmp_path):
    data = shutil.copytree(adapted.folder, tmp_path / "adapter")
    (a_share if name == RECORD else a_tensor)(data, name)
    model = llama()
    before, expected = print_of(model), outputs(adapted(llama()))
    with pytest.raises(ValueError):
        load_adapter(model, data)
    assert print_of(model) == before
    assert torch.equal(outputs(adapted(model)), expected)


def test_a_step_in_which_nothing_is_patched_yet_says_its_cause(monkeypatch):
    """A layer fails before it has options."""
    model = llama()
    before = print_of(model)
    swap = InfiniAttentionMixin.swap_in
    monkeypatch.setattr(InfiniAttentionMixin, "swap_in", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        patch_model(model, **OPTIONS)
    assert print_of(model) == before
    monkeypatch.setattr(InfiniAttentionMixin, "swap_in", swap)
    patch_model(model, **OPTIONS)
    patched = print_of(model)
    monkeypatch.setattr(InfiniAttentionMixin, "swap_out", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        unpatch_model(model)
    assert print_of(model) == patched
