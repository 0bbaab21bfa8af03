"""Position encodings: what a model is told about order, each a pure function of positions or
distances.

| function | equation | acts on | source (first author, year, section) |
| --- | --- | --- | --- |
| `sinusoidal_encoding` | sin, cos(t / 10000^(2i/d)) | embeddings | Vaswani 2017, 3.5 |
| `relative_key_bias` | q_i · a_ij, with a_ij = w[min(i − j, k)] | scores | Shaw 2018, 3.2, (4) |
| `alibi_bias` | −m_h (i − j), m_h = 2^(−8h/H) | scores | Press 2022, 3 |
| `rotate` | pairs of numbers turned by the angle t · θ^(−2i/d) | q, k | Su 2021, equation 34 |

A learned position is a row of an embedding (Gehring et al. 2017); T5's buckets of distances (Raffel
et al. 2020) are transformers' own. `distance` is the query's place minus the key's, in tokens:
`[query, key]` int64; later keys are masked.
"""

import math

import torch
from torch import Tensor


def sinusoidal_encoding(positions: Tensor, width: int) -> Tensor:
    """One sine and one cosine for each of `width / 2` wavelengths from 2π to 10,000 · 2π tokens: of
    positions `[…]`, int64, `[…, width]` float32, sines at the even places, cosines at the odd ones;
    the width must be even."""
    angles = _angles(positions, width, 10_000.0)
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(-2).float()


def relative_key_bias(query: Tensor, table: Tensor, distance: Tensor) -> Tensor:
    """query_i · a_ij, `[batch, heads, query, key]`: each query `[batch, heads, query, head_dim]`
    meets each row of the table w, `[max_distance + 1, head_dim]`, once; the last stands for all
    distances from `max_distance` on. `distance`: `[query, key]` int64, in tokens."""
    products = query @ table.to(query.dtype).T  # [batch, heads, query, max_distance + 1]
    index = distance.clamp(0, table.shape[0] - 1).expand(*query.shape[:2], -1, -1)
    return products.gather(-1, index)


def alibi_slopes(heads: int) -> list[float]:
    """The slope m of each of so many `heads`: 2^(−8h/H) for h = 1 … H where H is a power of two.
    Another H takes those of the next smaller power of two, and then every other one of the
    next larger (the authors' code)."""
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * head / power) for head in range(1, power + 1)]
    between = [2 ** (-4 * head / power) for head in range(1, 2 * power + 1, 2)]
    return slopes + between[: heads - power]


def alibi_bias(distance: Tensor, heads: int) -> Tensor:
    """−slope · distance, `[heads, query, key]` float32."""
    slopes = torch.tensor(alibi_slopes(heads), device=distance.device)
    return -slopes[:, None, None] * distance


def rotation(
    positions: Tensor, width: int, dtype: torch.dtype, theta: float = 10_000.0
) -> tuple[Tensor, Tensor]:
    """The cosines and sines by which [`rotate`] turns heads of `width` numbers, which must be even:
    factors of a number, and of its partner in the pair. Of positions `[batch or 1, tokens]` they
    are `[batch or 1, 1, tokens, width]` each, of `[tokens]` they are `[tokens, width]`; dtype: of
    both; theta: base of the wavelengths."""
    angles = _angles(positions, width, theta)
    angles = angles.unsqueeze(1) if positions.dim() == 2 else angles
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)


def rotate(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns the pair (x_i, x_{i + d/2}) of every head by its token's position times θ^(−2i/d):
    products depend only on the distance of two positions. Pairing the halves instead of neighbours
    is Llama's convention. `states`: queries or keys, `[batch, heads, tokens, head_dim]`; `cos`,
    `sin`: the [`rotation`] of the tokens' positions."""
    return torch.addcmul(
        states * cos.to(states.dtype), states.roll(states.shape[-1] // 2, -1), sin.to(states.dtype)
    )


def _angles(positions: Tensor, width: int, theta: float) -> Tensor:
    """position · θ^(−2i/width) for i = 0 … width/2 − 1: `[…, width / 2]` float64 (after ten million
    tokens float32 would round an angle by half a radian), or what a device has."""
    dtype = torch.float32 if positions.device.type == "mps" else torch.float64
    exponents = torch.arange(0, width, 2, device=positions.device, dtype=dtype) / width
    return positions.unsqueeze(-1).to(dtype) * theta**-exponents
