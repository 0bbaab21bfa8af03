"""The loop that answers many requests: it reads prompts in pieces beside the decoding of others."""

import copy
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ...cache.cache import InfiniCache, InfiniLayer
from ...cache.joined import joined
from ...compat.cache_name import CACHE
from ...models.structure import decoder_of
from ..passages import SOURCES, passages_of, term_numbers
from .prefixes import Prefixes
from .requests import ENDS, Request
from .rows import Rows

SHORTEST_KEPT = 64  # tokens of a beginning that is worth its state


class Piecewise(Protocol):
    """What takes turns of reading."""

    @property
    def left(self) -> int:
        """Tokens, at most."""
        ...

    @property
    def done(self) -> bool:
        """Whether it needs no further turn."""
        ...

    def read(self, most: int) -> int:
        """Reads `most` tokens at most, and returns how many it has read."""
        ...


class Turn(NamedTuple):
    """One piece of so many tokens (`left`) that somebody else reads, by `function`."""

    function: Callable[[], None]
    left: int
    done: bool = True  # after it

    def read(self, most: int) -> int:
        """As of [`Piecewise`], however many `most` are."""
        self.function()
        return self.left


class Reading:
    """A request's prompt on its way into a cache of one row: what is kept of its beginning is
    copied, and the rest read piece by piece.

    Args:
        loop: whose turn it is.
        request: whose prompt is read.

    Attributes:
        cache: after the prompt but for its last token, when it was read.
        left: tokens that are not read yet, or kept.
    """

    def __init__(self, loop: "Loop", request: Request):
        self.loop, self.request = loop, request
        self.cache: InfiniCache | None = None
        self.left, self._most, self._pieces = request.prompt.tokens - 1, 0, self._in_pieces()

    def read(self, most: int) -> int:
        """As of [`Piecewise`]; `most`: tokens."""
        self._most = most
        count = next(self._pieces, 0)
        if not self.left:  # then the next piece is none, and the end
            next(self._pieces, 0)
        return count

    @property
    def done(self) -> bool:
        return self.cache is not None

    def _in_pieces(self) -> Iterator[int]:
        loop, request = self.loop, self.request
        prompt, caches = request.prompt, []
        for ids, known in prompt.contexts:
            begun, cache = (len(ids), known) if known is not None else loop.prefixes.longest(ids)
            request.cached += begun
            self.left -= begun
            if cache is None or begun < len(ids):
                cache = loop.new_cache() if cache is None else copy.copy(cache)
                yield from self._read_on(cache, ids[begun:])
                if len(ids) >= SHORTEST_KEPT:
                    loop.prefixes.keep(ids, cache)
            caches.append(cache)
        cache = joined(caches) if len(caches) > 1 else caches[0]
        if prompt.question is not None and cache.archive is not None and cache.state is not None:
            cache = cache.recall(prompt.question, terms=loop.terms)
            if prompt.begin is not None:
                sizes = [len(context.ids) - prompt.begin for context in prompt.contexts]
                found = passages_of(loop.tokenizer, cache, documents=(prompt.begin, sizes))
                request.passages = (*itertools.islice(found, SOURCES),)
        elif len(caches) == 1:
            cache = copy.copy(cache)
        cache.archive = None  # nobody asks it again
        if cache.state is None and len(prompt.rest) == 1:  # a row has a state before its token
            loop.read(cache, prompt.rest[:1], real=False)
        yield from self._read_on(cache, prompt.rest[:-1])
        self.cache = cache

    def _read_on(self, cache: InfiniCache, ids: Tensor) -> Iterator[int]:
        place = 0
        while place < len(ids):
            piece = ids[place : place + self._most]
            self.loop.read(cache, piece)
            place += len(piece)
            self.left -= len(piece)
            yield len(piece)


class Loop:
    """Answers requests, in one thread: [`Loop.step`] again and again. Each request gets the tokens
    that it would get alone, but for rounding, which may depend on the size of a batch.

    Args:
        model, tokenizer: with a memory in all layers, in evaluation mode.
        slots: requests at once; others wait.
        chunk: tokens of prompts that are read before a token of everybody else.
        archive: whether prompts recall from what they begin with; "int8": from an archive in 8
            bits, as of [`InfiniCache`].
        kept_bytes: of beginnings that are kept for the next prompts.

    Raises:
        ValueError: a layer has no memory.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: PreTrainedTokenizerBase,
        *,
        slots: int = 8,
        chunk: int = 512,
        archive: bool | str = False,
        kept_bytes: int = 2 * 10**9,
    ):
        self.model, self.tokenizer, self.archive = model, tokenizer, archive
        self.slots, self.chunk, self.prefixes = slots, chunk, Prefixes(kept_bytes)
        if not all(isinstance(layer, InfiniLayer) for layer in self.new_cache().layers):
            raise ValueError(
                "a server needs a state of constant size for each request, and some layers of this "
                "model have no memory: patch all of them, without layers=…"
            )
        self.terms = term_numbers(tokenizer) if archive else None
        self.waiting: deque[Request] = deque()
        self.reading: list[Piecewise] = []
        self.rows, self._oldest = Rows(model), False

    @property
    def requests(self) -> list[Request]:
        """All that have not ended."""
        readings = (each.request for each in self.reading if isinstance(each, Reading))
        return [*self.rows.requests, *readings, *self.waiting]

    def step(self) -> bool:
        """One token for everybody who is answered, after a chunk of prompts. False where there was
        nothing to do."""
        if not (self.waiting or self.reading or self.rows.requests):
            return False
        self._drop()
        taken = len(self.rows.requests) + sum(isinstance(one, Reading) for one in self.reading)
        while self.waiting and taken < self.slots:
            self.reading.append(Reading(self, self.waiting.popleft()))
            taken += 1
        self._read_a_chunk()
        if self.rows.requests:
            self._decode()
        return True

    def end_all(self, error: BaseException) -> None:
        """Ends all requests with an `error`."""
        for request in self.requests:
            _told(request, None, error)
        self.waiting.clear()
        self.reading = [each for each in self.reading if not isinstance(each, Reading)]
        self.rows = Rows(self.model)

    def new_cache(self) -> InfiniCache:
        """That of a prompt's beginning."""
        return InfiniCache(self.model.config, archive=self.archive)

    @torch.no_grad()
    def read(self, cache: InfiniCache, ids: Tensor, real: bool = True) -> None:
        """Has a cache of one row read ids, `[tokens]`, or, where they are not `real`, as many
        places without a token."""
        ids = ids[None].to(self.model.device)
        mask = None if real else torch.zeros_like(ids)
        given = {"input_ids": ids, "attention_mask": mask, "use_cache": True, CACHE: cache}
        decoder_of(self.model)(**given)

    def _drop(self) -> None:
        """Leaves out requests that were cancelled, and ends those whose time is over."""
        now, gone = time.monotonic(), set()
        for request in self.requests:
            if not request.cancelled and now <= request.deadline:
                continue
            gone.add(request)
            if not request.cancelled:
                _told(request, None, TimeoutError("the time of this request is over."))
        if gone:
            self.waiting = deque(each for each in self.waiting if each not in gone)
            self.reading = [
                each
                for each in self.reading
                if not (isinstance(each, Reading) and each.request in gone)
            ]
            self.rows.go(gone)

    def _read_a_chunk(self) -> None:
        """Reads by turns for the one that came first, so that none starves, and for the one with
        the least left, so that short ones need not wait."""
        budget, read, self._oldest = self.chunk, [], not self._oldest
        while budget > 0 and self.reading:
            key = (lambda each: 0) if self._oldest else (lambda each: each.left)
            one: Any = min(self.reading, key=key)
            try:
                count = one.read(budget)
            except Exception as error:
                self.reading.remove(one)
                if isinstance(one, Reading):
                    _told(one.request, None, error)
                continue
            budget -= count
            if one.done:
                self.reading.remove(one)
                if isinstance(one, Reading):
                    read.append((one.request, one.cache))
        try:
            self.rows.come(read)
        except Exception as error:  # such as no memory: those that are answered go on
            for request, _ in read:
                _told(request, None, error)

    def _decode(self) -> None:
        """One token for each row; those whose answers end leave."""
        gone = set()
        for request, logits in zip(self.rows.requests, self.rows.step(), strict=True):
            try:
                if isinstance(logits, Exception):
                    raise logits
                ended = request.go_on(logits)
                if ended is not None:
                    gone.add(request)
                    request.end(ended)
            except Exception as error:
                gone.add(request)
                _told(request, None, error)
        self.rows.go(gone)


def _told(request: Request, reason: ENDS | None, error: BaseException | None) -> None:
    """Ends a request, whether or not anybody listens."""
    try:
        request.end(reason, error)
    except Exception:
        request.cancelled = True
