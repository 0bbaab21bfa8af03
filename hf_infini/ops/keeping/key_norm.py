"""The norm of a token's key: those with small ones receive much attention (Devoto et al. 2024,
arXiv 2406.11430; KnormPress of kvpress)."""

import torch

from .score import TokenScore, naive_rounded, rounded


class Score(TokenScore):
    """−‖k‖, of the key before it is rotated."""

    keep_score = "key_norm"

    def first(self, key, value, learned_score):
        wide = torch.promote_types(key.dtype, torch.float32)
        return -rounded(key.detach().to(wide).norm(dim=-1, keepdim=True)).to(wide)

    def naive_first(self, key, value, learned_score):
        return [-naive_rounded((key * key).sum().sqrt())]
