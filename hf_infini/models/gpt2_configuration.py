"""The configuration of GPT-2 with Infini-attention: options of GPT-2, of a memory, and of positions."""

from typing import Literal

from transformers import GPT2Config

from ..compat.hub_code import HubConfigMixin, carry_code
from ..options import MemoryOptions
from .option_checks import OptionsMixin, checked


@checked
class InfiniGPT2Config(MemoryOptions, OptionsMixin, HubConfigMixin, GPT2Config):
    """Configuration of [`InfiniGPT2LMHeadModel`]: all of `GPT2Config`, all of [`MemoryOptions`], and

    Args:
        position_encoding (`str`, *optional*, defaults to `"learned"`):
            How the model sees positions. `"learned"`: an embedding of the position in the document, up to
            `n_positions`, as GPT-2. `"segment"`: an embedding of the position within the segment, so that contexts have no
            limit. `"rope"`: no embedding; queries and keys of the window are rotated by position (Su et al. 2021), so that
            distances count, contexts have no limit, and the memory carries no position. The last is for models trained with
            it: a pretrained GPT-2 loses its position embedding. The head width must be even.

    Raises:
        ValueError: a value of the wrong type, one that is not allowed, or options that do not go together; the message says
            what was given and what is allowed. Or an attribute whose name is nearly that of an option of the memory; others
            are kept.
    """

    model_type = "infini_gpt2"
    own_class = GPT2Config
    has_no_defaults_at_init = True  # transformers 5.17 would otherwise build one without options to compare with

    position_encoding: Literal["learned", "segment", "rope"] = "learned"

    def validate_memory_options(self):
        """Those of every memory, and those of this model."""
        super().validate_memory_options()
        if self.position_encoding == "rope" and self.n_embd // self.n_head % 2:
            raise ValueError(
                f"position_encoding='rope' turns pairs of numbers: the head width n_embd / n_head must be even; got "
                f"{self.n_embd} / {self.n_head} = {self.n_embd // self.n_head}."
            )
        if self.position_encoding == "segment" and self.window[0] > self.n_positions:
            raise ValueError(
                f"position_encoding='segment' needs an embedding for every place in a segment: segment_length="
                f"{self.tokens_per_segment} is more than n_positions={self.n_positions}."
            )
        if self.add_cross_attention:
            raise ValueError("cross-attention has no segments: add_cross_attention=True is not supported.")


carry_code("models.families", AutoConfig=InfiniGPT2Config)
