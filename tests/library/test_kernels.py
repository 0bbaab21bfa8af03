"""The kernels against the naive reference, in Triton's interpreter on a CPU.

    pip install --no-deps --target build/kernels triton==3.6.0 'numpy<2.4'
    PYTHONPATH=build/kernels TRITON_INTERPRET=1 pytest tests/library/test_kernels.py

More random cases, about 20 seconds each: HF_INFINI_EXAMPLES=50.
"""

import math
import os
import warnings

import pytest
import torch

from cases import (
    assert_equals_reference,
    keeping_case,
    plain_case,
    random_case,
    random_cuts,
    rotary_of,
    state_before,
)
from decoders import decoder
from hf_infini import backend_of, infini_attention, patch_model
from hf_infini.ops.backends import forced_backend
from hf_infini.ops.backends.grid import attend_grid
from models import causal_mha, infini_gpt2, token_ids

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs Triton's interpreter: the command is at the top of the file",
)
FLOAT32 = 3e-5  # rounding: two orders of a few hundred terms of up to about 10
SMALL = {"batch": 1, "heads": 2, "kv_heads": 1, "tokens": 60, "width": 16, "segment_length": 12}
WINDOW = {"local_segments": 1, "sink_tokens": 3}


@pytest.fixture(autouse=True)
def compared(monkeypatch):
    """Memory that a kernel reads before it is written is NaN. Gives the module by which calls are
    compared with plain torch before they are trusted, and its function, which would double the time
    here."""
    from hf_infini.ops.backends.triton import agreement

    own = agreement.disagreement
    monkeypatch.setattr(agreement, "disagreement", lambda call: None)
    monkeypatch.setattr(agreement, "_found", {})
    torch.use_deterministic_algorithms(True)
    yield agreement, own
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
    return {
        "attention_mask": mask,
        "position_ids": columns - torch.where(starts, columns, 0).cummax(1).values,
    }


def drawn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


EMPTY = "from an empty state: "
CASES = {  # sizes, whether rotary, options, cuts
    EMPTY + "sinks among the keys": (WINDOW, True, {}, ()),
    EMPTY + "sinks among the keys, padded and packed": (
        {**WINDOW, "batch": 2},
        True,
        padded_and_packed(2, 60),
        (),
    ),
    EMPTY + "cut inside the sinks and inside a segment": (WINDOW, False, {}, (2, 31)),
    EMPTY + "kept tokens, fewer than places, then as many": (
        {**WINDOW, "tokens": 40, "segment_length": 5, "kept_tokens": 20},
        True,
        {},
        (13, 22),
    ),
    EMPTY + "nothing left yet that could be kept": (
        {**WINDOW, "tokens": 9, "segment_length": 5, "kept_tokens": 8, "keep_score": "learned"},
        True,
        {"learned_score": drawn(1, 1, 9)},
        (),
    ),
    EMPTY + "fewer tokens than sinks": ({**WINDOW, "tokens": 2, "kept_tokens": 5}, True, {}, ()),
    "one text in one call": (WINDOW, True, {}, ()),
    "cut twice": (WINDOW, True, {}, (2, 31)),
    "padded and packed": ({**WINDOW, "batch": 2}, True, padded_and_packed(2, 60), ()),
    "padded and packed, continued": (WINDOW, False, padded_and_packed(1, 60), (20, 45)),
    "values wider than keys": ({**WINDOW, "value_width": 32}, True, {}, (31,)),
    "keys wider than values, kept": (
        {**WINDOW, "value_width": 16, "width": 32, "kept_tokens": 5, "keep_score": "half"},
        True,
        padded_and_packed(1, 60) | {"learned_score": drawn(1, 1, 60)},
        (20,),
    ),
    "weights of tokens, and a mask of the memory": (
        {},
        False,
        {
            "feature_map": "exp",
            "log_weight": drawn(1, 1, 60, 1),
            "memory_mask": torch.arange(60)[None] % 7 > 0,
        },
        (24,),
    ),
    "kept tokens, more than a tile": (
        {**WINDOW, "tokens": 120, "kept_tokens": 70, "keep_score": "learned"},
        True,
        {"learned_score": drawn(1, 1, 120)},
        (31,),
    ),
    "kept tokens by two learned scores": (
        {**WINDOW, "kept_tokens": 5, "keep_score": "two_learned"},
        False,
        {"learned_score": drawn(1, 1, 60, 2)},
        (20,),
    ),
    "kept tokens by both scores, padded and packed": (
        {**WINDOW, "batch": 2, "kept_tokens": 5, "keep_score": "half"},
        True,
        padded_and_packed(2, 60) | {"learned_score": drawn(2, 1, 60)},
        (20,),
    ),
    "no memory": (
        {**WINDOW, "batch": 2, "kept_tokens": 5, "update_rule": "none"},
        True,
        padded_and_packed(2, 60),
        (20,),
    ),
    EMPTY + "no memory and no kept tokens": (
        {**WINDOW, "update_rule": "none"},
        True,
        {},
        (31,),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_outputs_states_and_gradients_are_those_of_the_reference(name):
    sizes, rotary, options, cuts = CASES[name]
    case = plain_case(**SMALL | sizes, **options, dtype=torch.float32)
    if rotary:
        case.options["rotary"] = rotary_of(
            case.segment_length, case.options, case.key.shape[-1], torch.float32
        )
    state = None if name.startswith(EMPTY) else state_before(case)
    assert_equals_reference(case, by_kernels, FLOAT32, cuts, state)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(500, 500 + int(os.environ.get("HF_INFINI_EXAMPLES", "0"))))
def test_random_cases(seed):
    case = (random_case, keeping_case)[seed % 2](
        seed, torch.float32, width=16, update_rule=("linear", "none")[seed // 2 % 2], softcap=None
    )
    case.options.pop("far_rotary", None)
    cuts = [
        cut
        for cut in random_cuts(seed, case.query.shape[2])[:1]
        if 1 < cut < case.query.shape[2] - 1
    ]
    if case.query.shape[2] > 1:  # one token is a step
        assert_equals_reference(
            case, by_kernels, FLOAT32, cuts, state_before(case) if seed % 3 else None
        )


@pytest.mark.parametrize(
    "options, reason",
    [
        ({"softcap": 2.0}, "softcap"),
        ({"update_rule": "delta"}, "the update rule 'delta'"),
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


OPTIONS = {"segment_length": 4, "local_segments": 1, "sink_tokens": 2, "kept_tokens": 3}
LLAMA = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}


def padded(model):
    mask = torch.ones(2, 26, dtype=torch.long)
    mask[1, :5] = 0
    return model(token_ids(2, 26), attention_mask=mask).logits[mask.bool()]


def continued(model, first=17, tokens=26):
    ids = token_ids(1, tokens)
    cache = model(ids[:, :first], use_cache=True).past_key_values
    return model(ids[:, first:], past_key_values=cache).logits


def learning(model):
    model.train().gradient_checkpointing_enable({"use_reentrant": False})
    model.zero_grad()
    model(token_ids(1, 26), labels=token_ids(1, 26)).loss.backward()
    return torch.cat(
        [parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None]
    )


def rounded(model):
    with torch.autocast("cpu", torch.bfloat16):
        return model(token_ids(1, 26)).logits


def frozen(model):
    """Nothing before the attention learns, and the mode of gradients stays."""
    model.requires_grad_(False).lm_head.requires_grad_(True)
    model.zero_grad()
    model(token_ids(1, 26), labels=token_ids(1, 26)).loss.backward()
    assert torch.is_grad_enabled()
    return model.lm_head.weight.grad.clone()


WAYS = {
    "padded": padded,
    "continued": continued,
    "continued before anything is kept": lambda model: continued(model, 3, 6),
    "with checkpoints of gradients": learning,
    "with frozen layers": frozen,
    "under autocast": rounded,
    "in inference mode": torch.inference_mode()(lambda model: model(token_ids(1, 26)).logits),
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_kernels_are_used_once_they_agree_with_plain_torch(way, compared, monkeypatch):
    """And give a model's logits, or its gradients. Scores of attention in 16 bits would choose
    other tokens."""
    options = OPTIONS | ({"kept_tokens": 0} if way == "under autocast" else {})
    (agreement, own), model = compared, patch_model(decoder("llama", **LLAMA), **options).eval()
    monkeypatch.setattr(agreement, "disagreement", own)
    found = WAYS[way](model)
    with forced_backend("grid"):
        wanted = WAYS[way](model)
    # bfloat16 has 8 binary digits, and logits reach 4
    tolerance = 0.1 if way == "under autocast" else FLOAT32
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)
    assert agreement._found and not any(agreement._found.values())


@pytest.mark.slow
def test_scores_that_choose_are_not_rounded(compared, monkeypatch):
    (agreement, own), model = (
        compared,
        patch_model(decoder("llama", **LLAMA), **OPTIONS | {"kept_tokens": 40}).bfloat16(),
    )
    monkeypatch.setattr(agreement, "disagreement", own)
    learning(model)
    assert agreement._found and not any(agreement._found.values())


# Where kernels are wrong, by the call; and in which kinds they are refused, of (learns, state
# wanted, begun, kept, …)
WRONG = {
    "gradients": (lambda call: call.query.requires_grad, lambda form: form[0]),
    "continued texts": (lambda call: call.layout.begun, lambda form: form[2]),
    "kept tokens": (lambda call: call.layout.most_kept > 0, lambda form: form[3]),
    "padding": (lambda call: call.layout.source is not None, lambda form: not form[4]),
}


@pytest.mark.parametrize("where", WRONG)
@pytest.mark.filterwarnings("ignore:hf_infini computes such calls by plain torch")
def test_kernels_are_refused_where_they_are_wrong_and_used_elsewhere(where, compared, monkeypatch):
    (agreement, own), (is_wrong, refused) = compared, WRONG[where]

    def run(call):
        output, state, _ = attend_grid(call)
        wrong = (
            1.2 * output
            if where != "gradients"
            else output.detach() + 1.2 * (output - output.detach())
        )
        return wrong if is_wrong(call) else output, state, None

    monkeypatch.setattr(agreement, "disagreement", own)
    monkeypatch.setattr(agreement, "run", run)
    model = patch_model(decoder("llama", **LLAMA), **OPTIONS).eval()
    with torch.no_grad():
        padded(model), continued(model), continued(model, 3, 6)
    learning(model)
    kinds = {kind[-2]: said for kind, said in agreement._found.items()}
    assert (
        all((said is not None) == refused(form) for form, said in kinds.items())
        and len({*map(refused, kinds)}) == 2
    )


def test_the_backend_of_a_model_is_that_of_its_calls(compared, monkeypatch):
    """Llama turns halves, Cohere neighbours; dropout has no kernel."""
    dropping = infini_gpt2(n_embd=64, attn_pdrop=0.1).train()
    assert all(
        said.startswith("triton: no kernel for dropout; ")
        for said in backend_of(dropping, tokens=26).values()
    )
    with pytest.raises(ValueError, match="a CausalMHAForCausalLM has no layer with a memory"):
        backend_of(causal_mha())
    monkeypatch.setattr(compared[0], "disagreement", compared[1])
    for family, wanted in (
        ("llama", "triton: Triton kernels"),
        ("cohere", "triton: the kernels differ from plain torch"),
    ):
        model = patch_model(decoder(family, **LLAMA), **OPTIONS)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert all(said.startswith(wanted) for said in backend_of(model, tokens=26).values())


def broken(call):
    raise RuntimeError("out of resource:\n shared memory")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            lambda call: attend_grid(call._replace(gate=call.gate * math.nan)),
            "kernels differ from plain torch by nan of",
        ),
        (
            lambda call: attend_grid(call._replace(gate=call.gate + 1)),
            "kernels differ from plain torch by 0.",
        ),
        (broken, "kernels could not be compared: RuntimeError: out of resource: shared memory"),
    ],
)
def test_kernels_that_are_wrong_on_a_device_are_not_used(change, reason, compared, monkeypatch):
    (agreement, own), model = compared, infini_gpt2(n_embd=64)
    monkeypatch.setattr(agreement, "disagreement", own)
    monkeypatch.setattr(agreement, "run", change)
    with pytest.warns(
        UserWarning, match=f"computes such calls by plain torch on cpu: the {reason}"
    ):
        backend_of(model)
    assert all(
        said.startswith(f"triton: the {reason}") and "grid" in said
        for said in backend_of(model).values()
    )
    ids = token_ids(1, 40)
    with torch.no_grad():
        found = model(ids).logits
        with forced_backend("grid"):
            assert torch.equal(found, model(ids).logits)
    with forced_backend("triton"), pytest.raises(ValueError, match=reason):
        model(ids)


def test_positions_that_turn_neighbours_are_refused(compared, monkeypatch):
    def turn(x, cos, sin):
        return x * cos + torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2) * sin

    monkeypatch.setattr(compared[0], "disagreement", compared[1])
    case = plain_case(**SMALL, dtype=torch.float32)
    case.options["rotary"] = rotary_of(12, case.options, 16, torch.float32)
    case.options["turn"] = turn
    with pytest.raises(ValueError, match="the kernels differ from plain torch by"):
        case.call(by_kernels)
