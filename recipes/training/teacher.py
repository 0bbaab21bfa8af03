"""The teacher inside a model with Infini-attention: its own layers, attending to everything as they
did before.

A patched model has all weights of the plain one. So no second model is needed: within
[`full_attention`] every layer with a memory gives the output of its own attention over the whole
row, and the model computes what the plain one does.
"""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from evaluation.inference import first_beyond
from hf_infini.layers.memory_layer import InfiniAttentionMixin, SharedInputs
from hf_infini.models.structure import attention_layers, decoder_of
from recall.rows import NOT_COUNTED


@contextlib.contextmanager
def full_attention(model, tokens: int) -> Iterator[None]:
    """Within it, a model with Infini-attention, perhaps inside another wrapper, computes what the
    plain one does, on whole rows of at most so many tokens without padding or packing."""
    decoder = decoder_of(model)
    # A window's first place is taken by nothing
    in_one_window = SharedInputs(None, None, decoder.rotary_tables(tokens + 1))

    def attend_to_everything(layer: InfiniAttentionMixin, args: tuple, keywords: dict):
        return args, keywords | {"infini": in_one_window}

    with contextlib.ExitStack() as handles:
        for layer in attention_layers(decoder):
            if isinstance(layer, InfiniAttentionMixin):
                hook = layer.register_forward_pre_hook(attend_to_everything, with_kwargs=True)
                handles.callback(hook.remove)
        yield


def divergence_beyond(model, adapted, ids: Tensor, labels: Tensor) -> Tensor:
    """The KL divergence of a model's predictions from the plain model's, in nats: of each row the
    mean over the labels whose query no longer sees everything, and the mean over the rows. Before
    them both predict the same, and a loss over all tokens would mostly ask for nothing (arXiv
    2510.07318 trains so, too).

    Args:
        model: `adapted`, PEFT's wrapper around a model with Infini-attention, perhaps in a
            distributed wrapper.
        ids, labels: `[batch, tokens]` without padding; a label is a token, or −100 where it does
            not count.
    """
    first = first_beyond(decoder_of(adapted).config)
    counted = labels[:, first + 1 :] != NOT_COUNTED
    places = counted.any(0).nonzero().squeeze(1)  # of the logits that any row needs
    options = {"input_ids": ids, "use_cache": False, "logits_to_keep": places + first}
    with torch.no_grad(), adapted.disable_adapter(), full_attention(adapted, ids.shape[1]):
        wanted = model(**options).logits.float().log_softmax(-1)
    found = model(**options).logits.float().log_softmax(-1)
    divergences = F.kl_div(found, wanted, log_target=True, reduction="none").sum(-1)
    counted = counted[:, places]
    return ((divergences * counted).sum(1) / counted.sum(1).clamp(min=1)).mean()
