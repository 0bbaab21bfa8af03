"""One more token for every row: the step that `generate` repeats, on the window itself instead of a grid."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from .local import eager_attention
from .memory import delta_states, linear_states, memory_weight
from .state import InfiniState
from .steps import StepLayout


def attend_step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gate: Tensor,
    layout: StepLayout,
    state: InfiniState,
    *,
    update_rule: str,
    features: Callable[[Tensor], Tensor],
    shared: bool,
    memory_query: Tensor,
    memory_key: Tensor,
    scaling: float,
    dropout: float,
    eps: float,
    eager: bool,
    upcast: bool,
    in_place: bool,
) -> tuple[Tensor, InfiniState, Tensor | None]:
    """Equations 2 to 5 for one token per row; arguments as in [`attend`], tensors `[batch, heads, 1, head_dim]`;
    `features` is the feature map itself, `shared` whether window and memory have one normaliser.

    `in_place` overwrites the window of the given state instead of copying it.
    """
    separate = state.local_memory_key is not None
    keys = _put(state.local_key, key, layout, in_place)
    values = _put(state.local_value, value, layout, in_place)
    memory_keys = _put(state.local_memory_key, memory_key, layout, in_place) if separate else keys
    seen_keys, seen_values = (tensor[:, :, layout.begin : layout.end] for tensor in (keys, values))
    group = query.shape[1] // key.shape[1]
    weights = log_sum = None
    if eager or shared:
        seen_keys, seen_values = (t.repeat_interleave(group, 1) for t in (seen_keys, seen_values))
        options = {"scaling": scaling, "dropout": dropout, "return_log_sum": shared, "upcast": upcast}
        output, weights, log_sum = eager_attention(query, seen_keys, seen_values, layout.visible, **options)
        weights = F.pad(weights, (layout.begin, keys.shape[2] - layout.end)) if eager else None
    else:
        output = F.scaled_dot_product_attention(
            query, seen_keys, seen_values, layout.visible, dropout, scale=scaling, enable_gqa=group > 1
        )
    dtype = state.memory.dtype
    with torch.autocast(query.device.type, enabled=False):
        queries = features(memory_query.to(dtype)).unflatten(1, (key.shape[1], group)).squeeze(3)  # [B, K, G, D]
        numerator = queries @ state.memory
        denominator = (queries * state.normaliser.unsqueeze(2)).sum(-1, keepdim=True)
        read = (numerator / (denominator + eps)).flatten(1, 2).unsqueeze(2)
        mass, log_sum = (denominator.flatten(1, 2).unsqueeze(2), log_sum.unsqueeze(-1)) if shared else (None, None)
        share = memory_weight(gate.to(dtype)[None, :, None, None], mass, log_sum, key.shape[-1], eps)
        if state.start_memory is None:
            share = share * layout.filled.unsqueeze(-1)
        output = torch.lerp(output.to(dtype), read, share.expand_as(read)).to(output.dtype)
        memory, normaliser = _compress(features, memory_keys, values, layout, state, update_rule, eps)
    new_state = replace(
        state,
        memory=memory,
        normaliser=normaliser,
        local_key=layout.shift(keys),
        local_value=layout.shift(values),
        local_memory_key=layout.shift(memory_keys) if separate else None,
        local_skipped=layout.next_skipped,
        tokens_seen=layout.tokens_seen,
        last_position=layout.last_position,
    )
    return output, new_state, weights


def _put(window: Tensor, new: Tensor, layout: StepLayout, in_place: bool) -> Tensor:
    # The window of an initial state is one zero seen many times; one made in inference mode may be written only there.
    in_place = in_place and window.is_contiguous() and (torch.is_inference_mode_enabled() or not window.is_inference())
    window = window if in_place else window.clone(memory_format=torch.contiguous_format)
    window[layout.rows, :, layout.slots] = new[:, :, 0].to(window.dtype)
    return window


def _compress(features, keys, values, layout, state, update_rule, eps):
    """Writes the oldest segment of the rows that lose one into their memory."""
    if not layout.compressing:
        return state.memory, state.normaliser
    everyone = len(layout.compressing) == len(layout.rows)
    rows = slice(None) if everyone else torch.tensor(layout.compressing, device=keys.device)
    dtype = state.memory.dtype
    key = features(keys[rows, :, : layout.segment_length].to(dtype)).transpose(1, 2).unsqueeze(1)  # [B, 1, L, K, D]
    if layout.skipped is not None:
        key = key * ~layout.skipped[rows, None, : layout.segment_length, None, None]
    value = values[rows, :, : layout.segment_length].to(dtype).transpose(1, 2).unsqueeze(1)
    old = (state.memory[rows], state.normaliser[rows])
    start = (old[0][0], old[1][0])  # not reached: no document begins here
    if update_rule == "linear":
        memory, normaliser = linear_states(key, value, *old, start, None)
    else:
        memory, normaliser = delta_states(key, value, *old, start, None, eps)
    if everyone:
        return memory[:, -1], normaliser[:, -1]
    return state.memory.index_copy(0, rows, memory[:, -1]), state.normaliser.index_copy(0, rows, normaliser[:, -1])

