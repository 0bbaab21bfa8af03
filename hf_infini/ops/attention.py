"""Infini-attention: local softmax attention and a compressive memory, mixed by a gate for each head
(equation 5).

[`infini_attention`] makes the layout of a call and passes it to [`attend`] of backends/, which the
models call themselves.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..options import Window
from .backends import attend
from .checks import check_arguments, check_types
from .equations import EPS, ScoreOptions
from .keeping import token_score
from .layout.grid import segment_layout
from .positions import rotate
from .rules import memory_rule
from .state import AttentionCall, InfiniState, Tokens


@check_types
def infini_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gate: Tensor | None,
    segment_length: int,
    *,
    update_rule: str = "linear",
    feature_map: str = "elu",
    local_segments: int = 0,
    sink_tokens: int = 0,
    kept_tokens: int = 0,
    keep_score: str = "attention",
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    memory_mask: Tensor | None = None,
    state: InfiniState | None = None,
    return_state: bool = False,
    log_weight: Tensor | None = None,
    learned_score: Tensor | None = None,
    rotary: tuple[Tensor, ...] | None = None,
    turn: Callable = rotate,
    far_rotary: tuple[tuple[Tensor, ...], int] | None = None,
    scaling: float | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    eps: float = EPS,
) -> Tensor | tuple[Tensor, InfiniState]:
    """Causal attention over short segments plus a memory of constant size for all before them
    (arXiv 2404.07143).

    Token `t` of a document is in segment `s = t // segment_length`. It sees its segment and
    `local_segments` before it by softmax (equation 2), and reads everything older from the memory
    (equation 3), which takes in a segment when it leaves that window (equation 4 or the delta
    rule). Per head, `sigmoid(gate)` is the memory's share (equation 5); while the memory is still
    empty (or everything that left the window was skipped), the output is only the local attention.

    Args:
        query: `[batch, heads, tokens, head_dim]`.
        key: `[batch, kv_heads, tokens, head_dim]` and value `[batch, kv_heads, tokens, value_dim]`;
            query head `h` belongs to key/value head `h // (heads // kv_heads)`.
        gate: `[heads]`, the logit β; `None` with `update_rule="none"`, which has no memory.
        segment_length: tokens in a segment, L ≥ 1.
        update_rule, feature_map, local_segments, sink_tokens, kept_tokens, keep_score: as of
            [`MemoryOptions`]; what a keep_score has learned is `learned_score`. (Attention sinks:
            arXiv 2309.17453.)
        attention_mask: `[batch, tokens]`, 1 for real tokens; padding, anywhere, is in no segment,
            and its output is zero.
        position_ids: `[batch, tokens]`; a real token whose position does not go beyond the one
            before it starts a new document, with an empty window and the memory it started from.
        memory_mask: `[batch, tokens]`, 0 for tokens that are seen inside the window but never
            written into the memory.
        state: continues an earlier call; see [`InfiniState`].
        return_state: also return the state after the last token.
        log_weight: `[batch, kv_heads, tokens, 1]`, added to the memory's keys right before the
            feature map; with exponential features the logarithm of a token's weight. For the gated
            delta rule `[…, 2]`, log β and log α, neither positive.
        learned_score: `[batch, kv_heads, tokens]`, or `[…, 2]` for keep_score="two_learned"; it has
            no gradient.
        rotary: for rotary models, which give query and key un-rotated: the [`rotation`] of the
            places in the window, which has `sink_tokens + kept_tokens + (local_segments + 1) *
            segment_length` of them. The memory has no positions.
        turn: the function that turns states by the tables' rows for their places, with tables to
            match.
        far_rotary: for models whose positions are scaled by the length of a text: as many tables
            as `rotary` has, and the number of a token; they are for the segments whose first token
            has at least that number in its document.
        scaling: of the local dot products; by default `head_dim ** -0.5`.
        softcap: local scores s become `softcap * tanh(s / softcap)`; by default they stay.
        dropout: probability of dropping a local attention weight.
        eps: added to the denominator of equation 3; by the gated delta rule to the squared length
            of a query or a key.

    Returns:
        `[batch, heads, tokens, value_dim]` in the value's dtype, and the state if asked for.
        Memory, normaliser and the division are float32 (float64 for float64 inputs) whatever the
        inputs are. Second derivatives need `torch.nn.attention.sdpa_kernel(SDPBackend.MATH)` around
        the call: torch's fused kernels have none.

    Raises:
        ValueError: shapes, options or the state do not fit together; the message names them.
    """
    window = Window(segment_length, local_segments, sink_tokens, kept_tokens)
    rule = memory_rule(update_rule, feature_map=feature_map, eps=eps)
    score = token_score(keep_score)
    numbers = {"scaling": scaling, "softcap": softcap, "dropout": dropout, "eps": eps}
    if learned_score is not None and learned_score.dim() == 3:
        learned_score = learned_score.unsqueeze(-1)
    tokens = Tokens(key, value, log_weight, learned_score)
    check_arguments(query, tokens, gate, rule, score, window, rotary, far_rotary, **numbers)
    masks = {
        "attention_mask": attention_mask,
        "memory_mask": memory_mask,
        "position_ids": position_ids,
    }
    layout = segment_layout(
        query.shape[0], query.shape[2], window, **masks, state=state, device=query.device
    )
    turning: Any = {"rotary": rotary, "turn": turn, "far_rotary": far_rotary}
    softmax = ScoreOptions(scaling, dropout, softcap=softcap, **turning)
    if state is None:
        made: Any = {"rule": rule, "weighted": log_weight is not None, "scores": score.count}
        state = InfiniState.initial(key, value, *window, **made)
    output, new_state, _ = attend(
        AttentionCall(query, tokens, gate, layout, rule, softmax, state, score, return_state)
    )
    return (output, new_state) if return_state and new_state is not None else output
