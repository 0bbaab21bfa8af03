"""Token-weighted perplexity against naive sums, by position, and streamed through a model's
cache."""

import math

import pytest
import torch

from evaluation.losses import LossByPosition, stream_losses, summarize
from models import gpt2, infini_gpt2, token_ids
from support.rows import RowReader

FLOAT32 = 1e-4  # of losses up to about 10, the order of whose sums differs
MODELS = {"gpt2": gpt2, "infini": lambda: infini_gpt2(position_encoding="segment")}


def naive_losses(model, row):
    """−log p of each token after the first, one at a time, from probabilities in 64 bits."""
    with torch.no_grad():
        logits = model(input_ids=row[None], use_cache=False).logits[0].double()
    return [-math.log(torch.softmax(logits[t], -1)[row[t + 1]].item()) for t in range(len(row) - 1)]


def test_perplexity_is_that_of_the_mean_token():
    assert summarize(16.0, 16) == {"cross_entropy": 1.0, "perplexity": math.e, "tokens": 16}
    assert summarize(8000.0, 10)["perplexity"] == math.inf
    with pytest.raises(ValueError, match="at least 2 tokens"):
        summarize(0.0, 0)


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_any_chunk_gives_the_same_losses(make):
    model, rows = make(), token_ids(2, 24)
    expected = torch.tensor([naive_losses(model, row) for row in rows], dtype=torch.float32)
    labels, counted = rows.clone(), expected.clone()
    labels[1, 20:] = -100
    counted[1, 19:] = 0
    for chunk in (1, 5, 8, 23, 100, None):
        for given, wanted in ((None, expected), (labels, counted)):
            pieces = list(stream_losses(model, rows, given, chunk=chunk))
            assert [first for first, _, _ in pieces] == [
                start + 1 for start in range(0, 23, chunk or 23)
            ]
            targets = torch.cat([targets for *_, targets in pieces], dim=1)
            assert torch.equal(targets, (rows if given is None else labels)[:, 1:])
            streamed = torch.cat([losses for _, losses, _ in pieces], dim=1)
            torch.testing.assert_close(streamed, wanted, rtol=FLOAT32, atol=FLOAT32)
            assert torch.equal(streamed == 0, targets == -100)


def test_documents_kept_apart_are_those_read_alone():
    """Ends of text begin and end rows, stand beside each other and where a chunk ends; they are not
    counted."""
    model, ids = infini_gpt2(), token_ids(2, 50)
    ids[0, [10, 11, 30]] = ids[1, [0, 24, 49]] = 0
    batch = RowReader([0], end_of_text=0)({"input_ids": ids})
    for chunk in (None, 7):
        pieces = list(stream_losses(model, **batch, chunk=chunk))
        losses, targets = (torch.cat(parts, 1) for parts in list(zip(*pieces, strict=True))[1:])
        assert int((targets != -100).sum()) == int((ids[:, 1:] != 0).sum()) == 98 - 5
        for row, borders in enumerate(([0, 11, 12, 31, 50], [0, 1, 25, 50])):
            for begin, end in zip(borders, borders[1:], strict=False):
                own = torch.tensor(naive_losses(model, ids[row, begin:end]))
                own = own.masked_fill(ids[row, begin + 1 : end] == 0, 0)
                torch.testing.assert_close(
                    losses[row, begin : end - 1], own, rtol=FLOAT32, atol=FLOAT32
                )


def test_buckets_by_position():
    losses = torch.arange(1.0, 12.0).repeat(2, 1)  # position p has the loss p
    targets = torch.zeros(2, 11, dtype=torch.long)
    targets[1, 9:] = -100
    whole, parts = LossByPosition(), LossByPosition()
    whole.add(1, losses, targets)
    parts.add(1, losses[:, :6], targets[:, :6])
    parts.add(7, losses[:, 6:], targets[:, 6:])
    assert whole.table() == parts.table()
    rows = [
        (row["first"], row["last"], row["tokens"], row["cross_entropy"]) for row in whole.table()
    ]
    assert rows == [
        (1, 1, 2, 1.0),
        (2, 3, 4, 2.5),
        (4, 7, 8, 5.5),
        (8, 15, 6, (2 * (8 + 9) + 10 + 11) / 6),
    ]
    # Of all tokens the mean, not that of the buckets' means
    assert (
        whole.total()["tokens"] == 20 and whole.total()["cross_entropy"] == (2 * 45 + 10 + 11) / 20
    )


def test_sums_keep_64_bits():
    """In float32, 2**24 + 1 is 2**24: a float32 sum would lose every one of the small terms."""
    together, apart = LossByPosition(), LossByPosition()
    losses, targets = torch.tensor([[2.0**24]] + [[1.0]] * 16), torch.zeros(17, 1, dtype=torch.long)
    together.add(1, losses, targets)
    for loss, target in zip(losses, targets, strict=True):
        apart.add(1, loss[None], target[None])
    assert together.total()["cross_entropy"] == apart.total()["cross_entropy"] == (2**24 + 16) / 17
