"""The teacher inside a model with Infini-attention: its own layers, attending to everything as they did before.

A patched model has all weights of the plain one. So no second model is needed: within [`full_attention`] every layer with a
memory gives the output of its own attention over the whole row, and the model computes what the plain one does. What each
layer gives *with* its memory on the same input can be compared with that, layer by layer, without a gradient across layers.
"""

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping

import torch
from torch import Tensor

from hf_infini.layers.swapped_attention import InfiniAttentionMixin, neutral
from hf_infini.models.structure import attention_layers, decoder_of
from hf_infini.ops.positions import Rotary

# Takes the number of a layer, its output with its memory, and its own attention's, `[batch, tokens, width]` each
Compare = Callable[[int, Tensor, Tensor], None]


@contextlib.contextmanager
def full_attention(
    model, tokens: int, compare: Compare | None = None, layers: Collection[int] | None = None
) -> Iterator[None]:
    """Within it, the model computes what the plain one does, on whole rows without padding or packing.

    Args:
        model: with Infini-attention, perhaps inside PEFT's or another wrapper.
        tokens: of the longest row.
        compare: is told, for every layer, what it gives with its memory; its input is that of the plain model and has no
            gradient. Without it, nothing is computed with memories.
        layers: numbers of those that attend to everything, the others as they are. `None`: all.
    """

    def with_teacher(layer: InfiniAttentionMixin, own: Callable[[Tensor], Tensor]):
        def forward(hidden_states: Tensor, *args, **kwargs) -> tuple[Tensor, None]:
            with torch.set_grad_enabled(torch.is_grad_enabled() and compare is None):
                full = own(hidden_states)
            if compare is not None:
                compare(layer.layer_idx, type(layer).forward(layer, hidden_states.detach(), *args, **kwargs)[0], full)
            return full, None

        return forward if layers is None or layer.layer_idx in layers else None

    with _replaced(model, tokens, with_teacher):
        yield


@contextlib.contextmanager
def partly_full_attention(model, tokens: int, shares: Mapping[int, Tensor]) -> Iterator[None]:
    """Within it, each layer gives so large a share of its own full attention, and the rest as it is: at 0 it is the patched
    layer, at 1 the plain one; `model` and `tokens` as in [`full_attention`]."""

    def mixed(layer: InfiniAttentionMixin, own: Callable[[Tensor], Tensor]):
        def forward(hidden_states: Tensor, *args, **kwargs) -> tuple[Tensor, None]:
            patched = type(layer).forward(layer, hidden_states, *args, **kwargs)[0]
            return torch.lerp(patched, own(hidden_states), shares[layer.layer_idx].to(patched)), None

        return forward

    with _replaced(model, tokens, mixed):
        yield


@contextlib.contextmanager
def _replaced(model, tokens: int, make: Callable) -> Iterator[None]:
    """Within it, layers have the forwards that `make` gives them, of a layer and of its own attention; `None`: its own."""
    base = decoder_of(model)
    tables = base.rotary_tables(tokens + 1)  # a window's first place is taken by nothing
    replaced = []
    try:
        for layer in attention_layers(base):
            if isinstance(layer, InfiniAttentionMixin):
                forward = make(layer, _own_attention(layer, tables.get(layer.rotary_type)))
                if forward is not None:
                    layer.forward = forward
                    replaced.append(layer)
        yield
    finally:
        for layer in replaced:
            del layer.forward


def _own_attention(layer: InfiniAttentionMixin, tables: tuple[Tensor, ...] | None) -> Callable[[Tensor], Tensor]:
    embeddings = None if tables is None else neutral(tables)
    rotary = Rotary(tables, layer.turn) if layer.turns_states else None
    return lambda hidden_states: layer.in_one_window(hidden_states, embeddings, rotary)
