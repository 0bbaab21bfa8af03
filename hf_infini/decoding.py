"""One more token for every row: the step that `generate` repeats, on the window itself instead of a grid."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from .local import softmax_weights
from .memory import delta_states, linear_states, memory_weight, read_memory
from .state import InfiniState
from .steps import StepLayout, TensorStep


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
    state = layout.opened(state)
    keys = layout.put(state.local_key, key, in_place)
    values = layout.put(state.local_value, value, in_place)
    memory_keys = layout.put(state.local_memory_key, memory_key, in_place) if separate else keys
    seen_keys, seen_values = (tensor[:, :, layout.begin : layout.end] for tensor in (keys, values))
    group = query.shape[1] // key.shape[1]
    weights = log_sum = None
    if eager or shared:
        seen_keys, seen_values = (t.repeat_interleave(group, 1) for t in (seen_keys, seen_values))
        options = {"scaling": scaling, "dropout": dropout, "return_log_sum": shared, "upcast": upcast}
        weights, log_sum = softmax_weights(query, seen_keys, layout.visible, dtype=values.dtype, **options)
        if layout.real is not None:
            weights = weights.masked_fill(~layout.real[:, :, None, None], 0)
        weights = F.pad(weights, (layout.begin, keys.shape[2] - layout.end))  # as they are returned: in the output's graph
        output = weights[..., layout.begin : layout.end] @ seen_values
    else:
        output = F.scaled_dot_product_attention(
            query, seen_keys, seen_values, layout.visible, dropout, scale=scaling, enable_gqa=group > 1
        )
    dtype = state.memory.dtype
    with torch.autocast(query.device.type, enabled=False):
        queries = features(memory_query.to(dtype)).unflatten(1, (key.shape[1], group)).squeeze(3)  # [B, K, G, D]
        one_step = (tensor.unsqueeze(1) for tensor in (queries, state.memory, state.normaliser))
        read, mass = (tensor.flatten(1, 3).unsqueeze(2) for tensor in read_memory(*one_step, eps))  # [B, H, 1, E or 1]
        log_sum = log_sum.unsqueeze(-1) if shared else None
        share = memory_weight(gate.to(dtype)[None, :, None, None], mass, log_sum, key.shape[-1], eps)
        if state.start_memory is None:
            share = share * layout.filled.unsqueeze(-1)
        output = torch.lerp(output.to(dtype), read, share.expand_as(read)).to(output.dtype)
        memory, normaliser = _compress(features, memory_keys, values, layout, state, update_rule, eps)
    if layout.real is not None:
        output = output.masked_fill(~layout.real[:, :, None, None], 0)
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
        memory_tokens=layout.memory_tokens,
    )
    return output, new_state, weights


def _compress(features, keys, values, layout, state, update_rule, eps):
    """Writes the oldest segment of the rows that lose one into their memory."""
    length, memory, normaliser = layout.segment_length, state.memory, state.normaliser
    write = partial(_written, features=features, update_rule=update_rule, eps=eps)
    if isinstance(layout, TensorStep):
        return _compress_in_graph(write, keys[:, :, :length], values[:, :, :length], layout, memory, normaliser)
    if not layout.compressing:
        return memory, normaliser
    everyone = len(layout.compressing) == len(memory)
    rows = slice(None) if everyone else torch.tensor(layout.compressing, device=keys.device)
    skipped = None if layout.skipped is None else layout.skipped[rows, :length]
    new = write(keys[rows, :, :length], values[rows, :, :length], skipped, memory[rows], normaliser[rows])
    if everyone:
        return new
    return memory.index_copy(0, rows, new[0]), normaliser.index_copy(0, rows, new[1])


def _compress_in_graph(write, keys, values, layout, memory, normaliser):
    """The same where the rows are not known: computed for all of them, and in those calls alone in which one needs it."""
    skipped = torch.zeros_like(layout.here[:, 0, :, 0]) if layout.skipped is None else layout.skipped

    def compress(keys, values, skipped, rows, memory, normaliser):
        new = write(keys, values, skipped, memory, normaliser)
        return torch.where(rows[:, None, None, None], new[0], memory), torch.where(rows[:, None, None], new[1], normaliser)

    def keep(keys, values, skipped, rows, memory, normaliser):
        return memory.clone(), normaliser.clone()

    anyone = layout.compressing.any()
    operands = (keys, values, skipped[:, : layout.segment_length], layout.compressing, memory, normaliser)
    if torch.compiler.is_compiling():
        return torch.cond(anyone, compress, keep, operands)
    return (compress if anyone else keep)(*operands)


def _written(keys, values, skipped, memory, normaliser, *, features, update_rule, eps):
    """Memory and normaliser after a segment, keys and values `[batch, kv_heads, L, dim]`, skipped `[batch, L]` or `None`."""
    dtype = memory.dtype
    key = features(keys.to(dtype)).unsqueeze(1)  # [B, 1, K, L, D]
    if skipped is not None:
        key = key * ~skipped[:, None, None, :, None]
    value = values.to(dtype).unsqueeze(1)
    start = (memory[0], normaliser[0])  # not reached: no document begins here
    if update_rule == "linear":
        states = linear_states(key, value, memory, normaliser, start, None)
    else:
        states = delta_states(key, value, memory, normaliser, start, None, eps)
    return states.last_memory, states.last_normaliser
