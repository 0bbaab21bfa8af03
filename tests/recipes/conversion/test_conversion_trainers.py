"""The trainings of a conversion: they learn, save adapters only, and go on from one as if they had never stopped."""

import math

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import TrainingArguments

from conversion.trainers import Together, segments_of
from conversion.transfer import SPREAD, LayerComparison, Transfer, calibrated_scales
from decoders import decoder, token_ids
from hf_infini import patch_model
from hf_infini.layers.memory_layer import gates_of
from hf_infini.models.structure import attention_layers, decoder_of
from models import RowsOf, gpt2
from recall.rows import NOT_COUNTED
from training.dilution import Dilution

ROWS = [{"input_ids": row, "labels": row} for row in token_ids(16, 48)]
OPTIONS = {"segment_length": 8, "local_segments": 1, "sink_tokens": 2, "feature_map": "learned", "denominator": "shared"}


def all_counted(ids: torch.Tensor) -> torch.Tensor:
    """Rows all of whose tokens are labels."""
    return torch.stack([ids, ids], 1)


def patched(lora: bool = False):
    """A model of which only the memories are trained, and a LoRA."""
    model = patch_model(decoder("llama"), **OPTIONS, gate_init=-2.0)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith(("gate.weight", "query_map", "key_map")))
    if not lora:
        return model
    model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.requires_grad or name.endswith(("gate.weight", "query_map", "key_map")))
    return model


def trainer(kind, folder, steps: int = 6, lora: bool = False, **options):
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=steps, per_device_train_batch_size=2, learning_rate=0.02, use_cpu=True, seed=3,
        save_steps=3, logging_steps=1, report_to=[], remove_unused_columns=False, lr_scheduler_type="constant",
    )  # fmt: skip
    torch.manual_seed(0)
    options |= {"layers": [0, 1, 2, 3]} if kind is Transfer else {}
    return kind(patched(lora), arguments, train_dataset=ROWS, **options)


def weights(made) -> dict:
    return {name: parameter.detach().clone() for name, parameter in made.model.named_parameters() if parameter.requires_grad}


def test_transfer_brings_layers_nearer_to_full_attention(tmp_path):
    made, rows = trainer(Transfer, tmp_path, 25), token_ids(2, 48, seed=5)
    before = float(made.model(rows).detach())
    made.train()
    assert float(made.model(rows).detach()) < before - 0.1  # of the logarithm of a squared error


@torch.no_grad()
def errors(model, plain, ids: torch.Tensor) -> dict[int, float]:
    """Σ (with memory − own)² by layer, where each layer is given what it is given in the plain model."""
    outputs, found, handles = {}, {}, []
    for number, layer in enumerate(attention_layers(decoder_of(plain))):
        handles.append(layer.register_forward_hook(lambda _, args, output, n=number: outputs.__setitem__(n, output[0])))
    plain(ids, use_cache=False)
    for number, layer in enumerate(attention_layers(decoder_of(model))):

        def replace(_, args, output, n=number):
            found[n] = float((output[0] - outputs[n]).square().sum())
            return outputs[n], *output[1:]

        handles.append(layer.register_forward_hook(replace))
    model(ids, use_cache=False)
    for handle in handles:
        handle.remove()
    return found


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "gpt2"])
def test_layers_are_compared_on_inputs_that_are_computed_once(model_type):
    make = (lambda: gpt2(vocab_size=200)) if model_type == "gpt2" else (lambda: decoder(model_type))
    model, plain = patch_model(make(), **OPTIONS), make().eval()
    rows = token_ids(2, 48, seed=5)
    layers = model.config.infini_layers[1:]
    comparison, calls = LayerComparison(model, layers).train(), []
    assert not model.training  # no dropout in what is compared
    model.register_forward_hook(lambda *_: calls.append(1))
    for length, computed in ((8, 2), (4, 1), (8, 0), (4, 0)):  # every row once, and one for the other length
        with segments_of(model.config, length):
            wanted = [math.log(errors(model, plain, row[None])[number]) for row in rows for number in layers]
            calls.clear()
            found = comparison(rows)
        assert float(found.detach()) == pytest.approx(sum(wanted) / len(wanted), rel=1e-4)  # of sums of small differences
        assert len(calls) == computed
    found.backward()
    reached = [name.split(".") for name, parameter in comparison.named_parameters() if parameter.grad is not None]
    assert {next(part for part in name if part.isdigit()) for name in reached} == {str(number) for number in layers}


@torch.no_grad()
def test_calibrated_feature_maps_give_exponents_of_one_size():
    model, rows = patch_model(decoder("llama"), **OPTIONS), all_counted(token_ids(2, 48, seed=5))
    for number, scales in calibrated_scales(model, rows, [1, 3]).items():
        layer = model.model.layers[number].self_attn
        for weight, scale in zip((layer.query_map, layer.key_map), scales, strict=True):
            weight.mul_(torch.tensor(scale)[:, None, None])
        assert layer.change_projections is None
    layer, inputs = model.model.layers[1].self_attn, []
    layer.register_forward_pre_hook(lambda _, args, keywords: inputs.append(keywords["hidden_states"]), with_kwargs=True)
    for ids in rows[:, 0]:
        model(ids[None], use_cache=False)
    query = layer.q_proj(torch.cat(inputs)).unflatten(-1, (-1, layer.head_dim)).transpose(1, 2) @ layer.query_map
    torch.testing.assert_close(query.square().mean((0, 2, 3)).sqrt(), torch.full((layer.head_counts[0],), SPREAD))


@pytest.mark.parametrize(("kind", "lora"), [(Transfer, False), (Together, True)])
def test_a_training_goes_on_from_a_checkpoint_with_an_adapter_only(kind, lora, tmp_path):
    options = {"narrow": (0.9, 0.2), "lengths": (4, 6), "lora": lora}
    whole = trainer(kind, tmp_path / "whole", **options)
    whole.train()
    again = trainer(kind, tmp_path / "again", **options)
    start = weights(again)
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    assert all(torch.equal(value, weights(again)[name]) for name, value in weights(whole).items())
    assert any(not torch.equal(value, weights(again)[name]) for name, value in start.items())
    saved = {file.name for file in (tmp_path / "whole" / "checkpoint-3").iterdir()}
    assert "infini_adapter.safetensors" in saved and "model.safetensors" not in saved
    assert ("adapter_model.safetensors" in saved) == lora


def test_windows_are_narrow_in_a_share_of_the_steps_that_falls(tmp_path):
    made = trainer(Transfer, tmp_path, narrow=(1.0, 0.0), lengths=(2, 4))
    made.state.max_steps, drawn = 1000, []
    for step in range(1000):
        made.state.global_step = step
        drawn.append(made.segment_length())
    shares = [sum(length is not None for length in drawn[begin : begin + 250]) / 250 for begin in range(0, 1000, 250)]
    assert set(drawn) == {None, 2, 4} and all(abs(share - wanted) < 0.1 for share, wanted in zip(
        shares, (0.875, 0.625, 0.375, 0.125), strict=True))  # a standard deviation of such a share is 0.03  # fmt: skip
    seen, forward = [], made.loss_of
    made.loss_of = lambda model, rows: seen.append(made.patched.config.segment_length) or forward(model, rows)
    made.state.global_step = 0
    made.compute_loss(made.model.train(), {"input_ids": token_ids(1, 48), "labels": token_ids(1, 48)})
    assert seen[0] in (2, 4) and made.patched.config.segment_length == 8


def test_the_teacher_of_a_lora_is_the_plain_model(tmp_path):
    """Whatever the LoRA has learned: with all weight on the teacher and the teacher's own predictions, the loss is 0."""
    made = trainer(Together, tmp_path, lora=True, text=0.0)
    rows = all_counted(token_ids(2, 16))  # inside the window
    assert abs(float(made.loss_of(made.model.eval(), rows))) < 1e-5
    for name, parameter in made.model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    assert float(made.loss_of(made.model, rows)) > 1e-3


@torch.no_grad()
def test_diluted_rows_are_those_behind_another_text(tmp_path):
    """With a factor of 1, a row's loss is that of its labels behind the other row; the teacher does not see that one."""
    before, ids = token_ids(1, 24, seed=7), token_ids(2, 48)
    past = Dilution(RowsOf(before), most=1).past
    made = trainer(Together, tmp_path, text=0.25, past_of=past)
    rows, model = all_counted(ids), made.model.train()  # the model has no dropout
    rows[1, 1, :40] = NOT_COUNTED
    plain, asked = trainer(Together, tmp_path, text=0.25), trainer(Together, tmp_path, text=1.0)
    for gate in [*gates_of(model).values(), *gates_of(plain.model).values()]:
        gate.weight.fill_(3.0)  # of the memory; closed gates would show little of the other text
    whole = torch.cat([before.expand(2, -1), ids], 1)
    behind = all_counted(whole)
    behind[0, 1, :25], behind[1, 1, : 24 + 40] = NOT_COUNTED, NOT_COUNTED  # nothing predicts a row's first token
    logits = model(whole[:1]).logits[0, 24:-1].log_softmax(-1)
    teacher = made._taught(model, ids[:1])[0]
    divergence = float((teacher.exp() * (teacher - logits)).sum(-1).mean())
    losses = [float(asked.loss_of(model.eval(), behind[[row]])) for row in (0, 1)]
    wanted = (0.25 * losses[0] + 0.75 * divergence + losses[1]) / 2
    assert float(made.loss_of(model.train(), rows)) == pytest.approx(wanted, rel=1e-5)
    alone = float(plain.loss_of(plain.model.eval(), rows))
    assert float(made.loss_of(model.eval(), rows)) == pytest.approx(alone, rel=1e-6)  # nothing dilutes an evaluation
    assert wanted != pytest.approx(alone, rel=1e-3)


@torch.no_grad()
def test_rows_that_ask_are_learned_from_their_answers_and_text_from_the_teacher_as_well(tmp_path):
    made, ids = trainer(Together, tmp_path, text=0.25), token_ids(4, 48)
    rows, model = all_counted(ids), made.model.eval()
    rows[1, 1, :40], rows[2, 1] = NOT_COUNTED, NOT_COUNTED
    own = [model(input_ids=row[None, 0], labels=row[None, 1]) for row in rows]
    plain = decoder("llama")
    plain.load_state_dict(model.state_dict(), strict=False)

    def divergence(number: int) -> float:
        mine, teacher = (logits[0, :-1].log_softmax(-1) for logits in (own[number].logits, plain(ids[[number]]).logits))
        return float((teacher.exp() * (teacher - mine)).sum(-1).mean())

    of_text = [0.25 * float(own[number].loss) + 0.75 * divergence(number) for number in (0, 3)]
    wanted = sum(of_text) + float(own[1].loss)  # the third row has no labels
    assert float(made.loss_of(model, rows)) == pytest.approx(wanted / 4, rel=1e-5)

    computed = []
    made._taught = lambda model, ids: computed.append(len(ids)) or Together._taught(made, model, ids)
    model.register_forward_hook(lambda _, args, found: computed.append(tuple(found.logits.shape[:2])))
    made.loss_of(model, rows[1:2])
    assert computed == [(1, 8)]  # no teacher, and logits for the eight answers only
    computed.clear()
    made.loss_of(model, rows)
    assert computed == [2, (2, 48), (4, 47)]
    assert float(made.loss_of(model, rows[2:3])) == 0
