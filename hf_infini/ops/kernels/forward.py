"""The linear rule forward: turn the keys, write a state per segment, sum the states up, attend.

Shapes as in ops/attention.py. A state is a vector of D · E + D numbers in float32, M and then z. The grid of programs is
(tiles of the grid's slots, heads, batch). `document` is the layout's, `[batch or 1, segments + 1]`, with the stride of its
rows.

Rotary positions: only distances count, so a key is turned once, by its slot, and a query by its slot and the segments
between the two. A sink's slot is its place, and a query that sees it is turned by its place in the window.
"""

import triton
import triton.language as tl

from .parts import (
    LOG2_E,
    LOWEST,
    exact_dot,
    features,
    holds_memory,
    is_written,
    load_rows,
    load_state,
    rows_of,
    sink_rows,
    store_rows,
    store_state,
    turn,
)


@triton.jit(do_not_specialize=["count", "shift", "first_place", "segments", "width"])
def turn_kernel(
    x, turned, source, cos, sin, x_b, x_h, x_t, heads, count, shift, first_place, segments, width,
    D: tl.constexpr, BT: tl.constexpr, INDEXED: tl.constexpr, SIGNED: tl.constexpr,
):  # fmt: skip
    """x `[batch, heads, tokens, D]` turned by `first_place` and each token's slot. `shift`: rows before those of x."""
    tiles = tl.cdiv(width, BT)
    s, h, b = tl.program_id(0) // tiles, tl.program_id(1), tl.program_id(2)
    slots = tl.program_id(0) % tiles * BT + tl.arange(0, BT)
    row = rows_of(source, b, s, slots, count, segments, width, INDEXED)
    row = tl.where(row >= shift, row - shift, -1)
    place = tl.where(row >= 0, first_place + slots, -1)
    states = load_rows(x + b.to(tl.int64) * x_b + h * x_h, row, x_t, D).to(tl.float32)
    out = turned + (b.to(tl.int64) * (count - shift) * heads + h) * D
    store_rows(out, row, heads * D, turn(states, cos, sin, place, BT, D, SIGNED, False), D)


@triton.jit(do_not_specialize=["count", "segments", "width", "document_b"])
def write_kernel(
    mk, v, wrote, source, skipped, document, mk_b, mk_h, mk_t, v_b, v_h, v_t, document_b, kv_heads, count, segments, width,
    D: tl.constexpr, E: tl.constexpr, SINKS: tl.constexpr, BT: tl.constexpr, INDEXED: tl.constexpr, SKIPPING: tl.constexpr,
    EXP: tl.constexpr, SPLIT: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """wrote `[batch, kv_heads, segments]`: σ(K)ᵀ V and Σ σ(k) of each segment. Grid (segments, kv_heads, batch)."""
    s, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    mk += b.to(tl.int64) * mk_b + h * mk_h
    v += b.to(tl.int64) * v_b + h * v_h
    begin = tl.load(document + b * document_b + s)
    memory, normaliser = tl.zeros([D, E], tl.float32), tl.zeros([D], tl.float32)
    for at in range(0, width, BT):
        slots = at + tl.arange(0, BT)
        row = rows_of(source, b, s, slots, count, segments, width, INDEXED)
        written = is_written(skipped, row, b, s, slots, begin, segments, width, SINKS, SKIPPING)
        f = tl.where(written[:, None], features(load_rows(mk, row, mk_t, D).to(tl.float32), EXP), 0.0)
        memory = exact_dot(tl.trans(f), load_rows(v, row, v_t, E), memory, SPLIT, EXACT)
        normaliser += tl.sum(f, 0)
    state = ((b * kv_heads + h) * segments + s).to(tl.int64) * (D * E + D)
    store_state(wrote + state, memory, normaliser, D, E)


@triton.jit
def _what_left(wrote, s, begin, inside, size, W: tl.constexpr):
    """What the segment wrote that is in the memory of segment s and not in that of the one before."""
    leaving = s - W - 1
    return tl.load(wrote + leaving.to(tl.int64) * size, mask=inside & (leaving >= 0) & (leaving >= begin), other=0.0)


@triton.jit(do_not_specialize=["segments", "document_b"])
def scan_kernel(
    wrote, states, memory, normaliser, start, start_mass, document, document_b, segments, kv_heads,
    of_memory, size, W: tl.constexpr, BLOCK: tl.constexpr, CONTINUED: tl.constexpr, STARTED: tl.constexpr,
):  # fmt: skip
    """states `[batch, kv_heads, segments + 1]`: what each segment reads, and the next one would. Grid (size / BLOCK,
    kv_heads, batch), size: numbers in a state, of which the first `of_memory` are M.

    CONTINUED: the state before the call is memory and normaliser, `[batch, kv_heads, …]`; else it is that of a new document.
    STARTED: which starts from start and start_mass `[kv_heads, …]`; else from zeros.
    """
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    h, b = tl.program_id(1), tl.program_id(2)
    inside, is_memory, is_normaliser = at < size, at < of_memory, (at >= of_memory) & (at < size)
    place = (b * kv_heads + h).to(tl.int64)
    fresh = tl.zeros([BLOCK], tl.float32)
    if STARTED:
        fresh = tl.load(start + h * of_memory + at, mask=is_memory, other=0.0)
        fresh += tl.load(start_mass + h * (size - of_memory) + at - of_memory, mask=is_normaliser, other=0.0)
    now = fresh
    if CONTINUED:
        now = tl.load(memory + place * of_memory + at, mask=is_memory, other=0.0)
        now += tl.load(normaliser + place * (size - of_memory) + at - of_memory, mask=is_normaliser, other=0.0)
    document += b * document_b
    continued_from = tl.load(document)  # where the document of the state before the call began, or might have
    wrote += place * segments * size + at
    states += place * (segments + 1) * size + at
    for first in range(0, segments + 1, 4):  # four loads at a time are on their way
        begins = (
            tl.load(document + first),
            tl.load(document + tl.minimum(first + 1, segments)),
            tl.load(document + tl.minimum(first + 2, segments)),
            tl.load(document + tl.minimum(first + 3, segments)),
        )
        left = (
            _what_left(wrote, first, begins[0], inside, size, W),
            _what_left(wrote, first + 1, begins[1], inside & (first + 1 <= segments), size, W),
            _what_left(wrote, first + 2, begins[2], inside & (first + 2 <= segments), size, W),
            _what_left(wrote, first + 3, begins[3], inside & (first + 3 <= segments), size, W),
        )
        for i in tl.static_range(4):
            s = first + i
            now = tl.where((begins[i] == s) & (s != continued_from), fresh, now) + left[i]
            tl.store(states + s.to(tl.int64) * size, now, mask=inside & (s <= segments))


@triton.jit
def _weighed(queries, keys, values, seen, top, mass, total, scale, DTYPE: tl.constexpr, PRECISION: tl.constexpr):
    """A tile of keys more in the running softmax: its largest score, Σ e^(s − top), and Σ e^(s − top) v; base 2."""
    scores = tl.dot(queries, tl.trans(keys.to(DTYPE)), input_precision=PRECISION)
    scores = tl.where(seen, scores * (scale * LOG2_E), LOWEST)
    new_top = tl.maximum(top, tl.max(scores, 1))
    weights, shrink = tl.exp2(scores - new_top[:, None]), tl.exp2(top - new_top)
    total = tl.dot(weights.to(DTYPE), values.to(DTYPE), total * shrink[:, None], input_precision=PRECISION)
    return new_top, mass * shrink + tl.sum(weights, 1), total


@triton.jit(do_not_specialize=["count", "carried", "segments", "width", "length", "held_b", "document_b"])
def attend_kernel(
    q, mq, tk, v, sink_k, sink_v, out, found, log_sum, states, gate, source, document, held, cos, sin,
    q_b, q_h, q_t, mq_b, mq_h, mq_t, tk_b, tk_h, tk_t, v_b, v_h, v_t, document_b, held_b,
    heads, kv_heads, count, carried, segments, width, length, sink_groups, scale, eps,
    D: tl.constexpr, E: tl.constexpr, W: tl.constexpr, SINKS: tl.constexpr, SINK_TILE: tl.constexpr, APART: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, INDEXED: tl.constexpr, ROTARY: tl.constexpr, SIGNED: tl.constexpr,
    EXP: tl.constexpr, STARTED: tl.constexpr, SAVE: tl.constexpr,
    DTYPE: tl.constexpr, PRECISION: tl.constexpr, SPLIT: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Window, read and mixture of a tile of queries. Grid (segments · ⌈width / BM⌉, heads, batch).

    q: the window's queries, not turned; mq: the memory's. tk: turned keys. The sinks are the first tokens of their document,
    or, APART, sink_k (turned) and sink_v, `[batch, kv_heads, groups, SINKS, …]`, a group for every segment, or one. SAVE:
    also what the window found, and log_sum `[batch, heads, tokens]`, log₂ of the softmax's denominator, for the gradient.
    """
    tiles, tokens = tl.cdiv(width, BM), count - carried
    s, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    h, b = tl.program_id(1), tl.program_id(2)
    kv = h // (heads // kv_heads)
    begin = tl.load(document + b * document_b + s).to(tl.int32)
    slots = tile * BM + tl.arange(0, BM)
    row = rows_of(source, b, s, slots, count, segments, width, INDEXED)
    token = tl.where(row >= carried, row - carried, -1)
    query = load_rows(q + b.to(tl.int64) * q_b + h * q_h, token, q_t, D)
    tk += b.to(tl.int64) * tk_b + kv * tk_h
    v += b.to(tl.int64) * v_b + kv * v_h
    top = tl.full([BM], LOWEST / 2, tl.float32)  # above the score of what is not seen, so that this weighs nothing
    mass, total = tl.zeros([BM], tl.float32), tl.zeros([BM, E], tl.float32)
    for back in tl.static_range(W + 1):
        t = s - back
        if (t >= begin) & (t >= 0):
            turned = query.to(DTYPE)
            if ROTARY:
                place = tl.where(token >= 0, back * length + slots, -1)
                turned = turn(query.to(tl.float32), cos, sin, place, BM, D, SIGNED, False).to(DTYPE)
            limit = width
            if back == 0:
                limit = min((tile + 1) * BM, width)
            for at in range(0, limit, BN):
                key_slots = at + tl.arange(0, BN)
                key_row = rows_of(source, b, t, key_slots, count, segments, width, INDEXED)
                seen = (key_row >= 0)[None, :]
                if back == 0:
                    seen = seen & (key_slots[None, :] <= slots[:, None])
                keys, values = load_rows(tk, key_row, tk_t, D), load_rows(v, key_row, v_t, E)
                top, mass, total = _weighed(turned, keys, values, seen, top, mass, total, scale, DTYPE, PRECISION)
    if SINKS > 0:
        if s - begin > W:
            sink = sink_rows(source, b, begin, count, segments, width, SINKS, SINK_TILE, INDEXED, APART)
            if APART:
                group = ((b * kv_heads + kv) * sink_groups + tl.where(sink_groups > 1, s, 0)).to(tl.int64) * SINKS
                keys, values = load_rows(sink_k + group * D, sink, D, D), load_rows(sink_v + group * E, sink, E, E)
            else:
                keys, values = load_rows(tk, sink, tk_t, D), load_rows(v, sink, v_t, E)
            turned = query.to(DTYPE)
            if ROTARY:
                place = tl.where(token >= 0, SINKS + W * length + slots, -1)
                turned = turn(query.to(tl.float32), cos, sin, place, BM, D, SIGNED, False).to(DTYPE)
            seen = (sink >= 0)[None, :]
            top, mass, total = _weighed(turned, keys, values, seen, top, mass, total, scale, DTYPE, PRECISION)
    mass = tl.where(token >= 0, mass, 1.0)
    local = total / mass[:, None]
    at_out = (b.to(tl.int64) * tokens * heads + h) * E
    if SAVE:
        store_rows(found + at_out, token, heads * E, local, E)
        tl.store(log_sum + (b * heads + h).to(tl.int64) * tokens + token, top + tl.log2(mass), mask=token >= 0)
    if holds_memory(held, b, s, held_b, STARTED):
        at_state = ((b * kv_heads + kv) * (segments + 1) + s).to(tl.int64) * (D * E + D)
        memory, normaliser = load_state(states + at_state, D, E)
        f = features(load_rows(mq + b.to(tl.int64) * mq_b + h * mq_h, token, mq_t, D).to(tl.float32), EXP)
        denominator = tl.sum(f * normaliser[None, :], 1) + eps
        read = exact_dot(f, memory, tl.zeros([BM, E], tl.float32), SPLIT, EXACT) / denominator[:, None]
        local += tl.sigmoid(tl.load(gate + h).to(tl.float32)) * (read - local)
    store_rows(out + at_out, token, heads * E, local, E)
