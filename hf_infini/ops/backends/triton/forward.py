"""Forward: turn the keys; write a state per segment and sum the states up; attend.

Shapes as in ops/attention.py; tensors are [`Rows`]. The grid of programs is (tiles of the grid's
slots, heads, batch).

Rotary positions: only distances count, so a key is turned once, by its slot, and a query by its
slot and the segments between the two. Sinks and kept tokens are turned by their places, and a query
that sees them by its place in the window.
"""

import triton
import triton.language as tl

from . import parts
from .parts import CHANGING, LOG2_E, LOWEST, PRECISION


@triton.jit(do_not_specialize=["shift", "first_place", *CHANGING])
def turn_kernel(
    x, turned, shift, first_place, known, rows, carried, segments, width, kept, C: tl.constexpr
):
    """x turned by `first_place` and each token's slot. `shift`: rows before those of x."""
    grid = parts.Grid(*known, rows, carried, segments, width, kept)
    s, first, h, b = parts.tile_of(grid, C.BM)
    slots = first + tl.arange(0, C.BM)
    row = parts.rows_of(grid, b, s, slots)
    row = tl.where(row >= shift, row - shift, -1)
    place = tl.where(row >= 0, first_place + slots, -1)
    parts.store_rows(
        turned, b, h, row, parts.turn(parts.load_rows(x, b, h, row, C.D), grid, place, C), C.D
    )


@triton.jit(do_not_specialize=CHANGING)
def write_kernel(
    mk, v, evicted, wrote, known, rows, carried, segments, width, kept, C: tl.constexpr
):
    """wrote, of each segment: σ(K)ᵀ V and Σ σ(k). evicted: rows that are written instead, where
    tokens are kept, `[batch, kv_heads, segments, width]`. Grid (segments, kv_heads, batch)."""
    grid = parts.Grid(*known, rows, carried, segments, width, kept)
    s, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    begin = parts.begin_of(grid, b, s)
    memory, normaliser = parts.zeros(C.D, C.E), parts.zeros(C.D)
    for at in range(0, grid.width, C.BN):
        row, written = parts.load_written(evicted, grid, b, h, s, begin, at + tl.arange(0, C.BN), C)
        f = tl.where(
            written[:, None],
            parts.features(parts.load_rows(mk, b, h, row, C.D).to(tl.float32), C),
            0.0,
        )
        memory = parts.exact_dot(tl.trans(f), parts.load_rows(v, b, h, row, C.E), memory, C)
        normaliser += tl.sum(f, 0)
    parts.store_state(wrote, b, h, s, memory, normaliser, C)


@triton.jit(do_not_specialize=CHANGING)
def scan_kernel(
    wrote,
    states,
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
    """states, `segments + 1`: what each segment reads, and the next one would; the first holds that
    before the call. A state has what was written DELAY segments before it. Grid (⌈size / BLOCK⌉,
    kv_heads, batch), size: numbers in a state."""
    grid = parts.Grid(*known, rows, carried, segments, width, kept)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    h, b = tl.program_id(1), tl.program_id(2)
    inside = at < C.D * C.E + C.D
    now = tl.load(parts.at_state(states, b, h, 0) + at, mask=inside, other=0.0)
    document = parts.documents_of(grid, b)
    # where the document of the state before the call began, or might have
    continued_from = tl.load(document)
    for first in range(0, segments + 1, 4):  # four loads at a time are on their way
        begins = [tl.load(document + tl.minimum(first + i, segments)) for i in (0, 1, 2, 3)]
        left = [  # what is in the memory of a segment and not in that of the one before
            tl.load(
                parts.at_state(wrote, b, h, first + i - DELAY) + at,
                mask=inside
                & (first + i <= segments)
                & (first + i - DELAY >= tl.maximum(begins[i], 0)),
                other=0.0,
            )
            for i in (0, 1, 2, 3)
        ]
        for i in tl.static_range(4):
            s = first + i
            now = tl.where((begins[i] == s) & (s != continued_from), 0.0, now) + left[i]
            tl.store(parts.at_state(states, b, h, s) + at, now, mask=inside & (s <= segments))


@triton.jit
def _weighed(queries, keys, values, seen, top, mass, total, scale, C: tl.constexpr):
    """A tile of keys more in the running softmax: its largest score, Σ e^(s − top), and Σ e^(s −
    top) v; base 2."""
    scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
    scores = tl.where(seen, scores * (scale * LOG2_E), LOWEST)
    new_top = tl.maximum(top, tl.max(scores, 1))
    weights, shrink = tl.exp2(scores - new_top[:, None]), tl.exp2(top - new_top)
    total = tl.dot(weights.to(C.DTYPE), values, total * shrink[:, None], input_precision=PRECISION)
    return new_top, mass * shrink + tl.sum(weights, 1), total


@triton.jit(do_not_specialize=CHANGING)
def attend_kernel(
    q,
    window,
    out,
    found,
    log_sum,
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
    """Window, read and mixture of a tile of queries. q: not turned. For the gradient, or `None`:
    found, what the window found, and log_sum `[batch, heads, tokens]`, log₂ of the softmax's
    denominator. Grid (segments · ⌈width / BM⌉, heads, batch)."""
    grid = parts.Grid(*known, rows, carried, segments, width, kept)
    s, first, h, b = parts.tile_of(grid, C.BM)
    kv, begin, slots = (
        h // (grid.heads // grid.kv_heads),
        parts.begin_of(grid, b, s),
        first + tl.arange(0, C.BM),
    )
    token = parts.tokens_of(grid, b, s, slots)
    query = parts.load_rows(q, b, h, token, C.D)
    # above the score of what is not seen, so that this weighs nothing
    top = parts.zeros(C.BM) + LOWEST / 2
    mass, total = parts.zeros(C.BM), parts.zeros(C.BM, C.E)
    for part in tl.static_range(C.W + 1 + (C.AHEAD > 0)):
        if parts.is_seen(s, begin, part, C):
            place, end = parts.reach(grid, first, token, slots, part, C)
            turned = parts.turn(query, grid, place, C).to(C.DTYPE)
            for at in range(0, end, C.AHEAD if part > C.W else C.BN):
                keys, values, seen = parts.load_seen(
                    window, grid, b, kv, s, begin, part, at, slots, C
                )
                top, mass, total = _weighed(
                    turned, keys, values, seen, top, mass, total, grid.scale, C
                )
    mass = tl.where(token >= 0, mass, 1.0)
    local = total / mass[:, None]
    if found is not None:
        parts.store_rows(found, b, h, token, local, C.E)
        tl.store(log_sum + parts.at_tokens(grid, b, h, token), top + tl.log2(mass), mask=token >= 0)
    if parts.tokens_left(grid, b, s) > grid.kept:
        memory, normaliser = parts.load_state(states, b, kv, s, C)
        f = parts.features(parts.load_rows(q, b, h, token, C.D).to(tl.float32), C)
        denominator = tl.sum(f * normaliser[None, :], 1) + grid.eps
        read = parts.exact_dot(f, memory, parts.zeros(C.BM, C.E), C) / denominator[:, None]
        local += tl.sigmoid(tl.load(gate + h).to(tl.float32)) * (read - local)
    parts.store_rows(out, b, h, token, local, C.E)
