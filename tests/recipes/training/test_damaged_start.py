"""Training starts from whole models only, and from those of the data's tokenizer."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from cli import UserError
from cli.model_options import ModelOptions, build_config, build_model
from corpora.tokenization import build_character_tokenizer
from hf_infini.models.loading import load_causal_lm, load_tokenizer

CONTEXT = 64
TOKENIZER = build_character_tokenizer(["O rato roeu a roupa do rei de Roma."])
SAME_SIZE = build_character_tokenizer(["O rato roeu a roupa do rei de Lima."])
SIZES = {"n_layer": 2, "n_embd": 16, "n_head": 2}


@pytest.fixture(params=["infini", "self"])
def folder(request, tmp_path):
    model = build_model(build_config(ModelOptions(**SIZES, attention=request.param), TOKENIZER, CONTEXT), None)
    model.save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    return tmp_path


def start(folder, tokenizer=TOKENIZER):
    return build_model(build_config(ModelOptions(init_from=str(folder)), tokenizer, CONTEXT), str(folder))


def test_a_model_that_is_damaged(folder):
    assert start(folder).config.n_layer == 2  # also a plain one, to which the memory is new
    file = folder / "model.safetensors"
    tensors = load_file(file)
    del tensors["transformer.h.1.ln_1.weight"]
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(UserError, match="--init_from: the weights of .* are incomplete: h.1.ln_1.weight is not there"):
        start(folder)
    tensors["transformer.h.1.ln_1.weight"] = torch.full((16,), torch.nan)
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(UserError, match="--init_from: the weights of .* hold NaN"):
        start(folder)
    file.write_bytes(file.read_bytes()[:-7])
    with pytest.raises(UserError, match="--init_from: .* cannot be loaded: SafetensorError"):
        start(folder)


def test_the_tokenizer_of_another_model(folder):
    """Of the same size, but its ids mean something else."""
    assert len(SAME_SIZE) == len(TOKENIZER)
    with pytest.raises(UserError, match="--init_from: .* was trained with another tokenizer"):
        start(folder, SAME_SIZE)
    model = load_causal_lm(folder)
    load_tokenizer(folder, model)
    SAME_SIZE.save_pretrained(folder)
    with pytest.raises(ValueError, match="is not the model's: its tokens have other ids"):
        load_tokenizer(folder, model)
