"""One more token for every row, the step that `generate` repeats: equations 2 to 5 on the window itself instead of a grid.

A step writes its key and value into the row's next slot of the window and attends to the window and the memory; a row whose
segment is full then writes the oldest segment of its window into the memory, and moves the window one segment on.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .kept import Kept, keep_best
from .layout.step import StepLayout
from .memory import KEEP_SCORES, MemoryRule, memory_weight, mix
from .state import WINDOWS, Attended, AttentionCall, InfiniState
from .window import ScoreOptions, masked_scores, softmax_weights


def attend_step(call: AttentionCall) -> Attended:
    """[`attend`] for one token per row, which returns the weights wherever they are written out."""
    tokens, gate, layout, rule, softmax, state, *_, in_place, _ = call
    kv_heads, width = tokens.key.shape[1], tokens.key.shape[3]
    state = _reset_new_documents(state, layout.restart)
    state = state.map_windows(lambda window, new: layout.put(window, new, in_place), tokens)
    keys, values, *_ = state.windows()

    query = softmax.compared_queries(tokens.query, layout.slot.unsqueeze(1))
    seen_keys, seen_values = softmax.compared_keys(keys[:, :, layout.seen], layout.turned), values[:, :, layout.seen]
    if state.local_score is not None:
        scores = state.local_score.detach()  # which `put` has allowed to write into
        if layout.new_sinks is not None:
            scores[:, :, : layout.sink_tokens] = 0  # they need none
        if "attention" in KEEP_SCORES[rule.keep_score]:
            _add_received(scores, query, seen_keys, layout, softmax)
        state = replace(state, local_score=scores)
    heads_per_key = tokens.query.shape[1] // kv_heads
    weights = log_sum = None
    if softmax.written_out or softmax.softcap or rule.shared:
        seen_keys, seen_values = (tensor.repeat_interleave(heads_per_key, 1) for tensor in (seen_keys, seen_values))
        weights, log_sum = softmax_weights(query, seen_keys, layout.visible, softmax, values.dtype, rule.shared)
        if layout.real is not None:
            weights = weights.masked_fill(~layout.real[:, :, None, None], 0)
        output = weights @ seen_values
        weights = F.pad(weights, (0, layout.places - layout.seen.stop))
    else:
        options = {"dropout_p": softmax.dropout, "scale": softmax.scaling, "enable_gqa": heads_per_key > 1}
        output = F.scaled_dot_product_attention(query, seen_keys, seen_values, layout.visible, **options)

    dtype = state.memory.dtype
    with torch.autocast(keys.device.type, enabled=False):
        queries = rule.query_features(tokens.query.to(dtype))
        queries = queries.unflatten(1, (kv_heads, heads_per_key)).squeeze(3)  # [B, K, R, D]
        found = rule.read(queries.unsqueeze(1), state.memory.unsqueeze(1), state.normaliser.unsqueeze(1))
        read, mass = (tensor.flatten(1, 3).unsqueeze(2) for tensor in found)  # [B, H, 1, E or 1]
        log_sum = None if log_sum is None else log_sum.unsqueeze(-1)
        share = memory_weight(gate.to(dtype)[None, :, None, None], mass, log_sum, width, rule.eps)
        if state.start_memory is None:
            share = share * layout.filled.unsqueeze(-1)
        output = mix(output, read, share)
        state = _with_segments_complete(rule, state, layout)
    if layout.real is not None:
        output = output.masked_fill(~layout.real[:, :, None, None], 0)
    return output, state.after(layout), weights


def _add_received(
    scores: Tensor, query: Tensor, keys: Tensor, layout: StepLayout, softmax: ScoreOptions
) -> None:
    """Adds the attention that the window's tokens receive from the query to their scores, `[B, K, places, R]`; `keys`: what
    it sees, as they are compared."""
    query = query.unflatten(1, (keys.shape[1], -1)).squeeze(3)  # [B, K, heads of a group, D]
    received = masked_scores(query.detach(), keys.detach(), layout.unkept, softmax).softmax(-1, dtype=scores.dtype).mean(2)
    received = received if layout.real is None else received * layout.real.unsqueeze(2)
    scores[:, :, layout.ahead : layout.seen.stop, 0] += received[:, :, layout.ahead :]


def _reset_new_documents(state: InfiniState, restart: Tensor | None) -> InfiniState:
    """The state with an empty window, and the memory that documents start from, in the rows that begin one."""
    if restart is None:
        return state
    begins = restart[:, :, None, None]
    start_memory, start_normaliser = state.start()
    kept = None if state.kept_position is None else state.kept_position.masked_fill(begins[..., 0], -1)
    return replace(
        state.map_windows(lambda window: window.masked_fill(begins, 0)),
        memory=torch.where(begins, start_memory, state.memory),
        normaliser=torch.where(begins[..., 0], start_normaliser, state.normaliser),
        kept_position=kept,
    )


def _with_segments_complete(rule: MemoryRule, state: InfiniState, layout: StepLayout) -> InfiniState:
    """The state whose rows that complete a segment have written the oldest one of their window, and moved the window on."""
    if layout.completing is None:
        return state

    def complete(taken_in, numbers, *parts):
        rows, kept = replace(state, **dict(zip(old, parts, strict=True))), None
        oldest: Any = (None if window is None else layout.oldest(window).unsqueeze(1) for window in rows.windows())
        keys, values, log_weights, scores = oldest  # [B, 1, K, L, dim]
        mask, dtype = taken_in[:, None, None, :], rows.memory.dtype
        if layout.kept_tokens:
            number = numbers[:, None, None, :, None].expand_as(scores[..., :1])
            leaving, before = Kept(keys, values, log_weights, scores, number), Kept.of_state(rows, layout.kept_places)
            _, kept, evicted = keep_best(before, leaving, taken_in.unsqueeze(1), rule.keep_score, layout)
            keys, values, log_weights, _, number = evicted
            mask = number[..., 0] >= 0
        written = rule.written(keys.to(dtype), values.to(dtype), log_weights, mask.unsqueeze(-1))
        _, (memory, normaliser) = rule.states(written, rows.memory, rows.normaliser)
        rows = replace(rows.map_windows(layout.shift), memory=memory, normaliser=normaliser)
        rows = rows if kept is None else kept.into(rows, layout.kept_places)
        return tuple(getattr(rows, name) for name in old)

    def compute():
        return layout.in_complete_rows(complete, *old.values())

    def keep():
        return tuple(tensor.clone() for tensor in old.values())

    names = ("memory", "normaliser", *WINDOWS, "kept_position")
    old = {name: tensor for name in names if (tensor := getattr(state, name)) is not None}
    # A graph computes it for all rows, but only in calls in which one of them needs it
    new = torch.cond(layout.completing.any(), compute, keep) if torch.compiler.is_compiling() else compute()
    return replace(state, **dict(zip(old, new, strict=True)))
