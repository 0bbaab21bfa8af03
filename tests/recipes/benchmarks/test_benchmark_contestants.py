"""benchmarks: contestants that claim the same equations compute them, the others see what they say;
rounds and ratios."""

import pytest
import torch
from torch.testing import assert_close

from benchmarks import contestants
from benchmarks.contestants import CONTESTANTS, Problem, Shape
from benchmarks.parts import compared
from hf_infini import naive_infini_attention

LINEAR = ["infini", "infini-plain", "loop-split"]
DELTA = ["infini-delta"]
GATED = [("infini-gated-delta", "gated_delta")]
SHAPES = [Shape(24, 8, 3, 4), Shape(19, 8, 2, 4, batch=2), Shape(5, 8, 2, 4), Shape(7, 1, 2, 4)]


def output_and_gradients(function, problem):
    output = function()
    leaves = [problem.query, problem.key, problem.value, problem.gate]
    gradients = torch.autograd.grad(
        output, leaves, problem.upstream.transpose(1, 2), allow_unused=True
    )
    return output, [
        torch.zeros_like(x) if g is None else g for x, g in zip(leaves, gradients, strict=True)
    ]


def reference(problem, **options):
    return lambda: naive_infini_attention(
        *problem.views(), problem.gate, problem.shape.segment, **options
    )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    ("name", "rule"), [(n, "linear") for n in LINEAR] + [(n, "delta") for n in DELTA] + GATED
)
def test_the_same_equations(name, rule, shape):
    problem = Problem.random(shape)
    output, gradients = output_and_gradients(CONTESTANTS[name](problem), problem)
    expected, expected_gradients = output_and_gradients(
        reference(problem, update_rule=rule), problem
    )
    assert output.shape == expected.shape
    assert_close(output, expected, rtol=1e-4, atol=1e-5)
    for one, other in zip(gradients, expected_gradients, strict=True):
        assert_close(one, other, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", LINEAR + DELTA)
def test_bfloat16_inputs_with_a_memory_in_float32(name):
    problem = Problem.random(Shape(24, 8, 3, 4, dtype="bfloat16"))
    output = CONTESTANTS[name](problem)()
    rule = "delta" if name in DELTA else "linear"
    assert output.dtype == torch.bfloat16
    assert_close(output, reference(problem, update_rule=rule)(), rtol=0.02, atol=0.02)


def visible(problem, name):
    """`[tokens, tokens]` bool: on which inputs the output of each token depends, by the
    gradients."""
    output, rows = CONTESTANTS[name](problem)(), []
    for token in range(problem.shape.tokens):
        leaves = [problem.query, problem.key, problem.value]
        found = torch.autograd.grad(
            output[:, :, token].sum(), leaves, retain_graph=True, allow_unused=True
        )
        rows.append(sum(g.abs().sum((0, 2, 3)) for g in found if g is not None) > 0)
    return torch.stack(rows)


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("causal-sdpa", 12 * 13 // 2),
        ("infini-window", 12 * 13 // 2),
        ("infini-kept", 12 * 13 // 2),
    ],
)
def test_what_the_others_see(name, count):
    """Each sees as many pairs of 12 tokens in segments of 4 as it should, and none of the future.
    Through a memory all that is older is seen."""
    problem = Problem.random(Shape(12, 4, 2, 8))
    seen = visible(problem, name)
    assert not seen.triu(1).any()
    assert int(seen.sum()) == count


@pytest.mark.parametrize("name", list(CONTESTANTS))
def test_every_contestant_goes_forward_and_backward_in_both_dtypes(name):
    for dtype in ("float32", "bfloat16"):
        run = contestants.run_of(name, Problem.random(Shape(40, 16, 2, 8, dtype=dtype)))
        output, *gradients = run()
        assert output.shape == (1, 2, 40, 8) and len(gradients) == 4


def test_ratios_are_taken_within_the_rounds():
    times = {"a": [1.0, 2.0, 4.0], "b": [3.0, 2.0, 4.0]}
    rows = {name: {"name": name} for name in ("a", "b", "skipped")}
    a, b, skipped = compared(rows, times, "a", steps=2, tokens=10)
    assert (
        b["seconds"] == 1.5
        and (b["seconds_lowest"], b["seconds_highest"]) == (1, 2)
        and b["samples"] == [1.5, 1, 2]
    )
    assert (b["ratio"], b["ratio_lowest"], b["ratio_highest"]) == (1, 1, 3)
    assert (
        a["ratio"] == 1
        and a["tokens_per_second"] == 10
        and "seconds" not in skipped
        and "ratio" not in skipped
    )
    (alone,) = compared({"b": {}}, {"b": times["b"]}, "a")
    assert "ratio" not in alone and "tokens_per_second" not in alone
