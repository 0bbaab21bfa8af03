"""The teacher inside a model with Infini-attention: its own layers, attending to everything as they did before.

A patched model has all weights of the plain one. So no second model is needed: within [`full_attention`] every layer with a
memory gives the output of its own attention over the whole row, and the model computes what the plain one does. What each
layer gives *with* its memory on the same input can be compared with that, layer by layer, without a gradient across layers.
"""

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping

import torch
from torch import Tensor

from hf_infini.layers.memory_layer import InfiniAttentionMixin, SharedInputs
from hf_infini.models.structure import attention_layers, decoder_of

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
        compare: is called with what every layer gives with its memory; its input is that of the plain model and has no
            gradient. Without it, nothing is computed with memories.
        layers: numbers of those that attend to everything, the others as they are. `None`: all.
    """
    in_one_window = _in_one_window(model, tokens)

    def attend_to_everything(layer: InfiniAttentionMixin, args: tuple, keywords: dict):
        return args, keywords | in_one_window

    def cut_gradient(layer: InfiniAttentionMixin, args: tuple, keywords: dict):
        hidden_states, *others = args or (keywords.pop("hidden_states"),)
        return (hidden_states.detach(), *others), keywords

    def compare_and_replace(layer: InfiniAttentionMixin, args: tuple, keywords: dict, output: tuple):
        with torch.no_grad():
            full = type(layer).forward(layer, *args, **keywords | in_one_window)[0]
        compare(layer.layer_idx, output[0], full)
        return full, None

    with contextlib.ExitStack() as handles:
        for layer in _layers_with_memory(model):
            if layers is not None and layer.layer_idx not in layers:
                continue
            before = attend_to_everything if compare is None else cut_gradient
            handles.callback(layer.register_forward_pre_hook(before, with_kwargs=True).remove)
            if compare is not None:  # before other hooks, to which it is what the layer gives
                handles.callback(layer.register_forward_hook(compare_and_replace, prepend=True, with_kwargs=True).remove)
        yield


@contextlib.contextmanager
def partly_full_attention(model, tokens: int, shares: Mapping[int, Tensor]) -> Iterator[None]:
    """Within it, each layer gives so large a share of its own full attention, and the rest as it is: at 0 it is the patched
    layer, at 1 the plain one; `model` and `tokens` as in [`full_attention`]."""
    in_one_window = _in_one_window(model, tokens)

    def mix(layer: InfiniAttentionMixin, args: tuple, keywords: dict, output: tuple):
        full = type(layer).forward(layer, *args, **keywords | in_one_window)[0]
        return torch.lerp(output[0], full, shares[layer.layer_idx].to(full)), None

    with contextlib.ExitStack() as handles:
        for layer in _layers_with_memory(model):
            handles.callback(layer.register_forward_hook(mix, prepend=True, with_kwargs=True).remove)
        yield


def _layers_with_memory(model) -> list[InfiniAttentionMixin]:
    return [layer for layer in attention_layers(decoder_of(model)) if isinstance(layer, InfiniAttentionMixin)]


def _in_one_window(model, tokens: int) -> dict[str, SharedInputs]:
    """The keyword with which layers attend to everything; a window's first place is taken by nothing."""
    return {"infini": SharedInputs(None, None, decoder_of(model).rotary_tables(tokens + 1))}
