"""Any call but one of a token per row, by plain torch: the grid of segments in groups, of which the
intermediate results fit into the cache (CPU), or which need few kernel launches (GPU).

Shapes: the grid of the layout, `[B, S, C, H, D]`, is cut into groups `[B, N, H, C, D]` of `N`
segments, heads before tokens, so that every product is one of contiguous matrices. `W` slots in a
segment's window.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from ..equations import ScoreOptions, window_attention
from ..keeping.choose import (
    add_received,
    choosable_segments,
    choose_leaving,
    grid_scores,
    scored,
    sinks_before_kept,
    with_kept,
)
from ..layout.grid import GridLayout
from ..state import Attended, AttentionCall, InfiniState, Tokens

GROUP_ELEMENTS = {"cpu": 2**20, "cuda": 2**26}  # of the keys


def attend_grid(call: AttentionCall) -> Attended:
    """[`attend`] for any call but one of a token per row, by plain torch, one group of segments
    after the other."""
    query, tokens, gate, layout, rule, softmax, state, *_ = call
    (kept, scores), outputs, all_weights = kept_before(call), [], []
    size, sinks = group_size(layout, tokens.key), layout.window.sink_tokens
    queries_of = layout.to_grid(query, None).transpose(2, 3).split(size, 1)
    pairs: Any = zip(tokens[:3], state.windows(), strict=False)  # of keys, values and log weights
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
        if kept is not None:
            add_received(call, scores, (compared, keys, mask), begin, end)
            seen, kept, evicted = choose_leaving(call, kept, scores, leaving, begin, end)
            if evicted is not None:
                leaving, written = evicted[:3], evicted.position >= 0
            keys, values, mask = with_kept(keys, values, mask, seen, layout, softmax, begin, end)
            del seen, evicted
        local, weights = window_attention(compared, keys, values, mask, softmax)
        all_weights.append(weights)
        if rule is not None:
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
    return output, state_after(call, kept, scores, after) if call.return_state else None, weights


def kept_before(call: AttentionCall) -> tuple[Tokens | None, Any]:
    """What is kept before the call, and [`grid_scores`]; both `None` where nothing is kept while
    the call is computed, nor asked for after it."""
    layout = call.layout
    if not (layout.most_kept or (layout.window.kept_tokens and call.return_state)):
        return None, None
    return Tokens.kept_in(call.state, layout.window), grid_scores(call)


def compared_window(
    query: Tensor, key: Tensor, layout: GridLayout, softmax: ScoreOptions, begin: int, end: int
) -> tuple[Tensor, Tensor, Any]:
    """Queries and keys of the windows of segments `begin … end`, sinks first, as they are
    compared, and which see which; without kept tokens. `query`: `[B, N, H, C, D]`; `key`:
    `[B, N, K, W, D]`; `layout`, `softmax`: of the call."""
    first, sinks = functools.partial(layout.first_numbers, begin, end), layout.window.sink_tokens
    compared = softmax.compared(key, layout.key_places(), first)
    if layout.window.kept_tokens and sinks:
        turned = sinks_before_kept(key[..., :sinks, :], layout, softmax, begin, end)
        compared = torch.cat([turned, compared[..., sinks:, :]], 3)
    query = softmax.compared(query, layout.query_places, first)
    return query, compared, layout.window_mask(begin, end)


def state_after(
    call: AttentionCall, kept: Tokens | None, scores: Any, memory_and_normaliser: Any
) -> InfiniState:
    """The state after a call that ended with `memory_and_normaliser`, and, where tokens are
    `kept`, with these and these `scores`, [`grid_scores`]."""
    tokens, layout, state = call.tokens, call.layout, call.state
    if kept is not None:
        tokens, state = scored(call, scores)
    state = state.map_windows(lambda window, new: layout.next_window(new, window), tokens)
    state = state if kept is None else kept.into(state, layout.window)
    # Copies, for these are two of many states that the call made, and would keep all of them in
    # memory
    memory, normaliser = (part.clone() for part in memory_and_normaliser)
    return state.after(layout, memory=memory, normaliser=normaliser)


def group_size(layout: GridLayout, key: Tensor) -> int:
    """Segments of a `layout` that are worked on at a time: all in a graph, for the compiler
    keeps intermediate results small. `key`: `[batch, kv_heads, tokens, head_dim]`."""
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
