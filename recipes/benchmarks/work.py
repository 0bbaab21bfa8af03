"""The operations and bytes that one layer's forward and backward pass cannot do without, counted from its shape.

Only products of matrices are counted, two operations for each multiplication with its addition: exponentials, divisions and
masks are not. Where a token sees earlier ones by softmax, only the pairs that are visible count, not the half of the square
that a kernel may compute and throw away. A backward pass needs two products for each of the forward pass (a gradient for
each factor); what a kernel computes a second time to save memory is its own choice and does not count.
"""

from dataclasses import dataclass

ITEM_BYTES = {"float32": 4, "bfloat16": 2}
PASSES = 3  # forward, and two gradients


@dataclass(frozen=True)
class Shape:
    """One layer's work: `tokens` in segments of `segment`, `batch` rows, `heads` × `head_dim`, and a dtype's name."""

    tokens: int
    segment: int
    heads: int = 12
    head_dim: int = 64
    batch: int = 1
    dtype: str = "float32"

    def tensor_bytes(self) -> int:
        """Of one of query, key, value, output or a gradient of them."""
        return self.batch * self.tokens * self.heads * self.head_dim * ITEM_BYTES[self.dtype]


def causal_pairs(tokens: int) -> int:
    """Pairs of a token and one that it sees, when it sees itself and all before it."""
    return tokens * (tokens + 1) // 2


def window_pairs(tokens: int, window: int) -> int:
    """The same when it sees itself and the `window - 1` before it."""
    window = min(window, tokens)
    return causal_pairs(window) + (tokens - window) * window


def segment_pairs(tokens: int, segment: int, local_segments: int = 0) -> int:
    """The same when it sees its own segment up to itself, and `local_segments` whole ones before that."""
    pairs, begin = 0, 0
    while begin < tokens:
        own = min(segment, tokens - begin)
        pairs += causal_pairs(own) + own * min(begin, local_segments * segment)
        begin += own
    return pairs


def softmax_operations(shape: Shape, pairs: int) -> int:
    """Forward and backward of softmax attention over so many pairs a head: a product for scores, one for values."""
    return PASSES * shape.batch * shape.heads * pairs * 4 * shape.head_dim


def infini_operations(shape: Shape, update_rule: str = "linear") -> int:
    """Forward and backward of equations 2 to 4: segments, reads of the memory, and its updates.

    The first segment has no memory to read, and what the last one would write nobody reads.
    """
    width = shape.head_dim
    last = shape.tokens - (-(-shape.tokens // shape.segment) - 1) * shape.segment
    read, written = max(0, shape.tokens - shape.segment), shape.tokens - last
    touch = 2 * width * width + 2 * width  # σ(q) M and σ(q) z, for a token
    memory = read * touch + written * (2 * width * width + width)  # σ(k)ᵀ v, and a sum
    if update_rule == "delta":
        memory += max(0, written - shape.segment) * touch  # into an empty memory the first segment is written as it is
    local = softmax_operations(shape, segment_pairs(shape.tokens, shape.segment))
    return local + PASSES * shape.batch * shape.heads * memory


def projection_operations(shape: Shape) -> int:
    """Forward and backward of a layer's four square projections, query, key, value and output."""
    width = shape.heads * shape.head_dim
    return PASSES * shape.batch * shape.tokens * 4 * 2 * width * width


def bytes_moved(shape: Shape) -> int:
    """Query, key, value, output and the gradient of each, once."""
    return 8 * shape.tensor_bytes()
