"""Losses beyond the window, in the conditions that a conversion is judged by."""

import pytest
import torch
from peft import LoraConfig, get_peft_model

from conversion.evaluation import (
    OFF,
    ON,
    PLAIN,
    SOME,
    UNTRAINED,
    counted_beyond,
    evaluate,
    loss_beyond,
    losses_with_full_attention,
)
from conversion.trainers import gates_closed
from decoders import decoder
from hf_infini import patch_model
from models import token_ids
from recall.rows import NOT_COUNTED

IDS, WINDOW = token_ids(3, 60), 18
ROWS = torch.stack([IDS, IDS], 1)  # every token counts


def patched():
    return patch_model(decoder("llama"), segment_length=8, local_segments=1, sink_tokens=2)


@torch.no_grad()
def test_losses_with_full_attention_in_some_layers():
    model, stock = patched(), decoder("llama")
    closed, full, some = (losses_with_full_attention(model, ROWS, WINDOW, layers) for layers in ([], None, [1, 3]))
    assert full == pytest.approx([float(loss_beyond(stock, row, WINDOW)) for row in ROWS], rel=1e-4)
    with gates_closed(model):
        assert closed == [float(loss_beyond(model, row, WINDOW)) for row in ROWS]
    assert all(a != b for a, b in zip(some, closed, strict=True)) and all(a != b for a, b in zip(some, full, strict=True))


@torch.no_grad()
def test_untrained_conditions_are_those_of_the_untouched_model():
    """Whatever was trained: gates, short convolutions (which also change what the window sees), and a LoRA."""
    fresh = patch_model(decoder("llama"), segment_length=8, local_segments=1, sink_tokens=2, memory_conv=3)
    trained = patch_model(decoder("llama"), segment_length=8, local_segments=1, sink_tokens=2, memory_conv=3)
    trained = get_peft_model(trained, LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    for name, parameter in trained.named_parameters():
        if name.endswith((".memory_conv", ".gate.weight")):
            parameter.copy_(0.1 * torch.ones_like(parameter))
    wanted, found = (evaluate(model.eval(), ROWS, WINDOW, [1, 3])["cross_entropy"] for model in (fresh, trained))
    for condition in (PLAIN, SOME, UNTRAINED):
        assert found[condition]["nats"]["value"] == pytest.approx(wanted[condition]["nats"]["value"], rel=1e-6)
    assert abs(found[OFF]["nats"]["value"] - wanted[OFF]["nats"]["value"]) > 1e-3
    assert abs(found[OFF]["nats"]["value"] - found[ON]["nats"]["value"]) > 1e-3


@torch.no_grad()
def test_only_labels_beyond_the_window_count():
    model, row = patched(), ROWS[0].clone()
    row[1, :20], row[1, 30:] = NOT_COUNTED, NOT_COUNTED
    logits = model(IDS[:1]).logits[0]
    wanted = torch.nn.functional.cross_entropy(logits[19:29], IDS[0, 20:30], reduction="sum")
    assert float(loss_beyond(model, row, WINDOW)) == pytest.approx(float(wanted), rel=1e-5)
    assert counted_beyond(torch.stack([row, ROWS[1]]), WINDOW) == [10, 42]
