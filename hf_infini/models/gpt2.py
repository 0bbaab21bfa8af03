"""What is particular to GPT-2 among the decoders with Infini-attention: its positions, and how it
is called."""

from typing import Literal

import torch
from torch import Tensor, nn
from transformers import GPT2Config

from ..cache.cache import InfiniCache
from ..compat.execution_device import device_of
from ..compat.hub_code import carry_code
from ..ops.positions import rotation
from ..ops.state import Layout
from .base import InfiniModelMixin, check_positions, counted_positions
from .option_checks import InfiniConfigMixin, checked


@checked
class InfiniGPT2Config(InfiniConfigMixin, GPT2Config):
    """Configuration of [`InfiniGPT2LMHeadModel`]: all of `GPT2Config`, all of [`MemoryOptions`],
    and

    Args:
        position_encoding (`str`, *optional*, defaults to `"learned"`):
            How the model sees positions. `"learned"`: an embedding of the position in the document,
            up to `n_positions`, as GPT-2. `"segment"`: an embedding of the position within the
            segment, so that contexts have no limit. `"rope"`: no embedding; queries and keys of the
            window are rotated by position (Su et al. 2021), so that distances count, contexts have
            no limit, and the memory carries no position. The last is for models trained with it: a
            pretrained GPT-2 loses its position embedding. The head width must be even.
    """

    model_type = "infini_gpt2"
    own_class = GPT2Config

    position_encoding: Literal["learned", "segment", "rope"] = "learned"

    def validate_memory_options(self):
        super().validate_memory_options()
        if self.position_encoding == "segment" and self.window.segment_length > self.n_positions:
            raise ValueError(
                "position_encoding='segment' needs an embedding for every place in a segment: "
                f"segment_length={self.segment_length} is more than n_positions={self.n_positions}."
            )


carry_code("models.families", AutoConfig=InfiniGPT2Config)


class NoPositions(nn.Module):
    """In the place of GPT-2's position embedding where there is none: adds nothing for
    `position_ids` `[batch, tokens]`."""

    def forward(self, position_ids: Tensor) -> Tensor:
        return torch.zeros((), device=position_ids.device)  # 0-dim, so addition keeps the dtype


class InfiniGPT2ModelMixin(InfiniModelMixin):
    """[`InfiniModelMixin`] for `GPT2Model`, with its positions."""

    def set_positions(self) -> None:
        if self.config.position_encoding == "rope":
            self.wpe = NoPositions()

    def rotary_tables(
        self, places: int, dtype=None, device=None
    ) -> dict[str | None, tuple[Tensor, ...]]:
        if self.config.position_encoding != "rope":
            return {}
        numbers = torch.arange(
            self.config.places, device=device or device_of(self.get_input_embeddings())
        )
        return {
            None: rotation(numbers, self.config.n_embd // self.config.n_head, dtype or self.dtype)
        }

    def own_positions(
        self, layout: Layout, position_ids: Tensor | None, cache: InfiniCache | None
    ) -> Tensor:
        if self.config.position_encoding == "segment":
            return layout.positions % self.config.segment_length
        positions = counted_positions(layout, cache) if position_ids is None else position_ids
        if self.config.position_encoding == "learned":
            remedy = "patch it with position_encoding='segment', or train one"
            check_positions(
                positions, self.config.n_positions, remedy, position_ids is None and cache is None
            )
        return positions
