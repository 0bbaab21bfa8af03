"""Every family of decoders with Infini-attention: the own model in one segment, the naive function
beyond."""

import copy
import inspect

import pytest
import torch
from transformers import CONFIG_MAPPING, MODEL_MAPPING, AutoModelForCausalLM
from transformers.models.llama import modeling_llama

import hf_infini.layers.memory_layer
from decoders import TYPES, decoder, token_ids
from hf_infini import patch_model, unpatch_model
from hf_infini.layers.memory_layer import InfiniAttentionMixin
from hf_infini.models.families import REFUSED, infini_class, infini_config
from hf_infini.models.structure import attention_layers, decoder_of
from models import in_calls, naive_attend, with_rates

# Logits of size 5 from four layers in float32, summed in another order
FLOAT32 = {"rtol": 1e-5, "atol": 1e-4}
WINDOW = {"segment_length": 8, "local_segments": 1, "sink_tokens": 2}
# GPT-2, plain, with sliding layers, with layers without positions
QUICK = ("gpt2", "llama", "gemma2", "smollm3")
each_type = pytest.mark.parametrize(
    "model_type",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in TYPES],
)
four_types = pytest.mark.parametrize("model_type", QUICK)


@each_type
def test_one_segment_is_the_own_model(model_type):
    """Logits, loss and gradients; the base model shows the own signature, by which others choose
    what they pass to it."""
    model, ids = decoder(model_type), token_ids(2, 40)
    layers = attention_layers(decoder_of(model))

    def measured():
        output = model(ids, labels=ids, use_cache=False)
        output.loss.backward()
        found = {
            name: p.grad
            for name, p in model.named_parameters()
            if "gate.weight" not in name or ".mlp." in name
        }
        model.zero_grad()
        return output.logits, output.loss, found

    wanted = measured()
    assert patch_model(model, segment_length=64) is model
    assert any(isinstance(layer, InfiniAttentionMixin) for layer in layers)
    found = measured()
    torch.testing.assert_close(found[:2], wanted[:2], **FLOAT32)
    for name, gradient in wanted[2].items():
        if gradient is not None:
            size = float(gradient.abs().max())
            torch.testing.assert_close(
                found[2][name], gradient, rtol=1e-4, atol=1e-5 * max(size, 1e-3), msg=name
            )
    unpatch_model(model)
    again = measured()
    assert torch.equal(again[0], wanted[0]) and again[2].keys() == wanted[2].keys()

    own = MODEL_MAPPING[CONFIG_MAPPING[model_type]]
    assert inspect.signature(infini_class(own).forward) == inspect.signature(own.forward)


@pytest.mark.parametrize(
    ("model_type", "rule"),
    [
        pytest.param(name, "linear", marks=[] if name in QUICK else pytest.mark.slow)
        for name in TYPES
    ]
    + [(name, "gated_delta") for name in QUICK],
)
def test_beyond_a_segment_it_is_the_naive_function(model_type, rule, monkeypatch, tmp_path):
    """In one pass, chunks and single steps, padded and packed, and after saving and loading."""
    model, ids = (
        with_rates(patch_model(decoder(model_type), **WINDOW, gate_init=-1.0, update_rule=rule)),
        token_ids(2, 40),
    )
    first, second = token_ids(1, 30), token_ids(1, 21, seed=1)
    padded = torch.cat([first, torch.cat([torch.zeros(1, 9, dtype=torch.long), second], 1)])
    mask, positions = torch.ones_like(padded), torch.cat([torch.arange(30), torch.arange(21)])[None]
    mask[1, :9] = 0
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        fast = model(ids, use_cache=False).logits
        chunks = in_calls(model, ids, (0, 5, 6, 19, 20, 40))
        steps = in_calls(model, ids[:1], range(41))
        batch = model(padded, attention_mask=mask, use_cache=False).logits
        packed = model(
            torch.cat([first, second], 1), position_ids=positions, use_cache=False
        ).logits[0]
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
        assert type(loaded) is type(model) and loaded.config.window == (8, 1, 2, 0)
        assert torch.equal(loaded(ids, use_cache=False).logits, fast)
        monkeypatch.setattr(hf_infini.layers.memory_layer, "attend", naive_attend)
        naive = model(ids, use_cache=False).logits
        alone = [model(text, use_cache=False).logits[0] for text in (first, second)]
    torch.testing.assert_close(fast, naive, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(chunks, fast, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(steps, fast[:1], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        torch.cat([batch[0], batch[1, 9:]]), torch.cat(alone), rtol=1e-4, atol=1e-4
    )
    torch.testing.assert_close(packed, torch.cat(alone), rtol=1e-4, atol=1e-4)


def test_experts_are_computed_as_in_the_own_model(tmp_path, monkeypatch):
    """In one product, not in a loop, unless a loop is asked for; also where no model of the own
    class came before."""
    plain = decoder("olmoe")
    own, implementation = type(plain), plain.config._experts_implementation
    patch_model(plain, **WINDOW).save_pretrained(tmp_path)
    for model_class in (own, infini_class(own)):
        if "_can_set_experts_implementation_cached_value" in vars(model_class):
            monkeypatch.delattr(model_class, "_can_set_experts_implementation_cached_value")
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.config._experts_implementation == implementation == "grouped_mm"
    model.set_experts_implementation("eager")
    assert model.config._experts_implementation == "eager"


@four_types
def test_a_plain_checkpoint_is_loaded_with_a_memory(model_type, tmp_path):
    model, ids = decoder(model_type), token_ids(1, 40)
    model.save_pretrained(tmp_path / "plain")
    loaded = getattr(hf_infini, f"Infini{type(model).__name__}").from_pretrained(
        tmp_path / "plain", **WINDOW
    )
    patched = patch_model(model, **WINDOW)
    assert type(loaded) is type(patched) and loaded.config.model_type == f"infini_{model_type}"
    assert "_from_other_type" not in loaded.config.to_dict()
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, patched(ids).logits)


def test_what_a_layer_does_beside_rotary_attention_is_found(monkeypatch):
    """A layer that scales its keys after the rotation, which nobody listed."""
    own = modeling_llama.apply_rotary_pos_emb

    def other(query, key, cos, sin, unsqueeze_dim=1):
        query, key = own(query, key, cos, sin, unsqueeze_dim)
        return query, key * torch.linspace(0.5, 2, key.shape[-1])

    model, ids = decoder("llama"), token_ids(1, 20)
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", other)
    wanted = model(ids).logits
    with pytest.raises(
        ValueError, match="layer 0, a LlamaAttention, cannot be given a memory: .* would differ by"
    ):
        patch_model(model, **WINDOW)
    assert type(model).__name__ == "LlamaForCausalLM" and torch.equal(model(ids).logits, wanted)


def test_families_that_cannot_are_refused_by_name():
    for model_type in set(sum(REFUSED.values(), ())) & set(CONFIG_MAPPING):
        with pytest.raises(ValueError, match=f"a '{model_type}' cannot have Infini-attention: "):
            infini_config(CONFIG_MAPPING[model_type])


@pytest.mark.parametrize(
    "model_type, reason",
    {
        "minimax": "some of its layers are linear attention",
        "xlnet": "forward takes no cache",
        "bart": "not made of",
        "trocr": "not made of",
        "opt": "not made of 4 decoder layers with one attention module each",
    }.items(),
)
def test_others_are_refused_for_what_they_are(model_type, reason):
    sizes = {
        "d_model": 32,
        "n_layer": 4,
        "n_head": 4,
        "decoder_layers": 4,
        "decoder_attention_heads": 4,
    }
    model = decoder(model_type, **sizes)
    with pytest.raises(ValueError, match=f"cannot have Infini-attention: .*{reason}"):
        patch_model(model, **WINDOW)


def test_sliding_layers_are_not_replaced_without_being_named():
    model = decoder("mistral", sliding_window=16)
    with pytest.raises(
        Exception,
        match="none of the 4 layers of this infini_mistral attends to everything.*layers=",
    ):
        patch_model(model, **WINDOW)
    assert patch_model(model, **WINDOW, layers=[1, 3]).config.infini_layers == [1, 3]


@torch.no_grad()
def test_layers_whose_positions_are_complex_numbers():
    """Llama 4's own choice has none: its layers of full attention have no positions."""
    ids, sizes = token_ids(2, 40), {"attention_chunk_size": 64}
    wanted = decoder("llama4_text", **sizes)(ids).logits
    for length in (64, 8):
        model = patch_model(decoder("llama4_text", **sizes), segment_length=length, layers=[0, 1])
        found = model(ids, use_cache=False).logits
        torch.testing.assert_close(found[:, :8], wanted[:, :8], **FLOAT32)
        torch.testing.assert_close(in_calls(model, ids, (0, 5, 20, 21, 40)), found, **FLOAT32)
        if length == 64:
            torch.testing.assert_close(found, wanted, **FLOAT32)


def test_padding_inside_a_row_takes_up_places_of_a_sliding_window_as_in_the_own_model():
    """Of 16 tokens; the layers with a memory see everything. Positions are those that `generate`
    gives."""
    model, ids = decoder("gemma2"), token_ids(2, 60)
    mask = torch.ones_like(ids)
    mask[0, 20:30], mask[1, 5] = 0, 0
    given = {"attention_mask": mask, "use_cache": False}
    with torch.no_grad():
        wanted = model(ids, **given, position_ids=(mask.cumsum(1) - 1).clamp(min=0)).logits
        patch_model(model, segment_length=64)
        found = model(ids, **given).logits
        without = model(torch.cat([ids[:1, :20], ids[:1, 30:]], 1), use_cache=False).logits
    torch.testing.assert_close(found[mask.bool()], wanted[mask.bool()], **FLOAT32)
    assert (found[0, 30:] - without[0, 20:]).abs().max() > 0.01


@four_types
def test_in_float64_it_is_the_own_model(model_type):
    """Also where that is not torch's default, in which tensors without a dtype are made."""
    model, ids = decoder(model_type).double(), token_ids(2, 40)
    with torch.no_grad():
        wanted = model(ids, use_cache=False).logits
        torch.set_default_dtype(torch.float16)
        try:
            found = patch_model(model, segment_length=64)(ids, use_cache=False).logits
            beyond = model(token_ids(1, 200)).logits
        finally:
            torch.set_default_dtype(torch.float32)
    assert {parameter.dtype for parameter in model.parameters()} == {found.dtype} == {torch.float64}
    # The eager attention of Gemma 2 takes its softmax in float32
    close = 1e-5 if model.config._attn_implementation == "eager" else 1e-11
    torch.testing.assert_close(found, wanted, rtol=close, atol=close)
    assert beyond.isfinite().all()


def test_layers_with_large_scores_are_compared_in_float32():
    """In 16 bits such scores are rounded by more than 1: the layer would differ from itself by a
    tenth of what it gives."""
    model, ids = decoder("llama"), token_ids(1, 40)
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.data.mul_(100)
    model.to(torch.bfloat16)
    before = copy.deepcopy(model.state_dict())
    patch_model(model, **WINDOW)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16} and model(
        ids
    ).logits.isfinite().all()


@pytest.mark.parametrize(
    ("model_type", "message"),
    [
        ("gpt_oss", "cannot be given a memory: its forward fails .*: Runtime"),
        ("deepseek_v3", "compressed together"),
    ],
)
def test_a_family_whose_layers_fail_is_refused_with_the_reason(model_type, message):
    model, ids = decoder(model_type, num_key_value_heads=4), token_ids(1, 20)
    kind, wanted = type(model), model(ids).logits
    with pytest.raises(ValueError, match=message):
        patch_model(model, **WINDOW)
    assert type(model) is kind and torch.equal(model(ids).logits, wanted)
