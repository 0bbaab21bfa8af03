"""Incomplete models, and configurations that no model can have: refused in one line that says what
is wrong, and nothing that was there is changed. Each row is one way to damage a folder, and what
the message says."""

import dataclasses
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
)

from bad_input import contents
from decoders import decoder
from hf_infini import CausalMHAConfig, InfiniGPT2Config, InfiniGPT2LMHeadModel, patch_model
from hf_infini.models.loading import fingerprint, load_causal_lm, load_tokenizer
from hf_infini.options import UPDATE_RULES, in_words
from models import causal_mha, gpt2, infini_gpt2

WEIGHTS, CONFIG = "model.safetensors", "config.json"
KINDS = {
    "infini_gpt2": infini_gpt2,
    "infini_llama": lambda: patch_model(
        decoder("llama", num_hidden_layers=3, vocab_size=89), segment_length=8
    ),
    "causal_mha": lambda: causal_mha(
        attention="infini", segment_length=8, position_encoding="rope"
    ),
    "gpt2": gpt2,
}


def tokenizer(words: int = 89, shift: int = 0) -> PreTrainedTokenizerFast:
    vocabulary = {f"w{(number + shift) % words}": number for number in range(words)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(vocabulary, "w0")), eos_token="w0"
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """One folder of each kind of model, with a tokenizer, and one in shards."""
    folders = tmp_path_factory.mktemp("saved")
    for kind, make in KINDS.items():
        make().save_pretrained(folders / kind)
    infini_gpt2().save_pretrained(folders / "shards", max_shard_size="20KB")
    for folder in folders.iterdir():
        tokenizer().save_pretrained(folder)
        load_tokenizer(folder, load_causal_lm(folder))  # whole, all of them can be loaded
    return folders


def refused(action, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        action()


def check_refused(saved, tmp_path, kind, damage, message, load=load_causal_lm, **options):
    folder = shutil.copytree(saved / kind, tmp_path / kind)
    damage(folder)
    before = contents(folder)
    refused(lambda: load(folder, **options), message)
    assert contents(folder) == before


# --- damage: each makes a function of a folder
# --------------------------------------------------------------------------------------------------


def entries(**changes):
    """Other entries of the configuration; `None` takes one out."""

    def damage(folder):
        config = json.loads((folder / CONFIG).read_text()) | changes
        (folder / CONFIG).write_text(
            json.dumps({name: value for name, value in config.items() if value is not None})
        )

    return damage


def tensors(change):
    """Writes the tensors again after `change(tensors, the name of a matrix in the first layer)`."""

    def damage(folder):
        found = load_file(folder / WEIGHTS)
        change(
            found, next(name for name in sorted(found) if ".0." in name and found[name].dim() == 2)
        )
        save_file(
            {name: tensor.contiguous() for name, tensor in found.items()},
            folder / WEIGHTS,
            {"format": "pt"},
        )

    return damage


def without(part: str):
    return tensors(lambda found, _: [found.pop(name) for name in list(found) if part in name])


DAMAGES = {
    "a tensor missing": (
        "causal_mha",
        tensors(lambda found, name: found.pop(name)),
        "are incomplete: 1 tensors, such as ",
    ),
    "a layer missing": (
        "infini_llama",
        without(".2."),
        r"are incomplete: \d+ tensors, such as .*layers\.2\.",
    ),
    "shards": ("shards", entries(n_layer=4), r"are incomplete: \d+ tensors, such as .*h.3."),
    # Configurations
    "a number of another kind": (
        "infini_gpt2",
        entries(n_layer=2.0),
        "Field 'n_layer' expected int, got float",
    ),
    "layers beyond the weights": (
        "infini_gpt2",
        entries(n_layer=4),
        r"are incomplete: \d+ tensors, such as .*h.3.",
    ),
    "a length in words": (
        "infini_gpt2",
        entries(segment_length="8"),
        "'segment_length' with value '8' doesn't match",
    ),
    "a segment without positions": (
        "infini_gpt2",
        entries(segment_length=5000, position_encoding="segment"),
        "is more than n_positions",
    ),
    "two lengths": (
        "infini_gpt2",
        entries(n_segments=4),
        "n_segments=4 was an option of an earlier version",
    ),
    "an option that has gone": (
        "infini_gpt2",
        entries(denominator="shared"),
        "denominator='shared' was an option of an",
    ),
    "no length": (
        "infini_gpt2",
        entries(segment_length=None),
        "give segment_length, the tokens of a segment",
    ),
    "no rule": (
        "infini_gpt2",
        entries(update_rule="sum"),
        rf"expected one of \({', '.join(map(repr, UPDATE_RULES))}\), got sum",
    ),
    "a rule's limits": (
        "infini_gpt2",
        entries(update_rule="gated_delta", memory_write="learned"),
        "not go with memory_write='learned'",
    ),
    "sinks": (
        "infini_gpt2",
        entries(sink_tokens=8),
        "sink_tokens must be fewer than the 8 tokens of a segment; got 8",
    ),
    "layers": (
        "infini_gpt2",
        entries(layers=[0, 3]),
        "layers must name some of the 3 layers, 0 to 2, or be None",
    ),
    "no features": (
        "infini_gpt2",
        entries(memory_write="learned"),
        "give feature_map='exp' with it",
    ),
    "heads": ("causal_mha", entries(n_head=3), "n_head=3 must divide n_embd=32"),
    "another attention": (
        "causal_mha",
        entries(attention="global"),
        "segment_length=8 belongs to attention='infini'",
    ),
    "a family": ("infini_llama", entries(segment_length=None), "give segment_length"),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_damaged_models(case, saved, tmp_path):
    check_refused(saved, tmp_path, *DAMAGES[case])


def test_transformers_own_loader_checks_as_well(saved):
    for options, message in (
        ({"segment_length": 0}, "segment_length must be"),
        ({"gate_init": "1"}, "'gate_init' with"),
    ):
        refused(
            lambda options=options: AutoModelForCausalLM.from_pretrained(
                saved / "infini_gpt2", **options
            ),
            message,
        )


@pytest.mark.parametrize(
    ("config", "given"),
    [
        (InfiniGPT2Config, {}),
        (CausalMHAConfig, {"attention": "infini", "position_encoding": "rope"}),
    ],
)
def test_numbers_beyond_the_limits_that_are_declared(config, given):
    refusals = 0
    for field in dataclasses.fields(config):
        limits, step = field.metadata, {"at_least": -1, "greater_than": 0, "below": 0, "at_most": 1}
        number = float if isinstance(field.default, float) else int
        beyond = [number(bound + step[limit]) for limit, bound in limits.items()]
        for value in beyond + [float("nan")] * bool(limits):
            message = (
                f"{field.name} must be {in_words(limits)}; got|'{field.name}' (expected "
                "int, got float|with value nan)"
            )
            with pytest.raises(ValueError, match=message):
                config(**{"segment_length": 8} | given | {field.name: value})
            refusals += 1
    assert refusals > 10


# --- tokenizers
# --------------------------------------------------------------------------------------------------

TOKENIZERS = {
    "no files": (
        lambda folder: [file.unlink() for file in folder.glob("tokenizer*")],
        "has no tokenizer",
    ),
    "too many words": (
        lambda folder: tokenizer(90).save_pretrained(folder),
        "it has 90 tokens, the model 89",
    ),
}


@pytest.mark.parametrize("case", TOKENIZERS)
def test_damaged_tokenizers(case, saved, tmp_path):
    model = InfiniGPT2LMHeadModel.from_pretrained(saved / "infini_gpt2")
    check_refused(
        saved,
        tmp_path,
        "infini_gpt2",
        *TOKENIZERS[case],
        load=lambda folder: load_tokenizer(folder, model),
    )


def test_another_tokenizer_of_the_same_size(saved, tmp_path):
    """Its ids mean something else: told by the fingerprint, where the configuration has it."""
    folder = shutil.copytree(saved / "infini_gpt2", tmp_path / "model")
    entries(tokenizer_sha256=fingerprint(load_tokenizer(folder)))(folder)
    model = load_causal_lm(folder)
    load_tokenizer(folder, model)
    tokenizer(shift=1).save_pretrained(folder)
    refused(lambda: load_tokenizer(folder, model), "is not the model's: .* ids are others")


# --- what may be new
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "load", "options"),
    [
        ("gpt2", InfiniGPT2LMHeadModel, {"segment_length": 8, "memory_conv": 2}),
        ("infini_gpt2", AutoModelForCausalLM, {"memory_conv": 2}),
        ("infini_gpt2", AutoModelForCausalLM, {"layers": [0]}),
        ("causal_mha", AutoModel, {}),
        ("infini_gpt2", AutoModelForSequenceClassification, {"pad_token_id": 0}),
        ("infini_gpt2", AutoModelForCausalLM, {"vocab_size": 90, "ignore_mismatched_sizes": True}),
    ],
    ids=str,
)
def test_what_the_options_add_and_other_heads_are_no_damage(kind, load, options, saved):
    model = load.from_pretrained(saved / kind, **options)
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    stored = load_file(saved / kind / WEIGHTS)
    names = [
        name for name in stored if name.endswith((".1.mlp.c_fc.weight", ".1.mlp.fc_in.weight"))
    ]
    assert len(names) == 1
    assert torch.equal(
        dict(model.base_model.named_parameters())[names[0].split(".", 1)[1]], stored[names[0]]
    )


def test_the_head_of_a_language_model_may_come_from_a_base_model_but_a_recipe_needs_it(
    saved, tmp_path
):
    AutoModel.from_pretrained(saved / "causal_mha").save_pretrained(tmp_path)
    assert AutoModelForCausalLM.from_pretrained(tmp_path).lm_head.weight.isfinite().all()
    refused(lambda: load_causal_lm(tmp_path), "are incomplete: 1 tensors, such as lm_head.weight")
