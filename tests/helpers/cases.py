"""Random problems for the attention function, and how two answers to one of them are compared."""

import os
import random
from dataclasses import dataclass, field, replace

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from hf_infini import InfiniState, naive_infini_attention
from hf_infini.ops.keeping import SCORES
from hf_infini.ops.positions import rotation
from hf_infini.ops.rules import RULES
from hf_infini.options import KEEP_SCORES, UPDATE_RULES, Window

TENSORS = ("query", "key", "value", "log_weight", "learned_score")


@dataclass
class Case:
    """Arguments of one call; `options` holds what is passed on by name."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    gate: torch.Tensor
    segment_length: int
    options: dict = field(default_factory=dict)

    @property
    def has_memory(self) -> bool:
        """Whether its rule has one; otherwise nothing reads the gate."""
        return self.options.get("update_rule", "linear") in RULES

    def leaves(self) -> list[torch.Tensor]:
        """Fresh copies that ask for gradients: query, key, value, gate, then log weights and scores
        if any."""
        tensors = [self.query, self.key, self.value, self.gate]
        tensors += [self.options[name] for name in TENSORS[3:] if name in self.options]
        return [tensor.detach().clone().requires_grad_() for tensor in tensors]

    def window(self) -> Window:
        return window_with(self.segment_length, self.options)

    def call(self, function, leaves=None, cuts=(), state=None):
        """Runs the case in one call, or in one call for each part between `cuts`; returns the
        output and the last state."""
        query, key, value, gate, *others = leaves or self.leaves()
        gate = gate if self.has_memory else None
        names = [name for name in TENSORS[3:] if name in self.options]
        whole = dict(self.options) | dict(zip(names, others, strict=False))
        edges = [0, *cuts, query.shape[2]]
        outputs = []
        for begin, end in zip(edges, edges[1:], strict=False):
            options = {}
            for name, option in whole.items():
                if torch.is_tensor(option):
                    option = option[:, :, begin:end] if name in TENSORS else option[:, begin:end]
                options[name] = option
            parts = [tensor[:, :, begin:end] for tensor in (query, key, value)]
            output, state = function(
                *parts, gate, self.segment_length, state=state, return_state=True, **options
            )
            outputs.append(output)
        return torch.cat(outputs, 2), state


def random_case(seed: int | random.Random, dtype=torch.float32, **fixed) -> Case:
    """A small problem of random shape: any of ragged padding, packing, grouped heads, sinks, log
    weights, rotary, soft cap. What is drawn first of each choice is the simplest; [`cases`] shrinks
    to it."""
    pick = seed if isinstance(seed, random.Random) else random.Random(seed)
    draw = torch.Generator().manual_seed(seed if isinstance(seed, int) else pick.randrange(1000))

    def normal(*shape):
        return torch.randn(*shape, generator=draw, dtype=torch.float64).to(dtype)

    def chance(percent: int) -> bool:
        return pick.randrange(100) >= 100 - percent

    batch, kv_heads, heads_per_key = (
        pick.choice([1, 2, 3]),
        pick.choice([1, 2]),
        pick.choice([1, 2, 3]),
    )
    tokens, width = pick.choice([1, 2, 5, 7, 12, 17, 33]), pick.choice([2, 4, 8])
    value_width = pick.choice([width, width, width + 1])
    if "width" in fixed:  # of heads and values
        width = value_width = fixed.pop("width")
    picked = pick.choice(UPDATE_RULES)
    options = {
        "update_rule": fixed.get("update_rule", picked),
        "local_segments": pick.choice([0, 0, 1, 2]),
    }
    rule = RULES.get(options["update_rule"])
    options["feature_map"] = pick.choice(["elu", "elu", "exp"])
    if chance(50):
        options["attention_mask"] = torch.rand(batch, tokens, generator=draw) < pick.choice(
            [0.3, 0.8]
        )
    if chance(50):
        starts = torch.rand(batch, tokens, generator=draw) < 0.15
        columns = torch.arange(tokens).expand(batch, tokens)
        options["position_ids"] = columns - torch.where(starts, columns, 0).cummax(1).values
    if chance(30):
        options["memory_mask"] = torch.rand(batch, tokens, generator=draw) < 0.7
        # Some rows begin with tokens of which none is written, often whole segments and sometimes
        # all of them
        unwritten = torch.randint(0, tokens + 1, (batch, 1), generator=draw)
        options["memory_mask"] &= torch.arange(tokens) >= unwritten * (
            torch.rand(batch, 1, generator=draw) < 0.7
        )
    if chance(80 if rule and not rule.normalised else 30) and rule:
        weights = normal(batch, kv_heads, tokens, rule.rates)
        # rates up to 1
        options["log_weight"] = weights if rule.normalised else F.logsigmoid(weights)
    segment_length = fixed.pop("segment_length", pick.choice([1, 2, 3, 4, 5, 8, 40]))
    if chance(40):
        options["sink_tokens"] = pick.randrange(min(segment_length, 5))
    if chance(20):
        options["softcap"] = 2.0
    options |= fixed
    if chance(40) and "rotary" not in fixed:
        options["rotary"] = rotary_of(segment_length, options, width, dtype)
        far = pick.randrange(3), pick.choice([1, 2 * segment_length, 5])
        if far[0] == 2:
            options["far_rotary"] = rotary_of(segment_length, options, width, dtype, 7.0), far[1]
    return Case(
        query=normal(batch, kv_heads * heads_per_key, tokens, width),
        key=normal(batch, kv_heads, tokens, width),
        value=normal(batch, kv_heads, tokens, value_width),
        gate=normal(kv_heads * heads_per_key),
        segment_length=segment_length,
        options=options,
    )


def keeping_case(seed: int | random.Random, dtype=torch.float64, **fixed) -> Case:
    """A random case that keeps tokens, by any score: in some more than there are, in some few."""
    pick = seed if isinstance(seed, random.Random) else random.Random(-seed)
    draw = torch.Generator().manual_seed(seed if isinstance(seed, int) else pick.randrange(1000))
    case = random_case(seed, dtype, **fixed)
    shape, options = case.key.shape[:3], case.options
    score = SCORES[fixed.get("keep_score", pick.choice(KEEP_SCORES))]
    options["keep_score"] = score.keep_score
    options["kept_tokens"] = pick.choice([1, 2, 3, 5, 8, 40]) + sum(score.portions) - 1
    if score.learns:  # some are equal
        several = () if len(score.learns) == 1 else (len(score.learns),)
        options["learned_score"] = torch.randint(0, 9, shape + several, generator=draw).to(dtype)
    if "rotary" in options:
        given = case.segment_length, options, case.key.shape[-1], dtype
        options["rotary"] = rotary_of(*given)
        if "far_rotary" in options:
            options["far_rotary"] = rotary_of(*given, 7.0), options["far_rotary"][1]
    return case


def cases(dtype=torch.float64, **fixed) -> st.SearchStrategy[Case]:
    """Random cases that hypothesis draws, and makes as simple as it can where a test fails."""
    return st.randoms(use_true_random=False).map(lambda pick: random_case(pick, dtype, **fixed))


def cut_cases(
    dtype=torch.float64, make=random_case, **fixed
) -> st.SearchStrategy[tuple[Case, list[int]]]:
    """Random cases, and where to cut each into cached calls."""

    def drawn(pick: random.Random):
        case = make(pick, dtype, **fixed)
        return case, random_cuts(pick, case.query.shape[2])

    return st.randoms(use_true_random=False).map(drawn)


def examples(count: int) -> settings:
    """How many a test tries, the same each time; with HF_INFINI_EXAMPLES=2000 so many, and others
    in every run."""
    asked = int(os.environ.get("HF_INFINI_EXAMPLES", 0))
    checks = {
        "deadline": None,
        "database": None,
        "suppress_health_check": list(HealthCheck),
        "print_blob": True,
    }
    return settings(max_examples=asked or count, derandomize=not asked, **checks)


def window_with(segment_length: int, options: dict) -> Window:
    """Segments of this length, and the other sizes as among these options."""
    return Window(segment_length, *(options.get(name, 0) for name in Window._fields[1:]))


def rotary_of(
    segment_length: int, options: dict, width: int, dtype, theta: float = 20.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotary positions for the windows of a case, with wavelengths that small windows tell
    apart."""
    places = window_with(segment_length, options).places
    return rotation(torch.arange(places), width, dtype, theta=theta)


def random_cuts(seed: int | random.Random, tokens: int) -> list[int]:
    """Where to cut a sequence into cached calls: nowhere, somewhere, or between all tokens."""
    pick = seed if isinstance(seed, random.Random) else random.Random(seed)
    count = pick.choice([0, 1, 2, 4, tokens])
    return sorted(pick.sample(range(1, tokens), min(count, tokens - 1)))


def state_before(case: Case) -> InfiniState:
    """A state that the case goes on from, all of whose numbers ask for gradients: the one that it
    leaves itself. Where it has positions, those of its first document go on."""
    state = case.call(naive_infini_attention)[1]
    if (positions := case.options.get("position_ids")) is not None:
        first = (positions == 0).cumsum(1) == 1
        case.options["position_ids"] = positions + first * (state.last_position + 1).unsqueeze(1)
    return replace(
        state,
        **{
            n: t.detach().requires_grad_()
            for n, t in state.tensors().items()
            if t.is_floating_point()
        },
    )


def empty_places(state: InfiniState, window: Window) -> torch.Tensor:
    """`[batch, places]` bool: the places of a state's window for which no token has come yet."""
    seen = state.tokens_seen.unsqueeze(1)
    places, length = torch.arange(window.span), window.segment_length
    current = (seen // length - window.local_segments) * length + places
    sinks = torch.arange(window.sink_tokens).expand(len(seen), -1)
    kept = (
        torch.zeros_like(sinks[:, :0]) if state.kept_position is None else state.kept_position[:, 0]
    )
    token = torch.cat([sinks, torch.where(kept < 0, -1, 0), current], 1)
    return (token < 0) | (token >= seen)


def gradients(case: Case, function, cuts=(), state=None, seed=0) -> tuple:
    """Output, final state, and the gradients of a random sum over both for every input, and for all
    of the state that asks for one."""
    leaves = case.leaves()
    output, final = case.call(function, leaves, cuts, state)
    wanted = leaves + (
        []
        if state is None
        else [tensor for tensor in state.tensors().values() if tensor.requires_grad]
    )
    draw = torch.Generator().manual_seed(seed)
    total = sum(leaf.sum() * 0 for leaf in wanted)  # every leaf is part of the graph, used or not
    # where a given window's zeros may be left
    empty = empty_places(final, case.window())[:, None, :, None]
    windows = [window.masked_fill(empty, 0) for window in final.windows()[:3] if window is not None]
    for tensor in (output, final.memory, final.normaliser, *windows):
        total = (
            total
            + (
                tensor
                * torch.randn(tensor.shape, generator=draw, dtype=torch.float64).to(tensor.dtype)
            ).sum()
        )
    return output, final, torch.autograd.grad(total, wanted)


def assert_equals_reference(
    case: Case, function, tolerance: float, cuts=(), state=None, of_gradients=None
) -> None:
    """The function's output, last state and gradients, its calls cut or not, are those of the naive
    reference in one call; `of_gradients`: their tolerance where it is another."""
    output, final, found = gradients(case, function, cuts, state)
    wanted, wanted_final, wanted_gradients = gradients(case, naive_infini_attention, (), state)
    torch.testing.assert_close(output, wanted, rtol=tolerance, atol=tolerance)
    assert_same_state(final, wanted_final, tolerance)
    assert_same_gradients(found, wanted_gradients, of_gradients or tolerance)


def assert_same_state(left: InfiniState, right: InfiniState, tolerance: float) -> None:
    names = (
        "memory",
        "normaliser",
        "local_key",
        "local_value",
        "local_log_weight",
        "local_score",
        "kept_position",
    )
    for name in (*names, "tokens_seen", "last_position", "memory_tokens"):
        one, other = getattr(left, name), getattr(right, name)
        assert (one is None) == (other is None), name
        if one is not None:
            torch.testing.assert_close(
                one, other, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
            )
    nothing = torch.zeros(left.local_key.shape[0], left.local_key.shape[2], dtype=torch.bool)
    skipped = [
        nothing if state.local_skipped is None else state.local_skipped for state in (left, right)
    ]
    assert torch.equal(*skipped), "local_skipped"


def assert_same_gradients(left, right, tolerance: float) -> None:
    """Largest difference against the largest entry of each gradient."""
    largest = max(float(other.abs().max()) for other in right if other.numel())
    for number, (one, other) in enumerate(zip(left, right, strict=True)):
        assert one.shape == other.shape
        if not other.numel():  # of a normaliser that there is not
            continue
        # A gradient whose terms cancel, as a query's does that sees a single key, keeps the
        # rounding of the terms; how large they are the other gradients tell
        scale = max(float(other.abs().max()), 0.05 * largest)
        difference = float((one - other).abs().max())
        assert difference <= tolerance * scale, (
            f"gradient {number}: difference {difference:.1e} at scale {scale:.1e}"
        )


def plain_case(
    batch=2,
    heads=2,
    kv_heads=2,
    tokens=24,
    width=4,
    value_width=None,
    dtype=torch.float64,
    seed=0,
    segment_length=5,
    **options,
):
    """The arguments of a call in one dtype, nothing special about them, as a [`Case`]; values as
    wide as keys by default."""
    draw = torch.Generator().manual_seed(seed)
    rows = batch, kv_heads, tokens
    shapes = [
        (batch, heads, tokens, width),
        (*rows, width),
        (*rows, value_width or width),
        (heads,),
    ]
    tensors = [
        torch.randn(*shape, generator=draw, dtype=torch.float64).to(dtype) for shape in shapes
    ]
    return Case(*tensors, segment_length, {"update_rule": "linear", "local_segments": 0} | options)
