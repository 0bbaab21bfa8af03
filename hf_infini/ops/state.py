"""A layer's projections of the new tokens, [`Projections`]; its state between two calls,
[`InfiniState`], constant in size; and [`AttentionCall`], all that attention is computed from."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..options import Window
from .checks import check_window
from .keeping.score import TokenScore
from .memory import MemoryRule
from .window import ScoreOptions

# The fields of a state that hold a window, in the order of those of [`Projections`] after the query
WINDOWS = ("local_key", "local_value", "local_log_weight", "local_score")
# those that a layout has for the state after it
COUNTS = ("tokens_seen", "last_position", "memory_tokens")
# a layer's own: the others follow from which token is where
OF_LAYER = ("memory", "normaliser", *WINDOWS, "kept_position")


class Projections(NamedTuple):
    """What attention is computed from; not rotated: [`ScoreOptions`] says how the window is."""

    query: Tensor  # `[batch, heads, tokens, head_dim]`
    key: Tensor  # `[batch, kv_heads, tokens, head_dim]`
    value: Tensor  # `[batch, kv_heads, tokens, value_dim]`
    # `[batch, kv_heads, tokens, rates]`, logs of the update rule's rates; `None`: zeros
    log_weight: Tensor | None = None
    # `[batch, kv_heads, tokens, scores]`, float32 or wider: which tokens are kept
    score: Tensor | None = None


@dataclass(frozen=True)
class InfiniState:
    """The compressive memory of everything that left the local window, and the window itself.

    With `w` local segments of length `L`, the next token of a row is in segment `s = tokens_seen //
    L`. The memory holds the segments up to `s - 1 - w`, but for kept tokens; the window holds the
    document's first `S` tokens (attention sinks), then `K` kept tokens, right-aligned and in order,
    then the segments `s - w … s`, `L` slots each, and zeros where there is no token: `P = S + K +
    (w + 1) * L` places. A state depends only on the tokens, not on how they were cut into calls.

    Attributes:
        memory: `[batch, kv_heads, head_dim, value_dim]`, float32 (float64 for float64 inputs): M of
            equation 4.
        normaliser: `[batch, kv_heads, head_dim]`, same dtype: z of equation 4; width 0 with a rule
            that has none.
        local_key: `[batch, kv_heads, P, head_dim]`, the model's dtype, never rotated.
        local_value: `[batch, kv_heads, P, value_dim]`.
        local_log_weight: `[batch, kv_heads, P, rates]`, [`Projections.log_weight`]; `None` where
            all tokens weigh 1.
        local_score: `[batch, kv_heads, P, scores]`, float32 or wider, [`Projections.score`], with
            the attention that the window's tokens have received so far, as a sum, and the kept
            ones, as a mean (see keeping/); `None` without any.
        kept_position: `[batch, kv_heads, K]`, int64: the number, in the document, of each kept
            token; −1: none; or `None`.
        local_skipped: `[batch, P]` bool: which tokens of the window `memory_mask` keeps out of the
            memory; `None`: none.
        tokens_seen: `[batch]`, int64: real tokens of the row's current document.
        last_position: `[batch]`, int64: position id of the last real token, −1 before the first.
        memory_tokens: `[batch]`, int64: tokens of the row's current document that the memory holds.
        recent_inputs: `[batch, taps − 1, channels]`, what the short convolution still needs of the
            row's document, oldest first and zero where there is none; `None` without a convolution.
    """

    memory: Tensor
    normaliser: Tensor
    local_key: Tensor
    local_value: Tensor
    local_log_weight: Tensor | None
    tokens_seen: Tensor
    last_position: Tensor
    memory_tokens: Tensor
    local_skipped: Tensor | None = None
    recent_inputs: Tensor | None = None
    local_score: Tensor | None = None
    kept_position: Tensor | None = None

    @classmethod
    def initial(
        cls,
        key: Tensor,
        value: Tensor,
        segment_length: int,
        local_segments: int = 0,
        sink_tokens: int = 0,
        kept_tokens: int = 0,
        *,
        rule: MemoryRule | None = None,
        weighted: bool = False,
        scores: int = 1,
    ) -> "InfiniState":
        """The state before the first token of every row. Of `key` `[batch, kv_heads, tokens,
        head_dim]` and `value` `[…, value_dim]` only the shapes, dtype and device are read; `L`,
        `w`, `S` and `K` as of [`infini_attention`]; `rule`: how the memory is written, `None`: by
        the linear rule; `weighted`: whether tokens have a `log_weight`; `scores`: how many say
        whether a token is kept, [`TokenScore.count`]."""
        rule = MemoryRule() if rule is None else rule
        window = Window(segment_length, local_segments, sink_tokens, kept_tokens)
        check_window(window)
        (batch, heads, _, head_dim), value_dim = key.shape, value.shape[-1]
        dtype = torch.promote_types(key.dtype, torch.float32)
        places = window.places
        # One zero, seen as a whole window: a call that reads no window and keeps no state pays for
        # none.
        zero = key.new_zeros(1)
        return cls(
            memory=key.new_zeros(head_dim if rule.holds else 0, value_dim, dtype=dtype).expand(
                batch, heads, -1, -1
            ),
            normaliser=key.new_zeros(head_dim if rule.normalised else 0, dtype=dtype).expand(
                batch, heads, -1
            ),
            local_key=zero.expand(batch, heads, places, head_dim),
            local_value=value.new_zeros(1).expand(batch, heads, places, value_dim),
            local_log_weight=zero.expand(batch, heads, places, rule.rates) if weighted else None,
            tokens_seen=torch.zeros(batch, dtype=torch.long, device=key.device),
            last_position=torch.full((batch,), -1, dtype=torch.long, device=key.device),
            memory_tokens=torch.zeros(batch, dtype=torch.long, device=key.device),
            local_score=zero.to(dtype).expand(batch, heads, places, scores)
            if kept_tokens
            else None,
            kept_position=torch.full((batch, heads, kept_tokens), -1, device=key.device)
            if kept_tokens
            else None,
        )

    def tensors(self, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        """The fields, or those of these names, without those that are `None`."""
        return {
            name: tensor for name in names or FIELDS if (tensor := getattr(self, name)) is not None
        }

    def having(self, **others: Any) -> "InfiniState":
        """The state with other fields. (torch.compile would check every name that
        `dataclasses.replace` looks up.)"""
        return InfiniState(**{name: getattr(self, name) for name in FIELDS} | others)

    def tokens_left(self) -> Tensor:
        """`[batch]`: how many tokens of the row's document have left the window: they are in the
        memory, or kept."""
        if self.kept_position is None:
            return self.memory_tokens
        return self.memory_tokens + (self.kept_position[:, 0] >= 0).sum(1)

    def windows(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """What is held of the window's tokens: keys, values, log weights and scores."""
        return self.local_key, self.local_value, self.local_log_weight, self.local_score

    def checked_for(self, tokens: Projections, places: int, rule: MemoryRule) -> "InfiniState":
        """The state that a call of these tokens continues, with so many `places` and the memory of
        this rule, or a ValueError. The window gets the wider dtype of the two: one call may run
        under autocast and the next one without."""
        shapes = [
            None if part is None else (*part.shape[:2], places, part.shape[3])
            for part in tokens[1:]
        ]
        wanted: dict[str, Any] = dict(zip(WINDOWS, shapes, strict=True))
        heads, width = tokens.key.shape[:2], tokens.key.shape[3]
        wanted["memory"] = (*heads, width if rule.holds else 0, tokens.value.shape[3])
        wanted["normaliser"] = (*heads, width if rule.normalised else 0)
        for name, shape in wanted.items():
            found = None if (held := getattr(self, name)) is None else tuple(held.shape)
            if found != shape:
                raise ValueError(
                    f"the state does not fit this call: its {name} is {found}, and the call needs "
                    f"{shape}. Continue a state with the options that it was made with "
                    "(segment_length, local_segments, sink_tokens, kept_tokens, kept_shares, "
                    "keep_score, update_rule), and give log_weight in every call of a sequence or "
                    "in none."
                )
        return self.map_windows(
            lambda window, new: window.to(torch.promote_types(window.dtype, new.dtype)), tokens
        )

    def map_windows(self, function: Callable[..., Tensor], *tokens: Projections) -> "InfiniState":
        """The state with `function(window, *what the tokens have for the same)` for each of its
        windows."""
        windows = zip(WINDOWS, self.windows(), *(each[1:] for each in tokens), strict=True)
        return self.having(
            **{name: None if old is None else function(old, *new) for name, old, *new in windows}
        )

    def after(self, layout, **tensors: Tensor | None) -> "InfiniState":
        """The state after a call with this [`Layout`], which left these memory, normaliser and
        windows."""
        counts = {name: getattr(layout, name) for name in COUNTS}
        return self.having(local_skipped=layout.next_skipped, **counts, **tensors)

    def map(self, function) -> "InfiniState":
        """A state whose tensors are all `function(tensor)`: select, repeat or move rows."""
        return self.having(**{name: function(tensor) for name, tensor in self.tensors().items()})

    def detach(self) -> "InfiniState":
        """The same state without a graph: no gradient goes back to what made it."""
        return self.map(Tensor.detach)

    def __deepcopy__(self, memo) -> "InfiniState":
        """With tensors of its own, in the same graph."""
        return self.map(Tensor.clone)

    def nbytes(self) -> int:
        """Bytes that the tensors hold."""
        return sum(tensor.nbytes for tensor in self.tensors().values())


FIELDS = tuple(field.name for field in fields(InfiniState))


class AttentionCall(NamedTuple):
    """What [`attend`] computes: [`infini_attention`] on a layout that is already made."""

    tokens: Projections  # with the `learned_score` for the score
    gate: Any  # β, `[heads]`; `None` where the rule has no memory
    # [`segment_layout`] of the tokens: a StepLayout or a GridLayout, as `fits` has found
    layout: Any
    rule: MemoryRule
    softmax: ScoreOptions
    state: InfiniState  # that the tokens continue
    keep_score: TokenScore
    return_state: bool = False
    in_place: bool = False  # a single token may overwrite the given state
    # For who observes a model, by [`forced_backend`]: the number of the layer that calls, and the
    # input of its projections, `[batch, tokens, width]`
    layer: int | None = None
    inputs: Tensor | None = None

    def prepared(self) -> "AttentionCall":
        """The call with the first scores of its tokens, and a state of their dtype. ValueError
        where the state does not fit."""
        tokens, window = self.tokens, self.layout.window
        if window.kept_tokens:
            first = self.keep_score.first(tokens.key, tokens.value, tokens.score)
            tokens = tokens._replace(score=first)
        state = self.state.checked_for(tokens, window.places, self.rule)
        return self._replace(tokens=tokens, state=state)


# What [`attend`] returns: the output; the state, and the local weights, which may be `None` where
# they are not asked for
Attended = tuple[Tensor, InfiniState | None, Tensor | None]
