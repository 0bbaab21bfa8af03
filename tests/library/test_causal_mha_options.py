"""Options of the from-scratch model: how far positions reach, its sizes and first values, and what it refuses."""

import math

import pytest
import torch
from transformers import AutoConfig, DynamicCache

from hf_infini import CausalMHAConfig, CausalMHAForCausalLM, InfiniCache
from hf_infini.ops.positions import sinusoidal_encoding
from models import POSITIONS, REACHES, causal_mha, infini_gpt2, token_ids

# --- lengths ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("position", [p for p in POSITIONS if p != "learned"])
def test_encodings_without_a_limit_go_on_beyond_the_trained_length(position):
    model = causal_mha(position_encoding=position)  # n_positions = 64
    options = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    text = model.generate(token_ids(1, 60), max_new_tokens=40, **options)
    assert text.shape == (1, 100)
    torch.testing.assert_close(model(text[:, :99]).logits[0, 59:].argmax(-1), text[0, 60:])


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
        torch.testing.assert_close(model(ids, output_hidden_states=True).hidden_states[0], embeddings)


def test_learned_positions_say_where_they_end():
    model = causal_mha(position_encoding="learned")
    assert model(token_ids(1, 64)).logits.shape == (1, 64, 89)
    with pytest.raises(ValueError, match="position 64 is beyond this model's 64 learned positions.*all but 'learned'"):
        model(token_ids(1, 65))


def test_caches_of_a_window_and_of_a_memory_stay_as_they_are():
    local, infini = causal_mha(**REACHES["local"]), causal_mha(**REACHES["infini"] | {"position_encoding": "rope"})
    ids = token_ids(1, 40)
    kept = [local(ids[:, :n], use_cache=True).past_key_values.layers[0].keys.shape[2] for n in (20, 40)]
    assert kept == [6, 6]  # the window without the next token itself
    caches = [infini(ids[:, :n], use_cache=True).past_key_values for n in (20, 40)]
    assert isinstance(caches[0], InfiniCache) and caches[0].nbytes() == caches[1].nbytes()


def test_what_a_memory_cannot_do_is_refused():
    model, ids = causal_mha(**REACHES["infini"]), token_ids(1, 10)
    with pytest.raises(ValueError, match="must be an InfiniCache, got DynamicCache"):
        model(ids, past_key_values=DynamicCache(config=model.config))
    with pytest.raises(ValueError, match="cache_implementation='static' is not for a model with a compressive memory"):
        model.generate(ids, max_new_tokens=2, cache_implementation="static", pad_token_id=0)
    with pytest.raises(ValueError, match="assisted generation is not supported with stateful models"):
        model.generate(ids, max_new_tokens=2, prompt_lookup_num_tokens=2, pad_token_id=0)
    other = causal_mha()  # keys and values can be taken back
    plain = other.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)
    assisted = other.generate(ids, max_new_tokens=8, do_sample=False, prompt_lookup_num_tokens=2, pad_token_id=0)
    assert torch.equal(plain, assisted)


def test_a_wrong_cache_is_refused():
    ids, infini = token_ids(1, 10), causal_mha(**REACHES["infini"])
    for reach in ("global", "local", "none"):
        model = causal_mha(**REACHES[reach])
        with pytest.raises(ValueError, match="is for layers with a compressive memory, and this CausalMHAConfig"):
            InfiniCache(model.config)
        for wrong in (InfiniCache(infini.config), ((torch.zeros(1, 4, 3, 8),) * 2,) * 3):
            with pytest.raises(ValueError, match=f"must be a .* cache of keys and values, got {type(wrong).__name__}"):
                model(ids, past_key_values=wrong)
        with pytest.raises(ValueError, match="got InfiniCache: this model has no memory"):
            model.generate(ids, past_key_values=InfiniCache(infini.config), max_new_tokens=2)
    local = causal_mha(attention="local", sliding_window=5)
    for model, seen in ((causal_mha(), "everything before"), (causal_mha(**REACHES["local"]), "7 tokens")):
        with pytest.raises(ValueError, match=f"keeps a window of 5 tokens, and this model's tokens see {seen}"):
            model(ids, past_key_values=DynamicCache(config=local.config))
    with pytest.raises(ValueError, match=r"other layers: this one has 3, with memory in \[0, 1, 2\]"):
        infini(ids, past_key_values=InfiniCache(causal_mha(**REACHES["infini"], n_layer=2).config))
    with pytest.raises(ValueError, match=r"other layers: this one has 3, with memory in \[1\]"):
        infini_gpt2(layers=[1])(ids, past_key_values=InfiniCache(infini.config))


# --- sizes and options ------------------------------------------------------------------------------------------------


def test_parameter_table_of_the_shakespeare_model():
    """The rows as published. Their sum is 431,104; the total printed under them, 418,866, is not."""
    config = CausalMHAConfig(
        vocab_size=109, n_positions=50, n_embd=128, n_layer=2, n_head=2, n_inner=512, qkv_bias=True
    )
    model = CausalMHAForCausalLM(config)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}

    def take(*names):
        return sum(sizes.pop(name) for name in names)

    assert take("transformer.wpe.weight") == 6_400
    assert take("transformer.wte.weight") == 13_952
    for layer in ("transformer.h.0", "transformer.h.1"):
        projections = [f"{layer}.attn.W_{name}" for name in ("query", "key", "value")]
        assert take(*(f"{name}.weight" for name in projections)) == 49_152
        assert take(*(f"{name}.bias" for name in projections)) == 384
        assert take(f"{layer}.attn.out_proj.weight") == 16_384
        assert take(f"{layer}.attn.out_proj.bias") == 128
        for norm in ("ln_1", "ln_2"):
            assert take(f"{layer}.{norm}.weight", f"{layer}.{norm}.bias") == 256
        assert take(f"{layer}.mlp.fc_in.weight") == 65_536
        assert take(f"{layer}.mlp.fc_in.bias") == 512
        assert take(f"{layer}.mlp.fc_out.weight") == 65_536
        assert take(f"{layer}.mlp.fc_out.bias") == 128
    assert take("transformer.ln_f.weight", "transformer.ln_f.bias") == 256
    assert take("lm_head.weight") == 13_952
    assert not sizes
    assert model.num_parameters() == 431_104


def test_first_values():
    torch.manual_seed(0)
    model = CausalMHAForCausalLM(CausalMHAConfig(vocab_size=89, n_embd=128, n_layer=8, n_head=4, score="general"))
    attention = model.transformer.h[3].attn
    # 16,384 draws: their standard deviation is off by 0.6 % (one standard error)
    assert attention.W_query.weight.std().item() == pytest.approx(0.02, rel=0.03)
    assert attention.out_proj.weight.std().item() == pytest.approx(0.02 / math.sqrt(16), rel=0.03)
    assert model.transformer.h[3].mlp.fc_out.weight.std().item() == pytest.approx(0.02 / math.sqrt(16), rel=0.03)
    assert not attention.out_proj.bias.any()
    torch.testing.assert_close(attention.score_weight, torch.eye(32).expand(4, -1, -1) / 32**0.5)
    # The general score starts as the scaled dot product
    plain = CausalMHAForCausalLM(CausalMHAConfig(vocab_size=89, n_embd=128, n_layer=8, n_head=4))
    plain.load_state_dict({k: v for k, v in model.state_dict().items() if not k.endswith("score_weight")})
    ids = token_ids(1, 20)
    torch.testing.assert_close(plain(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)


def test_what_a_checkpoint_lacks_is_initialised(tmp_path):
    causal_mha().save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path, attention="infini", segment_length=8, gate_init=-3.0)
    model = CausalMHAForCausalLM.from_pretrained(tmp_path, config=config)
    for block in model.transformer.h:
        assert torch.equal(block.attn.gate(), torch.full((4,), -3.0))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"score": "cosine"}, r"'score' expected one of \('scaled_dot', 'dot', 'general', 'additive'\), got cosine"),
        ({"attention": "sparse"}, r"'attention' expected one of \('global', 'local', 'infini', 'none'\), got sparse"),
        ({"position_encoding": "xpos"}, r"'position_encoding' expected one of \('learned', .* got xpos"),
        ({"n_head": 5}, "n_head=5 must divide n_embd=32"),
        ({"dropout": 1.0}, "dropout must be at least 0 and below 1; got 1.0"),
        ({"activation_function": "sine"}, "activation_function must be one of .* got 'sine'"),
        ({"attention": "local"}, "attention='local' needs a sliding_window of 1 token or more; got None"),
        ({"attention": "infini"}, "exactly one of segment_length .* got segment_length=None, n_segments=None"),
        ({"attention": "infini", "segment_length": 0}, "segment_length must be at least 1 and .*; got 0"),
        ({"attention": "infini", "n_segments": 5}, "n_segments must divide n_positions=1024; got 5"),
        ({"attention": "infini", "segment_length": 4, "memory_write": "learned"}, "memory_write='learned' multiplies"),
        (
            {"attention": "infini", "segment_length": 4, "update_rule": "gated_delta", "memory_init": "noise"},
            "update_rule='gated_delta' does not go with memory_init='noise': the noise is a first normaliser",
        ),
        ({"attention": "infini", "segment_length": 4, "layers": [0]}, r"layers=\[0\] is for infini_gpt2"),
        ({"sliding_window": 5}, "sliding_window=5 belongs to attention='local' and does nothing with attention='global'"),
        ({"segment_length": 5}, "segment_length=5 belongs to attention='infini'"),
        ({"update_rule": "delta"}, "update_rule='delta' belongs to attention='infini' and does nothing with attention='gl"),
        ({"attention": "local", "sliding_window": 5, "memory_conv": 2}, "memory_conv=2 belongs to attention='infini'"),
        ({"attention": "none", "score": "dot"}, "score='dot' belongs to attention='global' or 'local' or 'infini'"),
        ({"rope_theta": 100}, "rope_theta=100 belongs to position_encoding='rope' and does nothing with .*'learned'"),
        (REACHES["infini"] | {"score": "additive"}, "attention='infini' goes with score scaled_dot, dot, general"),
        (REACHES["infini"] | {"position_encoding": "t5"}, "attention='infini' goes with position_encoding learned, "),
        ({"attention": "none", "position_encoding": "rope"}, "acts inside the attention, and attention='none' has none"),
        ({"position_encoding": "rope", "n_embd": 12}, "must be even; got 12 / 4 = 3"),
        ({"position_encoding": "t5", "num_buckets": 64, "max_distance": 20}, "num_buckets=64, max_distance=20"),
        ({"n_layer": 0}, "n_layer must be at least 1 and .*; got 0"),
    ],
)
def test_configuration_errors(options, message):
    with pytest.raises(ValueError, match=message):
        CausalMHAConfig(**{"n_embd": 32, "n_head": 4} | options)


@pytest.mark.parametrize(
    ("make", "options"), [(infini_gpt2, {}), (infini_gpt2, {"layers": [1], "position_encoding": "rope"})]
    + [(causal_mha, reach) for reach in REACHES.values()],
)
def test_inputs_are_checked(make, options):
    model, ids = make(**options), token_ids(2, 3)
    with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
        model()
    with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
        model(ids, inputs_embeds=torch.zeros(2, 3, 32))
    cache = model(ids, use_cache=True).past_key_values
    for empty in (ids[:, :0], ids[:0]):
        message = rf"with a row and a token at least; got \[{empty.shape[0]}, {empty.shape[1]}\]"
        mask = torch.ones_like(empty)
        for call in ({"input_ids": empty}, {"inputs_embeds": torch.zeros(*empty.shape, 32)}):
            for more in ({}, {"attention_mask": mask}, {"past_key_values": cache}):
                with pytest.raises(ValueError, match=message):
                    model(**call, **more)
    assert cache.get_seq_length() == 3
    with pytest.raises(ValueError, match=r"got \[0, 3\]"):
        model.generate(ids[:0], attention_mask=mask, max_new_tokens=2, pad_token_id=0)
