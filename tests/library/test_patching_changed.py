"""Models that were changed before they are patched: what cannot be saved is refused, the rest
acts."""

import copy

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_submodules
from torch import nn
from transformers import GPT2LMHeadModel

from decoders import decoder, token_ids
from hf_infini import InfiniGemma2ForCausalLM, patch_model, unpatch_model
from hf_infini.models.structure import attention_layers, decoder_of
from models import FLOAT32, gpt2

MAKERS = (gpt2, lambda: decoder("llama"))


def layers_of(model):
    return next(part for part in decoder_of(model).children() if isinstance(part, nn.ModuleList))


def attention_of(model, number=0):
    return attention_layers(decoder_of(model))[number]


def with_own_forward(module) -> None:
    forward = module.forward
    module.forward = lambda *args, **kwargs: forward(*args, **kwargs)


def copy_a_layer(model):
    layers_of(model)[1] = copy.deepcopy(layers_of(model)[0])


def test_attention_that_sees_what_follows_is_refused():
    model = gpt2(is_causal=False)
    with pytest.raises(
        ValueError,
        match="with is_causal=False or use_bidirectional_attention tokens see what comes after",
    ):
        patch_model(model, segment_length=8)
    assert type(model) is GPT2LMHeadModel


def share_an_attention(model):
    shared = attention_of(model)
    name = next(name for name, part in layers_of(model)[0].named_children() if part is shared)
    setattr(layers_of(model)[1], name, shared)


def hooked(change):
    def both(model):
        change(model)
        for part in model.modules():
            add_hook_to_module(part, AlignDevicesHook(execution_device="cpu"))

    return both


REPLACED = {
    "attention": lambda model: with_own_forward(attention_of(model)),
    "layer": lambda model: with_own_forward(layers_of(model)[1]),
    "base model": lambda model: with_own_forward(decoder_of(model)),
}
REPLACED |= {f"{name} in a hook": hooked(change) for name, change in REPLACED.items()}


def swap_two_layers(model):
    layers = layers_of(model)
    layers[0], layers[1] = layers[1], layers[0]


SAID = {share_an_attention: "share one attention module"}
SAID |= dict.fromkeys((copy_a_layer, swap_two_layers), "have the numbers .* its place in the list")
SAID |= dict.fromkeys(REPLACED.values(), "was replaced")


@pytest.mark.parametrize("make", MAKERS, ids=["gpt2", "llama"])
@pytest.mark.parametrize("change", SAID)
def test_what_would_not_reach_a_memory_is_refused_before_anything_changes(make, change):
    model, ids = make(), token_ids(2, 40) % 89
    change(model)
    config, wanted = model.config, model(ids, use_cache=False).logits
    with pytest.raises(ValueError, match=SAID[change]):
        patch_model(model, segment_length=8)
    assert model.config is config and torch.equal(model(ids, use_cache=False).logits, wanted)


@pytest.mark.parametrize("make", MAKERS, ids=["gpt2", "llama"])
def test_a_base_model_inside_of_another_is_refused_and_one_of_its_own_taken(make):
    model, ids = make(), token_ids(2, 40) % 89
    base, wanted = decoder_of(model), model(ids).logits
    with pytest.raises(ValueError, match=f"is part of a {type(model).__name__}.*: patch the"):
        patch_model(base, segment_length=8)
    assert torch.equal(model(ids).logits, wanted)
    holder = nn.ModuleList([base])  # of a user, which saves what it holds
    model.itself = [model]  # a cycle, which only the collector takes apart
    del model
    assert patch_model(base, segment_length=8) is holder[0] and unpatch_model(base) is base


def hooks_that_were_removed(model):
    for part in model.modules():
        add_hook_to_module(part, AlignDevicesHook(execution_device="cpu"))
    remove_hook_from_submodules(model)  # leaves each forward on its module


def number_a_copied_layer(model):
    copy_a_layer(model)
    for part in layers_of(model)[1].modules():
        if hasattr(part, "layer_idx"):
            part.layer_idx = 1


@pytest.mark.parametrize("make", MAKERS, ids=["gpt2", "llama"])
@pytest.mark.parametrize(
    "change",
    [hooks_that_were_removed, number_a_copied_layer, with_own_forward]
    + [lambda model: setattr(attention_of(model), "scaling", 0.7)],
)
def test_other_changes_act_as_they_did(make, change):
    model, ids = make(), token_ids(2, 40) % 89
    change(model)
    wanted = model(ids, use_cache=False).logits
    found = patch_model(model, segment_length=64)(ids, use_cache=False).logits
    torch.testing.assert_close(found, wanted, rtol=FLOAT32, atol=FLOAT32)


def test_heads_that_were_cut_off_are_counted():
    model, ids = decoder("llama"), token_ids(2, 40)
    attention = attention_of(model)
    for name, heads in (("q_proj", 2), ("k_proj", 1), ("v_proj", 1)):
        projection = getattr(attention, name)
        projection.weight = nn.Parameter(projection.weight[: heads * 8].clone())
    attention.o_proj.weight = nn.Parameter(attention.o_proj.weight[:, :16].clone())
    config, wanted = model.config, model(ids).logits
    with pytest.raises(
        ValueError, match=r"layer 0, .* are \(2, 1, 8\), and its configuration says \(4, 2, 8\)"
    ):
        patch_model(model, segment_length=8)
    assert model.config is config and torch.equal(model(ids).logits, wanted)


def test_attention_in_both_directions_is_refused_in_a_checkpoint(tmp_path):
    decoder("gemma2", use_bidirectional_attention=True).save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match="use_bidirectional_attention tokens see what comes after them"
    ):
        InfiniGemma2ForCausalLM.from_pretrained(tmp_path, segment_length=8)


def test_a_family_that_fails_otherwise_is_as_it_was(monkeypatch):
    """What is not known to work may raise anything where it is called otherwise than by its
    model."""
    model, ids = decoder("llama"), token_ids(1, 20)
    config, wanted = model.config, model(ids).logits
    monkeypatch.setattr(type(attention_of(model).o_proj), "forward", lambda *_: 1 / 0)
    with pytest.raises(ValueError, match="forward fails .*: ZeroDivisionError") as refusal:
        patch_model(model, segment_length=8)
    assert isinstance(refusal.value.__cause__, ZeroDivisionError)
    monkeypatch.undo()
    assert model.config is config and torch.equal(model(ids).logits, wanted)
