"""Token labels for people: byte-level pieces as text, white space made visible, a position where a token comes twice."""

import unicodedata
from collections import Counter
from collections.abc import Sequence

from transformers.convert_slow_tokenizer import bytes_to_unicode

# What stands for characters that would not be seen.
VISIBLE = {" ": "·", "\n": "⏎", "\t": "⇥", "\r": "␍"}


def token_texts(tokenizer, ids: Sequence[int]) -> list[str]:
    """The readable text of each token: `·cidade`, `⏎`, `⟨C3⟩` for a byte that is only a part of a letter.

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
    if "\ufffd" in text and "\ufffd" not in piece:
        text = _decode_bytes(piece)
    elif piece.startswith("▁") and not text.startswith(" "):
        text = " " + text  # SentencePiece drops the space of a text's first piece
    return "".join(map(_visible, text or piece)) or f"#{number}"


def _decode_bytes(piece: str) -> str:
    """The text of a byte-level piece with parts of letters; bytes that are not a letter as `⟨C3⟩`."""
    values = {character: byte for byte, character in bytes_to_unicode().items()}
    if not all(character in values for character in piece):
        return piece  # another kind of byte token, such as <0xC3>
    raw = bytes(values[character] for character in piece)
    # surrogateescape turns each byte that does not decode into U+DC00 + byte
    text = raw.decode("utf-8", "surrogateescape")
    return "".join(f"⟨{ord(c) - 0xDC00:02X}⟩" if 0xDC80 <= ord(c) <= 0xDCFF else c for c in text)


def _visible(character: str) -> str:
    if character in VISIBLE:
        return VISIBLE[character]
    category = unicodedata.category(character)
    if category[0] == "Z" or category in ("Cc", "Cf", "Co", "Cn"):  # other spaces, control and format characters
        return f"⟨U+{ord(character):04X}⟩"
    return "◌" + character if category in ("Mn", "Me") else character  # a combining mark, on something to stand on
