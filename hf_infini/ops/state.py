"""What attention is computed from, an [`AttentionCall`]: [`Tokens`]; where they go, their
[`Layout`]; and a layer's state between two calls, [`InfiniState`], constant in size."""

import copy
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..options import Window
from .equations import MemoryRule, ScoreOptions
from .keeping.score import TokenScore

# The fields of a state that hold a window, in the order of those of [`Tokens`]
WINDOWS = ("local_key", "local_value", "local_log_weight", "local_score")
# those that a layout has for the state after it
COUNTS = ("tokens_seen", "last_position", "memory_tokens")
# a layer's own: the others follow from which token is where
OF_LAYER = ("memory", "normaliser", *WINDOWS, "kept_position")
LINEAR = MemoryRule()


class Tokens(NamedTuple):
    """What is held of tokens, `[batch, kv_heads, tokens, …]` each: of a call's new ones, of those
    in the window of a state, and of kept ones."""

    key: Tensor  # `[…, head_dim]`, not rotated: [`ScoreOptions`] says how the window is
    value: Any  # `[…, value_dim]`
    # `[…, rates]`, logs of the update rule's rates; `None`: zeros
    log_weight: Tensor | None = None
    # `[…, scores]`, float32 or wider: which tokens are kept
    score: Any = None
    # `[…, 1]`, int64, where it is asked for: the token's number in its document; −1: there is none,
    # and the others mean nothing
    position: Any = None

    @classmethod
    def kept_in(cls, state: "InfiniState", window: Window) -> "Tokens":
        """What a state keeps, as many as there are places, right-aligned."""
        places = slice(window.sink_tokens, window.ahead)
        held = state.windows().map(lambda part: part[:, :, places])
        position: Any = state.kept_position
        return held._replace(score=held.score.detach(), position=position.unsqueeze(-1))

    def into(self, state: "InfiniState", window: Window) -> "InfiniState":
        """The state with these tokens in its kept places, of which there are as many."""

        def put(part, kept):
            sinks = part[:, :, : window.sink_tokens]
            # they need none
            sinks = torch.zeros_like(sinks) if part is state.local_score else sinks
            kept = kept.masked_fill(self.position < 0, 0).to(part.dtype)
            return torch.cat([sinks, kept, part[:, :, window.ahead :]], 2)

        kept_position = self.position[..., 0].contiguous()
        return state.map_windows(put, self).having(kept_position=kept_position)

    def instead(
        self, state: "InfiniState", window: Window, left: Tensor | None = None
    ) -> "InfiniState":
        """The state that keeps these tokens, wherever they have been, in place of its own:
        [`into`]. `left`: `[batch]`, of how many that have left the window; `None`: of the state's
        own."""
        left = state.tokens_left() if left is None else left
        filled = (self.position[:, 0, :, 0] >= 0).sum(1)
        return self.into(state, window).having(memory_tokens=left - filled)

    def map(self, function: Callable[..., Tensor], *others: "Tokens") -> "Tokens":
        """`function(part, *of the others)` for each part that there is."""
        parts: Any = (
            None if own is None else function(own, *rest)
            for own, *rest in zip(self, *others, strict=True)
        )
        return Tokens(*parts)

    def taken(self, index: Tensor) -> "Tokens":
        """The tokens at these indices, `[B, N, K, tokens, …]` each; `index`: `[B, N, K, tokens]`,
        −1 for none."""
        rows = row_numbers(index, self.position.shape[2])
        found = self.map(
            lambda part: part.flatten(0, 2).index_select(0, rows).unflatten(0, index.shape)
        )
        return found._replace(position=found.position.masked_fill((index < 0).unsqueeze(-1), -1))


def row_numbers(index: Tensor, count: int) -> Tensor:
    """Of the rows at `index` `[B, …, K, tokens]` of `[B, K, count, …]`, the places in `[B · K ·
    count, …]`; any for −1."""
    batch, heads = index.shape[0], index.shape[-2]
    first = (
        torch.arange(batch * heads, device=index.device).view(
            batch, *(1,) * (index.dim() - 3), heads, 1
        )
        * count
    )
    return (index.clamp(min=0) + first).flatten()


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Where a call's tokens go, and what a state counts after it: what is known of every call, by
    all forms in layout/. It is made once per forward, and the layers share it."""

    window: Window  # the same for all rows
    positions: Tensor  # `[batch or 1, tokens]`, number of each token within its document
    # `[batch]` after this call, as in [`InfiniState`]
    tokens_seen: Tensor
    last_position: Tensor
    memory_tokens: Tensor | None = None
    real: Tensor | None = None  # `[batch, tokens]` bool, which tokens are no padding; `None`: all
    # `[batch, tokens]` bool, which tokens begin a document; `None`: none
    restart: Tensor | None = None
    next_skipped: Tensor | None = None  # `local_skipped` of the next state

    def to(self, device: torch.device, non_blocking: bool = False) -> "Layout":
        """The layout on another `device`, copied as by torch's `non_blocking`: accelerate asks
        for it where a model's layers are on several."""
        if torch.device(device) == self.positions.device:
            return self
        moved = self.__dict__.setdefault("_moved", {})
        if device not in moved:
            to = functools.partial(Tensor.to, device=device, non_blocking=non_blocking)
            moved[device] = copy.copy(self)
            vars(moved[device]).update(
                {k: to(value) for k, value in vars(self).items() if isinstance(value, Tensor)},
                _moved=moved,
            )
        return moved[device]


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
        local_log_weight: `[batch, kv_heads, P, rates]`, [`Tokens.log_weight`]; `None` where
            all tokens weigh 1.
        local_score: `[batch, kv_heads, P, scores]`, float32 or wider, [`Tokens.score`], with
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
        rule: MemoryRule | None = LINEAR,
        weighted: bool = False,
        scores: int = 1,
    ) -> "InfiniState":
        """The state before the first token of every row.

        Args:
            key, value: `[batch, kv_heads, tokens, head_dim]` and `[…, value_dim]`, of
                which only the shapes, dtype and device are read.
            segment_length, local_segments, sink_tokens, kept_tokens: L, w, S and K of the
                window, in tokens, but w in segments.
            rule: how the memory is written; `None`: there is none.
            weighted: whether tokens have a `log_weight`.
            scores: how many say whether a token is kept, [`TokenScore.count`].

        Raises:
            ValueError: there is no window of these sizes.
        """
        window = Window(segment_length, local_segments, sink_tokens, kept_tokens)
        window.check()
        (batch, heads, _, head_dim), value_dim = key.shape, value.shape[-1]
        rows, width = memory_sizes(rule, head_dim)
        rates = 0 if rule is None else rule.rates
        dtype = torch.promote_types(key.dtype, torch.float32)
        places = window.places
        # One zero, seen as a whole window: a call that reads no window and keeps no state pays for
        # none.
        zero = key.new_zeros(1)
        return cls(
            memory=key.new_zeros(rows, value_dim, dtype=dtype).expand(batch, heads, -1, -1),
            normaliser=key.new_zeros(width, dtype=dtype).expand(batch, heads, -1),
            local_key=zero.expand(batch, heads, places, head_dim),
            local_value=value.new_zeros(1).expand(batch, heads, places, value_dim),
            local_log_weight=zero.expand(batch, heads, places, rates) if weighted else None,
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

    def windows(self) -> Tokens:
        """What is held of the window's tokens."""
        return Tokens(self.local_key, self.local_value, self.local_log_weight, self.local_score)

    def checked_for(self, tokens: Tokens, places: int, rule: MemoryRule | None) -> "InfiniState":
        """The state that a call of these tokens continues, with so many `places` and the memory of
        this rule, or a ValueError. The window gets the wider dtype of the two: one call may run
        under autocast and the next one without."""
        shapes = [
            None if part is None else (*part.shape[:2], places, part.shape[3])
            for part in tokens[:4]
        ]
        wanted: dict[str, tuple[int, ...] | None] = dict(zip(WINDOWS, shapes, strict=True))
        heads, (rows, width) = tokens.key.shape[:2], memory_sizes(rule, tokens.key.shape[3])
        wanted["memory"] = (*heads, rows, tokens.value.shape[3])
        wanted["normaliser"] = (*heads, width)
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

    def map_windows(self, function: Callable[..., Tensor], *tokens: Tokens) -> "InfiniState":
        """The state with `function(window, *what the tokens have for the same)` for each of its
        windows."""
        windows = zip(WINDOWS, self.windows(), *tokens, strict=False)
        return self.having(
            **{name: None if old is None else function(old, *new) for name, old, *new in windows}
        )

    def after(self, layout: Layout, **tensors: Tensor | None) -> "InfiniState":
        """The state after a call with this `layout`, which left these memory, normaliser and
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


def memory_sizes(rule: MemoryRule | None, head_dim: int) -> tuple[int, int]:
    """Rows of M and numbers of z, in a state with this `rule`, for heads of so many numbers,
    `head_dim`."""
    return (
        0 if rule is None else head_dim,
        0 if rule is None or not rule.normalised else head_dim,
    )


class AttentionCall(NamedTuple):
    """What [`attend`] computes: [`infini_attention`] on a layout that is already made."""

    query: Tensor  # `[batch, heads, tokens, head_dim]`, not rotated
    tokens: Tokens  # with the `learned_score` for the score, `[batch, kv_heads, tokens, learned]`
    gate: Any  # β, `[heads]`; `None` without a memory
    # [`segment_layout`] of the tokens: a StepLayout or a GridLayout, as `fits` has found
    layout: Any
    rule: MemoryRule | None  # `None`: there is no memory
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


def last_position(
    tokens: int, real: Tensor | None, position_ids: Tensor | None, before: Tensor
) -> Tensor:
    """[`Layout.last_position`], `[batch]`, after so many `tokens`, of which `real` `[batch,
    tokens]` are no padding (`None`: all), at `position_ids` `[batch, tokens]` (`None`:
    counted); `before`: that before them."""
    if position_ids is None:
        return before + (tokens if real is None else real.sum(1))
    if real is None:
        return position_ids[:, -1].long()
    latest = torch.where(real, torch.arange(tokens, device=real.device), -1).amax(1)
    return torch.where(
        latest >= 0, position_ids.gather(1, latest.clamp(min=0).unsqueeze(1)).squeeze(1), before
    )


def gather(rows: Tensor, index: Tensor) -> Tensor:
    """Rows of `[batch, rows, …]` at `index` `[batch, places]`, zero at −1."""
    first = torch.arange(rows.shape[0], device=rows.device).unsqueeze(1) * rows.shape[1]
    taken = (
        rows.flatten(0, 1)
        .index_select(0, (index.clamp(min=0) + first).flatten())
        .unflatten(0, index.shape)
    )
    return taken.masked_fill((index < 0)[(...,) + (None,) * (rows.dim() - 2)], 0)


def pad(tensor: Tensor, widths: Sequence[int]) -> Tensor:
    """`F.pad` of a `tensor` with zeros; `widths`: before and after, from the last dimension on.
    Booleans are padded as numbers: of compared and padded ones torch.compile makes invalid
    C++."""
    return (
        F.pad(tensor.to(torch.uint8), widths).to(torch.bool)
        if tensor.dtype == torch.bool
        else F.pad(tensor, widths)
    )


def check_shapes(
    batch: int,
    tokens: int,
    attention_mask: Tensor | None,
    memory_mask: Tensor | None,
    position_ids: Tensor | None,
) -> None:
    """ValueError unless attention_mask, memory_mask and position_ids are `[batch, tokens]`,
    positions perhaps `[1, tokens]`, or `None`; TypeError for what is no tensor."""
    given = {
        "attention_mask": attention_mask,
        "memory_mask": memory_mask,
        "position_ids": position_ids,
    }
    for name, part in given.items():
        if part is None:
            continue
        if not isinstance(part, Tensor):
            raise TypeError(f"{name} must be a tensor; got {part!r:.60}.")
        whole = name != "position_ids" or not (part.is_floating_point() or part.is_complex())
        if (
            not whole
            or part.shape != (batch, tokens)
            and (name != "position_ids" or part.shape != (1, tokens))
        ):
            raise ValueError(
                f"{name} must be [batch, tokens] = [{batch}, {tokens}], got {list(part.shape)} of "
                f"{part.dtype}; positions are whole numbers. With a state it covers only the new "
                "tokens."
            )


def bool_mask(name: str, mask: Tensor | None, read_back: bool) -> Tensor | None:
    """A mask of 0 and 1, the argument `name`, as bool, or a ValueError (RuntimeError).
    `read_back`: whether its values may be read back from the device now."""
    if mask is None or mask.dtype == torch.bool:
        return mask
    wrong = ((mask != 0) & (mask != 1)).any()
    message = (
        f"{name} must hold 1 for tokens that count and 0 for those that do not; this one of dtype "
        f"{mask.dtype} has other values. A mask that is added to scores (0 and -inf) is not "
        "taken: pass mask == 0."
    )
    if not read_back:
        torch._assert_async(~wrong, message)
    elif wrong:
        raise ValueError(message)
    return mask.to(torch.bool)
