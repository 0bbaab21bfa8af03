"""The train recipe with the from-scratch family: its options, its kinds of attention end to end,
and what is refused."""

import math

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from cli import NotPossible, UserError, parse_options
from cli.model_options import MEMORY, SCRATCH, ModelOptions, build_config, build_model
from evaluation.perplexity import measure_perplexity, prepared_rows
from hf_infini import CausalMHAForCausalLM
from hf_infini.models.scratch.configuration import CausalMHAConfig
from hf_infini.tools import training
from running import (
    CONTEXT,
    KINDS,
    ROOT,
    load_recipe,
    prepared_data,
    result,
    trained,
)
from support import stages
from support.rows import RowReader
from training import setup

train = load_recipe("train")


@pytest.fixture(scope="session")
def tokenizer(base):
    return AutoTokenizer.from_pretrained(prepared_data(base) / "tokenizer")


# --- runs -----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_attention_trains(base, kind):
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
        assert str(getattr(model.config, flag[2:])).lower() == value or getattr(
            model.config, flag[2:]
        ) == float(value)
    assert model.num_parameters() == found["parameters"]
    rows = prepared_rows(prepared_data(base), "validation")
    # The same rows in batches of another size, ends of text not counted: sums in another order
    reader = RowReader(AutoTokenizer.from_pretrained(folder).all_special_ids)
    again = measure_perplexity(model, rows, reader, chunk=10**6, batch_size=7)
    assert again["cross_entropy"] == pytest.approx(found["cross_entropy"], rel=1e-5)
    assert (kind == "infini") == bool(found["gates"])
    if kind == "infini":
        assert found["gates"] == training.gate_values(model) and list(found["gates"]) == ["0", "1"]
        at_the_start = torch.sigmoid(torch.tensor(-1.0)).item()
        assert all(
            abs(gate - at_the_start) > 1e-4 for layer in found["gates"].values() for gate in layer
        )


# --- starting from a model ------------------------------------------------------------------------


@pytest.mark.slow
def test_a_trained_model_gets_a_memory(base, tmp_path):
    start = trained(base, "local")
    options = (
        f"--data {prepared_data(base)} --use_cpu true --model causal_mha --max_steps 2".split()
    )
    options += [
        *f"--attention infini --init_from {start} --learning_rate 1e-9".split(),
        *f"--out {tmp_path / 'o'}".split(),
    ]
    train.main(options)
    before, after = (
        AutoModelForCausalLM.from_pretrained(folder) for folder in (start, tmp_path / "o")
    )
    assert after.config.segment_length == CONTEXT // 8 and after.config.sliding_window is None
    assert (
        after.config.position_encoding == "rope"
        and after.config.rope_theta == 100
        and after.config.n_inner == 48
    )
    weights = dict(after.named_parameters())
    for name, weight in before.named_parameters():
        # two steps at a rate of 1e-9
        torch.testing.assert_close(weights.pop(name), weight, rtol=0, atol=1e-6)
    assert sorted(weights) == [f"transformer.h.{layer}.attn.gate.weight" for layer in (0, 1)]
    assert all(gate.abs().min() > 1e-3 for gate in weights.values())  # their own rate is 0.01


# --- options --------------------------------------------------------------------------------------


def test_defaults_are_the_configurations_own(tokenizer):
    config = build_config(ModelOptions(model="causal_mha"), tokenizer, CONTEXT)
    fresh = CausalMHAConfig()
    names = (*MEMORY, *SCRATCH)
    assert {name: getattr(config, name) for name in names} == {
        name: getattr(fresh, name) for name in names
    }
    assert (config.attention, config.n_positions, config.vocab_size) == (
        "global",
        CONTEXT,
        len(tokenizer),
    )
    assert (config.eos_token_id, config.pad_token_id) == (
        tokenizer.eos_token_id,
        tokenizer.pad_token_id,
    )
    local = build_config(ModelOptions(model="causal_mha", attention="local"), tokenizer, CONTEXT)
    infini = build_config(ModelOptions(model="causal_mha", attention="infini"), tokenizer, CONTEXT)
    assert (local.sliding_window, local.segment_length) == (CONTEXT // 8, None)
    assert (infini.sliding_window, infini.segment_length) == (None, CONTEXT // 8)


def test_options_that_do_not_go_together(tokenizer):
    for options, message in (
        (
            {"segment_length": 4},
            "--segment_length belongs to --attention infini and does nothing "
            "with --attention global",
        ),
        (
            {"position_encoding": "segment"},
            r"'position_encoding' expected one of \('learned', .*\), got segment",
        ),
        (
            {"model": "gpt2", "attention": "self", "segment_length": 8},
            "belongs to --attention infini .* self: leave it",
        ),
        (
            {"model": "gpt2", "attention": "self", "position_encoding": "rope"},
            "rope, but GPT-2's .* --model causal_mha",
        ),
        (
            {"attention": "self"},
            "--attention self, but --model causal_mha has global, local, infini, none",
        ),
        (
            {"model": "gpt2", "score": "dot"},
            "--score belongs to --model causal_mha and does nothing with --model gpt2",
        ),
        (
            {"attention": "none", "qkv_bias": False},
            "--qkv_bias belongs to --attention global or local or infini",
        ),
        (
            {"position_encoding": "alibi", "max_distance": 9},
            "--max_distance belongs to .* relative_key or t5 and does",
        ),
        (
            {"attention": "infini", "position_encoding": "alibi"},
            "attention='infini' goes with position_encoding",
        ),
        ({"n_head": 3}, "n_head=3 must divide n_embd=256"),
        ({"dropout": 1.5}, "dropout must be at least 0 and below 1"),
    ):
        with pytest.raises(UserError, match=message) as error:
            build_config(ModelOptions(**{"model": "causal_mha"} | options), tokenizer, CONTEXT)
        assert str(error.value).startswith(NotPossible.prefix) and "\n" not in str(error.value)


@pytest.mark.parametrize(("attention", "rate"), [("self", None), ("infini", 0.01)])
def test_a_rate_of_gates_is_for_models_with_gates(tokenizer, attention, rate):
    config = build_config(
        ModelOptions(attention=attention, mask_special_tokens=False), tokenizer, CONTEXT
    )
    assert setup.gate_rate(None, config) == rate
    if rate is None:
        with pytest.raises(
            UserError,
            match="--gate_learning_rate is for the gates of a memory, and this model has none",
        ):
            setup.gate_rate(0.5, config)
    else:
        assert setup.gate_rate(0.5, config) == 0.5


CONFIGS = sorted((ROOT / "recipes" / "configs").glob("shakespeare_*.yaml"))


def test_the_shakespeare_configs_make_their_models(tokenizer):
    for file in CONFIGS:
        argv = ["--data", "d", "--out", "o", "--config", str(file)]
        _, shape, _ = parse_options(
            train.RunOptions, ModelOptions, train.OptimizerOptions, description="", argv=argv
        )
        config = build_config(shape, tokenizer, 50)
        assert (config.n_embd, config.n_layer, config.n_inner) == (128, 2, 512)
        config.vocab_size = 109  # the published table's
        # the sum of its rows: nobody's budget is larger
        assert build_model(config, None).num_parameters() <= 431_104
