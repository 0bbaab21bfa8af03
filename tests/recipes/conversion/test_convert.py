"""recipes/convert.py, run as a user runs it: on a tiny pretrained decoder, stopped and continued, and refused."""

import json
import shutil

import pytest
import torch
from datasets import load_from_disk
from safetensors.torch import load_file
from transformers import AutoConfig, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import running
from bad_input import refused
from cli import parse_options
from cli.model_options import given_options
from evaluation.perplexity import measure_perplexity, prepared_rows
from hf_infini import InfiniGPT2Config, load_adapter, patch_model, save_adapter
from hf_infini.models.loading import load_causal_lm
from hf_infini.tools.rows import RowReader
from models import gpt2
from running import CONTEXT, ROOT, load_recipe, prepared_data

convert, prepare_recall, evaluate_model = map(load_recipe, ("convert", "prepare_recall", "evaluate_model"))
WINDOW = ["--segment_length", 8, "--local_segments", 1, "--sink_tokens", 2, "--narrow_to", 4, 6]
STEPS = ["--transfer_steps", 4, "--together_steps", 3, "--save_steps", 2, "--gradient_accumulation", 1, "--lora_rank", 2]
SMALL = ["--transfer_rows", 6, "--evaluation_rows", 2, "--use_cpu", "true", "--precision", "float32"]


@pytest.fixture(scope="module")
def checkpoint(base):
    """A tiny Llama for the prepared rows."""
    tokenizer = AutoTokenizer.from_pretrained(prepared_data(base) / "tokenizer")
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), initializer_range=0.3, **sizes))
    model.save_pretrained(base / "llama")
    tokenizer.save_pretrained(base / "llama")
    return base / "llama"


def another_model(checkpoint, folder) -> str:
    """The folder of a model with other weights and the same tokenizer."""
    LlamaForCausalLM(AutoConfig.from_pretrained(checkpoint)).save_pretrained(folder / "another")
    AutoTokenizer.from_pretrained(checkpoint).save_pretrained(folder / "another")
    return str(folder / "another")


def run(checkpoint, base, out, *options) -> dict:
    argv = ["--model", checkpoint, "--data", prepared_data(base), "--out", out, *WINDOW, *STEPS, *SMALL, *options]
    convert.main([*map(str, argv)])
    return json.loads((out / "result.json").read_text())


@pytest.mark.slow
def test_a_score_that_is_fitted_is_all_that_is_learned(checkpoint, base, tmp_path, capsys):
    only = ["--transfer_steps", 0, "--together_steps", 0]
    options = [*only, "--kept_tokens", 7, "--keep_score", "half", "--fit_rows", 3]
    result = run(checkpoint, base, tmp_path / "out", *options)
    measured = result["validation"][str(prepared_data(base))]
    kept = "window, sinks and kept tokens, otherwise untrained"
    assert [*measured["cross_entropy"]][:3] == ["plain model", "window and sinks, untrained", kept]
    losses = {name: values["nats"]["value"] for name, values in measured["cross_entropy"].items()}
    # The adapter has bfloat16, which leaves the order of most scores
    assert losses["trained, memory on"] == losses["trained, memory off"] == losses[kept]
    assert len(set(losses.values())) == 3 and result["keep_score"] == {"rows": 3, "tokens": 3 * CONTEXT}
    assert {name.rpartition(".")[2] for name in load_file(tmp_path / "out" / "adapter" / "infini_adapter.safetensors")} == {
        "weight", "keep_weight"
    }  # fmt: skip
    model = load_adapter(LlamaForCausalLM.from_pretrained(checkpoint), tmp_path / "out" / "adapter")
    assert model.config.kept_tokens == 7 and model.config.feature_map == "elu"
    fitted = json.loads((tmp_path / "out" / "keep_score.json").read_text())["by_layer"]
    run(checkpoint, base, tmp_path / "out", *options)  # takes what was fitted
    assert json.loads((tmp_path / "out" / "keep_score.json").read_text())["by_layer"] == fitted
    argv = ["--model", checkpoint, "--data", prepared_data(base), "--out", tmp_path / "new", *WINDOW, *SMALL, *only]
    refused(convert.main, [*argv, "--kept_tokens", CONTEXT, "--keep_score", "half"], capsys, "prepare longer rows")


def test_a_conversion_leaves_an_adapter_and_its_measurements(checkpoint, base, tmp_path, capsys):
    result = run(checkpoint, base, tmp_path / "out", "--memory_in", 1, 2)
    measured = result["validation"][str(prepared_data(base))]
    conditions = measured["cross_entropy"]
    assert list(conditions) == [
        "plain model", "full attention in the layers with a memory", "window and sinks, untrained", "trained, memory off",
        "trained, memory on",
    ]  # fmt: skip
    assert conditions["trained, memory on"]["above_memory_on"] == {"value": 0, "low": 0, "high": 0}
    assert measured["tokens"] == 2 * (CONTEXT - 18) and "| plain model " in capsys.readouterr().out
    assert result["transfer"]["steps"] == 4 and result["together"]["tokens"] == 3 * CONTEXT
    model = load_adapter(LlamaForCausalLM.from_pretrained(checkpoint), tmp_path / "out" / "adapter").eval()
    adapted = [name for name, _ in model.named_parameters() if "lora" in name]
    assert adapted and not any(".layers.0." in name for name in adapted)
    from conversion.evaluation import evaluate
    from conversion.stages import with_labels
    from support.prepared import open_rows

    rows = torch.stack([*open_rows(prepared_data(base), "validation").with_transform(with_labels)[:2].values()], 1)
    again = evaluate(model, rows, 18, [1, 2])["cross_entropy"]
    for name, values in conditions.items():
        assert again[name]["nats"]["value"] == pytest.approx(values["nats"]["value"], rel=1e-5)

    # Recipes read the plain model with the adapter
    given = ["--model", checkpoint, "--data", prepared_data(base), "--max_tokens", 2 * CONTEXT, "--out", tmp_path / "e"]
    evaluate_model.main([*map(str, [*given, "--adapter", tmp_path / "out" / "adapter"])])
    found = json.loads((tmp_path / "e.json").read_text())
    rows = prepared_rows(prepared_data(base), "validation", 2 * CONTEXT)
    reader = RowReader(AutoTokenizer.from_pretrained(checkpoint).all_special_ids)
    assert found["adapter"] == str(tmp_path / "out" / "adapter")
    wanted = measure_perplexity(model, rows, reader, chunk=10**6, batch_size=2)
    assert found["cross_entropy"] == pytest.approx(wanted["cross_entropy"], rel=1e-4)

    # Nothing is trained again to evaluate other rows
    longer = tmp_path / "longer"
    source = ["--source", base / "train_data" / "text.jsonl", "--tokenizer", prepared_data(base) / "tokenizer"]
    running.run_recipe("prepare", *source, "--context", 2 * CONTEXT, "--validation", 0.1, "--out", longer)
    documents = [(folder / "validation_documents.jsonl").read_bytes() for folder in (longer, prepared_data(base))]
    assert documents[0] == documents[1]
    options = ["--memory_in", 1, 2, "--evaluation_data", longer, "--evaluation_from", CONTEXT, "--evaluation_rows", 1]
    again = run(checkpoint, base, tmp_path / "out", *options)
    assert again["validation"].keys() == {str(longer)} and again["validation"][str(longer)]["tokens"] == CONTEXT
    assert again["together"] == result["together"]


@pytest.mark.slow
def test_it_goes_on_from_an_adapter(checkpoint, base, tmp_path, capsys):
    first = run(checkpoint, base, tmp_path / "first", "--memory_in", 1, 2, "--together_learning_rate", 0.01)
    adapter = tmp_path / "first" / "adapter"
    same = ["--model", checkpoint, "--data", prepared_data(base), "--start", adapter, "--narrow_to", 4, 6]

    def go_on(name: str, *options) -> dict:
        convert.main([*map(str, [*same, *STEPS, *SMALL, "--out", tmp_path / name, *options])])
        return json.loads((tmp_path / name / "result.json").read_text())

    still, further = go_on("still", "--together_learning_rate", 1e-12), go_on("further", "--together_learning_rate", 0.01)
    nats = [[*found["validation"].values()][0]["cross_entropy"] for found in (first, still, further)]
    for name, values in nats[0].items():
        assert nats[1][name]["nats"]["value"] == pytest.approx(values["nats"]["value"], rel=1e-5)
    assert "transfer" not in further and further["layers"] == [1, 2]
    assert not (tmp_path / "further" / "calibration.json").exists()
    for file in ("infini_adapter.safetensors", "adapter_model.safetensors"):
        before, after = (load_file(tmp_path / name / "adapter" / file) for name in ("first", "further"))
        changed = {key for key in before if not torch.equal(before[key], after[key])}
        assert changed == {key for key in before if "lora_" in key or key[0] in "12"}
    # No steps: it is evaluated, here with other segments, for which the rows are too short to train on
    as_it_is = go_on("as_it_is", "--together_steps", 0, "--segment_length", 24)
    assert as_it_is["layers"] == [1, 2]
    read = load_adapter(LlamaForCausalLM.from_pretrained(checkpoint), tmp_path / "as_it_is" / "adapter")
    assert read.config.segment_length == 24 and [*as_it_is["validation"].values()][0]["tokens"] == 2 * (CONTEXT - 50)
    for name in ("infini_adapter.safetensors", "adapter_model.safetensors"):
        before, after = (load_file(tmp_path / folder / "adapter" / name) for folder in ("first", "as_it_is"))
        assert all(torch.equal(before[key], after[key]) for key in before | after)
    shutil.copytree(adapter, tmp_path / "damaged")
    (tmp_path / "damaged" / "adapter_config.json").write_text("{")
    for options, mentions in [
        (["--start", tmp_path / "damaged"], ["cannot read", "damaged/adapter_config.json"]),
        (["--local_segments", 0], ["--local_segments is as the adapter of --start has it"]),
        (["--lora_rank", 3], ["--lora_rank 3: the LoRA of", "has rank 2; leave it out"]),
        (["--start", tmp_path / "first"], ["--start: ", "infini_adapter.json"]),
        (["--model", another_model(checkpoint, tmp_path)], ["--start: the adapter of", "was trained with another model"]),
    ]:
        argv = [*same, *STEPS, *SMALL, "--out", tmp_path / "refused", *options]
        refused(convert.main, argv, capsys, *mentions, keeps=tmp_path)


def test_recipes_refuse_an_adapter_of_another_model(checkpoint, tmp_path, capsys):
    save_adapter(patch_model(LlamaForCausalLM.from_pretrained(checkpoint), segment_length=8), tmp_path / "adapter")
    (tmp_path / "text.txt").write_text("abc")
    more = {"evaluate_model": ["--text", tmp_path / "text.txt"], "generate": ["--prompt", "a"], "inspect_heads": []}
    another = another_model(checkpoint, tmp_path)
    for recipe, words in more.items():
        argv = ["--model", another, "--adapter", tmp_path / "adapter", *words]
        refused(load_recipe(recipe).main, argv, capsys, "--adapter: the adapter of", "another model", keeps=tmp_path)


@pytest.mark.slow
def test_rows_that_ask_beside_running_text(checkpoint, base, tmp_path):
    asking = tmp_path / "asking"
    rows = ["--context", CONTEXT, "--rows", 8, "--validation_rows", 3, "--mix", "echo=1"]
    prepare_recall.main([*map(str, ["--data", prepared_data(base), "--out", asking, *rows])])
    result = run(checkpoint, base, tmp_path / "out", "--data", prepared_data(base), asking, "--together_steps", 1)
    labels = torch.tensor(load_from_disk(str(asking / "validation"))[:2]["labels"])[:, 18:]  # beyond the window
    measured = result["validation"][str(asking)]
    assert 0 < measured["tokens"] == int((labels != -100).sum()) < labels.numel()
    assert result["validation"][str(prepared_data(base))]["tokens"] == labels.numel()


@pytest.mark.slow
def test_a_gpt2(checkpoint, base, tmp_path, capsys):
    AutoTokenizer.from_pretrained(checkpoint).save_pretrained(tmp_path / "gpt2")
    gpt2(vocab_size=LlamaConfig.from_pretrained(checkpoint).vocab_size, n_layer=2).save_pretrained(tmp_path / "gpt2")
    run(tmp_path / "gpt2", base, tmp_path / "out", "--narrow", 0, 0)
    adapted = load_adapter(load_causal_lm(tmp_path / "gpt2"), tmp_path / "out" / "adapter")
    assert adapted.config.infini_layers == [0, 1]
    argv = ["--model", tmp_path / "gpt2", "--data", prepared_data(base), "--dilute_with", prepared_data(base), *WINDOW]
    words = f"rows of {CONTEXT} tokens and {CONTEXT} of --dilute_with before them", f"has {CONTEXT} learned positions"
    refused(convert.main, [*argv, *SMALL, "--out", tmp_path / "diluted"], capsys, *words, keeps=tmp_path)


@pytest.mark.slow
def test_stopped_it_goes_on_and_ends_the_same(checkpoint, base, tmp_path, monkeypatch):
    """Also with the past of diluted rows, which is drawn anew in every step."""
    options = ["--dilute_with", prepared_data(base)]
    run(checkpoint, base, tmp_path / "whole", *options)
    from conversion import trainers

    def stop(self, model, ids, own=trainers.Together.loss_of):
        if self.state.global_step == 2 and self.model.training:
            raise KeyboardInterrupt
        return own(self, model, ids)

    with monkeypatch.context() as patch, pytest.raises(SystemExit) as end:
        patch.setattr(trainers.Together, "loss_of", stop)
        run(checkpoint, base, tmp_path / "stopped", *options)
    assert end.value.code == 130 and not (tmp_path / "stopped" / "adapter").exists()
    run(checkpoint, base, tmp_path / "stopped", *options)
    for name in ("infini_adapter.safetensors", "adapter_model.safetensors"):
        whole, stopped = (load_file(tmp_path / folder / "adapter" / name) for folder in ("whole", "stopped"))
        assert whole.keys() == stopped.keys() and all(torch.equal(whole[key], stopped[key]) for key in whole)


def test_what_cannot_be_converted(checkpoint, base, tmp_path, capsys):
    source = ["--source", base / "train_data" / "text.jsonl", "--tokenizer", prepared_data(base) / "tokenizer"]
    running.run_recipe("prepare", *source, "--context", 8, "--validation", 0.1, "--out", tmp_path / "short")
    diluted = ["--dilute_with", prepared_data(base)]
    for options, mentions in (
        (["--segment_length", 32], ["rows of 64 tokens, and the window sees 66", "Prepare longer rows"]),
        (["--evaluation_data", tmp_path / "short"], ["of 8 tokens, there is nothing to predict from position 18 on"]),
        (["--narrow_to", 8], ["--narrow_to 8: give lengths below --segment_length 8", "or --narrow 0 0"]),
        (["--dilute_up_to", 8], ["--dilute_share do nothing without --dilute_with FOLDER"]),
        ([*diluted, "--together_steps", 0], ["--dilute_with is of the training of all layers: give"]),
        ([*diluted, "--update_rule", "delta"], ["it needs --update_rule linear"]),
        (["--memory_in", 3], ["--memory_in 3: its layers are [0, 1, 2]"]),
        (["--evaluation_from", 17], ["--evaluation_from 17: the window sees 18 tokens", "have 64; give a position between"]),
        (["--narrow", 0.5], ["--narrow takes two shares"]),
        ([*diluted, tmp_path / "short"], ["--dilute_with: the rows of all folders must be of one length; got"]),
    ):
        argv = ["--model", checkpoint, "--data", prepared_data(base), "--out", tmp_path / "out", *WINDOW, *SMALL, *options]
        refused(convert.main, argv, capsys, *mentions, keeps=tmp_path)


@pytest.mark.parametrize("config", sorted((ROOT / "recipes" / "configs").glob("convert*.yaml")), ids=lambda path: path.stem)
def test_configs_parse_and_name_their_command(config):
    command = config.read_text(encoding="utf-8").partition("\n")[0].split()
    assert command[:5] == ["#", "python", "recipes/convert.py", "--config", f"recipes/configs/{config.name}"]
    argv = [*command[3:4], config, *command[5:]]
    options, memory = parse_options(convert.Options, convert.MemoryChoices, description="", argv=[*map(str, argv)])
    assert (options.dilute_up_to, options.dilute_share) == ((16, 0.75) if options.dilute_with else (32, 1))
    InfiniGPT2Config(**given_options(memory))  # the memory's options go together


def test_another_tokenizer(checkpoint, base, tmp_path, capsys):
    source = ["--source", base / "train_data" / "text.jsonl", "--validation", 0.1, "--context", CONTEXT]
    running.run_recipe("prepare", *source, "--tokenizer", "bpe", "--vocab_size", 300, "--out", tmp_path / "other")
    for words, message in (
        (["--data", tmp_path / "other"], "was prepared with another tokenizer than that of"),
        (["--data", prepared_data(base), "--dilute_with", tmp_path / "other"], "have different tokenizers: prepare one of"),
    ):
        argv = ["--model", checkpoint, "--out", tmp_path / "out", *WINDOW, *SMALL, *words]
        refused(convert.main, argv, capsys, message, keeps=tmp_path)
