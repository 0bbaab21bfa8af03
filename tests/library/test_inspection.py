"""inspect_attention against the model itself and the naive reference: every family, packed rows,
adapters."""

import random

import pytest
import torch
from peft import LoraConfig, get_peft_model

from decoders import TYPES, decoder
from hf_infini import (
    InfiniCache,
    InfiniState,
    load_adapter,
    naive_infini_attention,
    patch_model,
    save_adapter,
)
from hf_infini.models.structure import attention_layers, decoder_of
from hf_infini.ops.backends import forced_backend
from hf_infini.options import KEEP_SCORES
from hf_infini.tools.inspection import inspect_attention
from hf_infini.tools.inspection.heads import DIMENSIONS, KEPT, MEMORY, SINK, WINDOW
from hf_infini.tools.inspection.run import softmax_parts
from models import causal_mha, gpt2, infini_gpt2, token_ids

# Heads' numbers are of size 1 to 10: the same float32 sums in another order
FLOAT32 = 1e-5
FLOAT64 = {"rtol": 1e-9, "atol": 1e-11}  # of sums of some ten products, divided by sums of features
LENGTH, TOKENS = 8, 45
EXP = {"feature_map": "exp", "memory_write": "learned", "memory_conv": 2}


def patched(model_type: str, **options):
    """A decoder of a family with a memory, whose gates are open."""
    return patch_model(
        decoder(model_type), **{"segment_length": LENGTH, "gate_init": 0.3} | options
    )


def drawn(seed: int) -> dict:
    """Options of a window of any shape, with kept tokens: in the first as many as there are."""
    draw = random.Random(seed)
    length, score = draw.randint(2, 11), draw.choice(KEEP_SCORES)
    window = {
        "segment_length": length,
        "local_segments": draw.randint(0, 2),
        "sink_tokens": draw.randrange(length),
    }
    rule = draw.choice(["linear", "delta", "gated_delta"])
    return {
        "update_rule": rule,
        "kept_tokens": draw.randint(2, 12) if seed else TOKENS,
        "keep_score": score,
        **window,
    }


KEEPS = {"local_segments": 1, "sink_tokens": 2, "kept_tokens": 6}
INFINIS = [
    (infini_gpt2, {"local_segments": 1, "sink_tokens": 3, "kept_tokens": 5}),
    (infini_gpt2, {"update_rule": "delta"}),
    (infini_gpt2, {"layers": [0, 2], "attn_implementation": "eager"}),
    (infini_gpt2, {**EXP, "update_rule": "delta", "local_segments": 1}),
    (infini_gpt2, {**KEEPS, "update_rule": "gated_delta", "keep_score": "learned"}),
    (
        causal_mha,
        {
            "attention": "infini",
            "segment_length": LENGTH,
            "position_encoding": "rope",
            "score": "dot",
            **EXP,
        },
    ),
    (patched, {"model_type": "qwen3", **KEEPS, "keep_score": "half"}),
    (
        patched,
        {"model_type": "gemma2", "update_rule": "delta", "kept_tokens": 7, "layers": [0, 1, 3]},
    ),
]
DRAWN = [
    (causal_mha, {"attention": "infini", "position_encoding": "rope"} | drawn(seed))
    for seed in range(6)
]
PLAIN = [
    (gpt2, {"scale_attn_by_inverse_layer_idx": True}),
    (decoder, {"model_type": "gemma3_text"}),
    (causal_mha, {"score": "additive", "position_encoding": "t5", "attn_implementation": "eager"}),
    (causal_mha, {"position_encoding": "alibi", "attention": "local", "sliding_window": 5}),
]


def models(cases):
    ids = (
        "-".join([make.__name__, *(str(value) for value in options.values())][:3])
        for make, options in cases
    )
    return pytest.mark.parametrize(("make", "options"), cases, ids=ids)


def made(make, options):
    """The model, its starts, convolutions and writing weights not the same for all heads and
    places."""
    model = make(**options)
    for name, parameter in model.named_parameters():
        if name.endswith(("memory_conv", "memory_write", "keep_weight")):
            parameter.data.add_(
                torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)), alpha=0.3
            )
    return model


def attentions(model) -> list:
    base = model.transformer if hasattr(model, "transformer") else decoder_of(model)
    return [block.attn for block in base.h] if hasattr(base, "h") else attention_layers(base)


def projected(module, heads: torch.Tensor) -> torch.Tensor:
    names = ("c_proj", "out_proj", "o_proj")
    project = next(getattr(module, name) for name in names if hasattr(module, name))
    with torch.no_grad():
        return project(heads.transpose(1, 2).flatten(2))


def assert_close(left, right, tolerance=FLOAT32):
    torch.testing.assert_close(left, right, rtol=tolerance, atol=tolerance)


# --- the parts give back the whole
# --------------------------------------------------------------------------------------------------


@models(INFINIS + PLAIN)
def test_heads_concatenated_and_projected_are_the_output(make, options):
    model, ids, outputs = made(make, options), token_ids(2, 37), []
    modules = attentions(model)
    hooks = [
        module.register_forward_hook(lambda module, args, output: outputs.append(output))
        for module in modules
    ]
    with torch.no_grad():
        model(input_ids=ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    inspection = inspect_attention(model, ids)
    assert list(inspection.layers) == [*range(len(modules))]
    for (number, layer), output in zip(inspection.layers.items(), outputs, strict=True):
        output = output[0] if isinstance(output, tuple) else output
        scale = float(output.abs().max())
        torch.testing.assert_close(layer.output, output, rtol=1e-5, atol=1e-5 * scale)
        found = projected(modules[number], layer.heads)
        torch.testing.assert_close(found, output, rtol=1e-5, atol=1e-5 * scale)
        weights, scores = layer.weights, layer.scores
        assert weights.shape == scores.shape == (2, 4, 37, 37)
        assert_close(weights.sum(-1), torch.ones(2, 4, 37))
        assert_close(scores.softmax(-1), weights)
        assert (
            scores.isinf()[..., torch.ones(37, 37).triu(1).bool()].all()
            and (weights[scores.isinf()] == 0).all()
        )
        for name, dims in DIMENSIONS.items():
            tensor = getattr(layer, name)
            sizes = {"batch": 2, "head": 4, "query": 37, "key": 37, "head_dim": 8, "width": 32}
            sizes["segment"] = (
                sizes["query"] if tensor is None else tensor.shape[min(2, tensor.dim() - 1)]
            )
            assert tensor is None or tensor.shape == tuple(sizes[dim] for dim in dims)


@pytest.mark.slow
def test_every_family_with_a_memory_and_without():
    ids = token_ids(1, 30)
    for model_type in TYPES:
        model = decoder(model_type)
        implementation = model.config._attn_implementation
        model.set_attn_implementation("eager")
        with torch.no_grad():
            wanted = model(ids, output_attentions=True).attentions
        model.set_attn_implementation(implementation)
        layers = inspect_attention(model, ids).layers.values()
        for layer, weights in zip(layers, wanted, strict=True):
            assert layer.kind in ("global", "local") and layer.gate is None
            assert_close(layer.weights, weights)
        patch_model(model, segment_length=LENGTH, **KEEPS, gate_init=0.3)
        inspection = inspect_attention(model, ids)
        assert "infini" in {layer.kind for layer in inspection.layers.values()}
        cache = InfiniCache(model.config)
        with torch.no_grad():
            model(ids, past_key_values=cache, use_cache=True)
        for number in model.config.infini_layers:
            assert_kept(inspection.layers[number], cache.layers[number].state, -1)


def test_scores_are_the_dot_products():
    generator = torch.Generator().manual_seed(0)
    query, key = (
        torch.randn(1, 4, 9, 8, generator=generator),
        torch.randn(1, 2, 9, 8, generator=generator),
    )
    parts = softmax_parts(query, key, key, None, 0.5, 3.0)
    wanted = 3 * torch.tanh(0.5 / 3 * (query[0, 3] @ key[0, 1].mT))
    below = torch.ones(9, 9).tril().bool()
    assert_close(parts["scores"][0, 3][below], wanted[below])


# --- the memory
# --------------------------------------------------------------------------------------------------


def naive(call, value, gate, skipped, return_state=False):
    """The reference's output for a call of a layer, with these values and gates."""
    key, rule, softmax, score = call.tokens.key, call.rule, call.softmax, call.tokens.score
    window = call.layout.window
    weight = call.tokens.log_weight
    made = {"weighted": weight is not None, "scores": call.keep_score.count}
    state = InfiniState.initial(key, value, *window, rule=rule, **made)
    options = {name: getattr(rule, name) for name in ("update_rule", "feature_map", "eps")}
    options["keep_score"] = call.keep_score.keep_score
    options |= {name: getattr(softmax, name) for name in ("scaling", "softcap", "rotary", "turn")}
    given = {"state": state, "log_weight": weight, "memory_mask": ~skipped}
    learned = len(call.keep_score.learns)
    given |= {
        "learned_score": score[..., -learned:] if learned else None,
        "return_state": return_state,
    }
    return naive_infini_attention(
        call.query, key, value, gate, **window._asdict(), **options, **given
    )


def assert_kept(layer, state, moment: int) -> None:
    """What the layer's heads keep is what the state says, whose rows hold one document each."""
    for fates, wanted in zip(layer.fates[:, :, moment], state.kept_position, strict=True):
        found = [(head == KEPT).nonzero().flatten().tolist() for head in fates]
        wanted = [[number for number in head if number >= 0] for head in wanted.tolist()]
        assert found == [head for head in wanted for _ in range(len(found) // len(wanted))]


@models(INFINIS + DRAWN)
@torch.no_grad()
def test_weights_and_heads_are_the_naive_function_s(make, options):
    model, ids, calls = made(make, options).double(), token_ids(2, TOKENS), []
    ids[0, [3, 17]] = ids[1, 9] = model.config.eos_token_id
    special = [getattr(model.config, f"{name}_token_id") for name in ("bos", "eos", "pad")]
    # by the memory
    skipped = torch.isin(ids, torch.tensor([token for token in special if token is not None]))
    layers = inspect_attention(model, ids).layers

    def run(call):
        calls.append(call)
        return torch.zeros_like(call.query), None, None

    watched = next(number for number in (1, 0) if layers[number].kind == "infini")
    layer, module = layers[watched], attentions(model)[watched]
    given = []
    hook = module.register_forward_pre_hook(
        lambda module, args, kwargs: given.append((args, kwargs)), with_kwargs=True
    )
    model(ids, use_cache=False)
    hook.remove()
    with forced_backend(run):
        module(*given[0][0], **given[0][1])
    [call] = calls
    heads, length = 4, options.get("segment_length", LENGTH)
    units = torch.eye(TOKENS).double().expand(*call.tokens.key.shape[:2], -1, -1)
    found, gate = layer.memory_weights, layer.token_gate.unsqueeze(-1)
    has_memory = (gate > 0).squeeze(-1)
    assert found.shape == (2, heads, TOKENS, TOKENS)
    assert has_memory[..., -1].all() or call.layout.window.kept_tokens == TOKENS
    # sigmoid(80) is 1 in float64
    opened = torch.full((heads,), 80.0).double()
    memory = naive(call, units, opened, skipped)
    torch.testing.assert_close(found[has_memory], memory[has_memory], **FLOAT64)
    assert not found[~has_memory].any()
    both = gate * found + (1 - gate) * layer.weights
    torch.testing.assert_close(both, naive(call, units, call.gate, skipped), **FLOAT64)
    read = naive(call, call.tokens.value, opened, skipped)
    torch.testing.assert_close(layer.memory_heads[has_memory], read[has_memory], **FLOAT64)
    mixed = gate * layer.memory_heads + (1 - gate) * layer.local_heads
    torch.testing.assert_close(layer.heads, mixed, **FLOAT64)
    assert_close(gate.squeeze(-1), has_memory * layer.gate[:, None], 1e-9)
    sizes = (gate * layer.memory_heads).norm(dim=-1), ((1 - gate) * layer.local_heads).norm(dim=-1)
    assert_close(layer.memory_share, sizes[0] / (sizes[0] + sizes[1]), 1e-9)

    # A token's score with itself is the same with rotation and without
    query, key = call.query, call.tokens.key
    own = (query * key.repeat_interleave(heads // key.shape[1], 1)).sum(
        -1
    ) * call.softmax.scaling_of(query)
    cap = call.softmax.softcap
    own = own if cap is None else cap * torch.tanh(own / cap)
    torch.testing.assert_close(layer.scores.diagonal(dim1=-2, dim2=-1), own, **FLOAT64)

    # What is not there weighs nothing at all
    segment = torch.arange(TOKENS) // length
    assert torch.equal(layer.segments, segment.expand(2, -1))
    fates = layer.fates[:, :, segment]
    assert torch.equal(found != 0, fates == MEMORY)
    assert torch.equal(
        layer.weights > 0, torch.isin(fates, torch.tensor([SINK, WINDOW, KEPT])).tril()
    )
    if not call.layout.window.kept_tokens:
        assert KEPT not in fates
        return
    assert_kept(layer, naive(call, call.tokens.value, call.gate, skipped, return_state=True)[1], -1)


@models([INFINIS[1], INFINIS[4], INFINIS[6]])
def test_memory_norms_and_kept_tokens_are_those_of_a_cache_fed_segment_by_segment(make, options):
    model, ids = made(make, options), token_ids(2, 42)
    layers = inspect_attention(model, ids).layers
    cache = InfiniCache(model.config)
    for number, begin in enumerate(range(0, 42, LENGTH), start=1):
        with torch.no_grad():
            model(ids[:, begin : begin + LENGTH], past_key_values=cache)
        for index in model.config.infini_layers:
            state, layer = cache.layers[index].state, layers[index]
            norm = state.memory.flatten(2).norm(dim=-1)
            norm = norm.repeat_interleave(4 // norm.shape[1], 1)
            # Sums of up to 42 outer products, relative to their size
            torch.testing.assert_close(layer.memory_norm[..., number], norm, rtol=1e-4, atol=1e-6)
            if state.kept_position is not None:
                assert_kept(layer, state, number)


# --- packing
# --------------------------------------------------------------------------------------------------


def compare_rows(layer, kept: torch.Tensor, alone) -> None:
    """The columns `kept` of the row hold what the inspection of these tokens `alone` holds."""
    for name, dims in DIMENSIONS.items():
        found, wanted = getattr(layer, name), getattr(alone, name)
        if found is None or name in ("gate", "segments") or "segment" in dims:
            assert (found is None) == (wanted is None)
            continue
        for axis, dim in enumerate(dims):
            if dim in ("query", "key"):
                found = found[(slice(None),) * axis + (kept,)]
        # What a delta rule reads: relative to its size
        scale = float(wanted[wanted.isfinite()].abs().max())
        options = {
            "rtol": 1e-4,
            "atol": 1e-4 * max(1.0, scale),
            "msg": lambda text, name=name: f"{name}: {text}",
        }
        torch.testing.assert_close(found, wanted, **options)


@models([INFINIS[1], INFINIS[4], INFINIS[6], PLAIN[0], PLAIN[1]])
def test_packed_documents_are_the_documents_alone(make, options):
    model, lengths = made(make, options), (13, 5, 43)
    ids = token_ids(1, sum(lengths))
    position_ids = torch.cat([torch.arange(length) for length in lengths])[None]
    packed = inspect_attention(model, {"input_ids": ids, "position_ids": position_ids})
    begin = 0
    for length in lengths:
        kept = torch.zeros(sum(lengths), dtype=torch.bool)
        kept[begin : begin + length] = True
        alone = inspect_attention(model, ids[:, kept])
        for number, layer in packed.layers.items():
            compare_rows(layer, kept, alone.layers[number])
            assert (layer.weights[0][:, kept][..., ~kept] == 0).all()
            if layer.kind == "infini":  # what the document's own segments read
                assert (layer.memory_weights[0][:, kept][..., ~kept] == 0).all()
                places = layer.segments[0, kept].unique()
                norms = alone.layers[number].memory_norm[0, :, : len(places)]
                torch.testing.assert_close(
                    layer.memory_norm[0][:, places], norms, rtol=1e-4, atol=1e-6
                )
                fates = layer.fates[0][:, places]
                assert torch.equal(
                    fates[..., kept], alone.layers[number].fates[0, :, : len(places)]
                )
                assert not fates[..., ~kept].any()
        begin += length


# --- models
# --------------------------------------------------------------------------------------------------


def test_the_model_is_left_as_it_was():
    model = infini_gpt2(attn_pdrop=0.5, resid_pdrop=0.5, embd_pdrop=0.5, layers=[0, 2]).train()
    model.transformer.h[1].eval()
    before = {name: module.training for name, module in model.named_modules()}
    first, second = (inspect_attention(model, token_ids(1, 20)) for _ in range(2))
    assert torch.equal(first.layers[2].weights, second.layers[2].weights)  # no dropout
    assert not first.layers[0].output.requires_grad

    def fails(*_):
        raise MemoryError

    with pytest.raises(MemoryError):
        hook = model.transformer.h[2].mlp.register_forward_hook(fails)
        try:
            inspect_attention(model, token_ids(1, 20))
        finally:
            hook.remove()
    assert {name: module.training for name, module in model.named_modules()} == before
    assert model.config._attn_implementation == "sdpa"
    assert not any(
        module._forward_hooks or module._forward_pre_hooks for module in attentions(model)
    )


def test_some_layers_and_models_without_a_head():
    model, ids = infini_gpt2(layers=[0, 2]), token_ids(1, 20)
    whole, some = (
        inspect_attention(model, ids),
        inspect_attention(model.transformer, ids, layers=[2, 1]),
    )
    assert [layer.kind for layer in whole.layers.values()] == ["infini", "global", "infini"]
    assert list(some.layers) == [1, 2] and some.name == "InfiniGPT2Model"
    assert_close(some.layers[2].memory_weights, whole.layers[2].memory_weights)
    none = inspect_attention(causal_mha(attention="none"), ids).layers[1]
    assert none.kind == "none" and none.weights is None


def test_sixteen_bits():
    model, ids = infini_gpt2(kept_tokens=4), token_ids(1, 20)
    for half in (
        inspect_attention(infini_gpt2(kept_tokens=4).bfloat16(), ids),
        inspect_attention(gpt2().bfloat16(), ids),
    ):
        assert half.layers[0].weights.dtype == torch.float32
    wanted = inspect_attention(model, ids).layers[0].heads
    found = inspect_attention(infini_gpt2(kept_tokens=4).bfloat16(), ids).layers[0].heads
    assert float((found - wanted).norm() / wanted.norm()) < 0.03  # 8 bits: 0.004 for one number


@pytest.mark.parametrize("lora", [False, True])
def test_adapters(lora, tmp_path):
    model, ids = patched("qwen3"), token_ids(1, 30)
    if lora:
        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    for name, parameter in model.named_parameters():
        if "lora_B" in name or name.endswith("gate.weight"):
            torch.nn.init.normal_(parameter)
    wanted = inspect_attention(model, ids)
    save_adapter(model, tmp_path)
    found = inspect_attention(load_adapter(decoder("qwen3"), tmp_path), ids)
    for number, layer in wanted.layers.items():
        assert layer.kind == "infini"
        assert_close(found.layers[number].memory_weights, layer.memory_weights)
