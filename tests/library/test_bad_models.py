"""Damaged and incomplete models, and configurations that no model can have: refused in one line that names the file and says
what is wrong, and nothing that was there is changed. Each row is one way to damage a folder, and what the message says."""

import hashlib
import json
import shutil
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedTokenizerFast,
)

from decoders import decoder
from hf_infini import AutoInfiniModelForCausalLM, CausalMHAConfig, InfiniGPT2Config, InfiniGPT2LMHeadModel, patch_model
from hf_infini.loading import fingerprint, load_causal_lm, load_tokenizer
from models import causal_mha, gpt2, infini_gpt2

WEIGHTS, CONFIG, INDEX = "model.safetensors", "config.json", "model.safetensors.index.json"


def infini_llama():
    return patch_model(decoder("llama", num_hidden_layers=3, vocab_size=89), segment_length=8)


def from_scratch():
    return causal_mha(attention="infini", segment_length=8, position_encoding="rope")


KINDS = {"infini_gpt2": infini_gpt2, "infini_llama": infini_llama, "causal_mha": from_scratch, "gpt2": gpt2}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """One folder of each kind of model, with a tokenizer; and one in shards."""
    folders = tmp_path_factory.mktemp("saved")
    words = {f"w{number}": number for number in range(89)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, "w0")), eos_token="w0")
    for kind, make in KINDS.items():
        make().save_pretrained(folders / kind)
    infini_gpt2().save_pretrained(folders / "shards", max_shard_size="20KB")
    for folder in folders.iterdir():
        tokenizer.save_pretrained(folder)
    for folder in folders.iterdir():  # whole, all of them can be loaded
        AutoModelForCausalLM.from_pretrained(folder)
        load_tokenizer(folder, load_causal_lm(folder))
    return folders


def state(folder: Path) -> dict[str, str]:
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def refused(action, message: str, place: str = "") -> None:
    """The action ends with a ValueError, or an OSError of transformers', whose one line has the message and the place."""
    with pytest.raises((ValueError, OSError), match=message) as found:
        action()
    text = str(found.value)
    assert "\n" not in text and place in text, text


def check_refused(saved, tmp_path, kind, damage, message, load=AutoModelForCausalLM.from_pretrained, **options):
    folder = tmp_path / kind
    shutil.copytree(saved / kind, folder)
    damage(folder)
    before = state(folder)
    refused(lambda: load(folder, **options), message, str(folder))
    assert state(folder) == before


# --- weights ----------------------------------------------------------------------------------------------------------


def write(content: bytes, name=WEIGHTS):
    return lambda folder: (folder / name).write_bytes(content)


def cut(to, name=WEIGHTS):
    """Keeps so many bytes, or this share of them."""

    def damage(folder):
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: to if isinstance(to, int) else int(len(content) * to)])

    return damage


def append(folder):
    with (folder / WEIGHTS).open("ab") as file:
        file.write(b"more")


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


def put(value):
    def change(found, names):
        found[names["matrix"]].view(-1)[5] = value

    return tensors(change)


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


def larger(found, names):
    for name in names["layer"]:
        found[name.replace(".2.", ".3.")] = found[name].clone()


HEADER = "model.safetensors is damaged or no safetensors file"
WEIGHT_CASES = {
    "empty": (write(b""), HEADER),
    "four bytes": (cut(4), HEADER),
    "no header": (cut(8), HEADER),
    "half a header": (cut(100), HEADER),
    "half": (cut(0.5), HEADER),
    "a byte less": (cut(-1), HEADER),
    "more bytes": (append, HEADER),
    "a text": (write(b"a text, and a long one " * 50), HEADER),
    "zeros": (write(bytes(4096)), HEADER),
    "a huge header": (write(struct.pack("<Q", 2**62) + b"{}"), HEADER),
    "a header of no JSON": (write(struct.pack("<Q", 8) + b"not json"), HEADER),
    "no tensors": (lambda folder: save_file({}, folder / WEIGHTS, {"format": "pt"}), "are incomplete: they hold 0 numbers"),
    "without format": (lambda folder: save_file({"a": torch.ones(2)}, folder / WEIGHTS), "holds no weights of a model"),
    "foreign": (lambda folder: save_file({"a": torch.ones(2)}, folder / WEIGHTS, {"format": "pt"}), "are incomplete"),
    "a tensor missing": (without("matrix"), "are incomplete: .* is not there"),
    "a norm missing": (without("norm"), r"are incomplete: (ln_f|norm)\.weight is not there"),
    "a layer missing": (without("layer"), r"are incomplete: \d+ tensors, such as (h|layers)\.2\..*, are not there"),
    "renamed": (tensors(renamed), "are incomplete"),
    "a layer more": (tensors(larger), r"are of a larger model .*: \d+ tensors, such as .*\.3\..*, are left over"),
    "turned": (replaced(lambda t: torch.cat([t, t]).T), r"do not fit: .* is \[\d+, \d+\] in the file and \["),
    "a row less": (replaced(lambda t: t[:-1]), "do not fit"),
    "one dimension": (replaced(lambda t: t.reshape(-1)), "do not fit"),
    "a short norm": (replaced(lambda t: t[:4], "norm"), r"do not fit: .* is \[4\] in the file and \[32\] in the model"),
    "NaN": (put(float("nan")), "hold NaN or infinity in 1 tensors, such as .*0"),
    "infinity": (put(float("inf")), "hold NaN or infinity"),
    "minus infinity": (put(-float("inf")), "hold NaN or infinity"),
    "a norm of NaN": (replaced(lambda t: t * float("nan"), "norm"), "hold NaN or infinity"),
    "whole numbers": (replaced(lambda t: t.to(torch.int32)), "is I32 and must be of floating point"),
    "no file": (lambda folder: (folder / WEIGHTS).unlink(), "no file named model.safetensors"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", WEIGHT_CASES)
def test_damaged_weights(case, kind, saved, tmp_path):
    load = load_causal_lm if kind == "gpt2" else AutoModelForCausalLM.from_pretrained
    check_refused(saved, tmp_path, kind, *WEIGHT_CASES[case], load=load)


@pytest.mark.parametrize("case", ["half", "a layer missing", "a row less", "NaN"])
def test_damaged_plain_weights_get_no_memory(case, saved, tmp_path):
    load = AutoInfiniModelForCausalLM.from_pretrained
    check_refused(saved, tmp_path, "gpt2", *WEIGHT_CASES[case], load=load, segment_length=8)


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
    "a shard missing": (lambda folder: first_shard(folder).unlink(), r"model-00001-of-.*safetensors is not there, and the"),
    "a shard cut": (lambda folder: cut(0.5, first_shard(folder).name)(folder), "model-00001-of-.* is damaged"),
    "a shard twice": (swap_shards, "are incomplete"),
    "an empty index": (write(b"", INDEX), f"{INDEX} is damaged or no JSON file"),
    "an index of text": (write(b"{nothing", INDEX), f"{INDEX} is damaged or no JSON file"),
    "a list": (change_index(lambda index: []), "holds a list and not an object"),
    "no map": (change_index(lambda index: index.pop("weight_map") and None), "is no index of shards"),
    "an empty map": (change_index(lambda index: index["weight_map"].clear()), "is no index of shards"),
    "no metadata": (change_index(lambda index: index.pop("metadata") and None), "is no index of shards"),
    "a map of numbers": (change_index(lambda index: index.update(weight_map={"a": 3})), "3 is not there"),
    "another file": (change_index(lambda index: index.update(weight_map={"a": "b.safetensors"})), "b.safetensors is not"),
}


@pytest.mark.parametrize("case", SHARD_CASES)
def test_damaged_shards(case, saved, tmp_path):
    check_refused(saved, tmp_path, "shards", *SHARD_CASES[case])


# --- configurations ---------------------------------------------------------------------------------------------------


def entries(**changes):
    def damage(folder):
        config = json.loads((folder / CONFIG).read_text())
        (folder / CONFIG).write_text(json.dumps(config | changes))

    return damage


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
    "a bad index of generation": (write(b"{", "generation_config.json"), "generation_config.json is damaged or no JSON"),
}
ONLY_HERE = {  # what transformers' own AutoModelForCausalLM says of these is another's matter
    "a list": (write(b"[]", CONFIG), "config.json is damaged: it holds a list"),
    "null": (write(b"null", CONFIG), "config.json is damaged: it holds a NoneType"),
    "UTF-16": (write('{"a": 1}'.encode("utf-16"), CONFIG), "config.json is damaged or no JSON file"),
    "deep": (write(b"[" * 100_000, CONFIG), "config.json is damaged or no JSON file"),
    "a NaN": (entries(note=float("nan")), "config.json is damaged or no JSON file .NaN is no JSON"),
    "the type a number": (entries(model_type=3), "model"),
    "no type": (drop("model_type"), "Unrecognized model|contains custom code"),
    "an unknown type": (entries(model_type="nonsense"), "nonsense|contains custom code"),
    "another type": (entries(model_type="llama"), "describes a LlamaForCausalLM of"),
}
GPT2_ENTRIES = [
    ({"n_layer": 0}, "n_layer must be at least 1 and at most 65536; got 0"),
    ({"n_layer": -1}, "n_layer must be at least 1 and at most 65536; got -1"),
    ({"n_layer": 10**9}, "n_layer must be at least 1 and at most 65536; got 1000000000"),
    ({"n_layer": 2.0}, "Field 'n_layer' expected int, got float"),
    ({"n_layer": "3"}, "Field 'n_layer' expected int, got str"),
    ({"n_layer": True}, "Field 'n_layer' expected int, got bool"),
    ({"n_layer": None}, "Field 'n_layer' expected int, got NoneType"),
    ({"n_layer": 4}, r"are incomplete: \d+ tensors, such as h.3."),
    ({"n_layer": 2}, "are of a larger model"),
    ({"n_head": 0}, "n_head must be at least 1"),
    ({"n_head": -4}, "n_head must be at least 1"),
    ({"n_head": 5}, "divisible by num_heads"),
    ({"n_head": 2}, r"do not fit: .*gate.weight is \[4\] in the file and \[2\]"),
    ({"n_embd": 0}, "n_embd must be at least 1"),
    ({"n_embd": 64}, "are incomplete: they hold .* numbers, and its config.json describes"),
    ({"n_inner": 0}, "n_inner must be at least 1"),
    ({"n_inner": 5}, "do not fit"),
    ({"vocab_size": 0}, "vocab_size must be at least 1"),
    ({"vocab_size": 90}, r"do not fit: .*wte.weight is \[89, 32\] in the file and \[90, 32\]"),
    ({"vocab_size": 2**40}, "vocab_size must be at least 1 and at most"),
    ({"n_positions": -1}, "n_positions must be at least 1"),
    ({"n_positions": 32}, "do not fit: .*wpe.weight"),
    ({"resid_pdrop": 2}, "resid_pdrop must be at least 0 and below 1; got 2"),
    ({"attn_pdrop": -0.1}, "attn_pdrop must be at least 0 and below 1"),
    ({"embd_pdrop": "0.1"}, "embd_pdrop"),
    ({"layer_norm_epsilon": -1.0}, "layer_norm_epsilon must be at least 0 and at most 1"),
    ({"initializer_range": -0.1}, "initializer_range must be at least 0"),
    ({"initializer_range": {"__float__": "NaN"}}, "initializer_range must be .*; got nan"),
    ({"activation_function": "nothing"}, "activation_function must be one of .*; got 'nothing'"),
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
    ({"update_rule": "gated_delta"}, "are incomplete: .*memory_rates"),
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
    ({"memory_init": "learned"}, r"are incomplete: .*start_memory"),
    ({"memory_conv": -1}, "memory_conv must be at least 0 and at most 1024; got -1"),
    ({"memory_conv": 10**9}, "memory_conv must be at least 0 and at most 1024"),
    ({"memory_conv": 3}, "are incomplete: .*memory_conv"),
    ({"layers": [3]}, r"layers must name some of the 3 layers, 0 to 2, each once, or be None for all; got \[3\]"),
    ({"layers": [0, 0]}, "layers must name some"),
    ({"layers": []}, "layers must name some"),
    ({"layers": [True]}, "layers"),
    ({"layers": "0"}, "'layers' with value '0' doesn't match any type"),
    ({"memory_write": "learned"}, "give feature_map='exp' or 'learned' with it"),
    ({"mask_special_tokens": "yes"}, "'mask_special_tokens' expected bool, got str"),
    ({"position_encoding": "none"}, "'position_encoding' expected one of"),
    ({"segment_lenght": 4}, "has no option segment_lenght: .* Did you mean segment_length"),
    ({"sliding_window": 4}, "has no option sliding_window"),
    ({"note": {"a": [{"__float__": "NaN"}]}}, "note holds NaN or infinity"),
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
    ("infini_llama", {"num_attention_heads": 0}, "num_attention_heads must be at least 1"),
    ("infini_llama", {"num_key_value_heads": 0}, "num_key_value_heads must be at least 1"),
    ("infini_llama", {"num_hidden_layers": 0}, "num_hidden_layers must be at least 1"),
    ("infini_llama", {"hidden_size": -32}, "hidden_size must be at least 1"),
    ("infini_llama", {"intermediate_size": 0}, "intermediate_size must be at least 1"),
    ("infini_llama", {"rms_norm_eps": {"__float__": "NaN"}}, "rms_norm_eps must be"),
    ("infini_llama", {"rope_parameters": {"rope_type": "default", "rope_theta": {"__float__": "NaN"}}}, "NaN or infinity"),
    ("infini_llama", {"attention_dropout": 1.5}, "attention_dropout must be at least 0 and below 1"),
    ("infini_llama", {"hidden_act": "nothing"}, "hidden_act must be one of"),
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
    check_refused(saved, tmp_path, kind, entries(**changes), message)


@pytest.mark.parametrize("config", [CausalMHAConfig, InfiniGPT2Config])
def test_the_model_of_another_architecture(config, saved):
    folder = saved / "infini_llama"
    refused(lambda: config.from_pretrained(folder), "is of the model type 'infini_llama', and a", str(folder))


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
    "empty": (write(b"", "tokenizer.json"), "tokenizer.json is damaged or no JSON"),
    "cut": (cut(0.5, "tokenizer.json"), "tokenizer.json is damaged or no JSON"),
    "a list": (write(b"[]", "tokenizer.json"), "tokenizer"),
    "an object": (write(b"{}", "tokenizer.json"), "tokenizer"),
    "a broken configuration": (write(b"{", "tokenizer_config.json"), "tokenizer_config.json is damaged or no JSON"),
    "too many words": (other_tokenizer(90), "the tokenizer of .* has 90 tokens, and the model 89"),
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
    refused(lambda: load_tokenizer(folder, model), "is not the model's: its tokens have other ids", str(folder))


# --- what may be new --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "load", "options"),
    [
        ("gpt2", AutoInfiniModelForCausalLM, {"segment_length": 8}),
        ("gpt2", AutoInfiniModelForCausalLM, {"segment_length": 8, "memory_init": "learned", "memory_conv": 2}),
        ("infini_gpt2", AutoModelForCausalLM, {"memory_conv": 2}),
        ("infini_gpt2", AutoModelForCausalLM, {"memory_init": "learned"}),
        ("infini_gpt2", AutoModelForCausalLM, {"layers": [0]}),
        ("infini_gpt2", AutoModel, {}),
        ("infini_llama", AutoModel, {}),
        ("causal_mha", AutoModel, {}),
        ("infini_gpt2", AutoModelForSequenceClassification, {"pad_token_id": 0}),
        ("infini_llama", AutoModelForTokenClassification, {}),
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
    refused(lambda: load_causal_lm(tmp_path), r"is no language model: its head is missing \(lm_head.weight\)", str(tmp_path))


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
