"""The options of InfiniGPT2Config: what they mean, how they are checked, that they survive saving."""

import pytest
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, GPT2Config

from hf_infini import InfiniGPT2Config


def test_segments_by_length_or_by_number():
    assert InfiniGPT2Config(segment_length=100).tokens_per_segment == 100
    assert InfiniGPT2Config(n_segments=64, n_positions=1024).tokens_per_segment == 16
    assert InfiniGPT2Config(segment_length=8, n_layer=3).infini_layers == [0, 1, 2]
    assert InfiniGPT2Config(segment_length=8, n_layer=3, layers=[2, 0]).infini_layers == [0, 2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "exactly one of segment_length"),
        ({"segment_length": 4, "n_segments": 4}, "exactly one of segment_length"),
        ({"n_segments": 100}, "n_segments must divide n_positions=1024; got 100"),
        ({"segment_length": 0}, "at least 1 token; got 0"),
        ({"segment_length": 4, "local_segments": -1}, "local_segments must be 0 or more; got -1"),
        ({"segment_length": 4, "update_rule": "sum"}, "update_rule must be one of linear, delta; got 'sum'"),
        ({"segment_length": 4, "memory_init": "ones"}, "memory_init must be one of zeros, learned, noise; got 'ones'"),
        ({"segment_length": 4, "positions": "rotary"}, "positions must be one of absolute, segment, rope; got 'rotary'"),
        ({"segment_length": 4, "positions": "rope", "n_embd": 36}, "must be even; got 36 / 12 = 3"),
        ({"segment_length": 2048, "positions": "segment"}, "segment_length=2048 is more than n_positions=1024"),
        ({"segment_length": 4, "layers": [12]}, r"0 to 11, each once, or be None for all; got \[12\]"),
        ({"segment_length": 4, "layers": [1, 1]}, r"got \[1, 1\]"),
        ({"segment_length": 4, "layers": []}, r"got \[\]"),
        ({"segment_length": 4, "add_cross_attention": True}, "add_cross_attention=True is not supported"),
        ({"segment_length": "four"}, "segment_length"),
    ],
)
def test_errors_name_the_option_and_what_is_allowed(options, message):
    with pytest.raises(StrictDataclassError, match=message):
        InfiniGPT2Config(**options)


def test_round_trip(tmp_path):
    config = InfiniGPT2Config(n_segments=8, update_rule="delta", layers=[1, 3], gate_init=-2, positions="segment")
    config.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert type(loaded) is InfiniGPT2Config
    assert loaded.to_diff_dict() == config.to_diff_dict()


def test_options_on_top_of_a_saved_config(tmp_path):
    GPT2Config(n_layer=2).save_pretrained(tmp_path / "plain")
    assert InfiniGPT2Config.from_pretrained(tmp_path / "plain", segment_length=32).segment_length == 32
    with pytest.raises(StrictDataclassError, match="exactly one of segment_length"):
        InfiniGPT2Config.from_pretrained(tmp_path / "plain")
    InfiniGPT2Config(segment_length=32).save_pretrained(tmp_path / "infini")
    changed = InfiniGPT2Config.from_pretrained(tmp_path / "infini", n_segments=4)
    assert (changed.segment_length, changed.tokens_per_segment) == (None, 256)
