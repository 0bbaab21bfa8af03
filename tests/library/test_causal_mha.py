"""The attention module used alone: published numbers, and every kind of it against loops over
tokens."""

import cmath
import math

import pytest
import torch
from transformers.models.t5.modeling_t5 import T5Attention

from hf_infini import CausalMultiHeadAttention, InfiniState, naive_infini_attention
from hf_infini.layers.memory_layer import PARAMETERS
from hf_infini.ops.positions import alibi_slopes

SCORES = ("scaled_dot", "dot", "general", "additive")
POSITIONS = ("relative_key", "t5", "alibi", "rope", "none")


def attention(seed=0, **options) -> CausalMultiHeadAttention:
    """12 wide, 3 heads, in float64 and evaluation mode, its tables and gates far from their small
    starts."""
    torch.manual_seed(seed)
    if options.get("position_encoding") in ("t5", "relative_key"):
        options |= {"max_distance": 6} | (
            {"num_buckets": 4} if options["position_encoding"] == "t5" else {}
        )
    module = CausalMultiHeadAttention(10, 12, 3, 0.0, True, **options).double().eval()
    for name, parameter in module.named_parameters():
        if (
            name
            in ("score_weight", "score_vector", "relative_table", "relative_bias", "gate.weight")
            or "memory" in name
        ):
            parameter.data.normal_()
    return module


def inputs(batch=2, tokens=9, seed=1) -> torch.Tensor:
    return torch.randn(
        batch, tokens, 10, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


# --- published numbers
# --------------------------------------------------------------------------------------------------


def test_worked_example():
    """The hand calculation with three tokens and two heads of width 2, whose output projection is
    the identity."""
    rows = torch.tensor([[[1.0, 0, 1, 0], [0, 1, 1, 0], [1, 1, 0, 1]]])
    head_1 = {
        "W_query": [[1, 0], [0, 1], [1, 0], [0, 1]],
        "W_key": [[1, 1], [0, 1], [1, 0], [0, 1]],
        "W_value": [[1, 0], [0, 1], [1, 1], [0, 1]],
    }
    head_2 = {
        "W_query": [[0, 1], [1, 0], [0, 1], [1, 0]],
        "W_key": [[1, 0], [1, 1], [0, 1], [1, 0]],
        "W_value": [[0, 1], [1, 0], [1, 0], [0, 1]],
    }
    module = CausalMultiHeadAttention(4, 4, 2)
    with torch.no_grad():
        for name in head_1:
            both = torch.cat([torch.tensor(head_1[name]), torch.tensor(head_2[name])], 1).float()
            getattr(module, name).weight.copy_(both.T)  # a Linear multiplies with the transpose
        module.out_proj.weight.copy_(torch.eye(4))
        module.out_proj.bias.zero_()
        output, weights = module(rows, output_attentions=True)
    wanted = [
        [2.000, 1.000, 1.000, 1.000],
        [1.670, 1.330, 1.670, 0.330],
        [1.102, 1.898, 1.102, 1.747],
    ]
    heads = [
        [[1, 0, 0], [0.670, 0.330, 0], [0.102, 0.050, 0.848]],
        [[1, 0, 0], [0.330, 0.670, 0], [0.050, 0.102, 0.848]],
    ]
    half_a_digit = {"rtol": 0, "atol": 0.0005}  # the numbers were published with three decimals
    torch.testing.assert_close(output[0], torch.tensor(wanted), **half_a_digit)
    torch.testing.assert_close(weights[0], torch.tensor(heads), **half_a_digit)


# --- against loops
# --------------------------------------------------------------------------------------------------


def turn(vector: torch.Tensor, position: int) -> torch.Tensor:
    """Rope by complex numbers, one pair after the other."""
    half = vector.shape[0] // 2
    turned = vector.clone()
    for pair in range(half):
        angle = position * 10_000.0 ** (-2 * pair / vector.shape[0])
        z = torch.complex(vector[pair], vector[pair + half]) * cmath.exp(1j * angle)
        turned[pair], turned[pair + half] = z.real, z.imag
    return turned


def by_loops(module: CausalMultiHeadAttention, x: torch.Tensor) -> torch.Tensor:
    """The module's output, from its weights and the equations, one head, one query and one key at a
    time."""
    config, width = module.config, module.head_dim
    rows = []
    for row in x:
        tokens = []
        for i in range(len(row)):
            heads = []
            for h in range(module.num_heads):
                first = (
                    0 if config.sliding_window is None else max(0, i - config.sliding_window + 1)
                )
                scores, values = [], []
                for j in range(first, i + 1):
                    query, key, value = (
                        layer.weight.chunk(module.num_heads)[h] @ row[place]
                        + layer.bias.chunk(module.num_heads)[h]
                        for layer, place in (
                            (module.W_query, i),
                            (module.W_key, j),
                            (module.W_value, j),
                        )
                    )
                    if config.position_encoding == "rope":
                        query, key = turn(query, i), turn(key, j)
                    if config.position_encoding == "relative_key":
                        key = key + module.relative_table[min(i - j, config.max_distance)]
                    score = {
                        "dot": lambda q, k, h: q @ k,
                        "scaled_dot": lambda q, k, h: q @ k / math.sqrt(width),
                        "general": lambda q, k, h: q @ module.score_weight[h] @ k,
                        "additive": lambda q, k, h: (
                            module.score_vector[h]
                            @ torch.tanh(module.score_weight[h] @ torch.cat([q, k]))
                        ),
                    }[config.score](query, key, h)
                    if config.position_encoding == "alibi":
                        score = score - alibi_slopes(module.num_heads)[h] * (i - j)
                    if config.position_encoding == "t5":
                        sizes = config.num_buckets, config.max_distance
                        bucket = T5Attention._relative_position_bucket(
                            torch.tensor(j - i), False, *sizes
                        )
                        score = score + module.relative_bias[bucket, h]
                    scores.append(score)
                    values.append(value)
                heads.append(torch.softmax(torch.stack(scores), 0) @ torch.stack(values))
            tokens.append(module.out_proj.weight @ torch.cat(heads) + module.out_proj.bias)
        rows.append(torch.stack(tokens))
    return torch.stack(rows)


def outputs_and_gradients(function, module, x) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    output = function(x)
    upstream = torch.randn(
        output.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64
    )
    return [output, *torch.autograd.grad(output, [x, *module.parameters()], upstream)]


LOCAL = {"attention": "local", "sliding_window": 4}
WIDE_KEYS, WIDE_VALUES = {"head_dim": 6, "value_dim": 3}, {"head_dim": 2, "value_dim": 5}
# Eleven of the forty kinds, in which each score meets most encodings, and each of both the two
# reaches; in the last, relative positions are added to keys and not to scores. And three whose keys
# and values are not as wide.
KINDS = [(SCORES[n % 4], POSITIONS[n % 5], LOCAL if n // 2 % 2 else {}) for n in range(10)]
KINDS.append(("additive", "relative_key", LOCAL))
KINDS += [
    ("general", "rope", WIDE_KEYS),
    ("additive", "relative_key", WIDE_VALUES),
    ("dot", "alibi", LOCAL | WIDE_KEYS),
]


@pytest.mark.slow
@pytest.mark.parametrize(("score", "position", "reach"), KINDS)
def test_every_kind_is_its_equations_outputs_and_gradients(score, position, reach):
    module, x = attention(score=score, position_encoding=position, **reach), inputs()
    wanted = outputs_and_gradients(lambda x: by_loops(module, x), module, x)
    # Rope's angles are float32 in the module and float64 in the loops: 1e-6 of 9 radians
    tolerance = {"rtol": 0, "atol": 1e-4} if position == "rope" else {}
    for implementation in ("eager", "sdpa"):
        module.config._attn_implementation = implementation
        got = outputs_and_gradients(module, module, x)
        for ours, naive in zip(got, wanted, strict=True):
            torch.testing.assert_close(ours, naive, **tolerance)


RICH = {"feature_map": "exp", "memory_write": "learned", "memory_conv": 3}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("position", "score", "kept", "rule", "memory"),
    [
        ("none", "scaled_dot", 0, "linear", {}),
        ("rope", "dot", 1, "linear", RICH),
        ("none", "dot", 1, "linear", {"memory_conv": 1}),
        ("none", "dot", 0, "delta", RICH),
        ("rope", "scaled_dot", 1, "delta", {}),
        ("none", "scaled_dot", 1, "gated_delta", {}),
        ("rope", "dot", 0, "gated_delta", {"feature_map": "exp", "memory_conv": 3}),
        ("rope", "scaled_dot", 1, "gated_delta", WIDE_KEYS),
        ("none", "dot", 1, "linear", WIDE_VALUES),
    ],
)
def test_infini_is_the_naive_function(position, score, kept, rule, memory):
    options = {
        "segment_length": 4,
        "local_segments": kept,
        "sink_tokens": kept,
        "update_rule": rule,
    } | memory
    module = attention(attention="infini", score=score, position_encoding=position, **options)
    x = inputs(tokens=19)

    def by_tokens(x):
        shared = module.inputs_outside_model(x)
        hidden_states, _ = module.begin(x, shared)
        query, key, value = module.project(hidden_states)
        softmax = module.score_options(shared)
        log_weight = module.log_weight(hidden_states)
        options = {name: getattr(module.config, name) for name in ("update_rule", "feature_map")}
        options |= {name: getattr(softmax, name) for name in ("scaling", "rotary")}
        heads = naive_infini_attention(
            query,
            key,
            value,
            module.gate(),
            4,
            local_segments=kept,
            sink_tokens=kept,
            log_weight=log_weight,
            **options,
            state=InfiniState.initial(
                key, value, 4, kept, kept, rule=module.rule, weighted=log_weight is not None
            ),
        )
        return module.out_proj(heads.transpose(1, 2).flatten(2))

    for ours, naive in zip(
        *(outputs_and_gradients(f, module, x) for f in (module, by_tokens)), strict=True
    ):
        torch.testing.assert_close(ours, naive)
    if memory.keys() - WIDE_KEYS.keys():
        return
    # What the window compares is the score of the other kinds: inside the first segment nothing
    # else counts
    other = attention(score=score, position_encoding=position, **memory)
    other.load_state_dict(
        {k: v for k, v in module.state_dict().items() if k.partition(".")[0] not in PARAMETERS}
    )
    torch.testing.assert_close(module(x)[:, :4], other(x[:, :4]))


@pytest.mark.slow
def test_dropout_drops_weights_in_training_only():
    torch.manual_seed(0)
    module = CausalMultiHeadAttention(10, 12, 3, dropout=0.5).double()
    x = inputs()
    still = module.eval()(x)
    assert torch.equal(still, module(x))
    module.train()
    for implementation in ("eager", "sdpa"):
        module.config._attn_implementation = implementation
        torch.manual_seed(0)
        mean = torch.stack([module(x) for _ in range(3000)]).mean(0)
        # The dropped weights are made up for: the mean of 3,000 draws is off by 3 standard errors,
        # 0.03, at most
        torch.testing.assert_close(mean, still, rtol=0, atol=0.06)
        assert not torch.equal(module(x), module(x))


# --- errors
# --------------------------------------------------------------------------------------------------


def test_errors_name_shapes_and_options():
    with pytest.raises(ValueError, match=r"num_heads must divide d_out.*got 10 / 3"):
        CausalMultiHeadAttention(4, 10, 3)
    with pytest.raises(
        Exception, match="needs a score that is a product, scaled_dot, dot; got 'general'"
    ):
        attention(attention="infini", segment_length=4, score="general")
    with pytest.raises(
        ValueError, match="unknown options window; an attention takes attention, score"
    ):
        CausalMultiHeadAttention(4, 6, 3, window=4)
    for options in ({"position_encoding": "learned"}, {"attention": "none"}):
        with pytest.raises(
            ValueError,
            match="attention='none' and 'learned' or 'sinusoidal' positions are a model's",
        ):
            CausalMultiHeadAttention(4, 6, 3, **options)
