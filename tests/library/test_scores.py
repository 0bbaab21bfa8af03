"""Every score against its equation, one query and one key at a time."""

import torch

from hf_infini.ops.scores import additive_scores, as_dot_product, dot_scores, general_scores, scaled_dot_scores

SHAPE = batch, heads, queries, keys, width = 2, 3, 4, 5, 6


def problem(inner: int = 7):
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    tensors = random(batch, heads, queries, width), random(batch, heads, keys, width)
    return *tensors, random(heads, width, width), random(heads, inner, 2 * width), random(heads, inner)


def one_by_one(score) -> torch.Tensor:
    """`[batch, heads, queries, keys]` from a function of (batch, head, query, key) numbers."""
    grid = torch.empty(batch, heads, queries, keys, dtype=torch.float64)
    for place in torch.cartesian_prod(*map(torch.arange, grid.shape)).tolist():
        grid[tuple(place)] = score(*place)
    return grid


def test_dot_and_scaled_dot():
    query, key, *_ = problem()
    dots = one_by_one(lambda b, h, i, j: sum(query[b, h, i, d] * key[b, h, j, d] for d in range(width)))
    torch.testing.assert_close(dot_scores(query, key), dots)
    torch.testing.assert_close(scaled_dot_scores(query, key), dots / 6**0.5)


def test_general():
    query, key, weight, *_ = problem()
    wanted = one_by_one(lambda b, h, i, j: query[b, h, i] @ weight[h] @ key[b, h, j])
    torch.testing.assert_close(general_scores(query, key, weight), wanted)


def test_additive():
    query, key, _, weight, vector = problem()
    added = torch.randn(queries, keys, width, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def score(b, h, i, j, extra):
        both = torch.cat([query[b, h, i], key[b, h, j] + extra])
        return vector[h] @ torch.tanh(weight[h] @ both)

    wanted = one_by_one(lambda b, h, i, j: score(b, h, i, j, 0))
    torch.testing.assert_close(additive_scores(query, key, weight, vector), wanted)
    wanted = one_by_one(lambda b, h, i, j: score(b, h, i, j, added[i, j]))
    torch.testing.assert_close(additive_scores(query, key, weight, vector, added), wanted)


def test_what_fused_kernels_get_is_the_same_score():
    query, key, weight, *_ = problem()
    wanted = {
        "dot": dot_scores(query, key),
        "scaled_dot": scaled_dot_scores(query, key),
        "general": general_scores(query, key, weight),
    }
    for score, scores in wanted.items():
        turned, factor = as_dot_product(score, query, weight)
        torch.testing.assert_close(factor * dot_scores(turned, key), scores)


def test_scaled_products_within_float16_are_finite_there():
    """The product before its scaling, 16 · 100 · 100 = 160,000, would not be; 40,000 is a number of float16."""
    entries = torch.full((1, 1, 1, 16), 100.0, dtype=torch.float16)
    assert scaled_dot_scores(entries, entries).item() == 40_000
