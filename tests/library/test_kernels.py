"""The kernels against the naive reference, in Triton's interpreter on a CPU.

    pip install --no-deps --target build/kernels triton==3.6.0 'numpy<2.4'
    PYTHONPATH=build/kernels TRITON_INTERPRET=1 pytest tests/library/test_kernels.py

More random cases, about 20 seconds each: HF_INFINI_EXAMPLES=50.
"""

import os

import pytest
import torch

from cases import assert_equals_reference, keeping_case, plain_case, random_case, random_cuts, rotary_of, state_before
from hf_infini import backend_of, infini_attention
from hf_infini.ops.attention import forced_backend
from models import infini_gpt2

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter: the command is at the top of the file"
)
FLOAT32 = 3e-5  # rounding: two orders of a few hundred terms of up to about 10
SMALL = {"batch": 1, "heads": 2, "kv_heads": 1, "tokens": 60, "width": 16, "segment_length": 12}
WINDOW = {"local_segments": 1, "sink_tokens": 3}


@pytest.fixture(autouse=True)
def _nothing_left_unwritten():
    """Memory that a kernel reads before it is written is NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def by_kernels(*tensors, **options):
    with forced_backend("triton"):
        return infini_attention(*tensors, **options)


def padded_and_packed(batch, tokens):
    """Padding at the beginning and inside, a document of one token between two longer ones."""
    mask = torch.ones(batch, tokens, dtype=torch.bool)
    mask[0, :3] = mask[-1, tokens // 2] = False
    columns = torch.arange(tokens).expand(batch, -1)
    starts = (columns == tokens // 3) | (columns == tokens // 3 + 1)
    return {"attention_mask": mask, "position_ids": columns - torch.where(starts, columns, 0).cummax(1).values}


def drawn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


EMPTY = "from an empty state: "
CASES = {  # sizes, whether rotary, options, cuts
    EMPTY + "sinks among the keys": (WINDOW, True, {}, ()),
    EMPTY + "sinks among the keys, padded and packed": ({**WINDOW, "batch": 2}, True, padded_and_packed(2, 60), ()),
    EMPTY + "cut inside the sinks and inside a segment": (WINDOW, False, {}, (2, 31)),
    EMPTY + "kept tokens, fewer than places, then as many": (
        {**WINDOW, "tokens": 40, "segment_length": 5, "kept_tokens": 20}, True, {}, (13, 22),
    ),
    EMPTY + "nothing left yet that could be kept": (
        {**WINDOW, "tokens": 9, "segment_length": 5, "kept_tokens": 8, "keep_score": "learned"}, True,
        {"learned_score": drawn(1, 1, 9)}, (),
    ),
    "one text in one call": (WINDOW, True, {}, ()),
    "cut twice": (WINDOW, True, {}, (2, 31)),
    "padded and packed": ({**WINDOW, "batch": 2}, True, padded_and_packed(2, 60), ()),
    "padded and packed, continued": (WINDOW, False, padded_and_packed(1, 60), (20, 45)),
    "weights of tokens, and a mask of the memory": (
        {},
        False,
        {"feature_map": "exp", "log_weight": drawn(1, 1, 60, 1), "memory_mask": torch.arange(60)[None] % 7 > 0},
        (24,),
    ),
    "kept tokens, more than a tile": (
        {**WINDOW, "tokens": 120, "kept_tokens": 70, "keep_score": "learned"},
        True,
        {"learned_score": drawn(1, 1, 120)},
        (31,),
    ),
    "kept tokens by both scores, padded and packed": (
        {**WINDOW, "batch": 2, "kept_tokens": 5, "keep_score": "half"},
        True,
        padded_and_packed(2, 60) | {"learned_score": drawn(2, 1, 60)},
        (20,),
    ),
    "the delta rule, padded and packed": ({**WINDOW, "update_rule": "delta"}, True, padded_and_packed(1, 60), (31,)),
    "the gated delta rule with kept tokens": (
        {**WINDOW, "update_rule": "gated_delta", "kept_tokens": 9},
        True,
        {"log_weight": -drawn(1, 1, 60, 2).exp()},
        (31,),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_outputs_states_and_gradients_are_those_of_the_reference(name):
    sizes, rotary, options, cuts = CASES[name]
    case = plain_case(**SMALL | sizes, **options, dtype=torch.float32)
    if rotary:
        case.options["rotary"] = rotary_of(case.segment_length, case.options, 16, torch.float32)
    state = None if name.startswith(EMPTY) else state_before(case)
    assert_equals_reference(case, by_kernels, FLOAT32, cuts, state)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(500, 500 + int(os.environ.get("HF_INFINI_EXAMPLES", "0"))))
def test_random_cases(seed):
    case = (random_case, keeping_case)[seed % 2](seed, torch.float32, width=16)
    case.options.pop("softcap", None)
    cuts = [cut for cut in random_cuts(seed, case.query.shape[2])[:1] if 1 < cut < case.query.shape[2] - 1]
    if case.query.shape[2] > 1:  # one token is a step
        assert_equals_reference(case, by_kernels, FLOAT32, cuts, state_before(case) if seed % 3 else None)


@pytest.mark.parametrize(
    "options, reason",
    [
        ({"softcap": 2.0}, "softcap"),
        ({"dropout": 0.1}, "dropout"),
        ({"width": 8}, "heads are 8 and 8 wide, not one of 16, 32, 64, 128"),
        ({"dtype": torch.float64}, "torch.float64"),
        ({"tokens": 1}, "one token"),
    ],
)
def test_what_a_kernel_cannot_do_is_refused_with_the_reason(options, reason):
    case = plain_case(**SMALL | {"dtype": torch.float32} | options)
    if "tokens" in options:
        case.options["attention_mask"] = torch.ones(1, 1, dtype=torch.bool)
        state = state_before(case)
    else:
        state = None
    with pytest.raises(ValueError, match=f"no backend of .*triton: .*{reason}"):
        case.call(by_kernels, state=state)


@pytest.mark.parametrize("options", [{"kept_tokens": 8}, {"update_rule": "delta"}, {"update_rule": "gated_delta"}])
def test_kernels_that_no_gpu_has_run_are_taken_where_they_are_forced(options):
    model = infini_gpt2(n_embd=64, **options)
    assert all("triton: its kernels were not checked on a GPU yet" in said for said in backend_of(model).values())
    with forced_backend("triton"):
        assert all(said == "triton: Triton kernels" for said in backend_of(model).values())


def test_positions_that_turn_neighbours_are_refused():
    def turn(x, cos, sin):
        return x * cos + torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2) * sin

    case = plain_case(**SMALL, dtype=torch.float32)
    case.options["rotary"] = rotary_of(12, case.options, 16, torch.float32)
    case.options["turn"] = turn
    with pytest.raises(ValueError, match="this way of turning by rotary positions"):
        case.call(by_kernels)
