"""Infini-attention: local softmax attention and a compressive memory, mixed by a gate for each head (equation 5).

    A = sigmoid(β) A_mem + (1 − sigmoid(β)) A_dot

[`infini_attention`] makes the layout of a call and passes it to [`attend`], which the models call. A call of one token is in
step.py. All others process the grid of segments group by group, and pass the state from group to group. The size of a
group is chosen so that intermediate results fit into the cache (CPU), or so that there are few kernel launches (GPU).

Shapes: the grid of the layout, `[B, S, C, H, D]`, is cut into groups `[B, N, H, C, D]` of `N` segments, heads before tokens,
so that every product is one of contiguous matrices.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .backends import TRITON, Attended, AttentionCall, Backend, choose
from .checks import check_arguments, check_kinds, check_shapes
from .kept import KeptInGrid, first_scores, with_sinks_before
from .layout.base import GridLayout
from .layout.build import SegmentLayout, segment_layout
from .layout.step import StepLayout
from .memory import EPS, KEEP_SCORES, MemoryRule, memory_weight, mix
from .rules import memory_rule
from .state import InfiniState, Projections
from .step import attend_step
from .window import Rotary, ScoreOptions, for_every_head, window_attention, window_weights

GROUP_ELEMENTS = {"cpu": 2**20, "cuda": 2**26}  # of the keys


@check_kinds
def infini_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gate: Tensor,
    segment_length: int,
    *,
    update_rule: str = "linear",
    feature_map: str = "elu",
    denominator: str = "separate",
    local_segments: int = 0,
    sink_tokens: int = 0,
    kept_tokens: int = 0,
    keep_score: str = "attention",
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    memory_mask: Tensor | None = None,
    state: InfiniState | None = None,
    return_state: bool = False,
    max_documents: int | None = None,
    feature_maps: tuple[Tensor, Tensor] | None = None,
    log_weight: Tensor | None = None,
    learned_score: Tensor | None = None,
    rotary: Rotary | None = None,
    scaling: float | None = None,
    softcap: float | None = None,
    query_weight: Tensor | None = None,
    dropout: float = 0.0,
    eps: float = EPS,
) -> Tensor | tuple[Tensor, InfiniState]:
    """Causal attention over short segments plus a memory of constant size for all before them (arXiv 2404.07143).

    Token `t` of a document is in segment `s = t // segment_length`. It sees its segment and `local_segments` before it
    by softmax (equation 2), and reads everything older from the memory (equation 3), which takes in a segment when it
    leaves that window (equation 4 or the delta rule). Per head, `sigmoid(gate)` is the memory's share (equation 5); while
    the memory is still empty (or everything that left the window was skipped), the output is only the local attention.

    Args:
        query: `[batch, heads, tokens, head_dim]`.
        key: `[batch, kv_heads, tokens, head_dim]` and value `[batch, kv_heads, tokens, value_dim]`; query head `h` belongs
            to key/value head `h // (heads // kv_heads)`.
        gate: `[heads]`, the logit β.
        segment_length: tokens in a segment, L ≥ 1.
        update_rule: "linear"; "delta", which writes values less what the memory already answers to their keys; or
            "gated_delta", token by token with features less σ(0) of length one: M = α (M − β k kᵀ M) + β k vᵀ, read as q M.
        feature_map: what makes positive features of the memory's queries and keys: "elu", ELU + 1 (the paper), or "exp".
        denominator: "separate", one for the window and one for the memory, so that only the gate sets the memory's share
            (the paper); or "shared", one for both, so that it also depends on what the token finds: [`memory_weight`].
        local_segments: earlier segments that the softmax sees, 0 in the paper.
        sink_tokens: how many first tokens of its document every query sees by softmax (attention sinks, arXiv 2309.17453);
            the memory never takes them in. Fewer than a segment has; 0 in the paper.
        kept_tokens: how many of the tokens that have left the window each key/value head keeps by softmax, and out of the
            memory: those with the highest score, the earlier of equal ones (see kept.py). Sinks are none of them, and
            neither are tokens that `memory_mask` leaves out.
        keep_score: "attention", the mean that a token received from the queries that saw it in the window; "learned", the
            `learned_score`; or "half", half of the places for each.
        attention_mask: `[batch, tokens]`, 1 for real tokens; padding may be anywhere, is in no segment, and its output is
            zero.
        position_ids: `[batch, tokens]`; a real token whose position does not go beyond the one before it starts a new
            document, with an empty window and the memory it started from.
        memory_mask: `[batch, tokens]`, 0 for tokens that are seen inside the window but never written into the memory.
        state: continues an earlier call; see [`InfiniState`].
        return_state: also return the state after the last token.
        max_documents: how many documents a row holds at most, where sizes must not depend on the data: [`segment_layout`].
        feature_maps: `[heads, head_dim, head_dim]` and `[kv_heads, head_dim, head_dim]`, what the memory's queries and keys
            are multiplied by before the feature map.
        log_weight: `[batch, kv_heads, tokens, 1]`, added to the memory's keys right before the feature map; with exponential
            features the logarithm of a token's weight. For the gated delta rule `[…, 2]`, log β and log α, neither positive.
        learned_score: `[batch, kv_heads, tokens]`, which has no gradient.
        rotary: for rotary models, which give query and key un-rotated: turns both by their places in the window, which has
            `sink_tokens + kept_tokens + (local_segments + 1) * segment_length` of them. The memory has no positions.
        scaling: of the local dot products; by default `head_dim ** -0.5`.
        softcap: local scores s become `softcap * tanh(s / softcap)`; by default they stay.
        query_weight: `[heads, head_dim, head_dim]`, what the window's queries are multiplied by, after they are turned.
        dropout: probability of dropping a local attention weight.
        eps: added to the denominator of equation 3; by the gated delta rule to the squared length of a query or a key.

    Returns:
        `[batch, heads, tokens, value_dim]` in the value's dtype, and the state if asked for; no tokens leave it as it
        was. Memory, normaliser and the division are float32 (float64 for float64 inputs) whatever the inputs are. Second
        derivatives need `torch.nn.attention.sdpa_kernel(SDPBackend.MATH)` around the call: torch's fused kernels have none.

    Raises:
        ValueError: shapes, options or the state do not fit together; the message names them.
    """
    window = (segment_length, local_segments, sink_tokens, kept_tokens)
    query_map, key_map = feature_maps or (None, None)
    maps = {"query_map": query_map, "key_map": key_map}
    options = {"feature_map": feature_map, "denominator": denominator, "keep_score": keep_score}
    rule = memory_rule(update_rule, eps=eps, **options, **maps)
    numbers = {"scaling": scaling, "softcap": softcap, "dropout": dropout, "eps": eps}
    given = (log_weight, learned_score, query_weight, feature_maps, rule, window, rotary)
    check_arguments(query, key, value, gate, *given, **numbers)
    tokens = Projections(query, key, value, log_weight, learned_score)
    masks = {"attention_mask": attention_mask, "memory_mask": memory_mask, "position_ids": position_ids}
    batch, count = query.shape[::2]
    if 0 in (batch, count):
        check_shapes(batch, count, **masks)
        output, new_state = _of_no_tokens(tokens, gate, window, rule, state)
    else:
        options = {"state": state, "max_documents": max_documents, "device": query.device}
        layout = segment_layout(batch, count, *window, **options, **masks)
        softmax = ScoreOptions(scaling, dropout, softcap=softcap, rotary=rotary, query_weight=query_weight)
        output, new_state, _ = attend(tokens, gate, layout, rule, softmax, state, return_state=return_state)
    return output if new_state is None or not return_state else (output, new_state)


def attend(
    tokens: Projections,
    gate: Tensor,
    layout: SegmentLayout,
    rule: MemoryRule,
    softmax: ScoreOptions,
    state: InfiniState | None = None,
    *,
    return_state: bool = False,
    return_weights: bool = False,
    in_place: bool = False,
    scored: bool = False,
) -> Attended:
    """[`infini_attention`] on a layout that is already made: what a model's layers call.

    Args:
        tokens: with the `learned_score` for the score.
        return_weights: also return the local weights `[batch, heads, tokens, places]` (column `c` is place `c` of the
            query's window: first the sinks, seen once they have left its segments, then kept tokens, then the segments, the
            query's own last;
            the output is computed from this very tensor, so that a gradient reaches it). A single token needs
            `softmax.written_out`.
        in_place: allow a single token to overwrite the given state.
        scored: the scores of tokens and state are those after this call, of more than a single token.

    Returns:
        The output, the state and the weights; what was not asked for may be `None`.
    """
    if not scored:
        scores = first_scores(rule.keep_score, tokens.key, tokens.score) if layout.kept_tokens else None
        tokens = tokens._replace(score=scores)
    if state is None:
        state = initial_state(tokens, layout.window_sizes, rule)
    state = state.checked_for(tokens, layout.places, rule.normalised)
    call = AttentionCall(tokens, gate, layout, rule, softmax, state, return_state, return_weights, in_place, scored)
    return choose(call, BACKENDS)[0].run(call)


def attend_grid(call: AttentionCall) -> Attended:
    """[`attend`] for any call but one of a token per row."""
    tokens, gate, layout, rule, softmax, state, return_state, return_weights, _, scored = call
    local_segments, sinks, kv_heads, width = layout.local_segments, layout.sink_tokens, *tokens.key.shape[1::2]
    keeping = None
    if layout.most_kept or (layout.kept_tokens and return_state):
        keeping = KeptInGrid(tokens, layout, rule, state, scored)
    all_queries = layout.to_grid(tokens.query, None)
    # Keys, values and log weights; what leaves the windows of a group, w segments later, is what the memory takes in
    given = zip(tokens[1:4], state.windows(), strict=False)
    grids = [None if new is None else layout.to_grid(new, window) for new, window in given]
    size = 0 if return_weights else _group_size(layout, tokens.key)
    memory, normaliser, start, dtype = state.memory, state.normaliser, state.start(), state.memory.dtype
    gate = gate.to(dtype)[:, None, None]
    first_tokens = []
    if sinks:
        pairs = zip(grids, (state.local_key, state.local_value), strict=False)
        first_tokens = [layout.sinks(*pair).expand(-1, layout.segments, -1, -1, -1).transpose(2, 3) for pair in pairs]
    queries_of, *delayed = [_groups(all_queries, size), *(_groups(grid, size, local_segments) for grid in grids)]
    outputs, weights = [], None
    for number, begin in enumerate(range(0, layout.segments, size) if size else (0,)):
        end = min(begin + size, layout.segments) if size else layout.segments
        count, steady = end - begin, layout.is_steady(begin, end)
        queries = queries_of[number].transpose(2, 3).contiguous()
        windows = [_windows(groups[number : number + 2], count, local_segments) for groups in delayed[:2]]
        leaving: Any = [window[..., : layout.slots, :] for window in windows] if local_segments else windows
        log_weight = None if grids[2] is None else delayed[2][number][:, :count].transpose(2, 3)
        written = None if steady or layout.written is None else layout.written[:, begin:end, None, :, None]
        left = None if steady or layout.left is None else layout.left[:, begin:end]
        if sinks:
            windows = [torch.cat([p[:, begin:end], window], 3) for p, window in zip(first_tokens, windows, strict=True)]
        keys, values = softmax.compared_keys(windows[0], layout.key_places), windows[1]
        compared = softmax.compared_queries(queries, layout.query_places)
        mask = None if steady else layout.window_mask(begin, end)
        mask = None if mask is None else mask.unsqueeze(2)
        if keeping is not None:
            kept = None if left is None else left.clamp(max=layout.kept_tokens)
            keys = with_sinks_before(keys, windows[0], layout, kept, softmax)
            keeping.see(compared, keys, mask, begin, end, softmax)
            slots = None if written is None else written[:, :, 0, :, 0]
            of_group = keeping.choose([*leaving, log_weight], slots, begin, end)
            keys, values, mask = of_group.visible(keys, values, mask, layout.most_kept, kept, softmax)
            *leaving, log_weight, evicted = of_group.evicted()
            written = None if written is None and kept is None else evicted.unsqueeze(-1)
        if return_weights:
            weights, log_sum = window_weights(compared, keys, mask, softmax, values.dtype, rule.shared)
            weights = _weights_per_token(weights, layout)
            local = _weights_in_segments(weights, layout) @ for_every_head(values, queries)
        else:
            local, log_sum = window_attention(compared, keys, values, mask, softmax, rule.shared)

        with torch.autocast(tokens.key.device.type, enabled=False):
            query_features = rule.query_features(queries.to(dtype)).unflatten(2, (kv_heads, -1)).flatten(3, 4)
            parts = rule.written(leaving[0].to(dtype), leaving[1].to(dtype), log_weight, written)
            borders = None if steady else layout.borders(begin, end)
            before, (memory, normaliser) = rule.states(parts, memory, normaliser, start, borders)
            found = rule.read(query_features, *before)
            read, mass = (tensor.unflatten(3, (-1, layout.slots)).flatten(2, 3) for tensor in found)
            log_sum = None if log_sum is None else log_sum.unsqueeze(-1)
            share = memory_weight(gate, mass, log_sum, width, rule.eps)
            if state.start_memory is None and left is not None:  # there is nothing to read where the memory is empty
                share = share * (left > layout.kept_tokens)[:, :, None, None, None]
            outputs.append(mix(local, read, share).transpose(2, 3))
    output = layout.from_grid(outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1))
    if not return_state:
        return output, None, weights
    if keeping is not None:
        tokens, state = keeping.scored(tokens, state)
    state = state.map_windows(lambda window, new: layout.next_window(new, window), tokens)
    state = state if keeping is None else keeping.kept.into(state, layout.kept_places)
    # Copies, for these are two of many states that the call made, and would keep all of them in memory; with the strides of
    # new tensors also in a batch of one, for torch.cond compares them
    memory, normaliser = (part.clone(memory_format=torch.contiguous_format) for part in (memory, normaliser))
    return output, state.after(layout, memory=memory, normaliser=normaliser), weights


def _fits(layout: type, yes: str, no: str) -> Callable[[AttentionCall], tuple[bool, str]]:
    return lambda call: (True, f"plain torch, {yes}") if isinstance(call.layout, layout) else (False, no)


BACKENDS = (
    TRITON,
    Backend("step", _fits(StepLayout, "one token for every row", "not one token for every row"), attend_step),
    Backend("grid", _fits(GridLayout, "in a grid of segments", "the layout is no grid of segments"), attend_grid),
)


def _group_size(layout: GridLayout, key: Tensor) -> int:
    """Segments that are worked on at a time; 0: all, as in a graph, where the compiler keeps intermediate results small."""
    if torch.compiler.is_compiling():
        return 0
    elements = key[:, :, :1].numel() * layout.slots
    fits = max(1, GROUP_ELEMENTS.get(key.device.type, GROUP_ELEMENTS["cuda"]) // elements)
    return max(fits, layout.local_segments)  # a window reaches into the group before at most


def _groups(grid: Tensor | None, size: int, early: int = 0) -> Sequence[Tensor]:
    """The grid in groups of `size` segments (0: in one), each starting `early` segments earlier."""
    if grid is None:
        return ()
    grid = F.pad(grid, (0,) * 6 + (early, 0)) if early else grid
    return grid.split(size, 1) if size else (grid,)


def _windows(groups: Sequence[Tensor], count: int, local_segments: int) -> Tensor:
    """The windows of a group's `count` segments, `[B, N, K, W, D]`, the segment that leaves first.

    Args:
        groups: a group of the grid that begins w segments early, and the next if there is one, which the last windows reach
            into.
    """
    group = groups[0].transpose(2, 3)
    if not local_segments:
        return group.contiguous()
    if group.shape[1] < count + local_segments:
        group = torch.cat([group, groups[1][:, :local_segments].transpose(2, 3)], 1)
    return torch.cat([group[:, shift : shift + count] for shift in range(local_segments + 1)], 3)


def _weights_per_token(weights: Tensor, layout: GridLayout) -> Tensor:
    """`[B, N, H, C, W]` as `[B, H, tokens, places]`, zero for padding."""
    sizes = (layout.sink_tokens, layout.most_kept, (layout.local_segments + 1) * layout.slots)
    sinks, kept, segments = weights.transpose(2, 3).split(sizes, -1)
    kept = F.pad(kept, (layout.kept_tokens - layout.most_kept, 0))
    segments = segments.unflatten(-1, (layout.local_segments + 1, layout.slots))
    segments = F.pad(segments, (0, layout.segment_length - layout.slots)).flatten(-2)
    return layout.from_grid(torch.cat([sinks, kept, segments], -1))


def _weights_in_segments(weights: Tensor, layout: GridLayout) -> Tensor:
    """The way back of [`_weights_per_token`], zero for slots without a new token."""
    grid = layout.to_grid(weights, None)
    segments = grid[..., layout.ahead :].unflatten(-1, (layout.local_segments + 1, layout.segment_length))
    sinks, kept = grid[..., : layout.sink_tokens], grid[..., layout.ahead - layout.most_kept : layout.ahead]
    return torch.cat([sinks, kept, segments[..., : layout.slots].flatten(-2)], -1).transpose(2, 3)


def initial_state(
    tokens: Projections, window: tuple[int, int, int, int], rule: MemoryRule, **start: Any
) -> InfiniState:
    """[`InfiniState.initial`] for such tokens; `start`: as there, or nothing."""
    options: dict[str, Any] = {"log_weights": 0 if tokens.log_weight is None else rule.rates}
    options |= {"normalised": rule.normalised, "scores": len(KEEP_SCORES[rule.keep_score])}
    return InfiniState.initial(tokens.key, tokens.value, *window, **options, **start)


def _of_no_tokens(
    tokens: Projections, gate: Tensor, window: tuple[int, int, int, int], rule: MemoryRule, state: InfiniState | None
) -> tuple[Tensor, InfiniState]:
    """Output and state of a call of no rows or no tokens: an empty tensor that everything has a gradient from, and the state
    as it was."""
    empty = initial_state(tokens, window, rule)
    state = empty if state is None else state
    tokens = tokens._replace(score=None if empty.local_score is None else empty.local_score[:, :, :0])
    state.checked_for(tokens, empty.local_key.shape[2], rule.normalised)
    local = F.scaled_dot_product_attention(tokens.query, tokens.key, tokens.value, enable_gqa=True)
    return mix(local, local, gate[:, None, None]), state
