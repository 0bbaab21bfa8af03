"""The train recipe with the from-scratch family: its options, its kinds of attention end to end, and what is refused."""

import dataclasses
import json
import math
import shutil
import typing

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from cli import NotPossible, UserError, parse_options
from cli.model_options import MEMORY, SCRATCH, ModelOptions, build_config, build_model
from evaluation.inference import check_length
from hf_infini import CausalMHAForCausalLM, InfiniGPT2Config
from hf_infini.models.scratch.configuration import CausalMHAConfig
from hf_infini.models.scratch.options import ScratchOptions
from hf_infini.options import choices, context_limit
from hf_infini.tools import training
from hf_infini.tools.metrics import evaluate_rows
from hf_infini.tools.rows import RowReader
from running import (
    CONTEXT,
    KINDS,
    ROOT,
    STEPS,
    causal_mha_options,
    load_recipe,
    losses,
    prepared_data,
    result,
    run_recipe,
    straight_run,
    trained,
)
from support import stages
from training import setup

train = load_recipe("train")


@pytest.fixture(scope="session")
def tokenizer(base):
    return AutoTokenizer.from_pretrained(prepared_data(base) / "tokenizer")


# --- runs -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_attention_trains(base, kind):
    from datasets import load_from_disk

    folder = trained(base, kind)
    found, lines = result(folder), stages.read_jsonl(folder / "metrics.jsonl")
    trainings = [line["train_loss"] for line in lines if "train_loss" in line]
    assert trainings[-1] < trainings[0] - 0.2  # it learns
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert isinstance(model, CausalMHAForCausalLM) and model.config.attention == kind
    assert found["cross_entropy"] < math.log(model.config.vocab_size)  # that of knowing nothing
    assert found["options"]["model"] == "causal_mha" and found["options"]["attention"] == kind
    given = dict(zip(KINDS[kind][::2], KINDS[kind][1::2], strict=True))
    for flag, value in given.items():
        assert str(getattr(model.config, flag[2:])).lower() == value or getattr(model.config, flag[2:]) == float(value)
    assert model.num_parameters() == found["parameters"]
    rows = load_from_disk(str(prepared_data(base) / "validation")).with_format("torch")
    # The same rows in batches of another size, ends of text not counted: sums in another order
    reader = RowReader(AutoTokenizer.from_pretrained(folder).all_special_ids)
    assert evaluate_rows(model, rows, 7, reader)["cross_entropy"] == pytest.approx(found["cross_entropy"], rel=1e-5)
    assert (folder / "gates.json").exists() == (kind == "infini") == bool(found["gates"])
    if kind == "infini":
        assert found["gates"] == training.gate_values(model) and list(found["gates"]) == ["0", "1"]
        at_the_start = torch.sigmoid(torch.tensor(-1.0)).item()
        assert all(abs(gate - at_the_start) > 1e-4 for layer in found["gates"].values() for gate in layer)


@pytest.mark.slow
def test_resumed_it_ends_as_if_it_had_run_through(base, capsys):
    straight, folder = trained(base, "infini"), base / "causal_mha_resumed"
    shutil.copytree(straight, folder)
    for path in (folder / "result.json", folder / f"checkpoint-{STEPS}" / "complete.json"):
        path.unlink()
    train.main([*causal_mha_options(base, "infini"), "--out", str(folder)])
    assert f"from step {STEPS - 3}" in capsys.readouterr().err
    assert losses(folder) == losses(straight)
    assert result(folder)["cross_entropy"] == result(straight)["cross_entropy"]


def test_a_changed_option_is_another_run(base, capsys):
    with pytest.raises(SystemExit):
        train.main([*causal_mha_options(base, "global"), "--num_buckets", "6", "--out", str(trained(base, "global"))])
    assert "num_buckets was 8 and is now 6" in capsys.readouterr().err


# --- starting from a model --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_trained_model_gets_a_memory(base, tmp_path):
    start = trained(base, "local")
    options = ["--data", str(prepared_data(base)), "--use_cpu", "true", "--model", "causal_mha", "--max_steps", "2"]
    options += ["--attention", "infini", "--init_from", str(start), "--learning_rate", "1e-9", "--out", str(tmp_path / "o")]
    train.main(options)
    before, after = (AutoModelForCausalLM.from_pretrained(folder) for folder in (start, tmp_path / "o"))
    assert after.config.segment_length == CONTEXT // 8 and after.config.sliding_window is None
    assert after.config.position_encoding == "rope" and after.config.rope_theta == 100 and after.config.n_inner == 48
    weights = dict(after.named_parameters())
    for name, weight in before.named_parameters():
        torch.testing.assert_close(weights.pop(name), weight, rtol=0, atol=1e-6)  # two steps at a rate of 1e-9
    assert sorted(weights) == [f"transformer.h.{layer}.attn.gate.weight" for layer in (0, 1)]
    assert all(gate.abs().min() > 1e-3 for gate in weights.values())  # their own rate is 0.01


@pytest.mark.slow
def test_what_a_start_cannot_be(base, tokenizer):
    def config(context=CONTEXT, **options):
        return build_config(ModelOptions(**{"model": "causal_mha"} | options), tokenizer, context)

    local, learned = str(trained(base, "local")), str(trained(base, "infini"))
    with pytest.raises(UserError, match="is a causal_mha model, --model gpt2 --attention infini starts from gpt2"):
        config(model="gpt2", init_from=local)
    with pytest.raises(UserError, match="is a infini_gpt2 model, --model causal_mha starts from causal_mha"):
        config(init_from=str(straight_run(base)))
    with pytest.raises(UserError, match="--n_inner 64, but .* has 48: leave --n_inner out"):
        config(init_from=local, n_inner=64)
    with pytest.raises(UserError, match="--qkv_bias True, but .* has False"):
        config(init_from=local, qkv_bias=True)
    with pytest.raises(UserError, match="--num_buckets belongs to --position_encoding t5 .* --position_encoding rope"):
        config(init_from=local, num_buckets=16)  # what counts is the encoding that the model has
    with pytest.raises(UserError, match=f"{CONTEXT} positions, .* {2 * CONTEXT} tokens.*--position_encoding rope"):
        config(2 * CONTEXT, init_from=learned)
    assert config(2 * CONTEXT, init_from=local).n_positions == 2 * CONTEXT
    kept = config(init_from=local)
    assert (kept.attention, kept.sliding_window, kept.rope_theta) == ("local", 5, 100)
    assert config(init_from=str(trained(base, "none")), n_inner=4 * 32).attention == "none"  # its own default, given


# --- options ----------------------------------------------------------------------------------------------------------


def test_the_options_are_those_of_the_configuration():
    types = typing.get_type_hints(ModelOptions)
    found = {value for part in typing.get_args(types["attention"]) for value in typing.get_args(part)}
    assert found == {"self", *choices(ScratchOptions)["attention"]}
    assert {*MEMORY, *SCRATCH} <= {field.name for field in dataclasses.fields(CausalMHAConfig)}
    assert {*MEMORY, "position_encoding"} <= {field.name for field in dataclasses.fields(InfiniGPT2Config)}


def test_defaults_are_the_configurations_own(tokenizer):
    config = build_config(ModelOptions(model="causal_mha"), tokenizer, CONTEXT)
    fresh = CausalMHAConfig()
    names = (*MEMORY, *SCRATCH)
    assert {name: getattr(config, name) for name in names} == {name: getattr(fresh, name) for name in names}
    assert (config.attention, config.n_positions, config.vocab_size) == ("global", CONTEXT, len(tokenizer))
    assert (config.eos_token_id, config.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)
    local = build_config(ModelOptions(model="causal_mha", attention="local"), tokenizer, CONTEXT)
    infini = build_config(ModelOptions(model="causal_mha", attention="infini"), tokenizer, CONTEXT)
    assert (local.sliding_window, local.segment_length) == (CONTEXT // 8, None)
    assert (infini.sliding_window, infini.segment_length) == (None, CONTEXT // 8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_segments": 4}, "--n_segments belongs to --attention infini and does nothing with --attention global"),
        ({"attention": "infini", "layers": [0]}, r"layers=\[0\] is for infini_gpt2"),
        ({"position_encoding": "segment"}, r"'position_encoding' expected one of \('learned', .*\), got segment"),
        *(({"model": "gpt2", "attention": "self", name: value}, f"--{name} belongs to --attention infini .* self: leave it")
          for name, value in (("segment_length", 8), ("gate_init", 0.0), ("layers", [0]), ("memory_conv", 0))),
        ({"model": "gpt2", "attention": "self", "position_encoding": "rope"}, "rope, but GPT-2's .* --model causal_mha"),
        ({"attention": "self"}, "--attention self, but --model causal_mha has global, local, infini, none"),
        ({"model": "gpt2", "score": "dot"}, "--score belongs to --model causal_mha and does nothing with --model gpt2"),
        ({"model": "gpt2", "n_inner": 64}, "--n_inner belongs to --model causal_mha"),
        ({"model": "gpt2", "attention": "none"}, "--attention none, but --model gpt2 has infini, self"),
        ({"sliding_window": 4}, "--sliding_window belongs to --attention local .* --attention global"),
        ({"attention": "local", "gate_init": 0.0}, "--gate_init belongs to --attention infini .* --attention local"),
        ({"attention": "none", "qkv_bias": False}, "--qkv_bias belongs to --attention global or local or infini"),
        ({"rope_theta": 10.0}, "--rope_theta belongs to --position_encoding rope .* --position_encoding learned"),
        ({"position_encoding": "alibi", "max_distance": 9}, "--max_distance belongs to .* relative_key or t5 and does"),
        ({"attention": "infini", "position_encoding": "alibi"}, "attention='infini' goes with position_encoding"),
        ({"attention": "none", "position_encoding": "rope"}, "attention='none' has none"),
        ({"attention": "local", "sliding_window": 0}, "sliding_window must be at least 1; got 0"),
        ({"n_head": 3}, "n_head=3 must divide n_embd=256"),
        ({"activation_function": "sigmoidal"}, "activation_function must be one of"),
        ({"dropout": 1.5}, "dropout must be at least 0 and below 1"),
        ({"model": "gpt2", "dropout": 2.0}, "--dropout must be at least 0 and below 1; got 2"),
    ],
)
def test_options_that_do_not_go_together(tokenizer, options, message):
    with pytest.raises(UserError, match=message) as error:
        build_config(ModelOptions(**{"model": "causal_mha"} | options), tokenizer, CONTEXT)
    assert str(error.value).startswith(NotPossible.prefix) and "\n" not in str(error.value)


@pytest.mark.parametrize(("attention", "rate"), [("self", None), ("infini", 0.01)])
def test_a_rate_of_gates_is_for_models_with_gates(tokenizer, attention, rate):
    config = build_config(ModelOptions(attention=attention, mask_special_tokens=False), tokenizer, CONTEXT)
    optimizer = train.OptimizerOptions()
    setup.set_gate_rate(optimizer, config)
    assert optimizer.gate_learning_rate == rate
    optimizer.gate_learning_rate = 0.5
    if rate is None:
        with pytest.raises(UserError, match="--gate_learning_rate is for the gates of a memory, and this model has none"):
            setup.set_gate_rate(optimizer, config)
    else:
        setup.set_gate_rate(optimizer, config)
        assert optimizer.gate_learning_rate == 0.5


@pytest.mark.slow
def test_a_refused_model_leaves_no_folder(base, tmp_path):
    shared = ["--data", prepared_data(base), "--use_cpu", "true", "--out", tmp_path / "out"]
    done = run_recipe("train", *shared, "--model", "causal_mha", "--rope_theta", 10, check=False)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith(f"error: {NotPossible.prefix}--rope_theta belongs to")
    assert not (tmp_path / "out").exists()


# --- optimisation and inference ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "options", "vectors"),
    [
        ("global", {"score": "additive", "position_encoding": "relative_key"},
         {"score_weight", "score_vector", "relative_table"}),
        ("local", {"score": "general", "position_encoding": "t5"}, {"score_weight", "relative_bias"}),
        ("infini", {"score": "general"}, {"score_weight"}),
    ],
)  # fmt: skip
def test_scores_tables_and_gates_do_not_decay(tokenizer, kind, options, vectors):
    options = ModelOptions(model="causal_mha", attention=kind, n_layer=1, n_embd=8, n_head=2, qkv_bias=True, **options)
    model = build_model(build_config(options, tokenizer, CONTEXT), None)
    groups = {group["name"]: group for group in training.parameter_groups(model, 1e-3, 0.01, 0.1)}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    members = {name: {names[id(parameter)] for parameter in group["params"]} for name, group in groups.items()}
    assert {f"transformer.h.0.attn.{name}" for name in vectors} <= members["vectors"]
    assert {"transformer.h.0.attn.W_query.bias", "transformer.h.0.ln_1.weight"} <= members["vectors"]
    assert members["matrices"] >= {f"transformer.h.0.attn.{name}.weight" for name in ("W_query", "W_value", "out_proj")}
    assert members["matrices"] >= {"lm_head.weight", "transformer.wte.weight", "transformer.h.0.mlp.fc_in.weight"}
    assert groups["vectors"]["weight_decay"] == 0.0 and groups["matrices"]["weight_decay"] == 0.1
    assert members.get("gates", set()) == ({"transformer.h.0.attn.gate.weight"} if kind == "infini" else set())
    assert sum(map(len, members.values())) == len(names)  # each in one group


def test_only_learned_positions_end():
    assert context_limit(CausalMHAConfig(n_positions=32)) == 32
    for encoding in set(choices(ScratchOptions)["position_encoding"]) - {"learned"}:
        config = CausalMHAConfig(n_positions=32, position_encoding=encoding)
        assert context_limit(config) is None
        check_length(config, 10_000)
    with pytest.raises(UserError, match="33 tokens, but this model has 32 .*--model causal_mha --position_encoding rope"):
        check_length(CausalMHAConfig(n_positions=32), 33)


CONFIGS = sorted((ROOT / "recipes" / "configs").glob("shakespeare_*.yaml"))


@pytest.mark.parametrize("file", CONFIGS, ids=lambda path: path.stem)
def test_the_shakespeare_configs_make_their_models(tokenizer, file):
    _, shape, _ = parse_options(
        train.RunOptions, ModelOptions, train.OptimizerOptions, description="",
        argv=["--data", "d", "--out", "o", "--config", str(file)],
    )  # fmt: skip
    config = build_config(shape, tokenizer, 50)
    assert (config.n_embd, config.n_layer, config.n_inner) == (128, 2, 512)
    config.vocab_size = 109  # the published table's
    assert build_model(config, None).num_parameters() <= 431_104  # the sum of its rows: nobody's budget is larger
    assert json.loads(config.to_json_string())["model_type"] == "causal_mha"


def test_the_shakespeare_configs_differ_by_the_attention():
    def given(file):
        lines = [line.split("#")[0].split(":") for line in file.read_text(encoding="utf-8").splitlines()]
        return {line[0].strip(): line[1].strip() for line in lines if len(line) == 2}

    one, other = (given(ROOT / "recipes" / "configs" / f"shakespeare_{name}.yaml") for name in ("published", "no_attention"))
    different = {name for name in one.keys() | other.keys() if one.get(name) != other.get(name)}
    assert different == {"attention", "score", "n_head", "qkv_bias"}  # what belongs to the heads
