"""The requests that are being answered, each a row of one cache."""

from collections.abc import Collection, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from ...cache.cache import InfiniCache
from ...cache.merged import merged, row_of
from ...compat.cache_name import CACHE
from .requests import Request


class Rows:
    """A batch whose rows come and go between steps.

    Args:
        model: with a memory in all layers.

    Attributes:
        requests: one for each row.
    """

    def __init__(self, model: Any):
        self.model, self._cache = model, cast(Any, None)
        self.requests: list[Request] = []

    def come(self, read: Sequence[tuple[Request, InfiniCache]]) -> None:
        """New rows: requests whose prompts but for the last token were `read`, each with the cache
        of one row after it."""
        if read:
            before = [] if self._cache is None else [self._cache]
            self._cache = merged([*before, *(cache for _, cache in read)])
            self.requests += [request for request, _ in read]

    def go(self, gone: Collection[Request]) -> None:
        """Leaves out the rows of these requests, `gone`."""
        kept = [number for number, each in enumerate(self.requests) if each not in gone]
        if len(kept) < len(self.requests):
            self.requests = [self.requests[number] for number in kept]
            if not kept:
                self._cache = None
            else:
                self._cache.batch_select_indices(torch.tensor(kept))

    def step(self) -> list[Tensor | Exception]:
        """Reads the last token of every row: logits `[vocabulary]` for each. Where the call fails,
        rows are called one by one, and those that fail by themselves have their error."""
        cache = self._cache
        try:
            return [*self._call(self.requests, cache)]
        except Exception as error:
            if len(self.requests) == 1:
                return [error]
        found, caches = [], [row_of(cache, number) for number in range(len(self.requests))]
        for request, own in zip(self.requests, caches, strict=True):
            try:
                found += self._call([request], own)
            except Exception as error:
                found.append(error)
        self._cache = merged(caches)
        return found

    @torch.no_grad()
    def _call(self, requests: Sequence[Request], cache: InfiniCache) -> Tensor:
        ids = torch.stack([request.last for request in requests])
        return self.model(input_ids=ids, use_cache=True, **{CACHE: cache}).logits[:, -1]
