"""What a language model expects after each token."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from .labels import token_texts

LIKELIEST = 5


class Prediction(NamedTuple):
    """The next token as a model sees it.

    Attributes:
        likeliest: text and probability of the five likeliest tokens, the first the likeliest.
        following: probability of the token that follows in the text; `None` for the last one.
    """

    likeliest: list[tuple[str, float]]
    following: float | None


def predictions_of(head: nn.Module, hidden_states: Tensor, ids: Tensor, real: Tensor, tokenizer) -> list[list[Prediction]]:
    """For each row, a prediction after each of its real tokens.

    Args:
        head: from a hidden state `[width]` to logits over the vocabulary.
        hidden_states: `[batch, tokens, width]`, what the head takes; ids, and real (bool): `[batch, tokens]`.
        tokenizer: makes the tokens readable; `None`: their ids.
    """
    found = []
    for states, tokens, kept in zip(hidden_states, ids, real, strict=True):
        tokens = tokens[kept]
        likely = head(states[kept]).to(torch.float32).softmax(-1)
        best = likely.topk(min(LIKELIEST, likely.shape[-1]))
        following = [*likely[:-1].gather(1, tokens[1:, None]).flatten().tolist(), None]
        places = [token_texts(tokenizer, numbers) for numbers in best.indices.tolist()]
        rows = zip(places, best.values.tolist(), following, strict=True)
        found.append([Prediction(list(zip(texts, values, strict=True)), after) for texts, values, after in rows])
    return found
