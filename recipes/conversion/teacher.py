"""The teacher inside a model with Infini-attention: its own layers, attending to everything as they did before.

A patched model has all weights of the plain one. So no second model is needed: within [`full_attention`] every layer with a
memory gives the output of its own attention over the whole row, and the model computes what the plain one does.
"""

import contextlib
from collections.abc import Iterator

from hf_infini.layers.memory_layer import InfiniAttentionMixin, SharedInputs
from hf_infini.models.structure import attention_layers, decoder_of


@contextlib.contextmanager
def full_attention(model, tokens: int) -> Iterator[None]:
    """Within it, the model computes what the plain one does, on whole rows without padding or packing.

    Args:
        model: with Infini-attention, perhaps inside another wrapper.
        tokens: of the longest row.
    """
    # A window's first place is taken by nothing
    in_one_window = {"infini": SharedInputs(None, None, decoder_of(model).rotary_tables(tokens + 1))}

    def attend_to_everything(layer: InfiniAttentionMixin, args: tuple, keywords: dict):
        return args, keywords | in_one_window

    with contextlib.ExitStack() as handles:
        for layer in attention_layers(decoder_of(model)):
            if isinstance(layer, InfiniAttentionMixin):
                handles.callback(layer.register_forward_pre_hook(attend_to_everything, with_kwargs=True).remove)
        yield
