"""Perplexity: the losses of each token, their token-weighted mean, and the same by position in the context.

Everything is a sum of negative log-likelihoods in nats and a count of tokens, both kept in 64 bits, until the very last
division; averages are never averaged.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from ..compat.cache_name import CACHE, cache_of


def summarize(loss_sums: Iterable[float], token_counts: Iterable[int]) -> dict[str, float]:
    """Cross-entropy and perplexity of everything that was added up.

    Args:
        loss_sums: sums of negative log-likelihoods in nats, one per batch.
        token_counts: how many tokens each sum covers.

    Returns `{"cross_entropy": nats per token, "perplexity": exp of it, "tokens": how many}`.
    Raises ValueError when there is no token at all: the mean of nothing is not 0.
    """
    tokens = int(sum(token_counts))
    if tokens == 0:
        raise ValueError("no token was predicted: a text needs at least 2 tokens to have a perplexity")
    cross_entropy = math.fsum(loss_sums) / tokens
    perplexity = math.exp(cross_entropy) if cross_entropy < 709 else math.inf  # beyond 709 exp overflows
    return {"cross_entropy": cross_entropy, "perplexity": perplexity, "tokens": tokens}


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Negative log-likelihood of each target, in nats, float32, whatever the dtype of the logits.

    Args:
        logits: [B, T, V]; `logits[:, t]` predicts `targets[:, t]`.
        targets: [B, T] token numbers; −100 marks a place that is not counted.

    Returns [B, T]; 0 where the target is −100.
    """
    losses = torch.zeros(targets.shape, dtype=torch.float32, device=logits.device)
    for row in range(targets.shape[0]):  # a float32 copy of one row's logits at a time, not of the batch's
        losses[row] = F.cross_entropy(logits[row].float(), targets[row], reduction="none", ignore_index=-100)
    return losses


def stream_losses(
    model, input_ids: Any = None, chunk: int | None = None, labels: Any = None, position_ids=None, **inputs
) -> Iterator[tuple]:
    """Reads rows of any length in chunks through the model's cache and yields the losses of each chunk.

    The model needs memory for one chunk and its cache only: constant for Infini-attention in every layer,
    growing with the length for a model that keeps all keys and values.

    Args:
        model: a causal language model in evaluation mode.
        input_ids: [B, N] token numbers, right-padded with anything where rows differ in length; or `inputs_embeds`, with
            labels.
        chunk: tokens per call of the model; `None` reads all N at once, without a cache.
        labels: [B, N] targets at their own places (−100: not counted); `None` counts every token.
        position_ids: [B, N] that begin again where a document does; `None`: each row is one.
        inputs: others of the model's, [B, N, …] each where rows are read in chunks. What an `attention_mask` [B, N] masks
            predicts nothing and is not counted.

    Yields `(first, losses, targets)`: the position in the row (0 is the row's first token, which nothing predicts) of
    the first target, and its losses and targets, [B, t] each.
    """
    given = {"input_ids": input_ids, "position_ids": position_ids, **inputs}
    given = {name: part for name, part in given.items() if part is not None}
    labels = input_ids if labels is None else labels
    length, mask = labels.shape[1], given.get("attention_mask")
    if isinstance(mask, torch.Tensor) and mask.shape == labels.shape:
        real = mask != 0
        labels = labels.masked_fill(~(real & real.roll(1, 1)).to(labels.device), -100)  # its first label is never read
    device = next(model.parameters()).device
    chunk = length if chunk is None else chunk
    cache = None
    for start in range(0, length - 1, chunk):
        piece = {}
        for name, part in given.items():
            if chunk < length:  # a mask is also of what the cache has read
                part = part[:, 0 if name == "attention_mask" else start : start + chunk]
            piece[name] = part.to(device) if isinstance(part, torch.Tensor) else part
        kwargs = {"use_cache": False} if chunk >= length else {CACHE: cache, "use_cache": True}
        with torch.no_grad():
            output = model(**piece, **kwargs)
        cache = cache_of(output)
        targets = labels[:, start + 1 : start + 1 + output.logits.shape[1]].to(device)  # the last token predicts nothing
        yield start + 1, token_losses(output.logits[:, : targets.shape[1]], targets), targets


def score_spans(
    model,
    rows: Sequence,
    spans: Sequence[tuple[int, int, int]],
    chunk: int,
    progress: Callable[[range], Iterable[int]] = iter,
) -> list[tuple[float, bool]]:
    """How a model predicts parts of rows: the loss of each, and whether greedy decoding gives exactly this part.

    The rows are read in chunks through the model's cache, and logits are computed only where a token is asked for.

    Args:
        model: a causal language model in evaluation mode.
        rows: the token numbers of each row, 1-D arrays of any lengths.
        spans: `(row, first, end)`: the part `rows[row][first:end]`, not empty; `first` is at least 1, as nothing predicts a
            row's first token.
        chunk: tokens per call of the model.
        progress: goes through the first columns of the chunks: `tqdm` shows a bar.

    Returns, of each span, the sum of its tokens' negative log-likelihoods in nats, and whether each of its tokens is the
    arg-max given the true tokens before it.
    """
    device = next(model.parameters()).device
    # Padding is on the right, where a causal model's other tokens do not see it
    tokens = pad_sequence([torch.as_tensor(row).long() for row in rows], batch_first=True)
    places = torch.tensor([(row, at - 1) for row, first, end in spans for at in range(first, end)])  # which predict
    found = torch.empty(len(places), 2, dtype=torch.float64)  # of each token asked for: whether it is the arg-max, its loss
    end, cache = int(places[:, 1].max()) + 1, None
    for start in progress(range(0, end, chunk)):
        piece = tokens[:, start : min(start + chunk, end)].to(device)
        here = (places[:, 1] >= start) & (places[:, 1] < start + piece.shape[1])
        kept, columns = (places[here, 1] - start).unique(return_inverse=True)
        kwargs = {"use_cache": False} if chunk >= end else {CACHE: cache, "use_cache": True}
        with torch.no_grad():
            output = model(input_ids=piece, logits_to_keep=kept.to(device) if len(kept) else 1, **kwargs)
        cache = cache_of(output)
        if len(kept):
            logits = output.logits[places[here, 0].to(device), columns.to(device)].float()
            targets = tokens[places[here, 0], places[here, 1] + 1].to(device)
            losses = F.cross_entropy(logits, targets, reduction="none")
            found[here] = torch.stack([(logits.argmax(-1) == targets).double(), losses.double()], -1).cpu()
    parts = found.split([end - first for _, first, end in spans])
    return [(float(part[:, 1].sum()), bool(part[:, 0].all())) for part in parts]


class LossByPosition:
    """Adds up losses in buckets of the position in the context: bucket k holds the positions 2^k … 2^(k+1) − 1.

    Position p is that of the *predicted* token, so it had p tokens before it; position 0 is never predicted. A context of
    any length costs nothing.
    """

    def __init__(self):
        self.sums = torch.zeros(63, 2, dtype=torch.float64)  # of positions in 64 bits: each bucket's loss and tokens

    def add(self, first: int, losses: Tensor, targets: Tensor) -> None:
        """Adds `losses` [B, t] of the targets [B, t] at the positions first … first + t − 1 (−100: not counted)."""
        counted = targets != -100
        sums = torch.stack([losses.double().masked_fill(~counted, 0).sum(0), counted.sum(0)], 1)
        buckets = [position.bit_length() - 1 for position in range(first, first + len(sums))]
        self.sums.index_add_(0, torch.tensor(buckets, dtype=torch.long), sums.cpu())

    def total(self) -> dict[str, float]:
        """Cross-entropy, perplexity and tokens over all positions; ValueError when nothing was counted."""
        return summarize(*self.sums.T.tolist())

    def table(self) -> list[dict[str, float]]:
        """One row per bucket with tokens: `first` and `last` position, cross_entropy, perplexity, tokens."""
        return [
            {"first": 2**bucket, "last": 2 ** (bucket + 1) - 1, **summarize([loss], [count])}
            for bucket, (loss, count) in enumerate(self.sums.tolist())
            if count > 0
        ]
