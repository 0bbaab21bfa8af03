"""The loss by which a memory is trained, against the plain model; and the segments of each step."""

import pytest
import torch
from transformers import TrainingArguments

from conversion.trainer import MemoryTrainer, divergence_beyond, first_beyond, segments_of
from decoders import decoder, token_ids
from hf_infini import patch_model
from recall.rows import NOT_COUNTED

OPTIONS = {"segment_length": 8, "local_segments": 1, "sink_tokens": 2, "kept_tokens": 7, "feature_map": "exp"}


@pytest.mark.parametrize("kept", (0, 5, 6, 14))
@torch.no_grad()
def test_the_first_position_that_does_not_see_everything(kept):
    """There a change of the first token beyond the sinks leaves or changes what the model without a memory predicts."""
    model = patch_model(decoder("llama"), **OPTIONS | {"kept_tokens": kept, "gate_init": -1000.0})
    ids = token_ids(1, 48)
    first, plain = first_beyond(model.config), decoder("llama")(ids).logits[0]
    differs = ((model(ids).logits[0] - plain).abs() > 1e-3).any(1)  # float32 sums in another order differ by less
    assert int(differs.nonzero()[0]) == first


def test_the_loss_is_the_divergence_from_the_plain_model_beyond_the_window():
    model, plain, ids = patch_model(decoder("llama"), **OPTIONS), decoder("llama"), token_ids(4, 48)
    labels = ids.clone()
    labels[1, :40] = NOT_COUNTED  # a row that asks
    labels[2, 20:] = NOT_COUNTED  # nothing beyond the window
    wanted = []
    first = first_beyond(model.config)
    for row, counted in zip(ids, labels, strict=True):
        mine, teacher = (each(row[None]).logits[0].log_softmax(-1) for each in (model, plain))
        places = [place for place in range(first, 47) if counted[place + 1] != NOT_COUNTED]
        divergences = [float((teacher[place].exp() * (teacher[place] - mine[place])).sum()) for place in places]
        wanted.append(sum(divergences) / max(1, len(divergences)))
    assert wanted[2] == 0 < min(wanted[0], wanted[1], wanted[3])
    loss = divergence_beyond(model, model.model, ids, labels)
    assert float(loss.detach()) == pytest.approx(sum(wanted) / 4, rel=1e-5)
    loss.backward()
    assert all(layer.self_attn.gate.weight.grad.abs().sum() > 0 for layer in model.model.layers)


def test_each_step_has_segments_of_a_drawn_length(tmp_path, monkeypatch):
    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=12, per_device_train_batch_size=1, learning_rate=0.02, use_cpu=True, seed=3,
        save_strategy="no", logging_steps=1, report_to=[], remove_unused_columns=False, lr_scheduler_type="constant",
    )  # fmt: skip
    model, lengths = patch_model(decoder("llama"), **OPTIONS), []
    model.requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.gate.requires_grad_(True)
    rows = [{"input_ids": row, "labels": row} for row in token_ids(16, 48)]
    made = MemoryTrainer(model, arguments, train_dataset=rows, lengths=[4, 8])
    made.create_optimizer()
    assert [group["lr"] for group in made.optimizer.param_groups] == [0.2]  # gates: ten times as much
    before = model.model.layers[0].self_attn.gate.weight.clone()
    monkeypatch.setattr("conversion.trainer.divergence_beyond", lambda model, decoder, *rows: (
        lengths.append(decoder.config.segment_length), divergence_beyond(model, decoder, *rows))[1])  # fmt: skip
    made.train()
    assert {*lengths} == {4, 8} and model.config.segment_length == 8
    assert not torch.equal(model.model.layers[0].self_attn.gate.weight, before)
    with pytest.raises(RuntimeError), segments_of(model.config, 4):
        raise RuntimeError
    assert model.config.segment_length == 8
