"""A call that fails halfway, such as without memory or by Ctrl-C, and is repeated: the same numbers
as without the failure."""

import copy

import pytest
import torch

from decoders import decoder
from hf_infini import InfiniCache, patch_model
from memories import VARIANTS, each
from models import FLOAT32, token_ids


def patched(family: str, **options):
    model = decoder(family, vocab_size=89)
    return patch_model(model, **{"segment_length": 8} | options).eval()


KINDS = [
    *VARIANTS,
    (patched, {"family": "llama", "memory_conv": 2, "sink_tokens": 2}),
    (patched, {"family": "llama", "kept_tokens": 6}),
    (patched, {"family": "llama", "kept_tokens": 6, "keep_score": "half"}),
    (patched, {"family": "llama", "layers": [0, 2]}),
    (patched, {"family": "gemma3_text", "layers": [0, 2]}),  # beside layers that slide
]
CALLS = [(0, 9), (20, 7), (20, 1), (23, 1)]  # the last completes a segment


class Interrupted(Exception):
    pass


def places_of(model):
    """Modules of a model before and after which a call may fail: in every layer and behind them."""
    names = [name for name, _ in model.named_modules() if name and len(name.split(".")) < 5]
    return [
        (name, register)
        for name in names
        for register in ("register_forward_pre_hook", "register_forward_hook")
    ]


@torch.no_grad()
def go_on(model, ids, mask, cache, begin, size):
    """Logits of a call, and of one more after it."""
    found = []
    for first, last in ((begin, begin + size), (begin + size, begin + size + 5)):
        given = {} if mask is None else {"attention_mask": mask[:, :last]}
        given |= {"past_key_values": cache, "use_cache": True}
        found.append(model(ids[:, first:last], **given).logits)
    return torch.cat(found, 1)


@pytest.mark.slow
@pytest.mark.parametrize("padded", [False, True])
@each(KINDS)
def test_a_failed_call_is_repeated_with_the_same_numbers(variant, padded):
    make, options = variant
    model, ids, failed = make(**options), token_ids(2, 32), set()
    ids[:, 5] = 0  # an end of text
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    mask = mask if padded else None

    def fails(*_):
        raise Interrupted

    for begin, size in CALLS:
        before = InfiniCache(model.config)
        if begin:
            with torch.no_grad():
                past = None if mask is None else mask[:, :begin]
                model(ids[:, :begin], attention_mask=past, past_key_values=before, use_cache=True)
        wanted = go_on(model, ids, mask, copy.copy(before), begin, size)
        for name, register in places_of(model):
            cache = copy.copy(before)
            hook = getattr(model.get_submodule(name), register)(fails)
            try:
                go_on(model, ids, mask, cache, begin, size)
                continue  # a module that no call enters
            except Interrupted:
                pass
            finally:
                hook.remove()
            failed.add(name)
            found = go_on(model, ids, mask, cache, begin, size)
            torch.testing.assert_close(found, wanted, rtol=FLOAT32, atol=FLOAT32, msg=name)
    assert "lm_head" in failed
