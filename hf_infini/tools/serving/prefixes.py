"""Beginnings of prompts that were read before, by their content."""

from collections import OrderedDict

from torch import Tensor

from ...cache.cache import InfiniCache


class Prefixes:
    """Caches after ids; those that were not used for the longest time make room.

    Args:
        limit: bytes of all of them, archives in memory included.

    Attributes:
        nbytes: that they take now.
    """

    def __init__(self, limit: int):
        self.limit, self.nbytes = limit, 0
        self._known: OrderedDict[bytes, tuple[InfiniCache, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def longest(self, ids: Tensor) -> tuple[int, InfiniCache | None]:
        """How many of the first `ids`, `[tokens]`, were read, and the cache after them, which is
        not to be changed."""
        content = _content(ids)
        found = [known for known in self._known if content.startswith(known)]
        if not found:
            return 0, None
        longest = max(found, key=len)
        self._known.move_to_end(longest)
        return len(longest) // ids.element_size(), self._known[longest][0]

    def keep(self, ids: Tensor, cache: InfiniCache) -> None:
        """Takes a `cache` after `ids`, `[tokens]`; from now on nobody changes it."""
        content, size = _content(ids), cache.nbytes()
        size += 0 if cache.archive is None else cache.archive.nbytes()
        if content in self._known:
            self._known.move_to_end(content)
        elif size <= self.limit:
            self._known[content] = cache, size
            self.nbytes += size
        while self.nbytes > self.limit:
            self.nbytes -= self._known.popitem(last=False)[1][1]


def _content(ids: Tensor) -> bytes:
    return ids.cpu().numpy().tobytes()
