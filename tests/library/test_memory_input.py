"""What goes into the memory: the short convolution in front of it, and what tokens weigh."""

import pytest
import torch

from decoders import decoder
from hf_infini import naive_infini_attention, patch_model
from hf_infini.layers.memory_layer import SharedInputs
from hf_infini.ops.backends import forced_backend
from hf_infini.ops.backends.grid import attend_grid
from hf_infini.ops.convolution import short_convolution
from hf_infini.ops.layout.grid import segment_layout
from hf_infini.options import Window
from models import gpt2, infini_gpt2, token_ids

# Float64 leaves only the rounding of sums in another order; anything else would be a mistake.
FLOAT64 = 1e-10
DOCUMENTS = (11, 1, 4, 32, 2)  # lengths, 50 tokens in all


def convolved(**options):
    """A float64 model whose convolution, and what tokens weigh if it is learned, are far from their
    starts."""
    model = infini_gpt2(**{"memory_conv": 3} | options).double()
    for block in model.transformer.h:
        if hasattr(block.attn, "memory_conv"):
            block.attn.memory_conv.data.normal_()
        if hasattr(block.attn, "memory_write"):
            block.attn.memory_write.data.normal_(std=0.3)
    return model


def attended(model, inputs):
    """The first attention of a model, the queries, keys, values and log weights that it makes of
    `[batch, tokens, width]`, its output, and its rotary tables."""
    found, attention, base = [], model.transformer.h[0].attn, model.transformer
    tables = base.rotary_tables(model.config.places)
    window = model.config.window
    infini = SharedInputs({window: segment_layout(*inputs.shape[:2], window)}, None, tables)
    with forced_backend(lambda call: found.append((call.query, *call.tokens)) or attend_grid(call)):
        output, _ = attention(inputs, infini=infini)
    return attention, *found[0][:4], output, tables.get(None)


# --- the convolution
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("taps", [1, 2, 5])
def test_the_convolution_is_its_formula_document_by_document(taps):
    draw = torch.Generator().manual_seed(taps)
    inputs = torch.randn(1, 50, 6, generator=draw, dtype=torch.float64)
    weight = torch.randn(taps, 6, generator=draw, dtype=torch.float64)
    positions = torch.cat([torch.arange(length) for length in DOCUMENTS])[None]
    layout = segment_layout(1, 50, Window(8), position_ids=positions)
    output, latest = short_convolution(inputs, weight, layout, inputs.new_zeros(1, taps - 1, 6))
    begin = 0
    for length in DOCUMENTS:
        document = inputs[0, begin : begin + length]
        for token in range(length):
            wanted = sum(weight[tap] * document[token - tap] for tap in range(min(taps, token + 1)))
            torch.testing.assert_close(output[0, begin + token], wanted, rtol=FLOAT64, atol=FLOAT64)
        begin += length
    latest_of_all = inputs[:, 50 - (taps - 1) :].clone()
    latest_of_all[:, : max(0, taps - 1 - DOCUMENTS[-1])] = 0  # nothing of another document goes on
    assert torch.equal(latest, latest_of_all)


@pytest.mark.parametrize("make", [gpt2, lambda: decoder("llama")], ids=["gpt2", "llama"])
def test_a_convolution_starts_as_none(make):
    ids, options = token_ids(2, 50), {"segment_length": 8, "local_segments": 1}
    model = patch_model(make(), **options, memory_conv=3)
    assert torch.equal(model(ids).logits, patch_model(make(), **options)(ids).logits)
    model(ids, labels=ids).loss.backward()
    for name, parameter in model.named_parameters():
        if name.endswith("memory_conv"):
            assert bool((parameter.grad[1:] != 0).any(-1).all())


# --- what tokens weigh
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("update_rule", "position_encoding"), [("linear", "rope"), ("delta", "learned")]
)
def test_a_token_weighs_what_its_input_says(update_rule, position_encoding):
    """Against the naive reference, whose features are multiplied by the weights one by one; rope
    does not touch them."""
    options = {"memory_write": "learned", "local_segments": 1, "update_rule": update_rule}
    options["position_encoding"] = position_encoding
    model = convolved(feature_map="exp", **options)
    inputs = torch.randn(2, 50, 32, dtype=torch.float64)
    attention, query, key, value, log_weight, output, rotary = attended(model, inputs)
    added, _ = short_convolution(
        inputs,
        attention.memory_conv,
        segment_layout(2, 50, Window(8, 1)),
        inputs.new_zeros(2, 2, 32),
    )
    weights = torch.einsum("btc,hc->bht", inputs + added, attention.memory_write).exp()
    unturned = attention.c_attn(inputs + added)[..., 32:64].unflatten(-1, (4, 8)).transpose(1, 2)
    wanted = unturned.exp() * weights.unsqueeze(-1)
    torch.testing.assert_close((key + log_weight).exp(), wanted, rtol=FLOAT64, atol=0)
    options = {
        "local_segments": 1,
        "update_rule": update_rule,
        "feature_map": "exp",
        "log_weight": log_weight,
    }
    options["rotary"] = rotary
    wanted = naive_infini_attention(query, key, value, attention.gate(), 8, **options)
    wanted = attention.c_proj(wanted.transpose(1, 2).flatten(2))
    torch.testing.assert_close(output, wanted, rtol=FLOAT64, atol=FLOAT64)
