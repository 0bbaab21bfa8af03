"""What the kernels of the linear rule share: which token is in a slot, loading and storing rows, products, features and
rotation.

A *row* is a place in the tensors of keys: first what the grid holds of the state's window (`carried` rows), then the call's
tokens; −1 where a slot is empty. Queries and outputs have only the tokens. Everything a kernel makes is contiguous,
`[batch, tokens, heads, width]`.
"""

import os

import triton
import triton.language as tl

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # on a CPU, for tests
LOG2_E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1.0e30)  # the score of what is not seen


@triton.jit
def exact_dot(a, b, total, SPLIT: tl.constexpr, PRECISION: tl.constexpr):
    """total + a b as of float32 matrices.

    SPLIT: what is not bfloat16 becomes the sum of two numbers that are. Their products have 16 bits at half of what three of
    11 bits (tf32x3) cost, and the range of float32, which features need.
    """
    if not SPLIT:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision=PRECISION)
    a_high, b_high = a.to(tl.bfloat16), b.to(tl.bfloat16)
    if a.dtype != tl.bfloat16:
        total = tl.dot((a.to(tl.float32) - a_high.to(tl.float32)).to(tl.bfloat16), b_high, total)
    if b.dtype != tl.bfloat16:
        total = tl.dot(a_high, (b.to(tl.float32) - b_high.to(tl.float32)).to(tl.bfloat16), total)
    return tl.dot(a_high, b_high, total)


@triton.jit
def features(x, EXP: tl.constexpr):
    """σ(x) in float32."""
    if EXP:
        return tl.exp(tl.minimum(x, 30.0))
    return tl.where(x > 0, x + 1.0, tl.exp(tl.minimum(x, 0.0)))


@triton.jit
def slope(x, f, EXP: tl.constexpr):
    """σ'(x), from x and σ(x)."""
    if EXP:
        return tl.where(x > 30.0, 0.0, f)
    return tl.minimum(f, 1.0)


@triton.jit
def rows_of(source, b, s, slots, count, segments, width, INDEXED: tl.constexpr):
    """The rows in these slots of segment s: `[slots]`, −1 where there is none.

    source: `[batch, segments * width]`, the row in each slot of the grid; without INDEXED slot follows slot.
    count: rows there are; width: slots of a segment.
    """
    at = s * width + slots
    if INDEXED:
        return tl.load(source + b.to(tl.int64) * segments * width + at, mask=slots < width, other=-1).to(tl.int32)
    return tl.where((slots < width) & (at < count), at, -1)


@triton.jit
def load_rows(base, row, stride, WIDTH: tl.constexpr):
    """`[rows, WIDTH]` in the tensor's dtype, zero where there is no row."""
    at = row.to(tl.int64)[:, None] * stride + tl.arange(0, WIDTH)[None, :]
    return tl.load(base + at, mask=(row >= 0)[:, None], other=0.0)


@triton.jit
def store_rows(base, row, stride, x, WIDTH: tl.constexpr):
    at = row.to(tl.int64)[:, None] * stride + tl.arange(0, WIDTH)[None, :]
    tl.store(base + at, x.to(base.dtype.element_ty), mask=(row >= 0)[:, None])


@triton.jit
def swapped_halves(x, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """`[ROWS, WIDTH]` with its halves in each other's place."""
    first, second = tl.split(tl.permute(tl.reshape(x, (ROWS, 2, WIDTH // 2)), (0, 2, 1)))
    return tl.reshape(tl.permute(tl.join(second, first), (0, 2, 1)), (ROWS, WIDTH))


@triton.jit
def turn(x, cos, sin, place, ROWS: tl.constexpr, WIDTH: tl.constexpr, SIGNED: tl.constexpr, BACK: tl.constexpr):
    """x `[ROWS, WIDTH]`, float32, turned by the rows `place` of the tables; BACK: what the gradient of this is. A place is
    below zero where there is no token.

    SIGNED: the first half of the sines is negative already.
    """
    at, there = place[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :], (place >= 0)[:, None]
    c = tl.load(cos + at, mask=there, other=0.0).to(tl.float32)
    s = tl.load(sin + at, mask=there, other=0.0).to(tl.float32)
    if not SIGNED:
        s = tl.where((tl.arange(0, WIDTH) < WIDTH // 2)[None, :], -s, s)
    if BACK:
        return x * c + swapped_halves(x * s, ROWS, WIDTH)
    return x * c + swapped_halves(x, ROWS, WIDTH) * s


@triton.jit
def load_state(states, D: tl.constexpr, E: tl.constexpr):
    """M `[D, E]` and z `[D]` of one state."""
    d, e = tl.arange(0, D), tl.arange(0, E)
    return tl.load(states + d[:, None] * E + e[None, :]), tl.load(states + D * E + d)


@triton.jit
def store_state(states, memory, normaliser, D: tl.constexpr, E: tl.constexpr):
    d, e = tl.arange(0, D), tl.arange(0, E)
    tl.store(states + d[:, None] * E + e[None, :], memory)
    tl.store(states + D * E + d, normaliser)


@triton.jit
def sink_rows(
    source, b, begin, count, segments, width, SINKS: tl.constexpr, SINK_TILE: tl.constexpr, INDEXED: tl.constexpr,
    APART: tl.constexpr,
):  # fmt: skip
    """The rows of a document's sinks, `[SINK_TILE]`, −1 beyond them: the first of its first segment; APART: of tensors of
    their own."""
    number = tl.arange(0, SINK_TILE)
    if APART:
        return tl.where(number < SINKS, number, -1)
    return rows_of(source, b, begin, tl.where(number < SINKS, number, width), count, segments, width, INDEXED)


@triton.jit
def holds_memory(held, b, s, held_b, STARTED: tl.constexpr):
    """Whether there is anything to read from the memory of segment s. held: the layout's `left` (nothing is kept). STARTED:
    the memory of a new document is not empty."""
    if STARTED:
        return s >= 0
    return tl.load(held + b * held_b + s) > 0


@triton.jit
def memory_share(gate, held, h, b, s, held_b, STARTED: tl.constexpr):
    """The memory's share of the output of head h in segment s."""
    return tl.where(holds_memory(held, b, s, held_b, STARTED), tl.sigmoid(tl.load(gate + h).to(tl.float32)), 0.0)


@triton.jit
def is_written(skipped, row, b, s, slots, begin, segments, width, SINKS: tl.constexpr, SKIPPING: tl.constexpr):
    """Which of these slots' tokens the memory takes in when their segment leaves the window."""
    written = row >= 0
    if SINKS > 0:
        written = written & ((begin != s) | (slots >= SINKS))
    if SKIPPING:
        at = (b * segments + s).to(tl.int64) * width + slots
        written = written & (tl.load(skipped + at, mask=slots < width, other=1) == 0)
    return written
