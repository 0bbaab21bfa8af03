"""The configuration of the from-scratch model: its sizes, and what its heads see, score and know of
positions."""

from transformers import PreTrainedConfig

from ...compat.hub_code import carry_code
from ...options import MEMORY_OPTIONS, number, refuse
from ..option_checks import InfiniConfigMixin, checked
from .options import IN_EMBEDDING, ScratchOptions

# The options of a CausalMultiHeadAttention outside of a model, beside its sizes.
ATTENTION_OPTIONS = (
    *(
        "attention",
        "score",
        "position_encoding",
        "max_distance",
        "num_buckets",
        "rope_theta",
        "sliding_window",
    ),
    *("head_dim", "value_dim"),
    *(
        name
        for name in MEMORY_OPTIONS
        if name not in ("layers", "kept_shares", "mask_special_tokens")
    ),
)
# Every option that does nothing unless another one has one of these values. What train.py learns to
# predict is its own.
NEEDS = {
    **dict.fromkeys(
        ("score", "head_dim", "value_dim", "qkv_bias"), ("attention", ("global", "local", "infini"))
    ),
    "sliding_window": ("attention", ("local",)),
    "max_distance": ("position_encoding", ("relative_key", "t5")),
    "num_buckets": ("position_encoding", ("t5",)),
    "rope_theta": ("position_encoding", ("rope",)),
    **{
        name: ("attention", ("infini",)) for name in MEMORY_OPTIONS if name != "mask_special_tokens"
    },
}
# Segments and memory work on products of queries and keys: what adds to a score, or is none, has no
# place there.
INFINI_SCORES = ("scaled_dot", "dot")
INFINI_POSITIONS = ("learned", "sinusoidal", "rope", "none")


@checked
class CausalMHAConfig(ScratchOptions, InfiniConfigMixin, PreTrainedConfig):
    """Configuration of [`CausalMHAForCausalLM`]: what its heads see, score and know of positions
    ([`ScratchOptions`]); with `attention="infini"`, its memory ([`MemoryOptions`], but for
    `layers`); and its sizes, with GPT-2's names and defaults: `vocab_size`, `n_embd`, `n_layer`,
    `n_head`, which divides `n_embd`, `layer_norm_epsilon` (`hidden_size` works too), and

    Args:
        n_positions (`int`, *optional*, defaults to 1024):
            Tokens of context that the model is trained on; `"learned"` positions end there, the
            others do not.
        dropout (`float`, *optional*, defaults to 0.0):
            Probability of dropping attention weights, embeddings, and what a block adds to the
            hidden state.
    """

    model_type = "causal_mha"
    keys_to_ignore_at_inference = ["cache", "past_key_values"]
    attribute_map = {
        "hidden_size": "n_embd",
        "intermediate_size": "n_inner",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
        "resid_pdrop": "dropout",
    }

    vocab_size: int = number(50257, at_least=1)
    n_positions: int = number(1024, at_least=1)
    n_embd: int = number(768, at_least=1)
    n_layer: int = number(12, at_least=1)
    n_head: int = number(12, at_least=1)
    dropout: float | int = number(0.0, at_least=0, below=1)
    layer_norm_epsilon: float = number(1e-5, at_least=0)
    use_cache: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    @property
    def has_memory(self) -> bool:
        """Whether the layers have a compressive memory: all or none."""
        return self.attention == "infini"

    def validate_causal_mha(self):
        """Run by the base class after every construction."""
        encoding, buckets, distance = self.position_encoding, self.num_buckets, self.max_distance
        unused = []
        for name, (needed, kinds) in NEEDS.items():
            value, found = getattr(self, name), getattr(self, needed)
            default = type(self).__dataclass_fields__[name].default
            allowed = " or ".join(map(repr, kinds))
            reason = (
                f"{name}={value!r} belongs to {needed}={allowed} and does nothing with {found!r}"
            )
            unused.append((found not in kinds and value != default, reason))
        refuse(
            (
                self.attention != "none" and self.n_embd % self.n_head,
                f"n_head={self.n_head} must divide n_embd={self.n_embd}",
            ),
            (
                self.attention == "local" and self.sliding_window is None,
                "attention='local' needs a sliding_window of 1 token or more",
            ),
            (
                self.layers is not None,
                f"layers={self.layers} is not for this model, in which all layers are alike",
            ),
            (
                encoding == "t5" and not 2 <= buckets < 2 * distance,
                "position_encoding='t5' needs 2 ≤ num_buckets < 2 * max_distance; got "
                f"num_buckets={buckets}, max_distance={distance}",
            ),
            (
                self.has_memory and self.score not in INFINI_SCORES,
                f"attention='infini' needs a score that is a product, {', '.join(INFINI_SCORES)}; "
                f"got {self.score!r}",
            ),
            (
                self.has_memory and encoding not in INFINI_POSITIONS,
                f"attention='infini' goes with position_encoding {', '.join(INFINI_POSITIONS)}; "
                f"got {encoding!r}",
            ),
            (
                self.attention == "none" and encoding not in (*IN_EMBEDDING, "none"),
                f"position_encoding={encoding!r} acts inside the attention, and attention='none' "
                "has none",
            ),
            *unused,
        )


carry_code("models.scratch.modeling", AutoConfig=CausalMHAConfig)
