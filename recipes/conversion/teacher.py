"""The teacher inside a model with Infini-attention: its own layers, attending to everything as they did before.

A patched model has all weights of the plain one. So no second model is needed: within [`full_attention`] every layer with a
memory gives the output of its own attention over the whole row, and the model computes what the plain one does.
"""

import contextlib
from collections.abc import Collection, Iterator, Mapping

import torch
from torch import Tensor

from hf_infini.layers.memory_layer import InfiniAttentionMixin, SharedInputs
from hf_infini.models.structure import attention_layers, decoder_of


@contextlib.contextmanager
def full_attention(model, tokens: int, layers: Collection[int] | None = None) -> Iterator[None]:
    """Within it, the model computes what the plain one does, on whole rows without padding or packing.

    Args:
        model: with Infini-attention, perhaps inside PEFT's or another wrapper.
        tokens: of the longest row.
        layers: numbers of those that attend to everything, the others as they are. `None`: all.
    """
    in_one_window = _in_one_window(model, tokens)

    def attend_to_everything(layer: InfiniAttentionMixin, args: tuple, keywords: dict):
        return args, keywords | in_one_window

    with contextlib.ExitStack() as handles:
        for layer in _layers_with_memory(model):
            if layers is None or layer.layer_idx in layers:
                handles.callback(layer.register_forward_pre_hook(attend_to_everything, with_kwargs=True).remove)
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
