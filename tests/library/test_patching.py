"""patch_model and unpatch_model: the same tensors, another attention, and nothing left behind."""

import pytest
import torch
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    GPT2Model,
)
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

from decoders import decoder
from hf_infini import (
    GPT2InfiniAttention,
    InfiniGPT2LMHeadModel,
    InfiniGPT2Model,
    patch_model,
    unpatch_model,
)
from hf_infini.layers.memory_layer import INTERFACE, infini_attention_function
from models import gpt2, infini_gpt2, token_ids

OPTIONS = {"segment_length": 8, "gate_init": 0.5}


def test_swaps_in_place_and_keeps_the_tensors():
    model = gpt2()
    config, modules = model.config.to_dict(), [block.attn for block in model.transformer.h]
    tensors = {name: tensor.data_ptr() for name, tensor in model.named_parameters()}
    optimiser = torch.optim.SGD(model.parameters(), lr=1.0)
    patched = patch_model(model, **OPTIONS)
    assert (
        patched is model
        and type(model) is InfiniGPT2LMHeadModel
        and type(model.transformer) is InfiniGPT2Model
    )
    assert all(type(block.attn) is GPT2InfiniAttention for block in model.transformer.h)
    assert issubclass(GPT2InfiniAttention, GPT2Attention)
    after = {name: tensor.data_ptr() for name, tensor in model.named_parameters()}
    assert {name: after[name] for name in tensors} == tensors
    assert set(after) - set(tensors) == {
        f"transformer.h.{layer}.attn.gate.weight" for layer in range(3)
    }
    known = {id(parameter) for group in optimiser.param_groups for parameter in group["params"]}
    assert all(
        id(p) in known for name, p in model.named_parameters() if not name.endswith("gate.weight")
    )
    assert (
        unpatch_model(model) is model
        and type(model) is GPT2LMHeadModel
        and type(model.transformer) is GPT2Model
    )
    assert {name: tensor.data_ptr() for name, tensor in model.named_parameters()} == tensors
    assert type(model.config) is GPT2Config and model.config.to_dict() == config
    for block, original in zip(model.transformer.h, modules, strict=True):
        assert (
            block.attn is original
            and type(original) is GPT2Attention
            and not hasattr(original, "gate")
        )
        assert block.attn.config is model.transformer.config is model.config
    patch_model(model, **OPTIONS)  # and again


@pytest.mark.parametrize("make", [gpt2, lambda: decoder("llama")], ids=["gpt2", "llama"])
def test_what_a_model_records_does_not_depend_on_other_models(make):
    """transformers looks it up by class, and knows the classes that were constructed in this
    process: here, none."""
    model, ids, known = make(), token_ids(2, 20), dict(_CAN_RECORD_REGISTRY)
    model.set_attn_implementation("eager")
    _CAN_RECORD_REGISTRY.clear()
    try:
        for change in (lambda: patch_model(model, **OPTIONS), lambda: unpatch_model(model)):
            change()
            output = model(ids, output_attentions=True, output_hidden_states=True)
            layers = model.config.num_hidden_layers
            assert len(output.attentions) == layers and len(output.hidden_states) == layers + 1
    finally:
        _CAN_RECORD_REGISTRY.clear()
        _CAN_RECORD_REGISTRY.update(known)


def test_what_was_changed_in_between_stays_changed(tmp_path):
    model = gpt2(architectures=["GPT2LMHeadModel"], my_note="mine")
    patch_model(model, **OPTIONS)
    assert model.config.architectures == ["InfiniGPT2LMHeadModel"]
    model.resize_token_embeddings(100)
    model.config.pad_token_id, model.config.id2label, model.config.my_note = (
        7,
        {0: "no", 1: "yes"},
        "changed",
    )
    model.set_attn_implementation("eager")
    config = unpatch_model(model).config
    assert (config.vocab_size, config.pad_token_id, config.my_note) == (100, 7, "changed")
    assert config.id2label == {0: "no", 1: "yes"}
    assert config.architectures == ["GPT2LMHeadModel"] and config._attn_implementation == "eager"
    model.save_pretrained(tmp_path)
    loaded, ids = (
        AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager"),
        token_ids(2, 40),
    )
    assert torch.equal(loaded(ids).logits, model(ids).logits)


def test_rope_sets_the_position_embedding_aside(tmp_path):
    model, ids = gpt2(), token_ids(2, 40)
    wanted, names = model(ids).logits, set(model.state_dict())
    patch_model(model, **OPTIONS, position_encoding="rope")
    assert names - set(model.state_dict()) == {"transformer.wpe.weight"}
    # more than the 64 positions that it had
    model(token_ids(1, 100), labels=token_ids(1, 100)).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    with pytest.raises(
        ValueError, match="built with position_encoding='rope': it has no position embedding"
    ):
        unpatch_model(loaded)
    assert isinstance(loaded, InfiniGPT2LMHeadModel)  # as it was
    unpatch_model(model.double())
    # of logits of size 10
    torch.testing.assert_close(model(ids).logits, wanted.double(), rtol=1e-4, atol=1e-4)
    assert set(model.state_dict()) == names and not any(
        "unpatched" in name for name in model.__dict__
    )


def test_a_base_model():
    model, ids = gpt2().transformer, token_ids(2, 40)
    wanted = model(ids).last_hidden_state
    assert type(patch_model(model, **OPTIONS)) is InfiniGPT2Model
    assert (model(ids).last_hidden_state - wanted).abs().max() > 0.01
    assert type(unpatch_model(model)) is GPT2Model and torch.equal(
        model(ids).last_hidden_state, wanted
    )


def test_other_models_that_hang_on_it_keep_their_configuration():
    sizes = dict(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=89,
    )
    model, ids = gpt2(), token_ids(2, 20)
    torch.manual_seed(1)
    model.reader, model.transformer.reader = (
        BertModel(BertConfig(**sizes)).eval(),
        BertModel(BertConfig(**sizes)).eval(),
    )
    model.teacher = GPT2LMHeadModel(model.config).eval()  # shares the configuration
    others = (model.reader, model.transformer.reader, model.teacher)
    configs, wanted = [other.config for other in others], [other(ids)[0] for other in others]
    for change in (lambda: patch_model(model, **OPTIONS), lambda: unpatch_model(model)):
        change()
        for other, config, output in zip(others, configs, wanted, strict=True):
            assert all(
                module.config is config for module in other.modules() if hasattr(module, "config")
            )
            assert torch.equal(other(ids)[0], output)


def test_errors_name_what_is_supported():
    model = patch_model(gpt2(), **OPTIONS)
    with pytest.raises(ValueError, match="has Infini-attention already; unpatch_model"):
        patch_model(model, **OPTIONS)
    with pytest.raises(ValueError, match="has Infini-attention already"):
        patch_model(infini_gpt2(), **OPTIONS)
    with pytest.raises(ValueError, match="GPT2LMHeadModel has no Infini-attention to take out"):
        unpatch_model(gpt2())
    with pytest.raises(
        ValueError,
        match="GPT2Model cannot have Infini-attention: it is not made of 3 decoder layers",
    ):
        patch_model(gpt2(add_cross_attention=True), **OPTIONS)
    with pytest.raises(
        ValueError, match=r"unknown options segments .*; patch_model takes cache_tokens, segment"
    ):
        patch_model(gpt2(), segments=8)
    sizes = dict(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=8,
    )
    with pytest.raises(
        ValueError,
        match="a BertModel cannot have Infini-attention: it is not made of 1 decoder layers",
    ):
        patch_model(BertModel(BertConfig(**sizes)), **OPTIONS)
    broken = gpt2()
    with pytest.raises(Exception, match="give segment_length"):
        patch_model(broken)
    assert type(broken) is GPT2LMHeadModel and type(broken.transformer.h[0].attn) is GPT2Attention


def test_attention_functions_that_another_library_has_wrapped(monkeypatch):
    """Kvpress wraps all that are registered when it is imported, and gives the dropout by its
    place."""
    model, ids = patch_model(decoder("llama"), **OPTIONS).eval(), token_ids(1, 20)
    wanted = model(input_ids=ids).logits

    def wrapped(module, query, key, value, attention_mask, dropout, **others):
        return infini_attention_function(
            module, query, key, value, attention_mask, dropout, **others
        )

    def by_place(*args, dropout, **others):
        return wrapped(*args, dropout, **others)

    monkeypatch.setitem(AttentionInterface._global_mapping, INTERFACE, by_place)
    assert torch.equal(model(input_ids=ids).logits, wanted)
