"""What says which tokens are kept: of the tokens that have left the window those with the highest
score. [`TokenScore`] is what a file of this folder defines, under the name of the file; a score is
known when its token leaves the window, and never changes after that.

Shapes: `B` batch, `K` key/value heads, `R` scores of a token. Most have one; a composition, such as
half.py, has one for each of its parts, and a share of the places for each.
"""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from ...options import Window


class TokenScore:
    """A keep score. It is computed without gradients: a choice has none."""

    keep_score: ClassVar[str]  # its name, that of its file
    count: ClassVar[int] = 1  # R, scores of a token
    portions: ClassVar[tuple[int, ...]] = (1,)  # each one's share of the places
    # which of them the attention that a token receives in the window is added to; `None`: none
    receiving: ClassVar[int | None] = None

    # names of a layer's parameters, `[K, width]` each: of each and the layer's input a number of
    # the `learned_score` is computed; they start at zero, and no gradient reaches them
    learns: ClassVar[tuple[str, ...]] = ()

    def of_inputs(self, inputs: Tensor, **parameters: Tensor) -> Tensor:
        """`learned_score`, `[B, K, tokens, learned]`, in the order of what it [`learns`]. `inputs`:
        of the layer's projections, `[B, tokens, width]`; `parameters`: by name, `[K, width]`."""
        raise NotImplementedError

    def first(self, key: Tensor, value: Tensor, learned_score: Tensor | None) -> Tensor:
        """`[B, K, tokens, R]` in float32 or wider: the scores of tokens that no query has seen.
        key: `[B, K, tokens, D]`, not rotated; value: `[B, K, tokens, E]`; learned_score: `[B, K,
        tokens, learned]`; `None`: nothing is learned."""
        raise NotImplementedError

    def final(self, score: Tensor, position: Tensor, queries: Tensor, window: Window) -> Tensor:
        """`[…, C, R]`: what remains of the scores of tokens that leave the window. score: `[…, C,
        R]`; position: the tokens' numbers in their document, `[…, C, 1]`; queries: how many have
        seen each, `[C, 1]`; window: its sizes."""
        return score

    # The reference, which uses nothing of the above: single tokens

    def naive_first(self, key: Tensor, value: Tensor, learned_score: Tensor) -> list[Tensor]:
        """Scores of a token, R numbers. key: `[D]`; value: `[E]`; learned_score: `[learned]`."""
        raise NotImplementedError

    def naive_final(
        self, score: list[Tensor], number: int, queries: int, kept_tokens: int
    ) -> list[Tensor]:
        """Those of a token that leaves the window. `score`: before; `number`: of the token in its
        document; `queries`: how many have seen it; `kept_tokens`: places for kept tokens."""
        return score


class Composition(TokenScore):
    """Several scores of one number each: each has its share of the places, equal ones unless it
    says so, and chooses among what those before it have left."""

    parts: ClassVar[tuple[TokenScore, ...]]

    def __init_subclass__(cls):
        cls.count = len(cls.parts)
        cls.portions = cls.__dict__.get("portions", (1,) * cls.count)
        receiving = [column for column, part in enumerate(cls.parts) if part.receiving is not None]
        cls.receiving = receiving[0] if receiving else None
        cls.learns = sum((part.learns for part in cls.parts), ())

    def of_inputs(self, inputs: Tensor, **parameters: Tensor) -> Tensor:
        learned = [
            part.of_inputs(inputs, **{name: parameters[name] for name in part.learns})
            for part in self.parts
            if part.learns
        ]
        return torch.cat(learned, -1)

    def first(self, key: Tensor, value: Tensor, learned_score: Tensor | None) -> Tensor:
        own = self._own(learned_score)
        pairs = zip(self.parts, own, strict=True)
        return torch.cat([part.first(key, value, learned) for part, learned in pairs], -1)

    def _own(self, learned_score: Tensor | None) -> Sequence[Tensor | None]:
        """What each part has learned, of what all have, `[…, learned]`."""
        if learned_score is None:
            return [None] * len(self.parts)
        return learned_score.split([len(part.learns) for part in self.parts], -1)

    def final(self, score: Tensor, position: Tensor, queries: Tensor, window: Window) -> Tensor:
        pairs = zip(self.parts, score.split(1, -1), strict=True)
        return torch.cat([part.final(own, position, queries, window) for part, own in pairs], -1)

    def naive_first(self, key, value, learned_score):
        found, taken = [], 0
        for part in self.parts:
            own = learned_score[taken : taken + len(part.learns)]
            found += part.naive_first(key, value, own)
            taken += len(part.learns)
        return found

    def naive_final(self, score, number, queries, kept_tokens):
        return [
            part.naive_final([own], number, queries, kept_tokens)[0]
            for part, own in zip(self.parts, score, strict=True)
        ]


def rounded(score: Tensor) -> Tensor:
    """Scores, `score` of any shape, in float32, to 15 binary digits. Which tokens are kept must
    depend on the text only, and of equal tokens, whose scores must be equal, the earlier is kept.
    But a product of many rows adds up in another order than one of a single row."""
    return (score.float().view(torch.int32) + 2**8 & -(2**9)).view(torch.float32)  # of 24


def naive_rounded(score: Tensor) -> Tensor:
    """[`rounded`], by the digits themselves; `score`: of any shape."""
    digits, exponent = torch.frexp(score.float())
    whole = (digits.abs() * 2**15 + 0.5).floor() * digits.sign()
    return torch.ldexp(whole, exponent - 15)
