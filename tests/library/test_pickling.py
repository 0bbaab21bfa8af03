"""Models, layers and configurations as other processes get them: by pickle, by torch.save, as an argument of a worker."""

import copy
import io
import pickle
import sys

import pytest
import torch
from transformers import LlamaForCausalLM

from decoders import decoder, token_ids
from hf_infini import patch_model, unpatch_model
from hf_infini.models.families import infini_class
from hf_infini.models.structure import attention_layers, decoder_of
from models import causal_mha
from running import run

IDS = token_ids(2, 40) % 89
NAMES = ("olmoe", "gpt2", "causal_mha")


def made(name: str):
    options = {"segment_length": 8}
    return causal_mha(attention="infini", **options) if name == "causal_mha" else patch_model(decoder(name), **options)


def logits(model):
    with torch.no_grad():
        return model(IDS, use_cache=False).logits


class Mine(infini_class(LlamaForCausalLM)):
    """A user's own."""


LOADED = """
import pickle, sys
import torch

for folder in sys.argv[1:]:
    with open(folder + "/pickled", "rb") as file:
        config, layer, model = pickle.load(file)
    ids, wanted = torch.load(folder + "/tensors")
    saved = torch.load(folder + "/saved", weights_only=False)
    with torch.no_grad():
        for each in (model, saved):
            assert torch.equal(each(ids, use_cache=False).logits, wanted)
    assert type(model) is type(saved) and type(config) is type(model.config) and type(layer) in map(type, model.modules())

    model.save_pretrained(folder + "/again")
    assert "AutoModelForCausalLM" in model.config.auto_map
    import transformers
    assert type(transformers.AutoModelForCausalLM.from_config(config)) is type(model)
"""


@pytest.mark.slow
def test_another_process_reads_what_one_has_written(tmp_path):
    """One that has imported neither hf_infini nor transformers."""
    folders = [tmp_path / name for name in NAMES]
    for folder in folders:
        model = made(folder.name)
        model.save_pretrained(folder / "wanted")
        layer = next(part for part in model.modules() if type(part).__name__.endswith("Attention"))
        (folder / "pickled").write_bytes(pickle.dumps((copy.deepcopy(model.config), layer, model)))
        torch.save((IDS, logits(model)), folder / "tensors")
        torch.save(model, folder / "saved")
    run(sys.executable, "-c", LOADED, *folders)
    for folder in folders:  # also by the same names: of experts, files have others than models
        files = [(folder / saved / "model.safetensors").read_bytes() for saved in ("wanted", "again")]
        assert files[0] == files[1]


@pytest.mark.parametrize(("name", "protocol"), [("llama", 0), ("gpt2", pickle.HIGHEST_PROTOCOL)])
def test_copies_are_of_the_same_classes_and_can_be_unpatched(name, protocol):
    model = made(name)
    stored = io.BytesIO()
    torch.save(model, stored)
    stored.seek(0)
    copies = pickle.loads(pickle.dumps(model, protocol)), torch.load(stored, weights_only=False), copy.deepcopy(model)
    wanted, plain = logits(model), logits(unpatch_model(copy.deepcopy(model)))
    for each in copies:
        assert type(each) is type(model) and type(each.config) is type(model.config) and torch.equal(logits(each), wanted)
        layers = attention_layers(decoder_of(each))
        assert {type(layer) for layer in layers} == {type(layer) for layer in attention_layers(decoder_of(model))}
        assert torch.equal(logits(unpatch_model(each)), plain)


def test_a_subclass_is_found_by_its_own_name():
    model = Mine(made("llama").config).eval()
    found = pickle.loads(pickle.dumps(model))
    assert type(found) is Mine and torch.equal(logits(found), logits(model))
    assert pickle.loads(pickle.dumps([Mine, Mine.__base__])) == [Mine, infini_class(LlamaForCausalLM)]
