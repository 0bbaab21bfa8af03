"""The masks of the layers that keep their own attention beside those with a memory. Those of
transformers know documents in one call without padding, and these also documents that go on from a
cache."""

import torch
from torch import Tensor
from torch.nn import functional as F

from ..cache.cache import InfiniCache
from ..ops.state import Layout
from ..options import layer_kinds


def kept_layers_masks(
    config, layout: Layout, cache: InfiniCache | None, dtype: torch.dtype, written_out: bool
) -> dict[str, Tensor | None]:
    """The masks of the layers without a memory, by the type of layer: `[batch or 1, 1, tokens,
    keys]`; `None` where the kernel's own causal mask says the same.

    Args:
        config: of the model, whose attention implementation decides the form of the
            masks.
        layout: of the call, in any window.
        cache: gets the documents of its columns and of the call's; `None`: there is none.
        dtype: of masks that are added to scores.
        written_out: whether none may be `None`.
    """
    tokens, device = layout.positions.shape[1], layout.tokens_seen.device
    past = 0 if cache is None else cache.get_seq_length()
    documents = _documents(
        layout, tokens, past, None if cache is None else cache.text.get("documents")
    )
    if cache is not None and documents is not None:
        cache.text["documents"] = documents
    kinds = layer_kinds(config)
    first = {
        kinds[layer]: layer
        for layer in reversed(range(len(kinds)))
        if layer not in config.infini_layers
    }
    eager = config._attn_implementation == "eager"
    masks: dict[str, Tensor | None] = {}
    written_out |= eager or documents is not None or past > 0 and tokens > 1
    if "full_attention" in first and not written_out:
        del first["full_attention"]
        masks["full_attention"] = None
    if not first:
        return masks  # and nothing that grows with the square of the text's length
    columns = torch.arange(past + tokens, device=device)
    queries = columns[past:, None]
    visible, numbers = columns <= queries, columns
    # padding sees itself, because a row of the softmax needs something to see
    if documents is not None:
        visible = visible & (documents[:, past:, None] == documents[:, None]) | (columns == queries)
        numbers = _numbers(documents)
    for kind, layer in first.items():
        mask = visible
        if kind == "sliding_attention":
            mask = mask & (queries - columns < config.sliding_window)
        elif kind == "chunked_attention":
            chunks = numbers // config.attention_chunk_size
            mask = mask & (chunks[..., past:, None] == chunks[..., None, :])
        if cache is not None:
            keys, offset = cache.get_mask_sizes(tokens, layer)
            mask = mask[..., offset : offset + keys]
        mask = mask.reshape(-1, 1, *mask.shape[-2:])
        if eager:
            mask = torch.zeros(mask.shape, dtype=dtype, device=device).masked_fill(
                ~mask, torch.finfo(dtype).min
            )
        masks[kind] = mask
    return masks


def _documents(layout: Layout, tokens: int, past: int, documents: Tensor | None) -> Tensor | None:
    """`[batch, past + tokens]`: each column's document, −1 for padding; `None`: all are one.
    `documents`: of the past."""
    real, restart, batch = layout.real, layout.restart, len(layout.tokens_seen)
    if documents is None and real is None:
        return None
    # a call may have failed
    old = layout.tokens_seen.new_zeros(batch, past) if documents is None else documents[:, :past]
    current = old.amax(1, keepdim=True).clamp(min=0) if past else old.new_zeros(batch, 1)
    new = current.expand(batch, tokens) if restart is None else current + restart.cumsum(1)
    return torch.cat([old, new if real is None else torch.where(real, new, -1)], 1)


def _numbers(documents: Tensor) -> Tensor:
    """`[batch, columns]`: the number of each column's token within its document."""
    real = documents >= 0
    counted = real.cumsum(1)
    begins = real & (documents != F.pad(documents.cummax(1).values[:, :-1], (1, 0), value=-1))
    return counted - torch.where(begins, counted, 0).cummax(1).values
