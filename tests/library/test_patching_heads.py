"""Whole models with each head that transformers has for GPT-2: patched, saved, loaded, with their
code only, unpatched."""

import pytest
import torch
import transformers
from transformers import GPT2Config

import hf_infini
from hf_infini import patch_model, unpatch_model
from hf_infini.layers.memory_layer import gates_of
from models import SIZES, token_ids

# The stock class, and the Auto class that loads it
HEADS = {"GPT2LMHeadModel": "AutoModelForCausalLM"}
HEADS |= {
    f"GPT2For{task}": f"AutoModelFor{task}"
    for task in ("SequenceClassification", "TokenClassification")
}
HEADS |= {"GPT2ForQuestionAnswering": "AutoModelForQuestionAnswering"}
OPTIONS = {"segment_length": 8, "gate_init": 0.5}


@pytest.fixture(params=HEADS)
def name(request) -> str:
    return request.param


def stock(name: str, **options):
    torch.manual_seed(0)
    options = {
        "initializer_range": 0.2,
        "pad_token_id": 0,
        "num_labels": 3,
        "classifier_dropout": 0.25,
    } | options
    return getattr(transformers, name)(GPT2Config(**SIZES | options)).eval()


def infini_class(name: str) -> type:
    return getattr(hf_infini, f"Infini{name}")


@torch.no_grad()
def outputs(model, ids) -> list[torch.Tensor]:
    """Of the heads, without the cache."""
    return [value for key, value in model(ids, use_cache=False).items()]


def options_of(model) -> dict:
    """The configuration, without where it was loaded from and what saving notes in it."""
    notes = ("_name_or_path", "architectures", "dtype")
    return {key: value for key, value in model.config.to_dict().items() if key not in notes}


def assert_same(left: list, right: list) -> None:
    """The last bit of a product of one row depends on where the row is in memory."""
    assert len(left) > 0
    torch.testing.assert_close(left, right, rtol=1e-6, atol=1e-6)


def test_patched_saved_loaded_and_unpatched(name, tmp_path):
    model, ids = stock(name), token_ids(2, 40)
    saved, wanted = options_of(model), outputs(model, ids)
    patch_model(model, **OPTIONS, layers=[0, 2])
    patched = outputs(model, ids)
    assert type(model) is infini_class(name) and len(gates_of(model)) == 2
    assert not any(
        torch.allclose(one, other, atol=1e-3) for one, other in zip(patched, wanted, strict=True)
    )
    model.save_pretrained(tmp_path)
    for loader in (infini_class(name), getattr(transformers, HEADS[name])):
        loaded = loader.from_pretrained(tmp_path)
        assert type(loaded) is infini_class(name) and options_of(loaded) == options_of(model)
        assert_same(outputs(loaded, ids), patched)
        assert_same(outputs(unpatch_model(loaded), ids), wanted)
    unpatch_model(model)
    assert type(model) is getattr(transformers, name) and options_of(model) == saved
    assert_same(outputs(model, ids), wanted)
