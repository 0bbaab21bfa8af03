"""Infini-attention: local softmax attention and a compressive memory, mixed by a gate for each head (equation 5)."""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from .decoding import attend_step
from .features import FEATURE_MAPS
from .groups import attend_grid
from .memory import mix
from .segments import SegmentLayout, segment_layout
from .state import InfiniState
from .steps import StepLayout

UPDATE_RULES = ("linear", "delta")
DENOMINATORS = ("separate", "shared")
EPS = 1e-6


def infini_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gate: Tensor,
    segment_length: int,
    *,
    update_rule: str = "linear",
    feature_map: str = "elu",
    denominator: str = "separate",
    local_segments: int = 0,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    memory_mask: Tensor | None = None,
    state: InfiniState | None = None,
    return_state: bool = False,
    max_documents: int | None = None,
    memory_query: Tensor | None = None,
    memory_key: Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    eps: float = EPS,
) -> Tensor | tuple[Tensor, InfiniState]:
    """Causal attention over short segments plus a memory of constant size for all before them (arXiv 2404.07143).

    Token `t` of a document lies in segment `s = t // segment_length`. It sees its own segment and `local_segments` before it
    by softmax (equation 2), and reads everything older from the memory (equation 3), which takes in a segment when it
    leaves that window (equation 4 or the delta rule). Per head, `sigmoid(gate)` is the memory's share (equation 5); while
    the memory is still empty (or all that left the window was kept out of it), the output is only the local attention.

    Args:
        query: `[batch, heads, tokens, head_dim]`.
        key: `[batch, kv_heads, tokens, head_dim]` and value `[batch, kv_heads, tokens, value_dim]`; query head `h` belongs
            to key/value head `h // (heads // kv_heads)`.
        gate: `[heads]`, the logit β.
        segment_length: tokens in a segment, L ≥ 1.
        update_rule: "linear" or "delta", which writes values less what the memory already answers to their keys.
        feature_map: what makes positive features of the memory's queries and keys: "elu", ELU + 1 (the paper), or "exp".
        denominator: "separate", one for the window and one for the memory, so that only the gate sets the memory's share
            (the paper); or "shared", one for both, so that it also depends on what the token finds: [`memory_weight`].
        local_segments: earlier segments that the softmax sees, 0 in the paper.
        attention_mask: `[batch, tokens]`, 1 for real tokens; padding may stand anywhere, is in no segment, and its output
            is zero.
        position_ids: `[batch, tokens]`; a real token whose position does not go beyond the one before it starts a new
            document, with an empty window and the memory it started from.
        memory_mask: `[batch, tokens]`, 0 for tokens that are seen inside the window but never written into the memory.
        state: continues an earlier call; see [`InfiniState`].
        return_state: also return the state after the last token.
        max_documents: how many documents a row holds at most, where sizes must not depend on the data: [`segment_layout`].
        memory_query, memory_key: what the memory reads and writes, shaped like query and key; by default those (rotary
            models give the un-rotated ones).
        scaling: of the local dot products; by default `head_dim ** -0.5`.
        dropout: probability of dropping a local attention weight.
        eps: added to the denominator of equation 3.

    Returns:
        `[batch, heads, tokens, value_dim]` in the value's dtype, and the state if asked for; no tokens leave it as it
        was. Memory, normaliser and the division are float32 (float64 for float64 inputs) whatever the inputs are. Second
        derivatives need `torch.nn.attention.sdpa_kernel(SDPBackend.MATH)` around the call: torch's fused kernels have none.

    Raises:
        ValueError: shapes, options or the state do not fit together; the message names them.
    """
    _check_arguments(query, key, value, gate, segment_length, local_segments)
    _check_choices(update_rule, feature_map, denominator)
    _check_token_arguments(*query.shape[::2], attention_mask, memory_mask, position_ids)
    if 0 in query.shape[::2]:
        output, state = _of_no_tokens(query, key, value, gate, segment_length, local_segments, state, memory_key is not None)
        return (output, state) if return_state else output
    layout = segment_layout(
        query.shape[0],
        query.shape[2],
        segment_length,
        local_segments,
        attention_mask=attention_mask,
        position_ids=position_ids,
        memory_mask=memory_mask,
        state=state,
        max_documents=max_documents,
        device=query.device,
    )
    output, new_state, _ = attend(
        query,
        key,
        value,
        gate,
        layout,
        update_rule=update_rule,
        feature_map=feature_map,
        denominator=denominator,
        state=state,
        return_state=return_state,
        memory_query=memory_query,
        memory_key=memory_key,
        scaling=scaling,
        dropout=dropout,
        eps=eps,
    )
    return (output, new_state) if return_state else output


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gate: Tensor,
    layout: SegmentLayout | StepLayout,
    *,
    update_rule: str = "linear",
    feature_map: str = "elu",
    denominator: str = "separate",
    state: InfiniState | None = None,
    return_state: bool = False,
    memory_query: Tensor | None = None,
    memory_key: Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    eps: float = EPS,
    return_weights: bool = False,
    upcast: bool = False,
    eager: bool = False,
    in_place: bool = False,
) -> tuple[Tensor, InfiniState | None, Tensor | None]:
    """[`infini_attention`] on a layout that is already made: what a model's layers call.

    Beyond its arguments: `eager` writes the local softmax out, `return_weights` returns its weights
    `[batch, heads, tokens, (local_segments + 1) * segment_length]` (column `c` is slot `c` of the query's window, which
    begins `local_segments` segments before its own; the output is computed from this very tensor, so that a gradient
    reaches it), `upcast` runs it in float32; `in_place` allows a step of one token to overwrite the given state.
    """
    separate = memory_key is not None
    if state is None:
        state = InfiniState.initial(
            key, value, layout.segment_length, layout.local_segments, separate_memory_key=separate
        )
    _check_state(state, key, value, layout.segment_length, layout.local_segments, separate)
    state = _as_wide_as(state, local_key=key, local_value=value, local_memory_key=memory_key)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    windows = (state.local_key, state.local_value, state.local_memory_key if separate else state.local_key)
    memory_query = query if memory_query is None else memory_query
    memory_key = key if memory_key is None else memory_key
    shared = denominator == "shared"
    eager = eager or return_weights or upcast
    if isinstance(layout, StepLayout):
        return attend_step(
            query,
            key,
            value,
            gate,
            layout,
            state,
            update_rule=update_rule,
            features=FEATURE_MAPS[feature_map],
            shared=shared,
            memory_query=memory_query,
            memory_key=memory_key,
            scaling=scaling,
            dropout=dropout,
            eps=eps,
            eager=eager,
            upcast=upcast,
            in_place=in_place,
        )

    grid_query, grid_key, grid_value = (
        layout.to_grid(new, window) for new, window in zip((query, key, value), (None, *windows), strict=False)
    )
    output, memory, memory_normaliser, weights = attend_grid(
        grid_query,
        grid_key,
        grid_value,
        gate,
        layout,
        state,
        memory_query=None if memory_query is query else layout.to_grid(memory_query, None),
        memory_key=layout.to_grid(memory_key, windows[2]) if separate else None,
        update_rule=update_rule,
        features=FEATURE_MAPS[feature_map],
        shared=shared,
        scaling=scaling,
        dropout=dropout,
        eps=eps,
        eager=eager,
        return_weights=return_weights,
        upcast=upcast,
    )
    output = layout.from_grid(output)
    if not return_state:
        return output, None, weights
    new_state = replace(
        state,
        memory=_own_copy(memory),
        normaliser=_own_copy(memory_normaliser),
        local_key=layout.next_window(key, state.local_key),
        local_value=layout.next_window(value, state.local_value),
        local_memory_key=layout.next_window(memory_key, state.local_memory_key) if separate else None,
        local_skipped=layout.next_skipped,
        tokens_seen=layout.tokens_seen,
        last_position=layout.last_position,
        memory_tokens=layout.memory_tokens,
    )
    return output, new_state, weights


def _as_wide_as(state: InfiniState, **new: Tensor | None) -> InfiniState:
    """The state with windows no narrower than the new tokens, as keys and values grow in a stock cache: a text may be read
    under autocast, and gone on with outside of it, or the other way round."""
    windows = {name: getattr(state, name) for name, tensor in new.items() if tensor is not None}
    wide = {n: window.to(torch.promote_types(window.dtype, new[n].dtype)) for n, window in windows.items()}
    return state if all(wide[name] is windows[name] for name in wide) else replace(state, **wide)


def _of_no_tokens(
    query, key, value, gate, segment_length, local_segments, state, separate
) -> tuple[Tensor, InfiniState]:
    """Output and state of a call of no rows or no tokens: an empty tensor that everything has a gradient from, and the state
    as it was."""
    if state is None:
        state = InfiniState.initial(key, value, segment_length, local_segments, separate_memory_key=separate)
    _check_state(state, key, value, segment_length, local_segments, separate)
    local = F.scaled_dot_product_attention(query, key, value, enable_gqa=True)
    return mix(local, local, gate[:, None, None]), state


def _own_copy(tensor: Tensor) -> Tensor:
    """A copy: the tensor is one of many states that the call made, and would keep all of them in memory. Its strides are
    those of a new tensor also in a batch of one, for torch.cond compares them."""
    return tensor.clone(memory_format=torch.contiguous_format)


def _check_arguments(query, key, value, gate, segment_length, local_segments) -> None:
    if query.dim() != 4 or key.dim() != 4 or value.dim() != 4:
        shapes = ", ".join(str(list(tensor.shape)) for tensor in (query, key, value))
        raise ValueError(f"query, key and value must be [batch, heads, tokens, head_dim], got {shapes}.")
    batch, heads, tokens, head_dim = query.shape
    if key.shape[0] != batch or key.shape[2:] != (tokens, head_dim) or value.shape[:3] != key.shape[:3]:
        raise ValueError(
            f"key {list(key.shape)} and value {list(value.shape)} must agree with query {list(query.shape)} in batch, "
            "tokens and head_dim, and with each other in heads."
        )
    if heads % key.shape[1]:
        raise ValueError(f"the {key.shape[1]} key/value heads must divide the {heads} query heads.")
    if gate.shape != (heads,):
        raise ValueError(f"gate must be [heads] = [{heads}], got {list(gate.shape)}.")
    if segment_length < 1 or local_segments < 0:
        raise ValueError(
            f"segment_length must be ≥ 1 and local_segments ≥ 0, got {segment_length} and {local_segments}."
        )


def _check_choices(update_rule: str, feature_map: str, denominator: str) -> None:
    for name, given, allowed in (
        ("update_rule", update_rule, UPDATE_RULES),
        ("feature_map", feature_map, FEATURE_MAPS),
        ("denominator", denominator, DENOMINATORS),
    ):
        if given not in allowed:
            raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {given!r}.")


def _check_token_arguments(batch, tokens, attention_mask, memory_mask, position_ids) -> None:
    for name, mask in (("attention_mask", attention_mask), ("memory_mask", memory_mask)):
        if mask is not None and mask.shape != (batch, tokens):
            raise ValueError(
                f"{name} must be [batch, tokens] = [{batch}, {tokens}], got {list(mask.shape)}. "
                "With a state it covers only the new tokens."
            )
    if position_ids is not None and tuple(position_ids.shape) not in ((batch, tokens), (1, tokens)):
        raise ValueError(
            f"position_ids must be [batch, tokens] = [{batch}, {tokens}], got {list(position_ids.shape)}."
        )


def _check_state(
    state: InfiniState, key: Tensor, value: Tensor, segment_length: int, local_segments: int, separate: bool
) -> None:
    slots = (local_segments + 1) * segment_length
    wanted = (key.shape[0], key.shape[1], slots, key.shape[3])
    if tuple(state.local_key.shape) != wanted or state.local_value.shape[-1] != value.shape[-1]:
        raise ValueError(
            "the state does not fit this call: its window is [batch, kv_heads, (local_segments + 1) * segment_length, "
            f"head_dim] = {list(state.local_key.shape)}, the call needs {list(wanted)}."
        )
    if separate != (state.local_memory_key is not None):
        raise ValueError("memory_key must be given in every call of a sequence or in none; the state says otherwise.")
