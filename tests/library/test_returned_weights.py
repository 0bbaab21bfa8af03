"""output_attentions: an entry for every layer, and weights that the output is computed from."""

import pytest
import torch
from hypothesis import given

from cases import cut_cases, examples
from hf_infini.ops.attention import attend
from hf_infini.ops.layout.build import segment_layout
from hf_infini.ops.rules import memory_rule
from hf_infini.ops.state import Projections
from hf_infini.ops.window import ScoreOptions
from models import causal_mha, infini_gpt2, token_ids


@pytest.mark.parametrize("layers", [[1], [0, 2]])
def test_every_layer_returns_weights_with_the_eager_implementation(layers):
    model, ids = infini_gpt2(layers=layers), token_ids(2, 20)
    generation = {"max_new_tokens": 2, "pad_token_id": 0, "return_dict_in_generate": True, "output_attentions": True}
    assert model(ids).attentions is None
    model.set_attn_implementation("eager")

    def shapes(attentions):
        return [tuple(weights.shape) for weights in attentions]

    def wanted(queries, keys):
        return [(2, 4, queries, 8 if layer in layers else keys) for layer in range(3)]

    weights = model(ids, output_attentions=True).attentions
    assert shapes(weights) == wanted(20, 20)
    for layer in weights:
        torch.testing.assert_close(layer.sum(-1), torch.ones(2, 4, 20))  # float32
    first, second = model.generate(ids, **generation).attentions
    assert shapes(first) == wanted(20, 20) and shapes(second) == wanted(1, 21)


def with_weights(case, cuts):
    """The outputs of [`attend`] in calls between the cuts, and the weights of each call."""
    options, state, edges = dict(case.options), None, [0, *cuts, case.query.shape[2]]
    tensors = (case.query, case.key, case.value, options.pop("log_weight", None))
    of_tokens = {name: options.pop(name, None) for name in ("attention_mask", "position_ids", "memory_mask")}
    window = (case.segment_length, options.pop("local_segments"), options.pop("sink_tokens", 0))
    of_scores = {name: options.pop(name, None) for name in ("softcap", "rotary", "query_weight")}
    softmax = ScoreOptions(written_out=True, **of_scores)
    maps = dict(zip(("query_map", "key_map"), options.pop("feature_maps", ()), strict=False))
    rule = memory_rule(**maps, **options)
    outputs, weights = [], []
    for begin, end in zip(edges, edges[1:], strict=False):
        now = {name: None if tensor is None else tensor[:, begin:end] for name, tensor in of_tokens.items()}
        layout = segment_layout(len(case.query), end - begin, *window, state=state, **now)
        pieces = Projections(*(None if tensor is None else tensor[:, :, begin:end] for tensor in tensors))
        call = {"softmax": softmax, "return_state": True, "return_weights": True}
        output, state, weight = attend(pieces, case.gate, layout, rule, state=state, **call)
        weight.retain_grad()
        outputs.append(output)
        weights.append(weight)
    return torch.cat(outputs, 2), weights


@examples(30)
@given(cut_cases())
def test_a_gradient_reaches_the_weights(cut):
    """Output = share · memory + (1 − share) · weights · values, so a weight's gradient is its value's times 1 − share."""
    case, cuts = cut
    if case.options["denominator"] == "shared":
        case.gate = torch.full_like(case.gate, -80.0)  # else the share depends on what the memory finds
    for tensor in (case.query, case.key, case.value):
        tensor.requires_grad_()
    output, weights = with_weights(case, cuts)
    upstream = torch.randn_like(output)
    (output * upstream).sum().backward()
    weights, found = torch.cat([w.detach() for w in weights], 2), torch.cat([w.grad for w in weights], 2)
    value = case.value.detach().repeat_interleave(case.query.shape[1] // case.key.shape[1], 1)
    length, kept, sinks = case.segment_length, case.options["local_segments"], case.options.get("sink_tokens", 0)
    names = ("attention_mask", "position_ids", "memory_mask")
    real, positions, memory_mask = (case.options.get(name) for name in names)
    for row in range(len(value)):
        document, last = [], -1
        for token in range(value.shape[2]):
            if real is not None and not real[row, token]:
                assert not weights[row, :, token].any()
                continue
            position = last + 1 if positions is None else int(positions[row, token])
            document, last = ([] if position <= last else document) + [token], position
            number = len(document) - 1
            first = (number // length - kept) * length  # token in slot 0 of the window
            seen = range(max(first, 0), number + 1)
            slots, keys = [sinks + place - first for place in seen], [document[place] for place in seen]
            if first > 0:
                slots, keys = [*range(sinks), *slots], document[:sinks] + keys
            torch.testing.assert_close(weights[row, :, token, slots].sum(-1), torch.ones(value.shape[1]).double())
            written = [token for token in document[sinks : max(first, 0)] if memory_mask is None or memory_mask[row, token]]
            share = torch.sigmoid(case.gate) if written else torch.zeros_like(case.gate)
            wanted = (1 - share)[:, None] * (value[row][:, keys] * upstream[row, :, token, None]).sum(-1)
            # float64, sums of up to 9 products
            torch.testing.assert_close(found[row, :, token, slots], wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("make", "options", "implementation"),
    [
        (infini_gpt2, {"local_segments": 1}, "sdpa"),
        (infini_gpt2, {"denominator": "shared", "feature_map": "exp", "position_encoding": "rope"}, "eager"),
        (causal_mha, {"attention": "infini", "segment_length": 8}, "eager"),
        (causal_mha, {"attention": "local", "sliding_window": 5}, "sdpa"),
    ],
)
def test_attribution_by_weight_times_gradient(make, options, implementation):
    model, ids = make(**options, attn_implementation=implementation), token_ids(2, 30)
    mask = torch.ones_like(ids)
    mask[1, :7] = 0
    output = model(ids, attention_mask=mask, output_attentions=True, use_cache=False)
    for weights in output.attentions:
        weights.retain_grad()
    output.logits[:, -1].max(-1).values.sum().backward()
    for weights in output.attentions:
        assert weights.grad is not None and (weights * weights.grad).abs().sum((1, 2, 3)).min() > 0
        assert not (weights * weights.grad)[1, :, :7].any()
