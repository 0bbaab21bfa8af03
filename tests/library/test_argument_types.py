"""Arguments of another type: a TypeError that names the argument, for every parameter of the public
functions, and of a cache's methods, that has a type."""

import inspect
from typing import Any

import numpy
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

import hf_infini
from decoders import decoder
from hf_infini import InfiniCache, estimate, patch_model
from hf_infini.ops.checks import check_types

FUNCTIONS = [
    "Reader",
    *("asking_rows", "backend_of", "cache_bytes", "estimate", "fit_keep_score", "infini_attention"),
    *("inspect_attention", "load_adapter", "lora_config", "patch_model", "save_adapter"),
    *("naive_infini_attention", "text_rows", "unpatch_model"),
    *("InfiniCache.save_pretrained", "InfiniCache.from_pretrained", "InfiniCache.attention_mask"),
    *("InfiniCache.reorder_cache", "InfiniCache.batch_repeat_interleave"),
    "InfiniCache.batch_select_indices",
]
VARIADIC = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)


CACHE = InfiniCache(patch_model(decoder("llama"), segment_length=8).config)


class Other:
    """Of no type that anything takes."""


def called_by(name: str):
    owner, _, own = name.rpartition(".")
    return getattr(CACHE if owner else hf_infini, own)


def cases():
    for name in FUNCTIONS:
        for parameter in inspect.signature(called_by(name)).parameters.values():
            if parameter.kind not in VARIADIC:
                yield name, parameter.name


@pytest.mark.parametrize(("function", "parameter"), [*cases()])
def test_each_parameter_is_named(function, parameter):
    """All of them have a type, and the others are not looked at, as they are not given."""
    called, own = called_by(function), function.rpartition(".")[2]
    required = {
        each.name: WHOLE.get(each.name, Other())
        for each in inspect.signature(called).parameters.values()
        if each.default is inspect.Parameter.empty and each.kind not in VARIADIC
    }
    with pytest.raises(TypeError, match=f"{parameter} of {own} must be of type .*Other"):
        called(**required | {parameter: Other()})


WHOLE: dict[str, Any] = {
    "model": torch.nn.Linear(1, 1),
    "tokenizer": PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0}, "a"))),
    "config": decoder("llama").config,
    "rows": [],
    "text": "",
    "path": "nowhere",
    "folder": "nowhere",
    "inputs": "",
    "tokens": 1,
    "segment_length": 1,
    **dict.fromkeys(("query", "key", "value", "gate"), torch.ones(1)),
}


def test_numbers_of_other_libraries_are_numbers_and_true_is_none():
    config = decoder("llama").config
    wanted = estimate(config, 100, segment_length=8)
    assert estimate(config, numpy.int64(100), segment_length=8) == wanted
    for tokens in (True, "100", None, 1e2):
        with pytest.raises(TypeError, match="tokens of estimate must be of type int; got"):
            estimate(config, tokens, segment_length=8)


def test_calls_without_an_argument_are_told_by_python():
    with pytest.raises(TypeError, match=r"estimate\(\) missing 1 required positional argument"):
        estimate(decoder("llama").config)


def test_a_graph_of_torch_compile_has_no_checks():
    compiled = torch.compile(check_types(lambda x: x + 1), fullgraph=True, backend="eager")
    assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 2.0))
