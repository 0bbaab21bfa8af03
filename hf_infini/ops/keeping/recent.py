"""The latest: with them the window is longer, and the places are free for what a question recalls
(`hf_infini.recall`)."""

import torch
from torch import Tensor

from ...options import Window
from .score import TokenScore


class Score(TokenScore):
    """The number of the token in its document."""

    keep_score = "recent"

    def first(self, key: Tensor, value: Tensor, learned_score: Tensor | None) -> Tensor:
        wide = torch.promote_types(key.dtype, torch.float32)
        return key.new_zeros(*key.shape[:3], 1, dtype=wide)

    def final(self, score: Tensor, position: Tensor, queries: Tensor, window: Window) -> Tensor:
        return score + position.to(score.dtype)

    def naive_first(self, key, value, learned_score):
        return [key.new_zeros(())]

    def naive_final(self, score, number, queries, kept_tokens):
        return [score[0] + number]
