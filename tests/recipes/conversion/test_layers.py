"""Parts of the gap between window and full attention: they add up to it, and are those of the layers that cause it."""

import pytest
import torch
from peft import LoraConfig, get_peft_model

from conversion import layers
from conversion.evaluation import OFF, ON, PLAIN, SOME, UNTRAINED, evaluate
from conversion.layers import counted_beyond, gap_by_layer, loss_beyond, losses_with_full_attention
from conversion.teacher import partly_full_attention
from conversion.trainers import gates_closed
from decoders import decoder
from hf_infini import patch_model
from hf_infini.models.structure import attention_layers
from models import token_ids
from recall.rows import NOT_COUNTED

IDS, WINDOW = token_ids(3, 60), 18
ROWS = torch.stack([IDS, IDS], 1)  # every token counts


def patched():
    return patch_model(decoder("llama"), segment_length=8, local_segments=1, sink_tokens=2)


@torch.no_grad()
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_a_share_of_full_attention(share):
    model, seen = patched(), []
    layer = attention_layers(model.model)[1]
    layer.register_forward_hook(lambda module, given, output: seen.append(output[0]))
    for shares in ({1: share}, {1: 0.0}, {1: 1.0}):
        given = {number: torch.tensor(shares.get(number, 0.0)) for number in range(4)}
        with partly_full_attention(model, 60, given):
            model(IDS)
    mixed, window, full = seen
    torch.testing.assert_close(mixed, window + share * (full - window))
    assert not torch.allclose(window, full, atol=1e-3)


def test_the_parts_add_up_to_the_gap(monkeypatch):
    monkeypatch.setattr(layers, "POINTS", 48)
    model, rows = patched(), ROWS[:1]
    parts = gap_by_layer(model, rows, WINDOW)
    window, full = (losses_with_full_attention(model, rows, WINDOW, full_in)[0] for full_in in ([], None))
    gap = (window - full) / (60 - WINDOW)
    # The error of the midpoints falls with their square; that of so few as are used is large for such wild random weights
    assert list(parts) == [0, 1, 2, 3] and sum(parts.values()) == pytest.approx(gap, rel=0.03)
    assert not model.model.layers[0].self_attn._forward_hooks


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
