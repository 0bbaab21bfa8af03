"""What earlier tokens weigh through the memory: inspect_attention's weights are those of the naive reference."""

import pytest
import torch

from hf_infini import InfiniState, inspect_attention, naive_infini_attention
from hf_infini.tools.inspection import parts
from models import causal_mha, infini_gpt2, token_ids

LENGTH, TOKENS = 8, 45  # of a segment, and of a text: five segments and a part
# Sums in float64 in another order; a delta rule on random keys brings numbers of size 100 that nearly cancel.
FLOAT64 = dict(rtol=1e-9, atol=1e-10)
EXP = {"feature_map": "exp", "memory_write": "learned", "memory_conv": 3}
MODELS = [
    (infini_gpt2, {}),
    (infini_gpt2, {"local_segments": 1}),
    (infini_gpt2, {"local_segments": 1, "sink_tokens": 2, "position_encoding": "rope"}),
    (infini_gpt2, {"update_rule": "delta"}),
    (infini_gpt2, {"update_rule": "delta", "local_segments": 1, "sink_tokens": 3}),
    (infini_gpt2, {"update_rule": "delta", "memory_init": "learned"}),
    (infini_gpt2, {"memory_init": "learned", "local_segments": 2}),
    (infini_gpt2, {"memory_init": "noise"}),
    (infini_gpt2, {**EXP, "denominator": "shared"}),
    (infini_gpt2, {**EXP, "update_rule": "delta", "feature_map": "learned", "denominator": "shared", "local_segments": 1}),
    (causal_mha, {"attention": "infini", "position_encoding": "rope", "score": "dot", **EXP}),
]
all_memories = pytest.mark.parametrize(("make", "options"), MODELS, ids=lambda value: getattr(value, "__name__", str(value)))


def made(make, options):
    """The model in float64, its starts, convolutions, writing weights and maps not the same for all heads and places."""
    model = make(segment_length=LENGTH, **options).double()
    for name, parameter in model.named_parameters():
        if name.rsplit(".")[-1] in ("start_memory", "start_normaliser", "memory_conv", "memory_write", "query_map"):
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
            parameter.data.add_(noise, alpha=0.3)
    return model


def text() -> torch.Tensor:
    """Two rows of ids; three tokens are the end of a text, which the memory never takes in."""
    ids = token_ids(2, TOKENS)
    ids[0, [3, 17]] = ids[1, 9] = 0
    return ids


def naive_weights(module, hidden, ids, gate) -> torch.Tensor:
    """The reference's output `[batch, heads, tokens, tokens]` where every token's value is its unit vector: the part that
    each token has in each head's output."""
    rule, config, (inputs, _) = module.rule, module.config, module.begin(hidden, module.inputs_outside_model(hidden))
    query, key, _, softmax = module.projections(inputs)
    units, log_weight, start = torch.eye(TOKENS).double().expand(2, 4, -1, -1), module.log_weight(inputs), module.start()
    if start:  # no token's
        start["start_memory"] = torch.zeros(*start["start_memory"].shape[:2], TOKENS).double()
    window = dict(zip(("segment_length", "local_segments", "sink_tokens", "kept_tokens"), config.window, strict=True))
    state = InfiniState.initial(key, units, *window.values(), log_weights=int(log_weight is not None), **start)
    options = {name: getattr(rule, name) for name in ("update_rule", "feature_map", "denominator", "eps")}
    options |= {name: getattr(softmax, name) for name in ("scaling", "rotary", "query_weight")}
    maps = None if rule.query_map is None else (rule.query_map, rule.key_map)
    given = {"state": state, "log_weight": log_weight, "feature_maps": maps, "memory_mask": ids != 0}
    return naive_infini_attention(query, key, units, gate, **window, **options, **given)


@all_memories
@torch.no_grad()
def test_the_weights_are_the_naive_function_s_of_unit_vectors(make, options):
    model, ids = made(make, options), text()
    module, inputs = model.transformer.h[1].attn, []
    module.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    layer = inspect_attention(model, ids).layers[1]
    found, gate = layer.memory_weights.values, layer.token_gate.values.unsqueeze(-1)
    assert layer.memory_weights.dims == layer.weights.dims and found.shape == (2, 4, TOKENS, TOKENS)
    has_memory = layer.token_gate.values > 0
    kept = options.get("local_segments", 0)
    assert has_memory[..., (kept + 1) * LENGTH :].all()
    assert has_memory.all() == (options.get("memory_init") is not None)
    # sigmoid(80) is 1 in float64, and so is the share of e^80 in a sum with the window's e^s, of e^30 at most
    memory = naive_weights(module, inputs[0], ids, torch.full((4,), 80.0).double())
    torch.testing.assert_close(found[has_memory], memory[has_memory], **FLOAT64)
    assert not found[~has_memory].any()
    both = gate * found + (1 - gate) * layer.weights.values
    torch.testing.assert_close(both, naive_weights(module, inputs[0], ids, module.gate()), **FLOAT64)

    # What the memory does not hold weighs nothing at all
    segment = torch.arange(TOKENS) // LENGTH
    left = segment[:, None] - segment > kept
    left[:, : options.get("sink_tokens", 0)] = False
    held = left & (ids != 0)[:, None, None]
    assert not found[~held.expand_as(found)].any() and found[held.expand_as(found)].all()
    if not options.get("memory_init"):
        value = module.projections(module.begin(inputs[0], module.inputs_outside_model(inputs[0]))[0])[2]
        torch.testing.assert_close(found @ value, layer.memory_heads.values, **FLOAT64)
        mixed = gate * layer.memory_heads.values + (1 - gate) * layer.local_heads.values
        torch.testing.assert_close(mixed, layer.heads.values, **FLOAT64)


@pytest.mark.parametrize(("rule", "feature_map"), [("linear", "elu"), ("linear", "exp"), ("delta", "elu")])
def test_rows_of_the_linear_rule_sum_to_one(rule, feature_map):
    layer = inspect_attention(infini_gpt2(update_rule=rule, feature_map=feature_map), text()).layers[2]
    weights = layer.memory_weights.values[layer.token_gate.values > 0]
    sums = weights.sum(-1)
    if rule == "linear":  # but for ε = 1e-6 beside denominators above 1, and float32
        torch.testing.assert_close(sums, torch.ones_like(sums), rtol=0, atol=1e-5)
        assert (weights >= 0).all()
    else:
        assert (weights < 0).any() and (sums - 1).abs().max() > 0.1


@pytest.mark.parametrize("rule", ["linear", "delta"])
def test_columns_at_a_time_are_all_columns(rule, monkeypatch):
    model = made(infini_gpt2, {"update_rule": rule, "local_segments": 1})
    wanted = inspect_attention(model, text()).layers[0].memory_weights.values
    for elements in (1, 7 * 2 * 4 * 6 * 8):  # a column at a time; 7, which 45 is no multiple of
        monkeypatch.setattr(parts, "COLUMN_ELEMENTS", elements)
        found = inspect_attention(model, text()).layers[0].memory_weights.values
        torch.testing.assert_close(found, wanted, **FLOAT64)


def test_a_table_of_the_memory_s_weights():
    inspection = inspect_attention(infini_gpt2(), token_ids(2, 20))
    pytest.importorskip("pandas")
    table, local = (inspection.table(name, layer=1, head=2, row=1) for name in ("memory_weights", "weights"))
    assert list(table.index) == list(local.index) and list(table.columns) == list(local.columns)
    assert table.to_numpy().tolist() == inspection.layers[1].memory_weights.values[1, 2].tolist()
    assert table.iloc[17, 3] > 0 and table.iloc[3, 17] == 0  # queries are rows
    assert inspection.table("token_gate", layer=1).shape == (20, 4)
