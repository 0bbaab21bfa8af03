"""Which backend computes the attention of a model's layers, and why."""

import torch
from torch import nn

from ..compat.execution_device import device_of
from ..layers.memory_layer import memory_layers
from ..ops.attention import choose
from ..ops.layout.build import segment_layout
from ..ops.state import AttentionCall, InfiniState, Projections
from ..ops.window import ScoreOptions


def backend_of(model: nn.Module, batch: int = 1, tokens: int = 1024) -> dict[str, str]:
    """By the name of each layer with a memory, which backend computes a call of `[batch, tokens]` that begins a text (the
    last one), and why: "step: not one token for every row; grid: plain torch, …". ValueError where no layer has a memory."""
    found = {}
    for name, layer in memory_layers(model).items():
        heads, kv_heads, width = layer.head_counts
        like = torch.empty((), device=device_of(layer), dtype=layer.gate.weight.dtype)
        query, key = (like.expand(batch, count, tokens, width) for count in (heads, kv_heads))
        projections = Projections(query, key, key)
        layout = segment_layout(batch, tokens, *layer.window, device=like.device)
        state = InfiniState.initial(key, key, *layer.window, rule=layer.rule)
        call = AttentionCall(projections, layer.gate(), layout, layer.rule, ScoreOptions(), state)
        found[name] = choose(call)[1]
    if not found:
        raise ValueError(f"a {type(model).__name__} has no layer with a memory: patch_model() gives it some.")
    return found
