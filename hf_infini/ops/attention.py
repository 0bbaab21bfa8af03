"""Infini-attention: local softmax attention and a compressive memory, mixed by a gate for each head
(equation 5).

[`infini_attention`] makes the layout of a call and passes it to [`attend`], which the models call,
and where fused kernels can take the place of plain torch. A call of one token is in step.py. All
others process the grid of segments in groups, of which the intermediate results fit into the cache
(CPU), or which need few kernel launches (GPU).

Shapes: the grid of the layout, `[B, S, C, H, D]`, is cut into groups `[B, N, H, C, D]` of `N`
segments, heads before tokens, so that every product is one of contiguous matrices. `W` slots in a
segment's window.
"""

import contextlib
import functools
import importlib.util
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..options import Window
from .checks import check_arguments
from .keeping import token_score
from .keeping.choose import KeptInGrid, choosable_segments, sinks_before_kept, with_kept
from .layout.base import GridLayout
from .layout.build import segment_layout
from .memory import EPS
from .positions import rotate
from .rules import memory_rule
from .state import Attended, AttentionCall, InfiniState, Projections
from .step import StepLayout, attend_step
from .window import ScoreOptions, window_attention

GROUP_ELEMENTS = {"cpu": 2**20, "cuda": 2**26}  # of the keys


def infini_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gate: Tensor | None,
    segment_length: int,
    *,
    update_rule: str = "linear",
    feature_map: str = "elu",
    local_segments: int = 0,
    sink_tokens: int = 0,
    kept_tokens: int = 0,
    keep_score: str = "attention",
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    memory_mask: Tensor | None = None,
    state: InfiniState | None = None,
    return_state: bool = False,
    log_weight: Tensor | None = None,
    learned_score: Tensor | None = None,
    rotary: tuple[Tensor, ...] | None = None,
    turn: Callable = rotate,
    far_rotary: tuple[tuple[Tensor, ...], int] | None = None,
    scaling: float | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    eps: float = EPS,
) -> Tensor | tuple[Tensor, InfiniState]:
    """Causal attention over short segments plus a memory of constant size for all before them
    (arXiv 2404.07143).

    Token `t` of a document is in segment `s = t // segment_length`. It sees its segment and
    `local_segments` before it by softmax (equation 2), and reads everything older from the memory
    (equation 3), which takes in a segment when it leaves that window (equation 4 or the delta
    rule). Per head, `sigmoid(gate)` is the memory's share (equation 5); while the memory is still
    empty (or everything that left the window was skipped), the output is only the local attention.

    Args:
        query: `[batch, heads, tokens, head_dim]`.
        key: `[batch, kv_heads, tokens, head_dim]` and value `[batch, kv_heads, tokens, value_dim]`;
            query head `h` belongs to key/value head `h // (heads // kv_heads)`.
        gate: `[heads]`, the logit β; `None` with `update_rule="none"`, which has no memory.
        segment_length: tokens in a segment, L ≥ 1.
        update_rule, feature_map, local_segments, sink_tokens, kept_tokens, keep_score: as of
            [`MemoryOptions`]; the scores of keep_score="learned" are `learned_score`. (Attention
            sinks: arXiv 2309.17453.)
        attention_mask: `[batch, tokens]`, 1 for real tokens; padding, anywhere, is in no segment,
            and its output is zero.
        position_ids: `[batch, tokens]`; a real token whose position does not go beyond the one
            before it starts a new document, with an empty window and the memory it started from.
        memory_mask: `[batch, tokens]`, 0 for tokens that are seen inside the window but never
            written into the memory.
        state: continues an earlier call; see [`InfiniState`].
        return_state: also return the state after the last token.
        log_weight: `[batch, kv_heads, tokens, 1]`, added to the memory's keys right before the
            feature map; with exponential features the logarithm of a token's weight. For the gated
            delta rule `[…, 2]`, log β and log α, neither positive.
        learned_score: `[batch, kv_heads, tokens]`, which has no gradient.
        rotary: for rotary models, which give query and key un-rotated: the [`rotation`] of the
            places in the window, which has `sink_tokens + kept_tokens + (local_segments + 1) *
            segment_length` of them. The memory has no positions.
        turn: the function that turns states by the tables' rows for their places, with tables to
            match.
        far_rotary: for models whose positions are scaled by the length of a text: as many tables
            as `rotary` has, and the number of a token; they are for the segments whose first token
            has at least that number in its document.
        scaling: of the local dot products; by default `head_dim ** -0.5`.
        softcap: local scores s become `softcap * tanh(s / softcap)`; by default they stay.
        dropout: probability of dropping a local attention weight.
        eps: added to the denominator of equation 3; by the gated delta rule to the squared length
            of a query or a key.

    Returns:
        `[batch, heads, tokens, value_dim]` in the value's dtype, and the state if asked for.
        Memory, normaliser and the division are float32 (float64 for float64 inputs) whatever the
        inputs are. Second derivatives need `torch.nn.attention.sdpa_kernel(SDPBackend.MATH)` around
        the call: torch's fused kernels have none.

    Raises:
        ValueError: shapes, options or the state do not fit together; the message names them.
    """
    window = Window(segment_length, local_segments, sink_tokens, kept_tokens)
    rule = memory_rule(update_rule, feature_map=feature_map, eps=eps)
    score = token_score(keep_score)
    numbers = {"scaling": scaling, "softcap": softcap, "dropout": dropout, "eps": eps}
    check_arguments(
        query,
        key,
        value,
        gate,
        log_weight,
        learned_score,
        rule,
        score,
        window,
        rotary,
        far_rotary,
        **numbers,
    )
    tokens = Projections(query, key, value, log_weight, learned_score)
    masks = {
        "attention_mask": attention_mask,
        "memory_mask": memory_mask,
        "position_ids": position_ids,
    }
    layout = segment_layout(
        query.shape[0], query.shape[2], window, **masks, state=state, device=query.device
    )
    turning: Any = {"rotary": rotary, "turn": turn, "far_rotary": far_rotary}
    softmax = ScoreOptions(scaling, dropout, softcap=softcap, **turning)
    if state is None:
        made: Any = {"rule": rule, "weighted": log_weight is not None, "scores": score.count}
        state = InfiniState.initial(key, value, *window, **made)
    output, new_state, _ = attend(
        AttentionCall(tokens, gate, layout, rule, softmax, state, score, return_state)
    )
    return (output, new_state) if return_state and new_state is not None else output


def attend(call: AttentionCall) -> Attended:
    """What a model's layers call: output, state and, where `softmax.written_out`, local weights,
    `[batch, heads, tokens, places]`: column `c` is place `c` of the query's window, first the
    sinks, seen once they have left its segments, then kept tokens, then the segments, the query's
    own last."""
    call, forced = prepared(call), _forced[-1] if _forced else None
    return forced(call) if callable(forced) else choose(call, forced)[0](call)


def prepared(call: AttentionCall) -> AttentionCall:
    """The call with the scores of its tokens and a state of their dtype. ValueError where the state
    does not fit."""
    tokens, layout, rule = call.tokens, call.layout, call.rule
    if layout.window.kept_tokens:
        first = call.keep_score.first(tokens.key, tokens.value, tokens.score)
        tokens = tokens._replace(score=first)
    return call._replace(
        tokens=tokens, state=call.state.checked_for(tokens, layout.window.places, rule)
    )


def attend_grid(call: AttentionCall) -> Attended:
    """[`attend`] for any call but one of a token per row, by plain torch, one group of segments
    after the other."""
    tokens, gate, layout, rule, softmax, state, *_ = call
    keeping, outputs, all_weights = keeping_of(call), [], []
    size, sinks = group_size(layout, tokens.key), layout.window.sink_tokens
    queries_of = layout.to_grid(tokens.query, None).transpose(2, 3).split(size, 1)
    pairs: Any = zip(tokens[1:4], state.windows(), strict=False)  # of keys, values and log weights
    windows_of = [
        [None] * len(queries_of) if new is None else layout.windows(new, old).split(size, 1)
        for new, old in pairs
    ]
    after, dtype, begin = (state.memory, state.normaliser), state.memory.dtype, 0
    for queries, *windows in zip(queries_of, *windows_of, strict=True):
        queries, end = queries.contiguous(), begin + queries.shape[1]
        # What leaves the windows while they are seen is what the memory takes in
        leaving: Any = [
            None if window is None else window[..., sinks : sinks + layout.slots, :]
            for window in windows
        ]
        written: Any = None if layout.writes_all else layout.written[:, begin:end, None, :, None]
        values, (compared, keys, mask) = (
            windows[1],
            compared_window(queries, windows[0], layout, softmax, begin, end),
        )
        if keeping is not None:
            keeping.see((compared, keys, mask), begin, end, softmax)
            seen, evicted = keeping.choose(leaving, begin, end)
            if evicted is not None:
                leaving, written = evicted[:3], evicted.position >= 0
            keys, values, mask = with_kept(keys, values, mask, seen, layout, softmax, begin, end)
            del seen, evicted
        local, weights = window_attention(compared, keys, values, mask, softmax)
        all_weights.append(weights)
        if rule.holds:
            filled = (layout.left[:, begin:end] > layout.window.kept_tokens)[:, :, None, None, None]
            with torch.autocast(tokens.key.device.type, enabled=False):
                keys, values = leaving[0].to(dtype), leaving[1].to(dtype)
                parts = rule.written(keys, values, leaving[2], written)
                before, after = rule.states(parts, *after, layout.continues(begin, end))
                local = rule.mix(local, queries, before, gate, filled)
            del parts, before
        outputs.append(local.transpose(2, 3))
        # Or they are held while the next group is made
        del queries, windows, leaving, compared, keys, mask, values, local
        begin = end
    output = layout.from_grid(outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1))
    weights = _weights_per_token(torch.cat(all_weights, 1), layout) if softmax.written_out else None
    return output, state_after(call, keeping, after) if call.return_state else None, weights


def keeping_of(call: AttentionCall) -> KeptInGrid | None:
    """`None` where nothing is kept while the call is computed, nor asked for after it."""
    return (
        KeptInGrid(call)
        if call.layout.most_kept or (call.layout.window.kept_tokens and call.return_state)
        else None
    )


def compared_window(
    query: Tensor, key: Tensor, layout: GridLayout, softmax: ScoreOptions, begin: int, end: int
) -> tuple[Tensor, Tensor, Any]:
    """Queries `[B, N, H, C, D]` and keys `[B, N, K, W, D]` of the windows of these segments, sinks
    first, as they are compared, and which see which; without kept tokens."""
    first, sinks = functools.partial(layout.first_numbers, begin, end), layout.window.sink_tokens
    compared = softmax.compared(key, layout.key_places(), first)
    if layout.window.kept_tokens and sinks:
        turned = sinks_before_kept(key[..., :sinks, :], layout, softmax, begin, end)
        compared = torch.cat([turned, compared[..., sinks:, :]], 3)
    query = softmax.compared(query, layout.query_places, first)
    return query, compared, layout.window_mask(begin, end)


def state_after(
    call: AttentionCall, keeping: KeptInGrid | None, memory_and_normaliser: Any
) -> InfiniState:
    """The state after a call that ended with this memory and normaliser."""
    tokens, layout, state = call.tokens, call.layout, call.state
    if keeping is not None:
        tokens, state = keeping.scored(tokens, state)
    state = state.map_windows(lambda window, new: layout.next_window(new, window), tokens)
    state = state if keeping is None else keeping.kept.into(state, layout.window)
    # Copies, for these are two of many states that the call made, and would keep all of them in
    # memory
    memory, normaliser = (part.clone() for part in memory_and_normaliser)
    return state.after(layout, memory=memory, normaliser=normaliser)


def group_size(layout: GridLayout, key: Tensor) -> int:
    """Segments that are worked on at a time: all in a graph, for the compiler keeps intermediate
    results small."""
    fits = layout.segments
    if not torch.compiler.is_compiling():
        fits = GROUP_ELEMENTS.get(key.device.type, GROUP_ELEMENTS["cuda"]) // (
            key[:, :, :1].numel() * layout.slots
        )
    if layout.window.kept_tokens:
        fits = min(fits, choosable_segments(layout, key))
    return max(1, fits)


def _weights_per_token(weights: Tensor, layout: GridLayout) -> Tensor:
    """`[B, N, H, C, W]` as `[B, H, tokens, places]`, zero for padding."""
    whole = weights.new_zeros(*weights.shape[:-1], layout.window.places)
    whole = whole.index_copy(-1, layout.key_places(layout.most_kept), weights)
    return layout.from_grid(whole.transpose(2, 3))


def choose(
    call: AttentionCall, forced: str | None = None
) -> tuple[Callable[[AttentionCall], Attended], str]:
    """What computes the call, the first of [`BACKENDS`] that fits, or the one whose name is forced;
    and what each says of it up to that one. ValueError where a backend is forced that does not fit,
    or that there is not."""
    reasons = []
    for name, (fits, run) in BACKENDS.items():
        if forced in (None, name):
            fitting, reason = fits(call)
            reasons.append(f"{name}: {reason}")
            if fitting:
                return run, "; ".join(reasons)
    names = ", ".join(BACKENDS)
    raise ValueError(
        f"no backend of {names} computes this call{': ' * bool(reasons)}{'; '.join(reasons)}."
    )


_forced: list[str | Callable[[AttentionCall], Attended]] = []


@contextlib.contextmanager
def forced_backend(backend: str | Callable[[AttentionCall], Attended]) -> Iterator[None]:
    """Within it, calls are computed by this function, or by the backend of this name; ValueError
    where it does not fit."""
    _forced.append(backend)
    try:
        yield
    finally:
        _forced.pop()


def _fits_kernels(call: AttentionCall) -> tuple[bool, str]:
    """Whether the kernels compute the call; the first reason against it."""
    if torch.compiler.is_compiling():  # before anything that a graph would have to follow
        return False, "a graph of torch.compile, which fuses plain torch itself"
    query, key, value = call.tokens[:3]
    # These two at once, for every layer asks at every new token
    if query.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return False, "not on a CUDA device"
    if not isinstance(call.layout, GridLayout):
        return False, "one token for every row"
    softmax = call.softmax
    refused = {
        f"no kernel for the update rule {call.rule.update_rule!r}": call.rule.update_rule
        != "linear",
        "triton is not installed": importlib.util.find_spec("triton") is None,
        "code that came with a model has no kernels": not __name__.endswith(".ops.attention"),
        "local weights are returned": softmax.written_out,
        "no kernel for dropout": softmax.dropout > 0,
        "no kernel for softcap": softmax.softcap is not None,
        f"no kernel for {query.dtype}": not {query.dtype, key.dtype, value.dtype}
        <= {torch.bfloat16, torch.float16, torch.float32},
        "no kernel for positions that are scaled by the length of a text": (
            softmax.far_rotary is not None
        ),
        "no kernel for this way of turning by rotary positions": softmax.rotary is not None
        and (len(softmax.rotary) != 2 or softmax.rotary[0].shape[-1] != query.shape[3]),
        f"heads are {query.shape[3]} and {value.shape[3]} wide, not one of 16, 32, 64, 128": (
            not {query.shape[3], value.shape[3]} <= {16, 32, 64, 128}
        ),
    }
    for reason, holds in refused.items():
        if holds:
            return False, reason
    if (reason := _module("agreement").disagreement(call)) is not None:
        return False, reason
    return True, "Triton kernels"


def _module(name: str) -> Any:
    """A module of kernels/, by its name: imported only where its compiler is installed, and not
    saved with a model."""
    return importlib.import_module(f".kernels.{name}", __package__)


def _is_step(call: AttentionCall) -> tuple[bool, str]:
    fits = isinstance(call.layout, StepLayout)
    return fits, "plain torch, one token for every row" if fits else "not one token for every row"


# Ways to compute a call, by their names: whether it can compute this one, and why, or why not; and
# what computes it
BACKENDS: dict[
    str, tuple[Callable[[AttentionCall], tuple[bool, str]], Callable[[AttentionCall], Attended]]
] = {
    "triton": (_fits_kernels, lambda call: _module("attend").run(call)),
    "step": (_is_step, attend_step),
    "grid": (
        lambda call: (not _is_step(call)[0], "plain torch, in a grid of segments"),
        attend_grid,
    ),
}
