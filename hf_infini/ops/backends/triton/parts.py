"""What the kernels share.

A *row* is a place in the tensors of keys: first what the grid holds of the state's window
(`carried` rows), then the call's tokens; −1 where a slot is empty. Queries and outputs have only
the tokens. A *state* is D · E + D float32 numbers, M and z.
"""

import os
from collections import namedtuple

import triton
import triton.language as tl

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # on a CPU, for tests
PRECISION = tl.constexpr("ieee" if INTERPRETED else "tf32x3")  # of products in float32
LOG2_E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1.0e30)  # the score of what is not seen

# A tensor `[batch, heads, rows, width]` and its strides; of states, `[batch, kv_heads, segments, D
# · E + D]`
Rows = namedtuple("Rows", "data batch head row")
# What queries see: turned keys and values, of all rows; and where sinks and then kept tokens are,
# which are ahead of them: `ahead`, rows of `source_key`, not turned, and `source_value`, `[batch,
# kv_heads, segments, SINKS + kept]`, −1 for none; `None`: the sinks are the first tokens of their
# document
Window = namedtuple("Window", "key value ahead source_key source_value")
# What keys are seen by: queries, turned by their places in the window, the gradient of their
# output, log₂ of the softmax's denominator, and along, ⟨gradient, what the window found⟩, `[batch,
# heads, tokens]` both
Seeing = namedtuple("Seeing", "query gradient log_sum along")
# Of the layout ([`GridLayout`]); cosines and sines; of the layer
Known = namedtuple("Known", "source skipped document left cos sin heads kv_heads length scale eps")
# What changes from call to call, or from layer to layer, width: slots of a segment, kept: places
# for kept tokens. Triton compiles anew for some numbers in a tuple, so a kernel takes these as
# arguments of their own and puts all into a [`Grid`]
CHANGING = ["rows", "carried", "segments", "width", "kept"]
Grid = namedtuple("Grid", [*Known._fields, *CHANGING])
# What is compiled in. D, E: widths of keys and values. W: segments before that of a query in its
# window. SINKS: places ahead of these, AHEAD: of sinks and kept tokens so many loaded at a time, 0:
# there are none. SIGNED: whether the first half of the sines is negative already; `None`: nothing
# is turned. EXP: whether features are exponential. DTYPE: of the window's products. BM, BN: queries
# and keys at a time
Constants = namedtuple("Constants", "D E W SINKS AHEAD SIGNED EXP DTYPE BM BN")


@triton.jit
def zeros(ROWS: tl.constexpr, WIDTH: tl.constexpr = None):
    """`[ROWS, WIDTH]`, or `[ROWS]`, in float32."""
    return tl.zeros([ROWS] if WIDTH is None else [ROWS, WIDTH], tl.float32)


@triton.jit
def exact_dot(a, b, total, C: tl.constexpr):
    """total + a b as of float32 matrices. Where products have 16 bits, what is not bfloat16 becomes
    the sum of two numbers that are: products of 16 bits and of the range that features need, at
    half of what three of 11 bits (tf32x3) cost."""
    if C.DTYPE == tl.float32:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision=PRECISION)
    a_high, b_high = a.to(tl.bfloat16), b.to(tl.bfloat16)
    if a.dtype != tl.bfloat16:
        total = tl.dot((a.to(tl.float32) - a_high.to(tl.float32)).to(tl.bfloat16), b_high, total)
    if b.dtype != tl.bfloat16:
        total = tl.dot(a_high, (b.to(tl.float32) - b_high.to(tl.float32)).to(tl.bfloat16), total)
    return tl.dot(a_high, b_high, total)


@triton.jit
def features(x, C: tl.constexpr):
    """σ(x) in float32."""
    if C.EXP:
        return tl.exp(tl.minimum(x, 30.0))
    return tl.where(x > 0, x + 1.0, tl.exp(tl.minimum(x, 0.0)))


@triton.jit
def slope(x, f, C: tl.constexpr):
    """σ'(x), from x and σ(x)."""
    if C.EXP:
        return tl.where(x > 30.0, 0.0, f)
    return tl.minimum(f, 1.0)


@triton.jit
def tile_of(grid, TILE: tl.constexpr):
    """The segment of this program, its first slot, its head and its row of the batch."""
    tiles = tl.cdiv(grid.width, TILE)
    return (
        tl.program_id(0) // tiles,
        tl.program_id(0) % tiles * TILE,
        tl.program_id(1),
        tl.program_id(2),
    )


@triton.jit
def documents_of(grid, b):
    """Where the segments are that the documents of a row begin with; without `source` all rows have
    the same."""
    if grid.source is not None:
        return grid.document + b * (grid.segments + 1)
    return grid.document


@triton.jit
def begin_of(grid, b, s):
    """The segment that the document of segment s begins with."""
    return tl.load(documents_of(grid, b) + s).to(tl.int32)


@triton.jit
def rows_of(grid, b, s, slots):
    """The rows in these slots of segment s: `[slots]`, −1 where there is none. Without `source`
    slot follows slot."""
    at = s * grid.width + slots
    if grid.source is not None:
        source = grid.source + b.to(tl.int64) * grid.segments * grid.width
        return tl.load(source + at, mask=slots < grid.width, other=-1).to(tl.int32)
    return tl.where((slots < grid.width) & (at < grid.rows), at, -1)


@triton.jit
def tokens_of(grid, b, s, slots):
    """The call's tokens in these slots, likewise."""
    row = rows_of(grid, b, s, slots)
    return tl.where(row >= grid.carried, row - grid.carried, -1)


@triton.jit
def at_tokens(grid, b, h, token):
    """Where the numbers of these tokens are in `[batch, heads, tokens]`."""
    return (b * grid.heads + h).to(tl.int64) * (grid.rows - grid.carried) + token


@triton.jit
def _at_rows(x, b, h, row, WIDTH: tl.constexpr):
    at = row.to(tl.int64)[:, None] * x.row + tl.arange(0, WIDTH)[None, :]
    return x.data + b.to(tl.int64) * x.batch + tl.cast(h, tl.int64) * x.head + at


@triton.jit
def load_rows(x, b, h, row, WIDTH: tl.constexpr):
    """`[rows, WIDTH]` in the tensor's dtype, zero where there is no row."""
    return tl.load(_at_rows(x, b, h, row, WIDTH), mask=(row >= 0)[:, None], other=0.0)


@triton.jit
def store_rows(x, b, h, row, rows, WIDTH: tl.constexpr):
    tl.store(
        _at_rows(x, b, h, row, WIDTH), rows.to(x.data.dtype.element_ty), mask=(row >= 0)[:, None]
    )


@triton.jit
def at_state(x, b, h, s):
    """Where the state of segment s begins."""
    return (
        x.data + b.to(tl.int64) * x.batch + h.to(tl.int64) * x.head + tl.cast(s, tl.int64) * x.row
    )


@triton.jit
def load_state(states, b, h, s, C: tl.constexpr):
    """M `[D, E]` and z `[D]` of one state."""
    d, e, at = tl.arange(0, C.D), tl.arange(0, C.E), at_state(states, b, h, s)
    return tl.load(at + d[:, None] * C.E + e[None, :]), tl.load(at + C.D * C.E + d)


@triton.jit
def store_state(states, b, h, s, memory, normaliser, C: tl.constexpr):
    d, e, at = tl.arange(0, C.D), tl.arange(0, C.E), at_state(states, b, h, s)
    tl.store(at + d[:, None] * C.E + e[None, :], memory)
    tl.store(at + C.D * C.E + d, normaliser)


@triton.jit
def _swapped_halves(x):
    first, second = tl.split(tl.permute(tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2)), (0, 2, 1)))
    return tl.reshape(tl.permute(tl.join(second, first), (0, 2, 1)), x.shape)


@triton.jit
def turn(x, grid, place, C: tl.constexpr, BACK: tl.constexpr = False):
    """x `[…, D]` turned by the rows `place` of the tables, in float32; BACK: what the gradient of
    this is. A place is below zero where there is no token. Without rotary positions, x."""
    if C.SIGNED is not None:
        at, there = place[:, None] * C.D + tl.arange(0, C.D)[None, :], (place >= 0)[:, None]
        x, cos = x.to(tl.float32), tl.load(grid.cos + at, mask=there, other=0.0).to(tl.float32)
        sin = tl.load(grid.sin + at, mask=there, other=0.0).to(tl.float32)
        if not C.SIGNED:
            sin = tl.where((tl.arange(0, C.D) < C.D // 2)[None, :], -sin, sin)
        if BACK:
            x = x * cos + _swapped_halves(x * sin)
        else:
            x = x * cos + _swapped_halves(x) * sin
    return x


@triton.jit
def load_index(index, grid, b, kv, s, at, count):
    """Rows at these places of segment s in `[batch, kv_heads, segments, count]`, −1 beyond the
    last."""
    first = ((b.to(tl.int64) * grid.kv_heads + kv) * grid.segments + s) * count
    return tl.load(index + first + at, mask=at < count, other=-1)


@triton.jit
def load_ahead(window, grid, b, kv, s, begin, number, C: tl.constexpr):
    """Turned keys and values of the sinks and kept tokens in these places that segment s sees,
    their rows, or −1, and the places by which they are turned: sinks are right before the tokens
    that are kept by then."""
    if window.ahead is None:
        row = rows_of(grid, b, begin, tl.where(number < C.SINKS, number, grid.width))
        place = tl.where(row >= 0, number, -1)
        keys, values = (
            load_rows(window.key, b, kv, row, C.D),
            load_rows(window.value, b, kv, row, C.E),
        )
    else:
        row = load_index(window.ahead, grid, b, kv, s, number, C.SINKS + grid.kept)
        empty = grid.kept - tl.minimum(tokens_left(grid, b, s), grid.kept).to(tl.int32)
        place = tl.where(row >= 0, number + tl.where(number < C.SINKS, empty, 0), -1)
        keys = turn(load_rows(window.source_key, b, kv, row, C.D), grid, place, C)
        values = load_rows(window.source_value, b, kv, row, C.E)
    return keys.to(C.DTYPE), values.to(C.DTYPE), row, place


@triton.jit
def is_seen(s, begin, part: tl.constexpr, C: tl.constexpr):
    """Whether segment s, of a document that begins with another, sees this part of a window: its
    own segment, the W before it, and last sinks and kept tokens, which are seen where a segment
    would be."""
    return (s - part >= begin) & ((s >= part) | (part > C.W))


@triton.jit
def reach(grid, first, token, slots, part: tl.constexpr, C: tl.constexpr):
    """The places by which a tile of queries is turned for this part of its window, and the slot
    where the part ends."""
    place, end = part * grid.length, grid.width
    if part == 0:
        end = tl.minimum(first + C.BM, end)
    if part > C.W:
        place, end = C.SINKS + grid.kept + C.W * grid.length, C.SINKS + grid.kept
    return tl.where(token >= 0, place + slots, -1), end


@triton.jit
def load_seen(window, grid, b, kv, s, begin, part: tl.constexpr, at, slots, C: tl.constexpr):
    """Turned keys and values of this part of a window, a tile from slot or place `at` on, and which
    the slots see."""
    key_slots = at + tl.arange(0, C.AHEAD if part > C.W else C.BN)
    if part > C.W:
        keys, values, row, _ = load_ahead(window, grid, b, kv, s, begin, key_slots, C)
    else:
        row = rows_of(grid, b, s - part, key_slots)
        keys, values = (
            load_rows(window.key, b, kv, row, C.D),
            load_rows(window.value, b, kv, row, C.E),
        )
    seen = (row >= 0)[None, :]
    if part == 0:
        seen = seen & (key_slots[None, :] <= slots[:, None])
    return keys.to(C.DTYPE), values.to(C.DTYPE), seen


@triton.jit
def tokens_left(grid, b, s):
    """How many tokens have left the window of segment s: as many as fit are kept, the others in its
    memory."""
    return tl.load(grid.left + b * (grid.segments + 1) + s)


@triton.jit
def memory_share(gate, grid, b, h, s, C: tl.constexpr):
    """The memory's share of the output of head h in segment s."""
    return tl.where(
        tokens_left(grid, b, s) > grid.kept, tl.sigmoid(tl.load(gate + h).to(tl.float32)), 0.0
    )


@triton.jit
def is_written(grid, row, b, s, begin, slots, C: tl.constexpr):
    """Which of these slots' tokens the memory takes in when their segment leaves the window."""
    written = row >= 0
    if C.SINKS > 0:
        written = written & ((begin != s) | (slots >= C.SINKS))
    if grid.skipped is not None:
        at = (b * grid.segments + s).to(tl.int64) * grid.width + slots
        written = written & (tl.load(grid.skipped + at, mask=slots < grid.width, other=1) == 0)
    return written


@triton.jit
def load_written(evicted, grid, b, kv, s, begin, slots, C: tl.constexpr):
    """The rows in these slots of segment s, or of what it evicts, and which of them the memory
    takes in."""
    if evicted is None:
        row = rows_of(grid, b, s, slots)
        written = is_written(grid, row, b, s, begin, slots, C)
    else:
        row = load_index(evicted, grid, b, kv, s, slots, grid.width)
        written = row >= 0
    return row, written
