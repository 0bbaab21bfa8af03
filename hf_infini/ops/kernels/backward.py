"""The linear rule backward, without atomic operations: queries, states, their sums from the other end, sinks, keys.

With g the gradient of the output, s the memory's share, p the softmax's weights and ⟨g, A⟩ the sum of g · A:

    g_s = Σ ⟨g, read − local⟩,  g_score = (1 − s) p (⟨g, v⟩ − ⟨g, local⟩)
    g_read = s g / (σ(q) z + ε),  g_mass = −s ⟨g, read⟩ / (σ(q) z + ε)
    g_σ(q) = g_read Mᵀ + g_mass z,  g_M = Σ σ(q) g_readᵀ,  g_z = Σ g_mass σ(q)
    g_σ(k) = v g_Wᵀ + g_w,  g_v = σ(k) g_W,  where g_W and g_w are what is owed to what the segment wrote

Shapes and arguments as in forward.py; tq: queries turned by their places in the window.
"""

import triton
import triton.language as tl

from .parts import (
    LOG2_E,
    exact_dot,
    features,
    holds_memory,
    is_written,
    load_rows,
    load_state,
    memory_share,
    rows_of,
    sink_rows,
    slope,
    store_rows,
    store_state,
    turn,
)


@triton.jit
def _to_queries(
    queries, keys, values, gradient, seen, log_sum, along, factor, scale, total, DTYPE: tl.constexpr, PRECISION: tl.constexpr
):
    """total + what a tile of keys adds to the gradient of queries; along: ⟨g, local⟩; factor: 1 − s."""
    keys, values = keys.to(DTYPE), values.to(DTYPE)
    scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
    weights = tl.where(seen, tl.exp2(scores * (scale * LOG2_E) - log_sum[:, None]), 0.0)
    to_weights = tl.dot(gradient, tl.trans(values), input_precision=PRECISION)
    to_scores = weights * (to_weights - along[:, None]) * (factor * scale)
    return tl.dot(to_scores.to(DTYPE), keys, total, input_precision=PRECISION)


@triton.jit(do_not_specialize=["count", "carried", "segments", "width", "length", "held_b", "document_b"])
def queries_kernel(
    q, mq, tk, v, sink_k, sink_v, g, found, log_sum, along, inverse, to_mass, to_q, to_mq, to_gate, states,
    gate, source, document, held, cos, sin,
    q_b, q_h, q_t, mq_b, mq_h, mq_t, tk_b, tk_h, tk_t, v_b, v_h, v_t, g_b, g_h, g_t, document_b, held_b,
    heads, kv_heads, count, carried, segments, width, length, sink_groups, scale, eps,
    D: tl.constexpr, E: tl.constexpr, W: tl.constexpr, SINKS: tl.constexpr, SINK_TILE: tl.constexpr, APART: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, INDEXED: tl.constexpr, ROTARY: tl.constexpr, SIGNED: tl.constexpr,
    EXP: tl.constexpr, STARTED: tl.constexpr, MAPPED: tl.constexpr,
    DTYPE: tl.constexpr, PRECISION: tl.constexpr, SPLIT: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """to_q and, MAPPED, to_mq; to_gate `[batch, heads, tiles]`, a tile's part; and for the other kernels `[batch, heads,
    tokens]` each: along, ⟨g, local⟩; inverse, s over the denominator of the read; to_mass, g_mass. Grid
    (segments · ⌈width / BM⌉, heads, batch)."""
    tiles, tokens = tl.cdiv(width, BM), count - carried
    s, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    h, b = tl.program_id(1), tl.program_id(2)
    kv = h // (heads // kv_heads)
    begin = tl.load(document + b * document_b + s).to(tl.int32)
    slots = tile * BM + tl.arange(0, BM)
    row = rows_of(source, b, s, slots, count, segments, width, INDEXED)
    token = tl.where(row >= carried, row - carried, -1)
    there = token >= 0
    query = load_rows(q + b.to(tl.int64) * q_b + h * q_h, token, q_t, D)
    g += b.to(tl.int64) * g_b + h * g_h
    tk += b.to(tl.int64) * tk_b + kv * tk_h
    v += b.to(tl.int64) * v_b + kv * v_h
    share = memory_share(gate, held, h, b, s, held_b, STARTED)
    at_row = (b * heads + h).to(tl.int64) * tokens + token
    at_out = (b.to(tl.int64) * tokens * heads + h) * E
    gradient = load_rows(g, token, g_t, E)
    of_local = tl.sum(gradient.to(tl.float32) * load_rows(found + at_out, token, heads * E, E).to(tl.float32), 1)
    tl.store(along + at_row, of_local, mask=there)
    gradient = gradient.to(DTYPE)
    # Beyond every score where there is no token, so that all its weights are zero
    log_two = tl.load(log_sum + at_row, mask=there, other=float("inf"))
    to_query = tl.zeros([BM, D], tl.float32)
    for back in tl.static_range(W + 1):
        t = s - back
        if (t >= begin) & (t >= 0):
            turned, place = query.to(DTYPE), tl.where(there, back * length + slots, -1)
            if ROTARY:
                turned = turn(query.to(tl.float32), cos, sin, place, BM, D, SIGNED, False).to(DTYPE)
            of_segment = tl.zeros([BM, D], tl.float32)
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
                of_segment = _to_queries(
                    turned, keys, values, gradient, seen, log_two, of_local, 1.0 - share, scale, of_segment, DTYPE, PRECISION
                )
            if ROTARY:
                of_segment = turn(of_segment, cos, sin, place, BM, D, SIGNED, True)
            to_query += of_segment
    if SINKS > 0:
        if s - begin > W:
            sink = sink_rows(source, b, begin, count, segments, width, SINKS, SINK_TILE, INDEXED, APART)
            if APART:
                group = ((b * kv_heads + kv) * sink_groups + tl.where(sink_groups > 1, s, 0)).to(tl.int64) * SINKS
                keys, values = load_rows(sink_k + group * D, sink, D, D), load_rows(sink_v + group * E, sink, E, E)
            else:
                keys, values = load_rows(tk, sink, tk_t, D), load_rows(v, sink, v_t, E)
            turned, place = query.to(DTYPE), tl.where(there, SINKS + W * length + slots, -1)
            if ROTARY:
                turned = turn(query.to(tl.float32), cos, sin, place, BM, D, SIGNED, False).to(DTYPE)
            seen, of_sinks = (sink >= 0)[None, :], tl.zeros([BM, D], tl.float32)
            of_sinks = _to_queries(
                turned, keys, values, gradient, seen, log_two, of_local, 1.0 - share, scale, of_sinks, DTYPE, PRECISION
            )
            if ROTARY:
                of_sinks = turn(of_sinks, cos, sin, place, BM, D, SIGNED, True)
            to_query += of_sinks
    of_gate, at_query = 0.0, (b.to(tl.int64) * tokens * heads + h) * D
    if holds_memory(held, b, s, held_b, STARTED):
        at_state = ((b * kv_heads + kv) * (segments + 1) + s).to(tl.int64) * (D * E + D)
        memory, normaliser = load_state(states + at_state, D, E)
        x = load_rows(mq + b.to(tl.int64) * mq_b + h * mq_h, token, mq_t, D).to(tl.float32)
        f, upstream = features(x, EXP), load_rows(g, token, g_t, E).to(tl.float32)
        weight = 1.0 / (tl.sum(f * normaliser[None, :], 1) + eps)
        read = exact_dot(f, memory, tl.zeros([BM, E], tl.float32), SPLIT, EXACT) * weight[:, None]
        of_read = tl.sum(upstream * read, 1)
        of_gate = tl.sum(of_read - of_local) * share * (1.0 - share)
        weight *= share
        owed = -of_read * weight
        tl.store(inverse + at_row, weight, mask=there)
        tl.store(to_mass + at_row, owed, mask=there)
        to_features = owed[:, None] * normaliser[None, :]
        to_features = exact_dot(upstream * weight[:, None], tl.trans(memory), to_features, SPLIT, EXACT)
        to_features *= slope(x, f, EXP)
        if MAPPED:
            store_rows(to_mq + at_query, token, heads * D, to_features, D)
        else:
            to_query += to_features
    elif MAPPED:
        store_rows(to_mq + at_query, token, heads * D, tl.zeros([BM, D], tl.float32), D)
    store_rows(to_q + at_query, token, heads * D, to_query, D)
    tl.store(to_gate + (b * heads + h) * segments * tiles + tl.program_id(0), of_gate)


@triton.jit(do_not_specialize=["count", "carried", "segments", "width", "held_b"])
def states_kernel(
    mq, g, inverse, to_mass, to_states, source, held, mq_b, mq_h, mq_t, g_b, g_h, g_t, held_b,
    heads, kv_heads, count, carried, segments, width,
    D: tl.constexpr, E: tl.constexpr, BM: tl.constexpr, INDEXED: tl.constexpr, EXP: tl.constexpr, STARTED: tl.constexpr,
    SPLIT: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """to_states `[batch, kv_heads, segments]`: what the queries of a segment owe to the state that it reads. Grid
    (segments, kv_heads, batch)."""
    s, kv, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    tokens, group = count - carried, heads // kv_heads
    memory, normaliser = tl.zeros([D, E], tl.float32), tl.zeros([D], tl.float32)
    if holds_memory(held, b, s, held_b, STARTED):
        for h in range(kv * group, (kv + 1) * group):
            queries, gradients = mq + b.to(tl.int64) * mq_b + h * mq_h, g + b.to(tl.int64) * g_b + h * g_h
            for at in range(0, width, BM):
                row = rows_of(source, b, s, at + tl.arange(0, BM), count, segments, width, INDEXED)
                token = tl.where(row >= carried, row - carried, -1)
                at_row = (b * heads + h).to(tl.int64) * tokens + token
                weight = tl.load(inverse + at_row, mask=token >= 0, other=0.0)
                owed = tl.load(to_mass + at_row, mask=token >= 0, other=0.0)
                f = features(load_rows(queries, token, mq_t, D).to(tl.float32), EXP)
                normaliser += tl.sum(f * owed[:, None], 0)
                gradient = load_rows(gradients, token, g_t, E)
                memory = exact_dot(tl.trans(f * weight[:, None]), gradient, memory, SPLIT, EXACT)
    at_state = ((b * kv_heads + kv) * segments + s).to(tl.int64) * (D * E + D)
    store_state(to_states + at_state, memory, normaliser, D, E)


@triton.jit(do_not_specialize=["segments", "document_b"])
def scan_back_kernel(
    to_states, to_wrote, last, to_last_memory, to_last_normaliser, to_memory, to_normaliser, to_start, document, document_b,
    segments, kv_heads, of_memory, size, W: tl.constexpr, BLOCK: tl.constexpr, LAST: tl.constexpr, CONTINUED: tl.constexpr,
    STARTED: tl.constexpr,
):  # fmt: skip
    """to_wrote `[batch, kv_heads, segments]`: the sums from the other end; what leaves the window after the call is not
    stored. Grid (size / BLOCK, kv_heads, batch).

    LAST: the state after the call, of segment last `[batch]`, has a gradient too. CONTINUED, STARTED: those of the state
    before the call, and of the start by row and head, `[batch, kv_heads, size]`, are wanted.
    """
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    h, b = tl.program_id(1), tl.program_id(2)
    inside, is_memory, is_normaliser = at < size, at < of_memory, (at >= of_memory) & (at < size)
    place = (b * kv_heads + h).to(tl.int64)
    owed, now, to_fresh = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    last_segment = -1
    if LAST:
        last_segment = tl.load(last + b).to(tl.int32)
        owed = tl.load(to_last_memory + place * of_memory + at, mask=is_memory, other=0.0)
        owed += tl.load(to_last_normaliser + place * (size - of_memory) + at - of_memory, mask=is_normaliser, other=0.0)
    document += b * document_b
    continued_from = tl.load(document)
    to_states += place * segments * size + at
    to_wrote += place * segments * size + at
    for step in range(0, segments + 1, 4):  # four loads at a time are on their way
        first = segments - step
        begins = (
            tl.load(document + first),
            tl.load(document + tl.maximum(first - 1, 0)),
            tl.load(document + tl.maximum(first - 2, 0)),
            tl.load(document + tl.maximum(first - 3, 0)),
        )
        parts = (
            tl.load(to_states + first.to(tl.int64) * size, mask=inside & (first < segments), other=0.0),
            tl.load(to_states + (first - 1).to(tl.int64) * size, mask=inside & (first >= 1), other=0.0),
            tl.load(to_states + (first - 2).to(tl.int64) * size, mask=inside & (first >= 2), other=0.0),
            tl.load(to_states + (first - 3).to(tl.int64) * size, mask=inside & (first >= 3), other=0.0),
        )
        for i in tl.static_range(4):
            s = first - i
            now += parts[i]
            if LAST:
                now += tl.where(s == last_segment, owed, 0.0)
            wrote = s - W - 1  # the segment that left the window before s
            of_wrote = tl.where(wrote >= begins[i], now, 0.0)
            tl.store(to_wrote + wrote.to(tl.int64) * size, of_wrote, mask=inside & (wrote >= 0))
            begun = (begins[i] == s) & (s != continued_from)
            to_fresh += tl.where(begun, now, 0.0)
            now = tl.where(begun, 0.0, now)
    if CONTINUED:
        tl.store(to_memory + place * of_memory + at, now, mask=is_memory)
        tl.store(to_normaliser + place * (size - of_memory) + at - of_memory, now, mask=is_normaliser)
    if STARTED:
        tl.store(to_start + place * size + at, to_fresh, mask=inside)


@triton.jit
def _to_keys(
    keys, values, queries, gradient, seen, log_sum, along, factor, scale, to_key, to_value, DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """to_key and to_value with what a tile of queries adds; scores are [keys, queries]."""
    scores = tl.dot(keys, tl.trans(queries), input_precision=PRECISION)
    weights = tl.where(seen, tl.exp2(scores * (scale * LOG2_E) - log_sum[None, :]), 0.0) * factor
    to_value = tl.dot(weights.to(DTYPE), gradient, to_value, input_precision=PRECISION)
    to_weights = tl.dot(values, tl.trans(gradient), input_precision=PRECISION)
    to_scores = weights * (to_weights - along[None, :]) * scale
    return tl.dot(to_scores.to(DTYPE), queries, to_key, input_precision=PRECISION), to_value


@triton.jit(do_not_specialize=["count", "carried", "segments", "width", "held_b", "document_b"])
def sinks_kernel(
    tq, tk, v, sink_k, sink_v, g, log_sum, along, to_sinks, gate, source, document, held,
    tq_b, tq_h, tq_t, tk_b, tk_h, tk_t, v_b, v_h, v_t, g_b, g_h, g_t, document_b, held_b,
    heads, kv_heads, count, carried, segments, width, sink_groups, scale,
    D: tl.constexpr, E: tl.constexpr, W: tl.constexpr, SINKS: tl.constexpr, SINK_TILE: tl.constexpr, APART: tl.constexpr,
    BM: tl.constexpr, INDEXED: tl.constexpr, STARTED: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """to_sinks `[batch, kv_heads, segments, SINKS, D + E]`: what the queries of a segment owe to the sinks' turned keys and
    their values. Grid (segments, kv_heads, batch)."""
    s, kv, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    tokens, group = count - carried, heads // kv_heads
    begin = tl.load(document + b * document_b + s).to(tl.int32)
    number = tl.where(tl.arange(0, SINK_TILE) < SINKS, tl.arange(0, SINK_TILE), -1)
    to_key, to_value = tl.zeros([SINK_TILE, D], tl.float32), tl.zeros([SINK_TILE, E], tl.float32)
    if s - begin > W:
        sink = sink_rows(source, b, begin, count, segments, width, SINKS, SINK_TILE, INDEXED, APART)
        if APART:
            at_group = ((b * kv_heads + kv) * sink_groups + tl.where(sink_groups > 1, s, 0)).to(tl.int64) * SINKS
            keys, values = load_rows(sink_k + at_group * D, sink, D, D), load_rows(sink_v + at_group * E, sink, E, E)
        else:
            keys = load_rows(tk + b.to(tl.int64) * tk_b + kv * tk_h, sink, tk_t, D)
            values = load_rows(v + b.to(tl.int64) * v_b + kv * v_h, sink, v_t, E)
        keys, values = keys.to(DTYPE), values.to(DTYPE)
        for h in range(kv * group, (kv + 1) * group):
            factor = 1.0 - memory_share(gate, held, h, b, s, held_b, STARTED)
            for at in range(0, width, BM):
                row = rows_of(source, b, s, at + tl.arange(0, BM), count, segments, width, INDEXED)
                token = tl.where(row >= carried, row - carried, -1)
                queries = load_rows(tq + b.to(tl.int64) * tq_b + h * tq_h, token, tq_t, D).to(DTYPE)
                gradient = load_rows(g + b.to(tl.int64) * g_b + h * g_h, token, g_t, E).to(DTYPE)
                at_row = (b * heads + h).to(tl.int64) * tokens + token
                log_two = tl.load(log_sum + at_row, mask=token >= 0, other=float("inf"))
                of_local = tl.load(along + at_row, mask=token >= 0, other=0.0)
                seen = (sink >= 0)[:, None]
                to_key, to_value = _to_keys(
                    keys, values, queries, gradient, seen, log_two, of_local, factor, scale, to_key, to_value,
                    DTYPE, PRECISION,
                )  # fmt: skip
    at_sinks = to_sinks + ((b * kv_heads + kv) * segments + s).to(tl.int64) * SINKS * (D + E)
    store_rows(at_sinks, number, D + E, to_key, D)
    store_rows(at_sinks + D, number, D + E, to_value, E)


@triton.jit(do_not_specialize=["count", "carried", "segments", "width", "length", "held_b", "document_b"])
def keys_kernel(
    tq, k, mk, v, g, log_sum, along, to_k, to_mk, to_v, to_wrote, to_sinks, gate, source, document, held, skipped, cos, sin,
    tq_b, tq_h, tq_t, k_b, k_h, k_t, mk_b, mk_h, mk_t, v_b, v_h, v_t, g_b, g_h, g_t, document_b, held_b,
    heads, kv_heads, count, carried, segments, width, length, sink_groups, scale,
    D: tl.constexpr, E: tl.constexpr, W: tl.constexpr, SINKS: tl.constexpr, APART: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, INDEXED: tl.constexpr, SKIPPING: tl.constexpr, ROTARY: tl.constexpr,
    SIGNED: tl.constexpr, EXP: tl.constexpr, STARTED: tl.constexpr, MAPPED: tl.constexpr,
    DTYPE: tl.constexpr, PRECISION: tl.constexpr, SPLIT: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """to_k, to_v and, MAPPED, to_mk of a tile of keys, of all rows. k: not turned. to_sinks `[batch, kv_heads, groups,
    SINKS, D + E]`: what is owed to the sinks of the document that begins with a segment; APART, they are not among the keys.
    Grid (segments · ⌈width / BN⌉, kv_heads, batch)."""
    tiles, tokens, group = tl.cdiv(width, BN), count - carried, heads // kv_heads
    s, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    kv, b = tl.program_id(1), tl.program_id(2)
    slots = tile * BN + tl.arange(0, BN)
    row = rows_of(source, b, s, slots, count, segments, width, INDEXED)
    value = load_rows(v + b.to(tl.int64) * v_b + kv * v_h, row, v_t, E)
    to_key, to_value = tl.zeros([BN, D], tl.float32), tl.zeros([BN, E], tl.float32)
    at_key = (b.to(tl.int64) * count * kv_heads + kv) * D
    # The memory first: what it needs is gone from the registers when the loop begins
    begin = tl.load(document + b * document_b + s).to(tl.int32)
    leaves = s + W + 1 <= segments
    if leaves:
        written = is_written(skipped, row, b, s, slots, begin, segments, width, SINKS, SKIPPING)
        at_state = ((b * kv_heads + kv) * segments + s).to(tl.int64) * (D * E + D)
        memory, normaliser = load_state(to_wrote + at_state, D, E)
        x = load_rows(mk + b.to(tl.int64) * mk_b + kv * mk_h, row, mk_t, D).to(tl.float32)
        f = tl.where(written[:, None], features(x, EXP), 0.0)
        to_value = exact_dot(f, memory, to_value, SPLIT, EXACT)
        to_key = exact_dot(value, tl.trans(memory), to_key, SPLIT, EXACT) + normaliser[None, :]
        to_key = tl.where(written[:, None], to_key * slope(x, f, EXP), 0.0)
    if MAPPED:
        store_rows(to_mk + at_key, row, kv_heads * D, to_key, D)
        to_key = tl.zeros([BN, D], tl.float32)
    value = value.to(DTYPE)
    for ahead in tl.static_range(W + 1):
        t = s + ahead
        sees = t < segments
        if sees:
            sees = tl.load(document + b * document_b + t) <= s
        if sees:
            keys = load_rows(k + b.to(tl.int64) * k_b + kv * k_h, row, k_t, D)
            place = tl.where(row >= 0, SINKS + (W - ahead) * length + slots, -1)
            if ROTARY:
                keys = turn(keys.to(tl.float32), cos, sin, place, BN, D, SIGNED, False)
            keys = keys.to(DTYPE)
            of_segment = tl.zeros([BN, D], tl.float32)
            low = 0
            if ahead == 0:
                low = tile * BN // BM * BM
            for h in range(kv * group, (kv + 1) * group):
                factor = 1.0 - memory_share(gate, held, h, b, t, held_b, STARTED)
                for at in range(low, width, BM):
                    query_slots = at + tl.arange(0, BM)
                    query_row = rows_of(source, b, t, query_slots, count, segments, width, INDEXED)
                    token = tl.where(query_row >= carried, query_row - carried, -1)
                    queries = load_rows(tq + b.to(tl.int64) * tq_b + h * tq_h, token, tq_t, D).to(DTYPE)
                    gradient = load_rows(g + b.to(tl.int64) * g_b + h * g_h, token, g_t, E).to(DTYPE)
                    at_row = (b * heads + h).to(tl.int64) * tokens + token
                    log_two = tl.load(log_sum + at_row, mask=token >= 0, other=float("inf"))
                    of_local = tl.load(along + at_row, mask=token >= 0, other=0.0)
                    seen = (row >= 0)[:, None]
                    if ahead == 0:
                        seen = seen & (slots[:, None] <= query_slots[None, :])
                    of_segment, to_value = _to_keys(
                        keys, value, queries, gradient, seen, log_two, of_local, factor, scale, of_segment, to_value,
                        DTYPE, PRECISION,
                    )  # fmt: skip
            if ROTARY:
                of_segment = turn(of_segment, cos, sin, place, BN, D, SIGNED, True)
            to_key += of_segment
    if SINKS > 0 and not APART:
        if begin == s:
            number = tl.where(slots < SINKS, slots, -1)
            group_of_sinks = (b * kv_heads + kv) * sink_groups + tl.where(sink_groups > 1, s, 0)
            to_sinks += group_of_sinks.to(tl.int64) * SINKS * (D + E)
            of_sinks = load_rows(to_sinks, number, D + E, D)
            if ROTARY:
                of_sinks = turn(of_sinks, cos, sin, number, BN, D, SIGNED, True)
            to_key += of_sinks
            to_value += load_rows(to_sinks + D, number, D + E, E)
    store_rows(to_k + at_key, row, kv_heads * D, to_key, D)
    store_rows(to_v + (b.to(tl.int64) * count * kv_heads + kv) * E, row, kv_heads * E, to_value, E)
