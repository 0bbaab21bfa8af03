"""Infini-attention: local softmax attention and a compressive memory, mixed by a gate for each head (equation 5)."""

from dataclasses import replace

import torch
from torch import Tensor

from .decoding import attend_step
from .grid import pad_to
from .local import local_attention, weights_per_token
from .memory import FEATURE_MAPS, delta_states, linear_states, memory_weight, read_memory, read_within_step
from .segments import SegmentLayout, segment_layout
from .state import InfiniState
from .steps import StepLayout

UPDATE_RULES = ("linear", "delta")
NORMALISERS = ("separate", "shared")
EPS = 1e-6

# Elements of the keys that the memory works on at a time: large enough to keep the launches few, small enough that what
# lies between two products stays in the cache (CPU) or is a small part of the device's memory.
GROUP_ELEMENTS = {"cpu": 2**20, "cuda": 2**26}


def infini_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gate: Tensor,
    segment_length: int,
    *,
    update_rule: str = "linear",
    feature_map: str = "elu",
    normaliser: str = "separate",
    local_segments: int = 0,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    memory_mask: Tensor | None = None,
    state: InfiniState | None = None,
    return_state: bool = False,
    max_documents: int | None = None,
    memory_query: Tensor | None = None,
    memory_key: Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    eps: float = EPS,
) -> Tensor | tuple[Tensor, InfiniState]:
    """Causal attention over short segments plus a memory of constant size for all before them (arXiv 2404.07143).

    Token `t` of a document lies in segment `s = t // segment_length`. It sees its own segment and `local_segments` before it
    by softmax (equation 2), and reads everything older from the memory (equation 3), which takes in a segment when it
    leaves that window (equation 4 or the delta rule). Per head, `sigmoid(gate)` is the memory's share (equation 5); while
    the memory is still empty, the output is the local attention alone.

    Args:
        query: `[batch, heads, tokens, head_dim]`.
        key: `[batch, kv_heads, tokens, head_dim]` and value `[batch, kv_heads, tokens, value_dim]`; query head `h` belongs
            to key/value head `h // (heads // kv_heads)`.
        gate: `[heads]`, the logit β.
        segment_length: tokens in a segment, L ≥ 1.
        update_rule: "linear" or "delta".
        feature_map: what makes positive features of the memory's queries and keys: "elu", ELU + 1 (the paper), or "exp".
        normaliser: "separate", one for the window and one for the memory, so that the gate alone sets the memory's share
            (the paper); or "shared", one for both, so that it also depends on what the token finds: [`memory_weight`].
        local_segments: earlier segments that the softmax sees, 0 in the paper.
        attention_mask: `[batch, tokens]`, 1 for real tokens; padding may stand anywhere, is in no segment, and its output
            is zero.
        position_ids: `[batch, tokens]`; a real token whose position does not go beyond the one before it starts a new
            document, with an empty window and the memory it started from.
        memory_mask: `[batch, tokens]`, 0 for tokens that are seen inside the window but never written into the memory.
        state: continues an earlier call; see [`InfiniState`].
        return_state: also return the state after the last token.
        max_documents: how many documents a row holds at most, where sizes must not depend on the data: [`segment_layout`].
        memory_query, memory_key: what the memory reads and writes, shaped like query and key; by default those (rotary
            models give the un-rotated ones).
        scaling: of the local dot products; by default `head_dim ** -0.5`.
        dropout: probability of dropping a local attention weight.
        eps: added to the denominator of equation 3.

    Returns:
        `[batch, heads, tokens, value_dim]` in the value's dtype, and the state if asked for. Memory, normaliser and the
        division are float32 (float64 for float64 inputs) whatever the inputs are.

    Raises:
        ValueError: shapes, options or the state do not fit together; the message names them.
    """
    _check_arguments(query, key, value, gate, segment_length, local_segments)
    _check_choices(update_rule, feature_map, normaliser)
    _check_token_arguments(*query.shape[::2], attention_mask, memory_mask, position_ids)
    layout = segment_layout(
        query.shape[0],
        query.shape[2],
        segment_length,
        local_segments,
        attention_mask=attention_mask,
        position_ids=position_ids,
        memory_mask=memory_mask,
        state=state,
        max_documents=max_documents,
        device=query.device,
    )
    output, new_state, _ = attend(
        query,
        key,
        value,
        gate,
        layout,
        update_rule=update_rule,
        feature_map=feature_map,
        normaliser=normaliser,
        state=state,
        return_state=return_state,
        memory_query=memory_query,
        memory_key=memory_key,
        scaling=scaling,
        dropout=dropout,
        eps=eps,
    )
    return (output, new_state) if return_state else output


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gate: Tensor,
    layout: SegmentLayout | StepLayout,
    *,
    update_rule: str = "linear",
    feature_map: str = "elu",
    normaliser: str = "separate",
    state: InfiniState | None = None,
    return_state: bool = False,
    memory_query: Tensor | None = None,
    memory_key: Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    eps: float = EPS,
    return_weights: bool = False,
    upcast: bool = False,
    eager: bool = False,
    in_place: bool = False,
) -> tuple[Tensor, InfiniState | None, Tensor | None]:
    """[`infini_attention`] on a layout that is already made: what a model's layers call.

    Beyond its arguments: `eager` writes the local softmax out, `return_weights` returns its weights
    `[batch, heads, tokens, (local_segments + 1) * segment_length]` (column `c` is slot `c` of the query's window, which
    begins `local_segments` segments before its own), `upcast` runs it in float32; `in_place` allows a step of one token
    to overwrite the given state.
    """
    separate = memory_key is not None
    if state is None:
        state = InfiniState.initial(
            key, value, layout.segment_length, layout.local_segments, separate_memory_key=separate
        )
    _check_state(state, key, value, layout, separate)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    windows = (state.local_key, state.local_value, state.local_memory_key if separate else state.local_key)
    memory_query = query if memory_query is None else memory_query
    memory_key = key if memory_key is None else memory_key
    shared = normaliser == "shared"
    eager = eager or return_weights or upcast
    if isinstance(layout, StepLayout):
        return attend_step(
            query,
            key,
            value,
            gate,
            layout,
            state,
            update_rule=update_rule,
            features=FEATURE_MAPS[feature_map],
            shared=shared,
            memory_query=memory_query,
            memory_key=memory_key,
            scaling=scaling,
            dropout=dropout,
            eps=eps,
            eager=eager,
            upcast=upcast,
            in_place=in_place,
        )

    grids = [layout.to_grid(query, None)]
    for new, window in zip((key, value), windows, strict=False):
        grids.append(layout.to_grid(new, window))
    grid_query, grid_key, grid_value = grids
    local, weights, log_sum = local_attention(
        grid_query,
        grid_key,
        grid_value,
        layout,
        scaling=scaling,
        dropout=dropout,
        return_weights=eager,
        return_log_sum=shared,
        upcast=upcast,
    )
    grid_memory_query = layout.to_grid(memory_query, None) if memory_query is not query else grid_query
    grid_memory_key = layout.to_grid(memory_key, windows[2]) if separate else grid_key
    output, memory, memory_normaliser = _mix_memory(
        local,
        log_sum,
        gate,
        grid_memory_query,
        grid_memory_key,
        grid_value,
        layout,
        state,
        update_rule,
        FEATURE_MAPS[feature_map],
        eps,
    )
    output = layout.from_grid(output)
    weights = weights_per_token(weights, layout) if return_weights else None
    if not return_state:
        return output, None, weights
    new_state = replace(
        state,
        memory=memory,
        normaliser=memory_normaliser,
        local_key=layout.next_window(key, state.local_key),
        local_value=layout.next_window(value, state.local_value),
        local_memory_key=layout.next_window(memory_key, state.local_memory_key) if separate else None,
        local_skipped=layout.next_skipped,
        tokens_seen=layout.tokens_seen,
        last_position=layout.last_position,
    )
    return output, new_state, weights


def _mix_memory(local, log_sum, gate, query, key, value, layout, state, update_rule, features, eps):
    """Equations 3 to 5 over the grid: reads the memory for every segment and mixes it into the local attention.

    Works through groups of segments, so that what lies between the products stays small; the state is handed on from group
    to group. Returns the output `[batch, segments, slots, heads, value_dim]`, the memory and the normaliser at the end.
    """
    dtype = state.memory.dtype
    kv_heads = key.shape[3]
    memory, normaliser = state.memory, state.normaliser
    if state.start_memory is None:
        start = (memory.new_zeros(memory.shape[1:]), normaliser.new_zeros(normaliser.shape[1:]))
    else:
        start = (state.start_memory.to(dtype), state.start_normaliser.to(dtype))
    gate = gate.to(dtype)
    filled = None if state.start_memory is not None else layout.segment_numbers() > layout.local_segments
    written = layout.written()
    step, group = _group_sizes(layout, key, update_rule)
    outputs = []
    with torch.autocast(key.device.type, enabled=False):
        key, late_value = layout.delay(key), layout.delay(value)
        pieces = [_groups(tensor, group) for tensor in (local, query, key, late_value)]
        log_sums = [None] * len(pieces[0]) if log_sum is None else _groups(log_sum, group)
        for number, (local_part, query_part, key_part, value_part) in enumerate(zip(*pieces, strict=True)):
            begin, count = number * group, local_part.shape[1]
            key_part = features(key_part.to(dtype))
            value_part = value_part.to(dtype)
            query_part = features(query_part.to(dtype)).unflatten(3, (kv_heads, -1))
            if written is not None:
                key_part = key_part * written[:, begin : begin + count, :, None, None]
            borders = layout.borders(begin, begin + count)
            query_part, key_part, value_part = (_join(t, step) for t in (query_part, key_part, value_part))
            if update_rule == "linear":
                memories, normalisers = linear_states(key_part, value_part, memory, normaliser, start, borders)
            else:
                memories, normalisers = delta_states(key_part, value_part, memory, normaliser, start, borders, eps)
            memory, normaliser = memories[:, -1], normalisers[:, -1]
            numerator, denominator = read_memory(query_part, memories[:, :-1], normalisers[:, :-1])
            if step > 1:
                visible = _earlier_segments(step, layout.slots, key.device)
                within = read_within_step(query_part, key_part, value_part, visible)
                numerator, denominator = numerator + within[0], denominator + within[1]
            read = _split(numerator / (denominator + eps).unsqueeze(-1), count, layout.slots)
            mass = None if log_sum is None else _split(denominator, count, layout.slots)
            share = memory_weight(gate, mass, log_sums[number], key.shape[-1], eps)  # [heads] or [B, S, C, heads]
            weight = share if filled is None else share * filled[:, begin : begin + count, None, None]
            outputs.append(torch.lerp(local_part.to(dtype), read, weight.unsqueeze(-1).expand_as(read)).to(local.dtype))
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)), memory, normaliser


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
    return step, step * max(1, GROUP_ELEMENTS.get(key.device.type, GROUP_ELEMENTS["cuda"]) // elements)


def _groups(grid: Tensor, group: int) -> tuple[Tensor, ...]:
    return grid.split(group, 1) if group else (grid,)


def _join(grid: Tensor, step: int) -> Tensor:
    """`[B, S, C, …]` to `[B, S / step, step * C, …]`, with empty segments added at the end where S is no multiple."""
    if step == 1:
        return grid
    steps = -(-grid.shape[1] // step)
    return pad_to(grid, steps * step).unflatten(1, (steps, step)).flatten(2, 3)


def _split(steps: Tensor, segments: int, slots: int) -> Tensor:
    """`[B, S / step, step * C, H, G, …]` to `[B, S, C, H * G, …]`: [`_join`] undone, for results of query heads."""
    return steps.flatten(3, 4).flatten(1, 2)[:, : segments * slots].unflatten(1, (segments, slots))


def _earlier_segments(step: int, slots: int, device: torch.device) -> Tensor:
    """`[step * slots, step * slots]` bool: which tokens of a step lie in an earlier segment than the query's."""
    segment = torch.arange(step, device=device).repeat_interleave(slots)
    return segment[None, :] < segment[:, None]


def _check_arguments(query, key, value, gate, segment_length, local_segments) -> None:
    if query.dim() != 4 or key.dim() != 4 or value.dim() != 4:
        shapes = ", ".join(str(list(tensor.shape)) for tensor in (query, key, value))
        raise ValueError(f"query, key and value must be [batch, heads, tokens, head_dim], got {shapes}.")
    batch, heads, tokens, head_dim = query.shape
    if key.shape[0] != batch or key.shape[2:] != (tokens, head_dim) or value.shape[:3] != key.shape[:3]:
        raise ValueError(
            f"key {list(key.shape)} and value {list(value.shape)} must agree with query {list(query.shape)} in batch, "
            "tokens and head_dim, and with each other in heads."
        )
    if heads % key.shape[1]:
        raise ValueError(f"the {key.shape[1]} key/value heads must divide the {heads} query heads.")
    if gate.shape != (heads,):
        raise ValueError(f"gate must be [heads] = [{heads}], got {list(gate.shape)}.")
    if segment_length < 1 or local_segments < 0:
        raise ValueError(
            f"segment_length must be ≥ 1 and local_segments ≥ 0, got {segment_length} and {local_segments}."
        )


def _check_choices(update_rule: str, feature_map: str, normaliser: str) -> None:
    for name, given, allowed in (
        ("update_rule", update_rule, UPDATE_RULES),
        ("feature_map", feature_map, FEATURE_MAPS),
        ("normaliser", normaliser, NORMALISERS),
    ):
        if given not in allowed:
            raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {given!r}.")


def _check_token_arguments(batch, tokens, attention_mask, memory_mask, position_ids) -> None:
    for name, mask in (("attention_mask", attention_mask), ("memory_mask", memory_mask)):
        if mask is not None and mask.shape != (batch, tokens):
            raise ValueError(
                f"{name} must be [batch, tokens] = [{batch}, {tokens}], got {list(mask.shape)}. "
                "With a state it covers the new tokens alone."
            )
    if position_ids is not None and tuple(position_ids.shape) not in ((batch, tokens), (1, tokens)):
        raise ValueError(
            f"position_ids must be [batch, tokens] = [{batch}, {tokens}], got {list(position_ids.shape)}."
        )


def _check_state(state: InfiniState, key: Tensor, value: Tensor, layout: SegmentLayout, separate: bool) -> None:
    slots = (layout.local_segments + 1) * layout.segment_length
    wanted = (key.shape[0], key.shape[1], slots, key.shape[3])
    if tuple(state.local_key.shape) != wanted or state.local_value.shape[-1] != value.shape[-1]:
        raise ValueError(
            "the state does not fit this call: its window is [batch, kv_heads, (local_segments + 1) * segment_length, "
            f"head_dim] = {list(state.local_key.shape)}, the call needs {list(wanted)}."
        )
    if separate != (state.local_memory_key is not None):
        raise ValueError("memory_key must be given in every call of a sequence or in none; the state says otherwise.")
