"""Gradients of gradients (`create_graph=True`), which go through the gradients that are written by
hand.

Torch's fused softmax kernels have no second derivative and say so; everything else is right with
its plain one.
"""

import pytest
import torch
from hypothesis import given
from torch.autograd import gradgradcheck
from torch.nn.attention import SDPBackend, sdpa_kernel

import hf_infini.ops.backends.grid
import hf_infini.ops.equations
from cases import assert_same_gradients, cut_cases, examples, keeping_case, plain_case
from hf_infini import infini_attention, naive_infini_attention
from hf_infini.ops.rules import memory_rule

# In float64 two orders of adding differ by about 1e-15 a step: what is left would be a mistake.
FLOAT64 = 1e-9


def normal(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def positive(*shape):
    return torch.rand(*shape, dtype=torch.float64).add(0.5).requires_grad_()


def states_of(rule, continues, *tensors):
    keys, value, memory, normaliser = tensors
    before, after = memory_rule(rule, eps=0.1).states(
        (keys, value, None), memory, normaliser, continues
    )
    return *before, *after


# Two steps; the second document begins with the second
PACKED = torch.tensor([[False, True]])
# keys, value, memory, normaliser
STATES = [
    (positive, 1, 2, 1, 2, 2),
    (normal, 1, 2, 1, 2, 2),
    (normal, 1, 1, 2, 2),
    (positive, 1, 1, 2),
]
FUNCTIONS = {}
for rule in ("linear", "delta"):
    for packing, continues in (("", None), (" packed", PACKED)):
        FUNCTIONS[rule + packing] = (
            lambda *tensors, r=rule, c=continues: states_of(r, c, *tensors),
            STATES,
        )


@pytest.mark.parametrize("name", FUNCTIONS)
def test_each_function_by_finite_differences(name):
    function, inputs = FUNCTIONS[name]
    torch.manual_seed(0)
    assert gradgradcheck(function, [make(*shape) for make, *shape in inputs])


def gradients_of_gradients(case, function, cuts=()):
    """Every input's gradient of a function of all first gradients."""
    leaves = case.leaves()
    output, state = case.call(function, leaves, cuts)
    total = output.sin().sum() + state.memory.sin().sum() + state.normaliser.sin().sum()
    first = torch.autograd.grad(
        total + sum(leaf.sum() * 0 for leaf in leaves), leaves, create_graph=True
    )
    second = sum(gradient.square().sum() for gradient in first) + sum(
        leaf.sum() * 0 for leaf in leaves
    )
    return torch.autograd.grad(second, leaves)


@pytest.mark.slow
@pytest.mark.parametrize("elements", [1, 2**20], ids=["smallest groups", "one group"])
@examples(30)
@given(cut=cut_cases() | cut_cases(make=keeping_case))
def test_the_whole_equals_the_naive_reference(elements, monkeypatch, cut):
    """Whose every step autograd takes apart by itself: any options, padding, packing, calls cut
    anywhere."""
    monkeypatch.setitem(hf_infini.ops.backends.grid.GROUP_ELEMENTS, "cpu", elements)
    case, cuts = cut
    with sdpa_kernel(SDPBackend.MATH):
        gradients = gradients_of_gradients(case, infini_attention, cuts)
    assert_same_gradients(gradients, gradients_of_gradients(case, naive_infini_attention), FLOAT64)


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["linear", "delta", "gated_delta"])
def test_with_dropout(rule):
    """The same weights are dropped in both calls, and only local ones: finite differences of the
    first gradients."""
    case = plain_case(
        batch=1,
        heads=1,
        kv_heads=1,
        tokens=7,
        width=2,
        segment_length=3,
        update_rule=rule,
        dropout=0.5,
    )

    def attend(*leaves):
        torch.manual_seed(0)
        return case.call(infini_attention, leaves)[0]

    assert gradgradcheck(attend, case.leaves())


def test_a_fused_kernel_says_that_it_has_none():
    query, key, value = (normal(1, 2, 64, 64) for _ in range(3))
    output = infini_attention(query, key, value, torch.zeros(2, dtype=torch.float64), 32)
    (gradient,) = torch.autograd.grad(output.square().sum(), query, create_graph=True)
    with pytest.raises(
        RuntimeError, match="scaled_dot_product_flash_attention.* is not implemented"
    ):
        torch.autograd.grad(gradient.square().sum(), query)
