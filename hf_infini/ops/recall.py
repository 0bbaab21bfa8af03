"""Recall: which blocks of a document a question asks for, by the terms that they share.

The document is cut into blocks of B tokens, by their numbers. A block's relevance is its BM25
(Robertson and Zaragoza 2009), with blocks for documents and tokens for terms:

    bm25(b) = Σ over the question's tokens t of
              idf(t) · f · (k1 + 1) / (f + k1 · (1 − c + c · n / n̄))
    idf(t)  = log(1 + (blocks − df + 1/2) / (df + 1/2))

with f the times that t is in b, df the blocks that have it, n the terms of b and n̄ their mean.
Three kinds of terms are counted, each for itself, and their BM25 added up: tokens; words by their
first LETTERS letters, which inflection mostly leaves ([`Terms`]), each in the block where it
begins; and pairs of tokens that follow each other (those that are no term between them do not
count), each in the block of its first one, for numbers, identifiers and rare names are many tokens,
each of which is common.

What answers a question is often beside what shares words with it, and several of its words in one
block say more than as many in several:

    relevance(b) = Σ over |d| ≤ REACH of (1 − |d| / (REACH + 1)) · bm25(b + d)²

Of several documents each has its own blocks, which count together; relevance is not spread from one
document to the next, which is about something else.

The most relevant blocks fill the places of kept tokens, of equal ones the earlier; but those whose
relevance is below LEAST of the highest stay out, and their places empty: what a question did not
ask for distracts a model from the answer. Where no block has any, the latest tokens fill them.
"""

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..options import Window

BLOCK_TOKENS = 64  # B
REACH = 3  # blocks before and after
K1, C = 1.5, 0.75
FOR_LETTERS = 1_000_003  # a prime
OTHER_SIGNS = re.compile(r"[\W_]+")  # than letters and digits
LETTERS = 5  # of a word
WORDS, PAIRS = 1.0, 0.5  # what these count for beside a token
LEAST = 0.15  # of the highest relevance


class Terms(NamedTuple):
    """Which terms the ids of a vocabulary make. A word may be cut into several tokens, so of each
    token the letters at either end are known: their numbers in Unicode, `[vocabulary, LETTERS]`, 0
    for none. Digits are letters, too."""

    tokens: Tensor  # `[vocabulary]`, int64: the term that the token is; −1: none
    first: Tensor  # the letters that it begins with, which may go on with a word
    word: Tensor  # those of the last word that begins in it after another sign; else `first`
    number: Tensor  # `[vocabulary]`, int64: of the `word`
    begins: Tensor  # `[vocabulary]` bool: the `word` is after another sign
    closes: Tensor  # `[vocabulary]` bool: it has other signs, so no word goes on through it
    stays_open: Tensor  # `[vocabulary]` bool: it ends with a letter, so a word may go on behind it

    @classmethod
    def of_texts(cls, texts: Iterable[str]) -> "Terms":
        """Those of the tokens with these `texts`, in small letters; "" for what is no text."""
        known: dict[str, int] = {}
        tokens, first, words, begins, closes, open_ = [], [], [], [], [], []
        for text in texts:
            parts = OTHER_SIGNS.split(text)
            means = any(parts)
            tokens.append(known.setdefault(text.strip(), len(known)) if means else -1)
            first.append(parts[0])
            begun = next((part for part in reversed(parts[1:]) if part), "")
            words.append(begun or parts[0])
            begins.append(bool(begun))
            closes.append(len(parts) > 1)
            open_.append(bool(parts[-1]))
        word, flags = _letters(words), map(torch.tensor, (begins, closes, open_))
        return cls(torch.tensor(tokens), _letters(first), word, _numbers(word), *flags)

    def of(self, ids: Tensor) -> Tensor:
        """The terms of `ids` `[tokens]`, and the words that begin in them: `[2, tokens]`, int64,
        −1 for none. An id that the vocabulary does not have ends a word."""
        known = (ids >= 0) & (ids < len(self.tokens))
        at = ids.where(known, 0)
        open_ = self.stays_open[at] & known
        alone = F.pad(open_, (1, 0))[:-1].logical_not()
        is_word = known & (self.word[:, 0] > 0)[at] & (alone | self.begins[at])
        number = self.number[at]
        # those that may go on in the next tokens
        cut = (is_word & open_ & (self.word[:, -1] == 0)[at]).nonzero()[:, 0]
        number[cut] = _numbers(self._continued(self.word[at[cut]], cut, at, known))
        return torch.stack([self.tokens[at].where(known, -1), number.where(is_word, -1)])

    def _continued(self, words: Tensor, cut: Tensor, at: Tensor, known: Tensor) -> Tensor:
        """Words `[words, LETTERS]` that begin in the tokens `cut` with the letters that follow
        them. `at`: the rows of all tokens; `known`: whether they have one."""
        goes_on = torch.ones_like(cut, dtype=torch.bool)
        for step in range(1, LETTERS):
            place = (cut + step).clamp(max=len(at) - 1)
            goes_on = goes_on & (cut + step < len(at)) & known[place]
            more = self.first[at[place]]
            goes_on = goes_on & (more[:, 0] > 0)
            index = torch.arange(LETTERS) - (words > 0).sum(1, keepdim=True)
            behind = (index >= 0) & goes_on.unsqueeze(1)
            words = torch.where(behind, more.gather(1, index.clamp(min=0)), words)
            goes_on = goes_on & ~self.closes[at[place]]
        return words


def _letters(words: Sequence[str]) -> Tensor:
    text = "".join(word[:LETTERS].ljust(LETTERS, "\0") for word in words)
    letters = bytearray(text.encode("utf-32-le", "surrogatepass"))
    return torch.frombuffer(letters, dtype=torch.int32).view(-1, LETTERS).long()


def _numbers(words: Tensor) -> Tensor:
    """A number for each of `words` `[words, LETTERS]`; of different ones hardly ever alike."""
    number = torch.zeros_like(words[:, 0])
    for letter in words.unbind(1):
        number = (number * FOR_LETTERS + letter) % 2**61
    return number


def block_relevance(terms: Tensor | Sequence[Tensor], question: Tensor) -> Tensor:
    """The relevance of each block of a document, or of several, one after the other, `[blocks]`,
    float64.

    Args:
        terms: of the document's tokens, `[tokens]`, int64, or with words, [`Terms.of`], `[2,
            tokens]`; −1: none; or of each document's.
        question: of the question's, likewise.
    """
    documents = [terms] if isinstance(terms, Tensor) else terms
    kinds = [*zip(*(each if each.dim() == 2 else each[None] for each in documents), strict=True)]
    asked = question if question.dim() == 2 else question[None]
    bm25 = PAIRS * _bm25([_paired(each) for each in kinds[0]], _paired(asked[0]))
    for weight, kind, own in zip((1, WORDS)[: len(kinds)], kinds, asked, strict=True):
        bm25 += weight * _bm25(kind, own)
    weights = 1 - torch.arange(-REACH, REACH + 1, dtype=torch.float64).abs() / (REACH + 1)
    own = bm25.square().split([-(-each.shape[-1] // BLOCK_TOKENS) for each in documents])
    near = (F.pad(each, (REACH, REACH)).unfold(0, 2 * REACH + 1, 1) for each in own)
    return torch.cat([each @ weights for each in near])


def _bm25(documents: Sequence[Tensor], question: Tensor) -> Tensor:
    """The BM25 of each block, `[blocks]`, float64; arguments as of [`block_relevance`]."""
    grid = torch.cat([in_blocks(each, -1) for each in documents])
    blocks, lengths = len(grid), (grid >= 0).sum(1).double()
    norms = K1 * (1 - C + C * lengths / lengths.mean().clamp(min=1))
    bm25 = torch.zeros(blocks, dtype=torch.float64)
    wanted, times = question[question >= 0].unique(return_counts=True)
    for term, count in zip(wanted.tolist(), times.tolist(), strict=True):
        frequency = (grid == term).sum(1).double()
        having = int((frequency > 0).sum())
        rarity = torch.tensor(1 + (blocks - having + 0.5) / (having + 0.5), dtype=torch.float64)
        bm25 += count * rarity.log() * frequency * (K1 + 1) / (frequency + norms)
    return bm25


def _paired(terms: Tensor) -> Tensor:
    """A number for each two terms that follow each other, at the place of the first one; −1
    elsewhere. Terms are below 2³¹."""
    at, found = (terms >= 0).nonzero()[:, 0], torch.full_like(terms, -1)
    found[at[:-1]] = (terms[at[:-1]] << 31) + terms[at[1:]]
    return found


def in_blocks(of_tokens: Tensor, filler: int) -> Tensor:
    """What each token of a document has, `of_tokens` `[tokens]`, as `[blocks, BLOCK_TOKENS]`, the
    last one filled up with `filler`."""
    return F.pad(of_tokens, (0, -len(of_tokens) % BLOCK_TOKENS), value=filler).view(
        -1, BLOCK_TOKENS
    )


def recalled_numbers(
    relevance: Tensor, eligible: Tensor, places: int, least: float = LEAST
) -> tuple[Tensor, Tensor]:
    """The numbers of the tokens that fill so many places, `[places or fewer]`, ascending, and the
    rank of the block of each, 0 for the most relevant one.

    Args:
        relevance: [`block_relevance`].
        eligible: `[tokens]` bool, which tokens of the document may be recalled.
        places: how many.
        least: the share of the highest relevance, among blocks with eligible tokens, that a block
            needs; 0: none.
    """
    blocks = torch.arange(len(relevance))
    # of equal ones the earlier; without any, the later
    order = torch.where(relevance > 0, blocks, -blocks).argsort(stable=True)
    order = order[relevance[order].argsort(descending=True, stable=True)]
    numbers = order.unsqueeze(1) * BLOCK_TOKENS + torch.arange(BLOCK_TOKENS)
    inside = numbers < len(eligible)  # of the last block
    allowed = inside & eligible[numbers.where(inside, 0)]
    possible = relevance[order].where(allowed.any(1), 0)
    allowed &= (possible >= least * possible.max()).unsqueeze(1)
    ranks = blocks.unsqueeze(1).expand_as(numbers)[allowed]
    numbers, by_number = numbers[allowed][:places].sort()
    return numbers, ranks[:places][by_number]


def have_left(seen: int, window: Window) -> tuple[int, int]:
    """Of a document of which `seen` tokens were read, those that have left this window, but sinks:
    the numbers from the first to before the second."""
    begun = max(0, seen // window.segment_length - window.local_segments)
    return window.sink_tokens, max(begun * window.segment_length, window.sink_tokens)


def recall_score(ranks: Tensor, displaced: bool) -> Tensor:
    """Scores of recalled tokens by the `ranks` of their blocks, `[tokens]`. Where they may be
    `displaced`, each is below all that a [`TokenScore`] gives, and the least relevant ones make
    room for what is read after them; a memory would take in once more what it has, so with one
    they stay."""
    ranks = ranks.float()  # whole numbers, which float32 has up to 2²⁴
    return 2.0**80 * (-1 - ranks if displaced else 2.0**24 - ranks)
