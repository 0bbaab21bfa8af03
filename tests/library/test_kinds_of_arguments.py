"""Arguments of another kind than a function takes: refused by name, before anything is computed, changed or written."""

import pytest
import torch
from torch import nn

import hf_infini
from cases import plain_case
from decoders import decoder
from hf_infini import InfiniCache, InfiniState, infini_attention, inspect_attention, naive_infini_attention
from hf_infini.cache.files import read_memory_file, read_record
from hf_infini.models.loading import load_causal_lm, load_tokenizer
from hf_infini.tools.parallel.shards import check_shards, shard_rows
from hf_infini.tools.training import parameter_groups
from models import causal_mha, gpt2, infini_gpt2, token_ids

LINEAR = nn.Linear(2, 2)
WRONG = {  # values of other kinds; None too, unless there is a question mark
    "tensor": ("abc", 1.5, LINEAR, [1, 0], True),
    "count": ("8", 2.5, LINEAR, [4], True, torch.tensor(3)),
    "number": ("1", LINEAR, [1.0], True),
    "text": (3, LINEAR, ["linear"]),
    "model": ("gpt2", LINEAR, 3),
    "config": ("gpt2", LINEAR, {"infini_layers": [0]}, gpt2()),
    "path": (3, LINEAR, ["a"]),
    "inputs": (3, LINEAR, [1.0], True),
    "module": ("gpt2", 3, [LINEAR]),
    "other": ("abc", 1.5, LINEAR, [1, 0], {"a": 1}),
}
MASKS = {"attention_mask": "tensor?", "position_ids": "tensor?", "memory_mask": "tensor?", "max_documents": "count?"}
OF_ATTENTION = dict.fromkeys(("query", "key", "value", "gate"), "tensor")
OF_ATTENTION |= dict.fromkeys(("segment_length", "local_segments", "sink_tokens"), "count")
OF_ATTENTION |= {"update_rule": "text", "feature_map": "text", "denominator": "text", "state": "other?", "rotary": "other?"}
OF_ATTENTION |= {"scaling": "number?", "softcap": "number?", "dropout": "number", "eps": "number", "log_weight": "tensor?"}
OF_ATTENTION |= {"query_weight": "tensor?", "feature_maps": "other?", **MASKS}


def attention(function):
    case = plain_case(dtype=torch.float32)
    given = {"query": case.query, "key": case.key, "value": case.value, "gate": case.gate, "segment_length": 5}
    kinds = {name: kind for name, kind in OF_ATTENTION.items() if name != "max_documents" or function is infini_attention}
    return function, given, kinds


def forward(model, *names):
    kinds = {"input_ids": "tensor"} | {name: MASKS[name] for name in names or MASKS}
    return model, {"input_ids": token_ids(2, 12)}, kinds


def cache():
    """A new one that has read two rows."""
    with torch.no_grad():
        return infini_gpt2()(token_ids(2, 12), use_cache=True).past_key_values


def written(folder, model):
    cache().save_pretrained(folder / "m", model)
    return folder / "m"


CALLS = {
    "infini_attention": lambda folder: attention(infini_attention),
    "naive_infini_attention": lambda folder: attention(naive_infini_attention),
    "InfiniState.initial": lambda folder: (
        InfiniState.initial,
        {"key": torch.zeros(1, 2, 3, 4), "value": torch.zeros(1, 2, 3, 4), "segment_length": 5},
        {"key": "tensor", "value": "tensor", "segment_length": "count", "local_segments": "count", "sink_tokens": "count"},
    ),
    "InfiniGPT2": lambda folder: forward(infini_gpt2()),
    "InfiniLlama": lambda folder: forward(hf_infini.patch_model(decoder("llama"), segment_length=8)),
    "CausalMHA infini": lambda folder: forward(causal_mha(attention="infini", segment_length=8)),
    "CausalMultiHeadAttention": lambda folder: (
        hf_infini.CausalMultiHeadAttention,
        {"d_in": 8, "d_out": 8, "num_heads": 2},
        {"d_in": "count", "d_out": "count", "num_heads": "count", "dropout": "number"},
    ),
    "save_pretrained": lambda folder: (
        cache().save_pretrained,
        {"path": folder / "new", "model": infini_gpt2()},
        {"path": "path", "model": "model", "text_sha256": "count?"},
    ),
    "from_pretrained": lambda folder: (
        InfiniCache.from_pretrained,
        {"path": written(folder, infini_gpt2()), "model": infini_gpt2()},
        {"path": "path", "model": "model"},
    ),
    **{
        function.__name__: lambda folder, function=function: (function, {}, {"path": "path"})
        for function in (read_record, read_memory_file, load_causal_lm, load_tokenizer)
    },
    "check_shards": lambda folder: (
        check_shards,
        {"config": infini_gpt2().config, "tokens": 64, "size": 2},
        {"config": "config", "tokens": "count?", "size": "count"},
    ),
    "shard_rows": lambda folder: (
        shard_rows,
        {"batch": {"input_ids": token_ids(1, 16)}, "config": infini_gpt2().config},
        {"batch": "tensor", "config": "config", "past": "other?"},
    ),
    "inspect_attention": lambda folder: (
        inspect_attention,
        {"model": gpt2(), "inputs": token_ids(1, 5)},
        {"model": "model", "inputs": "inputs", "tokenizer": "other?", "position_ids": "tensor?", "layers": "number?"},
    ),
    "parameter_groups": lambda folder: (
        parameter_groups,
        {"model": gpt2(), "learning_rate": 1e-3, "gate_learning_rate": 0.01, "weight_decay": 0.1},
        {"model": "module", "learning_rate": "number", "gate_learning_rate": "number?", "weight_decay": "number"},
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_another_kind_is_refused_by_name(name, tmp_path):
    function, given, kinds = CALLS[name](tmp_path)
    files = {file: file.read_bytes() for file in tmp_path.iterdir()}
    for argument, kind in kinds.items():
        for wrong in (*WRONG[kind.rstrip("?")], *(() if kind.endswith("?") else (None,))):
            with pytest.raises(ValueError, match=argument if wrong is not None else f"{argument}|input_ids"):
                function(**given | {argument: wrong})
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == files


@pytest.mark.parametrize("tokens, size", [(64, 0), (-16, 2), (64.0, 2)])
def test_numbers_of_shards_that_cannot_be(tokens, size):
    with pytest.raises(ValueError, match="(tokens|size) must be (at least 1; got|of type int)"):
        check_shards(infini_gpt2().config, tokens, size)


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
    function, given, _ = attention(function)
    with pytest.raises(ValueError, match=f"{next(iter(change))}.* must be"):
        function(**given | change)


@pytest.mark.parametrize("make", [infini_gpt2, causal_mha])
def test_inputs_of_other_shapes_and_dtypes(make):
    model, ids = make(), token_ids(2, 12)
    wrong = [{"input_ids": ids[0]}, {"inputs_embeds": torch.zeros(2, 12)}]
    wrong += [{"input_ids": ids, "position_ids": ids.float()}, {"input_ids": ids, "attention_mask": torch.ones(2)}]
    wrong += [{"input_ids": ids, "attention_mask": torch.zeros(2, 12).index_fill(1, torch.tensor([0]), -torch.inf)}]
    for given in wrong:
        with pytest.raises(ValueError, match=[*given][-1]):
            model(**given)
