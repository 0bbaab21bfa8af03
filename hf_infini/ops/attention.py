"""Infini-attention: local softmax attention and a compressive memory, mixed by a gate for each head (equation 5).

    A = sigmoid(β) A_mem + (1 − sigmoid(β)) A_dot

[`infini_attention`] makes the layout of a call and passes it to [`attend`], which the models call. A call of one token is in
step.py. All others process the grid of segments group by group, and pass the state from group to group. The size of a
group is chosen so that intermediate results fit into the cache (CPU), or so that there are few kernel launches (GPU).

Shapes: the grid of the layout, `[B, S, C, H, D]`, is cut into `[B, N, H, T, C, D]`: `N` *blocks* of `T` segments, heads
before tokens, so that every product is one of contiguous matrices. `P = T · C` tokens make a block, with one state.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .backends import Attended, AttentionCall, Backend, choose
from .checks import check_arguments, check_kinds, check_learned_score, check_shapes, check_window
from .kept import KeptInGrid, first_scores
from .kernels import KERNELS
from .layout.base import GridLayout
from .layout.build import SegmentLayout, segment_layout
from .layout.step import StepLayout
from .memory import EPS, Within, memory_weight, mix
from .rules import MemoryRule, memory_rule
from .rules.base import KEEP_SCORES
from .state import InfiniState, Projections
from .step import attend_step
from .tensors import in_blocks
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
    check_arguments(query, key, value, gate, log_weight, query_weight, feature_maps, rule.rates, **numbers)
    check_window(*window, rotary)
    check_learned_score(learned_score, keep_score, kept_tokens, key)
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


def _run_step(call: AttentionCall) -> Attended:
    return Attended(*attend_step(*call[:6], call.in_place))


def _run_grid(call: AttentionCall) -> Attended:
    tokens, layout, state = call.tokens, call.layout, call.state
    keeping = None
    if layout.most_kept or (layout.kept_tokens and call.return_state):
        keeping = KeptInGrid(tokens, layout, call.rule, state, call.scored)
    output, memory, normaliser, weights = _attend_grid(*call[:6], keeping, call.return_weights)
    if not call.return_state:
        return Attended(output, None, weights)
    if keeping is not None:
        tokens, state = keeping.scored(tokens, state)
    state = state.map_windows(lambda window, new: layout.next_window(new, window), tokens)
    state = state if keeping is None else keeping.kept.into(state, layout.kept_places)
    last = {"memory": _compact_copy(memory), "normaliser": _compact_copy(normaliser)}
    return Attended(output, state.after(layout, **last), weights)


def _fits_step(call: AttentionCall) -> tuple[bool, str]:
    fits = isinstance(call.layout, StepLayout)
    return fits, "plain torch, one token for every row" if fits else "not one token for every row"


def _fits_grid(call: AttentionCall) -> tuple[bool, str]:
    fits = isinstance(call.layout, GridLayout)
    return fits, "plain torch, in a grid of segments" if fits else "the layout is no grid of segments"


BACKENDS = (*KERNELS, Backend("step", _fits_step, _run_step), Backend("grid", _fits_grid, _run_grid))


def _attend_grid(
    tokens: Projections,
    gate: Tensor,
    layout: GridLayout,
    rule: MemoryRule,
    softmax: ScoreOptions,
    state: InfiniState,
    keeping: KeptInGrid | None,
    return_weights: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Output, memory and normaliser after the last segment, and, if asked for, the weights of [`attend`]."""
    local_segments, sinks, slots = layout.local_segments, layout.sink_tokens, layout.slots
    kv_heads, width = tokens.key.shape[1], tokens.key.shape[3]
    heads_per_key = tokens.query.shape[1] // kv_heads
    all_queries, all_keys, all_values, all_log_weights, _ = _grids(tokens, layout, state)
    block, size = _sizes(layout, all_keys, rule)
    size = 0 if return_weights else size  # all segments at once: the weights are returned as one
    memory, normaliser, start, dtype = state.memory, state.normaliser, state.start(), state.memory.dtype
    gate = gate.to(dtype)[:, None, None]
    earlier = None if block == 1 else _earlier_segments(block, slots, heads_per_key, gate)

    grids_and_windows = ((all_keys, state.local_key), (all_values, state.local_value)) if sinks else ()
    first_tokens = [layout.sinks(*pair).expand(-1, layout.segments, -1, -1, -1) for pair in grids_and_windows]
    # The windows of a group begin w segments before it; what leaves them is what the memory takes in
    all_queries, all_keys = _groups(all_queries, size), _groups(all_keys, size, local_segments)
    all_values = _groups(all_values, size, local_segments)
    all_log_weights = None if all_log_weights is None else _groups(all_log_weights, size, local_segments)
    outputs, weights = [], None
    for number, group in enumerate(layout.groups(size)):
        count = group.end - group.begin
        queries = _blocks(all_queries[number], block).contiguous()
        leaving_keys = _blocks(all_keys[number][:, :count], block).contiguous()
        leaving_values = _blocks(all_values[number][:, :count], block).contiguous()
        windows = [leaving_keys, leaving_values]
        if local_segments:
            with_next = slice(number, number + 2)
            windows = [_windows(groups[with_next], count, local_segments, block) for groups in (all_keys, all_values)]
        if sinks:
            parts = zip(first_tokens, windows, strict=True)
            windows = [torch.cat([_blocks(part[:, group.begin : group.end], block), window], 4) for part, window in parts]
        keys, values = softmax.compared_keys(windows[0], layout.key_places), windows[1]
        compared = softmax.compared_queries(queries, layout.query_places)
        # Nothing is masked in the empty segments at the end: a softmax over nothing would be NaN
        mask = None if group.mask is None else ~in_blocks(~group.mask, block).unsqueeze(2)
        evicted = None
        if keeping is not None:
            if sinks and group.kept is not None and softmax.rotary is not None:
                places = in_blocks(layout.sink_places(group.kept), block)
                turned = softmax.rotary.at_each(windows[0][..., :sinks, :], places)
                keys = torch.cat([turned, keys[..., sinks:, :]], 4)
            keeping.see(compared, keys, mask, group, block, softmax)
            leaving = [None if part is None else part[number][:, :count] for part in (all_keys, all_values, all_log_weights)]
            of_group = keeping.choose(leaving, group)
            keys, values, mask = of_group.visible(keys, values, mask, layout.most_kept, group, block, softmax)
            evicted = of_group.evicted(block)

        if return_weights:
            weights, log_sum = window_weights(compared, keys, mask, softmax, values.dtype, rule.shared)
            weights = _weights_per_token(weights, layout)
            local = _weights_in_blocks(weights, layout, block) @ for_every_head(values, queries)
        else:
            local, log_sum = window_attention(compared, keys, values, mask, softmax, rule.shared)

        with torch.autocast(tokens.key.device.type, enabled=False):
            local = local.flatten(3, 4)
            log_weight = None
            if evicted is not None:
                leaving_keys, leaving_values, log_weight, evicted = evicted
            elif all_log_weights is not None:
                log_weight = _blocks(all_log_weights[number][:, :count], block)
            log_weight = None if log_weight is None else log_weight.flatten(3, 4)
            block_keys, block_values = (part.flatten(3, 4).to(dtype) for part in (leaving_keys, leaving_values))
            query_features = rule.query_features(queries.flatten(3, 4).to(dtype))
            query_features = query_features.unflatten(2, (kv_heads, -1)).flatten(3, 4)
            taken_in = group.written
            if taken_in is None and _is_padded(count, block):
                taken_in = block_keys.new_ones(1, count, slots)
            if evicted is not None and (taken_in is not None or group.kept is not None):
                taken_in = evicted.flatten(3, 4).unsqueeze(-1)
            elif taken_in is not None:
                taken_in = _per_token(taken_in, block)
            written = rule.written(block_keys, block_values, log_weight, taken_in)
            states = rule.states(written, memory, normaliser, start, group.borders)
            memory, normaliser = states.last_memory, states.last_normaliser
            within = None if earlier is None else Within(written.key_features, written.value, earlier)
            found = rule.read(query_features, states.memory, states.normaliser, within)
            read, mass = (tensor.unflatten(3, (heads_per_key, -1)).flatten(2, 3) for tensor in found)
            log_sum = None if log_sum is None else log_sum.flatten(3, 4).unsqueeze(-1)
            share = memory_weight(gate, mass, log_sum, width, rule.eps)
            if state.start_memory is None and group.filled is not None:
                share = share * _per_token(group.filled.unsqueeze(-1).expand(-1, -1, slots), block)
            mixed = mix(local, read, share)
        outputs.append(mixed.unflatten(3, (block, -1)).permute(0, 1, 3, 4, 2, 5))
    output = (outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)).flatten(1, 2)[:, : layout.segments]
    return layout.from_grid(output), memory, normaliser, weights


def _grids(tokens: Projections, layout: GridLayout, state: InfiniState) -> Projections:
    """The tokens, and those of the state's window, in the grid: `[B, S, C, heads, dim]` each."""
    query, key = layout.to_grid(tokens.query, None), layout.to_grid(tokens.key, state.local_key)
    value, log_weight = layout.to_grid(tokens.value, state.local_value), tokens.log_weight
    log_weight = None if log_weight is None else layout.to_grid(log_weight, state.local_log_weight)
    return Projections(query, key, value, log_weight)


def _groups(grid: Tensor, size: int, early: int = 0) -> Sequence[Tensor]:
    """The grid in groups of `size` segments (0: in one), each starting `early` segments earlier."""
    grid = F.pad(grid, (0,) * 6 + (early, 0)) if early else grid
    return grid.split(size, 1) if size else (grid,)


def _weights_per_token(weights: Tensor, layout: GridLayout) -> Tensor:
    """`[B, N, H, T, C, W]` as `[B, H, tokens, places]`, zero for padding."""
    grid = weights.permute(0, 1, 3, 4, 2, 5).flatten(1, 2)[:, : layout.segments]
    sizes = (layout.sink_tokens, layout.most_kept, (layout.local_segments + 1) * layout.slots)
    sinks, kept, segments = grid.split(sizes, -1)
    kept = F.pad(kept, (layout.kept_tokens - layout.most_kept, 0))
    segments = segments.unflatten(-1, (layout.local_segments + 1, layout.slots))
    segments = F.pad(segments, (0, layout.segment_length - layout.slots)).flatten(-2)
    return layout.from_grid(torch.cat([sinks, kept, segments], -1))


def _weights_in_blocks(weights: Tensor, layout: GridLayout, block: int) -> Tensor:
    """The way back of [`_weights_per_token`], zero for slots without a new token."""
    grid = layout.to_grid(weights, None)
    segments = grid[..., layout.ahead :].unflatten(-1, (layout.local_segments + 1, layout.segment_length))
    sinks, kept = grid[..., : layout.sink_tokens], grid[..., layout.ahead - layout.most_kept : layout.ahead]
    return _blocks(torch.cat([sinks, kept, segments[..., : layout.slots].flatten(-2)], -1), block)


def _sizes(layout: GridLayout, key: Tensor, rule: MemoryRule) -> tuple[int, int]:
    """Segments in a block (one state each) and in a group (worked on at a time), the second a multiple of the first; 0: all
    in one group, as in a graph, where the compiler keeps intermediate results small.

    Segments shorter than a head is wide are joined to blocks of at least that many tokens, so that the states never hold
    more than the tokens do. Rules that read what they write to, and rows whose documents may change inside a block, need a
    state per segment.
    """
    block = 1
    if rule.additive and not layout.packed:
        block = -(-key.shape[-1] // layout.slots)
        if isinstance(layout.segments, int):  # not where torch.export leaves it open
            block = max(1, min(block, layout.segments))
    if torch.compiler.is_compiling():
        return block, 0
    elements = key[:, :1].numel() * block
    fits = max(1, GROUP_ELEMENTS.get(key.device.type, GROUP_ELEMENTS["cuda"]) // elements)
    return block, block * max(fits, -(-layout.local_segments // block))  # a window reaches into the group before at most


def _is_padded(count: int, block: int) -> bool:
    """Whether so many segments leave the last block with empty ones; where torch.export leaves the number open: yes."""
    return block > 1 and not (isinstance(count, int) and count % block == 0)


def _blocks(part: Tensor, block: int) -> Tensor:
    """`[B, s, C, H, D]` as `[B, N, H, T, C, D]`."""
    return in_blocks(part, block).permute(0, 1, 4, 2, 3, 5)


def _per_token(slots: Tensor, block: int) -> Tensor:
    """`[B or 1, s, C]` as `[B or 1, N, 1, P, 1]`."""
    return in_blocks(slots, block).flatten(2, 3)[:, :, None, :, None]


def _windows(groups: Sequence[Tensor], count: int, local_segments: int, block: int) -> Tensor:
    """The windows of a group's `count` segments, `[B, N, K, T, W, D]`.

    Args:
        groups: a group of the grid that begins w segments early, and the next if there is one, which the last windows reach
            into.
    """
    group = groups[0]
    if group.shape[1] < count + local_segments:
        group = torch.cat([group, groups[1][:, :local_segments]], 1)
    return torch.cat([_blocks(group[:, shift : shift + count], block) for shift in range(local_segments + 1)], 4)


def _earlier_segments(block: int, slots: int, heads_per_key: int, like: Tensor) -> Tensor:
    """`[heads_per_key * P, P]` of 0 and 1, with dtype and device of `like`: which tokens of a block (columns) are in an
    earlier segment than the query (row)."""
    segment = torch.arange(block, device=like.device).repeat_interleave(slots)
    return (segment[None, :] < segment[:, None]).to(like.dtype).repeat(heads_per_key, 1)


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


def _compact_copy(tensor: Tensor) -> Tensor:
    """A copy: the tensor is one of many states that the call made, and would keep all of them in memory. Its strides are
    those of a new tensor also in a batch of one, for torch.cond compares them."""
    return tensor.clone(memory_format=torch.contiguous_format)
