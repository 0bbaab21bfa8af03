"""Causal multi-head attention written out: projections, scores, softmax, heads, and the projection
that joins them."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.models.t5.modeling_t5 import T5Attention

from ...layers.memory_layer import MemoryLayerMixin, SharedInputs
from ...ops.equations import ScoreOptions
from ...ops.layout.grid import segment_layout
from ...ops.positions import alibi_bias, relative_key_bias, rotate, rotation
from ...ops.scores import (
    additive_scores,
    as_dot_product,
    dot_scores,
    general_scores,
    scaled_dot_scores,
    visible_softmax,
)
from ...options import key_heads
from .configuration import ATTENTION_OPTIONS, CausalMHAConfig
from .options import IN_EMBEDDING, RELATIVE

SCORES = {
    "scaled_dot": scaled_dot_scores,
    "dot": dot_scores,
    "general": general_scores,
    "additive": additive_scores,
}


class HeadParts(NamedTuple):
    """What the heads of one layer did, `Q` queries looking at `K` keys."""

    # [batch, heads, Q, K], position biases included, −inf where a key is not visible
    scores: Tensor
    # [batch, heads, Q, K], the softmax of the scores: rows sum to 1, or are 0 where no key is
    # visible
    weights: Tensor
    heads: Tensor  # [batch, heads, Q, value_dim], weights · values


class CausalMultiHeadAttention(MemoryLayerMixin, nn.Module):
    """`concat(head_1, …, head_H) W_O`, with `head_h = softmax(score(Q_h, K_h) + causal mask) V_h`
    (Vaswani et al. 2017).

    Head `h` owns the columns `h · width … (h + 1) · width − 1` of what `W_query`, `W_key` and
    `W_value` give.

    Args:
        d_in: width of the input; d_out: of the output, all heads together.
        num_heads: heads; must divide `d_out`.
        dropout: probability of dropping an attention weight, in training.
        qkv_bias: whether `W_query`, `W_key` and `W_value` have a bias.
        layer_idx: which layer of a model it is; needed with a cache only.
        config: of a model.
        options: outside of a model, those of [`CausalMHAConfig`], such as `score="additive"`,
            `attention="local", sliding_window=16` or `position_encoding="rope"`. Without any:
            global, scaled dot product, no positions.

    Raises:
        ValueError: `num_heads` does not divide `d_out`; an option that is unknown or does nothing
            here.
    """

    def __init__(
        self,
        d_in: int,
        d_out: int,
        num_heads: int,
        dropout: float = 0.0,
        qkv_bias: bool = False,
        *,
        layer_idx: int | None = None,
        config: CausalMHAConfig | None = None,
        **options,
    ):
        super().__init__()
        if num_heads < 1 or d_out % num_heads:
            raise ValueError(
                "num_heads must divide d_out, the width of all heads together; got "
                f"{d_out} / {num_heads}."
            )
        if unknown := sorted({*options} - {*ATTENTION_OPTIONS}):
            raise ValueError(
                f"unknown options {', '.join(unknown)}; an attention takes "
                f"{', '.join(ATTENTION_OPTIONS)}."
            )
        if config is None:
            given: dict[str, Any] = {"position_encoding": "none", **options}
            config = CausalMHAConfig(n_embd=d_out, n_head=num_heads, **given)
            if config.attention == "none" or config.position_encoding in IN_EMBEDDING:
                raise ValueError(
                    "attention='none' and 'learned' or 'sinusoidal' positions are a "
                    "model's: choose others."
                )
        self.config = self.options = config
        self.layer_idx = layer_idx
        self.num_heads, self.head_dim, value_dim = key_heads(config)
        self.head_counts = num_heads, num_heads, self.head_dim
        self.W_query = nn.Linear(d_in, num_heads * self.head_dim, bias=qkv_bias)
        self.W_key = nn.Linear(d_in, num_heads * self.head_dim, bias=qkv_bias)
        self.W_value = nn.Linear(d_in, num_heads * value_dim, bias=qkv_bias)
        self.out_proj = nn.Linear(num_heads * value_dim, d_out)
        self.dropout = nn.Dropout(dropout)
        if config.score == "general":
            self.score_weight = nn.Parameter(torch.empty(num_heads, self.head_dim, self.head_dim))
        elif config.score == "additive":
            self.score_weight = nn.Parameter(
                torch.empty(num_heads, self.head_dim, 2 * self.head_dim)
            )
            self.score_vector = nn.Parameter(torch.empty(num_heads, self.head_dim))
        if config.position_encoding == "relative_key":
            self.relative_table = nn.Parameter(torch.empty(config.max_distance + 1, self.head_dim))
        elif config.position_encoding == "t5":
            self.relative_bias = nn.Parameter(torch.empty(config.num_buckets, num_heads))
        if config.attention == "infini":
            self.add_memory_parameters(d_in)
        self.init_head_parameters()

    @torch.no_grad()
    def init_head_parameters(self) -> None:
        """First values of everything but the four projections: `"general"` starts as the scaled dot
        product, W = I / √d; `"additive"` with variances that keep those of its input; tables of
        positions small."""
        if self.config.score == "general":
            init.copy_(
                self.score_weight,
                torch.eye(self.head_dim).expand_as(self.score_weight) / self.head_dim**0.5,
            )
        elif self.config.score == "additive":
            for parameter in (self.score_weight, self.score_vector):
                init.normal_(parameter, 0.0, parameter.shape[-1] ** -0.5)
        for name in ("relative_table", "relative_bias"):
            if hasattr(self, name):
                init.normal_(getattr(self, name), 0.0, self.config.initializer_range)
        if self.config.attention == "infini":
            self.init_memory_parameters()

    def forward(
        self,
        hidden_states: Tensor,
        *,
        mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        infini: SharedInputs | None = None,
        cache: Cache | None = None,
        output_attentions: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        """
        Args:
            hidden_states: `[batch, tokens, d_in]`. Outside of a model, this is all it needs.
            mask: `[batch or 1, 1, tokens, keys]` bool, True where a key is visible; `None`: what
                causality leaves. Not for `attention="infini"`, whose layout says what is visible.
            position_ids: `[batch or 1, tokens]`, for rope; `None`: the tokens are counted, from
                those of the cache on. With `attention="infini"` they say where documents begin, and
                rope counts the tokens.
            infini: with `attention="infini"`, what a model made for all layers.
            cache: to continue, or `None`.
            output_attentions: also return the weights, which goes through the written-out softmax.

        Returns:
            The output `[batch, tokens, d_out]`; with `output_attentions` also the weights `[batch,
            heads, tokens, keys]` (for `attention="infini"` those of the local window, `[…,
            config.places]`).
        """
        if self.config.attention == "infini":
            if infini is None and cache is not None:
                raise ValueError(
                    "a cache is for the layers of a model; call infini_attention() with a state."
                )
            shared = infini or self.inputs_outside_model(
                hidden_states, position_ids, output_attentions
            )
            inputs, attend = self.begin(hidden_states, shared)
            query, key, value = self.project(inputs)
            heads, weights = attend(query, key, value, self.score_options(shared))
        elif (
            output_attentions
            or self.config.score == "additive"
            or self.config._attn_implementation == "eager"
        ):
            _, weights, heads = self.parts(
                hidden_states, mask=mask, position_ids=position_ids, cache=cache
            )
        else:
            heads, weights = self._fused(hidden_states, mask, position_ids, cache), None
        output = self.out_proj(heads.transpose(1, 2).flatten(2))
        return (output, weights) if output_attentions else output

    def parts(
        self,
        hidden_states: Tensor,
        *,
        mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
    ) -> HeadParts:
        """Scores, weights and context vectors of global or local attention, step by step. A
        relative key is added to the key, whatever the score; ALiBi's and T5's biases are added to
        the score. `hidden_states`, `mask`, `position_ids`, `cache`: as of `forward`."""
        query, key, value = self._with_cached(hidden_states, position_ids, cache)
        mask, distance = self._visible(query, key, mask)
        learned: list[Any] = [
            getattr(self, name) for name in ("score_weight", "score_vector") if hasattr(self, name)
        ]
        if self.config.score == "additive" and self.config.position_encoding == "relative_key":
            learned.append(self.relative_table[distance.clamp(0, self.config.max_distance)])
        scores = SCORES[self.config.score](query, key, *learned)
        bias = self._bias(query, distance)
        scores, weights = visible_softmax(
            scores if bias is None else scores + bias.to(scores.dtype), mask
        )
        return HeadParts(scores, weights, self.dropout(weights) @ value)

    def project(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of `hidden_states`, `[batch, tokens, d_in]`: `[batch, heads,
        tokens, width]` each."""
        projections = (
            self.W_query(hidden_states),
            self.W_key(hidden_states),
            self.W_value(hidden_states),
        )
        return tuple(
            part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in projections
        )

    def inputs_outside_model(
        self, hidden_states: Tensor, position_ids=None, return_weights: bool = False
    ) -> SharedInputs:
        """What a model would have made for this layer. `hidden_states`, `position_ids`: as of
        `forward`; `return_weights`: whether the layer returns its local weights."""
        batch, tokens = hidden_states.shape[:2]
        layout = segment_layout(
            batch, tokens, self.window, position_ids=position_ids, device=hidden_states.device
        )
        return_weights |= self.config._attn_implementation == "eager"
        return SharedInputs(
            {self.window: layout}, None, self.window_tables(hidden_states), return_weights
        )

    def window_tables(self, like: Tensor) -> dict[str | None, tuple[Tensor, ...]]:
        """The rotary tables of a window's places, with the dtype and device of `like`; empty
        without rotary positions."""
        if self.config.position_encoding != "rope":
            return {}
        numbers = torch.arange(self.config.places, device=like.device)
        return {None: rotation(numbers, self.head_dim, like.dtype, self.config.rope_theta)}

    def score_options(self, infini: SharedInputs) -> ScoreOptions:
        """How the windows of `attention="infini"` are computed."""
        scaling = self.head_dim**-0.5 if self.config.score == "scaled_dot" else 1.0
        return ScoreOptions(
            scaling,
            self.dropout.p * self.training,
            infini.return_weights,
            rotary=infini.rotary.get(None),
        )

    def _with_cached(self, hidden_states, position_ids, cache) -> tuple[Tensor, Tensor, Tensor]:
        """Queries of the new tokens; keys and values of these and of the cached ones."""
        query, key, value = self.project(hidden_states)
        if self.config.position_encoding == "rope":
            if position_ids is None:
                past = 0 if cache is None else cache.get_seq_length(self.layer_idx)
                position_ids = torch.arange(
                    past, past + query.shape[2], device=query.device
                ).unsqueeze(0)
            turns = rotation(position_ids, self.head_dim, query.dtype, self.config.rope_theta)
            query, key = rotate(query, *turns), rotate(key, *turns)
        if cache is not None:
            # As many keys as the mask has: with a window of one token, caches keep all keys
            # although they report none
            keys, _ = cache.get_mask_sizes(query.shape[2], self.layer_idx)
            cached = cache.update(key, value, self.layer_idx)
            key, value = (tensor[:, :, -keys:] for tensor in cached)
        return query, key, value

    def _fused(self, hidden_states, mask, position_ids, cache) -> Tensor:
        """The context vectors of [`parts`] without its scores and weights, through torch's fused
        attention."""
        query, key, value = self._with_cached(hidden_states, position_ids, cache)
        plain = self.config.attention == "global" and self.config.position_encoding not in RELATIVE
        causal = mask is None and plain and query.shape[2] == key.shape[2]
        if not causal:
            mask, distance = self._visible(query, key, mask)
            bias = self._bias(query, distance)
            mask = mask if bias is None else bias.to(query.dtype).masked_fill(~mask, float("-inf"))
        query, scaling = as_dot_product(
            self.config.score, query, getattr(self, "score_weight", None)
        )
        dropout = self.dropout.p if self.training else 0.0
        return F.scaled_dot_product_attention(
            query, key, value, mask, dropout, is_causal=causal, scale=scaling
        )

    def _visible(self, query: Tensor, key: Tensor, mask: Tensor | None) -> tuple[Tensor, Any]:
        """Which keys are visible, by default what causality and a local window leave; and how far
        they are, `[tokens, keys]`, the tokens being the last keys; `None`: no score depends on
        it."""
        if mask is not None and self.config.position_encoding not in RELATIVE:
            return mask, None
        keys = torch.arange(key.shape[2], device=key.device)
        distance = keys[len(keys) - query.shape[2] :, None] - keys
        if mask is None:
            mask, window = distance >= 0, self.config.sliding_window
            mask = mask if window is None else mask & (distance < window)
        return mask, distance

    def _bias(self, query: Tensor, distance: Any) -> Tensor | None:
        """What positions add to the scores, `[…, heads, tokens, keys]`, or `None`."""
        if self.config.position_encoding == "alibi":
            return alibi_bias(distance, self.num_heads)
        if self.config.position_encoding == "t5":
            sizes = self.config.num_buckets, self.config.max_distance
            # not of later tokens
            buckets = T5Attention._relative_position_bucket(-distance, False, *sizes)
            return self.relative_bias[buckets].permute(2, 0, 1)
        if self.config.position_encoding == "relative_key" and self.config.score != "additive":
            query, scaling = as_dot_product(
                self.config.score, query, getattr(self, "score_weight", None)
            )
            return relative_key_bias(query, self.relative_table, distance) * scaling
        return None
