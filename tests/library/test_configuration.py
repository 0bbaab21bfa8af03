"""The options of InfiniGPT2Config: what they mean, how they are checked, that they survive
saving."""

import ast
import dataclasses
import re
import typing

import pytest
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
)

from cli.model_options import help_texts
from decoders import decoder
from hf_infini import (
    CausalMHAConfig,
    InfiniGPT2Config,
    InfiniGPT2LMHeadModel,
    estimate,
    patch_model,
    unpatch_model,
)
from hf_infini.models.scratch.options import ScratchOptions
from hf_infini.options import MemoryOptions, in_words
from models import SIZES, gpt2


def test_layers_with_a_memory():
    assert InfiniGPT2Config(segment_length=8, n_layer=3).infini_layers == [0, 1, 2]
    assert InfiniGPT2Config(segment_length=8, n_layer=3, layers=[2, 0]).infini_layers == [0, 2]


@pytest.mark.parametrize("options", [MemoryOptions, ScratchOptions])
def test_every_option_is_told_with_its_choices_and_its_default(options):
    """Where it is declared: command lines and pages take the text from there."""
    texts, types = help_texts(options), typing.get_type_hints(options)
    assert list(texts) != [] and set(texts) == {field.name for field in dataclasses.fields(options)}
    entry = r"^        (\w+) \(.*, \*optional\*(?:, defaults to `?(.+?)`?)?\):$"
    written = dict(re.findall(entry, options.__doc__, re.MULTILINE))
    for field in dataclasses.fields(options):
        assert (
            ast.literal_eval(written[field.name]) if written[field.name] else None
        ) == field.default
        for choice in (
            typing.get_args(types[field.name])
            if typing.get_origin(types[field.name]) is typing.Literal
            else ()
        ):
            assert f'"{choice}"' in texts[field.name]


@pytest.mark.parametrize("options", [MemoryOptions, ScratchOptions])
def test_every_number_has_limits_and_its_help_text_says_them(options):
    texts, types = help_texts(options), typing.get_type_hints(options)
    kinds = {name: {kind, *typing.get_args(kind)} for name, kind in types.items()}
    numbers = [
        field
        for field in dataclasses.fields(options)
        if {int, float} & kinds[field.name] and field.name != "layers"
    ]
    assert len(numbers) >= 6
    for field in numbers:
        words = in_words(field.metadata)
        assert words and texts[field.name].endswith(f"{words.capitalize()}."), field.name


def test_options_on_top_of_a_saved_config(tmp_path):
    GPT2Config(n_layer=2).save_pretrained(tmp_path / "plain")
    assert (
        InfiniGPT2Config.from_pretrained(tmp_path / "plain", segment_length=32).segment_length == 32
    )
    # a plain model stays one
    assert type(InfiniGPT2Config.from_pretrained(tmp_path / "plain")) is GPT2Config
    InfiniGPT2Config(segment_length=32).save_pretrained(tmp_path / "infini")
    assert (
        InfiniGPT2Config.from_pretrained(tmp_path / "infini", segment_length=16).segment_length
        == 16
    )


INFINI = {"segment_length": 8}


@pytest.mark.parametrize("config", [InfiniGPT2Config, CausalMHAConfig])
def test_other_attributes_are_kept(config, tmp_path):
    notes = {
        "trained_on": "Carolina",
        "corpus": {"documents": 3},
        "seed": 1,
        "n_ctx": 64,
        "quantization_config": {"a": 1},
    }
    options = INFINI if config is InfiniGPT2Config else {}
    config(
        **options, **notes, task_specific_params={"text-generation": {"do_sample": True}}
    ).save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert {name: getattr(loaded, name) for name in notes} == notes


def test_options_given_on_loading_count_in_the_check(tmp_path):
    CausalMHAConfig().save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path, attention="infini", segment_length=8)
    assert (loaded.attention, loaded.segment_length) == ("infini", 8)
    with pytest.raises(ValueError, match="give segment_length"):
        AutoConfig.from_pretrained(tmp_path, attention="infini")


def test_what_a_gpt2_ignored_does_not_keep_it_from_a_memory(tmp_path):
    """Attributes that some checkpoints carry along; GPT-2 computed without them."""
    ignored = {"attention_dropout": 0.1, "n_layers": 3, "rope_theta": 500.0, "note": "kept"}
    config = GPT2Config(**SIZES, **ignored)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    loaded = InfiniGPT2LMHeadModel.from_pretrained(tmp_path, segment_length=8).config
    model = gpt2()
    model.config = config
    patched = patch_model(model, segment_length=8).config
    for found in (loaded, patched, unpatch_model(model).config):
        assert {name: getattr(found, name) for name in ignored} == ignored


@pytest.mark.parametrize("name", ["kept_toknes", "segment_lenght", "sink_token", "gate_int"])
def test_a_misspelt_option_is_refused_wherever_it_is_given(name, tmp_path):
    plain = decoder("llama").config
    model = patch_model(decoder("llama"), segment_length=8)
    model.save_pretrained(tmp_path)
    for give in (
        lambda: type(model.config)(segment_length=8, **{name: 5}),
        lambda: InfiniGPT2Config(segment_length=8, **{name: 5}),
        lambda: type(model.config).from_pretrained(tmp_path, **{name: 5}),
        lambda: AutoConfig.from_pretrained(tmp_path, **{name: 5}),
        lambda: AutoModelForCausalLM.from_pretrained(tmp_path, **{name: 5}),
        lambda: type(model).from_pretrained(tmp_path, **{name: 5}),
        lambda: patch_model(decoder("llama"), segment_length=8, **{name: 5}),
        lambda: estimate(plain, 100, segment_length=8, **{name: 5}),
    ):
        with pytest.raises(ValueError, match=rf"unknown options? {name}.*did you mean \w+\?"):
            give()
    with pytest.raises(ValueError, match="unknown options anything"):
        estimate(plain, 100, segment_length=8, anything=5)


def test_names_of_other_libraries_are_attributes():
    """All that transformers' own configurations have are, and what nobody knows."""
    names = {name for kind in CONFIG_MAPPING.values() for name in kind.__dataclass_fields__}
    known = {*type(patch_model(decoder("llama"), segment_length=8).config).__dataclass_fields__}
    config = type(patch_model(decoder("llama"), segment_length=8).config)
    config.refuse_misspelt(names - known)
    assert len(names - known) > 500
    assert config(segment_length=8, n_layers=3, my_note="mine").my_note == "mine"
