"""The rows of several caches as those of one, and a row of it as a cache: a batch whose rows come
and go. What each has read counts its own tokens, so rows may be at any places of their texts."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..ops.state import InfiniState
from .archive import Archive
from .cache import InfiniCache, InfiniLayer


def merged(caches: Sequence[InfiniCache]) -> InfiniCache:
    """A cache with the rows of all caches, one after the other, in tensors of its own. Continue it
    with the new tokens of every row and a mask of these alone, for the rows have passed different
    numbers of columns; where one has an archive, all need one of this kind.

    Args:
        caches: of one model, all of whose layers have a memory; each has read something. They are
            not changed.

    Raises:
        ValueError: there are none, or one of them is otherwise; says which, and why.
    """
    if not caches:
        raise ValueError("caches has none: give one at least.")
    first = caches[0]
    for number, cache in enumerate(caches, 1):
        first.check_same_model(cache)
        cache.check_finished()
        if not all(isinstance(layer, InfiniLayer) for layer in cache.layers):
            raise ValueError(
                "the keys and values of layers without a memory grow with each row's text, and "
                "cannot be merged: patch all layers of the model."
            )
        if cache.state is None:
            raise ValueError(f"cache {number} has read nothing yet: have it read a token first.")
        if cache.archived != first.archived:
            raise ValueError(
                f"cache 1 has archive={first.archived!r}, and cache {number} {cache.archived!r}: "
                "set cache.archive = None in copies of all, or read with one kind of archive."
            )
    each_layer = zip(*(cache.layers for cache in caches), strict=True)
    layers = [_joined([layer.state for layer in layers]) for layers in each_layer]
    names = set.intersection(*(set(cache.text) for cache in caches))
    text = {name: torch.cat([cache.text[name] for cache in caches]) for name in sorted(names)}
    archives = [cache.archive for cache in caches if cache.archive is not None]
    archive = Archive([row for each in archives for row in each.rows()]) if archives else None
    columns = max(cache.get_seq_length() for cache in caches)
    return _cache_like(first, layers, columns, text, archive)


def row_of(cache: InfiniCache, row: int) -> InfiniCache:
    """A cache of this one row of a batch, by its number, in tensors of its own; nothing else of
    `cache` is copied. ValueError where there is no such row."""
    if not 0 <= row < cache.batch_size:
        raise ValueError(f"row must be one of the {max(0, cache.batch_size)} rows; got {row}.")

    def own(tensor: Tensor) -> Tensor:
        return tensor[row : row + 1].clone()

    layers = [layer.state.map(own) for layer in cache.layers]
    text = {name: own(tensor) for name, tensor in cache.text.items()}
    archive = None if cache.archive is None else cache.archive.chosen([row])
    return _cache_like(cache, layers, cache.get_seq_length(), text, archive)


def _cache_like(
    cache: InfiniCache,
    states: Sequence[InfiniState],
    columns: int,
    text: dict[str, Tensor],
    archive: Archive | None,
) -> InfiniCache:
    """A cache of the same model with these states."""
    made: Any = InfiniCache(cache._config)
    made._model, made._sample, made._dtype = cache._model, cache._sample, cache._dtype
    made.text, made.archive = text, archive
    for layer, state in zip(made.layers, states, strict=True):
        layer.advance(state, columns)
    return made


def _joined(states: Sequence[Any]) -> InfiniState:
    """One layer's states of several caches as one; a row without skipped tokens has a mask of
    none."""
    parts = [state.tensors() for state in states]
    if any("local_skipped" in part for part in parts):
        for part in parts:
            if "local_skipped" not in part:
                window = part["local_key"]
                size = len(window), window.shape[2]
                part["local_skipped"] = torch.zeros(size, dtype=torch.bool, device=window.device)
    return states[0].having(
        **{name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    )
