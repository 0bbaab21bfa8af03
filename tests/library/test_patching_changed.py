"""Models that were changed before they are patched: what cannot be saved is refused, the rest acts."""

import copy
import types

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_submodules
from torch import nn

from decoders import decoder, token_ids
from hf_infini import AutoInfiniModelForCausalLM, patch_model
from hf_infini.models.structure import attention_layers, decoder_of
from models import FLOAT32, gpt2

MAKERS = (gpt2, lambda: decoder("llama"))


def layers_of(model):
    return next(part for part in decoder_of(model).children() if isinstance(part, nn.ModuleList))


def set_attention(model, number: int, attention) -> None:
    layer = layers_of(model)[number]
    name = next(name for name, part in layer.named_children() if type(part).__name__.endswith("Attention"))
    setattr(layer, name, attention)


def attention_of(model, number=0):
    return attention_layers(decoder_of(model))[number]


def with_own_forward(module) -> None:
    forward = module.forward
    module.forward = lambda *args, **kwargs: forward(*args, **kwargs)


def share_attention(model):
    set_attention(model, 1, attention_of(model, 0))


def copy_a_layer(model):
    layers_of(model)[1] = copy.deepcopy(layers_of(model)[0])


def swap_layers(model):
    layers = layers_of(model)
    layers[0], layers[1] = layers[1], layers[0]


def replace_forward(model):
    attention = attention_of(model)
    attention.forward = types.MethodType(lambda self, *args, **kwargs: type(self).forward(self, *args, **kwargs), attention)


def wrap_attention(model):
    class WrappedAttention(nn.Module):
        def __init__(self, own):
            super().__init__()
            self.own = own

        def forward(self, *args, **kwargs):
            return self.own(*args, **kwargs)

    set_attention(model, 0, WrappedAttention(attention_of(model)))


def derive(module) -> None:
    module.__class__ = type(f"My{type(module).__name__}", (type(module),), {})


def see_what_follows(model):
    model.config.is_causal = False


REFUSED = [
    (share_attention, "a class or forward of its own, or another layer's layer_idx. Give each layer its own"),
    (swap_layers, "of layer 0 has"),
    (replace_forward, r"the \w+Attention of layer 0 has a class or forward of its own"),
    (wrap_attention, "the WrappedAttention of layer 0"),
    (lambda model: derive(attention_of(model)), r"the My\w+Attention of layer 0"),
    (see_what_follows, "with is_causal=False or use_bidirectional_attention tokens see what comes after"),
]


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_what_would_be_lost_is_refused_and_left_alone(number):
    change, reason = REFUSED[number]
    model, ids = MAKERS[number % 2](), token_ids(2, 40) % 89
    change(model)
    config, before = model.config, {name: (type(part), set(vars(part))) for name, part in model.named_modules()}
    wanted = model(ids, use_cache=False).logits
    with pytest.raises(ValueError, match=reason):
        patch_model(model, segment_length=8)
    assert {name: (type(part), set(vars(part))) for name, part in model.named_modules()} == before
    assert model.config is config and torch.equal(model(ids, use_cache=False).logits, wanted)


def hooks_that_were_removed(model):
    for part in model.modules():
        add_hook_to_module(part, AlignDevicesHook(execution_device="cpu"))
    remove_hook_from_submodules(model)  # leaves each forward on its module


def number_a_copied_layer(model):
    copy_a_layer(model)
    attention_of(model, 1).layer_idx = 1


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
    with pytest.raises(ValueError, match=r"layer 0, .* are \(2, 1, 8\), and its configuration says \(4, 2, 8\)"):
        patch_model(model, segment_length=8)
    assert model.config is config and torch.equal(model(ids).logits, wanted)


@pytest.mark.parametrize("model_type", ["gemma", "gemma2", "gemma3_text"])
def test_attention_in_both_directions_is_refused_in_a_checkpoint(model_type, tmp_path):
    decoder(model_type, use_bidirectional_attention=True).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="use_bidirectional_attention tokens see what comes after them"):
        AutoInfiniModelForCausalLM.from_pretrained(tmp_path, segment_length=8)


def test_a_family_that_fails_otherwise_is_as_it_was(monkeypatch):
    """What is not known to work may raise anything where it is called otherwise than by its model."""
    model, ids = decoder("llama"), token_ids(1, 20)
    config, wanted = model.config, model(ids).logits
    monkeypatch.setattr(type(attention_of(model).o_proj), "forward", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        patch_model(model, segment_length=8)
    monkeypatch.undo()
    assert model.config is config and torch.equal(model(ids).logits, wanted)
