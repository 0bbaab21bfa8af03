"""The attention that a token received while it was in the window (as H2O, arXiv 2306.14048)."""

import torch
from torch import Tensor

from ...options import Window
from .score import TokenScore

# a token that is this times the kept tokens older must have received e times the attention
FADE = 2
LEAST = torch.finfo(torch.float32).tiny  # of attention, in the logarithm


class Score(TokenScore):
    """The logarithm of the mean over the queries that have seen the token in the window, plus its
    position in units of [`FADE`] times the kept tokens: without the position ever more places would
    go to a few tokens of long ago."""

    keep_score = "attention"
    receiving = 0

    def first(self, key: Tensor, value: Tensor, learned_score: Tensor | None) -> Tensor:
        wide = torch.promote_types(key.dtype, torch.float32)
        return key.new_zeros(*key.shape[:3], 1, dtype=wide)

    def final(self, score: Tensor, position: Tensor, queries: Tensor, window: Window) -> Tensor:
        mean = (score / queries.to(score.dtype)).clamp(min=LEAST).log()
        return mean + position.to(score.dtype) / (FADE * window.kept_tokens)

    def naive_first(self, key, value, learned_score):
        return [key.new_zeros(())]

    def naive_final(self, score, number, queries, kept_tokens):
        return [(score[0] / queries).clamp(min=2.0**-126).log() + number / (2 * kept_tokens)]
