"""One more token for every row, by plain torch: equations 2 to 5 on the window itself.

A row whose segment is full writes the oldest segment of its window into the memory, and moves the
window one segment on.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from ...options import Window
from ..equations import MemoryRule, are_few, masked_scores, product, softmax_weights
from ..keeping.choose import keep_best
from ..keeping.score import TokenScore
from ..layout.step import in_rows, without_oldest
from ..state import OF_LAYER, Attended, AttentionCall, InfiniState, Tokens


def attend_step(call: AttentionCall) -> Attended:
    """[`attend`] for a `call` of one token per row, which returns the weights wherever they are
    written out."""
    new_query, tokens, gate, layout, rule, softmax, state, keep_score, _, in_place, *_ = call
    own_scores = state.local_score

    def put(window: Tensor, new: Tensor) -> Tensor:
        # Scores add up. Where the call fails in a later layer they must be as they were, for a
        # second one: keys and values are written into the same slot again
        alone = window is own_scores and not torch.compiler.is_compiling()
        return layout.put(window, new, in_place and not alone)

    state = state.map_windows(put, tokens)
    keys, values, *_ = state.windows()

    query = softmax.compared(new_query, layout.slot.unsqueeze(1), layout.first_number)
    seen_keys, seen_values = (
        softmax.compared(keys[:, :, layout.seen], layout.turned, layout.first_number),
        values[:, :, layout.seen],
    )
    # The heads of a group as queries of one head: all see the same, and no kernel has to repeat the
    # keys
    grouped = query.reshape(len(query), keys.shape[1], -1, query.shape[-1])
    if state.local_score is not None:
        scores = state.local_score.detach()  # which `put` has allowed to write into
        add_received(call, scores, grouped.detach(), seen_keys.detach())
        state = state.having(local_score=scores)
    weights = None
    if softmax.written_out or softmax.softcap or are_few(grouped):
        weights = softmax_weights(grouped, seen_keys, layout.visible, softmax, values.dtype)
        if layout.real is not None:
            weights = weights.masked_fill(~layout.real[:, :, None, None], 0)
        output = product(weights, seen_values).to(values.dtype)
        weights = F.pad(weights, (0, layout.window.places - layout.seen.stop)).reshape(
            *query.shape[:3], -1
        )
    else:
        options = {"dropout_p": softmax.dropout, "scale": softmax.scaling}
        output = F.scaled_dot_product_attention(
            grouped, seen_keys, seen_values, layout.visible, **options
        )
    output = output.reshape(*query.shape[:3], -1)

    with torch.autocast(keys.device.type, enabled=False):
        if rule is not None:
            held = state.memory.unsqueeze(1), state.normaliser.unsqueeze(1)
            local, query = output.unsqueeze(1), new_query.unsqueeze(1)
            output = rule.mix(local, query, held, gate, layout.filled).squeeze(1)
        if layout.complete is not None:
            border = layout.complete, layout.leaving
            state = with_segments_complete(rule, keep_score, state, layout.window, *border)
    if layout.real is not None:
        output = output.masked_fill(~layout.real[:, :, None, None], 0)
    return output, state.after(layout), weights


def add_received(call: AttentionCall, scores: Tensor, query: Tensor, key: Tensor) -> None:
    """Adds to the `scores` of a window's tokens, `[B, K, places, R]`, the attention that they
    receive from a call's queries, where that counts. `query`: `[B, K, heads of a group, D]`, and
    `key`, `[B, K, places seen, D]`, as they are compared."""
    layout, column, ahead = call.layout, call.keep_score.receiving, call.layout.window.ahead
    if layout.sink is not None:
        scores[:, :, : layout.window.sink_tokens].zero_()  # they need none
    if column is not None:
        # the mean over a group's heads, without kept tokens
        received = masked_scores(query, key, layout.in_window, call.softmax)
        received = received.softmax(-1, dtype=scores.dtype).mean(2)
        received = received if layout.real is None else received * layout.real.unsqueeze(2)
        scores[:, :, ahead : layout.seen.stop, column] += received[:, :, ahead:]


def with_segments_complete(
    rule: MemoryRule | None,
    keep_score: TokenScore,
    state: InfiniState,
    window: Window,
    complete: Tensor,
    leaving: Tensor,
) -> InfiniState:
    """The state whose rows that complete a segment have written the oldest one of their window;
    its counts stay.

    Args:
        rule, keep_score: how it is written (`None`: not), and what is kept of it.
        state: after the call that completes the segments, but for this.
        window: the sizes of the layer's window.
        complete: which rows do, as in [`StepLayout`].
        leaving: `[batch, L]`, what leaves their windows, as of [`segment_border`].
    """

    def completed(numbers, *parts):
        rows, kept = state.having(**dict(zip(old, parts, strict=True))), None
        oldest = rows.windows().map(lambda part: part[:, :, window.oldest].unsqueeze(1))
        keys, values, log_weights, scores, _ = oldest  # [B, 1, K, L, dim]
        taken_in, dtype = numbers >= 0, rows.memory.dtype
        mask = taken_in[:, None, None, :]
        if window.kept_tokens:
            number = numbers[:, None, None, :, None].expand_as(scores[..., :1])
            oldest, before = oldest._replace(position=number), Tokens.kept_in(rows, window)
            _, kept, evicted = keep_best(
                before, oldest, taken_in.unsqueeze(1), keep_score, window, evicts=rule is not None
            )
            if evicted is not None:
                keys, values, log_weights, _, number = evicted
                mask = number[..., 0] >= 0
        memory = rows.memory, rows.normaliser
        if rule is not None:
            mask = mask.unsqueeze(-1)
            written = rule.written(keys.to(dtype), values.to(dtype), log_weights, mask)
            _, memory = rule.states(written, *memory)
        rows = rows.map_windows(lambda part: without_oldest(part, window))
        rows = rows.having(memory=memory[0], normaliser=memory[1])
        rows = rows if kept is None else kept.into(rows, window)
        return tuple(getattr(rows, name) for name in old)

    old = state.tensors(OF_LAYER)
    new = in_rows(complete, completed, [*old.values()], leaving)
    return state.having(**dict(zip(old, new, strict=True)))
