"""What one attention layer can be made of: this package's function, a plain loop, and other
attention.

Every contestant gets the same query, key and value, views `[batch, heads, tokens, head_dim]` of
contiguous `[batch, tokens, heads, head_dim]` as a model's projections give them, and goes forward
and backward. Those that follow the same equations (test_benchmark_contestants.py holds them against
the naive reference) are:

- `infini`, `infini-delta`, …: `hf_infini.infini_attention` by the update rules. `infini-plain`: the
  linear rule by plain torch, also where there is a kernel. `infini-window`: the linear rule with
  two segments in the window, 4 sinks and rotary positions, as pretrained models have it.
  `infini-kept`: the same with 252 kept tokens, chosen by attention; `infini-kept-plain`: by plain
  torch.
- `loop-split`: a Python loop over pieces that one `split` made.

`causal-sdpa` computes something else on the same tensors: full causal attention, by torch's fastest
kernel.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_infini import infini_attention
from hf_infini.ops.backends import forced_backend
from hf_infini.ops.naive import EPS
from hf_infini.ops.positions import rotation
from hf_infini.ops.rules import RULES
from hf_infini.options import Window

BASE = "infini"  # whose time and memory are 1 in the ratios


@dataclass(frozen=True)
class Shape:
    """One layer's work: `tokens` in segments of `segment`, `batch` rows, `heads` × `head_dim`, and
    a dtype's name."""

    tokens: int
    segment: int
    heads: int = 12
    head_dim: int = 64
    batch: int = 1
    dtype: str = "float32"

    def tensor_bytes(self) -> int:
        """Of one of query, key, value, output or a gradient of them."""
        numbers = self.batch * self.tokens * self.heads * self.head_dim
        return numbers * getattr(torch, self.dtype).itemsize


@dataclass
class Problem:
    """Inputs of one layer, leaves of the graph, and the gradient of the output, all `[batch,
    tokens, heads, head_dim]`."""

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
        query, key, value, upstream = (
            torch.randn(size, generator=draw, device=device, dtype=dtype) for _ in range(4)
        )
        gate = torch.linspace(-1, 1, shape.heads, device=device)
        return cls(shape, *(leaf.requires_grad_() for leaf in (query, key, value, gate)), upstream)

    def leaves(self) -> list[Tensor]:
        return [self.query, self.key, self.value, self.gate]

    def views(self) -> list[Tensor]:
        """Query, key and value as attention functions take them, `[batch, heads, tokens,
        head_dim]`."""
        return [tensor.transpose(1, 2) for tensor in (self.query, self.key, self.value)]


Forward = Callable[[], Tensor]  # computes the output


def run_of(name: str, problem: Problem) -> Callable[[], tuple[Tensor, ...]]:
    """Forward and backward of one contestant: the output and the gradients of
    [`Problem.leaves`]."""
    forward, upstream = CONTESTANTS[name](problem), problem.upstream.transpose(1, 2)

    def run() -> tuple[Tensor, ...]:
        output = forward()
        return output, *torch.autograd.grad(output, problem.leaves(), upstream, allow_unused=True)

    return run


def _same(function: Callable, **options) -> Callable[[Problem], Forward]:
    """A function of query, key, value, gate and segment length, as a contestant."""
    return lambda problem: (
        lambda: function(*problem.views(), problem.gate, problem.shape.segment, **options)
    )


def loop(query, key, value, gate, segment: int, update_rule: str = "linear") -> Tensor:
    """Equations 2 to 5 segment after segment, as the paper prints them (section 2); tensors as in
    [`infini_attention`]."""
    share, outputs = torch.sigmoid(gate)[:, None, None], []
    memory = normaliser = None
    pieces = zip(*(tensor.split(segment, 2) for tensor in (query, key, value)), strict=True)
    for query, key, value in pieces:
        wide = torch.promote_types(query.dtype, torch.float32)
        output = F.scaled_dot_product_attention(query, key, value, is_causal=True)  # equation 2
        # σ(Q), σ(K), V
        query, key, value = F.elu(query.to(wide)) + 1, F.elu(key.to(wide)) + 1, value.to(wide)
        if memory is None or normaliser is None:  # the first segment finds nothing in the memory
            memory = key.new_zeros(*key.shape[:2], key.shape[3], value.shape[3])
            normaliser = torch.zeros_like(key[:, :, 0])
        else:
            read = query @ memory / (query @ normaliser.unsqueeze(-1) + EPS)  # equation 3
            # equation 5
            output = torch.lerp(output.to(wide), read, share.to(wide)).to(output.dtype)
        outputs.append(output)
        write = RULES[update_rule].naive_write  # equation 4
        memory, normaliser = write(memory, normaliser, key, value, None, EPS)
    return torch.cat(outputs, 2)


def _by(backend: str, make: Callable[[Problem], Forward]) -> Callable[[Problem], Forward]:
    """A contestant, forced to a backend."""

    def made(problem: Problem) -> Forward:
        forward = make(problem)

        def forced() -> Tensor:
            with forced_backend(backend):
                return forward()

        return forced

    return made


def _make_window(problem: Problem, kept: int = 0) -> Forward:
    shape, device = problem.shape, problem.query.device
    sinks = min(4, shape.segment - 1)
    places = torch.arange(Window(shape.segment, 1, sinks, kept).places, device=device)
    tables = rotation(places, shape.head_dim, problem.query.dtype)
    options: dict[str, Any] = {"local_segments": 1, "sink_tokens": sinks, "kept_tokens": kept}
    return _same(infini_attention, **options, rotary=tables)(problem)


_kept = functools.partial(_make_window, kept=252)
CONTESTANTS = {  # name → problem → what computes `[batch, heads, tokens, head_dim]`
    BASE: _same(infini_attention),
    **{
        f"infini-{rule.replace('_', '-')}": _same(infini_attention, update_rule=rule)
        for rule in [*RULES][1:]
    },
    "infini-plain": _by("grid", _same(infini_attention)),
    "infini-window": _make_window,
    "infini-kept": _kept,
    "infini-kept-plain": _by("grid", _kept),
    "causal-sdpa": lambda problem: (
        lambda: F.scaled_dot_product_attention(*problem.views(), is_causal=True)
    ),
    "loop-split": _same(loop),
}
