"""recipes/convert.py, run as a user runs it: on a tiny pretrained decoder, stopped and continued, and refused."""

import json

import pytest
import torch
from datasets import load_from_disk
from safetensors.torch import load_file
from transformers import AutoConfig, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import running
from bad_input import refused
from conversion import trainer
from evaluation.perplexity import measure_perplexity, prepared_rows
from hf_infini import fit_keep_score, load_adapter, patch_model, save_adapter
from hf_infini.layers.memory_layer import memory_layers
from hf_infini.models.loading import load_causal_lm
from hf_infini.tools.rows import RowReader
from models import gpt2
from running import CONTEXT, load_recipe, prepared_data

convert, prepare_recall, evaluate_model = map(load_recipe, ("convert", "prepare_recall", "evaluate_model"))
WINDOW = ["--segment_length", 8, "--local_segments", 1, "--sink_tokens", 2]
KEPT = ["--kept_tokens", 7, "--keep_score", "half", "--fit_rows", 3]
MACHINE = ["--use_cpu", "true", "--precision", "float32"]


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
    argv = ["--model", checkpoint, "--data", prepared_data(base), "--out", out, *WINDOW, *MACHINE, *options]
    convert.main([*map(str, argv)])
    return json.loads((out / "result.json").read_text())


def learned(out, name="infini_adapter") -> dict[str, torch.Tensor]:
    return load_file(out / "adapter" / f"{name}.safetensors")


def test_a_score_that_is_fitted_is_all_that_is_learned(checkpoint, base, tmp_path):
    out = tmp_path / "out"
    result = run(checkpoint, base, out, *KEPT)
    assert result["keep_score"] == {"rows": 3, "tokens": 3 * CONTEXT} and "lora" not in result
    assert {name.rpartition(".")[2] for name in learned(out)} == {"weight", "keep_weight"}
    model = load_adapter(LlamaForCausalLM.from_pretrained(checkpoint), out / "adapter")
    options = {"segment_length": 8, "local_segments": 1, "sink_tokens": 2, "kept_tokens": 7, "keep_score": "half"}
    own = patch_model(LlamaForCausalLM.from_pretrained(checkpoint), **options)
    fit_keep_score(own, load_from_disk(str(prepared_data(base) / "train"))[:3]["input_ids"], distance=16)
    for layer, other in zip(memory_layers(model).values(), memory_layers(own).values(), strict=True):
        torch.testing.assert_close(layer.keep_weight, other.keep_weight, rtol=2**-8, atol=0)  # the adapter has bfloat16
        assert (layer.gate.weight == -1000).all()
    fitted = json.loads((out / "keep_score.json").read_text())
    fitted["by_layer"] = {name: [[1.0] * 32] * 2 for name in fitted["by_layer"]}
    (out / "keep_score.json").write_text(json.dumps(fitted))
    run(checkpoint, base, out, *KEPT)  # takes what was fitted
    assert (learned(out)["0.keep_weight"] == 1).all()


def test_a_lora_is_trained_on_a_fitted_score_and_recipes_read_it(checkpoint, base, tmp_path):
    out = tmp_path / "out"
    result = run(checkpoint, base, out, *KEPT, "--steps", 3, "--learning_rate", 0.02, "--rank", 2)
    assert result["lora"] == {"steps": 3, "tokens": 3 * CONTEXT}
    fitted = json.loads((out / "keep_score.json").read_text())["by_layer"]
    lora = learned(out, "adapter_model")
    assert len(lora) == 3 * 7 * 2 and all(tensor.any() and 2 in tensor.shape for tensor in lora.values())
    model = load_adapter(LlamaForCausalLM.from_pretrained(checkpoint), out / "adapter").eval()
    for name, layer in memory_layers(model.base_model.model).items():
        torch.testing.assert_close(layer.keep_weight, torch.tensor(fitted[name]), rtol=2**-8, atol=0)
        assert (layer.gate.weight == -1000).all()

    given = ["--model", checkpoint, "--data", prepared_data(base), "--max_tokens", 2 * CONTEXT, "--out", tmp_path / "e"]
    evaluate_model.main([*map(str, [*given, "--adapter", out / "adapter"])])
    found = json.loads((tmp_path / "e.json").read_text())
    rows = prepared_rows(prepared_data(base), "validation", 2 * CONTEXT)
    reader = RowReader(AutoTokenizer.from_pretrained(checkpoint).all_special_ids)
    wanted = measure_perplexity(model, rows, reader, chunk=10**6, batch_size=2)
    assert found["adapter"] == str(out / "adapter")
    assert found["cross_entropy"] == pytest.approx(wanted["cross_entropy"], rel=1e-4)


def test_recipes_refuse_an_adapter_of_another_model(checkpoint, tmp_path, capsys):
    save_adapter(patch_model(LlamaForCausalLM.from_pretrained(checkpoint), segment_length=8), tmp_path / "adapter")
    (tmp_path / "text.txt").write_text("abc")
    more = {"evaluate_model": ["--text", tmp_path / "text.txt"], "generate": ["--prompt", "a"], "inspect_heads": []}
    another = another_model(checkpoint, tmp_path)
    for recipe, words in more.items():
        argv = ["--model", another, "--adapter", tmp_path / "adapter", *words]
        refused(load_recipe(recipe).main, argv, capsys, "--adapter: the adapter of", "another model", keeps=tmp_path)


@pytest.mark.slow
def test_a_gpt2_learns_from_rows_that_ask_beside_running_text(checkpoint, base, tmp_path):
    rows = ["--context", CONTEXT, "--rows", 8, "--validation_rows", 3, "--mix", "echo=1"]
    prepare_recall.main([*map(str, ["--data", prepared_data(base), "--out", tmp_path / "asking", *rows])])
    AutoTokenizer.from_pretrained(checkpoint).save_pretrained(tmp_path / "gpt2")
    gpt2(vocab_size=LlamaConfig.from_pretrained(checkpoint).vocab_size, n_layer=2).save_pretrained(tmp_path / "gpt2")
    run(tmp_path / "gpt2", base, tmp_path / "out", "--data", prepared_data(base), tmp_path / "asking", "--steps", 2)
    model = load_adapter(load_causal_lm(tmp_path / "gpt2"), tmp_path / "out" / "adapter")
    assert model.base_model.model.config.infini_layers == [0, 1]


def test_stopped_it_goes_on_and_ends_the_same(checkpoint, base, tmp_path, monkeypatch):
    options = [*KEPT, "--steps", 5, "--save_steps", 2]
    run(checkpoint, base, tmp_path / "whole", *options)
    calls = []

    def stop(*args, own=trainer.divergence_beyond):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return own(*args)

    with monkeypatch.context() as patch, pytest.raises(SystemExit) as end:
        patch.setattr(trainer, "divergence_beyond", stop)
        run(checkpoint, base, tmp_path / "stopped", *options)
    assert end.value.code == 130 and not (tmp_path / "stopped" / "adapter").exists()
    saved = {file.name for file in (tmp_path / "stopped" / "lora" / "checkpoint-2").iterdir()}
    assert "adapter_model.safetensors" in saved and "model.safetensors" not in saved
    run(checkpoint, base, tmp_path / "stopped", *options)
    whole, stopped = (learned(tmp_path / name, "adapter_model") for name in ("whole", "stopped"))
    assert whole.keys() == stopped.keys() and all(torch.equal(whole[key], stopped[key]) for key in whole)


def test_what_cannot_be_converted(checkpoint, base, tmp_path, capsys):
    source = ["--source", base / "train_data" / "text.jsonl", "--validation", 0.1]
    tokenizer = ["--tokenizer", prepared_data(base) / "tokenizer"]
    running.run_recipe("prepare", *source, *tokenizer, "--context", 16, "--out", tmp_path / "short")
    bpe = ["--tokenizer", "bpe", "--vocab_size", 300]
    running.run_recipe("prepare", *source, *bpe, "--context", CONTEXT, "--out", tmp_path / "other")
    train = ["--steps", 2]
    for options, mentions in (
        ([], ["nothing would be learned: give --kept_tokens with --keep_score"]),
        ([*train, "--segment_length", 32], ["rows of 64 tokens", "hold all of the first 64", "prepare longer rows"]),
        ([*KEPT, "--kept_tokens", CONTEXT], ["rows of 64 tokens", "give a smaller --segment_length or --kept_tokens"]),
        ([*train, "--data", prepared_data(base), tmp_path / "short"], ["--data: the rows of all folders must be of one"]),
        ([*train, "--data", tmp_path / "other"], ["was prepared with another tokenizer than that of"]),
    ):  # fmt: skip
        argv = ["--model", checkpoint, "--data", prepared_data(base), "--out", tmp_path / "out", *WINDOW, *MACHINE, *options]
        refused(convert.main, argv, capsys, *mentions, keeps=tmp_path)
