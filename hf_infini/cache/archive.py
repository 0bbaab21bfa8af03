"""Everything that a cache has read, exactly: un-rotated keys and values of every token, outside of
the device. Nothing of it is attended to before a question recalls it
([`InfiniCache.recall`])."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ops.recall import have_left, recall_score, recalled_numbers
from ..ops.state import InfiniState, Tokens
from ..options import Window

SPAN = 4096  # tokens of a piece that is large enough
# Tokens of calls after which they are moved into the rows, which on an accelerator waits for it
PENDING_TOKENS = 256


class Piece(NamedTuple):
    """Some successive tokens of a document."""

    ids: Tensor  # `[tokens]`, int64; −2 for embeddings
    # `[tokens]` bool: which of them may be recalled: those that a memory would take in
    eligible: Tensor
    # of each layer, `[kv_heads, tokens, head_dim]` and `[kv_heads, tokens, value_dim]`
    layers: dict[int, tuple[Tensor, Tensor]]

    @property
    def tokens(self) -> int:
        return len(self.ids)

    def map(self, function: Callable[[list[Tensor], int], Tensor], *others: "Piece") -> "Piece":
        """`function(parts, dimension of tokens)` for each part of this and others."""
        pieces = (self, *others)
        return Piece(
            function([each.ids for each in pieces], 0),
            function([each.eligible for each in pieces], 0),
            {
                number: (
                    function([each.layers[number][0] for each in pieces], 1),
                    function([each.layers[number][1] for each in pieces], 1),
                )
                for number in self.layers
            },
        )


class Row(NamedTuple):
    """A row's current document, its pieces in order."""

    pieces: tuple[Piece, ...] = ()

    @property
    def tokens(self) -> int:
        return sum(piece.tokens for piece in self.pieces)

    @property
    def ids(self) -> Tensor:
        """`[tokens]`, [`Piece.ids`] of all."""
        return torch.cat([piece.ids for piece in self.pieces])

    @property
    def eligible(self) -> Tensor:
        """`[tokens]`, [`Piece.eligible`] of all."""
        return torch.cat([piece.eligible for piece in self.pieces])

    def taken(self, layer: int, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer of the tokens with these numbers, `[tokens]`, in ascending
        order."""
        found, first = [], 0
        for piece in self.pieces:
            inside = numbers[(numbers >= first) & (numbers < first + piece.tokens)] - first
            found.append([part[:, inside] for part in piece.layers[layer]])
            first += piece.tokens
        keys, values = zip(*found, strict=True)
        return torch.cat(keys, 1), torch.cat(values, 1)

    def and_then(self, new: Piece) -> "Row":
        """The row with more tokens. Of two neighbours where the second is no smaller one is made,
        so that there are few, and every token is copied a few times only."""
        pieces = [*self.pieces, new]
        while len(pieces) > 1 and pieces[-2].tokens <= min(pieces[-1].tokens, SPAN):
            last = pieces.pop()
            pieces[-1] = pieces[-1].map(torch.cat, last)
        return Row(tuple(pieces))

    def after(self, call: "Call", number: int) -> "Row":
        """The row, of this number, after a call; ValueError where it lacks tokens."""
        new, seen = call.of_row(number), int(call.seen[number])
        if self.tokens + new.tokens == seen:
            return self.and_then(new) if new.tokens else self
        begin = new.tokens - seen  # where the last document of the call begins
        if begin < 0:
            raise ValueError(
                f"row {number} has read {seen} tokens, and its archive has the last {new.tokens} "
                "of them only: make a new cache with an archive, and read the text again."
            )
        last = new.map(lambda parts, dim: parts[0].narrow(dim, begin, seen))
        return Row((last,) if seen else ())


class Call(NamedTuple):
    """What a call has read, as the layers had it."""

    ids: Tensor  # `[batch, tokens]`
    real: Tensor  # `[batch, tokens]` bool: which are no padding
    eligible: Tensor  # `[batch, tokens]` bool, as in [`Piece`]
    seen: Tensor  # `[batch]`, tokens of the row's document after it
    layers: dict[int, tuple[Tensor, Tensor]]  # `[batch, kv_heads, tokens, …]`

    def and_then(self, *calls: "Call") -> "Call":
        """This one and others after it as one."""
        every = (self, *calls)
        parts = ([getattr(call, name) for call in every] for name in ("ids", "real", "eligible"))
        layers = {
            number: tuple(
                torch.cat([call.layers[number][side] for call in every], 2) for side in (0, 1)
            )
            for number in self.layers
        }
        return Call(*(torch.cat(part, 1) for part in parts), every[-1].seen, layers)

    def of_row(self, row: int) -> Piece:
        """The tokens of a row, without padding, in host memory: copies, or all rows of the call
        would be held."""
        real = self.real[row]
        rows = [self.ids[row, real], self.eligible[row, real]]
        ids, eligible = (part.to("cpu", copy=True) for part in rows)
        whole = bool(real.all())
        layers = {
            number: tuple(
                (part[row] if whole else part[row][:, real]).detach().to("cpu", copy=True)
                for part in parts
            )
            for number, parts in self.layers.items()
        }
        return Piece(ids, eligible, layers)


class Archive:
    """What the rows of an [`InfiniCache`] have read of their current documents. It is not changed:
    `after` and `chosen` give another one that shares what is the same, so that copies of a cache
    cost nothing."""

    def __init__(self, rows: tuple[Row, ...] = (), calls: tuple[Call, ...] = ()):
        self._rows, self._calls = rows, calls

    @property
    def rows(self) -> tuple[Row, ...]:
        """The rows, with all that was read."""
        if self._calls:
            call = self._calls[0].and_then(*self._calls[1:])
            rows = self._rows or (Row(),) * len(call.ids)
            self._rows = tuple(row.after(call, number) for number, row in enumerate(rows))
            self._calls = ()
        return self._rows

    def after(self, call: Call) -> "Archive":
        """The archive after one more call."""
        after = Archive(self._rows, (*self._calls, call))
        return Archive(after.rows) if after.pending >= PENDING_TOKENS else after

    @property
    def pending(self) -> int:
        """Tokens of calls that are not in the rows yet."""
        return sum(call.ids.shape[1] for call in self._calls)

    def chosen(self, rows: list[int]) -> "Archive":
        """The archive of a cache with these rows, by number."""
        return Archive(tuple(self.rows[row] for row in rows))

    def nbytes(self) -> int:
        """Bytes that it takes, each piece once."""
        pieces = {id(piece): piece for row in self.rows for piece in row.pieces}
        return sum(
            part.nbytes
            for piece in pieces.values()
            for part in (piece.ids, piece.eligible, *sum(piece.layers.values(), ()))
        )



def questions_of(question: Tensor | Sequence, rows: int) -> list[Tensor]:
    """The ids of the question of each row, `[tokens]`; ValueError where there are not as many."""
    given: Any = question
    several = len(given) > 0 and not (isinstance(given[0], int) or _is_number(given[0]))
    each = [torch.as_tensor(ids, dtype=torch.long, device="cpu") for ids in given] if several else [
        torch.as_tensor(given, dtype=torch.long, device="cpu")
    ] * rows
    if len(each) == 1:
        each = each * rows
    if len(each) != rows or any(ids.dim() != 1 for ids in each):
        raise ValueError(
            f"give the ids of one question, [tokens], or of {rows}, one for each row of the cache; "
            f"got {len(each)}."
        )
    return each


def _is_number(given: Any) -> bool:
    return isinstance(given, Tensor) and given.dim() == 0


def recalled(
    state: InfiniState,
    rows: Sequence[Row],
    relevance: Sequence[Tensor],
    layer: int,
    window: Window,
    displaced: bool,
) -> InfiniState:
    """The state of a layer whose kept tokens are those of the most relevant blocks.

    Args:
        rows, relevance: of the cache, and of the blocks of each, [`block_relevance`].
        layer: its number.
        window: of the layer.
        displaced: as of [`recall_score`].
    """
    own, found = Tokens.kept_in(state, window), []
    for number, (row, of_blocks) in enumerate(zip(rows, relevance, strict=True)):
        first, end = have_left(row.tokens, window)
        if int(row.eligible[first:end].sum()) <= window.kept_tokens:  # all of them are kept
            found.append([part[number] for part in (own.key, own.value, own.score, own.position)])
            continue
        choice = of_blocks, row.eligible, first, end, window.kept_tokens
        numbers, ranks = recalled_numbers(*choice)
        key, value = (part.to(state.local_key) for part in row.taken(layer, numbers))
        score, position = (
            part.to(state.local_key.device).view(1, -1, 1).expand(len(key), -1, width)
            for part, width in (
                (recall_score(ranks, displaced), own.score.shape[-1]),
                (numbers, 1),
            )
        )
        found.append([key, value, score.to(own.score.dtype), position])
    key, value, score, position = (torch.stack(parts) for parts in zip(*found, strict=True))
    # what is never written into a memory again has no use for its weight
    weight = None if own.log_weight is None else torch.zeros_like(own.log_weight)
    return Tokens(key, value, weight, score, position).instead(state, window)
