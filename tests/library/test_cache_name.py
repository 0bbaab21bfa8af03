"""A cache goes by the name of the installed transformers, and by its old and new one in every
call."""

import inspect

import pytest
import torch

from decoders import decoder
from hf_infini import patch_model
from hf_infini.compat.cache_name import CACHE, NAMES, cache_of, with_one_name
from models import FLOAT32, causal_mha, infini_gpt2, token_ids

MODELS = {
    "llama": lambda: patch_model(decoder("llama"), segment_length=8).eval(),
    "gpt2": lambda: infini_gpt2(position_encoding="segment"),
    "causal_mha": lambda: causal_mha(
        attention="infini", segment_length=8, position_encoding="rope"
    ),
    "no memory": lambda: causal_mha(position_encoding="rope"),
}
old_name_warns = pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")


@pytest.fixture(params=MODELS)
def model(request):
    return MODELS[request.param]()


def test_it_is_what_transformers_calls_it():
    assert CACHE in inspect.signature(type(decoder("llama")).forward).parameters
    assert (
        CACHE in inspect.signature(type(decoder("llama")).prepare_inputs_for_generation).parameters
    )


@old_name_warns
@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_either_name_continues(model, name):
    ids = token_ids(2, 30) % model.config.vocab_size
    for part in (model, model.base_model):
        whole = part(ids)[0][:, 13:]
        first = part(ids[:, :13], use_cache=True)
        cache = cache_of(first)
        assert cache is first[CACHE] and cache.get_seq_length() == 13
        second = part(ids[:, 13:], use_cache=True, **{name: cache})
        assert cache_of(second) is cache and cache.get_seq_length() == 30
        torch.testing.assert_close(second[0], whole, rtol=FLOAT32, atol=FLOAT32)


def test_without_a_cache_nothing_changes():
    given = {"use_cache": True}
    assert with_one_name(given) == given and with_one_name({"past_key_values": None}) == {
        "cache": None
    }
    assert with_one_name({"cache": None, "past_key_values": 1, "a": 2}, "past_key_values") == {
        "past_key_values": 1,
        "a": 2,
    }


@torch.no_grad()
def test_both_names_are_refused(model):
    ids = token_ids(1, 5) % model.config.vocab_size
    cache = cache_of(model(ids, use_cache=True))
    with pytest.raises(TypeError, match="cache and past_key_values are two names of one argument"):
        model.base_model(ids, cache=cache, past_key_values=cache)
