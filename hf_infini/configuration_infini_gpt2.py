"""The configuration of GPT-2 with Infini-attention: GPT-2's own options, and those of the memory, checked here alone."""

from huggingface_hub.dataclasses import strict
from transformers import GPT2Config

from .configuration_common import OptionsMixin
from .hub_code import HubConfigMixin, carry_code

OPTIONS = (
    "segment_length",
    "n_segments",
    "update_rule",
    "feature_map",
    "denominator",
    "local_segments",
    "gate_init",
    "memory_init",
    "layers",
    "position_encoding",
    "memory_conv",
    "memory_write",
    "mask_special_tokens",
)
CHOICES = {
    "update_rule": ("linear", "delta"),
    "feature_map": ("elu", "exp"),
    "denominator": ("separate", "shared"),
    "memory_init": ("zeros", "learned", "noise"),
    "position_encoding": ("learned", "segment", "rope"),
    "memory_write": ("equal", "learned"),
}


@strict
class InfiniGPT2Config(OptionsMixin, HubConfigMixin, GPT2Config):
    """Configuration of [`InfiniGPT2LMHeadModel`]: all of `GPT2Config`, and

    Args:
        segment_length (`int`, *optional*):
            Tokens in a segment, L. Give this or `n_segments`, one of the two.
        n_segments (`int`, *optional*):
            Segments in a context of `n_positions` tokens, which it must divide: L = n_positions / n_segments.
        update_rule (`str`, *optional*, defaults to `"linear"`):
            How a segment is written into the memory: `"linear"` adds its values, `"delta"` its values less what the memory
            already answers to their keys (which does not overwrite: a key that comes again and again reads half its value).
        feature_map (`str`, *optional*, defaults to `"elu"`):
            What makes positive features of the memory's queries and keys: `"elu"`, ELU + 1, as in the paper; or `"exp"`,
            with which one token can stand out against many more.
        denominator (`str`, *optional*, defaults to `"separate"`):
            `"separate"`: window and memory each have their own, and the gate alone sets the memory's share, as in the
            paper; `"shared"`: one softmax over both, in which each token of the memory weighs e^β σ(q)·σ(k) / head_dim, so
            that the share also depends on what a token finds. The window's softmax is then written out, without a fused
            kernel.
        local_segments (`int`, *optional*, defaults to 0):
            Earlier segments that the softmax attention still sees in full; 0 is the paper.
        gate_init (`float`, *optional*, defaults to 0.0):
            First value of every head's gate logit β; the memory's share of the output is sigmoid(β), unless window and
            memory share a normaliser.
        memory_init (`str`, *optional*, defaults to `"zeros"`):
            What a document's memory starts from: `"zeros"` (local attention alone until the first segment is written),
            `"learned"` (parameters of each layer), or `"noise"` (a normaliser of 1e-10 times uniform noise: the study).
        layers (`list[int]`, *optional*):
            Layers, counted from 0, that get Infini-attention; the others keep full attention, and their cache grows with the
            context. `None` is all of them.
        position_encoding (`str`, *optional*, defaults to `"learned"`):
            How tokens know where they stand. `"learned"`: an embedding of the position in the document, up to
            `n_positions`, as GPT-2. `"segment"`: an embedding of the position within the segment, so that contexts have no
            limit. `"rope"`: no embedding; what the window compares is turned by the position (Su et al. 2021), so that
            distances count, contexts have no limit, and the memory carries no position. The last is for models trained with
            it: a pretrained GPT-2 loses its position embedding. The head width must be even.
        memory_conv (`int`, *optional*, defaults to 0):
            Taps (the token itself and those before it) of a depthwise causal convolution, added to the input of the layer's
            projections: what followed a token can then be recalled by that token. 0 is none. It starts at zero, so that a
            swapped model is unchanged.
        memory_write (`str`, *optional*, defaults to `"equal"`):
            What a token weighs in the memory: `"equal"`, all alike; or `"learned"`, σ(k) is multiplied by e^(w·x), with x
            the input of the layer's projections and a w for each head that starts at zero. Text that nobody will ask for
            can then stay out, so that what counts is still found among much of it. Needs `feature_map="exp"`, and a
            second window of keys in the cache.
        mask_special_tokens (`bool`, *optional*, defaults to `True`):
            Tokens with the configuration's bos, eos or pad id are seen inside the window but not written into the memory.

    Raises:
        StrictDataclassFieldValidationError: a value of the wrong type, naming the option.
        StrictDataclassClassValidationError: a value that is not allowed, or options that do not go together; the message
            says what was given and what is allowed.
        ValueError: an attribute that would be ignored though it looks like an option: one of stock decoders that this model
            has not (`rope_scaling`), or nearly the name of one of these. Attributes of other names are kept.
    """

    model_type = "infini_gpt2"
    undeclared_options = ("classifier_dropout", "hidden_dropout")  # which GPT2ForTokenClassification looks for
    has_no_defaults_at_init = True  # transformers 5.17 would otherwise build one without options to compare with

    segment_length: int | None = None
    n_segments: int | None = None
    update_rule: str = "linear"
    feature_map: str = "elu"
    denominator: str = "separate"
    local_segments: int = 0
    gate_init: float | int = 0.0
    memory_init: str = "zeros"
    layers: list[int] | None = None
    position_encoding: str = "learned"
    memory_conv: int = 0
    memory_write: str = "equal"
    mask_special_tokens: bool = True

    @classmethod
    def from_dict(cls, config_dict, **kwargs):
        """As usual, but a segment's length in `kwargs` takes the place of that in the file, whichever way it is given."""
        if "segment_length" in kwargs or "n_segments" in kwargs:
            config_dict = {k: v for k, v in config_dict.items() if k not in ("segment_length", "n_segments")}
        return super().from_dict(config_dict, **kwargs)

    @property
    def tokens_per_segment(self) -> int:
        """L, from whichever of `segment_length` and `n_segments` was given."""
        return self.n_positions // self.n_segments if self.segment_length is None else self.segment_length

    @property
    def infini_layers(self) -> list[int]:
        """Numbers of the layers with Infini-attention, in order."""
        return list(range(self.n_layer)) if self.layers is None else sorted(self.layers)

    def validate_infini_attention(self):
        """Run by the base class after every construction."""
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}; got {getattr(self, name)!r}.")
        if (self.segment_length is None) == (self.n_segments is None):
            raise ValueError(
                "give exactly one of segment_length (tokens in a segment) and n_segments (segments in n_positions); "
                f"got segment_length={self.segment_length}, n_segments={self.n_segments}."
            )
        if self.n_segments is not None and (self.n_segments < 1 or self.n_positions % self.n_segments):
            raise ValueError(f"n_segments must divide n_positions={self.n_positions}; got {self.n_segments}.")
        if self.segment_length is not None and self.segment_length < 1:
            raise ValueError(f"segment_length must be at least 1 token; got {self.segment_length}.")
        if self.local_segments < 0:
            raise ValueError(f"local_segments must be 0 or more; got {self.local_segments}.")
        if self.memory_conv < 0:
            raise ValueError(f"memory_conv must be 0 (none) or a number of taps; got {self.memory_conv}.")
        if self.memory_write == "learned" and self.feature_map != "exp":
            raise ValueError(
                "memory_write='learned' multiplies features by adding to their exponents: give feature_map='exp' with it; "
                f"got feature_map={self.feature_map!r}."
            )
        if self.position_encoding == "rope" and self.n_embd // self.n_head % 2:
            raise ValueError(
                f"position_encoding='rope' turns pairs of numbers: the head width n_embd / n_head must be even; got "
                f"{self.n_embd} / {self.n_head} = {self.n_embd // self.n_head}."
            )
        if self.position_encoding == "segment" and self.tokens_per_segment > self.n_positions:
            raise ValueError(
                f"position_encoding='segment' needs an embedding for every place in a segment: segment_length="
                f"{self.tokens_per_segment} is more than n_positions={self.n_positions}."
            )
        if self.layers is not None and (
            not self.layers
            or len(set(self.layers)) < len(self.layers)
            or not all(0 <= layer < self.n_layer for layer in self.layers)
        ):
            raise ValueError(
                f"layers must name some of the {self.n_layer} layers, 0 to {self.n_layer - 1}, each once, or be None "
                f"for all; got {self.layers}."
            )
        if self.add_cross_attention:
            raise ValueError("cross-attention has no segments: add_cross_attention=True is not supported.")


carry_code("modeling_infini_gpt2_heads", AutoConfig=InfiniGPT2Config)
