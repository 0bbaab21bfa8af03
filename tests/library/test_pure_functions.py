"""What the core's pure functions promise beside the results that are compared with the reference
everywhere else."""

import dataclasses

import pytest
import torch
from hypothesis import given

from cases import assert_same_state, cut_cases, examples
from hf_infini import InfiniState, naive_infini_attention
from hf_infini.ops.equations import FEATURE_MAPS
from hf_infini.ops.layout.grid import restarts, segment_layout
from hf_infini.ops.scores import as_dot_product, scaled_dot_scores
from hf_infini.options import Window

ONE = torch.ones(1, 1, 1, 1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: as_dot_product("general", ONE, None), "score='general' needs its weight"),
    ],
)
def test_arguments_that_do_not_go_together(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@examples(10)
@given(cut_cases())
def test_the_reference_itself_does_not_depend_on_how_the_input_is_cut(cut):
    case, cuts = cut
    output, state = case.call(naive_infini_attention, cuts=cuts)
    wanted, wanted_state = case.call(naive_infini_attention)
    # float64, added up in the same order
    torch.testing.assert_close(output, wanted, rtol=1e-9, atol=1e-9)
    assert_same_state(state, wanted_state, 1e-9)


def test_a_layout_moves_to_another_device_once():
    layout = segment_layout(2, 3, Window(2), attention_mask=torch.tensor([[0, 1, 1], [1, 1, 1]]))
    moved = layout.to(torch.device("meta"))
    assert layout.to(torch.device("cpu")) is layout and layout.to(torch.device("meta")) is moved
    tensors = {
        name: value for name, value in vars(layout).items() if isinstance(value, torch.Tensor)
    }
    assert {name: value.shape for name, value in tensors.items()} == {
        name: vars(moved)[name].shape for name in tensors
    }
    assert all(vars(moved)[name].device.type == "meta" for name in tensors)


def test_a_mask_of_ones_gives_the_plain_layout():
    assert segment_layout(2, 7, Window(3), attention_mask=torch.ones(2, 7)).source is None


@pytest.mark.parametrize("position", [6, 7])
def test_padding_in_front_of_a_continued_document_starts_no_other(position):
    key = torch.ones(1, 1, 3, 2)
    state = dataclasses.replace(
        InfiniState.initial(key, key, 4),
        tokens_seen=torch.tensor([7]),
        last_position=torch.tensor([6]),
    )
    real, position_ids = (
        torch.tensor([[False, True, True]]),
        torch.tensor([[0, position, position + 1]]),
    )
    assert restarts(position_ids, real, state).tolist() == [[False, position == 6, False]]


def test_exp_features_and_their_gradient_up_to_the_bound_and_beyond():
    """As a clamp has it: at the bound the gradient is there, beyond it none."""
    x = torch.tensor([-1.0, 29.0, 30.0, 30.5, 99.0], dtype=torch.float64, requires_grad=True)
    other = x.detach().clone().requires_grad_()
    features, wanted = FEATURE_MAPS["exp"](x), other.clamp(max=30).exp()
    torch.testing.assert_close(features, wanted)
    torch.testing.assert_close(
        *(torch.autograd.grad(y.sum(), z)[0] for y, z in ((features, x), (wanted, other)))
    )


def test_scaled_products_within_float16_are_finite_there():
    """The product before its scaling, 16 · 100 · 100 = 160,000, would not be; 40,000 is a number of
    float16."""
    entries = torch.full((1, 1, 1, 16), 100.0, dtype=torch.float16)
    assert scaled_dot_scores(entries, entries).item() == 40_000
