"""Real text around what has to be recalled: a long stream of tokens, of which any number can be taken from anywhere."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np


class TokenStream:
    """Documents one after the other, an end-of-text token behind each, as one flat stream in pieces.

    Args:
        pieces: 1-D integer arrays, which may be mapped files.
    """

    def __init__(self, pieces: "Sequence[np.ndarray]"):
        import numpy as np

        self.pieces = [piece for piece in pieces if len(piece)]
        self.starts = np.concatenate([[0], np.cumsum([len(piece) for piece in self.pieces])]).astype(np.int64)

    @classmethod
    def of_rows(cls, folder: Path) -> "TokenStream":
        """The rows of a split of recipes/prepare.py, one behind the other; the file is mapped into memory, not read."""
        from datasets import load_from_disk

        column = load_from_disk(str(folder)).data.column("input_ids")
        return cls([chunk.flatten().to_numpy(zero_copy_only=True) for chunk in column.chunks])

    def __len__(self) -> int:
        return int(self.starts[-1])

    def read(self, start: int, count: int) -> "np.ndarray":
        """`count` tokens (int64) from `start` on; behind the end the stream begins again."""
        import numpy as np

        parts, place = [], start % len(self)
        while count > 0:
            number = int(np.searchsorted(self.starts, place, side="right")) - 1
            offset = place - int(self.starts[number])
            parts.append(self.pieces[number][offset : offset + count])
            count -= len(parts[-1])
            place = (place + len(parts[-1])) % len(self)
        return np.concatenate(parts).astype(np.int64) if parts else np.empty(0, dtype=np.int64)


class Filler:
    """Running text as part of one document: between two articles of the stream stands a blank line.

    Args:
        stream: the articles; where more is taken than there is, they come again.
        end_of_text: the token that stands between two articles in the stream.
        blank_line: the tokens to put there instead.
    """

    def __init__(self, stream: TokenStream, end_of_text: int, blank_line: "np.ndarray"):
        self.stream, self.end_of_text, self.blank_line = stream, end_of_text, blank_line

    def take(self, rng: random.Random, count: int) -> "np.ndarray":
        """`count` tokens (int64) from a place drawn at random, often in the middle of an article."""
        import numpy as np

        tokens = self.stream.read(rng.randrange(len(self.stream)), count)
        first, *others = np.split(tokens, np.flatnonzero(tokens == self.end_of_text))
        parts = [first, *(part for other in others for part in (self.blank_line, other[1:]))]
        return np.concatenate(parts)[:count]
