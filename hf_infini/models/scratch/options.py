"""The options of the model from scratch beside those of a memory: what its heads see, their score
and positions.

Only the standard library is imported here: a command line reads the options without waiting for
torch.
"""

from dataclasses import dataclass, field
from typing import Literal

RELATIVE = ("relative_key", "t5", "alibi")  # depend on the distance of each query and key
# added to the token embeddings; the others act inside the attention
IN_EMBEDDING = ("learned", "sinusoidal")


@dataclass(init=False, repr=False, eq=False)
class ScratchOptions:
    """What a configuration says of a model from scratch, beside its sizes; comes before
    `PreTrainedConfig` among the bases.

    Args:
        attention (`str`, *optional*, defaults to `"global"`):
            What a token sees: `"global"`, itself and everything before; `"local"`, the last
            `sliding_window` tokens; `"infini"`, segments and a compressive memory; `"none"`,
            nothing: the block keeps only its feed-forward.
        score (`str`, *optional*, defaults to `"scaled_dot"`):
            How a query and a key are compared: `"scaled_dot"`, `"dot"`, `"general"` or `"additive"`
                (see scores.py).
        position_encoding (`str`, *optional*, defaults to `"learned"`):
            `"learned"`, `"sinusoidal"`, `"relative_key"`, `"t5"`, `"alibi"`, `"rope"` or `"none"`
            (see positions.py).
        max_distance (`int`, *optional*, defaults to 128):
            `"relative_key"`: the distance in tokens beyond which all are alike; `"t5"`: where its
            last bucket begins.
        num_buckets (`int`, *optional*, defaults to 32):
            `"t5"`: buckets of distances.
        rope_theta (`float`, *optional*, defaults to 10000.0):
            `"rope"`: base of the wavelengths.
        sliding_window (`int`, *optional*):
            `"local"`: tokens seen, the token itself included. Required there, refused elsewhere.
        head_dim (`int`, *optional*):
            Width of a head's queries and keys; `None` is `n_embd / n_head`.
        value_dim (`int`, *optional*):
            Width of a head's values; `None`: as wide as its keys. A memory holds `head_dim *
            value_dim` numbers a head.
        qkv_bias (`bool`, *optional*, defaults to `False`):
            Whether `W_query`, `W_key` and `W_value` have a bias.
        n_inner (`int`, *optional*):
            Width inside the feed-forward; `None` is 4 × `n_embd`.
        activation_function (`str`, *optional*, defaults to `"gelu"`):
            Activation of the feed-forward, by its name in transformers.
        initializer_range (`float`, *optional*, defaults to 0.02):
            Standard deviation of the matrices at the start; those that end a residual branch are
            √(2 · n_layer) smaller.
        tie_word_embeddings (`bool`, *optional*, defaults to `False`):
            Whether the output head is the token embedding.
    """

    attention: Literal["global", "local", "infini", "none"] = "global"
    score: Literal["scaled_dot", "dot", "general", "additive"] = "scaled_dot"
    position_encoding: Literal[
        "learned", "sinusoidal", "relative_key", "t5", "alibi", "rope", "none"
    ] = "learned"
    # limits as in options.py
    max_distance: int = field(default=128, metadata={"at_least": 1, "at_most": 2**20})
    num_buckets: int = field(default=32, metadata={"at_least": 1, "at_most": 2**20})
    rope_theta: float | int = field(default=10000.0, metadata={"greater_than": 0})
    sliding_window: int | None = field(default=None, metadata={"at_least": 1})
    head_dim: int | None = field(default=None, metadata={"at_least": 1})
    value_dim: int | None = field(default=None, metadata={"at_least": 1})
    qkv_bias: bool = False
    n_inner: int | None = field(default=None, metadata={"at_least": 1})
    activation_function: str = "gelu"
    initializer_range: float = field(default=0.02, metadata={"at_least": 0})
    tie_word_embeddings: bool = False
