"""output_attentions: an entry for every layer, and weights that give the output of the window."""

import pytest
import torch
from hypothesis import given

from cases import cut_cases, examples
from hf_infini.ops.attention import attend
from hf_infini.ops.equations import ScoreOptions
from hf_infini.ops.keeping import SCORES
from hf_infini.ops.layout.grid import segment_layout
from hf_infini.ops.rules import memory_rule
from hf_infini.ops.state import AttentionCall, InfiniState, Tokens
from hf_infini.options import Window
from models import infini_gpt2, token_ids


@pytest.mark.parametrize("layers", [[1], [0, 2]])
def test_every_layer_returns_weights_with_the_eager_implementation(layers):
    model, ids = infini_gpt2(layers=layers), token_ids(2, 20)
    generation = {
        "max_new_tokens": 2,
        "pad_token_id": 0,
        "return_dict_in_generate": True,
        "output_attentions": True,
    }
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
    of_tokens = {
        name: options.pop(name, None) for name in ("attention_mask", "position_ids", "memory_mask")
    }
    window = case.window()
    options = {name: option for name, option in options.items() if name not in Window._fields}
    of_scores = {name: options.pop(name, None) for name in ("softcap", "rotary", "far_rotary")}
    softmax = ScoreOptions(written_out=True, **of_scores)
    rule = memory_rule(**options)
    outputs, weights = [], []
    for begin, end in zip(edges, edges[1:], strict=False):
        now = {
            name: None if tensor is None else tensor[:, begin:end]
            for name, tensor in of_tokens.items()
        }
        layout = segment_layout(len(case.query), end - begin, window, state=state, **now)
        query, *pieces = (None if tensor is None else tensor[:, :, begin:end] for tensor in tensors)
        if state is None:
            weighted = pieces[-1] is not None
            state = InfiniState.initial(case.key, case.value, *window, rule=rule, weighted=weighted)
        output, state, weight = attend(
            AttentionCall(
                query,
                Tokens(*pieces),
                case.gate,
                layout,
                rule,
                softmax,
                state,
                SCORES["attention"],
                return_state=True,
            )
        )
        outputs.append(output)
        weights.append(weight)
    return torch.cat(outputs, 2), torch.cat(weights, 2)


@examples(30)
@given(cut_cases())
def test_weights_are_those_of_the_tokens_in_their_places(cut):
    """With the memory shut, the output is weights · values."""
    case, cuts = cut
    case.gate = torch.full_like(case.gate, -800.0)
    output, weights = with_weights(case, cuts)
    value = case.value.repeat_interleave(case.query.shape[1] // case.key.shape[1], 1)
    length, kept, sinks = (
        case.segment_length,
        case.options["local_segments"],
        case.options.get("sink_tokens", 0),
    )
    real, positions = (case.options.get(name) for name in ("attention_mask", "position_ids"))
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
            slots, keys = (
                [sinks + place - first for place in seen],
                [document[place] for place in seen],
            )
            if first > 0:
                slots, keys = [*range(sinks), *slots], document[:sinks] + keys
            found = weights[row, :, token, slots]
            torch.testing.assert_close(found.sum(-1), torch.ones(value.shape[1]).double())
            wanted = (found.unsqueeze(1) @ value[row][:, keys]).squeeze(1)
            # float64, sums of some products
            torch.testing.assert_close(output[row, :, token], wanted, rtol=1e-9, atol=1e-9)
