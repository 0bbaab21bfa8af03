"""Numbers and inputs that mean nothing: refused by name, before anything is computed."""

import pytest
import torch

from cases import plain_case
from hf_infini import infini_attention, naive_infini_attention
from hf_infini.tools import parallel
from models import causal_mha, infini_gpt2, token_ids


@pytest.mark.parametrize(
    "make", [infini_gpt2, lambda: causal_mha(attention="infini", segment_length=8)]
)
def test_inputs_of_a_model(make):
    model, ids = make(), token_ids(2, 12)
    wrong = [{"input_ids": None}, {"input_ids": ids, "position_ids": ids.float()}]
    wrong += [{"input_ids": ids, "attention_mask": torch.ones(2)}]
    wrong += [
        {
            "input_ids": ids,
            "attention_mask": torch.zeros(2, 12).index_fill(1, torch.tensor([0]), -torch.inf),
        }
    ]
    for given in wrong:
        with pytest.raises(ValueError, match=[*given][-1]):
            model(**given)


@pytest.mark.parametrize(
    "change",
    [
        {"scaling": float("nan")},
        {"softcap": 0.0},
        {"dropout": 1.0},
        {"eps": -1.0},
        {"query": torch.zeros(2, 2, 24, 4, dtype=torch.int64)},
        {"value": torch.zeros(2, 2, 24, 4, dtype=torch.float64)},
        {"position_ids": torch.zeros(2, 24)},
    ],
)
@pytest.mark.parametrize("function", [infini_attention, naive_infini_attention])
def test_numbers_that_mean_nothing(function, change):
    case = plain_case(dtype=torch.float32)
    given = {
        "query": case.query,
        "key": case.key,
        "value": case.value,
        "gate": case.gate,
        "segment_length": 5,
    }
    with pytest.raises(ValueError, match=f"{next(iter(change))}.* must be"):
        function(**given | change)


@pytest.mark.parametrize("tokens, size", [(64, 0), (-16, 2)])
def test_numbers_of_shards_that_cannot_be(tokens, size):
    with pytest.raises(ValueError, match="(tokens|size) must be at least 1; got"):
        parallel.check_shards(infini_gpt2().config, tokens, size)
