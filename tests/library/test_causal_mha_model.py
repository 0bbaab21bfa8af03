"""The from-scratch model as a transformers model: caches, padding, packing, generation, saving,
training."""

import pytest
import torch

from models import REACHES, causal_mha, token_ids

RICH = {"feature_map": "exp", "memory_write": "learned", "memory_conv": 3}
INFINI = REACHES["infini"]
# Each encoding, score, reach and rule somewhere; the module's own tests have more combinations
KINDS = [
    {"position_encoding": "learned", "score": "general"},
    {"position_encoding": "sinusoidal", "score": "additive"},
    {"position_encoding": "rope", "score": "dot", "head_dim": 6, "value_dim": 10},
    {"position_encoding": "relative_key"},
    REACHES["none"] | {"position_encoding": "learned"},
    REACHES["local"] | {"position_encoding": "t5"},
    REACHES["local"] | {"position_encoding": "alibi"},
    REACHES["local"] | {"position_encoding": "rope"},
    INFINI | {"position_encoding": "learned", "score": "dot"},
    INFINI
    | {
        "position_encoding": "sinusoidal",
        "update_rule": "delta",
        "local_segments": 1,
        "sink_tokens": 3,
    },
    INFINI
    | {"position_encoding": "rope", "update_rule": "gated_delta", "head_dim": 12, "value_dim": 4},
    {"attention": "infini", "segment_length": 8, "position_encoding": "rope", "score": "dot"}
    | RICH,
]
# Windows of one token, whose queries and keys do nothing, and of two: what is left of a cache is
# nothing and one token
SMALL_WINDOWS = [
    {"attention": "local", "sliding_window": window, "position_encoding": position}
    for window, position in ((1, "rope"), (1, "t5"), (2, "none"))
]
# Three layers in float32 whose logits reach 10: sums in another order differ by a few units in the
# last place, 1e-6
FLOAT32 = {"rtol": 1e-4, "atol": 1e-4}


def each_of(kinds):
    return pytest.mark.parametrize(
        "kind", kinds, ids=lambda kind: "-".join(map(str, kind.values()))
    )


every_kind, every_cached_kind = each_of(KINDS), each_of(KINDS + SMALL_WINDOWS)


# --- what a causal language model of transformers does
# --------------------------------------------------------------------------------------------------


@every_kind
def test_padding_changes_nothing_whichever_implementation(kind):
    model, ids = causal_mha(**kind), token_ids(3, 20)
    mask = torch.ones(3, 20, dtype=torch.long)
    mask[0, :6] = 0  # left
    mask[1, 13:] = 0  # right
    wanted = [model(ids[row : row + 1, mask[row].bool()]).logits[0] for row in range(3)]
    for implementation in ("sdpa", "eager"):
        model.set_attn_implementation(implementation)
        assert model.config._attn_implementation == implementation
        padded = model(ids, attention_mask=mask).logits
        assert padded.isfinite().all()
        for row, real in enumerate([slice(6, 20), slice(0, 13), slice(0, 20)]):
            torch.testing.assert_close(padded[row, real], wanted[row], **FLOAT32)


@every_cached_kind
def test_left_padded_chunks_are_single_rows(kind):
    model, ids = causal_mha(**kind), token_ids(2, 25)
    mask = torch.ones(2, 25, dtype=torch.long)
    mask[1, :9] = 0
    cache, parts = None, []
    for begin, end in [(0, 4), (4, 12), (12, 13), (13, 25)]:
        call = {"attention_mask": mask[:, :end], "past_key_values": cache, "use_cache": True}
        output = model(ids[:, begin:end], **call)
        cache = output.past_key_values
        parts.append(output.logits)
    chunked = torch.cat(parts, 1)
    assert cache.get_seq_length() == 25
    torch.testing.assert_close(chunked[0], model(ids[:1]).logits[0], **FLOAT32)
    torch.testing.assert_close(chunked[1, 9:], model(ids[1:, 9:]).logits[0], **FLOAT32)


@pytest.mark.parametrize("position", ["learned", "rope"])
@torch.no_grad()
def test_a_memory_counts_on_from_its_cache(position):
    """A mask of the new tokens alone says nothing of the past: their places are counted in the
    cache."""
    model = causal_mha(attention="infini", segment_length=8, position_encoding=position)
    ids, real = token_ids(2, 30), torch.ones(2, 30, dtype=torch.long)
    real[0, :5], real[1, 20:23] = 0, 0
    wanted = model(ids, attention_mask=real).logits[:, 17:]
    cache = model(ids[:, :17], attention_mask=real[:, :17], use_cache=True).past_key_values
    logits = model(ids[:, 17:], attention_mask=real[:, 17:], past_key_values=cache).logits
    torch.testing.assert_close(logits[real[:, 17:] == 1], wanted[real[:, 17:] == 1], **FLOAT32)


@every_kind
def test_packed_documents_do_not_see_each_other(kind):
    model, ids = causal_mha(**kind), token_ids(1, 30)
    positions = torch.cat([torch.arange(11), torch.arange(19)]).unsqueeze(0)
    for use_cache in (False, True):
        packed = model(ids, position_ids=positions, use_cache=use_cache).logits
        for document in (slice(0, 11), slice(11, 30)):
            torch.testing.assert_close(
                packed[:, document], model(ids[:, document]).logits, **FLOAT32
            )


@every_kind
def test_gradient_checkpointing_gives_the_same_gradients(kind):
    ids = token_ids(2, 20)

    def gradients(checkpointing):
        model = causal_mha(**kind).train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        model(ids, labels=ids, use_cache=False).loss.backward()
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    wanted, got = gradients(False), gradients(True)
    for name, gradient in wanted.items():
        assert gradient is not None and gradient.abs().sum() > 0, f"{name} gets no gradient"
        # float32, sums in the same order
        torch.testing.assert_close(got[name], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("reach", REACHES, ids=str)
def test_attentions_and_hidden_states(reach):
    model, ids = causal_mha(**REACHES[reach]), token_ids(2, 20)
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[1, :6] = 0
    output = model(ids, attention_mask=mask, output_attentions=True, output_hidden_states=True)
    torch.testing.assert_close(output.logits, model(ids, attention_mask=mask).logits, **FLOAT32)
    assert len(output.hidden_states) == 4 and all(
        h.shape == (2, 20, 32) for h in output.hidden_states
    )
    torch.testing.assert_close(model.lm_head(output.hidden_states[-1]), output.logits)
    if reach == "none":
        assert output.attentions == ()
        return
    assert len(output.attentions) == 3
    for weights in output.attentions:
        assert weights.shape == (2, 4, 20, 8 if reach == "infini" else 20)
        # padding sees nothing
        torch.testing.assert_close(weights.sum(-1), mask[:, None].expand(2, 4, 20).float())
        if reach != "infini":
            assert not weights.triu(1).any()
        if reach == "local":
            assert not weights.tril(-7).any() and weights.tril(-6).any()
    without = model(ids)
    assert without.attentions is None and without.hidden_states is None
