"""Every position encoding against its paper's formula, written out number by number, or against
transformers."""

import math

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from hf_infini.ops.positions import alibi_bias, alibi_slopes, rotate, rotation, sinusoidal_encoding

# the functions' angles are float32, up to 200 radians here: half a unit in the last place is 8e-6
ANGLES = 1e-5


def distances(queries: int, keys: int) -> torch.Tensor:
    return torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)


def test_sinusoidal_is_the_papers_formula():
    positions, width = torch.tensor([[0, 1, 7], [50, 199, 3]]), 12
    encoding = sinusoidal_encoding(positions, width)
    assert encoding.shape == (2, 3, width)
    for row in range(2):
        for column in range(3):
            position = int(positions[row, column])
            for pair in range(width // 2):
                angle = position / 10_000 ** (2 * pair / width)
                assert float(encoding[row, column, 2 * pair]) == pytest.approx(
                    math.sin(angle), abs=ANGLES
                )
                assert float(encoding[row, column, 2 * pair + 1]) == pytest.approx(
                    math.cos(angle), abs=ANGLES
                )


@pytest.mark.parametrize("heads", [1, 3, 8, 12])
def test_alibi_is_blooms(heads):
    keys = 11
    # slope · place of the key
    theirs = build_alibi_tensor(torch.ones(1, keys, dtype=torch.long), heads, torch.float32)
    slopes = theirs.view(heads, keys)[:, 1]
    torch.testing.assert_close(torch.tensor(alibi_slopes(heads)), slopes)
    distance = distances(keys, keys)
    ours = alibi_bias(distance, heads)
    # Bloom leaves out what is the same for all keys of a query, which a softmax does not see
    masked = torch.full((keys, keys), float("-inf")).triu(1)
    scores = torch.randn(heads, keys, keys, generator=torch.Generator().manual_seed(0)) + masked
    torch.testing.assert_close(
        (scores + ours).softmax(-1), (scores + theirs.view(heads, 1, keys)).softmax(-1)
    )
    assert torch.equal(ours.diagonal(dim1=1, dim2=2), torch.zeros(heads, keys))


@pytest.mark.parametrize("theta", [10_000.0, 500.0])
def test_rotate_is_llamas(theta):
    generator = torch.Generator().manual_seed(0)
    batch, heads, tokens, width = 2, 3, 6, 8
    positions = torch.stack([torch.arange(6), torch.tensor([0, 0, 3, 40, 41, 199])])
    states = torch.randn(batch, heads, tokens, width, generator=generator)
    turned = rotate(states, *rotation(positions, width, torch.float32, theta))
    config = LlamaConfig(
        hidden_size=heads * width,
        num_attention_heads=heads,
        max_position_embeddings=256,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
    )
    cos, sin = LlamaRotaryEmbedding(config)(states, positions)
    theirs, _ = apply_rotary_pos_emb(states, states, cos, sin)
    torch.testing.assert_close(turned, theirs, rtol=0, atol=ANGLES)


def test_rotated_products_depend_on_the_distance_alone():
    generator = torch.Generator().manual_seed(1)
    query, key = (torch.randn(1, 1, 1, 16, generator=generator) for _ in range(2))

    def product(query_position, key_position):
        def turned(states, position):
            return rotate(states, *rotation(torch.tensor([[position]]), 16, torch.float32))

        return float((turned(query, query_position) * turned(key, key_position)).sum())

    # 16 products of entries up to 3
    assert product(9, 4) == pytest.approx(product(105, 100), abs=100 * ANGLES)
    far = 100_000_000
    assert product(9, 4) == pytest.approx(product(far + 9, far + 4), abs=100 * ANGLES)  # also there
    assert abs(product(9, 4) - product(9, 5)) > 0.01
