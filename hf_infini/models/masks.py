"""The masks of the layers that keep their own attention beside those with a memory."""

import torch
from torch import Tensor

from ..cache.cache import InfiniCache, PendingStates
from ..ops.layout.base import Layout
from ..options import layer_kinds


def kept_layers_masks(
    config, layout: Layout, cache: InfiniCache | None, states: PendingStates | None, dtype: torch.dtype
) -> dict[str, Tensor | None]:
    """The masks of the layers without a memory, by the type of layer: `[batch or 1, 1, tokens, keys]`, in the form that the
    model's attention implementation takes. There is such a layer.

    Args:
        states: of the call; they get the documents of its columns.
        dtype: of masks that are added to scores.
    """
    tokens, device = layout.positions.shape[1], layout.tokens_seen.device
    kinds = layer_kinds(config)
    kept = {kind for layer, kind in enumerate(kinds) if layer not in config.infini_layers}
    masks: dict[str, Tensor | None] = {}
    past = 0 if cache is None else cache.get_seq_length()
    full, documents = full_attention_mask(layout, tokens, past, None if states is None else states.documents)
    if states is not None:
        states.documents = documents
    for kind in kept:
        mask = full
        if kind != "full_attention":
            columns = torch.arange(past + tokens, device=device)
            numbers = columns if documents is None else _numbers(documents)
            query, key = numbers[..., past:, None], numbers[..., None, :]
            if kind == "sliding_attention":
                near = columns[past:, None] - columns < config.sliding_window
            else:
                near = query // config.attention_chunk_size == key // config.attention_chunk_size
            mask = (columns <= columns[past:, None]) & near if mask is None else mask & near
            layer = next(layer for layer, other in enumerate(kinds) if other == kind and layer not in config.infini_layers)
            if cache is not None:
                keys, offset = cache.get_mask_sizes(tokens, layer)
                mask = mask[..., offset : offset + keys]
            mask = mask[None, None] if mask.dim() == 2 else mask
        masks[kind] = mask
    if config._attn_implementation != "eager":
        return masks
    for kind in kept:
        mask = masks[kind]
        if mask is None:
            mask = torch.ones(tokens, past + tokens, dtype=torch.bool, device=device).tril(past)[None, None]
        masks[kind] = torch.zeros(mask.shape, dtype=dtype, device=device).masked_fill(~mask, torch.finfo(dtype).min)
    return masks


def full_attention_mask(
    layout: Layout, tokens: int, past: int, documents: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """The mask of the layers that keep full attention: causal, inside the document, without padding.

    Args:
        layout: of the new `tokens`; `past` columns came before.
        documents: `[batch, past]`, number of each past column's document, −1 for padding; `None`: all one document.

    Returns:
        `[batch or 1, 1, tokens, past + tokens]` bool, True = visible, or `None` where the kernel's own causal mask says the
        same; and the documents with the new columns.
    """
    device = layout.tokens_seen.device
    real, restart = layout.real, layout.restart
    columns = torch.arange(past + tokens, device=device)
    causal = columns <= torch.arange(past, past + tokens, device=device)[:, None]
    if documents is None and real is None:
        return (None if past == 0 or tokens == 1 else causal[None, None]), None
    batch = layout.tokens_seen.shape[0]
    old = torch.zeros(batch, past, dtype=torch.long, device=device) if documents is None else documents
    current = old.amax(1, keepdim=True).clamp(min=0) if past else old.new_zeros(batch, 1)
    new = current.expand(batch, tokens) if restart is None else current + restart.cumsum(1)
    new = new if real is None else torch.where(real, new, -1)
    documents = torch.cat([old, new], 1)
    mask = causal & (new.unsqueeze(2) == documents.unsqueeze(1))
    # Padding sees itself, because a row of the softmax needs something to see.
    own = columns == torch.arange(past, past + tokens, device=device)[:, None]
    return (mask | own).unsqueeze(1), documents


def _numbers(documents: Tensor) -> Tensor:
    """`[batch, 1, columns]`: the number of each column's token within its document; `documents`: `[batch, columns]`, −1 for
    padding."""
    real = documents >= 0
    counted = real.cumsum(1)
    begins = real & (documents != torch.nn.functional.pad(documents.cummax(1).values[:, :-1], (1, 0), value=-1))
    return (counted - torch.where(begins, counted, 0).cummax(1).values).unsqueeze(1)
