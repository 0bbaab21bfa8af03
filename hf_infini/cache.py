"""The cache of `generate()`: one [`InfiniState`] for each layer with memory, so its bytes do not grow with the context."""

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer

from .segments import SegmentLayout
from .state import InfiniState
from .steps import StepLayout


class InfiniLayer(CacheLayerMixin):
    """One layer's state between two calls.

    Attributes:
        state: [`InfiniState`], or `None` before the first call.
        columns: tokens passed so far, padding included (what `generate` counts in).
    """

    def __init__(self):
        super().__init__()
        self.state: InfiniState | None = None
        self.columns = 0

    def advance(self, state: InfiniState, columns: int) -> None:
        """Takes the state after a call of `columns` tokens."""
        self.state = state
        self.columns += columns
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the state is made by the first call."""

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs):
        raise TypeError("an InfiniLayer keeps no keys and values to attend to; the attention calls `advance`.")

    def get_seq_length(self) -> int:
        return self.columns

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.columns + query_length, 0

    def reset(self) -> None:
        self.__init__()

    def _map(self, function) -> None:
        if self.state is not None:
            self.state = self.state.map_rows(function)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._map(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._map(lambda tensor: tensor.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._map(lambda tensor: tensor[indices])

    def crop(self, tokens_to_remove: int) -> None:
        raise ValueError(
            "a compressive memory cannot be cropped: what was written into it cannot be taken out again. "
            "Keep a copy of the cache (copy.deepcopy) from before the tokens you may want to undo."
        )

    def offload(self) -> None:
        if self.state is not None:
            self.device = self.state.memory.device
            self._map(lambda tensor: tensor.to("cpu"))

    def prefetch(self) -> None:
        if self.state is not None:
            self._map(lambda tensor: tensor.to(getattr(self, "device", tensor.device)))


class InfiniCache(Cache):
    """The cache of an [`InfiniGPT2LMHeadModel`]: bounded for layers with memory, growing for those with full attention.

    `generate()` and `model(..., use_cache=True)` make it by themselves; pass it back to go on reading where it stands.

    Args:
        config: the model's [`InfiniGPT2Config`].
    """

    def __init__(self, config):
        bounded = set(config.infini_layers)
        super().__init__(layers=[InfiniLayer() if i in bounded else DynamicLayer() for i in range(config.n_layer)])
        self.documents: Tensor | None = None  # see full_attention_mask

    @property
    def state(self) -> InfiniState | None:
        """The state of the first layer with memory: its tokens_seen and positions hold for all."""
        return next(layer.state for layer in self.layers if isinstance(layer, InfiniLayer))

    def nbytes(self) -> int:
        """Bytes that the cache holds now."""
        total = 0
        for layer in self.layers:
            if isinstance(layer, InfiniLayer):
                total += layer.state.nbytes() if layer.state is not None else 0
            elif layer.is_initialized:
                total += layer.keys.nbytes + layer.values.nbytes
        return total

    def full_attention_mask(self, layout: SegmentLayout | StepLayout, tokens: int, past: int) -> Tensor | None:
        """See [`full_attention_mask`]; remembers the documents of the new columns."""
        mask, self.documents = full_attention_mask(layout, tokens, past, self.documents)
        return mask

    def crop(self, tokens_to_remove: int) -> None:
        next(layer for layer in self.layers if isinstance(layer, InfiniLayer)).crop(tokens_to_remove)

    def reset(self) -> None:
        for layer in self.layers:
            layer.reset() if isinstance(layer, InfiniLayer) else layer.__init__()
        self.documents = None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        self._map_documents(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self._map_documents(lambda tensor: tensor.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self._map_documents(lambda tensor: tensor[indices])

    def _map_documents(self, function) -> None:
        if self.documents is not None:
            self.documents = function(self.documents)


def full_attention_mask(
    layout: SegmentLayout | StepLayout, tokens: int, past: int, documents: Tensor | None
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
    real, restart = getattr(layout, "real", None), getattr(layout, "restart", None)
    columns = torch.arange(past + tokens, device=device)
    causal = columns <= torch.arange(past, past + tokens, device=device)[:, None]
    if documents is None and real is None:
        return (None if past == 0 or tokens == 1 else causal[None, None]), None
    batch = layout.tokens_seen.shape[0]
    old = torch.zeros(batch, past, dtype=torch.long, device=device) if documents is None else documents
    current = old.amax(1, keepdim=True).clamp(min=0) if past else old.new_zeros(batch, 1)
    new = current.expand(batch, tokens) if real is None else torch.where(real, current + restart.cumsum(1), -1)
    documents = torch.cat([old, new], 1)
    mask = causal & (new.unsqueeze(2) == documents.unsqueeze(1))
    # Padding sees itself, because a row of the softmax needs something to see.
    own = columns == torch.arange(past, past + tokens, device=device)[:, None]
    return (mask | own).unsqueeze(1), documents
