"""Configurations that no model can have, in a file or given: refused in one line that names the file and the reason."""

import dataclasses
import json

import pytest

from damaged_models import CONFIG, check_refused, cut, entries, refused, save_models, write
from hf_infini import CausalMHAConfig, InfiniGPT2Config
from hf_infini.models.loading import load_causal_lm
from hf_infini.options import in_words, limits_of


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return save_models(tmp_path_factory.mktemp("saved"))


def drop(name):
    def damage(folder):
        config = json.loads((folder / CONFIG).read_text())
        del config[name]
        (folder / CONFIG).write_text(json.dumps(config))

    return damage


CONFIG_FILES = {
    "empty": (write(b"", CONFIG), "config"),
    "cut": (cut(0.5, CONFIG), "config"),
    "an empty object": (write(b"{}", CONFIG), "Unrecognized model"),
    "no file": (lambda folder: (folder / CONFIG).unlink(), "config.json"),
}
ONLY_HERE = {  # what transformers' own AutoModelForCausalLM says of these is another's matter
    "a list": (write(b"[]", CONFIG), "Unrecognized model"),
    "UTF-16": (write('{"a": 1}'.encode("utf-16"), CONFIG), "config.json.* is not a valid JSON file"),
    "deep": (write(b"[" * 100_000, CONFIG), "cannot be loaded: RecursionError"),
    "no type": (drop("model_type"), "Unrecognized model|contains custom code"),
}
SIZES = "cannot be loaded: RuntimeError: You set `ignore_mismatched_sizes` to `False`"
ENTRIES = [
    ("infini_gpt2", {"n_layer": 2.0}, "Field 'n_layer' expected int, got float"),
    ("infini_gpt2", {"n_layer": True}, "Field 'n_layer' expected int, got bool"),
    ("infini_gpt2", {"n_layer": None}, "Field 'n_layer' expected int, got NoneType"),
    ("infini_gpt2", {"n_layer": 4}, r"are incomplete: \d+ tensors, such as .*h.3."),
    ("infini_gpt2", {"n_head": 5}, "divisible by num_heads"),
    ("infini_gpt2", {"n_head": 2}, SIZES),
    ("infini_gpt2", {"vocab_size": 90}, SIZES),
    ("infini_gpt2", {"segment_length": "8"}, "'segment_length' with value '8' doesn't match any type"),
    ("infini_gpt2", {"segment_length": True}, "'segment_length' with value True doesn't match any type"),
    ("infini_gpt2", {"n_segments": 4}, "give exactly one of segment_length"),
    ("infini_gpt2", {"segment_length": None, "n_segments": 5}, "n_segments must divide n_positions=64; got 5"),
    ("infini_gpt2", {"update_rule": "sum"}, r"'update_rule' expected one of \('linear', 'delta', 'gated_delta'\), got sum"),
    ("infini_gpt2", {"update_rule": "gated_delta", "denominator": "shared"}, "does not go with denominator='shared'"),
    ("infini_gpt2", {"sink_tokens": 8}, "sink_tokens must be fewer than the 8 tokens of a segment; got 8"),
    ("infini_gpt2", {"layers": [3]}, r"layers must name some of the 3 layers, 0 to 2, each once, or be None for all"),
    ("infini_gpt2", {"layers": [0, 0]}, "layers must name some"),
    ("infini_gpt2", {"layers": []}, "layers must name some"),
    ("infini_gpt2", {"memory_write": "learned"}, "give feature_map='exp' or 'learned' with it"),
    ("infini_gpt2", {"add_cross_attention": True}, "add_cross_attention=True is not supported"),
    ("causal_mha", {"n_head": 3}, "num_heads must divide d_out, .* 32 / 3"),
    ("causal_mha", {"attention": "global"}, "segment_length=8 belongs to attention='infini'"),
    ("causal_mha", {"qkv_bias": True}, "are incomplete: .*bias"),
    ("infini_llama", {"segment_length": None}, "give exactly one of segment_length"),
]


@pytest.mark.parametrize("case", CONFIG_FILES)
def test_damaged_configuration_files(case, saved, tmp_path):
    check_refused(saved, tmp_path, "infini_gpt2", *CONFIG_FILES[case])


@pytest.mark.parametrize("case", CONFIG_FILES | ONLY_HERE)
def test_any_folder_that_a_recipe_loads(case, saved, tmp_path):
    check_refused(saved, tmp_path, "gpt2", *(CONFIG_FILES | ONLY_HERE)[case], load=load_causal_lm)


@pytest.mark.parametrize(
    ("config", "given"), [(InfiniGPT2Config, {}), (CausalMHAConfig, {"attention": "infini", "position_encoding": "rope"})]
)
def test_numbers_beyond_the_limits_that_are_declared(config, given):
    refusals = 0
    for field in dataclasses.fields(config):
        limits, step = limits_of(field), {"at_least": -1, "greater_than": 0, "below": 0, "at_most": 1}
        number = float if isinstance(field.default, float) else int
        beyond = [number(bound + step[limit]) for limit, bound in limits.items()]
        for value in beyond + [float("nan")] * bool(limits):
            message = f"{field.name} must be {in_words(limits)}; got|'{field.name}' (expected int, got float|with value nan)"
            with pytest.raises(ValueError, match=message):
                config(**{"segment_length": 8} | given | {field.name: value})
            refusals += 1
    assert refusals > 10


@pytest.mark.parametrize(("kind", "changes", "message"), ENTRIES, ids=str)
def test_values_that_no_model_can_have(kind, changes, message, saved, tmp_path):
    check_refused(saved, tmp_path, kind, entries(**changes), message, load=load_causal_lm)


@pytest.mark.parametrize("config", [CausalMHAConfig, InfiniGPT2Config])
def test_the_model_of_another_architecture(config, saved):
    folder = saved / "infini_llama"
    refused(lambda: config.from_pretrained(folder), "is made from a configuration of .*; this one is of 'infini_llama'")
