"""infini_attention given nothing, and given what does not fit together: the message says what is wrong."""

import pytest
import torch
from torch.nn import functional as F

from cases import assert_same_state, plain_case
from hf_infini import InfiniState, infini_attention
from hf_infini.ops.positions import rotation
from hf_infini.ops.window import Rotary


@pytest.mark.parametrize(
    ("batch", "tokens", "options", "masks", "max_documents"),
    [
        (2, 0, {"update_rule": "delta", "local_segments": 1}, False, None),
        (2, 0, {"denominator": "shared"}, True, 2),
        (0, 5, {"update_rule": "delta", "local_segments": 1}, True, None),
        (0, 1, {"denominator": "shared"}, False, 2),
        (0, 0, {"denominator": "shared"}, True, None),
    ],
)
def test_no_tokens_give_no_output_and_leave_the_state_as_it_was(batch, tokens, options, masks, max_documents):
    case = plain_case(batch=batch, heads=4, tokens=tokens, dtype=torch.float32, max_documents=max_documents, **options)
    if masks:
        ones = torch.ones(batch, tokens, dtype=torch.long)
        case.options |= {"attention_mask": ones, "memory_mask": ones, "position_ids": ones}
    leaves = case.leaves()
    output, state = case.call(infini_attention, leaves)
    wanted = F.scaled_dot_product_attention(*leaves[:3], enable_gqa=True)
    assert output.shape == wanted.shape and output.dtype == wanted.dtype
    assert all(bool((gradient == 0).all()) for gradient in torch.autograd.grad(output.sum(), leaves))
    fresh = InfiniState.initial(case.key, case.value, 5, options.get("local_segments", 0))
    assert_same_state(state, fresh, 0)
    _, later = plain_case(batch=batch, heads=4, tokens=7, dtype=torch.float32, **options).call(infini_attention)
    for given in (state, later):
        assert_same_state(case.call(infini_attention, state=given)[1], given, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"segment_length": 0}, "segment_length must be ≥ 1"),
        ({"update_rule": "sum"}, "linear, delta, gated_delta, got 'sum'"),
        ({"feature_map": "relu"}, "feature_map must be one of elu, exp, got 'relu'"),
        ({"denominator": "one"}, "denominator must be one of separate, shared, got 'one'"),
        ({"local_segments": -1}, "local_segments ≥ 0"),
        ({"gate": torch.zeros(3)}, r"gate must be \[heads\] = \[2\], got \[3\]"),
        ({"key": torch.zeros(2, 2, 23, 4)}, "must agree with query"),
        ({"key": torch.zeros(2, 3, 24, 4), "value": torch.zeros(2, 3, 24, 4)}, "3 key/value heads must divide the 2"),
        ({"query": torch.zeros(2, 24, 8)}, r"must be \[batch, heads, tokens, head_dim\]"),
        ({"attention_mask": torch.ones(2, 30)}, r"attention_mask must be \[batch, tokens\] = \[2, 24\], got \[2, 30\]"),
        ({"position_ids": torch.ones(3, 24)}, "position_ids must be"),
        ({"state": "of another length"}, "the state does not fit this call"),
        ({"log_weight": torch.zeros(2, 2, 24, 1), "state": "of this length"}, "log_weight must be given in every call"),
        ({"update_rule": "gated_delta", "state": "of this length"}, "its width is that of a head, and 0 with a rule"),
        ({"update_rule": "gated_delta", "denominator": "shared"}, "does not go with denominator='shared': its memory"),
        ({"update_rule": "gated_delta", "log_weight": torch.zeros(2, 2, 24, 1)}, r"log_weight must be \[2, 2, 24, 2\], got"),
        ({"log_weight": torch.zeros(2, 2, 24)}, r"log_weight must be \[2, 2, 24, 1\], got \[2, 2, 24\]"),
        ({"query_weight": torch.zeros(4, 4)}, r"query_weight must be \[2, 4, 4\], got \[4, 4\]"),
        ({"sink_tokens": 5}, "sink_tokens from 0 to segment_length - 1 and kept_tokens ≥ 0, got 5, 0, 5 and 0"),
        ({"rotary": Rotary(rotation(torch.arange(5), 4, torch.float32)), "sink_tokens": 1}, "rotary has 5 places.*has 6"),
    ],
)
def test_errors_say_what_is_wrong(change, message):
    case = plain_case(dtype=torch.float32)
    arguments = {"query": case.query, "key": case.key, "value": case.value, "gate": case.gate, "segment_length": 5} | change
    if "state" in change:
        length = 5 if change["state"] == "of this length" else 6
        arguments["state"] = InfiniState.initial(case.key, case.value, length)
    with pytest.raises(ValueError, match=message):
        infini_attention(**arguments)
