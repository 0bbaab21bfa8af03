"""infini_attention given what does not fit together: the message says what is wrong."""

import pytest
import torch

from cases import plain_case
from hf_infini import InfiniState, infini_attention
from hf_infini.ops.positions import rotation
from hf_infini.options import UPDATE_RULES


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"segment_length": 0}, "segment_length must be ≥ 1"),
        ({"update_rule": "sum"}, f"{', '.join(UPDATE_RULES)}, got 'sum'"),
        ({"feature_map": "relu"}, "feature_map must be one of elu, exp, got 'relu'"),
        ({"local_segments": -1}, "local_segments ≥ 0"),
        ({"gate": torch.zeros(3)}, r"gate must be \[2\] beside this query, got \[3\]"),
        (
            {"key": torch.zeros(2, 2, 23, 4)},
            r"key must be \[2, 2, 24, 4\] beside this query, got \[2, 2, 23, 4\]",
        ),
        (
            {"key": torch.zeros(2, 3, 24, 4), "value": torch.zeros(2, 3, 24, 4)},
            "3 key/value heads must divide the 2",
        ),
        ({"query": torch.zeros(2, 24, 8)}, r"must be \[batch, heads, tokens, head_dim\]"),
        ({"query": torch.zeros(2, 2, 0, 4)}, "with a row and a token at least"),
        (
            {"attention_mask": torch.ones(2, 30)},
            r"attention_mask must be \[batch, tokens\] = \[2, 24\], got \[2, 30\]",
        ),
        ({"position_ids": torch.ones(3, 24)}, "position_ids must be"),
        ({"state": "of another length"}, "the state does not fit this call"),
        (
            {"log_weight": torch.zeros(2, 2, 24, 1), "state": "of this length"},
            "local_log_weight is None, and",
        ),
        (
            {"update_rule": "gated_delta", "state": "of this length"},
            "normaliser is .*, and the call needs",
        ),
        (
            {"update_rule": "gated_delta", "log_weight": torch.zeros(2, 2, 24, 1)},
            r"must be \[2, 2, 24, 2\] beside",
        ),
        ({"log_weight": torch.zeros(2, 2, 24)}, r"log_weight must be \[2, 2, 24, 1\] beside"),
        (
            {"sink_tokens": 5},
            "sink_tokens from 0 to segment_length - 1 and kept_tokens ≥ 0, got 5, 0, 5 and 0",
        ),
        (
            {"rotary": rotation(torch.arange(5), 4, torch.float32), "sink_tokens": 1},
            "rotary has 5 places.*has 6",
        ),
    ],
)
def test_errors_say_what_is_wrong(change, message):
    case = plain_case(dtype=torch.float32)
    arguments = {
        "query": case.query,
        "key": case.key,
        "value": case.value,
        "gate": case.gate,
        "segment_length": 5,
    } | change
    if "state" in change:
        length = 5 if change["state"] == "of this length" else 6
        arguments["state"] = InfiniState.initial(case.key, case.value, length)
    with pytest.raises(ValueError, match=message):
        infini_attention(**arguments)
