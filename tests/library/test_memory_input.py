"""What goes into the memory: the short convolution in front of it, what tokens weigh, and those that are kept out."""

import pytest
import torch
from transformers import AutoModelForCausalLM

import hf_infini.layers.memory_layer
from decoders import decoder
from hf_infini import naive_infini_attention, patch_model, unpatch_model
from hf_infini.ops.convolution import short_convolution
from hf_infini.ops.layout.build import segment_layout
from models import causal_mha, gpt2, in_calls, infini_gpt2, token_ids

# Float64 leaves only the rounding of sums in another order; anything else would be a mistake.
FLOAT64 = 1e-10
DOCUMENTS = (11, 1, 4, 2, 32)  # lengths, 50 tokens in all
CUTS = (0, 1, 2, 13, 14, 40, 50)


def scratch(seed=0, **options):
    """The other family, with the same memory."""
    return causal_mha(seed, **{"attention": "infini", "segment_length": 8} | options)


def convolved(seed=0, make=infini_gpt2, **options):
    """A float64 model whose convolution, and what tokens weigh and feature maps if they are learned, are far from their
    starts."""
    model = make(seed, **{"memory_conv": 3} | options).double()
    for block in model.transformer.h:
        if hasattr(block.attn, "memory_conv"):
            block.attn.memory_conv.data.normal_()
        if hasattr(block.attn, "memory_write"):
            block.attn.memory_write.data.normal_(std=0.3)
        if hasattr(block.attn, "query_map"):
            for weight in (block.attn.query_map, block.attn.key_map):
                weight.data.add_(torch.randn_like(weight), alpha=0.3)
    return model


def projected(attention, inputs):
    """The queries, keys, values and log weights that an attention makes of `[batch, tokens, width]`."""
    found = []
    attention.change_projections = lambda tokens: found.append(tokens) or tokens
    attention(inputs)
    attention.change_projections = None
    return found[0][:4]


def spread(ids, columns, seed=0):
    """The ids at random places of rows of `columns`, padded with 0 between them, and the mask."""
    draw = torch.Generator().manual_seed(seed)
    padded, mask = (torch.zeros(ids.shape[0], columns, dtype=torch.long) for _ in range(2))
    for row in range(ids.shape[0]):
        places = torch.randperm(columns, generator=draw)[: ids.shape[1]].sort().values
        padded[row, places], mask[row, places] = ids[row], 1
    return padded, mask


# --- the convolution --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("taps", [1, 2, 5])
def test_the_convolution_is_its_formula_document_by_document(taps):
    draw = torch.Generator().manual_seed(taps)
    inputs = torch.randn(1, 50, 6, generator=draw, dtype=torch.float64)
    weight = torch.randn(taps, 6, generator=draw, dtype=torch.float64)
    positions = torch.cat([torch.arange(length) for length in DOCUMENTS])[None]
    layout = segment_layout(1, 50, 8, position_ids=positions)
    output, latest = short_convolution(inputs, weight, layout, inputs.new_zeros(1, taps - 1, 6))
    begin = 0
    for length in DOCUMENTS:
        document = inputs[0, begin : begin + length]
        for token in range(length):
            wanted = sum(weight[tap] * document[token - tap] for tap in range(min(taps, token + 1)))
            torch.testing.assert_close(output[0, begin + token], wanted, rtol=FLOAT64, atol=FLOAT64)
        begin += length
    assert torch.equal(latest, inputs[:, 50 - (taps - 1) :])


OURS = {"feature_map": "learned", "denominator": "shared", "memory_write": "learned", "position_encoding": "rope"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "taps", "local_segments", "options"),
    [(infini_gpt2, 2, 1, {}), (scratch, 4, 0, OURS), (infini_gpt2, 0, 1, {"position_encoding": "rope"})],
)
def test_padding_packing_and_cached_calls(make, local_segments, taps, options):
    model = convolved(make=make, memory_conv=taps, local_segments=local_segments, **options)
    ids = token_ids(2, 50)
    wanted = model(ids).logits
    tolerance = {"rtol": FLOAT64, "atol": FLOAT64}
    torch.testing.assert_close(in_calls(model, ids, CUTS), wanted, **tolerance)
    padded, mask = spread(ids, 70)
    output = model(padded, attention_mask=mask).logits
    torch.testing.assert_close(output[mask == 1], wanted.flatten(0, 1), **tolerance)
    output = in_calls(model, padded, (0, 1, 2, 13, 14, 40, 70), attention_mask=mask)
    torch.testing.assert_close(output[mask == 1], wanted.flatten(0, 1), **tolerance)

    positions = torch.cat([torch.arange(length) for length in DOCUMENTS])[None].expand(2, -1)
    edges = torch.tensor([0, *DOCUMENTS]).cumsum(0).tolist()
    separate = torch.cat([model(ids[:, a:b]).logits for a, b in zip(edges, edges[1:], strict=False)], 1)
    torch.testing.assert_close(model(ids, position_ids=positions).logits, separate, **tolerance)
    cuts = (0, 1, 2, 12, 13, 17, 18, 19, 50)
    torch.testing.assert_close(in_calls(model, ids, cuts, position_ids=positions), separate, **tolerance)


def test_a_convolution_starts_as_none_learns_and_comes_back(tmp_path):
    stock = gpt2()
    ids = token_ids(2, 50)
    plain = patch_model(gpt2(), segment_length=8)(ids).logits
    model = patch_model(stock, segment_length=8, memory_conv=3)
    torch.testing.assert_close(model(ids).logits, plain, rtol=0, atol=0)
    model(ids, labels=ids).loss.backward()
    for block in model.transformer.h:
        assert bool((block.attn.memory_conv.grad[1:] != 0).any())
        block.attn.memory_conv.data.normal_()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.memory_conv == 3 and torch.equal(loaded(ids).logits, model(ids).logits)
    assert torch.equal(unpatch_model(model)(ids).logits, gpt2()(ids).logits)


# --- what tokens weigh ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("update_rule", "position_encoding"), [("linear", "rope"), ("delta", "learned")])
def test_a_token_weighs_what_its_input_says(update_rule, position_encoding):
    """Against the naive reference, whose features are multiplied by the weights one by one; rope does not touch them."""
    options = {"memory_write": "learned", "local_segments": 1, "update_rule": update_rule}
    options["position_encoding"] = position_encoding
    model = convolved(feature_map="exp", **options)
    attention, inputs = model.transformer.h[0].attn, torch.randn(2, 50, 32, dtype=torch.float64)
    query, key, value, log_weight = projected(attention, inputs)
    added, _ = short_convolution(inputs, attention.memory_conv, segment_layout(2, 50, 8, 1), inputs.new_zeros(2, 2, 32))
    weights = torch.einsum("btc,hc->bht", inputs + added, attention.memory_write).exp()
    unturned = attention.c_attn(inputs + added)[..., 32:64].unflatten(-1, (4, 8)).transpose(1, 2)
    wanted = unturned.exp() * weights.unsqueeze(-1)
    torch.testing.assert_close((key + log_weight).exp(), wanted, rtol=FLOAT64, atol=0)
    options = {"local_segments": 1, "update_rule": update_rule, "feature_map": "exp", "log_weight": log_weight}
    options["rotary"] = attention.window_rotary(None, inputs)
    wanted = naive_infini_attention(query, key, value, attention.gate(), 8, **options)
    wanted = attention.c_proj(wanted.transpose(1, 2).flatten(2))
    torch.testing.assert_close(attention(inputs)[0], wanted, rtol=FLOAT64, atol=FLOAT64)


@pytest.mark.parametrize("make", [gpt2, lambda: decoder("llama")], ids=["gpt2", "llama"])
def test_learned_feature_maps_start_as_exp_are_trained_and_come_back(make, tmp_path):
    """The second has two query heads to a key's, each with a map; below, each head against the naive reference."""
    ids, options = token_ids(2, 50), {"segment_length": 8, "local_segments": 1}
    plain = patch_model(make(), **options, feature_map="exp")(ids).logits
    model = patch_model(make(), **options, feature_map="learned")
    assert torch.equal(model(ids).logits, plain)
    model(ids, labels=ids).loss.backward()
    for name, parameter in model.named_parameters():
        if name.endswith(("query_map", "key_map")):
            assert bool((parameter.grad != 0).flatten(1).any(1).all())
            parameter.data.add_(torch.randn_like(parameter), alpha=0.3)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded(ids).logits, model(ids).logits) and not torch.allclose(model(ids).logits, plain)
    assert torch.equal(unpatch_model(model)(ids).logits, make()(ids).logits)


def test_a_learned_feature_map_against_the_naive_reference():
    model = convolved(memory_conv=0, feature_map="learned", local_segments=1)
    attention, inputs = model.transformer.h[0].attn, torch.randn(2, 50, 32, dtype=torch.float64)
    query, key, value, _ = projected(attention, inputs)
    options = {"local_segments": 1, "feature_map": "exp", "feature_maps": (attention.query_map, attention.key_map)}
    wanted = naive_infini_attention(query, key, value, attention.gate(), 8, **options)
    wanted = attention.c_proj(wanted.transpose(1, 2).flatten(2))
    torch.testing.assert_close(attention(inputs)[0], wanted, rtol=FLOAT64, atol=FLOAT64)


# --- tokens that are kept out -----------------------------------------------------------------------------------------


def sprinkle(ids, special, seed=0):
    """The ids with about a fifth of them replaced by the special one."""
    chosen = torch.rand(ids.shape, generator=torch.Generator().manual_seed(seed)) < 0.2
    return ids.masked_fill(chosen, special)


@pytest.mark.parametrize(("rule", "local_segments"), [("linear", 2), ("delta", 0), ("gated_delta", 2)])
def test_special_tokens_are_not_written_into_the_memory(rule, local_segments, monkeypatch):
    """A one-layer model against the naive function that is told which tokens to leave out."""
    model = infini_gpt2(n_layer=1, update_rule=rule, local_segments=local_segments).double()
    ids = sprinkle(token_ids(2, 50), special=model.config.eos_token_id)
    output = model(ids).logits
    torch.testing.assert_close(in_calls(model, ids, CUTS), output, rtol=FLOAT64, atol=FLOAT64)
    padded, mask = spread(ids, 70)
    in_padding = model(padded, attention_mask=mask).logits[mask == 1]
    torch.testing.assert_close(in_padding, output.flatten(0, 1), rtol=FLOAT64, atol=FLOAT64)

    def naive(tokens, gate, layout, rule, softmax, *arguments, **options):
        options = {"update_rule": rule.update_rule, "scaling": softmax.scaling, "memory_mask": ids != 0}
        options["log_weight"] = tokens.log_weight
        attended = naive_infini_attention(*tokens[:3], gate, 8, local_segments=local_segments, **options)
        return attended, None, None

    monkeypatch.setattr(hf_infini.layers.memory_layer, "attend", naive)
    torch.testing.assert_close(output, model(ids, use_cache=False).logits, rtol=FLOAT64, atol=FLOAT64)
    monkeypatch.undo()
    model.config.mask_special_tokens = False
    assert not torch.allclose(model(ids).logits, output)


@pytest.mark.parametrize(("make", "options"), [(infini_gpt2, {}), (causal_mha, {"attention": "infini"})])
def test_what_a_kept_out_token_is_changes_nothing_after_the_window(make, options):
    """One layer, special token in the first segment: another special token in its place changes no later segment."""
    model = make(n_layer=1, segment_length=8, bos_token_id=1, eos_token_id=0, pad_token_id=2, **options)
    ids = token_ids(1, 32).clamp(min=3)
    outputs = {}
    for special in (0, 1, 2, 50):
        ids[0, 5] = special
        outputs[special] = model(ids).logits[0]
    assert torch.equal(outputs[0][8:], outputs[1][8:]) and torch.equal(outputs[0][8:], outputs[2][8:])
    assert not torch.allclose(outputs[0][5:8], outputs[1][5:8]) and not torch.allclose(outputs[0][8:], outputs[50][8:])
