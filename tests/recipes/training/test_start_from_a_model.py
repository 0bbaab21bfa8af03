"""Training that starts from a model: a whole one, of the data's tokenizer, perhaps with a shorter
convolution."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from cli import UserError
from cli.model_options import ModelOptions, build_config, build_model
from corpora.tokenization import build_character_tokenizer

CONTEXT = 64
TOKENIZER = build_character_tokenizer(["O rato roeu a roupa do rei de Roma."])
SAME_SIZE = build_character_tokenizer(["O rato roeu a roupa do rei de Lima."])


def start(folder, tokenizer=TOKENIZER):
    return build_model(
        build_config(ModelOptions(init_from=str(folder)), tokenizer, CONTEXT), str(folder)
    )


@pytest.mark.parametrize("attention", ["infini", "self"])
def test_a_model_that_is_damaged_or_of_another_tokenizer(attention, tmp_path):
    """The other tokenizer is of the same size, but its ids mean something else."""
    options = ModelOptions(n_layer=2, n_embd=16, n_head=2, attention=attention)
    build_model(build_config(options, TOKENIZER, CONTEXT), None).save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    assert start(tmp_path).config.n_layer == 2  # also a plain one, to which the memory is new
    with pytest.raises(UserError, match="--init_from: .* was trained with another tokenizer"):
        start(tmp_path, SAME_SIZE)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["transformer.h.1.ln_1.weight"]
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(
        UserError,
        match="--init_from: .* are incomplete: 1 tensors, such as transformer.h.1.ln_1.weight",
    ):
        start(tmp_path)


def saved(folder, taps: int):
    """A small model with random taps, which also lies in the folder."""
    options = ModelOptions(
        n_layer=2, n_embd=16, n_head=2, segment_length=8, position_encoding="rope", memory_conv=taps
    )
    model = build_model(build_config(options, TOKENIZER, CONTEXT), None).eval()
    for block in model.transformer.h:
        if taps:
            block.attn.memory_conv.data.normal_()
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("taps", [0, 2])
def test_a_convolution_grows_by_taps_that_do_nothing_yet(taps, tmp_path):
    short = saved(tmp_path / "short", taps)
    grown = build_config(
        ModelOptions(init_from=str(tmp_path / "short"), memory_conv=5), TOKENIZER, CONTEXT
    )
    model = build_model(grown, str(tmp_path / "short"))
    assert (
        model.transformer.h[0].attn.memory_conv.shape == (5, 16)
        and model.transformer.h[0].attn.memory_conv.requires_grad
    )
    model.save_pretrained(tmp_path / "long")
    ids = torch.arange(2 * 40).reshape(2, 40) % len(TOKENIZER)
    with torch.no_grad():
        expected = short(ids).logits
        for other in (model.eval(), AutoModelForCausalLM.from_pretrained(tmp_path / "long").eval()):
            assert other.config.memory_conv == 5 and torch.equal(other(ids).logits, expected)
            # In pieces, too: what the convolution carries over is as long as it
            first = other(ids[:, :11], use_cache=True)
            last = other(ids[:, 11:], past_key_values=first.past_key_values).logits
            # float32 sums in another order
            torch.testing.assert_close(last, expected[:, 11:], rtol=1e-4, atol=1e-5)


def test_no_tap_is_taken_away(tmp_path):
    saved(tmp_path, 2)
    config = build_config(ModelOptions(init_from=str(tmp_path), memory_conv=1), TOKENIZER, CONTEXT)
    message = r"--init_from: .*memory_conv is \[2, 16\], and must be \[1, 16\]"
    with pytest.raises(UserError, match=message):
        build_model(config, str(tmp_path))
