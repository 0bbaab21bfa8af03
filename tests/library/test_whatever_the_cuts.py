"""The state depends on the text only, not on how it was cut into calls or on calls that failed."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM

from hf_infini import InfiniCache, patch_model

SIZES = dict(hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4)
WINDOW = dict(segment_length=8, local_segments=1, sink_tokens=2, kept_tokens=30)  # 48 places
LIMIT = 24  # tokens, up to which positions are as they are
SCALED = {
    "longrope": (
        Phi3ForCausalLM,
        Phi3Config(
            vocab_size=61,
            **SIZES,
            pad_token_id=0,
            eos_token_id=1,
            max_position_embeddings=512,
            original_max_position_embeddings=LIMIT,
            rope_parameters=dict(
                rope_type="longrope",
                rope_theta=1e4,
                short_factor=[1.0] * 4,
                long_factor=[4.0] * 4,
                original_max_position_embeddings=LIMIT,
            ),
        ),
    ),
    "dynamic": (
        LlamaForCausalLM,
        LlamaConfig(
            vocab_size=61,
            **SIZES,
            max_position_embeddings=LIMIT,
            rope_parameters=dict(rope_type="dynamic", rope_theta=1e4, factor=4.0),
        ),
    ),
}


def small(kind=LlamaForCausalLM, config=None, seed=0, **sizes):
    """A model whose weights are large enough for differences to show."""
    torch.manual_seed(seed)
    model = kind(config or LlamaConfig(vocab_size=61, **SIZES | sizes)).eval()
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.2 * (32 / SIZES["hidden_size"]) ** 0.5)
    return model


@torch.no_grad()
def read(model, ids: torch.Tensor, cuts: list[int]) -> tuple[torch.Tensor, InfiniCache]:
    """The logits of a text that is read in calls of so many tokens, and the cache after it."""
    cache = InfiniCache(model.config)
    parts = [model(part, cache=cache, use_cache=True).logits for part in ids.split(cuts, 1)]
    return torch.cat(parts, 1), cache


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("score", ["learned", "half"])
@pytest.mark.parametrize("text", ["two tokens", "few tokens", "period of 3"])
def test_equal_tokens_have_equal_scores_however_a_text_is_cut(text, score, seed):
    model = small(num_key_value_heads=2, seed=seed)
    patch_model(model, segment_length=5, local_segments=1, kept_tokens=6, keep_score=score)
    for layer in model.model.layers:
        layer.self_attn.keep_weight.data.normal_()
    draw = torch.Generator().manual_seed(seed)
    ids = {
        "two tokens": torch.randint(3, 5, (1, 60), generator=draw),
        "few tokens": torch.randint(3, 15, (1, 60), generator=draw),
        "period of 3": torch.arange(60)[None] % 3 + 3,
    }[text]
    wanted, whole = read(model, ids, [60])
    for cuts in ([30] + [1] * 30, [7] * 8 + [4]):
        logits, cache = read(model, ids, cuts)
        # float32; another token in a head's places changes logits by 0.01 or more
        torch.testing.assert_close(logits, wanted, rtol=0, atol=5e-5)
        for layer, other in zip(whole.layers, cache.layers, strict=True):
            assert torch.equal(layer.state.kept_position, other.state.kept_position)


@pytest.mark.parametrize("score", ["attention", "half"])
def test_a_step_that_failed_in_a_later_layer_leaves_nothing_behind(score):
    model = small(num_hidden_layers=3)
    patch_model(model, segment_length=5, local_segments=1, kept_tokens=6, keep_score=score)
    ids = torch.randint(3, 61, (1, 40), generator=torch.Generator().manual_seed(0))
    wanted, _ = read(model, ids, [1] * 40)

    def fail(*call):
        raise RuntimeError("out of memory")

    cache, logits = InfiniCache(model.config), []
    for number in range(40):
        if number > 5:
            hook = model.model.layers[number % 3].register_forward_hook(fail)
            with torch.no_grad(), pytest.raises(RuntimeError, match="out of memory"):
                model(ids[:, number : number + 1], cache=cache, use_cache=True)
            hook.remove()
        with torch.no_grad():
            output = model(ids[:, number : number + 1], cache=cache, use_cache=True)
        logits.append(output.logits)
    assert torch.equal(torch.cat(logits, 1), wanted)


@pytest.mark.parametrize("name", SCALED)
def test_positions_scaled_by_length_are_the_plain_ones_up_to_the_length_that_a_model_knows(name):
    ids = torch.randint(2, 61, (1, LIMIT), generator=torch.Generator().manual_seed(0))
    plain, model = small(*SCALED[name]), patch_model(small(*SCALED[name]), **WINDOW)
    read(model, ids.repeat(1, 3), [50, 22])  # a long text before, which some of these remember
    for tokens in (1, 9, LIMIT):
        with torch.no_grad():
            wanted = plain(ids[:, :tokens]).logits
        for cuts in ([tokens], [1] * tokens):
            logits, _ = read(model, ids[:, :tokens], cuts)
            torch.testing.assert_close(logits, wanted, rtol=0, atol=2e-5)  # float32


@pytest.mark.parametrize("name", SCALED)
def test_positions_scaled_by_length_are_so_from_the_first_segment_that_begins_beyond(name):
    ids = torch.randint(2, 61, (2, 70), generator=torch.Generator().manual_seed(0))
    model = patch_model(small(*SCALED[name]), **WINDOW)
    wanted, _ = read(model, ids, [70])
    for cuts in ([23, 2, 45], [30] + [1] * 40):
        logits, _ = read(model, ids, cuts)
        torch.testing.assert_close(logits, wanted, rtol=0, atol=2e-5)  # float32
    tables = model.model.far_tables
    assert tables(48, ids.device)[None][1] == LIMIT
    model.model.far_tables = lambda *given: {}  # as if there were no such length
    unscaled, _ = read(model, ids, [70])
    model.model.far_tables = tables
    differ = (unscaled - wanted).abs().amax((0, 2)) > 1e-3
    assert not differ[:LIMIT].any() and differ[LIMIT:].all()
