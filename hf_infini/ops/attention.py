"""Infini-attention: local softmax attention and a compressive memory, mixed by a gate for each head (equation 5).

    A = sigmoid(β) A_mem + (1 − sigmoid(β)) A_dot

[`infini_attention`] makes the layout of a call and passes it to [`attend`], which the models call. A call of one token is in
step.py. All others process the grid of segments group by group, and pass the state from group to group. The size of a
group is chosen so that intermediate results fit into the cache (CPU), or so that there are few kernel launches (GPU).

Shapes: the grid of the layout, `[B, S, C, H, D]`, is cut into groups `[B, N, H, C, D]` of `N` segments, heads before tokens,
so that every product is one of contiguous matrices.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .backends import TRITON, Attended, AttentionCall, Backend, choose
from .checks import check_arguments, check_kinds
from .kept import KeptInGrid, first_scores, with_sinks_before
from .layout.base import GridLayout
from .layout.build import segment_layout
from .layout.step import StepLayout
from .memory import EPS, KEEP_SCORES, MemoryRule, memory_weight, mix
from .rules import memory_rule
from .state import InfiniState, Projections
from .step import attend_step
from .window import Rotary, ScoreOptions, window_attention

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
        denominator: "separate", one for the window and one for the memory (the paper); or "shared", one for both, so that
            the memory's share also depends on what the token finds: [`memory_weight`].
        local_segments: earlier segments that the softmax sees, 0 in the paper.
        sink_tokens: how many first tokens of its document every query sees by softmax (attention sinks, arXiv 2309.17453);
            the memory never takes them in. Fewer than a segment has; 0 in the paper.
        kept_tokens: how many of the tokens that have left the window, but for sinks and what `memory_mask` leaves out, each
            key/value head keeps by softmax and out of the memory: those with the highest score (see kept.py).
        keep_score: "attention", the mean that a token received from the queries that saw it in the window; "learned", the
            `learned_score`; or "half", half of the places for each.
        attention_mask: `[batch, tokens]`, 1 for real tokens; padding may be anywhere, is in no segment, and its output is
            zero.
        position_ids: `[batch, tokens]`; a real token whose position does not go beyond the one before it starts a new
            document, with an empty window and the memory it started from.
        memory_mask: `[batch, tokens]`, 0 for tokens that are seen inside the window but never written into the memory.
        state: continues an earlier call; see [`InfiniState`].
        return_state: also return the state after the last token.
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
        `[batch, heads, tokens, value_dim]` in the value's dtype, and the state if asked for. Memory, normaliser and the
        division are float32 (float64 for float64 inputs) whatever the inputs are. Second derivatives need
        `torch.nn.attention.sdpa_kernel(SDPBackend.MATH)` around the call: torch's fused kernels have none.

    Raises:
        ValueError: shapes, options or the state do not fit together; the message names them.
    """
    window = (segment_length, local_segments, sink_tokens, kept_tokens)
    query_map, key_map = feature_maps or (None, None)
    options = {"feature_map": feature_map, "denominator": denominator, "keep_score": keep_score, "eps": eps}
    rule = memory_rule(update_rule, query_map=query_map, key_map=key_map, **options)
    numbers = {"scaling": scaling, "softcap": softcap, "dropout": dropout, "eps": eps}
    given = (log_weight, learned_score, query_weight, feature_maps, rule, window, rotary)
    check_arguments(query, key, value, gate, *given, **numbers)
    tokens = Projections(query, key, value, log_weight, learned_score)
    masks = {"attention_mask": attention_mask, "memory_mask": memory_mask, "position_ids": position_ids}
    layout = segment_layout(query.shape[0], query.shape[2], *window, **masks, state=state, device=query.device)
    softmax = ScoreOptions(scaling, dropout, softcap=softcap, rotary=rotary, query_weight=query_weight)
    state = initial_state(tokens, window, rule) if state is None else state
    output, new_state, _ = attend(AttentionCall(tokens, gate, layout, rule, softmax, state, return_state))
    return (output, new_state) if return_state and new_state is not None else output


def attend(call: AttentionCall) -> Attended:
    """What a model's layers call: output, state and local weights.

    The weights, `[batch, heads, tokens, places]`, are there where `softmax.written_out`: column `c` is place `c` of the
    query's window, first the sinks, seen once they have left its segments, then kept tokens, then the segments, the query's
    own last.
    """
    tokens, layout, rule = call.tokens, call.layout, call.rule
    if layout.kept_tokens and not call.scored:
        tokens = tokens._replace(score=first_scores(rule.keep_score, tokens.key, tokens.score))
    call = call._replace(tokens=tokens, state=call.state.checked_for(tokens, layout.places, rule.normalised))
    return choose(call, BACKENDS)[0].run(call)


def attend_grid(call: AttentionCall) -> Attended:
    """[`attend`] for any call but one of a token per row."""
    tokens, gate, layout, rule, softmax, state, return_state, _, scored = call
    local_segments, sinks, kv_heads, width = layout.local_segments, layout.sink_tokens, *tokens.key.shape[1::2]
    keeping = None
    if layout.most_kept or (layout.kept_tokens and return_state):
        keeping = KeptInGrid(tokens, layout, rule, state, scored)
    all_queries = layout.to_grid(tokens.query, None)
    # Keys, values and log weights; what leaves the windows of a group, w segments later, is what the memory takes in
    given = zip(tokens[1:4], state.windows(), strict=False)
    grids = [None if new is None else layout.to_grid(new, window) for new, window in given]
    size = _group_size(layout, tokens.key, softmax)
    memory, normaliser, start, dtype = state.memory, state.normaliser, state.start(), state.memory.dtype
    gate = gate.to(dtype)[:, None, None]
    first_tokens = []
    if sinks:
        pairs = zip(grids, (state.local_key, state.local_value), strict=False)
        first_tokens = [layout.sinks(*pair).expand(-1, layout.segments, -1, -1, -1).transpose(2, 3) for pair in pairs]
    queries_of, *delayed = [_groups(all_queries, size), *(_groups(grid, size, local_segments) for grid in grids)]
    outputs, weights = [], None
    for number, begin in enumerate(range(0, layout.segments, size)):
        end = min(begin + size, layout.segments)
        queries = queries_of[number].transpose(2, 3).contiguous()
        windows = [_windows(groups[number : number + 2], end - begin, local_segments) for groups in delayed[:2]]
        leaving: Any = [window[..., : layout.slots, :] for window in windows] if local_segments else windows
        log_weight = None if grids[2] is None else delayed[2][number][:, : end - begin].transpose(2, 3)
        written: Any = None if layout.written is None else layout.written[:, begin:end, None, :, None]
        if sinks:
            windows = [torch.cat([p[:, begin:end], window], 3) for p, window in zip(first_tokens, windows, strict=True)]
        keys, values = softmax.compared_keys(windows[0], layout.key_places), windows[1]
        compared = softmax.compared_queries(queries, layout.query_places)
        mask, left = layout.window_mask(begin, end), layout.left[:, begin:end]
        if keeping is not None:
            kept = left.clamp(max=layout.kept_tokens)
            keys = with_sinks_before(keys, windows[0], layout, kept, softmax)
            keeping.see(compared, keys, mask, begin, end, softmax)
            of_group = keeping.choose([*leaving, log_weight], written[:, :, 0, :, 0], begin, end)
            keys, values, mask = of_group.visible(keys, values, mask, layout.most_kept, kept, softmax)
            *leaving, log_weight, evicted = of_group.evicted()
            written = evicted.unsqueeze(-1)
        local, log_sum, weights = window_attention(compared, keys, values, mask, softmax, rule.shared)

        with torch.autocast(tokens.key.device.type, enabled=False):
            query_features = rule.query_features(queries.to(dtype)).unflatten(2, (kv_heads, -1)).flatten(3, 4)
            parts = rule.written(leaving[0].to(dtype), leaving[1].to(dtype), log_weight, written)
            before, (memory, normaliser) = rule.states(parts, memory, normaliser, start, layout.continues(begin, end))
            found = rule.read(query_features, *before)
            read, mass = (tensor.unflatten(3, (-1, layout.slots)).flatten(2, 3) for tensor in found)
            log_sum = None if log_sum is None else log_sum.unsqueeze(-1)
            share = memory_weight(gate, mass, log_sum, width, rule.eps)
            if state.start_memory is None:  # there is nothing to read where the memory is empty
                share = share * (left > layout.kept_tokens)[:, :, None, None, None]
            outputs.append(mix(local, read, share).transpose(2, 3))
    output = layout.from_grid(outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1))
    weights = None if weights is None else _weights_per_token(weights, layout)
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


def _is_step(call: AttentionCall) -> tuple[bool, str]:
    fits = isinstance(call.layout, StepLayout)
    return fits, "plain torch, one token for every row" if fits else "not one token for every row"


BACKENDS = (
    TRITON,
    Backend("step", _is_step, attend_step),
    Backend("grid", lambda call: (not _is_step(call)[0], "plain torch, in a grid of segments"), attend_grid),
)


def _group_size(layout: GridLayout, key: Tensor, softmax: ScoreOptions) -> int:
    """Segments that are worked on at a time: all where their weights are returned, and in a graph, for the compiler keeps
    intermediate results small."""
    fits = layout.segments
    if not (softmax.written_out or torch.compiler.is_compiling()):
        elements = key[:, :, :1].numel() * layout.slots
        fits = GROUP_ELEMENTS.get(key.device.type, GROUP_ELEMENTS["cuda"]) // elements
    return max(1, fits, layout.local_segments)  # a window reaches into the group before at most


def _groups(grid: Tensor | None, size: int, early: int = 0) -> Sequence[Tensor]:
    """The grid in groups of `size` segments, each starting `early` segments earlier."""
    return () if grid is None else (F.pad(grid, (0,) * 6 + (early, 0)) if early else grid).split(size, 1)


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


def initial_state(
    tokens: Projections, window: tuple[int, int, int, int], rule: MemoryRule, **start: Any
) -> InfiniState:
    """[`InfiniState.initial`] for such tokens; `start`: as there, or nothing."""
    options: dict[str, Any] = {"log_weights": 0 if tokens.log_weight is None else rule.rates}
    options |= {"normalised": rule.normalised, "scores": len(KEEP_SCORES[rule.keep_score])}
    return InfiniState.initial(tokens.key, tokens.value, *window, **options, **start)
