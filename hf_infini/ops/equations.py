"""Equations 2 to 5 of the paper: the softmax inside the window, what is written when a segment
leaves the window, and what a query reads.

    A_dot = softmax(scaling · Q Kᵀ) V                               window, equation 2
    σ(x) = ELU(x) + 1                                               features
    A_mem = σ(Q) M / (σ(Q) z + ε)                                   read, equation 3
    M ← M + σ(K)ᵀ V,  z ← z + Σ σ(k)                                write, linear rule, equation 4
    A = sigmoid(β) A_mem + (1 − sigmoid(β)) A_dot                   mix, equation 5

"The paper" is Munkhdalai, Faruqui and Gopal, "Leave No Context Behind" (arXiv 2404.07143).
Every query sees its own segment up to itself, the whole of the `w` segments before it, kept tokens,
and the first `S` tokens of its document (attention sinks). [`MemoryRule`] is the linear rule; each
other one is a subclass of it, called `Rule`, in a file of rules/.

Shapes: `B` batch, `N` segments, `C` slots (tokens) in one, `W` slots in its window, the last of
which are its own; `H` query heads, `K` key/value heads, `R` queries of a segment that read a
key/value head's memory, `D` head dimension, `E` value dimension. Heads come before tokens: products
are of contiguous matrices.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from .positions import rotate

EPS = 1e-6
Written = tuple[Tensor, Tensor, Tensor | None]  # what [`MemoryRule.written`] returns
State = tuple[Tensor, Tensor]  # memory and normaliser

# Of a segment. By torch's kernel and by plain operations, forward and backward in bfloat16 on one
# thread of a Xeon with AMX, torch 2.13, windows of two segments: 20 and 3 ms for 64 segments of 16,
# 13 and 5 for 16 of 64, 84 and 104 for 8 of 256
FEW_QUERIES = 128
# Of a product in a graph of torch.compile. More would read the other factor as often, where a
# matrix product reads it once
FEW_ROWS = 8


@dataclass(frozen=True)
class ScoreOptions:
    """How the softmax of a window is computed."""

    scaling: float | None = None  # factor of the dot products; `None`: `head_dim ** -0.5`
    dropout: float = 0.0  # probability with which a weight is dropped
    written_out: bool = False  # by plain operations instead of a fused kernel
    # scores s become `softcap · tanh(s / softcap)` (Gemma 2), and are then written out
    softcap: float | None = None
    # Tables `[places, …]`, such as the [`rotation`] of the places' numbers: the token in place p of
    # the window is turned as one in position p of a text, for only distances count
    rotary: tuple[Tensor, ...] | None = None
    # of states `[…, tokens, head_dim]` and their rows of the tables, which broadcast
    turn: Callable[..., Tensor] = rotate
    # Of positions that are scaled by a text's length: the tables of segments whose first token has
    # at least this number in its document, and the number
    far_rotary: tuple[tuple[Tensor, ...], int] | None = None

    def compared(
        self,
        states: Tensor,
        places: slice | Tensor,
        first: Callable[[], Tensor] | None = None,
    ) -> Tensor:
        """Queries or keys as they are compared.

        Args:
            states: `[…, tokens, head_dim]`; or `[batch, heads, tokens, head_dim]` with places
                `[batch, tokens]`.
            places: theirs in the window.
            first: gives the number of the first token of the query's segment in its document,
                `[…, 1, 1]`; `None`: below that of the far tables.
        """
        if self.rotary is None:
            return states
        near = self._turned(states, places, self.rotary)
        if self.far_rotary is None or first is None:
            return near
        tables, limit = self.far_rotary
        return torch.where(first() >= limit, self._turned(states, places, tables), near)

    def _turned(self, states: Tensor, places: slice | Tensor, tables: tuple[Tensor, ...]) -> Tensor:
        rows = (table[places] for table in tables)
        if isinstance(places, Tensor) and places.dim() == 2:
            rows = (row.unsqueeze(1) for row in rows)
        return self.turn(states, *rows)

    def scaling_of(self, query: Tensor) -> float:
        """The factor of the dot products with a `query` `[…, head_dim]`."""
        return query.shape[-1] ** -0.5 if self.scaling is None else self.scaling


def window_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, softmax: ScoreOptions
) -> tuple[Tensor, Tensor | None]:
    """Softmax attention inside the window, for many segments in one call: the output `[B, N, H, C,
    D]`, which means nothing where a slot is empty, and, where `softmax.written_out`, the weights
    `[B, N, H, C, W]`. query: `[B, N, H, C, D]`; key and value: `[B, N, K, W, D]`; mask: bool, True
    = visible, `[B or 1, N, 1, C, W]`; `None`: all slots up to the query's own."""
    slots, width, heads_per_key = query.shape[-2], key.shape[-2], query.shape[2] // key.shape[2]
    written_out = (
        softmax.written_out or softmax.softcap or _fused_gradient_is_slow(query, key, value)
    )
    # Torch's kernel for CPUs reads keys and values where they are, for all heads that share them;
    # others would not be fused
    if heads_per_key > 1 and (written_out or softmax.dropout or query.device.type != "cpu"):
        key, value = (tensor.repeat_interleave(heads_per_key, 2) for tensor in (key, value))
    if mask is None and (written_out or width != slots):
        mask = torch.ones(slots, width, dtype=torch.bool, device=key.device).tril(width - slots)
    if written_out:
        weights = softmax_weights(query, key, mask, softmax, value.dtype)
        return weights @ value, weights if softmax.written_out else None
    if mask is not None and mask.dim() > 2:
        mask = mask.expand(query.shape[0], -1, -1, -1, -1).flatten(0, 1)
    flat = (tensor.flatten(0, 1) for tensor in (query, key, value))
    options = {"dropout_p": softmax.dropout, "is_causal": mask is None, "scale": softmax.scaling}
    options["enable_gqa"] = key.shape[2] < query.shape[2]
    output = F.scaled_dot_product_attention(*flat, attn_mask=mask, **options)
    return output.view(*query.shape[:-1], value.shape[-1]), None


def _fused_gradient_is_slow(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether torch's kernel with its gradient is slower than plain operations: on a CPU, in
    bfloat16, for few queries."""
    if query.device.type != "cpu" or query.dtype != torch.bfloat16 or torch.compiler.is_compiling():
        return False
    wanted = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
    return wanted and query.shape[-2] <= FEW_QUERIES


def softmax_weights(
    query: Tensor, key: Tensor, mask: Tensor | None, softmax: ScoreOptions, dtype: torch.dtype
) -> Tensor:
    """softmax(scaling · Q Kᵀ) written out, `[…, tokens, keys]` in `dtype`, of `query` `[…, tokens,
    D]` and `key` `[…, keys, D]`; mask: bool, True = visible; softmax: how. Scores that would be
    float16 are float32, as in torch's own kernel, for they can leave its range."""
    scores = masked_scores(query, key, mask, softmax)
    return F.dropout(scores.softmax(-1).to(dtype), softmax.dropout)


def masked_scores(query: Tensor, key: Tensor, mask: Tensor | None, softmax: ScoreOptions) -> Tensor:
    """What [`softmax_weights`], of the same `query`, `key` and `softmax`, is the softmax of:
    scaling · Q Kᵀ, and the lowest number where `mask` is False."""
    kind, scaling = query.device.type, softmax.scaling_of(query)
    autocast = kind != "meta" and torch.is_autocast_enabled(kind)  # meta: while a model is made
    given = torch.get_autocast_dtype(kind) if autocast else query.dtype
    if given == torch.float16:
        with torch.autocast(kind, enabled=False):
            scores = product(query.float(), key.float().mT) * scaling
    else:
        scores = product(query, key.mT) * scaling
    if softmax.softcap:
        scores = (scores / softmax.softcap).tanh() * softmax.softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    return scores


def are_few(rows: Tensor) -> bool:
    """Whether `[…, rows, D]` are so few that a graph of torch.compile had better not make a matrix
    product of them."""
    return torch.compiler.is_compiling() and rows.shape[-2] <= FEW_ROWS


def product(left: Tensor, right: Tensor) -> Tensor:
    """`left @ right`, for `[…, rows, D]` and `[…, D, columns]`. Of few rows in a graph of
    torch.compile: a sum in float32 or wider, which is fused with what comes before and after it:
    one kernel less to start."""
    if not are_few(left):
        return left @ right
    wide = torch.promote_types(left.dtype, torch.float32)
    return (left.to(wide).unsqueeze(-1) * right.to(wide).unsqueeze(-3)).sum(-2)


class EluFeatures(torch.autograd.Function):
    """σ(x) = ELU(x) + 1;  g_x = g · min(σ(x), 1), for σ'(x) is e^x = σ(x) below zero and 1 above.
    Autograd would compute the exponential function again, by far the dearest operation of the
    memory on a CPU: a layer forward and backward of 1,024 tokens in segments of 64, float32, on one
    thread, took 20.2 ms instead of 22.0 (medians of 15 in turn). `inputs`: x, of any shape, as the
    only one; `output`: σ(x); `gradient`: g."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return F.elu(x).add_(1)

    @staticmethod
    def setup_context(ctx, inputs: tuple, output: Tensor) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        (features,) = ctx.saved_tensors
        return features.clamp(max=1) * gradient


# Positive features: those of section 2.1.2 of the paper, or exponential ones, with which σ(q)·σ(k)
# = Σ_d exp(q_d + k_d): a few units of x outweigh tens of thousands of other tokens. Sums of a
# million products still fit into float32
FEATURE_MAPS = {
    "elu": lambda x: EluFeatures.apply(x) if x.requires_grad else F.elu(x).add_(1),
    "exp": lambda x: x.clamp(max=30.0).exp_(),
}


def running_sum(
    written: Tensor, incoming: Tensor, continues: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Running sums of what the segments wrote, `written` `[B, N, …]`: before each, `[B, N, …]`, and
    after the last, `[B, …]`. They begin at `incoming` `[B, …]`, and again at zero behind a segment
    where `continues` `[B, N]` is False."""
    if continues is None and (written.device.type != "cpu" or torch.compiler.is_compiling()):
        sums = torch.cat([incoming.unsqueeze(1), written], 1).cumsum(1)
        return sums[:, :-1], sums[:, -1]
    # a CPU adds whole states many times faster than it sums along a dimension but the last
    before, last = [], incoming
    for number, new in enumerate(written.unbind(1)):
        before.append(last)
        last = last + new
        if continues is not None:
            last = last.masked_fill(~continues[:, number].view(-1, *(1,) * (last.dim() - 1)), 0)
    return torch.stack(before, 1), last


@dataclass(frozen=True, eq=False)
class MemoryRule:
    """How a memory is written, read and mixed in, with the options of [`infini_attention`] of these
    names; ValueError for a value that is not allowed. This is the linear rule, as in the paper: a
    segment's values are added (equation 4). Its memory has a normaliser z, the sum of the features
    that were written, by which reads are divided; and a token may have one rate, the logarithm of
    its weight, which is added to its key before the feature map."""

    feature_map: str = "elu"
    eps: float = EPS

    update_rule: ClassVar[str] = "linear"  # its name, that of its file in rules/
    # whether its memory has a normaliser; otherwise the width of z is 0
    normalised: ClassVar[bool] = True
    rates: ClassVar[int] = 1  # numbers in a token's log weight

    def __post_init__(self):
        if self.feature_map not in FEATURE_MAPS:
            raise ValueError(
                f"feature_map must be one of {', '.join(FEATURE_MAPS)}, got {self.feature_map!r}."
            )

    def features(self, x: Tensor) -> Tensor:
        """σ(x), of any shape: positive, so that every denominator of equation 3 is."""
        return FEATURE_MAPS[self.feature_map](x)

    def written(
        self, key: Tensor, value: Tensor, log_weight: Tensor | None, mask: Tensor | None = None
    ) -> Written:
        """What these tokens write: their features σ(k + log w), their values and the log rates that
        are not part of the features, or `None`; zero, but for the values, where `mask` is False.
        key: `[B, N, K, C, D]`; value: `[B, N, K, C, E]`; log_weight: `[B, N, K, C, rates]` or
        `None`, zeros; mask: bool, broadcasts to `[B, N, K, C, 1]`."""
        key = key if log_weight is None else key + log_weight.to(key.dtype)
        # σ(−∞) = 0
        return (
            self.features(key if mask is None else key.masked_fill(~mask, -torch.inf)),
            value,
            None,
        )

    def states(
        self, written: Written, memory: Tensor, normaliser: Tensor, continues: Tensor | None = None
    ) -> tuple[State, State]:
        """Memory and normaliser before each segment, `[B, N, K, D, E]` and `[B, N, K, D]`, and
        after the last. `written`: by the segments; nothing by one whose document has ended by then.
        `memory`, `normaliser`: before the first. `continues`: `[B, N]` bool, False where the state
        begins again at zero behind the segment; `None`: nowhere."""
        features, value, _ = written
        memories, last_memory = running_sum(features.mT @ value, memory, continues)
        normalisers, last_normaliser = running_sum(features.sum(-2), normaliser, continues)
        return (memories, normalisers), (last_memory, last_normaliser)

    def read(self, features: Tensor, memory: Tensor, normaliser: Tensor) -> Tensor:
        """σ(q) M / (σ(q) z + ε), equation 3, `[B, N, K, R, E]`, of σ(q) `[B, N, K, R, D]`, M `[…,
        D, E]` and z `[…, D]`."""
        read = product(features, memory)
        inverse = (product(features, normaliser.unsqueeze(-1)) + self.eps).reciprocal()
        return read * inverse if read.requires_grad else read.mul_(inverse)

    def mix(
        self, local: Tensor, query: Tensor, state: State, gate: Tensor, filled: Tensor
    ) -> Tensor:
        """(1 − s) · local + s · read, equation 5, computed in the dtype of the memory and returned
        in that of `local`; s is sigmoid(β), or 0 where the memory is not `filled`. local: what the
        window gives, `[B, N, H, C, E]`; query: `[B, N, H, C, D]`; state: M `[B, N, K, D, E]` and z
        `[B, N, K, D]`; gate: β, `[H]`."""
        dtype, kv_heads = state[0].dtype, state[0].shape[2]
        features = self.features(query.to(dtype)).unflatten(2, (kv_heads, -1)).flatten(3, 4)
        read = self.read(features, *state).unflatten(3, (-1, query.shape[3])).flatten(2, 3)
        share = torch.sigmoid(gate.to(dtype)[:, None, None]) * filled
        return torch.lerp(local.to(read.dtype), read, share).to(local.dtype)

    @classmethod
    def parameters(cls, heads: int, width: int) -> dict[str, Tensor]:
        """The first values of what a layer of so many key/value heads learns for this rule, by
        name; `width`: of the layer's input, for all numbers of which they are the same."""
        return {}

    @staticmethod
    def log_rates(inputs: Tensor, **parameters: Tensor) -> Tensor:
        """Tokens' log rates, `[B, K, tokens, rates]`; only with parameters. `inputs`: of the layer,
        `[B, tokens, width]`; `parameters`: as [`MemoryRule.parameters`] begins them."""
        raise NotImplementedError

    # The reference, for one row: heads of `[heads, tokens, D]`; it uses nothing of the above

    @staticmethod
    def naive_features(
        x: Tensor, log_weight, feature_map: Callable[[Tensor], Tensor], eps: float
    ) -> Tensor:
        """Features of queries or keys. `x`: these, `[heads, tokens, D]`; `log_weight`: of keys,
        `[heads, tokens, rates]`, or 0; `feature_map`: the function of the option's name; `eps`: as
        of [`infini_attention`]."""
        return feature_map(x + log_weight)

    @staticmethod
    def naive_read(
        features: Tensor, memory: Tensor, normaliser: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Numerator `[heads, tokens, E]` and denominator `[heads, tokens, 1]` of equation 3.
        `features`: of queries, `[heads, tokens, D]`; `memory`, `normaliser`: M `[heads or 1, D, E]`
        and z `[heads or 1, D]`; `eps`: ε."""
        return features @ memory, features @ normaliser.unsqueeze(-1) + eps

    @staticmethod
    def naive_write(
        memory: Tensor,
        normaliser: Tensor,
        features: Tensor,
        values: Tensor,
        log_weight: Tensor | None,
        eps: float,
    ) -> State:
        """M and z after a segment. `memory`, `normaliser`: before it, `[heads, D, E]` and `[heads,
        D]`; `features`, `values`, `log_weight`: of its tokens, `[heads, tokens, …]` each; `eps`: as
        of [`infini_attention`]."""
        return memory + features.mT @ values, normaliser + features.sum(-2)
