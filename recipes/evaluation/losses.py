"""Perplexity: the losses of each token, their token-weighted mean, and the same by position in the
context.

Everything is a sum of negative log-likelihoods in nats and a count of tokens, both kept in 64 bits,
until the very last division; averages are never averaged.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_infini.compat.cache_name import CACHE, cache_of


def summarize(loss: float, tokens: float) -> dict[str, float]:
    """`{"cross_entropy": nats per token, "perplexity": exp of it, "tokens": how many}` of a sum of
    negative log-likelihoods in nats, and the number of tokens that it covers.

    Raises ValueError when there is no token at all: the mean of nothing is not 0.
    """
    if tokens == 0:
        raise ValueError("no token was predicted: a text needs at least 2 tokens for a perplexity")
    mean = loss / tokens
    perplexity = math.exp(mean) if mean < 709 else math.inf  # beyond 709 exp overflows
    return {"cross_entropy": mean, "perplexity": perplexity, "tokens": int(tokens)}


def stream_losses(
    model,
    input_ids: Tensor,
    labels: Tensor | None = None,
    position_ids: Tensor | None = None,
    chunk: int | None = None,
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Reads rows of any length in chunks through the model's cache and yields the losses of each
    chunk.

    The model needs memory for one chunk and its cache only: constant for Infini-attention in every
    layer, growing with the length for a model that keeps all keys and values.

    Args:
        input_ids: [B, N] token numbers, right-padded with anything where rows differ in length.
        labels: [B, N] targets at their own places (−100: not counted); `None` counts every token.
        position_ids: [B, N] that begin again where a document does; `None`: each row is one.
        chunk: tokens per call of the model; `None` reads all N at once, without a cache.

    Yields `(first, losses, targets)`: the position in the row (0 is the row's first token, which
    nothing predicts) of the first target, the losses (nats, float32; 0 where the target is −100),
    and the targets, [B, t] each."""
    given = {"input_ids": input_ids, "position_ids": position_ids}
    given = {name: part for name, part in given.items() if part is not None}
    labels = input_ids if labels is None else labels
    length, device, cache = input_ids.shape[1], next(model.parameters()).device, None
    chunk = length if chunk is None else chunk
    for start in range(0, length - 1, chunk):
        piece = {name: part[:, start : start + chunk].to(device) for name, part in given.items()}
        kwargs = {"use_cache": False} if chunk >= length else {CACHE: cache, "use_cache": True}
        with torch.no_grad():
            output = model(**piece, **kwargs)
        cache = cache_of(output)
        # the last token predicts nothing
        targets = labels[:, start + 1 : start + 1 + chunk].to(device)
        # A float32 copy of one row's logits at a time, not of the batch's
        rows = zip(output.logits[:, : targets.shape[1]], targets, strict=True)
        losses = [
            F.cross_entropy(logits.float(), wanted, reduction="none") for logits, wanted in rows
        ]
        yield start + 1, torch.stack(losses), targets


class LossByPosition:
    """Adds up losses in buckets of the position in the context: bucket k holds the positions 2^k …
    2^(k+1) − 1.

    Position p is that of the *predicted* token, so it had p tokens before it; position 0 is never
    predicted. A context of any length costs nothing.
    """

    def __init__(self):
        # of positions in 64 bits: each bucket's loss and tokens
        self.sums = torch.zeros(63, 2, dtype=torch.float64)

    def add(self, first: int, losses: Tensor, targets: Tensor) -> None:
        """Adds `losses` [B, t] of the targets [B, t] at the positions first … first + t − 1 (−100:
        not counted)."""
        counted = targets != -100
        sums = torch.stack([losses.double().masked_fill(~counted, 0).sum(0), counted.sum(0)], 1)
        buckets = [position.bit_length() - 1 for position in range(first, first + len(sums))]
        self.sums.index_add_(0, torch.tensor(buckets, dtype=torch.long), sums.cpu())

    def total(self) -> dict[str, float]:
        """Cross-entropy, perplexity and tokens over all positions; ValueError when nothing was
        counted."""
        return summarize(*self.sums.sum(0).tolist())

    def table(self) -> list[dict[str, float]]:
        """One row per bucket with tokens: `first` and `last` position, cross_entropy, perplexity,
        tokens."""
        buckets = [
            (2**power, *sums) for power, sums in enumerate(self.sums.tolist()) if sums[1] > 0
        ]
        return [{"first": k, "last": 2 * k - 1, **summarize(*sums)} for k, *sums in buckets]
