"""Options of the from-scratch model: how far positions reach, its sizes and first values, and what
it refuses."""

import math

import pytest
import torch
from transformers import DynamicCache

from hf_infini import CausalMHAConfig, CausalMHAForCausalLM, InfiniCache
from hf_infini.ops.positions import sinusoidal_encoding
from models import POSITIONS, REACHES, causal_mha, infini_gpt2, token_ids

# --- lengths
# --------------------------------------------------------------------------------------------------


def test_encodings_without_a_limit_go_on_beyond_the_trained_length():
    options = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    for position in POSITIONS[1:]:
        model = causal_mha(position_encoding=position, n_positions=16)
        text = model.generate(token_ids(1, 15), max_new_tokens=10, **options)
        assert text.shape == (1, 25)
        torch.testing.assert_close(model(text[:, :24]).logits[0, 14:].argmax(-1), text[0, 15:])


def test_what_positions_add_to_the_embeddings():
    """Read off the first block's input."""
    ids, positions = token_ids(2, 10), torch.arange(10)
    for encoding in POSITIONS:
        model = causal_mha(position_encoding=encoding).transformer
        embeddings = model.wte(ids)
        if encoding == "learned":
            embeddings = embeddings + model.wpe.weight[:10]
        elif encoding == "sinusoidal":
            embeddings = embeddings * 32**0.5 + sinusoidal_encoding(positions, 32)
        torch.testing.assert_close(
            model(ids, output_hidden_states=True).hidden_states[0], embeddings
        )


def test_learned_positions_say_where_they_end():
    model = causal_mha(position_encoding="learned")
    assert model(token_ids(1, 64)).logits.shape == (1, 64, 89)
    with pytest.raises(
        ValueError, match="position 64 is beyond this model's 64 learned positions.*train a model"
    ):
        model(token_ids(1, 65))


def test_what_a_memory_cannot_do_is_refused():
    model, ids = causal_mha(**REACHES["infini"]), token_ids(1, 10)
    with pytest.raises(ValueError, match="must be an InfiniCache of .*this DynamicCache is of"):
        model(ids, past_key_values=DynamicCache(config=model.config))
    with pytest.raises(
        ValueError,
        match="cache_implementation='static' is not for a model with a compressive memory",
    ):
        model.generate(ids, max_new_tokens=2, cache_implementation="static", pad_token_id=0)
    with pytest.raises(
        ValueError, match="assisted generation is not supported with stateful models"
    ):
        model.generate(ids, max_new_tokens=2, prompt_lookup_num_tokens=2, pad_token_id=0)


def test_a_model_without_memory_has_another_cache():
    model, other = causal_mha(), InfiniCache(causal_mha(**REACHES["infini"]).config)
    with pytest.raises(ValueError, match="this CausalMHAConfig has no layers with a memory"):
        InfiniCache(model.config)
    with pytest.raises(TypeError, match="an InfiniLayer keeps no keys and values"):
        model(token_ids(1, 10), past_key_values=other)
    with pytest.raises(
        ValueError, match=r"attention_mask must be \[batch, 13\], past \+ tokens; got \[1, 3\]"
    ):
        cache = model(token_ids(1, 10), use_cache=True).past_key_values
        model(token_ids(1, 3), attention_mask=torch.ones(1, 3), past_key_values=cache)


# --- sizes and options
# --------------------------------------------------------------------------------------------------


def test_the_shakespeare_model_has_its_published_parameters():
    """The sum of the published rows; the total printed under them, 418,866, is not."""
    sizes = {
        "vocab_size": 109,
        "n_positions": 50,
        "n_embd": 128,
        "n_layer": 2,
        "n_head": 2,
        "n_inner": 512,
    }
    assert CausalMHAForCausalLM(CausalMHAConfig(**sizes, qkv_bias=True)).num_parameters() == 431_104


def test_first_values():
    torch.manual_seed(0)
    model = CausalMHAForCausalLM(
        CausalMHAConfig(vocab_size=89, n_embd=128, n_layer=8, n_head=4, score="general")
    )
    attention = model.transformer.h[3].attn
    # 16,384 draws: their standard deviation is off by 0.6 % (one standard error)
    assert attention.W_query.weight.std().item() == pytest.approx(0.02, rel=0.03)
    assert attention.out_proj.weight.std().item() == pytest.approx(0.02 / math.sqrt(16), rel=0.03)
    assert model.transformer.h[3].mlp.fc_out.weight.std().item() == pytest.approx(
        0.02 / math.sqrt(16), rel=0.03
    )
    assert not attention.out_proj.bias.any()
    torch.testing.assert_close(attention.score_weight, torch.eye(32).expand(4, -1, -1) / 32**0.5)
    # The general score starts as the scaled dot product
    plain = CausalMHAForCausalLM(CausalMHAConfig(vocab_size=89, n_embd=128, n_layer=8, n_head=4))
    plain.load_state_dict(
        {k: v for k, v in model.state_dict().items() if not k.endswith("score_weight")}
    )
    ids = token_ids(1, 20)
    torch.testing.assert_close(plain(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "options, message",
    [
        (
            {"attention": "sparse"},
            r"'attention' expected one of \('global', 'local', 'infini', 'none'\), got sparse",
        ),
        ({"attention": "local"}, "attention='local' needs a sliding_window of 1 token or more"),
        (
            {
                "attention": "infini",
                "segment_length": 4,
                "update_rule": "gated_delta",
                "memory_write": "learned",
            },
            "update_rule='gated_delta' does not go with memory_write='learned': it already learns "
            "a weight of each token",
        ),
        (
            {"attention": "infini", "segment_length": 4, "layers": [0]},
            r"layers=\[0\] is not for this model",
        ),
        (
            {"sliding_window": 5},
            "sliding_window=5 belongs to attention='local' and does nothing with 'global'",
        ),
        (
            {"attention": "local", "sliding_window": 5, "memory_conv": 2},
            "memory_conv=2 belongs to attention='infini'",
        ),
        (
            {"attention": "none", "score": "dot"},
            "score='dot' belongs to attention='global' or 'local' or 'infini'",
        ),
        (
            {"attention": "none", "value_dim": 4},
            "value_dim=4 belongs to attention='global' or 'local' or 'infini'",
        ),
        ({"head_dim": 0}, "head_dim"),
        (
            {"rope_theta": 100},
            "rope_theta=100 belongs to position_encoding='rope' and does nothing with .*'learned'",
        ),
        (
            REACHES["infini"] | {"score": "additive"},
            "attention='infini' needs a score that is a product, scaled_dot, dot",
        ),
        (
            REACHES["infini"] | {"position_encoding": "t5"},
            "attention='infini' goes with position_encoding learned, ",
        ),
        (
            {"attention": "none", "position_encoding": "rope"},
            "acts inside the attention, and attention='none' has none",
        ),
        (
            {"position_encoding": "t5", "num_buckets": 64, "max_distance": 20},
            "num_buckets=64, max_distance=20",
        ),
    ],
)
def test_configuration_errors(options, message):
    with pytest.raises(ValueError, match=message):
        CausalMHAConfig(**{"n_embd": 32, "n_head": 4} | options)


@pytest.mark.parametrize(
    ("make", "options"),
    [(infini_gpt2, {"layers": [1]}), (causal_mha, {}), (causal_mha, REACHES["none"])],
)
def test_inputs_are_checked(make, options):
    model, ids = make(**options), token_ids(2, 3)
    with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
        model()
    with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
        model(ids, inputs_embeds=torch.zeros(2, 3, 32))
