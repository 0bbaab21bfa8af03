"""Where the tokens of a document are in its text, and pieces of the text around some of them."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..models.loading import PLAIN_TEXT

AROUND = 200  # characters that are shown on either side of what is marked


class Marked(NamedTuple):
    """Characters of a text, from `begin` up to `end`, and what is said of them."""

    begin: int
    end: int
    label: str


def token_borders(tokenizer: PreTrainedTokenizerBase, text: str) -> Tensor | None:
    """Where each token of a document begins and ends in its text, `[tokens, 2]`, in characters;
    `None` for a tokenizer that does not say it (a slow one).

    No character is between two tokens: what a tokenizer leaves out, such as white space or an
    accent that it puts into its letter, belongs to the token in front of it. One that several
    tokens share, such as an emoji of four bytes, belongs to each of them. `text`: in which nothing
    is a special token, as a [`Reader`] reads documents.
    """
    if not tokenizer.is_fast:
        return None
    found = tokenizer(text, return_offsets_mapping=True, **PLAIN_TEXT)["offset_mapping"]
    borders = torch.tensor(found, dtype=torch.long).view(-1, 2)
    begins = torch.cat([borders[:, 0], torch.tensor([len(text)])])
    begins[0] = 0
    return torch.stack([begins[:-1], borders[:, 1].maximum(begins[1:])], 1)


def excerpts(text: str, marked: Iterable[Marked]) -> list[tuple[str, str | None]]:
    """Pieces of a `text` with their labels, in order: what is `marked`, and [`AROUND`] characters
    on either side. Where something is left out, a piece says from which character it goes on."""
    pieces: list[tuple[str, str | None]] = []
    shown = 0  # so far
    for begin, end, label in sorted(marked):
        begin = max(begin, shown)  # a character that two share belongs to the first
        if begin >= end:
            continue
        behind = min(shown + AROUND, begin) if pieces else 0
        first = max(begin - AROUND, behind)
        pieces.append((text[shown:behind], None))
        if first > behind:
            pieces.append((f"\n\n… from character {first:,} of {len(text):,}:\n\n", None))
        pieces += [(text[first:begin], None), (text[begin:end], label)]
        shown = end
    pieces.append((text[shown : shown + AROUND] if pieces else "", None))
    if shown + AROUND < len(text):
        pieces.append(("\n\n…\n\n", None))
    return [piece for piece in pieces if piece[0]]
