"""The teacher inside a model with Infini-attention: its own layers, attending to everything as they did before.

A patched model has all weights of the plain one. So no second model is needed: within [`full_attention`] every layer with a
memory gives the output of its own attention over the whole row, and the model computes what the plain one does. What each
layer gives *with* its memory on the same input can be compared with that, layer by layer, without a gradient across layers.
"""

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from hf_infini.families import attention_layers, decoder_of
from hf_infini.modeling_infini_layer import InfiniAttentionMixin, neutral
from hf_infini.positions import Rotary

# Takes the number of a layer, its output with its memory, and its own attention's, `[batch, tokens, width]` each
Compare = Callable[[int, Tensor, Tensor], None]


@contextlib.contextmanager
def full_attention(model, tokens: int, compare: Compare | None = None) -> Iterator[None]:
    """Within it, the model computes what the plain one does, on whole rows without padding or packing.

    Args:
        model: with Infini-attention, perhaps inside PEFT's or another wrapper.
        tokens: of the longest row.
        compare: is told, for every layer, what it gives with its memory; its input is that of the plain model and has no
            gradient. Without it, nothing is computed with memories.
    """
    base = decoder_of(model)
    tables = base.rotary_tables(tokens + 1)  # a window's first place is taken by nothing
    layers = [layer for layer in attention_layers(base) if isinstance(layer, InfiniAttentionMixin)]
    for layer in layers:
        layer.forward = _with_teacher(layer, tables.get(layer.rotary_type), compare)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _with_teacher(layer: InfiniAttentionMixin, tables: tuple[Tensor, ...] | None, compare: Compare | None):
    embeddings = None if tables is None else neutral(tables)
    rotary = Rotary(tables, layer.turn) if layer.turns_states else None

    def forward(hidden_states: Tensor, *args, **kwargs) -> tuple[Tensor, None]:
        with torch.set_grad_enabled(torch.is_grad_enabled() and compare is None):
            full = layer.in_one_window(hidden_states, embeddings, rotary)
        if compare is not None:
            compare(layer.layer_idx, type(layer).forward(layer, hidden_states.detach(), *args, **kwargs)[0], full)
        return full, None

    return forward
