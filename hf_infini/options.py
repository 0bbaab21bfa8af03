"""The options of a compressive memory: their names, choices, defaults, meaning and checks, for all
models and command lines.

Only the standard library is imported here: a command line reads the options without waiting for
torch.
"""

import contextlib
import math
import operator
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

if TYPE_CHECKING:  # what a configuration's mixins come before; they have no base when the code runs
    from transformers import PreTrainedConfig as ConfigBase
else:
    ConfigBase = object

# What the metadata of a number's field may demand of it
LIMITS = {
    "at_least": operator.ge,
    "greater_than": operator.gt,
    "at_most": operator.le,
    "below": operator.lt,
}


def number(default, **limits):
    """A field of a number with its `default`, a number or `None`, and its [`LIMITS`]."""
    return field(default=default, metadata=limits)


def in_words(limits: Mapping) -> str:
    """The [`LIMITS`] among `limits` in words: "at least 0 and below 1"."""
    return " and ".join(
        f"{name.replace('_', ' ')} {limits[name]}" for name in LIMITS if name in limits
    )


def check_number(name: str, value, limits: Mapping) -> None:
    """ValueError unless a number, the `value` of the option `name`, is finite and within its
    `limits`, of [`LIMITS`]; anything else than a number passes."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return
    if not math.isfinite(value) or not all(
        LIMITS[limit](value, limits[limit]) for limit in LIMITS if limit in limits
    ):
        raise ValueError(f"{name} must be {in_words(limits) or 'a finite number'}; got {value}.")


def refuse(*cases: tuple[object, str]) -> None:
    """ValueError with the first of these reasons, each without its full stop, whose condition
    holds."""
    for condition, reason in cases:
        if condition:
            raise ValueError(f"{reason}.")


class Window(NamedTuple):
    """What the softmax of a layer sees, in tokens: the first ones of a document, kept ones, and the
    segments up to the query's own; each has its place, in this order."""

    segment_length: int  # L
    local_segments: int = 0  # w, segments before the query's own
    sink_tokens: int = 0  # S
    kept_tokens: int = 0  # K

    @property
    def ahead(self) -> int:
        """Places before those of the segments, of sinks and kept tokens."""
        return self.sink_tokens + self.kept_tokens

    @property
    def span(self) -> int:
        """Places of the segments."""
        return (self.local_segments + 1) * self.segment_length

    @property
    def oldest(self) -> slice:
        """Places of the oldest segment."""
        return slice(self.ahead, self.ahead + self.segment_length)

    @property
    def places(self) -> int:
        """All places: tokens that the softmax sees at most."""
        return self.ahead + self.span

    def check(self) -> None:
        """ValueError unless there can be a window of these sizes."""
        length, local, sinks, kept = self
        if length < 1 or local < 0 or not 0 <= sinks < length or kept < 0:
            raise ValueError(
                "segment_length must be ≥ 1, local_segments ≥ 0, sink_tokens from 0 to "
                f"segment_length - 1 and kept_tokens ≥ 0, got {length}, {local}, {sinks} and "
                f"{kept}."
            )


# The tokens of [`one_segment`], in this thread or task
_segment: ContextVar[int | None] = ContextVar("one segment", default=None)
# An entry for each that is open in the process: a graph of torch.compile cannot read the above
_open: list[None] = []


@contextlib.contextmanager
def set_here(variable: ContextVar, value: object, opened: list[None]) -> Iterator[None]:
    """Within it, a context `variable` has this `value`, in this thread or task; `opened` has an
    entry more then, for the whole process."""
    before = variable.set(value)
    opened.append(None)
    try:
        yield
    finally:
        opened.pop()
        variable.reset(before)


def one_segment(tokens: int) -> contextlib.AbstractContextManager[None]:
    """Within it, the windows of all models are one segment of so many `tokens` in calls of this
    thread or task, so that the softmax sees all of a text that is no longer."""
    return set_here(_segment, tokens, _open)


SINKS, LONGEST_WINDOW, SHORT_SEGMENT = 4, 256, 64  # tokens; see `options_of_cache`


def recalling_window(
    cache_tokens: int, window: int = LONGEST_WINDOW, segments: int = 2
) -> tuple[int, int]:
    """The length of a segment, and how many a window has, where the latest tokens are kept until a
    question recalls others: at most an eighth of `cache_tokens`, so that more can be recalled, in
    segments of at least 64 tokens, as shorter ones are slower to read. `window`, `segments`: at
    most."""
    window = min(window, max(cache_tokens // 8, 4 * SINKS))
    segments = max(1, min(segments, window // SHORT_SEGMENT))
    return window // segments, segments


def options_of_cache(cache_tokens: int, **options) -> dict[str, Any]:
    """The options of a pretrained model whose cache holds so many tokens a head.

    Four first tokens stay (sinks). Where attention decides what is kept, the window has half of the
    rest in short segments; with other scores up to 256 tokens. Where the latest tokens are kept,
    until a question recalls others, it has an eighth, so that more can be recalled. All others are
    kept tokens. There is no memory, unless an `update_rule` is given.

    Args:
        cache_tokens: sinks, window and kept tokens together, on average over the layers.
        options: others of [`MemoryOptions`]; not the sizes that follow from `cache_tokens`.

    Raises:
        ValueError: fewer than 32 tokens, or a size is given as well.
    """
    check_number("cache_tokens", cache_tokens, {"at_least": 32, "at_most": 2**20})
    twice = [name for name in Window._fields if options.get(name) is not None]
    refuse(
        (
            twice,
            f"cache_tokens decides {', '.join(Window._fields)}: give it, or all of these; got "
            f"cache_tokens and {' and '.join(twice)}",
        )
    )
    score, window = options.get("keep_score", "attention"), cache_tokens // 2
    if score != "attention":
        window = min(window, LONGEST_WINDOW)
    segment = min(SHORT_SEGMENT if score == "attention" else LONGEST_WINDOW, window // 2)
    segments = window // segment
    if score == "recent":
        segment, segments = recalling_window(cache_tokens)
        # a text that fits is all seen, as by a plain model
        options = {"mask_special_tokens": False, **options}
    return {
        "update_rule": "none",
        "segment_length": segment,
        "local_segments": segments - 1,
        "sink_tokens": SINKS,
        "kept_tokens": cache_tokens - SINKS - segments * segment,
        **options,
    }


# the default first; a rule is a file of its name in ops/rules/, and "none" is none
UpdateRule = Literal["linear", "delta", "gated_delta", "none"]
UPDATE_RULES = get_args(UpdateRule)
# the default first; a score is a file of its name in ops/keeping/
KeepScore = Literal["attention", "learned", "half", "two_learned", "key_norm", "recent"]
KEEP_SCORES = get_args(KeepScore)


@dataclass(init=False, repr=False, eq=False)
class MemoryOptions(ConfigBase):
    """What a configuration says of its model's memory; comes before `PreTrainedConfig` among the
    bases.

    Args:
        segment_length (`int`, *optional*):
            Tokens in a segment, L; a memory needs one.
        update_rule (`str`, *optional*, defaults to `"linear"`):
            How a segment is written into the memory: `"linear"` adds its values, `"delta"` its
            values minus what the memory already returns for their keys (which does not overwrite: a
            key repeated many times reads half its value). `"gated_delta"` overwrites, token by
            token: it replaces a share β of what the memory returns for the token's key, of length
            one, by its value, and keeps a share α of everything; both are learned from the layer's
            input. `"none"`: there is no memory and no gate; what leaves the window and is not kept
            is forgotten. A pretrained model needs no other, unless it is trained with a memory.
        feature_map (`str`, *optional*, defaults to `"elu"`):
            The function that makes positive features of the memory's queries and keys: `"elu"`, ELU
            + 1, as in the paper; or `"exp"`, with which one token can outweigh many others.
        local_segments (`int`, *optional*, defaults to 0):
            Earlier segments that the softmax attention still sees in full; 0 is the paper.
        sink_tokens (`int`, *optional*, defaults to 0):
            How many first tokens of every document stay visible to the softmax of all later ones
            (attention sinks), and out of the memory; fewer than a segment has. Pretrained models
            need about 4; 0 is the paper.
        kept_tokens (`int`, *optional*, defaults to 0):
            How many of the tokens that have left the window each key/value head keeps word for
            word: those with the highest `keep_score` stay visible to the softmax, between sinks and
            window, and all others are written into the memory.
        kept_shares (`list[float]`, *optional*):
            For each layer of the model, how many times `kept_tokens` it keeps, rounded down;
            `None`: 1. Few layers look far back at single tokens: [`fit_keep_score`] finds them.
        keep_score (`str`, *optional*, defaults to `"attention"`):
            Which tokens are kept: `"attention"`, those that received most of it while they were in
            the window, which fades (a token that is `2 * kept_tokens` older must have received e
            times as much); `"learned"`, those with the largest w·x, with x the input of the layer's
            projections and a w for each key/value head that starts at zero (then the earliest are
            kept); `"half"`, half of the places for each of the two; `"two_learned"`, three
            quarters of the places by one learned score, a quarter by another ([`fit_keep_score`]
            fits the first on rows that ask, the second on passages); `"key_norm"`, those with the
            smallest keys, which needs neither attention nor learning; or `"recent"`, the latest,
            until a question recalls others ([`InfiniCache.recall`]).
        gate_init (`float`, *optional*, defaults to 0.0):
            First value of every head's gate logit β; the memory's share of the output is
            sigmoid(β).
        layers (`list[int]`, *optional*):
            Layers, counted from 0, that have a memory; the others keep full attention, and their
            cache grows with the context. `None` is all of them.
        memory_conv (`int`, *optional*, defaults to 0):
            Taps (the token itself and those before it) of a depthwise causal convolution, added to
            the input of the layer's projections: what followed a token can then be recalled by that
            token. It starts at zero; 0 is none.
        memory_write (`str`, *optional*, defaults to `"equal"`):
            Weight of a token in the memory: `"equal"` for all; or `"learned"`, where σ(k) is
            multiplied by e^(w·x), with x the input of the layer's projections and a w for each head
            that starts at zero, so that filler can stay out of the memory. Not with
            `feature_map="elu"`.
        mask_special_tokens (`bool`, *optional*, defaults to `True`):
            Tokens with the configuration's bos, eos or pad id are seen inside the window but not
            written into the memory.
    """

    segment_length: int | None = number(None, at_least=1, at_most=2**20)
    update_rule: UpdateRule = "linear"
    feature_map: Literal["elu", "exp"] = "elu"
    local_segments: int = number(0, at_least=0, at_most=2**16)
    sink_tokens: int = number(0, at_least=0)
    kept_tokens: int = number(0, at_least=0, at_most=2**20)
    kept_shares: list[float | int] | None = None
    keep_score: KeepScore = "attention"
    gate_init: float | int = number(0.0, at_least=-1000, at_most=80)  # e^β is a number in float32
    layers: list[int] | None = None
    memory_conv: int = number(0, at_least=0, at_most=1024)
    memory_write: Literal["equal", "learned"] = "equal"
    mask_special_tokens: bool = True

    @property
    def has_memory(self) -> bool:
        """Whether any layer has a memory; where none has, these options are not checked here."""
        return True

    @property
    def window(self) -> Window:
        """The widest of [`MemoryOptions.window_of`] the layers with a memory."""
        layers = [None] if self.kept_shares is None else self.infini_layers
        return max([self.window_of(layer) for layer in layers])

    def window_of(self, layer: int | None) -> Window:
        """What the softmax of this layer, counted from 0, sees; `None`: of one outside of a
        model."""
        length: Any = self.segment_length  # there is one where there is a memory
        share = 1 if self.kept_shares is None or layer is None else self.kept_shares[layer]
        kept_tokens = int(self.kept_tokens * share + 1e-6)
        if _open and (tokens := _segment.get()) is not None:
            return Window(tokens, 0, self.sink_tokens, kept_tokens)
        return Window(length, self.local_segments, self.sink_tokens, kept_tokens)

    @property
    def windows(self) -> dict[int, Window]:
        """The windows of the layers with a memory, by their numbers."""
        return {layer: self.window_of(layer) for layer in self.infini_layers}

    @property
    def places(self) -> int:
        """[`Window.places`] of the widest window."""
        return self.window.places

    @property
    def infini_layers(self) -> list[int]:
        """Numbers of the layers with a memory: by default those that would see everything, so that
        sliding ones stay."""
        if not self.has_memory:
            return []
        if self.layers is not None:
            return sorted({*self.layers})
        return [layer for layer, kind in enumerate(layer_kinds(self)) if kind == "full_attention"]

    def validate_memory_options(self):
        """Run by the base class after every construction; the choices and types are checked before,
        by the annotations."""
        if not self.has_memory:
            return
        if self.segment_length is None:
            raise ValueError("give segment_length, the tokens of a segment, such as 256.")
        count = self.num_hidden_layers
        shares_fit = self.kept_shares is None or (
            len(self.kept_shares) == count
            and all(0 <= share <= 99 for share in self.kept_shares)
            and self.window.kept_tokens > 0
        )
        is_causal = getattr(self, "is_causal", True)
        defaults = {"gate_init": 0.0, "feature_map": "elu", "memory_write": "equal"}
        of_memory = [name for name, value in defaults.items() if getattr(self, name) != value]
        both_ways = getattr(self, "use_bidirectional_attention", None)
        refuse(
            (
                self.sink_tokens >= self.segment_length,
                f"sink_tokens must be fewer than the {self.segment_length} tokens of a segment; "
                f"got {self.sink_tokens}",
            ),
            (
                not shares_fit,
                f"kept_shares must be {count} numbers from 0 to 99, one for each layer, with "
                f"kept_tokens, such as 256, of which some layer keeps any; got {self.kept_shares} "
                f"and {self.kept_tokens}",
            ),
            (
                not is_causal or both_ways,
                "a memory holds what came before, and with is_causal=False or "
                "use_bidirectional_attention tokens see what comes after them: leave it out",
            ),
            (
                self.update_rule == "none" and of_memory,
                "update_rule='none' has no memory: leave out what is of one, "
                f"{' and '.join(of_memory)}",
            ),
            (
                self.memory_write == "learned" and self.feature_map == "elu",
                "memory_write='learned' multiplies features by adding to their exponents: give "
                f"feature_map='exp' with it; got feature_map={self.feature_map!r}",
            ),
            (
                self.layers is not None
                and (not self.layers or not {*self.layers} <= {*range(count)}),
                f"layers must name some of the {count} layers, 0 to {count - 1}, or be None for "
                f"all; got {self.layers}",
            ),
        )


MEMORY_OPTIONS = tuple(field.name for field in fields(MemoryOptions))


def context_limit(config) -> int | None:
    """The most tokens that the positions of a model with this `config` reach; None where they
    have no end: all but learned ones."""
    return (
        getattr(config, "n_positions", None)
        if getattr(config, "position_encoding", "learned") == "learned"
        else None
    )


def key_heads(config) -> tuple[int, int, int]:
    """By a model's `config`: key/value heads of a layer, and how wide the keys and the values of
    one are."""
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    return (
        getattr(config, "num_key_value_heads", None) or heads,
        width,
        getattr(config, "value_dim", None) or width,
    )


def first_layers(windows: dict[int, Window]) -> dict[Window, int]:
    """Of [`MemoryOptions.windows`], by window, the first layer that has it: what it knows of a text
    holds for the others."""
    return {window: layer for layer, window in reversed(windows.items())}


def layer_kinds(config) -> list[str]:
    """What each layer's own attention sees in a model with this `config`, by transformers'
    names: "full_attention", "sliding_attention", …"""
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        return list(kinds)
    sliding = getattr(config, "sliding_window", None) and getattr(
        config, "use_sliding_window", True
    )
    return ["sliding_attention" if sliding else "full_attention"] * config.num_hidden_layers
