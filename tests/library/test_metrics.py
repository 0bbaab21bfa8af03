"""Token-weighted perplexity against naive sums, by position, and streamed through a model's cache."""

import math

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from hf_infini import InfiniGPT2Config, InfiniGPT2LMHeadModel
from hf_infini.tools.metrics import LossByPosition, evaluate_rows, stream_losses, summarize, token_losses
from hf_infini.tools.perplexity_metric import TokenPerplexity
from models import RowsOf

SIZES = {"vocab_size": 50, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2, "bos_token_id": 0} | {
    "eos_token_id": 0,
    "pad_token_id": 1,
}


@pytest.fixture(scope="module")
def gpt2():
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(**SIZES, initializer_range=0.3)).eval()


@pytest.fixture(scope="module")
def infini():
    torch.manual_seed(0)
    config = InfiniGPT2Config(**SIZES, segment_length=8, position_encoding="segment", initializer_range=0.3)
    return InfiniGPT2LMHeadModel(config).eval()


def naive_losses(model, row):
    """−log p of each token after the first, one at a time, from probabilities in 64 bits."""
    with torch.no_grad():
        logits = model(input_ids=row[None], use_cache=False).logits[0].double()
    return [-math.log(torch.softmax(logits[t], -1)[row[t + 1]].item()) for t in range(len(row) - 1)]


def test_metric_weights_batches_by_their_tokens():
    metric = TokenPerplexity()
    metric.add_batch(loss_sums=[10.0, 2.0], token_counts=[10, 1])
    metric.add_batch(loss_sums=[4.0], token_counts=[5])
    result = metric.compute()
    assert result == {"cross_entropy": 1.0, "perplexity": math.e, "tokens": 16}
    assert result["cross_entropy"] != pytest.approx((1.0 + 2.0 + 0.8) / 3)  # the average of averages


def test_no_token_and_no_finite_perplexity():
    with pytest.raises(ValueError, match="at least 2 tokens"):
        summarize([], [])
    assert summarize([8000.0], [10])["perplexity"] == math.inf


def test_token_losses_leave_out_what_is_not_counted():
    logits, targets = torch.randn(2, 5, 50), torch.randint(0, 50, (2, 5))
    targets[1, 3:] = -100
    losses = token_losses(logits, targets)
    expected = -logits.log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    assert torch.equal(losses[1, 3:], torch.zeros(2))
    torch.testing.assert_close(losses[0], expected[0])
    torch.testing.assert_close(losses[1, :3], expected[1, :3])


@pytest.mark.parametrize("name", ["gpt2", "infini"])
def test_evaluate_rows_equals_the_naive_sum(name, request):
    model = request.getfixturevalue(name)
    rows = torch.randint(2, 50, (5, 24), generator=torch.Generator().manual_seed(1))
    result = evaluate_rows(model, RowsOf(rows), batch_size=2)
    losses = [loss for row in rows for loss in naive_losses(model, row)]
    assert result["tokens"] == len(losses) == 5 * 23
    # float32 logits of a few units, averaged over 115 tokens
    assert result["cross_entropy"] == pytest.approx(sum(losses) / len(losses), rel=1e-6)
    assert result["perplexity"] == pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-5)


@pytest.mark.parametrize("chunk", [1, 5, 100])
@pytest.mark.parametrize("name", ["gpt2", "infini"])
def test_any_chunk_gives_the_same_losses(name, chunk, request):
    model = request.getfixturevalue(name)
    rows = torch.randint(2, 50, (2, 24), generator=torch.Generator().manual_seed(2))
    pieces = list(stream_losses(model, rows, chunk))
    assert [first for first, _, _ in pieces] == [start + 1 for start in range(0, 23, chunk)]
    streamed = torch.cat([losses for _, losses, _ in pieces], dim=1)
    expected = torch.tensor([naive_losses(model, row) for row in rows], dtype=torch.float32)
    torch.testing.assert_close(streamed, expected, rtol=1e-4, atol=1e-4)  # the order of float32 sums differs


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
