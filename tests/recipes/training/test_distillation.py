"""The loss by which a LoRA is trained, against the plain model."""

import pytest
import torch
from peft import LoraConfig, get_peft_model

from decoders import decoder, token_ids
from evaluation.inference import first_beyond
from hf_infini import patch_model
from recall.rows import NOT_COUNTED
from training.teacher import divergence_beyond

OPTIONS = {
    "segment_length": 8,
    "local_segments": 1,
    "sink_tokens": 2,
    "kept_tokens": 7,
    "gate_init": -1000.0,
}


@pytest.mark.parametrize("kept", (0, 5, 6, 14))
@torch.no_grad()
def test_the_first_position_that_does_not_see_everything(kept):
    """There a change of the first token beyond the sinks leaves or changes what the plain model
    predicts."""
    model = patch_model(decoder("llama"), **OPTIONS | {"kept_tokens": kept})
    ids = token_ids(1, 48)
    first, plain = first_beyond(model.config), decoder("llama")(ids).logits[0]
    # float32 sums in another order differ by less
    differs = ((model(ids).logits[0] - plain).abs() > 1e-3).any(1)
    assert int(differs.nonzero()[0]) == first


def test_the_loss_is_the_divergence_from_the_plain_model_beyond_the_window():
    model, plain, ids = patch_model(decoder("llama"), **OPTIONS), decoder("llama"), token_ids(4, 48)
    first = first_beyond(model.config)
    # Neither of its two matrices is zero: the teacher is the model without it
    model = get_peft_model(
        model, LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    ).eval()
    labels = ids.clone()
    labels[1, :40] = NOT_COUNTED  # a row that asks
    labels[2, 20:] = NOT_COUNTED  # nothing beyond the window
    wanted = []
    for row, counted in zip(ids, labels, strict=True):
        mine, teacher = (each(row[None]).logits[0].log_softmax(-1) for each in (model, plain))
        places = [place for place in range(first, 47) if counted[place + 1] != NOT_COUNTED]
        divergences = [
            float((teacher[place].exp() * (teacher[place] - mine[place])).sum()) for place in places
        ]
        wanted.append(sum(divergences) / max(1, len(divergences)))
    assert wanted[2] == 0 < min(wanted[0], wanted[1], wanted[3])
    loss = divergence_beyond(model, model, ids, labels)
    assert float(loss.detach()) == pytest.approx(sum(wanted) / 4, rel=1e-5)
    loss.backward()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert trained and all(parameter.grad.abs().sum() > 0 for parameter in trained)
