"""What has the right type and means nothing: ids of no token, rows that a cache does not have,
numbers that cannot be. Refused in words that name it, and nothing has changed."""

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import CONFIG_MAPPING, PreTrainedTokenizerFast

from decoders import TYPES, decoder, fitted, token_ids
from hf_infini import (
    InfiniCache,
    asking_rows,
    backend_of,
    estimate,
    fit_keep_score,
    infini_attention,
    inspect_attention,
    naive_infini_attention,
    patch_model,
)
from hf_infini.cache.files import describe_model
from memories import read

IDS = token_ids(1, 40)
NO_IDS = {
    "floating point": IDS.float(),
    "bool": IDS > 9,
    "below": IDS - 50,
    "beyond": IDS + 60,
    "without numbers": IDS.to("meta"),
}


def llama(**options):
    options = {"segment_length": 8, "kept_tokens": 6, "keep_score": "half"} | options
    return fitted(patch_model(decoder("llama"), **options))


@pytest.mark.parametrize("kind", NO_IDS)
@pytest.mark.parametrize(
    "call",
    [inspect_attention, lambda model, ids: fit_keep_score(model, ids, distance=9, progress=False)],
    ids=["inspect", "fit"],
)
def test_ids_of_no_token(call, kind):
    model, ids = llama(), NO_IDS[kind]
    before = model.lm_head.weight.clone()
    with pytest.raises(
        ValueError, match=r"(inputs|rows) must hold token ids, .* from 0 to 96; got"
    ):
        call(model, ids)
    assert torch.equal(model.lm_head.weight, before)


@pytest.mark.parametrize("inputs", [IDS[0], IDS[:, :0], {}, {"input_ids": [1]}, {"x": IDS}])
def test_inputs_of_another_form(inputs):
    with pytest.raises((ValueError, TypeError), match="inputs must"):
        inspect_attention(llama(), inputs)


ROWS = [torch.tensor(rows) for rows in ([2], [-3], [0.5], [], 0, [[0, 1]], [True])]


@pytest.mark.parametrize("rows", ROWS, ids=str)
@pytest.mark.parametrize("method", ["reorder_cache", "batch_select_indices"])
@pytest.mark.parametrize("layers", [None, [0, 2]])
def test_rows_that_a_cache_does_not_have(method, rows, layers):
    cache = read(llama(layers=layers), token_ids(2, 30))
    before = cache.tensors()
    with pytest.raises(ValueError, match="numbers of some of the cache's 2 rows"):
        getattr(cache, method)(rows)
    assert all(tensor is before[name] for name, tensor in cache.tensors().items())
    getattr(cache, method)(torch.tensor([1, 1, 0]))
    assert cache.batch_size == 3


@pytest.mark.parametrize("mask", [torch.ones(3), torch.ones(2, 3, 4), torch.ones(5, 2)])
def test_masks_of_another_form(mask):
    cache = read(llama(), token_ids(2, 30))
    with pytest.raises(ValueError, match=r"attention_mask must be \[2, tokens\]"):
        cache.attention_mask(mask)
    assert cache.attention_mask(torch.ones(2, 4)).shape == (2, 34)


def test_a_cache_is_saved_as_that_of_its_own_model_only(tmp_path):
    model, other, file = llama(), llama(), tmp_path / "a.safetensors"
    other.model.layers[0].mlp.up_proj.weight.data.mul_(2)
    cache, plain = read(model, IDS), decoder("llama")
    with pytest.raises(ValueError, match="this cache is of another model: .*up_proj"):
        cache.save_pretrained(file, other)
    with pytest.raises(ValueError, match="a LlamaForCausalLM has no memory"):
        cache.save_pretrained(file, plain)
    with pytest.raises(ValueError, match="what describe_model says of it, with config, dtype"):
        cache.save_pretrained(file, {"dtype": "float32"})
    assert not any(tmp_path.iterdir())
    for told in (model, describe_model(model), llama()):  # the last has the same weights
        cache.save_pretrained(file, told)
        again = InfiniCache.from_pretrained(file, model)
        assert all(
            torch.equal(part, cache.tensors()[name]) for name, part in again.tensors().items()
        )


@pytest.mark.parametrize("function", [infini_attention, naive_infini_attention])
@pytest.mark.parametrize("number", [0.0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["scaling", "softcap", "eps"])
def test_numbers_that_give_none(function, name, number):
    tensors = [torch.ones(1, 2, 9, 4)] * 3
    with pytest.raises(ValueError, match=f"{name} must be .*; got {number}"):
        function(*tensors, torch.zeros(2), 4, **{name: number})


@pytest.mark.parametrize("name", ["batch", "tokens"])
@pytest.mark.parametrize("number", [0, -1])
def test_calls_of_no_token(name, number):
    with pytest.raises(ValueError, match=f"{name} must be at least 1; got {number}"):
        backend_of(llama(), **{name: number})


@pytest.mark.parametrize("name", ["memory_mask", "position_ids"])
def test_arguments_of_a_call_that_are_no_tensors(name):
    with pytest.raises(TypeError, match=f"{name} must be a tensor; got 'x'"):
        llama()(IDS, **{name: "x"})


def test_halves_of_characters():
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0}, "a")))
    with pytest.raises(ValueError, match="halves of characters"):
        asking_rows(tokenizer, "a text with \ud800 in it")


NO_MEMORY = {"deepseek_v2": "latent", "deepseek_v3": "latent", "bloom": "ALiBi", "mpt": "ALiBi"}
NO_MEMORY |= {"falcon": "attention interface", "bert": "cannot have", "vit": "cannot have"}


@pytest.mark.parametrize("model_type", NO_MEMORY)
def test_models_that_cannot_have_a_memory_have_no_estimate(model_type):
    assert model_type not in TYPES
    with pytest.raises(ValueError, match=NO_MEMORY[model_type]):
        estimate(CONFIG_MAPPING[model_type](), 100, segment_length=8)
