"""Configurations that no model can have, in a file or given: refused in one line that names the file and the reason."""

import json

import pytest

from damaged_models import CONFIG, check_refused, cut, entries, refused, save_models, write
from hf_infini import CausalMHAConfig, InfiniGPT2Config
from hf_infini.models.loading import load_causal_lm


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
    "null": (write(b"null", CONFIG), "cannot be loaded: TypeError"),
    "UTF-16": (write('{"a": 1}'.encode("utf-16"), CONFIG), "config.json.* is not a valid JSON file"),
    "deep": (write(b"[" * 100_000, CONFIG), "cannot be loaded: RecursionError"),
    "the type a number": (entries(model_type=3), "model"),
    "no type": (drop("model_type"), "Unrecognized model|contains custom code"),
    "an unknown type": (entries(model_type="nonsense"), "nonsense|contains custom code"),
}
SIZES = "cannot be loaded: RuntimeError: You set `ignore_mismatched_sizes` to `False`"
GPT2_ENTRIES = [
    ({"n_layer": 2.0}, "Field 'n_layer' expected int, got float"),
    ({"n_layer": "3"}, "Field 'n_layer' expected int, got str"),
    ({"n_layer": True}, "Field 'n_layer' expected int, got bool"),
    ({"n_layer": None}, "Field 'n_layer' expected int, got NoneType"),
    ({"n_layer": 4}, r"are incomplete: \d+ tensors, such as .*h.3."),
    ({"n_layer": 2}, "are of a larger model"),
    ({"n_head": 5}, "divisible by num_heads"),
    ({"n_head": 2}, SIZES),
    ({"n_inner": 5}, SIZES),
    ({"vocab_size": 90}, SIZES),
    ({"n_positions": 32}, SIZES),
    ({"embd_pdrop": "0.1"}, "embd_pdrop"),
    ({"initializer_range": {"__float__": "NaN"}}, "initializer_range must be .*; got nan"),
    ({"segment_length": 0}, "segment_length must be at least 1 and at most 1048576; got 0"),
    ({"segment_length": -8}, "segment_length must be at least 1"),
    ({"segment_length": 2**40}, "segment_length must be at least 1 and at most 1048576; got 1099511627776"),
    ({"segment_length": "8"}, "'segment_length' with value '8' doesn't match any type"),
    ({"segment_length": 8.0}, "'segment_length' with value 8.0 doesn't match any type"),
    ({"segment_length": True}, "'segment_length' with value True doesn't match any type"),
    ({"segment_length": None}, "give exactly one of segment_length"),
    ({"n_segments": 4}, "give exactly one of segment_length"),
    ({"segment_length": None, "n_segments": 0}, "n_segments must be at least 1"),
    ({"segment_length": None, "n_segments": 5}, "n_segments must divide n_positions=64; got 5"),
    ({"update_rule": "sum"}, r"'update_rule' expected one of \('linear', 'delta', 'gated_delta'\), got sum"),
    ({"update_rule": "gated_delta", "denominator": "shared"}, "does not go with denominator='shared': its memory"),
    ({"feature_map": 1}, "'feature_map' expected one of"),
    ({"denominator": None}, "'denominator' expected one of"),
    ({"local_segments": -1}, "local_segments must be at least 0 and at most 65536; got -1"),
    ({"local_segments": 10**9}, "local_segments must be at least 0 and at most 65536"),
    ({"sink_tokens": -1}, "sink_tokens must be at least 0"),
    ({"sink_tokens": 8}, "sink_tokens must be fewer than the 8 tokens of a segment; got 8"),
    ({"gate_init": {"__float__": "Infinity"}}, "gate_init must be at least -1000 and at most 80; got inf"),
    ({"gate_init": {"__float__": "NaN"}}, "gate_init must be at least -1000 and at most 80; got nan"),
    ({"gate_init": 1e9}, "gate_init must be at least -1000 and at most 80"),
    ({"gate_init": "0"}, "'gate_init' with value '0' doesn't match any type"),
    ({"memory_init": "ones"}, "'memory_init' expected one of"),
    ({"memory_conv": -1}, "memory_conv must be at least 0 and at most 1024; got -1"),
    ({"memory_conv": 10**9}, "memory_conv must be at least 0 and at most 1024"),
    ({"layers": [3]}, r"layers must name some of the 3 layers, 0 to 2, each once, or be None for all; got \[3\]"),
    ({"layers": [0, 0]}, "layers must name some"),
    ({"layers": []}, "layers must name some"),
    ({"layers": [True]}, "layers"),
    ({"layers": "0"}, "'layers' with value '0' doesn't match any type"),
    ({"memory_write": "learned"}, "give feature_map='exp' or 'learned' with it"),
    ({"mask_special_tokens": "yes"}, "'mask_special_tokens' expected bool, got str"),
    ({"position_encoding": "none"}, "'position_encoding' expected one of"),
    ({"segment_lenght": 4}, "has no option segment_lenght: .* Did you mean segment_length"),
    ({"bos_token_id": "a"}, "bos_token_id"),
    ({"add_cross_attention": True}, "add_cross_attention=True is not supported"),
]
OTHER_ENTRIES = [
    ("causal_mha", {"n_layer": 0}, "n_layer must be at least 1"),
    ("causal_mha", {"n_head": 0}, "n_head must be at least 1"),
    ("causal_mha", {"n_head": 3}, "n_head=3 must divide n_embd=32"),
    ("causal_mha", {"dropout": 2}, "dropout must be at least 0 and below 1; got 2"),
    ("causal_mha", {"dropout": {"__float__": "NaN"}}, "dropout must be at least 0 and below 1; got nan"),
    ("causal_mha", {"rope_theta": 0}, "rope_theta must be greater than 0; got 0"),
    ("causal_mha", {"rope_theta": -1.0}, "rope_theta must be greater than 0"),
    ("causal_mha", {"sliding_window": 0}, "sliding_window must be at least 1"),
    ("causal_mha", {"num_buckets": 0}, "num_buckets must be at least 1"),
    ("causal_mha", {"max_distance": 2**50}, "max_distance must be at least 1 and at most 1048576"),
    ("causal_mha", {"n_inner": -5}, "n_inner must be at least 1"),
    ("causal_mha", {"layer_norm_epsilon": {"__float__": "Infinity"}}, "layer_norm_epsilon must be .*; got inf"),
    ("causal_mha", {"attention": "self"}, "'attention' expected one of"),
    ("causal_mha", {"attention": "global"}, "segment_length=8 belongs to attention='infini'"),
    ("causal_mha", {"qkv_bias": True}, "are incomplete: .*bias"),
    ("causal_mha", {"activation_function": "nothing"}, "activation_function must be one of"),
    ("infini_llama", {"rms_norm_eps": {"__float__": "NaN"}}, "rms_norm_eps must be"),
    ("infini_llama", {"segment_length": None}, "give exactly one of segment_length"),
]


@pytest.mark.parametrize("kind", ["infini_gpt2", "causal_mha"])
@pytest.mark.parametrize("case", CONFIG_FILES)
def test_damaged_configuration_files(case, kind, saved, tmp_path):
    check_refused(saved, tmp_path, kind, *CONFIG_FILES[case])


@pytest.mark.parametrize("kind", ["infini_gpt2", "gpt2"])
@pytest.mark.parametrize("case", CONFIG_FILES | ONLY_HERE)
def test_any_folder_that_a_recipe_loads(case, kind, saved, tmp_path):
    check_refused(saved, tmp_path, kind, *(CONFIG_FILES | ONLY_HERE)[case], load=load_causal_lm)


@pytest.mark.parametrize(
    ("kind", "changes", "message"), [("infini_gpt2", *row) for row in GPT2_ENTRIES] + OTHER_ENTRIES, ids=str
)
def test_values_that_no_model_can_have(kind, changes, message, saved, tmp_path):
    check_refused(saved, tmp_path, kind, entries(**changes), message, load=load_causal_lm)


@pytest.mark.parametrize("config", [CausalMHAConfig, InfiniGPT2Config])
def test_the_model_of_another_architecture(config, saved):
    folder = saved / "infini_llama"
    refused(lambda: config.from_pretrained(folder), "is of the model type 'infini_llama', and a", str(folder))
