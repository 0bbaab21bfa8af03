"""Damaged and incomplete models, and configurations that no model can have: refused in one line that names the file and says
what is wrong, and nothing that was there is changed. Each row is one way to damage a folder, and what the message says."""

import json
import shutil
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
)

from damaged_models import INDEX, KINDS, WEIGHTS, check_refused, cut, entries, refused, save_models, write
from hf_infini import AutoInfiniModelForCausalLM, InfiniGPT2Config, InfiniGPT2LMHeadModel
from hf_infini.models.loading import fingerprint, load_causal_lm, load_tokenizer


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return save_models(tmp_path_factory.mktemp("saved"))


# --- weights ----------------------------------------------------------------------------------------------------------


def tensors(change):
    """Writes the file's tensors again after a change of the dictionary: what is given `(tensors, names)` of a matrix in the
    first layer, of all tensors of its last layer, and of the last norm."""

    def damage(folder):
        found = load_file(folder / WEIGHTS)
        matrix = next(name for name in sorted(found) if ".0." in name and found[name].dim() == 2)
        layer = [name for name in found if ".2." in name]
        norm = next(name for name in sorted(found) if name.endswith(("ln_f.weight", "model.norm.weight")))
        change(found, {"matrix": matrix, "layer": layer, "norm": norm})
        save_file({name: tensor.contiguous() for name, tensor in found.items()}, folder / WEIGHTS, {"format": "pt"})

    return damage


def replaced(function, which="matrix"):
    def change(found, names):
        found[names[which]] = function(found[names[which]])

    return tensors(change)


def without(which):
    def change(found, names):
        for name in [names[which]] if isinstance(names[which], str) else names[which]:
            del found[name]

    return tensors(change)


def renamed(found, names):
    found["other"] = found.pop(names["matrix"])


HEADER = "cannot be loaded: SafetensorError"
SIZES = "cannot be loaded: RuntimeError: You set `ignore_mismatched_sizes` to `False`"
WEIGHT_CASES = {
    "empty": (write(b""), HEADER),
    "a byte less": (cut(-1), HEADER),
    "a header of no JSON": (write(struct.pack("<Q", 8) + b"not json"), HEADER),
    "no tensors": (lambda folder: save_file({}, folder / WEIGHTS, {"format": "pt"}), "are incomplete"),
    "without format": (lambda folder: save_file({"a": torch.ones(2)}, folder / WEIGHTS), "are incomplete"),
    "a tensor missing": (without("matrix"), "are incomplete: 1 tensors, such as .*, are missing"),
    "a norm missing": (without("norm"), r"are incomplete: .*(ln_f|norm)\.weight, are missing"),
    "a layer missing": (without("layer"), r"are incomplete: \d+ tensors, such as .*(h|layers)\.2\..*, are missing"),
    "renamed": (tensors(renamed), "are incomplete"),
    "turned": (replaced(lambda t: torch.cat([t, t]).T), SIZES),
    "a short norm": (replaced(lambda t: t[:4], "norm"), SIZES),
    "no file": (lambda folder: (folder / WEIGHTS).unlink(), "no file named model.safetensors"),
}


@pytest.mark.parametrize("case", WEIGHT_CASES)
def test_damaged_weights(case, saved, tmp_path):
    kind = [*KINDS][[*WEIGHT_CASES].index(case) % len(KINDS)]
    check_refused(saved, tmp_path, kind, *WEIGHT_CASES[case], load=load_causal_lm)


def first_shard(folder):
    return sorted(folder.glob("model-*.safetensors"))[0]


def change_index(change):
    def damage(folder):
        index = json.loads((folder / INDEX).read_text())
        changed = change(index)
        (folder / INDEX).write_text(json.dumps(index if changed is None else changed))

    return damage


def swap_shards(folder):
    one, other = sorted(folder.glob("model-*.safetensors"))[:2]
    shutil.copy(one, other)


SHARD_CASES = {
    "a shard missing": (lambda folder: first_shard(folder).unlink(), "model-00001-of-"),
    "a shard cut": (lambda folder: cut(0.5, first_shard(folder).name)(folder), HEADER),
    "a shard twice": (swap_shards, "are incomplete"),
    "an empty index": (write(b"", INDEX), "cannot be loaded"),
    "an index of text": (write(b"{nothing", INDEX), "cannot be loaded"),
    "no map": (change_index(lambda index: index.pop("weight_map") and None), "cannot be loaded"),
    "another file": (change_index(lambda index: index.update(weight_map={"a": "b.safetensors"})), "b.safetensors"),
}


@pytest.mark.parametrize("case", SHARD_CASES)
def test_damaged_shards(case, saved, tmp_path):
    check_refused(saved, tmp_path, "shards", *SHARD_CASES[case], load=load_causal_lm)


# --- tokenizers -------------------------------------------------------------------------------------------------------


def other_tokenizer(words: int, shift: int = 0):
    def damage(folder):
        vocabulary = {f"w{(number + shift) % words}": number for number in range(words)}
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(vocabulary, "w0")), eos_token="w0")
        tokenizer.save_pretrained(folder)

    return damage


TOKENIZER_CASES = {
    "no files": (lambda folder: [file.unlink() for file in folder.glob("tokenizer*")], "has no tokenizer"),
    "no tokenizer.json": (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer"),
    "empty": (write(b"", "tokenizer.json"), "tokenizer"),
    "cut": (cut(0.5, "tokenizer.json"), "tokenizer"),
    "a list": (write(b"[]", "tokenizer.json"), "tokenizer"),
    "an object": (write(b"{}", "tokenizer.json"), "tokenizer"),
    "a broken configuration": (write(b"{", "tokenizer_config.json"), "tokenizer"),
    "too many words": (other_tokenizer(90), "the tokenizer of .* is not the model's: it has 90 tokens, the model 89"),
}


@pytest.mark.parametrize("case", TOKENIZER_CASES)
def test_damaged_tokenizers(case, saved, tmp_path):
    model = InfiniGPT2LMHeadModel.from_pretrained(saved / "infini_gpt2")
    check_refused(saved, tmp_path, "infini_gpt2", *TOKENIZER_CASES[case], load=lambda folder: load_tokenizer(folder, model))


def test_another_tokenizer_of_the_same_size(saved, tmp_path):
    """Its ids mean something else: told by the fingerprint, where the configuration has it."""
    folder = tmp_path / "model"
    shutil.copytree(saved / "infini_gpt2", folder)
    entries(tokenizer_sha256=fingerprint(load_tokenizer(folder)))(folder)
    model = load_causal_lm(folder)
    load_tokenizer(folder, model)
    other_tokenizer(89, shift=1)(folder)
    refused(lambda: load_tokenizer(folder, model), "is not the model's: .* ids are others", str(folder))


# --- what may be new --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "load", "options"),
    [
        ("gpt2", AutoInfiniModelForCausalLM, {"segment_length": 8, "memory_init": "learned", "memory_conv": 2}),
        ("infini_gpt2", AutoModelForCausalLM, {"memory_conv": 2}),
        ("infini_gpt2", AutoModelForCausalLM, {"layers": [0]}),
        ("infini_gpt2", AutoModel, {}),
        ("causal_mha", AutoModel, {}),
        ("infini_gpt2", AutoModelForSequenceClassification, {"pad_token_id": 0}),
        ("infini_gpt2", AutoModelForCausalLM, {"vocab_size": 90, "ignore_mismatched_sizes": True}),
        ("shards", AutoModelForCausalLM, {}),
    ],
    ids=str,
)
def test_what_the_options_add_and_other_heads_are_no_damage(kind, load, options, saved):
    model = load.from_pretrained(saved / kind, **options)
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    layer = load_file(next(iter(sorted((saved / kind).glob("*.safetensors")))))
    names = [name for name in layer if name.endswith((".1.mlp.c_fc.weight", ".1.mlp.up_proj.weight", ".1.mlp.fc_in.weight"))]
    for name in names:
        found = dict(model.base_model.named_parameters())[name.split(".", 1)[1]]
        assert torch.equal(found, layer[name])


def test_the_head_of_a_language_model_may_come_from_a_base_model_but_a_recipe_needs_it(saved, tmp_path):
    base = AutoModel.from_pretrained(saved / "causal_mha")
    base.save_pretrained(tmp_path)
    assert AutoModelForCausalLM.from_pretrained(tmp_path).lm_head.weight.isfinite().all()
    refused(lambda: load_causal_lm(tmp_path), "are incomplete: 1 tensors, such as lm_head.weight", str(tmp_path))


def test_options_that_the_user_gives_on_loading_are_checked_like_those_of_a_file(saved):
    for options, message in (({"segment_length": 0}, "segment_length must be"), ({"gate_init": "1"}, "'gate_init' with")):
        refused(lambda options=options: AutoModelForCausalLM.from_pretrained(saved / "infini_gpt2", **options), message)


def test_tensors_that_the_user_gives_must_fit_too(saved):
    config, tensors = InfiniGPT2Config.from_pretrained(saved / "infini_gpt2"), load_file(saved / "infini_gpt2" / WEIGHTS)
    InfiniGPT2LMHeadModel.from_pretrained(None, config=config, state_dict=tensors)
    tensors["transformer.ln_f.weight"] = torch.ones(4)
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        InfiniGPT2LMHeadModel.from_pretrained(None, config=config, state_dict=tensors)


def test_folders_that_are_none(tmp_path):
    (tmp_path / "file").write_text("a text")
    for place in (tmp_path, tmp_path / "nowhere", tmp_path / "file", tmp_path / ("n" * 300)):
        refused(lambda place=place: load_causal_lm(place), str(place))
        refused(lambda place=place: load_tokenizer(place), str(place))
