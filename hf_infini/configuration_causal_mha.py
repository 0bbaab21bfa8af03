"""The configuration of the from-scratch model: its sizes, and what its heads see, score and know of positions."""

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN

from .configuration_common import OptionsMixin
from .hub_code import HubConfigMixin, carry_code

CHOICES = {
    "attention": ("global", "local", "infini", "none"),
    "score": ("scaled_dot", "dot", "general", "additive"),
    "position_encoding": ("learned", "sinusoidal", "relative_key", "t5", "alibi", "rope", "none"),
    "update_rule": ("linear", "delta"),
}
# What a CausalMultiHeadAttention used alone may be told, beyond its sizes.
ATTENTION_OPTIONS = (
    "attention",
    "score",
    "position_encoding",
    "max_distance",
    "num_buckets",
    "rope_theta",
    "sliding_window",
    "segment_length",
    "local_segments",
    "update_rule",
    "gate_init",
)
RELATIVE = ("relative_key", "t5", "alibi")  # depend on the distance of each query and key
IN_EMBEDDING = ("learned", "sinusoidal")  # added to the token embeddings; the others act inside the attention
# Segments and memory work on products of queries and keys: what adds to a score, or is none, has no place there.
INFINI_SCORES = ("scaled_dot", "dot", "general")
INFINI_POSITIONS = ("learned", "sinusoidal", "rope", "none")


@strict
class CausalMHAConfig(OptionsMixin, HubConfigMixin, PreTrainedConfig):
    """Configuration of [`CausalMHAForCausalLM`]. Sizes are named as GPT-2's; `hidden_size` and so on work too.

    Args:
        vocab_size (`int`, *optional*, defaults to 50257):
            Tokens in the vocabulary.
        n_positions (`int`, *optional*, defaults to 1024):
            Tokens of context that the model is trained on; `"learned"` positions end there, the others do not.
        n_embd (`int`, *optional*, defaults to 768):
            Width of the hidden state.
        n_layer (`int`, *optional*, defaults to 12):
            Decoder blocks.
        n_head (`int`, *optional*, defaults to 12):
            Heads per block; must divide `n_embd`.
        n_inner (`int`, *optional*):
            Width inside the feed-forward; `None` is 4 × `n_embd`.
        activation_function (`str`, *optional*, defaults to `"gelu"`):
            Of the feed-forward, a name that transformers knows.
        dropout (`float`, *optional*, defaults to 0.0):
            Probability of dropping attention weights, embeddings, and what a block adds to the hidden state.
        qkv_bias (`bool`, *optional*, defaults to `False`):
            Whether `W_query`, `W_key` and `W_value` have a bias.
        attention (`str`, *optional*, defaults to `"global"`):
            What a token sees: `"global"`, itself and everything before; `"local"`, the last `sliding_window` tokens;
            `"infini"`, segments and a compressive memory; `"none"`, nothing: the block keeps only its feed-forward.
        score (`str`, *optional*, defaults to `"scaled_dot"`):
            How a query and a key are compared: `"scaled_dot"`, `"dot"`, `"general"` or `"additive"` (see scores.py).
        position_encoding (`str`, *optional*, defaults to `"learned"`):
            `"learned"`, `"sinusoidal"`, `"relative_key"`, `"t5"`, `"alibi"`, `"rope"` or `"none"` (see positions.py).
        max_distance (`int`, *optional*, defaults to 128):
            `"relative_key"`: the distance in tokens beyond which all are alike; `"t5"`: where its last bucket begins.
        num_buckets (`int`, *optional*, defaults to 32):
            `"t5"`: buckets of distances.
        rope_theta (`float`, *optional*, defaults to 10000.0):
            `"rope"`: base of the wavelengths.
        sliding_window (`int`, *optional*):
            `"local"`: tokens seen, the token itself included. Required there, refused elsewhere.
        segment_length (`int`, *optional*):
            `"infini"`: tokens in a segment, L. Required there, refused elsewhere.
        local_segments (`int`, *optional*, defaults to 0):
            `"infini"`: earlier segments that the softmax still sees in full.
        update_rule (`str`, *optional*, defaults to `"linear"`):
            `"infini"`: how the memory is written, `"linear"` or `"delta"`.
        gate_init (`float`, *optional*, defaults to 0.0):
            `"infini"`: first value of every head's gate logit β.
        mask_special_tokens (`bool`, *optional*, defaults to `True`):
            `"infini"`: tokens with the configuration's bos, eos or pad id are not written into the memory.
        layer_norm_epsilon (`float`, *optional*, defaults to 1e-5):
            Added to the variance in a layer norm.
        initializer_range (`float`, *optional*, defaults to 0.02):
            Standard deviation of the matrices at the start; those that end a residual branch are √(2 · n_layer) smaller.
        tie_word_embeddings (`bool`, *optional*, defaults to `False`):
            Whether the output head is the token embedding.

    Raises:
        StrictDataclassFieldValidationError: a value of the wrong type, naming the option.
        StrictDataclassClassValidationError: a value that is not allowed, or options that do not go together; the message
            says what was given and what is allowed.
        ValueError: an attribute that would be ignored though it looks like an option: one of stock decoders that this model
            has not (`rope_scaling`), or nearly the name of one of these. Attributes of other names are kept.
    """

    model_type = "causal_mha"
    keys_to_ignore_at_inference = ["past_key_values"]
    attribute_map = {
        "hidden_size": "n_embd",
        "intermediate_size": "n_inner",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    }

    vocab_size: int = 50257
    n_positions: int = 1024
    n_embd: int = 768
    n_layer: int = 12
    n_head: int = 12
    n_inner: int | None = None
    activation_function: str = "gelu"
    dropout: float | int = 0.0
    qkv_bias: bool = False
    attention: str = "global"
    score: str = "scaled_dot"
    position_encoding: str = "learned"
    max_distance: int = 128
    num_buckets: int = 32
    rope_theta: float | int = 10000.0
    sliding_window: int | None = None
    segment_length: int | None = None
    local_segments: int = 0
    update_rule: str = "linear"
    gate_init: float | int = 0.0
    mask_special_tokens: bool = True
    layer_norm_epsilon: float = 1e-5
    initializer_range: float = 0.02
    use_cache: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    tie_word_embeddings: bool = False

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.n_embd // self.n_head

    @property
    def infini_layers(self) -> list[int]:
        """Numbers of the layers with a compressive memory: all or none."""
        return list(range(self.n_layer)) if self.attention == "infini" else []

    @property
    def tokens_per_segment(self) -> int | None:
        """L, as the other infini configurations call it."""
        return self.segment_length

    def validate_causal_mha(self):
        """Run by the base class after every construction."""
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}; got {getattr(self, name)!r}.")
        for name in ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head", "max_distance", "num_buckets"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1; got {getattr(self, name)}.")
        if self.n_embd % self.n_head:
            raise ValueError(f"n_head={self.n_head} must divide n_embd={self.n_embd}: every head is as wide as the others.")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be at least 0 and below 1; got {self.dropout}.")
        if self.activation_function not in ACT2FN:
            raise ValueError(f"activation_function must be one of {', '.join(ACT2FN)}; got {self.activation_function!r}.")
        self._validate_reach()
        self._validate_positions()

    def _validate_reach(self):
        """`sliding_window` and `segment_length` come with their kind of attention, and only with it."""
        for name, kind, least in (("sliding_window", "local", 1), ("segment_length", "infini", 1)):
            value = getattr(self, name)
            if self.attention == kind and (value is None or value < least):
                raise ValueError(f"attention={kind!r} needs a {name} of {least} token or more; got {value}.")
            if self.attention != kind and value is not None:
                raise ValueError(
                    f"{name}={value} belongs to attention={kind!r} and does nothing with attention={self.attention!r}: "
                    "leave it out."
                )
        if self.local_segments < 0:
            raise ValueError(f"local_segments must be 0 or more; got {self.local_segments}.")

    def _validate_positions(self):
        if self.position_encoding == "rope" and self.head_dim % 2:
            raise ValueError(
                f"position_encoding='rope' turns pairs of numbers: the head width n_embd / n_head must be even; got "
                f"{self.n_embd} / {self.n_head} = {self.head_dim}."
            )
        if self.position_encoding == "sinusoidal" and self.n_embd % 2:
            raise ValueError(f"position_encoding='sinusoidal' needs an even n_embd; got {self.n_embd}.")
        if self.position_encoding == "t5" and not 2 <= self.num_buckets < 2 * self.max_distance:
            raise ValueError(
                "position_encoding='t5' needs num_buckets ≥ 2 and max_distance > num_buckets / 2; got "
                f"num_buckets={self.num_buckets}, max_distance={self.max_distance}."
            )
        if self.attention == "infini":
            for name, allowed in (("score", INFINI_SCORES), ("position_encoding", INFINI_POSITIONS)):
                if getattr(self, name) not in allowed:
                    raise ValueError(
                        f"attention='infini' goes with {name} {', '.join(allowed)}; got {getattr(self, name)!r}, which is "
                        "no product of a query and a key, and those are all that segments and memory work on."
                    )
        if self.attention == "none" and self.position_encoding not in (*IN_EMBEDDING, "none"):
            raise ValueError(
                f"position_encoding={self.position_encoding!r} acts inside the attention, and attention='none' has none: "
                f"choose {', '.join((*IN_EMBEDDING, 'none'))}."
            )


carry_code("modeling_causal_mha", AutoConfig=CausalMHAConfig)
