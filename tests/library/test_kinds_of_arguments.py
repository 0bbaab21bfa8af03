"""Arguments of another kind than a function takes: refused by name, before anything is computed, changed or written."""

import inspect
import typing

import pytest
import torch
from torch import Tensor, nn

import hf_infini
from cases import plain_case
from hf_infini import CausalMultiHeadAttention, InfiniCache, InfiniState, infini_attention, naive_infini_attention
from hf_infini.cache import files
from hf_infini.tools import parallel
from hf_infini.tools.training import gate_values, parameter_groups
from models import causal_mha, infini_gpt2, token_ids

CHECKED = [infini_attention, naive_infini_attention, InfiniState.initial, CausalMultiHeadAttention.__init__]
CHECKED += [InfiniCache.__init__, InfiniCache.attention_mask, InfiniCache.save_pretrained, InfiniCache.from_pretrained]
CHECKED += [files.describe_model, files.read_memory_file]
CHECKED += [parallel.shard_rows, parallel.read_rows, parallel.check_shards, parameter_groups, gate_values]
CHECKED += [hf_infini.inspect_attention, hf_infini.fit_keep_score]
LINEAR = nn.Linear(2, 2)
# Values that are not of a type, though near; all others are an object's
NEAR = {Tensor: ("abc", 1.5, LINEAR, [1, 0], True), int: ("8", 2.5, True, torch.tensor(3)), float: ("1", [1.0], True)}
NEAR |= {str: (3, LINEAR, ["linear"]), nn.Module: ("gpt2", 3, [LINEAR])}


@pytest.mark.parametrize("function", CHECKED, ids=lambda function: function.__qualname__)
def test_another_kind_is_refused_by_name(function):
    hints, refusals = typing.get_type_hints(function), 0
    for name in inspect.signature(function).parameters:
        kinds = {hints.get(name), *typing.get_args(hints.get(name))}
        if not kinds <= {None, typing.Any}:
            near = [value for kind in kinds for value in NEAR.get(kind, ())] if len(kinds - {type(None)}) == 1 else []
            for wrong in (object(), *near, *([] if type(None) in kinds else [None])):
                with pytest.raises(ValueError, match=f"^{name} must be of type "):
                    function(**{name: wrong})
                refusals += 1
    assert refusals


@pytest.mark.parametrize("make", [infini_gpt2, lambda: causal_mha(attention="infini", segment_length=8)])
def test_inputs_of_a_model(make):
    model, ids = make(), token_ids(2, 12)
    wrong = [{"input_ids": None}, {"input_ids": ids, "position_ids": ids.float()}]
    wrong += [{"input_ids": ids, "attention_mask": torch.ones(2)}]
    wrong += [{"input_ids": ids, "attention_mask": torch.zeros(2, 12).index_fill(1, torch.tensor([0]), -torch.inf)}]
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
    given = {"query": case.query, "key": case.key, "value": case.value, "gate": case.gate, "segment_length": 5}
    with pytest.raises(ValueError, match=f"{next(iter(change))}.* must be"):
        function(**given | change)


@pytest.mark.parametrize("tokens, size", [(64, 0), (-16, 2)])
def test_numbers_of_shards_that_cannot_be(tokens, size):
    with pytest.raises(ValueError, match="(tokens|size) must be at least 1; got"):
        parallel.check_shards(infini_gpt2().config, tokens, size)
