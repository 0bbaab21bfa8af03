"""What one attention layer can be made of: this package's function, plain loops, and what else looks at near tokens.

Every contestant gets the same query, key and value, views `[batch, heads, tokens, head_dim]` of contiguous `[batch, tokens,
heads, head_dim]` as a model's projections give them, and goes forward and backward. Those that follow the same equations
(test_benchmark_contestants.py holds them against the naive reference) are:

- `infini`, `infini-delta`: `hf_infini.infini_attention`, linear and delta rule.
- `loop-sliced`: a Python loop that slices each segment out of the whole. The backward pass of every slice writes a gradient
  as long as the whole, so it takes quadratic time.
- `loop-split`, `loop-split-delta`: the same loop over pieces that one `split` made.
- `parallel`: all segments at once by plain operations: sdpa over batch × segments, memories by a cumulative sum.

And those that compute something else on the same tensors:

- `causal-sdpa`, `causal-eager`: full causal attention, by torch's own kernel and written out.
- `sliding-window`: each token sees itself and the L - 1 before it; flex_attention, compiled, on a GPU, sdpa with a mask of
  tokens × tokens elsewhere (the mask counts as memory, its making not as time).
- `local-attention` (PyPI): its default for causal models: a token's own window of L up to itself, and the whole one before.
- `infini-transformer-pytorch` (PyPI): `CausalAttention`, given its input in segments with the memories handed on. It has
  projections, a norm and rotary positions of its own, which the others do not; its gate is the local attention's share, its
  memory is of the inputs' dtype, and its ε a lower bound of the denominator. Its width is heads × head_dim.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_infini import infini_attention
from hf_infini.ops.naive import attend_by_segments
from hf_infini.options import UPDATE_RULES

EPS = 1e-6
BASE = "infini"  # whose time and memory are 1 in the ratios


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
        return self.batch * self.tokens * self.heads * self.head_dim * getattr(torch, self.dtype).itemsize


@dataclass
class Problem:
    """Inputs of one layer, leaves of the graph, and the gradient of the output, all `[batch, tokens, heads, head_dim]`."""

    shape: Shape
    query: Tensor
    key: Tensor
    value: Tensor
    gate: Tensor
    upstream: Tensor

    @classmethod
    def random(cls, shape: Shape, device: str = "cpu", seed: int = 0) -> "Problem":
        draw = torch.Generator(device).manual_seed(seed)
        size = (shape.batch, shape.tokens, shape.heads, shape.head_dim)
        dtype = getattr(torch, shape.dtype)
        query, key, value, upstream = (torch.randn(size, generator=draw, device=device, dtype=dtype) for _ in range(4))
        gate = torch.linspace(-1, 1, shape.heads, device=device)
        return cls(shape, *(leaf.requires_grad_() for leaf in (query, key, value, gate)), upstream)

    def views(self) -> list[Tensor]:
        """Query, key and value as attention functions take them, `[batch, heads, tokens, head_dim]`."""
        return [tensor.transpose(1, 2) for tensor in (self.query, self.key, self.value)]


Forward = tuple[Callable[[], Tensor], list[Tensor]]  # what computes the output, and parameters of its own


def run_of(name: str, problem: Problem) -> Callable[[], None]:
    """Forward and backward of one contestant."""
    forward, parameters = CONTESTANTS[name](problem)
    leaves = [problem.query, problem.key, problem.value, problem.gate, *parameters]
    upstream = problem.upstream.transpose(1, 2)

    def run() -> None:
        torch.autograd.grad(forward(), leaves, upstream, allow_unused=True)

    return run


def prepare_layer(name: str, shape: Shape, device: str) -> Callable[[], None]:
    """One contestant's forward and backward with its inputs, for [`measuring.peak_of`].

    Two segments warm up a process on the CPU. On a GPU it is the whole: what is compiled, is compiled for its shape.
    """

    def once(shape: Shape) -> None:
        run_of(name, Problem.random(shape, device))()

    once(shape if device.startswith("cuda") else replace(shape, tokens=min(shape.tokens, 2 * shape.segment)))
    return lambda: once(shape)


# --- the same equations -----------------------------------------------------------------------------------------------


def loop(
    query: Tensor, key: Tensor, value: Tensor, gate: Tensor, segment: int, *, split: bool, delta: bool = False
) -> Tensor:
    """Equations 2 to 5 segment after segment, as one would write them first; tensors as in [`infini_attention`]."""
    tensors = (query, key, value)
    if split:
        pieces = zip(*(tensor.split(segment, 2) for tensor in tensors), strict=True)
    else:
        begins = range(0, query.shape[2], segment)
        pieces = (tuple(tensor[:, :, begin : begin + segment] for tensor in tensors) for begin in begins)
    return attend_by_segments(pieces, gate, "delta" if delta else "linear")


def parallel(query: Tensor, key: Tensor, value: Tensor, gate: Tensor, segment: int) -> Tensor:
    """The same with the linear rule, for all segments at once: a state for each, `[batch, segments, heads, d, d]`."""
    batch, tokens = query.shape[0], query.shape[2]
    missing_tokens = -tokens % segment  # at the end of the last segment, where no real token sees them
    q, k, v = (
        F.pad(tensor, (0, 0, 0, missing_tokens)).unflatten(2, (-1, segment)).transpose(1, 2)
        for tensor in (query, key, value)
    )  # [batch, segments, heads, segment, head_dim]
    rows = (tensor.flatten(0, 1) for tensor in (q, k, v))
    local = F.scaled_dot_product_attention(*rows, is_causal=True).unflatten(0, (batch, -1))
    features = F.elu(k.float()) + 1
    written = (features.transpose(-1, -2) @ v.float(), features.sum(-2).unsqueeze(-1))
    memory, normaliser = (F.pad(t[:, :-1], (0, 0, 0, 0, 0, 0, 1, 0)).cumsum(1) for t in written)
    features = F.elu(q.float()) + 1
    read = features @ memory / (features @ normaliser + EPS)  # equation 3
    share = torch.sigmoid(gate.float())[:, None, None].expand(q.shape[1], -1, -1, -1).clone()
    share[0] = 0.0  # nothing is older than the first segment
    mixed = torch.lerp(local.float(), read, share.expand_as(read)).to(query.dtype)
    return mixed.transpose(1, 2).flatten(2, 3)[:, :, :tokens]


# --- something else on the same tensors -------------------------------------------------------------------------------


def eager(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Full causal attention written out, its softmax in float32, as transformers' eager models do it."""
    tokens = query.shape[2]
    later = torch.ones(tokens, tokens, dtype=torch.bool, device=query.device).triu(1)
    scores = (query * query.shape[-1] ** -0.5) @ key.transpose(-1, -2)
    weights = scores.masked_fill_(later, float("-inf")).softmax(-1, dtype=torch.float32)
    return weights.to(value.dtype) @ value


def _make_sliding_window(problem: Problem) -> Forward:
    tokens, window, device = problem.shape.tokens, problem.shape.segment, problem.query.device
    if device.type == "cuda":
        from torch.nn.attention.flex_attention import create_block_mask

        def visible(batch, head, query, key):
            return (query >= key) & (query - key < window)

        mask = create_block_mask(visible, None, None, tokens, tokens, device=device)
        compiled = _compiled_flex_attention()
        return (lambda: compiled(*problem.views(), block_mask=mask)), []
    band = torch.ones(tokens, tokens, dtype=torch.bool, device=device).tril_().triu_(1 - window)
    return (lambda: F.scaled_dot_product_attention(*problem.views(), attn_mask=band)), []


def _compiled_flex_attention():
    """Compiled for each shape that it will see: without being compiled it is no fair contestant."""
    from torch.nn.attention.flex_attention import flex_attention

    torch._dynamo.config.recompile_limit = 128  # beyond the default, 8 shapes, it would silently run as it is
    return torch.compile(flex_attention, dynamic=False)


def _make_local_attention(problem: Problem) -> Forward:
    from local_attention import LocalAttention

    attention = LocalAttention(problem.shape.segment, causal=True, look_backward=1, autopad=True, use_rotary_pos_emb=False)
    return (lambda: attention(*problem.views())), []


def _make_infini_transformer(problem: Problem) -> Forward:
    from infini_transformer_pytorch.infini_transformer import CausalAttention

    shape = problem.shape
    attention = CausalAttention(shape.heads * shape.head_dim, dim_head=shape.head_dim, heads=shape.heads)
    attention.fastweight_mem.head_gates.data.zero_()  # at their start, 10, hardly any gradient reaches the memory
    attention.to(problem.query.device, problem.query.dtype)

    def forward() -> Tensor:
        outputs, memories = [], None
        for piece in problem.query.flatten(2).split(shape.segment, 1):
            output, _, memories = attention(piece, past_memories=memories, return_new_memories=True)
            outputs.append(output)
        return torch.cat(outputs, 1).unflatten(-1, (shape.heads, shape.head_dim)).transpose(1, 2)

    return forward, [parameter for parameter in attention.parameters() if parameter.requires_grad]


# --- the table --------------------------------------------------------------------------------------------------------


def _same(function: Callable, **options) -> Callable[[Problem], Forward]:
    """A function of query, key, value, gate and segment length, as a contestant."""

    def make(problem: Problem) -> Forward:
        return (lambda: function(*problem.views(), problem.gate, problem.shape.segment, **options)), []

    return make


def _causal(function: Callable, **options) -> Callable[[Problem], Forward]:
    """A function of query, key and value, as a contestant."""
    return lambda problem: ((lambda: function(*problem.views(), **options)), [])


CONTESTANTS = {  # name → problem → what computes `[batch, heads, tokens, head_dim]`
    BASE: _same(infini_attention),
    **{f"infini-{rule.replace('_', '-')}": _same(infini_attention, update_rule=rule) for rule in UPDATE_RULES[1:]},
    "causal-sdpa": _causal(F.scaled_dot_product_attention, is_causal=True),
    "causal-eager": _causal(eager),
    "loop-sliced": _same(loop, split=False),
    "loop-split": _same(loop, split=True),
    "loop-split-delta": _same(loop, split=True, delta=True),
    "parallel": _same(parallel),
    "sliding-window": _make_sliding_window,
    "local-attention": _make_local_attention,
    "infini-transformer-pytorch": _make_infini_transformer,
}
