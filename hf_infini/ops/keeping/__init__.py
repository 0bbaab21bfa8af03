"""What is kept: the scores of tokens (score.py, and a file for each of `options.KEEP_SCORES`), and
what chooses by them (choose.py)."""

from importlib import import_module

from ...options import KEEP_SCORES
from .score import TokenScore

SCORES: dict[str, TokenScore] = {
    name: import_module(f"{__name__}.{name}").Score() for name in KEEP_SCORES
}


def token_score(keep_score: str) -> TokenScore:
    """The score named `keep_score`; ValueError for another name."""
    if keep_score not in SCORES:
        raise ValueError(f"keep_score must be one of {', '.join(SCORES)}, got {keep_score!r}.")
    return SCORES[keep_score]
