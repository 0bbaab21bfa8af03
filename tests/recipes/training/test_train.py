"""The train recipe end to end on tiny models and real text: killed and resumed, distributed,
continued, refused."""

import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2LMHeadModel

from bad_input import refused
from cli import UserError, parse_options
from cli.model_options import ModelOptions, build_config, build_model
from hf_infini import CausalMHAConfig, CausalMHAForCausalLM, InfiniGPT2Config, InfiniGPT2LMHeadModel
from hf_infini.tools import training
from ranks import on_ranks, run_as_rank
from running import (
    CONTEXT,
    ROOT,
    infini_options,
    kill_when,
    load_recipe,
    losses,
    prepared_data,
    result,
    run_recipe,
    self_options,
    straight_run,
)
from support import stages
from training import run_folder, setup

train = load_recipe("train")


@pytest.fixture(scope="module")
def self_run(base):
    run_recipe(
        "train",
        *self_options(prepared_data(base)),
        *f"--gradient_accumulation 4 --out {base / 'self'}".split(),
    )
    return base / "self"


# --- a run ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_leaves_a_model_and_its_numbers(base):
    folder = straight_run(base)
    found = result(folder)
    steps = found["steps"]
    assert steps * 64 * CONTEXT == found["tokens"] and steps > 2 * (steps // 2.5)
    assert found["perplexity"] == pytest.approx(
        torch.tensor(found["cross_entropy"]).double().exp().item()
    )
    assert (
        found["parameters"] > 0 and found["peak_rss_mib"] > 100 and found["tokens_per_second"] > 0
    )
    assert found["options"]["data"] == found["data_fingerprint"] and found["seed"] == 0
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert isinstance(model, InfiniGPT2LMHeadModel) and model.config.segment_length == 16
    # the Trainer's setting is for training only
    assert model.config.use_cache and model.generation_config.use_cache
    assert model.config.vocab_size == len(AutoTokenizer.from_pretrained(folder))
    assert found["gates"] == training.gate_values(model)
    # every gate has moved
    assert all(abs(gate - 0.5) > 1e-4 for layer in found["gates"].values() for gate in layer)
    assert (folder / "loss_curve.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.slow
def test_metrics_lines(base):
    lines = stages.read_jsonl(straight_run(base) / "metrics.jsonl")
    training_lines = [line for line in lines if "train_loss" in line]
    evaluations = [line for line in lines if "eval_loss" in line]
    assert all(line["tokens"] == line["step"] * 64 * CONTEXT for line in lines)
    last = result(straight_run(base))["steps"]
    # every 2 steps, and with every checkpoint
    logged = {*range(2, last + 1, 2), *range(3, last + 1, 3), last}
    assert [line["step"] for line in training_lines] == sorted(logged)
    assert training_lines[-1]["train_loss"] < training_lines[0]["train_loss"] - 0.3  # it learns
    assert evaluations[-1]["step"] == last
    assert all(
        {"learning_rate", "tokens_per_second", "gate_mean"} <= line.keys()
        for line in training_lines
    )
    assert all(list(line["gates"]) == ["0", "1"] for line in evaluations)


@pytest.mark.slow
def test_killed_and_started_again_it_ends_as_if_it_had_run_through(base):
    straight, folder = straight_run(base), base / "killed"
    command = ["train", *infini_options(prepared_data(base)), "--out", folder]
    kill_when((folder / "checkpoint-12" / "model.safetensors").exists, *command)
    assert not (folder / "result.json").exists()
    resumes_at = run_folder.checkpoint_step(run_folder.last_complete_checkpoint(folder))
    # A checkpoint that was killed in the middle
    shutil.copytree(folder / f"checkpoint-{resumes_at}", folder / "checkpoint-91")
    (folder / "checkpoint-91" / "complete.json").unlink()
    done = run_recipe(*command)
    assert f"from step {resumes_at}" in done.stderr
    assert losses(folder) == losses(straight)
    assert result(folder)["cross_entropy"] == result(straight)["cross_entropy"]
    assert sorted(path.name for path in folder.glob("checkpoint-9?")) == []


def test_a_finished_run_says_so_and_other_options_are_refused(base, capsys):
    options = [*map(str, infini_options(prepared_data(base))), "--out", str(straight_run(base))]
    before = (straight_run(base) / "result.json").stat().st_mtime_ns
    train.main(options)
    assert "finished" in capsys.readouterr().out
    assert (straight_run(base) / "result.json").stat().st_mtime_ns == before
    with pytest.raises(SystemExit) as stopped:
        train.main([*options, "--seed", "7", "--update_rule", "delta"])
    message = capsys.readouterr().err
    assert stopped.value.code == 1 and "Traceback" not in message
    assert (
        "seed was 0 and is now 7" in message
        and "update_rule was None and is now 'delta'" in message
    )
    assert "learning_rate was" not in message


def test_a_run_of_other_options_is_another_run(tmp_path):
    (tmp_path / "run.json").write_text('{"attention": "self", "n_layer": 2, "seed": 0}')
    now = {"attention": "self", "n_layer": 2, "seed": 0, "score": None}
    run_folder.check_same_run(tmp_path, now)
    for changed in ({"model": "causal_mha"}, {"score": "dot"}, {"n_layer": None}):
        with pytest.raises(UserError, match=f"{[*changed][0]} was"):
            run_folder.check_same_run(tmp_path, now | changed)


# --- several processes ----------------------------------------------------------------------------


@pytest.mark.slow
def test_two_processes_train_what_one_does(base, self_run):
    options = [*self_options(prepared_data(base)), "--gradient_accumulation", 2]
    assert (
        "2 process(es)"
        in on_ranks(run_as_rank, 2, "train", [*options, "--out", base / "two"])[0][0].stderr
    )
    assert (base / "two" / "checkpoint-5" / "rng_state_1.pth").is_file()
    one, two = losses(self_run), losses(base / "two")
    assert [line[0] for line in one] == [line[0] for line in two]
    for (_, *of_one, _), (_, *of_two, _) in zip(one, two, strict=True):
        # The gradients of 16 rows are summed in another order; 5 steps of AdamW let that grow a
        # little
        assert of_one == [
            pytest.approx(value, rel=1e-4) if value is not None else None for value in of_two
        ]
    assert result(self_run)["tokens"] == result(base / "two")["tokens"]


# --- starting from a model ------------------------------------------------------------------------


@pytest.mark.slow
def test_infini_starts_from_plain_gpt2(base, self_run, tmp_path, capsys):
    shared = f"--data {prepared_data(base)} --use_cpu true --out {tmp_path / 'out'}".split()
    more = "--attention infini --segment_length 8 --memory_conv 2 --max_steps 2".split()
    train.main(
        [
            *shared,
            *more,
            *f"--init_from {self_run} --learning_rate 1e-9 --gradient_checkpointing".split(),
        ]
    )
    plain = GPT2LMHeadModel.from_pretrained(self_run)
    infini = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert infini.config.segment_length == 8 and infini.config.memory_conv == 2
    weights = dict(infini.named_parameters())
    for name, weight in plain.named_parameters():
        # two steps at a rate of 1e-9
        torch.testing.assert_close(weights[name], weight, rtol=0, atol=1e-6)
    # whose own rate is 0.01
    assert not torch.equal(infini.transformer.h[0].attn.gate(), torch.zeros(2))


@pytest.mark.slow
def test_what_a_start_cannot_be(base, self_run, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(self_run)

    def config(context=CONTEXT, **options):
        return build_config(ModelOptions(**options), tokenizer, context)

    with pytest.raises(UserError, match="--init_from: .* are incomplete"):
        build_model(config(attention="self", init_from=str(self_run), n_layer=3), str(self_run))
    with pytest.raises(UserError, match="64 positions.*--position_encoding segment"):
        config(2 * CONTEXT, init_from=str(self_run))
    with pytest.raises(UserError, match="infini_gpt2 model"):
        config(attention="self", init_from=str(straight_run(base)))
    with pytest.raises(UserError, match="no config.json"):
        config(attention="self", init_from=str(tmp_path))
    with pytest.raises(UserError, match="--n_head 3 does not divide --n_embd 256"):
        config(attention="self", n_head=3)
    longer = config(10 * CONTEXT, init_from=str(straight_run(base)))
    assert longer.position_encoding == "segment" and longer.segment_length == 16
    assert build_model(longer, str(straight_run(base))).config.position_encoding == "segment"


# --- parts ----------------------------------------------------------------------------------------


def test_parameter_groups():
    config = InfiniGPT2Config(
        vocab_size=20, n_positions=16, n_embd=8, n_layer=2, n_head=2, segment_length=4
    )
    config.memory_conv = 2
    config.bos_token_id = config.eos_token_id = 0
    model = InfiniGPT2LMHeadModel(config)
    groups = {group["name"]: group for group in training.parameter_groups(model, 1e-3, 0.01, 0.1)}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    members = {
        kind: {names[id(parameter)] for parameter in group["params"]}
        for kind, group in groups.items()
    }
    assert members["gates"] == {f"transformer.h.{layer}.attn.gate.weight" for layer in range(2)}
    assert groups["gates"]["lr"] == 0.01 and groups["gates"]["weight_decay"] == 0.0
    assert groups["vectors"]["lr"] == 1e-3 and groups["vectors"]["weight_decay"] == 0.0
    assert groups["matrices"]["weight_decay"] == 0.1
    assert "transformer.h.0.attn.memory_conv" in members["vectors"]
    assert {"transformer.ln_f.weight", "transformer.h.0.mlp.c_fc.bias"} <= members["vectors"]
    assert {"transformer.wte.weight", "transformer.h.1.attn.c_attn.weight"} <= members["matrices"]
    assert sum(map(len, members.values())) == len(names)  # each in one group
    groups = {
        group["name"]: group["params"]
        for group in training.parameter_groups(model.bfloat16(), 1e-3, 0.01, 0.1)
    }
    dtypes = {kind: {parameter.dtype for parameter in group} for kind, group in groups.items()}
    assert dtypes == {
        "gates": {torch.float32},
        "vectors": {torch.bfloat16},
        "matrices": {torch.bfloat16},
    }
    config = CausalMHAConfig(
        n_layer=1, n_embd=8, n_head=2, score="additive", position_encoding="relative_key"
    )
    groups = {
        group["name"]: group
        for group in training.parameter_groups(CausalMHAForCausalLM(config), 1e-3, 0.01, 0.1)
    }
    assert (
        "gates" not in groups
        and sum(parameter.dim() > 1 for parameter in groups["vectors"]["params"]) >= 3
    )


def test_the_first_end_reached_counts():
    def steps(**ends):
        return setup.number_of_steps(
            train.RunOptions(data="", out="", **ends), 10, tokens_per_step=100
        )

    assert (steps(), steps(epochs=2.5), steps(max_steps=3), steps(max_tokens=1201)) == (
        10,
        25,
        3,
        13,
    )
    assert (steps(epochs=1.0, max_tokens=5000), steps(max_steps=40, max_tokens=5000)) == (10, 40)


def test_user_errors(base, tmp_path, capsys):
    for options, message in (
        (["--batch_size", "100000"], "lower --batch_size"),
        (["--layers", "0", "9"], "layers must name some of the 4 layers"),
    ):
        words = [
            "--data",
            prepared_data(base),
            *f"--use_cpu true --out {tmp_path / 'o'}".split(),
            *options,
        ]
        refused(train.main, words, capsys, message, keeps=tmp_path)


CONFIGS = sorted(
    path
    for path in (ROOT / "recipes" / "configs").glob("[!a]*.yaml")
    if "train.py" in path.read_text()
)


def test_every_config_is_parsed_by_the_recipe():
    for config in CONFIGS:
        first_line = config.read_text(encoding="utf-8").splitlines()[0]
        assert first_line.startswith(
            "# python recipes/train.py --config recipes/configs/" + config.name
        )
        _, shape, _ = parse_options(*OPTIONS, description="", argv=first_line.split()[3:])
        assert shape.model == "causal_mha" or shape.segment_length


OPTIONS = (train.RunOptions, ModelOptions, train.OptimizerOptions)


@pytest.mark.parametrize("name", ["quickstart", "carolina"])
def test_self_and_infini_differ_by_the_attention(name):
    files = [ROOT / "recipes" / "configs" / f"{name}_{kind}.yaml" for kind in ("self", "infini")]
    argv = ["--data", "d", "--out", "o", "--config"]
    parsed = [parse_options(*OPTIONS, description="", argv=[*argv, str(file)]) for file in files]
    one, other = ({k: v for part in parts for k, v in vars(part).items()} for parts in parsed)
    assert {name for name in one if one[name] != other[name]} == {"attention", "segment_length"}
