"""Keys and values of everything that a cache has read, outside of the device. Nothing attends to
them before a question recalls some of them ([`InfiniCache.recall`]).

What was read of a document is in *blocks* of 64 tokens, by their numbers: the bytes of one token
after the other, of each its keys and values in one layer after the other, un-rotated, as the model
computed them, or rounded to 8 bits. The blocks are in host memory, or in a file ([`BlockFile`]), of
which only those that are recalled are read.
"""

import bisect
import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..ops.int8 import STEP_BYTES, from_int8, to_int8
from ..ops.recall import (
    BLOCK_TOKENS,
    LEAST,
    Terms,
    block_relevance,
    have_left,
    in_blocks,
    recall_score,
    recalled_numbers,
)
from ..ops.state import InfiniState, Tokens
from ..options import Window
from .block_file import BlockFile, Stored, check_free

# Tokens of calls after which they become blocks, which on an accelerator waits for it
PENDING_TOKENS = 256
# The numbers of tokens of other documents begin here, block after block; those of the row's own
# document, which goes on, begin at 0
FIRST_OF_OTHERS = 2**40


def form_of(archive: bool | str) -> str | None:
    """In what form an `archive`, as it is asked for, has keys and values: "int8", or `None`, as the
    model computes them. ValueError for a form that there is not."""
    if archive not in (True, False, "int8"):
        raise ValueError(
            "archive must be True (keys and values as the model computes them), 'int8' (rounded to "
            f"8 bits) or False (none); got {archive!r}."
        )
    return archive if isinstance(archive, str) else None


class Part(NamedTuple):
    """Keys or values of one layer in a block, of which each token has `[kv_heads, width]`."""

    layer: int
    heads: int
    width: int
    dtype: torch.dtype
    form: str | None = None  # as of [`form_of`]

    @property
    def bytes(self) -> int:
        """Of one token."""
        if self.form is None:
            return self.heads * self.width * self.dtype.itemsize
        return self.heads * (self.width + STEP_BYTES)

    def packed(self, states: Tensor) -> Tensor:
        """The bytes of keys or values, `[batch, tokens, bytes]`; `states`: `[batch, kv_heads,
        tokens, width]`."""
        of_tokens = states.transpose(1, 2).contiguous()
        packed = of_tokens.view(torch.uint8) if self.form is None else to_int8(of_tokens)
        return packed.flatten(2)

    def unpacked(self, packed: Tensor) -> Tensor:
        """Keys or values, `[kv_heads, tokens, width]`, whose bytes are `packed`, `[tokens,
        bytes]`."""
        bytes_ = packed.unflatten(1, (self.heads, -1)).contiguous()
        states = bytes_.view(self.dtype) if self.form is None else from_int8(bytes_, self.dtype)
        return states.transpose(0, 1)

    def __str__(self) -> str:
        return f"{self.dtype}{f', rounded to {self.form}' if self.form else ''}"


Block = Tensor | Stored  # of the bytes `[block_bytes]`, or where they are


class Row(NamedTuple):
    """What a row of a cache has read of its document."""

    ids: Tensor  # `[tokens]`, int64; −2 for embeddings
    # `[tokens]` bool: which of them may be recalled: those that a memory would take in
    eligible: Tensor
    parts: tuple[Part, ...]  # of a block: of each layer keys, then values
    blocks: tuple[Block, ...]  # those that are complete
    tail: Tensor  # `[tokens, bytes]`, of the tokens behind them
    others: tuple["Row", ...] = ()  # other documents, which are asked together with this one
    number: int = 0  # of this document among all of them, as they were given

    @property
    def documents(self) -> tuple["Row", ...]:
        """All that are asked, this one last."""
        return *self.others, self

    @property
    def begins(self) -> list[int]:
        """The number of the first token of each of the documents in all of them, each of which
        begins with a block; and behind them where the next would."""
        sizes = (-(-each.tokens // BLOCK_TOKENS) * BLOCK_TOKENS for each in self.documents)
        return [*itertools.accumulate(sizes, initial=0)]

    def numbered(self, numbers: Tensor) -> Tensor:
        """The `numbers` of tokens in all of the documents, `[tokens]`, as a state has them:
        [`FIRST_OF_OTHERS`]."""
        own = self.begins[-2]
        return torch.where(numbers < own, numbers + FIRST_OF_OTHERS, numbers - own)

    def located(self, block: Tensor) -> tuple[int, Tensor]:
        """The number of the document that has the tokens with these numbers, all of one block, as
        a state has them; and their ids."""
        document, numbers = self.in_document(block)
        return document.number, document.ids[numbers]

    def in_document(self, block: Tensor) -> tuple["Row", Tensor]:
        """The document that has the tokens of a `block`, numbered as in [`Row.located`], and their
        numbers in it."""
        if block[0] < FIRST_OF_OTHERS:
            return self, block
        block = block - FIRST_OF_OTHERS
        place = bisect.bisect(self.begins, int(block[0])) - 1
        return self.others[place], block - self.begins[place]

    @property
    def tokens(self) -> int:
        return len(self.ids)

    def and_then(self, new: "Row", file: BlockFile | None) -> "Row":
        """The row with more tokens, all of them in `new`'s tail; blocks go into the file."""
        tail = torch.cat([self.tail, new.tail])
        count = len(tail) // BLOCK_TOKENS
        whole, blocks = tail[: count * BLOCK_TOKENS], self.blocks
        if count:
            made = whole.view(count, -1)
            placed = made.unbind() if file is None else file.write(len(blocks), made)
            blocks = (*blocks, *placed)
            tail = tail[count * BLOCK_TOKENS :].clone()
        ids, eligible = (
            torch.cat(pair) for pair in ((self.ids, new.ids), (self.eligible, new.eligible))
        )
        return Row(ids, eligible, self.parts, blocks, tail, self.others, self.number)

    def last(self, tokens: int) -> "Row":
        """The row of so many last tokens, all of which are in the tail."""
        kept = slice(len(self.ids) - tokens, None)
        return Row(self.ids[kept], self.eligible[kept], self.parts, (), self.tail[kept])

    @property
    def block_bytes(self) -> int:
        """Of one block."""
        return BLOCK_TOKENS * sum(part.bytes for part in self.parts)

    def bytes_of(self, numbers: Iterable[int]) -> list[Tensor]:
        """The bytes of the blocks with these `numbers`; errors as of [`BlockFile.read`]."""
        held: dict[int, Any] = {number: self.blocks[number] for number in numbers}
        stored = {number: block for number, block in held.items() if isinstance(block, Stored)}
        for file in {block.file for block in stored.values()}:
            own = {number: block for number, block in stored.items() if block.file == file}
            held |= zip(own, file.read(own.values()), strict=True)
        return [*held.values()]

    def found(self, numbers: Tensor) -> Tensor:
        """The bytes of the tokens with these numbers in all of the documents, ascending, `[tokens,
        bytes]`."""
        if self.others:
            bounds = torch.searchsorted(numbers, torch.tensor(self.begins)).diff().tolist()
            each = zip(self.documents, numbers.split(bounds), self.begins, strict=False)
            return torch.cat(
                [row._replace(others=()).found(own - begin) for row, own, begin in each if len(own)]
            )
        blocks, places = (numbers // BLOCK_TOKENS).unique(return_inverse=True)
        whole = self.bytes_of(number for number in blocks.tolist() if number < len(self.blocks))
        rows = [block.view(BLOCK_TOKENS, -1) for block in whole]
        # that of the tail is the last one
        return torch.cat([*rows, self.tail])[places * BLOCK_TOKENS + numbers % BLOCK_TOKENS]

    def states(
        self, layer: int, found: Tensor, chosen: slice | Tensor = slice(None)
    ) -> list[Tensor]:
        """Keys and values of a layer, `[kv_heads, tokens, width]`, in what [`Row.found`] gave, of
        all or of those that are `chosen` by their index. `found`: `[tokens, bytes]`."""
        pairs = zip(self.parts, found.split([part.bytes for part in self.parts], 1), strict=True)
        return [part.unpacked(own[chosen]) for part, own in pairs if part.layer == layer]


class Call(NamedTuple):
    """What a call has read, as the layers had it."""

    ids: Tensor  # `[batch, tokens]`
    real: Tensor  # `[batch, tokens]` bool: which are no padding
    eligible: Tensor  # `[batch, tokens]` bool, as in [`Row`]
    seen: Tensor  # `[batch]`, tokens of the row's document after it
    layers: dict[int, tuple[Tensor, Tensor]]  # `[batch, kv_heads, tokens, width]`, without a graph

    def and_then(self, *calls: "Call") -> "Call":
        """This one and others after it as one."""
        every = (self, *calls)
        ids, real, eligible = (
            torch.cat([getattr(call, name) for call in every], 1)
            for name in ("ids", "real", "eligible")
        )
        layers: Any = {
            number: [torch.cat([call.layers[number][side] for call in every], 2) for side in (0, 1)]
            for number in self.layers
        }
        return Call(ids, real, eligible, every[-1].seen, layers)

    def rows(self, form: str | None) -> list[Row]:
        """The tokens of each row, without padding, in host memory, in a `form` as of
        [`form_of`]."""
        states = [(number, side) for number, pair in self.layers.items() for side in pair]
        parts = tuple(
            Part(number, side.shape[1], side.shape[3], side.dtype, form) for number, side in states
        )
        flat = [part.packed(side) for part, (_, side) in zip(parts, states, strict=True)]
        device = flat[0].device  # layers may be on several
        bytes_ = torch.cat([part.to(device) for part in flat], 2).to("cpu")
        ids, real, eligible = (part.to("cpu") for part in (self.ids, self.real, self.eligible))
        # index_select copies whole tokens, and a mask byte by byte
        chosen = [row.nonzero().squeeze(1) for row in real]
        return [
            Row(ids[row, kept], eligible[row, kept], parts, (), bytes_[row].index_select(0, kept))
            for row, kept in enumerate(chosen)
        ]


class Archive:
    """What the rows of an [`InfiniCache`] have read of their current documents. Nothing changes
    it: `after` and `chosen` give another one, which shares what is the same, so that copies of a
    cache cost nothing.

    Args:
        rows: what has been read; none before the first call.
        file: where the blocks of the one row go; `None`: they stay in host memory.
        calls: that are not in the rows yet.
        form: as of [`form_of`], of what is read where there are no rows before it.
    """

    def __init__(
        self,
        rows: Sequence[Row] = (),
        file: Path | None = None,
        calls: tuple[Call, ...] = (),
        form: str | None = None,
    ):
        self._rows, self._calls, self.file = tuple(rows), calls, file
        self.form = rows[0].parts[0].form if rows else form

    def rows(self) -> tuple[Row, ...]:
        """The rows, with all that was read."""
        if self._calls:
            seen = self._calls[-1].seen.tolist()
            read = self._calls[0].and_then(*self._calls[1:]).rows(self.form)
            before = self._rows or (None,) * len(read)
            triples = zip(before, read, seen, strict=True)
            self._rows = tuple(self._after(*triple) for triple in triples)
            self._calls = ()
        return self._rows

    def _after(self, before: Row | None, new: Row, seen: int) -> Row:
        """A row after new tokens; `seen`: of its document."""
        if before is None or before.tokens + new.tokens != seen:  # another document has begun
            if new.tokens < seen:
                raise ValueError(
                    f"a row has read {seen} tokens, and its archive has the last {new.tokens} of "
                    "them: make a new cache with an archive, and read the text again."
                )
            new = new.last(seen)
            before = new.last(0)
        if before.parts != new.parts:
            raise ValueError(
                f"the archive has keys and values in {before.parts[0]}, and this call computes "
                f"{new.parts[0]}: read the whole text under one autocast."
            )
        file = None if self.file is None else BlockFile.at(self.file, new.block_bytes)
        return before.and_then(new, file)

    def rows_of(self, seen: Tensor) -> tuple[Row, ...]:
        """The rows; ValueError where they have not the tokens of a cache, `seen` `[batch]`."""
        rows = self.rows()
        if (found := [row.tokens for row in rows]) != seen.tolist():
            raise ValueError(
                f"the archive has {found} tokens and the cache {seen.tolist()}: make a new cache "
                "with an archive, and read the text again."
            )
        return rows

    def after(self, call: Call) -> "Archive":
        """The archive after one more call."""
        after = Archive(self._rows, self.file, (*self._calls, call), self.form)
        if sum(each.ids.shape[1] for each in after._calls) >= PENDING_TOKENS:
            after.rows()
        return after

    def chosen(self, rows: Sequence[int]) -> "Archive":
        """The archive of a cache with these rows, by number; what these read stays in memory."""
        own = self.rows()
        return Archive([own[row] for row in rows])

    def at(self, file: Path | None) -> "Archive":
        """The archive whose one row goes on in this file, which nobody else may write, with the
        blocks that it has; `None`: in host memory. FileExistsError where it is somebody's."""
        rows = self.rows()
        if file is None:
            return Archive(rows, form=self.form)
        there = BlockFile.at(file, rows[0].block_bytes if rows else 0)
        of_rows = [block for row in rows for block in row.blocks]
        if not any(isinstance(block, Stored) and block.file == there for block in of_rows):
            check_free(file)
        there.keep(len(of_rows))
        if rows:
            [row] = rows
            blocks = [
                block
                if isinstance(block, Stored) and block.file == there and block.place == number
                else there.write(number, row.bytes_of([number])[0][None])[0]
                for number, block in enumerate(row.blocks)
            ]
            rows = (row._replace(blocks=tuple(blocks)),)
        return Archive(rows, file, form=self.form)

    def nbytes(self) -> int:
        """Bytes in host memory, each block once."""
        every = (each for row in self.rows() for each in row.documents)
        held = {id(part): part for row in every for part in (*row[:2], *row.blocks, row.tail)}
        return sum(part.nbytes for part in held.values() if isinstance(part, Tensor))


class Choice(NamedTuple):
    """What takes the kept places of a window."""

    numbers: Tensor  # `[tokens]`, ascending, in all of the documents
    ranks: Tensor  # `[tokens]`, of their blocks, [`recalled_numbers`]
    # how many tokens count as having left the window: all that have; with empty places, the kept
    left: int


class Recalled(NamedTuple):
    """What a question recalls of a row's documents."""

    row: Row
    relevance: Tensor  # of their blocks, [`block_relevance`]

    def choice(self, window: Window, displaced: bool) -> Choice | None:
        """The tokens that fill the places of a `window`, among those that have left it: of other
        documents all but sinks, which the row's own has. `None`: it keeps them all anyway.
        `displaced`: as of [`recall_score`]."""
        first, end = have_left(self.row.tokens, window)
        found = []
        for each in self.row.documents:
            eligible = each.eligible.clone()
            eligible[:first] = False
            eligible[end if each is self.row else each.tokens :] = False
            found.append(in_blocks(eligible, False).flatten())
        eligible, places = torch.cat(found), window.kept_tokens
        left = int(eligible.sum())
        if left <= places and not self.row.others:
            return None
        # a memory holds what is not kept, and empty places would say that it holds nothing
        least = LEAST if displaced else 0
        numbers, ranks = recalled_numbers(self.relevance, eligible, places, least)
        return Choice(numbers, ranks, left if len(numbers) == places else len(numbers))


def recalled(
    rows: Sequence[Row],
    question: Tensor | Sequence,
    terms: Tensor | Terms | None,
    states: dict[int, InfiniState],
    windows: dict[int, Window],
    displaced: bool,
) -> dict[int, InfiniState]:
    """States that keep what questions recall, by layer. Blocks are read once for all layers.

    Args:
        rows: of the archive.
        question, terms: as of [`InfiniCache.recall`].
        states, windows: by layer, of those that keep tokens.
        displaced: as of [`recall_score`].
    """
    terms = terms.cpu() if isinstance(terms, Tensor) else terms
    asked = []
    for row, ids in zip(rows, questions_of(question, len(rows)), strict=True):
        of_documents = [_terms_of(each.ids, terms) for each in row.documents]
        asked.append(Recalled(row, block_relevance(of_documents, _terms_of(ids, terms))))
    sizes = sorted({*windows.values()}, key=lambda window: -window.kept_tokens)
    chosen = {window: [each.choice(window, displaced) for each in asked] for window in sizes}
    # of the first window that does not keep all; the smaller ones have a part of it
    found: list[Any] = []
    for row, *choices in zip(rows, *chosen.values(), strict=True):
        first = next((choice.numbers for choice in choices if choice is not None), None)
        found.append(None if first is None else (first, row.found(first)))
    made = {}
    for layer, window in windows.items():
        state = states[layer]
        own, of_rows, left = Tokens.kept_in(state, window), [], state.tokens_left().clone()
        for number, (row, choice) in enumerate(zip(rows, chosen[window], strict=True)):
            if choice is None:
                parts = own.key, own.value, own.score, own.position
                of_rows.append([part[number] for part in parts])
                continue
            (numbers, bytes_), left[number] = found[number], choice.left
            states_ = row.states(layer, bytes_, torch.searchsorted(numbers, choice.numbers))
            score = recall_score(choice.ranks, displaced).to(own.score.dtype)
            pairs = (score, own.score), (row.numbered(choice.numbers), own.position)
            alike = [
                part.view(1, -1, 1).expand(len(whole[0]), -1, whole.shape[3])
                for part, whole in pairs
            ]
            empty = window.kept_tokens - len(score)
            fillers = zip((*states_, *alike), (0, 0, 0, -1), strict=True)
            of_rows.append(
                [F.pad(part, (0, 0, empty, 0), value=n).to(own.key.device) for part, n in fillers]
            )
        key, value, score, position = (torch.stack(parts) for parts in zip(*of_rows, strict=True))
        # what a memory never takes in again needs no weight
        weight = None if own.log_weight is None else torch.zeros_like(own.log_weight)
        kept = Tokens(key, value, weight, score, position)
        made[layer] = kept.instead(state, window, left)
    return made


def kept_blocks(state: InfiniState, window: Window, row: int) -> list[Tensor]:
    """The numbers of the tokens that a row of a layer's `state`, with this `window`, keeps, by
    block, those with the highest scores first."""
    kept = Tokens.kept_in(state, window)
    numbers, scores = kept.position[row, 0, :, 0].cpu(), kept.score[row, 0, :, 0].cpu()
    numbers, scores = numbers[numbers >= 0], scores[numbers >= 0]
    sizes = (numbers // BLOCK_TOKENS).unique_consecutive(return_counts=True)[1].tolist()
    blocks = zip(numbers.split(sizes), scores.split(sizes), strict=True)
    return [block for block, _ in sorted(blocks, key=lambda pair: -float(pair[1].max()))]


def _terms_of(ids: Tensor, terms: Tensor | Terms | None) -> Tensor:
    """The terms of ids, of [`block_relevance`]; −1 for embeddings, and for ids beyond the
    vocabulary."""
    if isinstance(terms, Terms):
        return terms.of(ids)
    if terms is None:
        return ids.clamp(min=-1)
    known = (ids >= 0) & (ids < len(terms))
    return torch.where(known, terms[ids.where(known, 0)], -1)


def questions_of(question: Tensor | Sequence, rows: int) -> list[Tensor]:
    """The ids of the question of each of so many `rows`, `[tokens]`; ValueError where there are not
    as many."""
    given: Any = question
    try:
        one = all(isinstance(part, int) or getattr(part, "ndim", 1) == 0 for part in given)
        each = [torch.as_tensor(ids).cpu() for ids in ([given] if one else given)]
        got = f"{len(each)} of {[*each[0].shape]} {each[0].dtype}"
    except (TypeError, ValueError, RuntimeError):  # no numbers, such as a text; or no sequence
        each, got = [], f"{given!r:.100}"
    each = each * rows if len(each) == 1 else each
    if len(each) != rows or any(
        ids.dim() != 1 or len(ids) and (ids.is_floating_point() or ids.dtype == torch.bool)
        for ids in each
    ):
        raise ValueError(
            f"question must be the ids of one question, [tokens], or of {rows}, one for each row "
            f"of the cache, int64; got {got}."
        )
    return [ids.long() for ids in each]
