"""Local attention, memory and gate over the grid, one group of segments after the other (equations 2 to 5).

A group is as large as what lies between two products may be without leaving the cache (CPU), or as it takes to keep the
launches few (GPU). The state is handed on from group to group.

Shapes: the grid of the layout, `[B, S, C, H, D]`, is cut into *blocks* `[B, N, H, T, C, D]`: `N` steps of `T` segments,
heads before tokens, so that every product is one of contiguous matrices. `P = T · C` tokens make a step, with one state.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from .grid import SegmentLayout, pad_to
from .local import for_every_head, local_attention, local_weights
from .memory import Within, delta_states, linear_states, memory_weight, mix, read_memory
from .state import InfiniState

GROUP_ELEMENTS = {"cpu": 2**20, "cuda": 2**26}  # of the keys


def attend_grid(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gate: Tensor,
    layout: SegmentLayout,
    state: InfiniState,
    *,
    memory_query: Tensor | None,
    memory_key: Tensor | None,
    update_rule: str,
    features: Callable[[Tensor], Tensor],
    shared: bool,
    scaling: float,
    dropout: float,
    eps: float,
    eager: bool,
    return_weights: bool,
    upcast: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """[`infini_attention`] on grids `[B, S, C, heads, dim]`.

    Args:
        memory_query, memory_key: what the memory reads and writes; `None`: query and key.
        features: the feature map; shared: whether window and memory have one normaliser.
        eager: write the local softmax out.
        return_weights: likewise, all segments at a time, and compute the output from the weights as they are returned, so
            that a gradient reaches them.

    Returns:
        The output `[B, S, C, H, E]`, memory and normaliser after the last step, and, if asked for, the local weights
        `[B, H, tokens, (w + 1) * L]`: column `c` is slot `c` of the query's local window.
    """
    kept, segments, heads, kv_heads = layout.local_segments, layout.segments, query.shape[3], key.shape[3]
    step, group = _group_sizes(layout, key, update_rule)
    group = 0 if return_weights else group
    dtype = state.memory.dtype
    memory, normaliser = state.memory, state.normaliser
    if state.start_memory is None:
        start = (memory.new_zeros(memory.shape[1:]), normaliser.new_zeros(normaliser.shape[1:]))
    else:
        start = (state.start_memory.to(dtype), state.start_normaliser.to(dtype))
    gate = gate.to(dtype)[:, None, None]
    numbers, written = layout.segment_numbers(), layout.written()
    earlier_segments = None if step == 1 else _earlier_segments(step, layout.slots, heads // kv_heads, gate)

    # The windows of a group begin w segments before it; what leaves them is what the memory takes in
    keys, values, memory_keys = (
        None if grid is None else F.pad(grid, (0,) * 6 + (kept, 0)) if kept else grid for grid in (key, value, memory_key)
    )
    limits = [(0, segments)]
    if group:
        limits = [(begin, min(begin + group, segments)) for begin in range(0, segments, group)]
    query, keys, values, memory_query, memory_keys = (
        grid if grid is None else grid.split(group, 1) if group else (grid,)
        for grid in (query, keys, values, memory_query, memory_keys)
    )
    outputs, weights = [], None
    for number, (begin, end) in enumerate(limits):
        count, steady = end - begin, layout.in_full(begin, end)
        queries = _blocks(query[number], step).contiguous()
        leaving_keys, leaving_values = (_blocks(grids[number][:, :count], step).contiguous() for grids in (keys, values))
        key_window, value_window = leaving_keys, leaving_values
        if kept:
            key_window, value_window = (_window(grids[number : number + 2], count, kept, step) for grids in (keys, values))
        memory_queries = queries if memory_query is None else _blocks(memory_query[number], step)
        if memory_keys is not None:
            leaving_keys = _blocks(memory_keys[number][:, :count], step).contiguous()
        mask = None if steady or not kept else _window_mask(numbers[:, begin:end], layout, step)
        options = {"scaling": scaling, "dropout": dropout, "return_log_sum": shared, "upcast": upcast}
        if return_weights:
            weights, log_sum = local_weights(queries, key_window, mask, dtype=value.dtype, **options)
            weights = _weights_per_token(weights, layout)
            local = _weights_in_blocks(weights, layout, step) @ for_every_head(value_window, queries)
        else:
            local, log_sum = local_attention(queries, key_window, value_window, mask, eager=eager, **options)
        with torch.autocast(key.device.type, enabled=False):
            local = local.flatten(3, 4)
            key_features = features(leaving_keys.flatten(3, 4).to(dtype))
            step_values = leaving_values.flatten(3, 4).to(dtype)
            query_features = features(memory_queries.flatten(3, 4).to(dtype))
            query_features = query_features.unflatten(2, (kv_heads, -1)).flatten(3, 4)
            if _is_padded(count, step) or (written is not None and not steady):  # σ(0) is not zero
                real = key_features.new_ones(1, count, layout.slots) if written is None else written[:, begin:end]
                key_features = key_features * _by_step(real, step)
            borders = layout.borders(begin, end)
            if update_rule == "linear":
                states = linear_states(key_features, step_values, memory, normaliser, start, borders)
            else:
                states = delta_states(key_features, step_values, memory, normaliser, start, borders, eps)
            memory, normaliser = states.last_memory, states.last_normaliser
            within = None if step == 1 else Within(key_features, step_values, earlier_segments)
            read, mass = (
                tensor.unflatten(3, (heads // kv_heads, -1)).flatten(2, 3)
                for tensor in read_memory(query_features, states.memory, states.normaliser, eps, within)
            )
            log_sum = log_sum.flatten(3, 4).unsqueeze(-1) if shared else None
            weight = memory_weight(gate, mass, log_sum, key.shape[-1], eps)
            if state.start_memory is None and not steady:
                filled = (layout.held[:, begin:end] > 0).unsqueeze(-1).expand(-1, -1, layout.slots)
                weight = weight * _by_step(filled, step)
            mixed = mix(local, read, weight)
        outputs.append(mixed.unflatten(3, (step, -1)).permute(0, 1, 3, 4, 2, 5))
    output = (outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)).flatten(1, 2)[:, :segments]
    return output, memory, normaliser, weights


def _weights_per_token(weights: Tensor, layout: SegmentLayout) -> Tensor:
    """`[B, N, H, T, C, (w + 1) * C]` as `[B, H, tokens, (w + 1) * L]`, zero for padding."""
    grid = weights.permute(0, 1, 3, 4, 2, 5).flatten(1, 2)[:, : layout.segments]
    grid = grid.unflatten(-1, (layout.local_segments + 1, layout.slots))
    return layout.from_grid(F.pad(grid, (0, layout.segment_length - layout.slots)).flatten(-2))


def _weights_in_blocks(weights: Tensor, layout: SegmentLayout, step: int) -> Tensor:
    """The way back of [`_weights_per_token`], zero for slots without a new token."""
    grid = layout.to_grid(weights, None).unflatten(-1, (layout.local_segments + 1, layout.segment_length))
    return _blocks(grid[..., : layout.slots].flatten(-2), step)


def _group_sizes(layout: SegmentLayout, key: Tensor, update_rule: str) -> tuple[int, int]:
    """Segments in a step (one state each) and in a group (worked on at a time), the second a multiple of the first; 0: all
    in one group, as in a graph, where the compiler sees to it that what lies between the products stays small.

    Segments shorter than a head is wide are joined to steps of at least that many tokens, so that the states never hold
    more than the tokens do. The delta rule, and rows whose documents may change inside a step, need a state per segment.
    """
    step = 1
    if update_rule == "linear" and not layout.packed:
        step = -(-key.shape[-1] // layout.slots)
        if isinstance(layout.segments, int):  # not where torch.export leaves it open
            step = max(1, min(step, layout.segments))
    if torch.compiler.is_compiling():
        return step, 0
    elements = key[:, :1].numel() * step
    fits = max(1, GROUP_ELEMENTS.get(key.device.type, GROUP_ELEMENTS["cuda"]) // elements)
    return step, step * max(fits, -(-layout.local_segments // step))  # a window reaches into the group before at most


def _is_padded(count: int, step: int) -> bool:
    """Whether so many segments leave the last step with empty ones; where torch.export leaves the number open: yes."""
    return step > 1 and not (isinstance(count, int) and count % step == 0)


def _steps(part: Tensor, step: int) -> Tensor:
    """`[B, s, …]` as `[B, N, T, …]`, T = step, with empty segments at the end where s is no multiple of it."""
    steps = -(-part.shape[1] // step)
    return pad_to(part, steps * step).unflatten(1, (steps, step))


def _blocks(part: Tensor, step: int) -> Tensor:
    """`[B, s, C, H, D]` as `[B, N, H, T, C, D]`."""
    return _steps(part, step).permute(0, 1, 4, 2, 3, 5)


def _window(groups: Sequence[Tensor], count: int, kept: int, step: int) -> Tensor:
    """The windows of a group's `count` segments, `[B, N, K, T, W, D]`.

    Args:
        groups: a group of the grid that begins w = `kept` segments early, and the next if there is one, which the last
            windows reach into.
    """
    reach = groups[0] if groups[0].shape[1] >= count + kept else torch.cat([groups[0], groups[1][:, :kept]], 1)
    return torch.cat([_blocks(reach[:, shift : shift + count], step) for shift in range(kept + 1)], 4)


def _by_step(slots: Tensor, step: int) -> Tensor:
    """`[B or 1, s, C]` as `[B or 1, N, 1, P, 1]`."""
    return _steps(slots, step).flatten(2, 3)[:, :, None, :, None]


def _window_mask(numbers: Tensor, layout: SegmentLayout, step: int) -> Tensor:
    """Which slots of its window each query sees, `[B or 1, N, 1, T, C, W]` bool; numbers of the segments: `[B or 1, s]`."""
    kept, slots = layout.local_segments, layout.slots
    places = torch.arange((kept + 1) * slots, device=numbers.device)
    begun = numbers[..., None, None] >= kept - places // slots  # the document has a segment so many before its own
    mask = begun & (places <= places[kept * slots :, None])
    hidden = _steps(~mask, step)  # the empty segments at the end hide nothing: a softmax over nothing is no number
    return ~hidden.unsqueeze(2)


def _earlier_segments(step: int, slots: int, groups: int, like: Tensor) -> Tensor:
    """`[groups * P, P]` of 0 and 1, with dtype and device of `like`: which tokens of a step (columns) lie in an earlier
    segment than the query (row)."""
    segment = torch.arange(step, device=like.device).repeat_interleave(slots)
    return (segment[None, :] < segment[:, None]).to(like.dtype).repeat(groups, 1)
