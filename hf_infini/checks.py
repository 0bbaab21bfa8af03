"""What is refused before anything is computed: arguments that do not fit together, each by name, with what is allowed."""

import torch
from torch import Tensor

from .positions import Rotary


def check_arguments(query, key, value, gate, log_weight, query_weight, feature_maps, weights: int) -> None:
    """ValueError unless these arguments of [`infini_attention`] have the shapes that it says; `weights`: of a token."""
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
    query_map, key_map = feature_maps or (None, None)
    for name, tensor, wanted in (
        ("log_weight", log_weight, (*key.shape[:3], weights)),
        ("query_weight", query_weight, (heads, head_dim, head_dim)),
        ("feature_maps[0]", query_map, (heads, head_dim, head_dim)),
        ("feature_maps[1]", key_map, (key.shape[1], head_dim, head_dim)),
    ):
        if tensor is not None and tensor.shape != wanted:
            raise ValueError(f"{name} must be {list(wanted)}, got {list(tensor.shape)}.")


def check_window(segment_length: int, local_segments: int, sink_tokens: int, rotary: Rotary | None = None) -> None:
    """ValueError unless there can be such segments and sinks, with these rotary positions."""
    if segment_length < 1 or local_segments < 0 or not 0 <= sink_tokens < segment_length:
        raise ValueError(
            f"segment_length must be ≥ 1, local_segments ≥ 0 and sink_tokens from 0 to segment_length - 1, got "
            f"{segment_length}, {local_segments} and {sink_tokens}."
        )
    places = sink_tokens + (local_segments + 1) * segment_length
    if rotary is not None and any(len(table) != places for table in rotary.tables):
        raise ValueError(
            f"rotary has {len(rotary.tables[0])} places, and a window of these segments and sinks has {places}."
        )


def check_shapes(
    batch: int, tokens: int, attention_mask: Tensor | None, memory_mask: Tensor | None, position_ids: Tensor | None
) -> None:
    """ValueError unless these are `[batch, tokens]`, positions perhaps `[1, tokens]`, or `None`."""
    for name, mask in (("attention_mask", attention_mask), ("memory_mask", memory_mask)):
        if mask is not None and mask.shape != (batch, tokens):
            raise ValueError(
                f"{name} must be [batch, tokens] = [{batch}, {tokens}], got {list(mask.shape)}. "
                "With a state it covers only the new tokens."
            )
    if position_ids is not None and tuple(position_ids.shape) not in ((batch, tokens), (1, tokens)):
        raise ValueError(f"position_ids must be [batch, tokens] = [{batch}, {tokens}], got {list(position_ids.shape)}.")


def bool_mask(name: str, mask: Tensor | None, read_back: bool) -> Tensor | None:
    """A mask of 0 and 1 as bool; read_back: whether its values may be read back from the device now."""
    if mask is None or mask.dtype == torch.bool:
        return mask
    wrong = ((mask != 0) & (mask != 1)).any()
    message = (
        f"{name} must hold 1 for tokens that count and 0 for those that do not; this one of dtype {mask.dtype} has other "
        "values. A mask that is added to scores (0 and -inf) is not taken: pass mask == 0."
    )
    if not read_back:
        torch._assert_async(~wrong, message)
    elif wrong:
        raise ValueError(message)
    return mask.to(torch.bool)
