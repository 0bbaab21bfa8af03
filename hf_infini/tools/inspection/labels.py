"""Token labels for people: white space and control characters made visible, a position where a token comes twice."""

from collections import Counter
from collections.abc import Sequence

# What stands for characters that would not be seen.
VISIBLE = {" ": "·", "\n": "⏎", "\t": "⇥", "\r": "␍"}


def token_texts(tokenizer, ids: Sequence[int]) -> list[str]:
    """The readable text of each token: `·cidade`, `⏎`; the tokenizer's own piece for one that is only a part of a letter.

    Without a tokenizer (`None`), and for an id that it does not have, the id itself as `#17`.
    """
    return [f"#{number}" if tokenizer is None else _token_text(tokenizer, number) for number in map(int, ids)]


def unique_labels(texts: Sequence[str]) -> list[str]:
    """The texts; those that occur more than once are followed by `@` and their place: `·de@3`, `·de@9`."""
    counts, placed = Counter(texts), [f"{text}@{place}" for place, text in enumerate(texts)]
    labels = [at if counts[text] > 1 else text for text, at in zip(texts, placed, strict=True)]
    return labels if len(set(labels)) == len(labels) else placed  # a text may look like another one's label


def _token_text(tokenizer, number: int) -> str:
    piece = tokenizer.convert_ids_to_tokens(number)
    if piece is None:
        return f"#{number}"
    text = tokenizer.decode([number], clean_up_tokenization_spaces=False)
    if "\ufffd" in text:
        text = piece
    elif piece.startswith("▁") and not text.startswith(" "):
        text = " " + text  # SentencePiece drops the space of a text's first piece
    return "".join(VISIBLE.get(c, c if c.isprintable() else f"⟨U+{ord(c):04X}⟩") for c in text or piece)
