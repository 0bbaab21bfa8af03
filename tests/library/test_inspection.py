"""inspect_attention: its parts give back what the modules did, also padded and packed; tables say whose numbers they are."""

import pytest
import torch

from corpora.tokenization import build_character_tokenizer
from hf_infini import InfiniState, naive_infini_attention, patch_model
from hf_infini.tools.inspection import inspect_attention
from hf_infini.tools.inspection.heads import DIMENSIONS
from models import causal_mha, gpt2, infini_gpt2, token_ids

# Heads' numbers are of size 1 to 10: the same float32 sums in another order.
FLOAT32 = 1e-5
MODELS = [
    (gpt2, {"scale_attn_by_inverse_layer_idx": True}),
    (gpt2, {"scale_attn_weights": False, "attn_implementation": "eager", "reorder_and_upcast_attn": True}),
    (infini_gpt2, {"layers": [0, 2], "attn_implementation": "eager", "position_encoding": "rope", "local_segments": 1}),
    (infini_gpt2, {"layers": [1], "memory_init": "learned", "update_rule": "delta", "segment_length": 5}),
    (infini_gpt2, {"feature_map": "learned", "memory_write": "learned", "memory_conv": 2, "denominator": "shared"}),
    (infini_gpt2, {"update_rule": "gated_delta", "local_segments": 1, "memory_init": "learned", "feature_map": "learned"}),
    (causal_mha, {"score": "additive", "position_encoding": "t5", "attn_implementation": "eager"}),
    (causal_mha, {"position_encoding": "alibi", "attention": "local", "sliding_window": 5}),
    (causal_mha, {"score": "general", "position_encoding": "relative_key", "max_distance": 4}),
    (causal_mha, {"score": "general", "attention": "infini", "segment_length": 8, "local_segments": 1}),
]
all_models = pytest.mark.parametrize(("make", "options"), MODELS, ids=lambda value: getattr(value, "__name__", str(value)))


def learned_start(model):
    """Starts of the memory, convolutions and weights of what is written that are not the same for all heads and places."""
    for name, parameter in model.named_parameters():
        if name.rsplit(".")[-1] in ("start_memory", "start_normaliser", "memory_conv", "memory_write", "query_map"):
            parameter.data.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    return model


def attention_outputs(model, **inputs) -> list[torch.Tensor]:
    """What the attention modules return, by hooks of this test's own."""
    outputs = []

    def hook(module, args, output):
        outputs.append(output[0] if isinstance(output, tuple) else output)

    hooks = [block.attn.register_forward_hook(hook) for block in model.transformer.h]
    with torch.no_grad():
        model(**inputs, use_cache=False)
    for handle in hooks:
        handle.remove()
    return outputs


def projected(module, heads: torch.Tensor) -> torch.Tensor:
    project = module.c_proj if hasattr(module, "c_proj") else module.out_proj
    with torch.no_grad():
        return project(heads.transpose(1, 2).flatten(2))


def assert_close(left, right, tolerance=FLOAT32):
    torch.testing.assert_close(left, right, rtol=tolerance, atol=tolerance)


# --- the parts give back the whole ------------------------------------------------------------------------------------


@all_models
def test_heads_concatenated_and_projected_are_the_output(make, options):
    model = learned_start(make(**options))
    ids = token_ids(2, 37)
    outputs = attention_outputs(model, input_ids=ids)
    inspection = inspect_attention(model, ids)
    assert list(inspection.layers) == [0, 1, 2] and inspection.real.all()
    for number, layer in inspection.layers.items():
        assert torch.equal(layer.output.values, outputs[number])
        assert_close(projected(model.transformer.h[number].attn, layer.heads.values), outputs[number])
        weights, scores = layer.weights.values, layer.scores.values
        assert weights.shape == scores.shape == (2, 4, 37, 37)
        assert_close(weights.sum(-1), torch.ones(2, 4, 37))
        assert_close(scores.softmax(-1), weights)
        assert scores.isinf()[..., torch.ones(37, 37).triu(1).bool()].all() and (weights[scores.isinf()] == 0).all()
        for name, dims in DIMENSIONS.items():
            tensor = getattr(layer, name)
            assert tensor is None or (tensor.dims == dims and tuple(tensor.sizes.values()) == tensor.values.shape)


@pytest.mark.parametrize(("make", "kept"), [(infini_gpt2, 2), (causal_mha, 0)])
def test_local_weights_lie_at_their_key_tokens(make, kept):
    options = {"attention": "infini"} if make is causal_mha else {}
    model, ids = make(segment_length=8, local_segments=kept, **options), token_ids(2, 37)
    with torch.no_grad():
        windows = model(ids, output_attentions=True).attentions
    for layer, window in zip(inspect_attention(model, ids).layers.values(), windows, strict=True):
        wanted = torch.zeros(2, 4, 37, 37)
        for query in range(37):
            first = (query // 8 - kept) * 8  # the token in the window's first place
            for key in range(max(0, first), query + 1):
                wanted[:, :, query, key] = window[:, :, query, key - first]
        assert_close(layer.weights.values, wanted)
        assert torch.equal(layer.segments.values, (torch.arange(37) // 8).expand(2, -1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "kept", "start"),
    [("linear", 0, "zeros"), ("linear", 2, "noise"), ("delta", 1, "learned"), ("gated_delta", 0, "learned")],
)
def test_memory_and_local_attention_are_the_naive_function_s(rule, kept, start):
    model = learned_start(infini_gpt2(update_rule=rule, local_segments=kept, memory_init=start, n_layer=1))
    attention, ids, inputs = model.transformer.h[0].attn, token_ids(2, 45), []
    attention.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    layer = inspect_attention(model, ids).layers[0]
    with torch.no_grad():
        parts = attention.c_attn(inputs[0]).split(32, dim=2)
        tensors = [part.unflatten(-1, (4, 8)).transpose(1, 2) for part in parts]
        log_weight = attention.log_weight(inputs[0])
        initial = {"log_weights": 2, "normalised": False} if rule == "gated_delta" else {}
        states = [InfiniState.initial(tensors[1], tensors[2], 8, kept, **attention.start(), **initial)]
        options = {"update_rule": rule, "local_segments": kept}

        def naive(pieces, gate, state):
            *pieces, weights = pieces
            return naive_infini_attention(*pieces, gate, 8, log_weight=weights, state=state, return_state=True, **options)

        tensors.append(log_weight)
        for begin in range(0, 45, 8):  # segment by segment, each from the state after the one before
            pieces = [None if tensor is None else tensor[:, :, begin : begin + 8] for tensor in tensors]
            states.append(naive(pieces, attention.gate(), states[-1])[1])
        # sigmoid is 1 and 0 in float32
        memory, local = (naive(tensors, torch.full((4,), gate), states[0])[0] for gate in (100.0, -100.0))
        mixed = naive(tensors, attention.gate(), states[0])[0]
    # Sums of up to 45 outer products, relative to their size
    norms = torch.stack([state.memory.flatten(2).norm(dim=-1) for state in states], -1)
    torch.testing.assert_close(layer.memory_norm.values, norms, rtol=1e-4, atol=1e-6)
    norms = torch.stack([state.normaliser.norm(dim=-1) for state in states], -1)
    torch.testing.assert_close(layer.normaliser_norm.values, norms, rtol=1e-5, atol=1e-12)
    has_memory = (torch.arange(45) // 8 > kept) if start == "zeros" else torch.ones(45, dtype=torch.bool)
    memory = memory * has_memory[:, None]
    # A delta rule on random keys brings numbers of size 100 that nearly cancel
    scale = float(memory.abs().max())
    for found, wanted in ((layer.memory_heads, memory), (layer.local_heads, local), (layer.heads, mixed)):
        torch.testing.assert_close(found.values, wanted, rtol=1e-4, atol=1e-5 * max(1.0, scale))

    gate = torch.sigmoid(attention.gate().detach())
    assert_close(layer.gate.values, gate)
    gate = gate[:, None] * has_memory  # [heads, tokens]
    from_memory, from_local = gate * memory.norm(dim=-1), (1 - gate) * local.norm(dim=-1)
    share = layer.memory_share.values
    assert_close(share, from_memory / (from_memory + from_local), 1e-4)
    assert (share[..., ~has_memory] == 0).all() and (start == "noise" or (share[..., has_memory] > 0).all())


# --- padding and packing ----------------------------------------------------------------------------------------------


@all_models
def test_a_padded_row_is_the_row_alone(make, options):
    model, lengths = learned_start(make(**options)), (30, 19)
    tokenizer = build_character_tokenizer(["abcdefgh"])
    tokenizer.padding_side = side = "left" if len(options) % 2 else "right"
    texts = ["abcdefghhgfedcbaabcdefgaaabbbh"[:length] for length in lengths]
    together = inspect_attention(model, texts, tokenizer)
    assert together.real.sum(1).tolist() == list(lengths) and together.real[1, 0] == (side == "right")
    for row, text in enumerate(texts):
        alone, real = inspect_attention(model, text, tokenizer), together.real[row]
        assert alone.texts[0] == together.texts[row] == list(text)
        for number, layer in together.layers.items():
            compare_rows(layer, row, real, alone.layers[number])
            padding = layer.weights.values[row][:, ~real]
            assert (padding == 0).all() and (layer.heads.values[row][:, ~real] == 0).all()
            assert (layer.scores.values[row][:, ~real] == float("-inf")).all()
            assert layer.memory_share is None or (layer.memory_share.values[row][:, ~real] == 0).all()


@all_models
def test_packed_documents_are_the_documents_alone(make, options):
    model, lengths = learned_start(make(**options)), (13, 5, 19)
    ids = token_ids(1, sum(lengths))
    position_ids = torch.cat([torch.arange(length) for length in lengths])[None]
    packed = inspect_attention(model, ids, position_ids=position_ids)
    begin = 0
    for length in lengths:
        kept = torch.zeros(sum(lengths), dtype=torch.bool)
        kept[begin : begin + length] = True
        alone = inspect_attention(model, ids[:, kept])
        for number, layer in packed.layers.items():
            compare_rows(layer, 0, kept, alone.layers[number], norms=False)
            assert (layer.weights.values[0][:, kept][..., ~kept] == 0).all()
            if layer.kind == "infini":  # what the document's own segments read
                assert (layer.memory_weights.values[0][:, kept][..., ~kept] == 0).all()
                places = layer.segments.values[0, kept].unique()
                norms = alone.layers[number].memory_norm.values[0, :, : len(places)]
                torch.testing.assert_close(layer.memory_norm.values[0][:, places], norms, rtol=1e-4, atol=1e-6)
        begin += length


def compare_rows(layer, row: int, kept: torch.Tensor, alone, norms=True) -> None:
    """The columns `kept` of one row hold what the inspection of these tokens `alone` holds."""
    for name, dims in DIMENSIONS.items():
        tensor = getattr(layer, name)
        if tensor is None or name in ("gate", "segments") or dims[-1] == "segment" and not norms:
            assert (tensor is None) == (getattr(alone, name) is None)
            continue
        found, wanted = tensor.values[row], getattr(alone, name).values[0]
        for axis, dim in enumerate(dims[1:]):
            if dim in ("query", "key"):
                found = found[(slice(None),) * axis + (kept,)]
            elif dim == "segment":
                found = found[:, : wanted.shape[1]]
        # Memory norms and what a delta rule reads: relative to their size
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")


# --- the model is left as it was --------------------------------------------------------------------------------------


def test_the_model_is_left_as_it_was():
    model = infini_gpt2(attn_pdrop=0.5, resid_pdrop=0.5, embd_pdrop=0.5).train()
    model.transformer.h[1].eval()
    before = {name: module.training for name, module in model.named_modules()}
    first, second = (inspect_attention(model, token_ids(1, 20)) for _ in range(2))
    assert torch.equal(first.layers[2].weights.values, second.layers[2].weights.values)  # no dropout
    assert not first.layers[0].output.values.requires_grad
    with pytest.raises(ValueError, match="beyond"):
        inspect_attention(model, token_ids(1, 65))
    assert {name: module.training for name, module in model.named_modules()} == before
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_base_models_patched_models_and_chosen_layers():
    stock, ids = gpt2(), token_ids(1, 20)
    whole = inspect_attention(stock, ids)
    base = inspect_attention(stock.transformer, ids, layers=[2, 0])
    assert list(base.layers) == [0, 2]
    assert torch.equal(base.layers[2].scores.values, whole.layers[2].scores.values)
    # With one segment only, patching changes nothing but the kind
    patched = inspect_attention(patch_model(stock, segment_length=32), ids)
    assert patched.layers[1].kind == "infini"
    assert_close(patched.layers[1].heads.values, whole.layers[1].heads.values)


def test_a_block_without_attention_says_so():
    inspection = inspect_attention(causal_mha(attention="none"), token_ids(1, 9))
    assert [layer.kind for layer in inspection.layers.values()] == ["none"] * 3
    assert inspection.layers[0].weights is None
    with pytest.raises(ValueError, match=r"layer 0 \(none\) has the tensors \(none\)"):
        inspection.table()
