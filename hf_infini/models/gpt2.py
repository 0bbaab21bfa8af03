"""What is particular to GPT-2 among the decoders with Infini-attention: its positions, and how it is called."""

import torch
from torch import Tensor, nn
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention

from ..cache.cache import InfiniCache
from ..compat.cache_name import CACHE
from ..compat.execution_device import device_of
from ..layers.memory_layer import InfiniAttentionMixin, LayerConfig, rope_tables
from ..ops.layout.base import Layout
from ..ops.window import Rotary
from .base import InfiniModelMixin, check_positions, counted_positions
from .gpt2_configuration import InfiniGPT2Config


class GPT2InfiniAttention(InfiniAttentionMixin, GPT2Attention):
    """GPT-2's attention over segments, with a memory of everything before the local window.

    GPT-2 adds its positions to the hidden state, so the memory stores them too; with `position_encoding="rope"` only the
    window has positions. The layer can be called outside of a model.
    """

    own_class = GPT2Attention
    argument_names = (CACHE, "attention_mask", "encoder_hidden_states", "encoder_attention_mask")
    argument_names += ("output_attentions",)
    cache_argument = CACHE

    def __init__(self, config: InfiniGPT2Config, layer_idx: int | None = None):
        super().__init__(config, layer_idx=layer_idx)
        self.swap_in(LayerConfig(config), {}, torch.get_default_dtype())

    def window_rotary(self, tables: tuple[Tensor, ...] | None, like: Tensor) -> Rotary | None:
        if self.config.position_encoding != "rope":
            return None
        return Rotary(rope_tables(self.config.places, self.head_dim, like) if tables is None else tables)


class NoPositions(nn.Module):
    """In the place of GPT-2's position embedding where there is none."""

    def forward(self, position_ids: Tensor) -> Tensor:
        return torch.zeros((), device=position_ids.device)  # 0-dim, so addition keeps the dtype


class InfiniGPT2ModelMixin(InfiniModelMixin):
    """[`InfiniModelMixin`] for `GPT2Model`, whose rows may also be `[batch, choices, tokens]` (GPT2DoubleHeadsModel)."""

    wte: nn.Module

    def set_positions(self) -> None:
        if self.config.position_encoding == "rope":
            self.wpe = NoPositions()

    def forward(self, *args, **kwargs):
        """As [`InfiniModelMixin`].

        Raises:
            ValueError: a position beyond `n_positions` with learned positions; encoder inputs.
        """
        given = dict(zip(self.argument_names, args, strict=False)) | kwargs
        if given.get("encoder_hidden_states") is not None or given.get("encoder_attention_mask") is not None:
            raise ValueError("an infini_gpt2 model has no cross-attention: encoder inputs are not supported.")
        ids, rows = given.get("input_ids"), None
        if isinstance(ids, Tensor) and ids.dim() == 3:
            rows = ids.shape[:2]
            names = ("input_ids", "attention_mask", "token_type_ids", "position_ids", "memory_mask")
            given |= {name: given[name].flatten(0, 1) for name in names if given.get(name) is not None}
        output = super().forward(**given)
        if rows is not None:
            output.last_hidden_state = output.last_hidden_state.unflatten(0, rows)
        return output

    def rotary_tables(
        self, places: int, dtype: torch.dtype | None = None, device: torch.device | None = None
    ) -> dict[str | None, tuple[Tensor, ...]]:
        if self.config.position_encoding != "rope":
            return {}
        like = torch.empty(0, device=device or device_of(self.wte), dtype=dtype or self.dtype)
        return {None: rope_tables(self.config.places, self.config.n_embd // self.config.n_head, like)}

    def needs_a_mask(self) -> bool:
        return self.config.position_encoding == "segment"  # GPT-2 would take positions that begin again for documents

    def own_positions(self, layout: Layout, position_ids: Tensor | None, cache: InfiniCache | None) -> Tensor:
        if self.config.position_encoding == "segment":
            return layout.positions % self.config.tokens_per_segment
        positions = counted_positions(layout, cache) if position_ids is None else position_ids
        if self.config.position_encoding == "learned":
            remedy = (
                "For texts of any length train a model with position_encoding='rope', or pass position_encoding='segment' "
                "to patch_model() or from_pretrained() and fine-tune briefly; or shorten the input."
            )
            check_positions(positions, self.config.n_positions, "learned", remedy)
        return positions
