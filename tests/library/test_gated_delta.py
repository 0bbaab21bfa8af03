"""The gated delta rule against transformers' own function, and its parameters; the rest is tested
beside the other rules."""

import pytest
import torch
from torch.nn import functional as F
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from hf_infini import patch_model
from hf_infini.ops.equations import FEATURE_MAPS
from hf_infini.ops.rules import memory_rule
from hf_infini.ops.rules.gated_delta import gated_delta_scan
from models import gpt2, token_ids

# Both sides round in float32, and add up to some hundred numbers of the size of a value in another
# order
FLOAT32 = 1e-4


@pytest.mark.parametrize(("tokens", "width", "decay"), [(5, 8, 4.0), (50, 16, 0.0), (130, 64, 4.0)])
def test_equals_transformers_function(tokens, width, decay):
    """States before three blocks and after them; with and without strong decay, from a memory that
    holds something."""
    torch.manual_seed(0)
    key, value = torch.randn(2, 3, 2, tokens, width), torch.randn(2, 3, 2, tokens, width + 1)
    weights = F.logsigmoid(torch.randn(2, 3, 2, tokens, 2) + torch.tensor([0.0, 6.0 - 2 * decay]))
    memory = torch.randn(2, 2, width, width + 1)
    rule = memory_rule("gated_delta")
    written = rule.written(key, value, weights)
    (memories, _), (last_memory, _) = rule.states(written, memory, memory.new_zeros(2, 2, 0))
    wanted = memory
    for block in range(3):
        torch.testing.assert_close(memories[:, block], wanted, rtol=FLOAT32, atol=FLOAT32)
        keys, values = (
            FEATURE_MAPS["elu"](key[:, block]).sub(1).transpose(1, 2),
            value[:, block].transpose(1, 2),
        )
        log_beta, log_alpha = weights[:, block].transpose(1, 2).unbind(-1)
        options = {
            "initial_state": wanted,
            "output_final_state": True,
            "use_qk_l2norm_in_kernel": True,
        }
        wanted = torch_chunk_gated_delta_rule(
            keys, keys, values, log_alpha, log_beta.exp(), **options
        )[1]
    torch.testing.assert_close(last_memory, wanted, rtol=FLOAT32, atol=FLOAT32)


def test_decay_too_strong_for_a_number_and_keys_that_are_all_the_same():
    """What hurts a chunk: products of α that underflow, and a triangular system as far from the
    identity as can be."""
    torch.manual_seed(0)
    key = F.normalize(torch.ones(1, 2, 1, 32, 16, dtype=torch.float64), dim=-1).requires_grad_()
    value = torch.randn(1, 2, 1, 32, 3, dtype=torch.float64)
    weights = (
        torch.tensor([0.0, -200.0], dtype=torch.float64)
        .expand(1, 2, 1, 32, 2)
        .clone()
        .requires_grad_()
    )
    memory = torch.randn(1, 1, 16, 3, dtype=torch.float64)
    _, last = gated_delta_scan(key, value, weights, memory)
    torch.testing.assert_close(last[0, 0], key[0, 0, 0, 0, :, None] * value[0, 1, 0, -1])
    assert all(
        gradient.isfinite().all() for gradient in torch.autograd.grad(last.sum(), (key, weights))
    )


def test_a_new_layer_forgets_hardly_anything_and_learns_when_to():
    model = patch_model(gpt2(), segment_length=8, update_rule="gated_delta")
    attention = model.transformer.h[0].attn
    hidden_states = torch.randn(2, 5, 32)
    beta, alpha = attention.log_weight(hidden_states).exp().unbind(-1)
    assert beta.shape == (2, attention.num_heads, 5) and bool((beta == 0.5).all())
    assert float(alpha.detach().log().mean()) * 16_384 > -0.11  # 90 % are left after so many tokens
    ids = token_ids(2, 40)
    model(ids, labels=ids).loss.backward()
    for block in model.transformer.h:
        # both logits of every head
        assert bool((block.attn.memory_rates.grad.abs().amax(-1) > 0).all())
        assert bool((block.attn.memory_rates_bias.grad != 0).all())
    attention.memory_rates.data.normal_()
    logits = (
        torch.einsum("btc,hrc->bhtr", hidden_states, attention.memory_rates)
        + attention.memory_rates_bias[:, None]
    )
    log_weight = attention.log_weight(hidden_states)
    torch.testing.assert_close(log_weight.exp(), logits.sigmoid(), rtol=1e-5, atol=1e-6)  # float32
