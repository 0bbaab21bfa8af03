"""The tokens of a text file of any size, tokenised piece by piece."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from cli import UserError

from .tokenization import encode_texts

if TYPE_CHECKING:
    import numpy as np

PIECE = 1_000_000  # characters that are tokenised together
_MARGIN = 200  # characters on each side of a cut in which the tokenizer is tried
_SEARCHED = 10_000  # characters at the end of a piece in which a cut is looked for
_TRIES = 20  # places there


def tokens_of_file(path: Path, tokenizer) -> "np.ndarray":
    """The token ids of a UTF-8 text file, `[tokens]` int32: those of the whole text at once, its last line break included,
    without special tokens.

    Args:
        path: the text. A byte-order mark is dropped.
        tokenizer: as [`encode_texts`] takes it.

    Raises:
        UserError: the file is not UTF-8, or is empty.
    """
    import numpy as np
    from tqdm import tqdm

    found = [np.empty(0, dtype=np.int32)]
    bar = tqdm(total=path.stat().st_size, desc=f"tokenising {path.name}", unit="B", unit_scale=True)
    try:
        with open(path, encoding="utf-8-sig", newline="") as file, bar:
            for piece in pieces_of_text(file, tokenizer):
                found.append(encode_texts(tokenizer, [piece])[0].astype(np.int32))
                bar.update(len(piece.encode()))
    except UnicodeDecodeError as error:
        raise UserError(f"cannot read {path}: not UTF-8 ({error}); convert it, for example with iconv") from error
    tokens = np.concatenate(found)
    if not len(tokens):
        raise UserError(f"{path}: the file is empty")
    return tokens


def pieces_of_text(file: TextIO, tokenizer, size: int = PIECE) -> Iterator[str]:
    """Yields a text in pieces of about `size` characters whose tokens, one piece after the other, are those of the whole.

    A piece ends before white space, where the tokenizer is seen to cut the text around that place into the same tokens
    together and apart. A text without such a place (no white space, or a tokenizer that adds something to the beginning of
    every text) comes in one piece.
    """
    text = ""
    while read := file.read(size):
        text += read
        cut = _last_cut(text, tokenizer)
        if cut:
            yield text[:cut]
            text = text[cut:]
    if text:
        yield text


def _last_cut(text: str, tokenizer) -> int:
    """The last place near the end of a text where it can be cut; 0 where none is found."""
    begin, end = max(0, len(text) - _SEARCHED), max(0, len(text) - _MARGIN)
    places = [begin + match.end() for match in re.finditer(r"\S(?=\s)", text[begin:end])]
    for cut in reversed(places[-_TRIES:]):
        left, right = text[max(0, cut - _MARGIN) : cut], text[cut : cut + _MARGIN]
        whole, *apart = (ids.tolist() for ids in encode_texts(tokenizer, [left + right, left, right]))
        if whole == apart[0] + apart[1]:
            return cut
    return 0
