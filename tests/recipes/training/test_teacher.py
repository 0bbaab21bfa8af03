"""The teacher inside a patched model computes what the plain model does, and layers are compared on
its inputs."""

import pytest
import torch

from decoders import decoder
from hf_infini import patch_model
from models import gpt2, token_ids
from training.teacher import full_attention

IDS = token_ids(2, 60)
MAKERS = {
    name: lambda name=name: decoder(name) for name in ("llama", "gemma2", "smollm3", "gpt_neox")
} | {"gpt2": gpt2}
OPTIONS = {"segment_length": 8, "local_segments": 1, "sink_tokens": 2, "memory_conv": 2}
makers = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


def patched(make):
    """With convolutions that change what layers are given."""
    model = patch_model(make().eval(), **OPTIONS)
    for name, parameter in model.named_parameters():
        if name.endswith("memory_conv"):
            torch.nn.init.normal_(parameter, std=0.3)
    return model


@makers
@torch.no_grad()
def test_the_teacher_is_the_plain_model(make):
    model, wanted = patched(make), make().eval()(IDS, use_cache=False).logits
    with_memory = model(IDS, use_cache=False).logits
    with full_attention(model, 60):
        # Softmax over one window of all tokens: the same sums in another order
        torch.testing.assert_close(model(IDS, use_cache=False).logits, wanted, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(with_memory, wanted, atol=1e-2)
    assert torch.equal(model(IDS, use_cache=False).logits, with_memory)


def test_an_error_inside_leaves_the_model_as_it_was():
    model = patched(MAKERS["llama"])
    with pytest.raises(RuntimeError, match="stop"), full_attention(model, 60):
        raise RuntimeError("stop")
    layer = model.model.layers[0].self_attn
    assert not layer._forward_pre_hooks and not layer._forward_hooks
