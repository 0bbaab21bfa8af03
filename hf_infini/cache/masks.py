"""Masks of what a cache has read, and which ids of a call are new."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .cache import ReadText


def check_past(text: "ReadText", attention_mask: Tensor) -> None:
    """ValueError where a mask `[rows, columns]` of what has been read has another number of real tokens in a row; in a
    graph of torch.compile a RuntimeError."""
    given = (attention_mask != 0).sum(1)
    counted = _real_of(text, len(attention_mask)).to(given.device)
    if torch.compiler.is_compiling():
        torch._assert_async((given == counted).all(), "the attention_mask disagrees with what the cache has read.")
    elif not torch.equal(given, counted):
        row = int((given != counted).nonzero()[0])
        raise ValueError(
            f"row {row} of attention_mask has {int(given[row])} real tokens (1) among the {attention_mask.shape[1]} "
            f"columns that the cache has passed, but the cache has read {int(counted[row])} of them as real. Mask the "
            "padding; what generate() has appended after the end of a row is text to the cache."
        )


def mask_before(text: "ReadText", attention_mask: Tensor, columns: int) -> Tensor:
    """`[rows, tokens]` of new tokens, with a mask of what has been read before them: `[rows, columns + tokens]`.

    A row's real tokens are counted and not looked at, so they are put together at the end.
    """
    real = _real_of(text, len(attention_mask)).to(attention_mask.device)
    past = torch.arange(columns, device=real.device) >= columns - real.unsqueeze(1)
    return torch.cat([past.to(attention_mask), attention_mask], 1)


def mask_of_ids(text: "ReadText", input_ids: Tensor, attention_mask: Tensor, columns: int) -> Tensor:
    """The mask with which `generate()` reads of these ids what is new, where nobody has said what is.

    It takes ids and a mask of the same width for a whole text and reads only the end of it, what goes beyond the
    cache. So new ids need a wider mask, and which ids are new is seen by what the cache has read.

    Args:
        input_ids: `[batch, tokens]`, of which the cache may have several rows each (beams).
        attention_mask: `[batch, tokens]`; a wider one says what is new, and is returned as it is.
        columns: that the cache has passed.

    Returns:
        The mask itself for a whole text; for ids that are all new, no more of them than the cache has read,
        [`InfiniCache.attention_mask`] of it.

    Raises:
        ValueError: nothing is new in a whole text, the ids are more than the cache has read and begin differently, or
            the mask of what has been read is another.
    """
    tokens = input_ids.shape[1]
    if text.real is None:
        return attention_mask
    if attention_mask.shape[1] == tokens:
        whole = tokens >= columns and text.begins(input_ids[:, :columns])
        if not whole and tokens <= columns:
            return mask_before(text, attention_mask, columns)
        if whole == (tokens == columns):
            found = f"do not begin with the {columns} that the cache has read"
            raise ValueError(
                f"these {tokens} ids {'are what the cache has read' if whole else found}: pass the whole text with new "
                "ids after it. If all of them are new, pass attention_mask=cache.attention_mask(mask), mask being "
                "[batch, tokens] with 1 for real tokens."
            )
    check_past(text, attention_mask[:, :columns])
    return attention_mask


def _real_of(text: "ReadText", rows: int) -> Tensor:
    """`real` for so many rows, of which each may have several equal ones here (beams)."""
    if text.real is None:
        raise ValueError("nothing has been read yet, of which rows could be chosen.")
    return text.real[:: max(1, len(text.real) // rows)]
