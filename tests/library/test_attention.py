"""infini_attention against the naive reference, and the properties that must hold whatever the
computation."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hf_infini.ops.backends.grid
import hf_infini.ops.rules.scan
from benchmarks.contestants import loop
from cases import (
    Case,
    assert_equals_reference,
    assert_same_gradients,
    assert_same_state,
    cases,
    cut_cases,
    examples,
    gradients,
    plain_case,
    state_before,
)
from hf_infini import InfiniState, infini_attention, naive_infini_attention
from hf_infini.options import UPDATE_RULES

FLOAT32 = 1e-5  # both sides round every step in float32 and add in different orders
# In float64 the same differences shrink by about 2e-9: what is left would be a mistake.
FLOAT64 = 1e-9
each_rule = pytest.mark.parametrize(
    ("rule", "local_segments"), [("linear", 2), ("delta", 1), ("gated_delta", 0)]
)


@pytest.fixture(
    params=[(1, 0, 0), (2**20, 128, 2**20)], ids=["smallest groups", "one group, states in groups"]
)
def sizes(request, monkeypatch):
    monkeypatch.setitem(hf_infini.ops.backends.grid.GROUP_ELEMENTS, "cpu", request.param[0])
    monkeypatch.setattr(hf_infini.ops.equations, "FEW_QUERIES", request.param[1])
    monkeypatch.setitem(hf_infini.ops.rules.scan.GROUPED_STATE, "cpu", request.param[2])


@examples(60)
@given(cut_cases(), st.booleans())
def test_output_state_and_gradients_are_the_reference_s_however_the_input_is_cut(
    sizes, cut, goes_on
):
    """Begun with nothing, or with a state, each of whose tensors has a gradient at every place:
    where the window is empty it is zero, also if new tokens come to lie there."""
    case, cuts = cut
    assert_equals_reference(
        case, infini_attention, FLOAT64, cuts, state_before(case) if goes_on else None
    )


@examples(6)
@given(cases())
def test_a_state_in_training_is_copied_with_its_graph_and_detached_without(case):
    state, found = state_before(case), []
    for use in (lambda state: state, copy.deepcopy, InfiniState.detach):
        leaves = case.leaves()
        output, _ = case.call(
            infini_attention, leaves, state=use(case.call(infini_attention, leaves, state=state)[1])
        )
        found.append(
            torch.autograd.grad(output.sin().sum(), [*leaves, state.memory], materialize_grads=True)
        )
    assert all(map(torch.equal, found[0], found[1]))
    assert not found[2][-1].any()


@pytest.mark.parametrize("rule", ["linear", "delta"])  # those of the paper
@pytest.mark.parametrize("length", [3, 4, 16])
def test_loop_over_segments_token_by_token_and_all_at_once_agree(rule, length):
    """Three ways to compute it: as the paper prints the equations, the naive reference, and the
    fast function."""
    case = plain_case(tokens=21, segment_length=length, update_rule=rule)
    wanted = loop(case.query, case.key, case.value, case.gate, length, rule)
    for function in (naive_infini_attention, infini_attention):
        torch.testing.assert_close(case.call(function)[0], wanted, rtol=FLOAT64, atol=FLOAT64)


@pytest.mark.parametrize(
    ("rule", "answers"),
    [("linear", (1.0, 3.0)), ("delta", (0.5, 2.0)), ("gated_delta", (1.0, 5.0))],
)
def test_which_rule_overwrites(rule, answers):
    """Figures of docs/notes/options.md: one key written 4,096 times with the value 1, and 4,096
    times more with 5."""
    same = torch.ones(1, 1, 8193, 4, dtype=torch.float64)
    value = torch.ones(1, 1, 8193, 1, dtype=torch.float64)
    value[:, :, 4096:] = 5
    gate = torch.full((1,), 40.0, dtype=torch.float64)  # the output is what the memory answers
    output = infini_attention(same, same, value, gate, 16, update_rule=rule)[0, 0, :, 0]
    # In the limit of many short segments the delta rule's second answer is 2: with 512 segments it
    # is 0.0005 more
    torch.testing.assert_close(
        output[[4096, 8192]], torch.tensor(answers, dtype=torch.float64), rtol=0, atol=1e-3
    )


@each_rule
def test_padding_does_not_matter(rule, local_segments):
    """Left-padded, right-padded and padded in the middle: each real token's output is that of the
    unpadded row."""
    case = plain_case(
        batch=1, tokens=17, segment_length=4, update_rule=rule, local_segments=local_segments
    )
    wanted = case.call(infini_attention)[0]
    places = {
        "left": list(range(6, 23)),
        "right": list(range(17)),
        "spread": [0, 1, 3, 4, 5, 9, 10, 11, 12, 13, 15, 16, 17, 18, 20, 21, 22],
    }
    batch = plain_case(batch=3, tokens=23, seed=1, segment_length=4)
    mask = torch.zeros(3, 23, dtype=torch.long)
    for row, columns in enumerate(places.values()):
        mask[row, columns] = 1
        for padded, tensor in zip(
            (batch.query, batch.key, batch.value), (case.query, case.key, case.value), strict=True
        ):
            padded[row] = float("nan")  # not even this may leak out of the padding
            padded[row, :, columns] = tensor[0]
    padded = Case(
        batch.query, batch.key, batch.value, case.gate, 4, case.options | {"attention_mask": mask}
    )
    output = padded.call(infini_attention)[0]
    for row, columns in enumerate(places.values()):
        torch.testing.assert_close(output[row, :, columns], wanted[0], rtol=FLOAT64, atol=FLOAT64)
    assert torch.equal(
        output[mask[:, None, :, None].expand_as(output) == 0],
        torch.zeros((mask == 0).sum() * 8).double(),
    )


@examples(20)
@given(cut_cases())
def test_tensors_are_made_where_the_inputs_are(cut):
    """Whatever torch's default device is."""
    case, cuts = cut
    leaves = case.leaves()

    def call():
        output, state = case.call(infini_attention, leaves, cuts)
        return (
            output,
            state,
            torch.autograd.grad(output.sum() + state.memory.sum(), leaves, allow_unused=True),
        )

    wanted, wanted_state, wanted_gradients = call()
    with torch.device("meta"):
        output, state, found = call()
    assert torch.equal(output, wanted)
    assert_same_state(state, wanted_state, 0.0)
    for one, other in zip(found, wanted_gradients, strict=True):
        assert other is None if one is None else torch.equal(one, other)


@examples(15)
@given(cases(torch.bfloat16))
def test_gradients_in_bfloat16(sizes, case):
    """The reference has the same rounded inputs in float64. What is left is the rounding of scores,
    weights and products to 8 bits, 0.4 % each time; gradients are sums of some ten of them."""
    _, _, found = gradients(case, infini_attention)
    for name in ("query", "key", "value", "gate"):
        setattr(case, name, getattr(case, name).double())
    if "log_weight" in case.options:
        case.options["log_weight"] = case.options["log_weight"].double()
    _, _, wanted = gradients(case, naive_infini_attention)
    assert_same_gradients([gradient.double() for gradient in found], wanted, 0.04)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@examples(12)
@given(st.data())
def test_half_precision(sizes, dtype, data):
    """The local softmax and the output are rounded to the inputs' dtype; memory, normaliser and
    division are not."""
    case, cuts = data.draw(cut_cases(dtype))
    output, state = case.call(infini_attention, cuts=cuts)
    wanted, wanted_state = case.call(naive_infini_attention)
    assert output.dtype == dtype and state.memory.dtype == torch.float32
    # Four roundings of values up to 4 (inputs are standard normal): weights, their sum, the
    # mixture, the output.
    tolerance = 4 * torch.finfo(dtype).eps * 4
    torch.testing.assert_close(output.float(), wanted.float(), rtol=0, atol=tolerance)
    assert_same_state(state, wanted_state, FLOAT32)


@pytest.mark.parametrize(
    ("options", "autocast", "cuts"),
    [({}, False, range(1, 40)), ({"softcap": 1e6}, True, ()), ({"dropout": 1e-9}, False, ())],
    ids=["steps", "written out, autocast", "dropout"],
)
def test_scores_beyond_the_range_of_float16(options, autocast, cuts, sizes):
    """Products of queries and keys up to some 200,000, where float16 ends at 65,504: torch's fused
    attention is finite, with its gradient, and so is everything else."""
    dtype = torch.float32 if autocast else torch.float16
    case = plain_case(tokens=40, width=64, segment_length=20, local_segments=1, **options)
    # Rounded to float16, so that both sides have the same inputs
    query, key, value = ((50 * case.query).half(), (50 * case.key).half(), case.value.half())
    assert (query.float() @ key.float().mT).abs().max() > torch.finfo(torch.float16).max
    case.query, case.key, case.value = (tensor.to(dtype) for tensor in (query, key, value))
    leaves = case.leaves()
    with torch.autocast("cpu", torch.float16, enabled=autocast):
        output, _ = case.call(infini_attention, leaves, cuts)
    found = torch.autograd.grad(output.float().sum(), leaves)
    assert all(bool(gradient.isfinite().all()) for gradient in found)
    case.query, case.key, case.value = (tensor.double() for tensor in (query, key, value))
    case.options["dropout"] = 0.0
    wanted, _ = case.call(naive_infini_attention)
    # Four roundings of values up to 4, as in test_half_precision
    tolerance = 4 * torch.finfo(torch.float16).eps * 4
    torch.testing.assert_close(output.double(), wanted, rtol=0, atol=tolerance)


@pytest.mark.parametrize("rule", UPDATE_RULES)
def test_a_backward_pass_within_autocast(rule, sizes):
    """Where torch rounds the products of its own gradients to bfloat16."""
    case = plain_case(tokens=23, dtype=torch.float32, update_rule=rule, local_segments=1)
    if rule == "gated_delta":
        case.options["log_weight"] = torch.full((2, 2, 23, 2), -0.1)
    leaves, found, zeros = case.leaves(), [], {"allow_unused": True, "materialize_grads": True}
    for within in (False, True):
        with torch.autocast("cpu", torch.bfloat16):
            loss = case.call(infini_attention, leaves)[0].float().square().sum()
            found += (
                [torch.autograd.grad(loss, leaves, retain_graph=True, **zeros)] if within else []
            )
        found += [] if within else [torch.autograd.grad(loss, leaves, **zeros)]
    for outside, inside in zip(*found, strict=True):
        assert inside.dtype == outside.dtype
        # bfloat16 has 8 bits: 0.004 for one number
        assert (inside - outside).norm() <= 0.02 * outside.norm()


def test_dropout_drops_local_weights_alone():
    case = plain_case(tokens=400, segment_length=200, dtype=torch.float32)
    torch.manual_seed(0)
    query, key, value = case.query, torch.zeros_like(case.key), torch.ones_like(case.value)
    output = infini_attention(query, key, value, torch.full((2,), -30.0), 200, dropout=0.5)
    last = output[:, :, 190:200]  # means of about 195 weights, each doubled or dropped
    assert 0.5 < float(last.mean()) < 1.5 and float(last.std()) > 0
    memory = infini_attention(query, key, value, torch.full((2,), 30.0), 200, dropout=0.5)[
        :, :, 200:
    ]
    torch.testing.assert_close(memory, torch.ones_like(memory), rtol=FLOAT32, atol=FLOAT32)


def test_state_is_constant_in_size_and_left_alone():
    case = plain_case(tokens=40, segment_length=5)
    _, early = case.call(infini_attention)
    before = early.map(torch.clone)
    sizes = {case.call(infini_attention, cuts=[cut], state=early)[1].nbytes() for cut in (1, 2, 39)}
    assert sizes == {early.nbytes()}
    # no view that keeps a larger one
    for tensor in (early.memory, early.normaliser, early.local_key):
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
    assert_same_state(early, before, 0)
