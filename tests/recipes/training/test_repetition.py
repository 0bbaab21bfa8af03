"""Tokens that are written into the memory many times over in training: what it is then, when, and that runs resume."""

import math

import pytest
import torch
from datasets import Dataset
from transformers import TrainingArguments

from bad_input import refused
from decoders import decoder
from hf_infini import infini_attention, patch_model
from hf_infini.models.structure import attention_layers, decoder_of
from hf_infini.ops.state import Projections
from hf_infini.tools.training import PerplexityTrainer
from models import infini_gpt2, token_ids
from running import infini_options, load_recipe, prepared_data
from training.repetition import Repetition, repeated

train = load_recipe("train")

GATED_DELTA = ["--update_rule", "gated_delta", "--repeat_up_to", 8]


def gated_delta():
    options = {"segment_length": 8, "local_segments": 1, "update_rule": "gated_delta", "gate_init": 1.0}
    return patch_model(decoder("llama"), **options).double()


@torch.no_grad()
def test_repeated_tokens_leave_what_so_many_copies_would(times=3):
    """Of a layer's own rates, where α is 1 and β anything; the copies of a segment are a longer segment."""
    layer = attention_layers(decoder_of(gated_delta()))[0]
    layer.memory_rates[:, 0].normal_()
    layer.memory_rates_bias[:, 1] = torch.inf
    hidden_states = torch.randn(1, 16, layer.memory_rates.shape[-1], dtype=torch.float64)
    heads, kv_heads, width = layer.head_counts
    query, key, value = (torch.randn(1, count, 16, width, dtype=torch.float64) for count in (heads, kv_heads, kv_heads))

    def memory(weight, copies: int = 1):
        tensors = (tensor.repeat_interleave(copies, 2) for tensor in (query, key, value, weight))
        query_, key_, value_, weight_ = tensors
        options = {"update_rule": "gated_delta", "log_weight": weight_, "return_state": True}
        return infini_attention(query_, key_, value_, layer.gate.weight, 8 * copies, **options)[1].memory

    own = layer.log_weight(hidden_states)
    with repeated(layer, times):
        found = layer.change_projections(Projections(query, key, value, own)).log_weight
    # Keys are shorter than one by up to the rule's eps, 1e-6 of a squared length
    torch.testing.assert_close(memory(found), memory(own, times), rtol=1e-4, atol=1e-5)
    assert layer.change_projections is None and (memory(found) - memory(own)).abs().max() > 0.01


def test_rates_at_their_limits_can_be_repeated():
    """Float32: β of almost 0, which has a gradient, and of 1."""
    layer = attention_layers(decoder_of(gated_delta().float()))[0]
    hidden_states = torch.zeros(1, 1, layer.memory_rates.shape[-1])
    for logit in (-15.0, -200.0, 200.0):
        bias = layer.memory_rates_bias
        bias.data.fill_(logit)
        with repeated(layer, 64):
            tokens = Projections(*(torch.empty(0),) * 3, layer.log_weight(hidden_states))
            log_beta, log_alpha = layer.change_projections(tokens).log_weight.unbind(-1)
        (gradient,) = torch.autograd.grad(log_beta.sum(), bias)
        assert all(tensor.isfinite().all() for tensor in (log_beta, log_alpha, gradient))
        if logit == -15:  # 64 times as much, and as steep as without: rounding of 1 − β is what differs
            torch.testing.assert_close(log_beta.exp(), torch.full_like(log_beta, 64 * math.exp(-15)), rtol=0.1, atol=0)
            torch.testing.assert_close(gradient[:, 0], torch.ones(len(bias)), rtol=0.1, atol=0)


def test_a_quarter_of_the_steps_repeat_nothing_and_the_others_up_to_the_most():
    drawn = [Repetition(64.0).times(3, step) for step in range(2000)]
    once = drawn.count(1.0) / len(drawn)
    assert 0.2 < once < 0.3  # a quarter, with a standard error of 0.01
    assert min(drawn) == 1 and 60 < max(drawn) <= 64 and sum(times > 8 for times in drawn) == pytest.approx(750, abs=80)
    assert drawn != [Repetition(64.0).times(4, step) for step in range(2000)]


def test_training_steps_repeat_and_evaluations_do_not(tmp_path, monkeypatch):
    monkeypatch.setattr(Repetition, "times", lambda self, seed, step: 1.0 if step == 1 else 5.0)
    quiet = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
    model = infini_gpt2(update_rule="gated_delta", position_encoding="segment", gate_init=1.0, **quiet)
    ids = token_ids(2, 40)
    labels = ids.clone()
    labels[:, 0] = -100  # which nothing predicts, but the Trainer counts
    rows = Dataset.from_dict({"input_ids": ids.tolist(), "labels": labels.tolist()})
    options = {"max_steps": 3, "per_device_train_batch_size": 2, "logging_steps": 1, "learning_rate": 0.0}
    options |= {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "no", "report_to": [], "use_cpu": True}
    arguments = TrainingArguments(output_dir=tmp_path, **options)
    data = {"train_dataset": rows, "eval_dataset": rows}
    trainer = PerplexityTrainer(model, arguments, callbacks=[Repetition(8.0)], **data)
    trainer.train()
    lines = trainer.state.log_history
    learned, evaluated = ([line[name] for line in lines if name in line] for name in ("loss", "eval_loss"))
    with torch.no_grad():
        plain = float(model.eval()(input_ids=ids, labels=labels).loss)
        with repeated(model, 5.0):
            wanted = float(model(input_ids=ids, labels=labels).loss)
    assert abs(wanted - plain) > 0.001
    rounded = 0.00006  # some versions of transformers log losses with four digits
    torch.testing.assert_close(learned, [wanted, plain, wanted], rtol=0, atol=rounded)
    torch.testing.assert_close(evaluated, [plain] * 3, rtol=0, atol=rounded)


def test_what_cannot_be_repeated_is_refused(base, tmp_path, capsys):
    for options, message in (
        (["--repeat_up_to", 8], "needs --attention infini and --update_rule gated_delta"),
        ([*GATED_DELTA, "--segment_length", 64], "rows have 64 tokens and the window sees 64, so that no token reads"),
        ([*GATED_DELTA, "--torch_compile", "true"], "--repeat_up_to and --torch_compile do not go together"),
    ):
        words = [*infini_options(prepared_data(base)), *options, "--out", tmp_path / "run"]
        refused(train.main, words, capsys, message)
