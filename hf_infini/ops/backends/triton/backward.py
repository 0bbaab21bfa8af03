"""Backward, by kernels without atomic operations: queries, states and their sums from the other
end, evicted, ahead, keys.

With g the gradient of the output, s the memory's share, p the softmax's weights and ⟨g, A⟩ the sum
of g · A:

    g_s = Σ ⟨g, read − local⟩,  g_score = (1 − s) p (⟨g, v⟩ − ⟨g, local⟩)
    g_read = s g / (σ(q) z + ε),  g_mass = −s ⟨g, read⟩ / (σ(q) z + ε)
    g_σ(q) = g_read Mᵀ + g_mass z,  g_M = Σ σ(q) g_readᵀ,  g_z = Σ g_mass σ(q)
    g_σ(k) = v g_Wᵀ + g_w,  g_v = σ(k) g_W,  where g_W and g_w are owed to what it wrote

Shapes and arguments as in forward.py.
"""

import triton
import triton.language as tl

from . import parts
from .parts import CHANGING, LOG2_E, PRECISION


@triton.jit
def _to_queries(
    queries, keys, values, gradient, seen, log_sum, along, factor, scale, total, C: tl.constexpr
):
    """total + what a tile of keys adds to the gradient of queries; along: ⟨g, local⟩; factor: 1 −
    s."""
    scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
    weights = tl.where(seen, tl.exp2(scores * (scale * LOG2_E) - log_sum[:, None]), 0.0)
    to_weights = tl.dot(gradient, tl.trans(values), input_precision=PRECISION)
    to_scores = weights * (to_weights - along[:, None]) * (factor * scale)
    return tl.dot(to_scores.to(C.DTYPE), keys, total, input_precision=PRECISION)


@triton.jit(do_not_specialize=CHANGING)
def queries_kernel(
    q,
    window,
    g,
    found,
    log_sum,
    along,
    inverse,
    to_mass,
    to_q,
    to_gate,
    states,
    gate,
    known,
    rows,
    carried,
    segments,
    width,
    kept,
    C: tl.constexpr,
):
    """to_q; to_gate `[batch, heads, tiles]`, a tile's part; and `[batch, heads, tokens]`, for
    others: along, ⟨g, local⟩, inverse, s over the denominator of the read, and to_mass, g_mass.
    Grid (segments · ⌈width / BM⌉, heads, batch)."""
    grid = parts.Grid(*known, rows, carried, segments, width, kept)
    s, first, h, b = parts.tile_of(grid, C.BM)
    kv, begin, slots = (
        h // (grid.heads // grid.kv_heads),
        parts.begin_of(grid, b, s),
        first + tl.arange(0, C.BM),
    )
    token = parts.tokens_of(grid, b, s, slots)
    there, at_row = token >= 0, parts.at_tokens(grid, b, h, token)
    query = parts.load_rows(q, b, h, token, C.D)
    share = parts.memory_share(gate, grid, b, h, s, C)
    gradient = parts.load_rows(g, b, h, token, C.E)
    of_local = tl.sum(
        gradient.to(tl.float32) * parts.load_rows(found, b, h, token, C.E).to(tl.float32), 1
    )
    tl.store(along + at_row, of_local, mask=there)
    gradient = gradient.to(C.DTYPE)
    # Beyond every score where there is no token, so that all its weights are zero
    log_two = tl.load(log_sum + at_row, mask=there, other=float("inf"))
    to_query = parts.zeros(C.BM, C.D)
    for part in tl.static_range(C.W + 1 + (C.AHEAD > 0)):
        if parts.is_seen(s, begin, part, C):
            place, end = parts.reach(grid, first, token, slots, part, C)
            turned, of_part = parts.turn(query, grid, place, C).to(C.DTYPE), parts.zeros(C.BM, C.D)
            for at in range(0, end, C.AHEAD if part > C.W else C.BN):
                keys, values, seen = parts.load_seen(
                    window, grid, b, kv, s, begin, part, at, slots, C
                )
                of_part = _to_queries(
                    turned,
                    keys,
                    values,
                    gradient,
                    seen,
                    log_two,
                    of_local,
                    1.0 - share,
                    grid.scale,
                    of_part,
                    C,
                )
            to_query += parts.turn(of_part, grid, place, C, True)
    of_gate = 0.0
    if parts.tokens_left(grid, b, s) > grid.kept:
        memory, normaliser = parts.load_state(states, b, kv, s, C)
        x = parts.load_rows(q, b, h, token, C.D).to(tl.float32)
        f, upstream = parts.features(x, C), parts.load_rows(g, b, h, token, C.E).to(tl.float32)
        weight = 1.0 / (tl.sum(f * normaliser[None, :], 1) + grid.eps)
        read = parts.exact_dot(f, memory, parts.zeros(C.BM, C.E), C) * weight[:, None]
        of_read = tl.sum(upstream * read, 1)
        of_gate = tl.sum(of_read - of_local) * share * (1.0 - share)
        weight *= share
        owed = -of_read * weight
        tl.store(inverse + at_row, weight, mask=there)
        tl.store(to_mass + at_row, owed, mask=there)
        to_features = owed[:, None] * normaliser[None, :]
        to_features = parts.exact_dot(upstream * weight[:, None], tl.trans(memory), to_features, C)
        to_query += to_features * parts.slope(x, f, C)
    parts.store_rows(to_q, b, h, token, to_query, C.D)
    tl.store(to_gate + (b * grid.heads + h) * tl.num_programs(0) + tl.program_id(0), of_gate)


@triton.jit(do_not_specialize=CHANGING)
def states_kernel(
    to_states, q, g, inverse, to_mass, known, rows, carried, segments, width, kept, C: tl.constexpr
):
    """to_states: what the queries of each segment owe to the state that it reads. Grid (segments,
    kv_heads, batch)."""
    grid = parts.Grid(*known, rows, carried, segments, width, kept)
    s, kv, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    memory, normaliser = parts.zeros(C.D, C.E), parts.zeros(C.D)
    if parts.tokens_left(grid, b, s) > grid.kept:
        group = grid.heads // grid.kv_heads
        for h in range(kv * group, (kv + 1) * group):
            for at in range(0, grid.width, C.BM):
                token = parts.tokens_of(grid, b, s, at + tl.arange(0, C.BM))
                at_row = parts.at_tokens(grid, b, h, token)
                weight = tl.load(inverse + at_row, mask=token >= 0, other=0.0)
                owed = tl.load(to_mass + at_row, mask=token >= 0, other=0.0)
                f = parts.features(parts.load_rows(q, b, h, token, C.D).to(tl.float32), C)
                normaliser += tl.sum(f * owed[:, None], 0)
                memory = parts.exact_dot(
                    tl.trans(f * weight[:, None]), parts.load_rows(g, b, h, token, C.E), memory, C
                )
    parts.store_state(to_states, b, kv, s, memory, normaliser, C)


@triton.jit(do_not_specialize=CHANGING)
def scan_back_kernel(
    to_states,
    to_wrote,
    known,
    rows,
    carried,
    segments,
    width,
    kept,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    DELAY: tl.constexpr,
):
    """to_wrote: the sums from the other end; what leaves the window after the call is not stored.
    to_states, `segments + 1`; then the first holds what is owed to the state before the call. Grid
    (⌈size / BLOCK⌉, kv_heads, batch)."""
    grid = parts.Grid(*known, rows, carried, segments, width, kept)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    h, b = tl.program_id(1), tl.program_id(2)
    inside, now = at < C.D * C.E + C.D, parts.zeros(BLOCK)
    document = parts.documents_of(grid, b)
    continued_from = tl.load(document)
    for step in range(0, segments + 1, 4):  # four loads at a time are on their way
        first = segments - step
        begins = [tl.load(document + tl.maximum(first - i, 0)) for i in (0, 1, 2, 3)]
        owed = [
            tl.load(
                parts.at_state(to_states, b, h, first - i) + at,
                mask=inside & (first >= i),
                other=0.0,
            )
            for i in (0, 1, 2, 3)
        ]
        for i in tl.static_range(4):
            s = first - i
            now += owed[i]
            wrote = s - DELAY
            of_wrote = tl.where(wrote >= begins[i], now, 0.0)
            tl.store(
                parts.at_state(to_wrote, b, h, wrote) + at, of_wrote, mask=inside & (wrote >= 0)
            )
            now = tl.where((begins[i] == s) & (s != continued_from), 0.0, now)
    tl.store(parts.at_state(to_states, b, h, 0) + at, now, mask=inside)


@triton.jit
def _to_keys(
    keys,
    values,
    row,
    slots,
    t,
    low,
    seeing,
    gate,
    grid,
    b,
    kv,
    to_key,
    to_value,
    CAUSAL: tl.constexpr,
    C: tl.constexpr,
):
    """to_key and to_value with what the queries of segment t owe, of its slots from `low` on; keys
    in these slots, where row is not −1, are seen by all of them, or, CAUSAL, by those in later
    slots. Scores are [keys, queries]."""
    group = grid.heads // grid.kv_heads
    for h in range(kv * group, (kv + 1) * group):
        factor = 1.0 - parts.memory_share(gate, grid, b, h, t, C)
        for at in range(low, grid.width, C.BM):
            query_slots = at + tl.arange(0, C.BM)
            token = parts.tokens_of(grid, b, t, query_slots)
            queries = parts.load_rows(seeing.query, b, h, token, C.D).to(C.DTYPE)
            gradient = parts.load_rows(seeing.gradient, b, h, token, C.E).to(C.DTYPE)
            at_row = parts.at_tokens(grid, b, h, token)
            log_two = tl.load(seeing.log_sum + at_row, mask=token >= 0, other=float("inf"))
            along = tl.load(seeing.along + at_row, mask=token >= 0, other=0.0)
            seen = (row >= 0)[:, None]
            if CAUSAL:
                seen = seen & (slots[:, None] <= query_slots[None, :])
            scores = tl.dot(keys, tl.trans(queries), input_precision=PRECISION)
            weights = (
                tl.where(seen, tl.exp2(scores * (grid.scale * LOG2_E) - log_two[None, :]), 0.0)
                * factor
            )
            to_value = tl.dot(weights.to(C.DTYPE), gradient, to_value, input_precision=PRECISION)
            to_weights = tl.dot(values, tl.trans(gradient), input_precision=PRECISION)
            to_scores = weights * (to_weights - along[None, :]) * grid.scale
            to_key = tl.dot(to_scores.to(C.DTYPE), queries, to_key, input_precision=PRECISION)
    return to_key, to_value


@triton.jit(do_not_specialize=CHANGING)
def ahead_kernel(
    to_ahead_k,
    to_ahead_v,
    window,
    seeing,
    gate,
    known,
    rows,
    carried,
    segments,
    width,
    kept,
    C: tl.constexpr,
):
    """to_ahead_k and to_ahead_v `[batch, kv_heads, segments · places ahead, …]`: what the queries
    of each segment owe to the keys of sinks and kept tokens, and their values. Grid (segments ·
    ⌈places / AHEAD⌉, kv_heads, batch)."""
    grid = parts.Grid(*known, rows, carried, segments, width, kept)
    tiles, kv, b = tl.cdiv(C.SINKS + grid.kept, C.AHEAD), tl.program_id(1), tl.program_id(2)
    s, number = (
        tl.program_id(0) // tiles,
        tl.program_id(0) % tiles * C.AHEAD + tl.arange(0, C.AHEAD),
    )
    begin = parts.begin_of(grid, b, s)
    to_key, to_value = parts.zeros(C.AHEAD, C.D), parts.zeros(C.AHEAD, C.E)
    if parts.is_seen(s, begin, C.W + 1, C):
        keys, values, row, place = parts.load_ahead(window, grid, b, kv, s, begin, number, C)
        to_key, to_value = _to_keys(
            keys, values, row, number, s, 0, seeing, gate, grid, b, kv, to_key, to_value, False, C
        )
        to_key = parts.turn(to_key, grid, place, C, True)
    row = tl.where(number < C.SINKS + grid.kept, s * (C.SINKS + grid.kept) + number, -1)
    parts.store_rows(to_ahead_k, b, kv, row, to_key, C.D)
    parts.store_rows(to_ahead_v, b, kv, row, to_value, C.E)


@triton.jit
def _to_written(mk, value, row, written, to_wrote, b, kv, s, C: tl.constexpr):
    """What is owed to these keys and values because segment s wrote them."""
    memory, normaliser = parts.load_state(to_wrote, b, kv, s, C)
    x = parts.load_rows(mk, b, kv, row, C.D).to(tl.float32)
    f = tl.where(written[:, None], parts.features(x, C), 0.0)
    to_value = parts.exact_dot(f, memory, parts.zeros(row.shape[0], C.E), C)
    to_key = (
        parts.exact_dot(value, tl.trans(memory), parts.zeros(row.shape[0], C.D), C)
        + normaliser[None, :]
    )
    return tl.where(written[:, None], to_key * parts.slope(x, f, C), 0.0), to_value


@triton.jit(do_not_specialize=CHANGING)
def evicted_kernel(
    mk,
    v,
    evicted,
    to_mk,
    to_v,
    to_wrote,
    known,
    rows,
    carried,
    segments,
    width,
    kept,
    C: tl.constexpr,
):
    """to_mk and to_v of the rows that are evicted, each of them once. Grid (segments · ⌈width /
    BN⌉, kv_heads, batch)."""
    grid = parts.Grid(*known, rows, carried, segments, width, kept)
    s, first, kv, b = parts.tile_of(grid, C.BN)
    row, written = parts.load_written(evicted, grid, b, kv, s, 0, first + tl.arange(0, C.BN), C)
    to_key, to_value = _to_written(
        mk, parts.load_rows(v, b, kv, row, C.E), row, written, to_wrote, b, kv, s, C
    )
    parts.store_rows(to_mk, b, kv, row, to_key, C.D)
    parts.store_rows(to_v, b, kv, row, to_value, C.E)


@triton.jit(do_not_specialize=CHANGING)
def keys_kernel(
    k,
    mk,
    v,
    seeing,
    to_k,
    to_mk,
    to_v,
    to_wrote,
    owed_k,
    owed_v,
    gate,
    known,
    rows,
    carried,
    segments,
    width,
    kept,
    OF_SINKS: tl.constexpr,
    C: tl.constexpr,
):
    """to_k, to_v and to_mk (`None` where the memory's keys are the window's) of a tile of keys, of
    all rows. k: not turned. to_wrote: `None`: the memory does not take in the segments. owed_k,
    owed_v: what is owed to the rows as what is ahead of windows or written instead; OF_SINKS: to
    the sinks of the document that begins with a segment, `[batch, kv_heads, segments · SINKS, …]`.
    Grid (segments · ⌈width / BN⌉, kv_heads, batch)."""
    grid = parts.Grid(*known, rows, carried, segments, width, kept)
    s, first, kv, b = parts.tile_of(grid, C.BN)
    slots = first + tl.arange(0, C.BN)
    row = parts.rows_of(grid, b, s, slots)
    value = parts.load_rows(v, b, kv, row, C.E)
    to_key, to_value = parts.zeros(C.BN, C.D), parts.zeros(C.BN, C.E)
    # The memory first: what it needs is gone from the registers when the loop begins
    begin = parts.begin_of(grid, b, s)
    if to_wrote is not None:
        if s + C.W + 1 <= grid.segments:
            written = parts.is_written(grid, row, b, s, begin, slots, C)
            to_key, to_value = _to_written(mk, value, row, written, to_wrote, b, kv, s, C)
    if to_mk is not None:
        parts.store_rows(to_mk, b, kv, row, to_key, C.D)
        to_key = parts.zeros(C.BN, C.D)
    value = value.to(C.DTYPE)
    for ahead in tl.static_range(C.W + 1):
        t = s + ahead
        sees = t < grid.segments
        if sees:
            sees = parts.begin_of(grid, b, t) <= s
        if sees:
            place = tl.where(
                row >= 0, C.SINKS + grid.kept + (C.W - ahead) * grid.length + slots, -1
            )
            keys = parts.turn(parts.load_rows(k, b, kv, row, C.D), grid, place, C).to(C.DTYPE)
            of_segment, low = parts.zeros(C.BN, C.D), first // C.BM * C.BM if ahead == 0 else 0
            of_segment, to_value = _to_keys(
                keys,
                value,
                row,
                slots,
                t,
                low,
                seeing,
                gate,
                grid,
                b,
                kv,
                of_segment,
                to_value,
                ahead == 0,
                C,
            )
            to_key += parts.turn(of_segment, grid, place, C, True)
    if owed_k is not None:
        owed = row
        if OF_SINKS:
            owed = tl.where((begin == s) & (slots < C.SINKS), s * C.SINKS + slots, -1)
        to_key += parts.load_rows(owed_k, b, kv, owed, C.D)
        to_value += parts.load_rows(owed_v, b, kv, owed, C.E)
    parts.store_rows(to_k, b, kv, row, to_key, C.D)
    parts.store_rows(to_v, b, kv, row, to_value, C.E)
