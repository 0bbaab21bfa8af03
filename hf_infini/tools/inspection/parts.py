"""The parts of one attention layer's output, computed again from what the layer was given in a forward pass.

A layer's output alone does not show its heads: they are mixed by the output projection, and fused kernels never write the
weights down. Each kind of attention module has a function here that repeats its steps in the open, from the module's own
projections on, in float32 or wider; [`KINDS`] is the table of them.

Shapes: `B` batch, `H` heads, `T` tokens, `S` segments, `D` head dimension.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention

from ...layers.memory_layer import SharedInputs
from ...models.gpt2 import GPT2InfiniAttention
from ...models.scratch.attention import CausalMultiHeadAttention
from ...ops.layout.base import GridLayout
from ...ops.memory import States, memory_weight
from ...ops.scores import visible_softmax
from ...ops.window import ScoreOptions

# Of the states that are made at once to find the memory's weights
COLUMN_ELEMENTS = 2**24


@dataclass
class Parts:
    """What one layer's heads did. The last nine are `None` in a layer without a memory.

    With A_mem the heads' memory reads (equation 3), A_local their softmax attention (equation 2), and g = sigmoid(β) where
    the document has a memory, 0 before: heads = g · A_mem + (1 − g) · A_local (equation 5). Where window and memory share a
    denominator, g is another for each token: [`memory_weight`].
    """

    scores: Tensor  # [B, H, T, T], before the softmax, −inf where a key is not visible
    weights: Tensor  # [B, H, T, T]
    heads: Tensor  # [B, H, T, D], before the output projection
    local_heads: Tensor | None = None  # [B, H, T, D]: A_local
    memory_heads: Tensor | None = None  # [B, H, T, D]: A_mem, 0 where the document has no memory yet
    memory_weights: Tensor | None = None  # [B, H, T, T]: what A_mem takes of each token's value
    gate: Tensor | None = None  # [H]: sigmoid(β)
    token_gate: Tensor | None = None  # [B, H, T]: g
    memory_share: Tensor | None = None  # [B, H, T]: ‖g A_mem‖ / (‖g A_mem‖ + ‖(1 − g) A_local‖)
    memory_norm: Tensor | None = None  # [B, H, S + 1]: Frobenius norm of M as segment 0, 1, … reads it, and at the end
    normaliser_norm: Tensor | None = None  # [B, H, S + 1]: norm of z, likewise; 0 where the rule has none
    segments: Tensor | None = None  # [B, T], int64: the segment of its row that each token lies in, −1 for padding


def gpt2_parts(module: GPT2Attention, hidden_states: Tensor, given: dict) -> Parts:
    """GPT-2's own attention; `given` is what the module was called with by name."""
    parts = module.c_attn(hidden_states).split(module.split_size, dim=2)
    query, key, value = (_widen(part.unflatten(-1, (-1, module.head_dim)).transpose(1, 2)) for part in parts)
    mask = given.get("attention_mask")
    if mask is None:
        mask = torch.ones(key.shape[2], key.shape[2], dtype=torch.bool, device=key.device).tril()
    elif mask.dtype != torch.bool:
        mask = mask == 0  # the eager form, which is added to the scores
    return Parts(*softmax_parts(query, key, value, mask, module.scaling))


def infini_parts(module: GPT2InfiniAttention | CausalMultiHeadAttention, hidden_states: Tensor, given: dict) -> Parts:
    """Attention with a memory."""
    return _infini_parts(module, hidden_states, given["infini"])


def causal_mha_parts(module: CausalMultiHeadAttention, hidden_states: Tensor, given: dict) -> Parts:
    """The from-scratch attention, which names its own parts unless it has a memory."""
    if module.config.attention == "infini":
        return infini_parts(module, hidden_states, given)
    return Parts(*module.parts(hidden_states, **{name: given[name] for name in ("mask", "distance", "position_ids")}))


# Class of the attention module → how its parts are computed; the first that fits counts.
KINDS: dict[type, Callable[[Any, Tensor, dict], Parts]] = {
    GPT2InfiniAttention: infini_parts,
    GPT2Attention: gpt2_parts,
    CausalMultiHeadAttention: causal_mha_parts,
}


def kind_of(module: nn.Module) -> str:
    """What the module's tokens see: "global", "local" or "infini", as in `CausalMHAConfig`."""
    if isinstance(module, CausalMultiHeadAttention):
        return module.config.attention
    return "infini" if isinstance(module, GPT2InfiniAttention) else "global"


def parts_of(module: nn.Module, hidden_states: Tensor, given: dict, real: Tensor) -> Parts:
    """The parts of `module`'s call on `hidden_states` `[B, T, width]`; what padding (`real [B, T]` False) did is left out:
    it sees nothing, and its weights and heads are 0."""
    compute = next(function for cls, function in KINDS.items() if isinstance(module, cls))
    parts = compute(module, hidden_states, given)
    padding = ~real[:, None, :, None]
    parts.scores = parts.scores.masked_fill(padding, float("-inf"))
    parts.weights = parts.weights.masked_fill(padding, 0)
    parts.heads = parts.heads.masked_fill(padding, 0)
    return parts


def softmax_parts(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor, scaling: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Scores, weights and context vectors of softmax(scaling · Q Kᵀ) V.

    Args:
        query, key, value: `[B, H, T, D]`; visible: bool, broadcast to `[B, H, T, T]`. A row that sees nothing has weights
            and a context of 0.
    """
    scores, weights = visible_softmax(query @ key.transpose(-1, -2) * scaling, visible)
    return scores, weights, weights @ value


def _infini_parts(
    module: GPT2InfiniAttention | CausalMultiHeadAttention, hidden_states: Tensor, infini: SharedInputs
) -> Parts:
    """Equations 2 to 5 for a call that begins its rows, as [`hf_infini.attention.attend`] does them all at once."""
    layout: Any = infini.layout  # a GridLayout
    rule, (inputs, _) = module.rule, module.begin(hidden_states, infini)
    query, key, value, softmax = module.projections(inputs, infini)
    query, key, value = (_widen(part) for part in (query, key, value))
    segments = _segments(layout)
    scores, weights = visible_softmax(*_window_scores(softmax, query, key, segments, layout))
    local = weights @ value
    batch, heads, tokens, width = key.shape
    (group,) = layout.groups(0)
    empty_normaliser = value.new_zeros(heads, width if rule.normalised else 0)
    empty = {"start_memory": value.new_zeros(heads, width, width), "start_normaliser": empty_normaliser}
    start_memory, start_normaliser = (module.start() or empty).values()
    has_memory = group.filled
    if has_memory is None or module.start():
        has_memory = torch.ones(1, layout.segments, dtype=torch.bool, device=value.device)
    log_weight = module.log_weight(inputs)
    log_weight = None if log_weight is None else _delayed(layout, _widen(log_weight))
    queries = rule.query_features(layout.to_grid(query, None).transpose(2, 3))
    taken_in = None if group.written is None else group.written[:, :, None, :, None]
    written = rule.written(_delayed(layout, key), _delayed(layout, value), log_weight, taken_in)

    def states_of(values: Tensor, first_memory: Tensor) -> States:
        """The states where these `[B, H, T, E]` are the values, and a document begins with this memory `[H, D, E]`."""
        start = first_memory.to(value.dtype), start_normaliser.to(value.dtype)
        memory, normaliser = (first.expand(batch, *first.shape) for first in start)
        return rule.states(written._replace(value=_delayed(layout, values)), memory, normaliser, start, group.borders)

    def read(states: States) -> tuple[Tensor, Tensor]:
        found, mass = rule.read(queries, states.memory, states.normaliser)
        return layout.from_grid(found.transpose(2, 3)), layout.from_grid(mass.transpose(2, 3))

    states = states_of(value, start_memory)
    memory, mass = read(states)
    # Memory and read are linear in the values: with the unit matrix for values, the read is the tokens' weights
    units = torch.eye(tokens, dtype=value.dtype, device=value.device).expand(batch, heads, -1, -1)
    parts = units.split(max(1, COLUMN_ELEMENTS // (layout.segments * key[:, :, 0].numel())), -1)
    weights_of_memory = [read(states_of(part, value.new_zeros(heads, width, part.shape[-1])))[0] for part in parts]

    logits = _widen(module.gate())
    log_sum = scores.logsumexp(-1, keepdim=True) if rule.shared else None
    share = memory_weight(logits[:, None, None], mass, log_sum, width, rule.eps)
    share = share * layout.from_grid(has_memory[..., None, None, None].expand(batch, -1, layout.slots, heads, 1))
    from_memory, from_local = share * memory, (1 - share) * local
    sizes = from_memory.norm(dim=-1), from_local.norm(dim=-1)
    return Parts(
        scores=scores,
        weights=weights,
        heads=from_memory + from_local,
        local_heads=local,
        memory_heads=memory,
        memory_weights=torch.cat(weights_of_memory, -1),
        gate=torch.sigmoid(logits),
        token_gate=share.squeeze(-1),
        memory_share=torch.where(sizes[0] > 0, sizes[0] / (sizes[0] + sizes[1]), 0),
        memory_norm=torch.cat([states.memory, states.last_memory.unsqueeze(1)], 1).flatten(3).norm(dim=-1).transpose(1, 2),
        normaliser_norm=torch.cat([states.normaliser, states.last_normaliser.unsqueeze(1)], 1).norm(dim=-1).transpose(1, 2),
        segments=segments,
    )


def _delayed(layout: GridLayout, tokens: Tensor) -> Tensor:
    """`[B, H, T, D]` as blocks `[B, S, H, slots, D]` in the order in which the memory takes them in."""
    return layout.delay(layout.to_grid(tokens, None)).transpose(2, 3)


def _segments(layout: GridLayout) -> Tensor:
    """`[B, T]`: the grid segment of each token, −1 for padding."""
    places = torch.arange(1, layout.segments + 1, device=layout.tokens_seen.device)
    grid = places[None, :, None, None, None].expand(layout.batch, -1, layout.slots, 1, 1)
    return layout.from_grid(grid)[:, 0, :, 0] - 1


def _window_scores(
    softmax: ScoreOptions, query: Tensor, key: Tensor, segments: Tensor, layout: GridLayout
) -> tuple[Tensor, Tensor]:
    """`[B, H, T, T]`, the scores of each query and key of its window, and which these are, `[B, 1, T, T]` bool: those of the
    query's document in its own segment and in the local ones before it, and sinks."""
    length, earlier, sinks = layout.segment_length, layout.local_segments, layout.sink_tokens
    numbers = layout.positions.expand(layout.batch, -1)
    slots, distance = numbers % length, segments.unsqueeze(2) - segments.unsqueeze(1)  # in segments
    queries = softmax.compared_queries(query, sinks + earlier * length + slots)
    scores = query.new_zeros(*query.shape[:3], query.shape[2])
    # A key has another place in the window with every segment, and one more as a sink
    for shift in range(earlier + 1):
        keys = softmax.compared_keys(key, sinks + (earlier - shift) * length + slots)
        scores = torch.where((distance == shift).unsqueeze(1), queries @ keys.mT, scores)
    near = distance <= earlier
    if sinks:
        keys = softmax.compared_keys(key, numbers.clamp(max=sinks - 1))
        scores = torch.where(near.unsqueeze(1), scores, queries @ keys.mT)
        near = near | (numbers < sinks).unsqueeze(1)
    document = layout.document.expand(layout.batch, -1).gather(1, segments.clamp(min=0))
    visible = near & (document.unsqueeze(2) == document.unsqueeze(1))
    visible &= (segments >= 0).unsqueeze(2) & (segments >= 0).unsqueeze(1)
    visible &= torch.ones(segments.shape[1], segments.shape[1], dtype=torch.bool, device=segments.device).tril()
    return scores * softmax.scaling_of(query), visible.unsqueeze(1)


def _widen(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
