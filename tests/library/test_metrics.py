"""Token-weighted perplexity against naive sums, by position, and streamed through a model's cache."""

import math

import pytest
import torch

from hf_infini.tools.metrics import LossByPosition, score_spans, stream_losses, summarize, token_losses
from models import gpt2, infini_gpt2, token_ids

MODELS = {"gpt2": gpt2, "infini": lambda: infini_gpt2(position_encoding="segment")}
both = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)


def naive_losses(model, row):
    """−log p of each token after the first, one at a time, from probabilities in 64 bits."""
    with torch.no_grad():
        logits = model(input_ids=row[None], use_cache=False).logits[0].double()
    return [-math.log(torch.softmax(logits[t], -1)[row[t + 1]].item()) for t in range(len(row) - 1)]


def test_sums_weigh_tokens_and_keep_64_bits():
    assert summarize([10.0, 2.0, 4.0], [10, 1, 5]) == {"cross_entropy": 1.0, "perplexity": math.e, "tokens": 16}
    # In float32, 2**24 + 1 is 2**24: a float32 sum would lose every one of the small terms
    assert summarize([2.0**24] + [1.0] * 16, [1] * 17)["cross_entropy"] == (2**24 + 16) / 17
    assert summarize([8000.0], [10])["perplexity"] == math.inf
    with pytest.raises(ValueError, match="at least 2 tokens"):
        summarize([], [])


def test_token_losses_leave_out_what_is_not_counted():
    logits, targets = torch.randn(2, 5, 50), torch.randint(0, 50, (2, 5))
    targets[1, 3:] = -100
    losses = token_losses(logits, targets)
    expected = -logits.log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    assert torch.equal(losses[1, 3:], torch.zeros(2))
    torch.testing.assert_close(losses[0], expected[0])
    torch.testing.assert_close(losses[1, :3], expected[1, :3])


@both
def test_any_chunk_gives_the_same_losses(make):
    model, rows = make(), token_ids(2, 24)
    expected = torch.tensor([naive_losses(model, row) for row in rows], dtype=torch.float32)
    for chunk in (1, 5, 8, 23, 100):
        pieces = list(stream_losses(model, rows, chunk))
        assert [first for first, _, _ in pieces] == [start + 1 for start in range(0, 23, chunk)]
        streamed = torch.cat([losses for _, losses, _ in pieces], dim=1)
        torch.testing.assert_close(streamed, expected, rtol=1e-4, atol=1e-4)  # the order of float32 sums differs


@both
def test_spans_are_the_naive_losses(make):
    model, rows = make(), [row[:length] for row, length in zip(token_ids(3, 40), (40, 9, 22), strict=True)]
    with torch.no_grad():
        best = [model(input_ids=row[None], use_cache=False).logits[0].argmax(-1) for row in rows]
    rows[2][-1] = best[2][-2]  # the last token is then the one that greedy decoding gives
    spans = [(0, 1, 40), (1, 8, 9), (2, 21, 22), (0, 30, 33)]
    for chunk in (7, 100):
        found = score_spans(model, [row.numpy() for row in rows], spans, chunk)
        for (row, first, end), (loss, greedy) in zip(spans, found, strict=True):
            assert loss == pytest.approx(sum(naive_losses(model, rows[row])[first - 1 : end - 1]), rel=1e-4)
            assert greedy == bool((best[row][first - 1 : end - 1] == rows[row][first:end]).all())
        assert found[2][1]


def test_buckets_by_position():
    losses = torch.arange(1.0, 12.0).repeat(2, 1)  # position p has the loss p
    targets = torch.zeros(2, 11, dtype=torch.long)
    targets[1, 9:] = -100
    whole, parts = LossByPosition(), LossByPosition()
    whole.add(1, losses, targets)
    parts.add(1, losses[:, :6], targets[:, :6])
    parts.add(7, losses[:, 6:], targets[:, 6:])
    assert whole.table() == parts.table()
    rows = [(row["first"], row["last"], row["tokens"], row["cross_entropy"]) for row in whole.table()]
    assert rows == [
        (1, 1, 2, 1.0),
        (2, 3, 4, 2.5),
        (4, 7, 8, 5.5),
        (8, 15, 6, (2 * (8 + 9) + 10 + 11) / 6),
    ]
    assert whole.total()["tokens"] == 20
