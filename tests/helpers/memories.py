"""Kinds of models with a memory, and what reads a text into it."""

import pytest
import torch

from hf_infini import InfiniCache
from models import causal_mha, infini_gpt2


def convolved(**options):
    """A model whose convolutions are far from their start at zero, the same each time."""
    model = infini_gpt2(**options)
    for number, block in enumerate(model.transformer.h):
        torch.manual_seed(number)
        block.attn.memory_conv.data.normal_()
    return model


def mha(**options):
    return causal_mha(**{"attention": "infini", "segment_length": 8} | options)


VARIANTS = [
    (infini_gpt2, {"update_rule": "delta", "feature_map": "exp"}),
    (infini_gpt2, {"segment_length": 3, "attn_implementation": "eager"}),
    (infini_gpt2, {"layers": [1], "position_encoding": "segment"}),
    (convolved, {"memory_conv": 3, "position_encoding": "rope", "mask_special_tokens": False}),
    (mha, {"position_encoding": "rope", "local_segments": 1, "score": "dot", "sink_tokens": 3}),
    (mha, {"memory_conv": 3, "feature_map": "exp", "memory_write": "learned"}),
    (convolved, {"memory_conv": 3, "update_rule": "gated_delta", "sink_tokens": 2}),
]
MIXED = [VARIANTS[number] for number in (0, 2, 4, 6)]


def names(variant) -> str:
    make, options = variant
    return "-".join([make.__name__, *map(str, options.values())])


def each(variants):
    return pytest.mark.parametrize("variant", variants, ids=names)


def read(model, input_ids, attention_mask=None, position_ids=None) -> InfiniCache:
    """The cache after the inputs, `[batch, tokens]` each, read in two calls."""
    cache, width = InfiniCache(model.config), input_ids.shape[1]
    with torch.no_grad():
        for begin, end in ((0, width // 3), (width // 3, width)):
            mask = None if attention_mask is None else attention_mask[:, :end]
            positions = None if position_ids is None else position_ids[:, begin:end]
            columns = {"attention_mask": mask, "position_ids": positions}
            model(input_ids[:, begin:end], **columns, past_key_values=cache, use_cache=True)
    return cache
