"""Attention by kernels of our own, forward and backward, behind one autograd function.

A layer reads its inputs two or three times: scores, features and what was read never leave the chip. Training keeps what
the window found, one number a token and head, and the states of the segments, and computes the rest again. The linear rule's
states come from kernels too; those of other rules, what is kept, and what the memory takes in instead, from plain torch.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from ..attention import groups, keeping_of, state_after
from ..kept import Kept, KeptInGrid, sinks_before_kept
from ..layout.base import GridLayout
from ..memory import State
from ..state import Attended, AttentionCall
from . import backward, forward
from .parts import INTERPRETED, Constants, Known, Rows, Seeing, Window
from .rotary import signed_sines

# By kernel: tokens at a time, warps and stages, but for `ahead` the fastest of eight on an H100; and a program's share
KERNELS: dict[str, tuple[Any, dict[str, int], str]] = {
    "turn": (forward.turn_kernel, {"BM": 32, "num_warps": 4, "num_stages": 2}, "BM"),
    "write": (forward.write_kernel, {"BN": 64, "num_warps": 4, "num_stages": 3}, "segment"),
    "scan": (forward.scan_kernel, {"BLOCK": 64, "num_warps": 2}, "BLOCK"),
    "attend": (forward.attend_kernel, {"BM": 64, "BN": 64, "num_warps": 4, "num_stages": 3}, "BM"),
    "queries": (backward.queries_kernel, {"BM": 64, "BN": 64, "num_warps": 4, "num_stages": 3}, "BM"),
    "states": (backward.states_kernel, {"BM": 32, "num_warps": 4, "num_stages": 2}, "segment"),
    "scan_back": (backward.scan_back_kernel, {"BLOCK": 64, "num_warps": 2}, "BLOCK"),
    "ahead": (backward.ahead_kernel, {"BM": 64, "num_warps": 4, "num_stages": 2}, "ahead"),
    "keys": (backward.keys_kernel, {"BM": 64, "BN": 64, "num_warps": 4, "num_stages": 1}, "BN"),
}


class Launcher:
    """Gives every kernel what it knows of a call beside its tensors."""

    def __init__(self, call: AttentionCall, query: Tensor, key: Tensor, value: Tensor, writes: bool):
        softmax, layout = call.softmax, call.layout
        self.recorded = torch.is_grad_enabled()  # within the autograd function nobody can tell
        self.layout, self.writes = layout, writes  # whether the states are those of the linear rule, by kernels
        tensors = (layout.source, layout.skipped, layout.document, layout.left, *(softmax.rotary or (None, None)))
        self.known = Known(
            *(x if x is None else x.contiguous() for x in tensors), heads=query.shape[1], kv_heads=key.shape[1],
            length=layout.segment_length, scale=softmax.scaling_of(query),
            eps=call.rule.eps if call.rule.normalised else 1.0,  # all of the denominator
        )  # fmt: skip
        # The interpreter's products of 16 bits are wrong
        short = {} if INTERPRETED else {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
        self.wide = max(query.shape[3], value.shape[3]) * query.itemsize > 128
        self.ahead = layout.sink_tokens + (layout.kept_tokens if layout.most_kept else 0)
        self.constants = Constants(
            D=query.shape[3], E=value.shape[3], W=layout.local_segments, SINKS=layout.sink_tokens,
            KEPT=self.ahead - layout.sink_tokens,
            AHEAD=min(32 if self.wide else 64, triton.next_power_of_2(max(16, self.ahead))),
            SIGNED=None if softmax.rotary is None else signed_sines(softmax),
            EXP=call.rule.feature_map == "exp" if call.rule.normalised else None,
            DTYPE=short.get(query.dtype, tl.float32), BM=0, BN=0,
        )  # fmt: skip
        self.last: Any = None  # where the states after the call are, those of the next tokens' segments, if they are wanted
        if call.return_state and writes:
            segment = layout.tokens_seen // layout.segment_length + layout.document[:, -1]
            self.last = torch.arange(len(segment), device=segment.device), slice(None), segment

    def tiles(self, name: str) -> tuple[dict[str, int], int]:
        """Of a kernel: no more tokens than a segment has, and than fit on the chip in this width; and how many there are."""
        _, tiles, of = KERNELS[name]
        width, value_width = self.constants.D, self.constants.E
        if of == "BLOCK":
            return tiles, triton.cdiv(width * value_width + width, tiles[of])
        most = triton.next_power_of_2(max(16, self.layout.slots))
        if self.wide:
            most = min(most, 32)
        if name == "queries" and max(width, value_width) > 64:
            tiles = tiles | {"num_warps": 8}  # with 4, too little of what it works on fits into registers
        tiles = {part: min(size, most) if part[0] == "B" else size for part, size in tiles.items()}
        count = {"segment": 1, "ahead": triton.cdiv(self.ahead, self.constants.AHEAD)}
        return tiles, self.layout.segments * (count[of] if of in count else triton.cdiv(self.layout.slots, tiles[of]))

    def launch(self, name: str, *arguments: Any) -> None:
        """Runs a kernel for all heads and rows of the first of its arguments."""
        (tiles, count), (batch, heads), layout = self.tiles(name), arguments[0].data.shape[:2], self.layout
        blocks = {part: tiles[part] for part in ("BM", "BN") if part in tiles}
        options = {part: size for part, size in tiles.items() if part not in blocks}
        constants = self.constants._replace(**blocks)
        changing = layout.carried + layout.tokens, layout.carried, layout.segments, layout.slots
        KERNELS[name][0][count, heads, batch](*arguments, self.known, *changing, constants, **options)

    def turned(self, x: Tensor, first_place: int, shift: int) -> Tensor:
        """x `[batch, heads, rows, width]` turned by its slots; shift: rows before those of x."""
        if self.constants.SIGNED is None:
            return x
        turned = torch.empty_like(x)
        self.launch("turn", _rows(x), _rows(turned), shift, first_place)
        return turned


def run(call: AttentionCall) -> Attended:
    """As [`attend`] of ops/attention.py, for a call that fits."""
    layout, rule, state, (query, *new) = call.layout, call.rule, call.state, call.tokens[:4]
    kind, keeping, states, after = query.device.type, keeping_of(call), None, None
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype
    key, value, log_weight = (_with_window(layout, *pair) for pair in zip(new, state.windows(), strict=False))
    query, key, value = (part.to(dtype) for part in (query, key, value))
    memory_query, memory_key, seen, before = None if rule.normalised else rule.features(query.float()), None, None, None
    if keeping is not None or rule.update_rule != "linear":
        seen, states, after = _by_torch(call, keeping)
    else:
        memory_key = log_weight if log_weight is None else key.float() + log_weight.float()
        before = torch.cat([state.memory.flatten(2), state.normaliser], 2) if layout.begun else None
    tensors = (query, key, value, memory_query, memory_key, *_ahead(call, seen, dtype))
    tensors = [x if x is None or x.stride(-1) == 1 else x.contiguous() for x in tensors]
    with torch.cuda.device_of(query):  # else Triton takes the current one
        output, last = Attend.apply(*tensors, call.gate, before, states, Launcher(call, query, key, value, states is None))
    if last is not None:
        after = last[..., : -key.shape[3]].unflatten(2, (key.shape[3], -1)), last[..., -key.shape[3] :]
    return output.to(call.tokens.value.dtype), state_after(call, keeping, after) if call.return_state else None, None


def _by_torch(call: AttentionCall, keeping: KeptInGrid | None) -> tuple[Kept | None, Tensor, State]:
    """What each segment sees of what is kept; the state that it reads, `[batch, kv_heads, segments, D · E + D]`; and memory
    and normaliser after the call."""
    found = [(seen, before, after) for *_, seen, _, before, after in groups(call, keeping, compare=False)]
    seen, befores, afters = zip(*found, strict=True)
    memory, normaliser = (torch.cat(parts, 1) for parts in zip(*befores, strict=True))
    if not call.rule.normalised:  # by which no read is divided
        normaliser = memory.new_zeros(memory.shape[:-1])
    seen = None if keeping is None else seen[0].map(lambda *parts: torch.cat(parts, 1), *seen[1:])
    return seen, torch.cat([memory.flatten(3), normaliser], 3).transpose(1, 2), afters[-1]


def _ahead(call: AttentionCall, seen: Any, dtype: torch.dtype) -> tuple:
    """`ahead_key` and `ahead_value` of a [`Window`], where they are apart: kept tokens, and with them sinks; or sinks that
    may be in the state's window, which the grid does not hold."""
    layout, compared, sinks = call.layout, call.softmax.compared, call.layout.sink_tokens
    if not (layout.most_kept or (sinks and layout.begun)):
        return None, None
    key, value = (layout.sinks(*pair).transpose(2, 3) for pair in zip(call.tokens[1:3], call.state.windows(), strict=False))
    if not layout.most_kept:
        parts = [compared(key, slice(0, sinks))], [value]
    else:
        key, value = (part.expand(-1, layout.segments, -1, -1, -1) for part in (key, value))
        key = sinks_before_kept(key, layout, call.softmax, 0, layout.segments)
        parts = [key, compared(seen.key, slice(sinks, layout.ahead))], [value, seen.value]
    return tuple(torch.cat([part.to(dtype).transpose(1, 2) for part in own], 3).flatten(2, 3) for own in parts)


def _with_window(layout: GridLayout, new: Any, window: Any) -> Any:
    """Rows of the grid: what it holds of the window, and the call's tokens, `[batch, heads, rows, dim]`; or `None`."""
    if new is None or not layout.carried:
        return new
    begin = layout.carried_to - layout.carried
    return torch.cat([window[:, :, begin : layout.carried_to].to(new.dtype), new], 2)


def _rows(x: Tensor | None) -> Rows | None:
    return None if x is None else Rows(x, *x.stride()[:3])


class Attend(Function):
    """Window, memory and mixture, by the formulas of forward.py and backward.py. Arguments: queries, keys and values (these
    two of all rows of the grid); queries and keys of the memory, or `None`: the same; `ahead_key` and `ahead_value` of a
    [`Window`]; the gate; the state before the call, or `None`: empty; the states that the segments read, or `None`: they are
    written here, and that after the call is returned; the [`Launcher`]."""

    @staticmethod
    def forward(ctx, query, key, value, memory_query, memory_key, ahead_key, ahead_value, gate, before, states, launcher):
        (batch, heads, tokens, width), (_, kv_heads, _, value_width) = query.shape, value.shape
        new, layout = functools.partial(query.new_empty, dtype=torch.float32), launcher.layout
        if launcher.writes:
            states = new(batch, kv_heads, layout.segments + 1, width * value_width + width)
            wrote = torch.empty_like(states[:, :, :-1])
            launcher.launch("write", _rows(key if memory_key is None else memory_key), _rows(value), _rows(wrote))
            states[:, :, 0] = 0 if before is None else before
            launcher.launch("scan", _rows(wrote), _rows(states))
            del wrote
        turned_key = launcher.turned(key, 0, 0)
        make = torch.empty if layout.source is None else torch.zeros  # padding is zero
        output = make(batch, tokens, heads, value_width, dtype=value.dtype, device=value.device).transpose(1, 2)
        save = launcher.recorded and any(ctx.needs_input_grad)
        found, log_sum = (torch.empty_like(output), new(batch, heads, tokens)) if save else (None, None)
        window = Window(*map(_rows, (turned_key, value, ahead_key, ahead_value)))
        mq = _rows(query if memory_query is None else memory_query)
        launcher.launch("attend", _rows(query), mq, window, _rows(output), _rows(found), log_sum, _rows(states), gate)
        ctx.launcher = launcher
        ctx.save_for_backward(
            query, key, value, memory_query, memory_key, ahead_key, ahead_value, gate, turned_key, found, log_sum, states
        )
        ctx.set_materialize_grads(False)
        return output, None if launcher.last is None else states[launcher.last]

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient, to_last):
        query, key, value, memory_query, memory_key, *others = ctx.saved_tensors
        ahead_key, ahead_value, gate, turned_key, found, log_sum, states = others
        launcher, layout = ctx.launcher, ctx.launcher.layout
        (batch, heads, tokens, width), (_, kv_heads, _, value_width), size = query.shape, value.shape, states.shape[3]
        new = functools.partial(query.new_empty, dtype=torch.float32)
        make = torch.empty_like if layout.source is None else torch.zeros_like  # padding is zero
        to_query, to_key, to_value = make(query), make(key), make(value)
        to_memory_query, to_memory_key = (None if x is None else make(x) for x in (memory_query, memory_key))
        memory_query = query if memory_query is None else memory_query
        memory_key = key if memory_key is None else memory_key
        gradient = torch.zeros_like(found) if gradient is None else gradient
        gradient = gradient if gradient.stride(-1) == 1 else gradient.contiguous()

        q, mq, k, mk, v, g = map(_rows, (query, memory_query, key, memory_key, value, gradient))
        window = Window(*map(_rows, (turned_key, value, ahead_key, ahead_value)))
        along, inverse, to_mass = new(3, batch, heads, tokens)
        to_gate = new(batch, heads, launcher.tiles("queries")[1])
        results = (along, inverse, to_mass, _rows(to_query), _rows(to_memory_query), to_gate)
        launcher.launch("queries", q, mq, window, g, _rows(found), log_sum, *results, _rows(states), gate)
        to_states = new(batch, kv_heads, layout.segments + launcher.writes, size)
        launcher.launch("states", _rows(to_states), mq, g, inverse, to_mass)
        to_wrote = to_before = None
        if launcher.writes:
            to_states[:, :, -1] = 0
            if to_last is not None:
                to_states[launcher.last] += to_last
            to_wrote = _rows(torch.empty_like(to_states[:, :, 1:]))
            launcher.launch("scan_back", _rows(to_states), to_wrote)
            to_before, to_states = to_states[:, :, 0] if ctx.needs_input_grad[8] else None, None

        first_place = launcher.ahead + layout.local_segments * layout.segment_length
        seeing = Seeing(_rows(launcher.turned(query, first_place, layout.carried)), g, log_sum, along)
        of_sinks = to_ahead = (None, None)
        if launcher.ahead:
            widths = [width, value_width]
            owed = new(batch, kv_heads, layout.segments, launcher.ahead, sum(widths))
            launcher.launch("ahead", *map(_rows, owed.flatten(2, 3).split(widths, -1)), window, seeing, gate)
            if not launcher.constants.KEPT and (ahead_key is None or layout.source is None):
                owed = _sums_by_document(owed, layout)
            parts = owed.flatten(2, 3).split(widths, -1)
            if ahead_key is None:  # they are among the keys
                of_sinks = tuple(map(_rows, parts))
            else:
                to_ahead = tuple(part.to(query.dtype) for part in parts)
        launcher.launch("keys", k, mk, v, seeing, *map(_rows, (to_key, to_memory_key, to_value)), to_wrote, *of_sinks, gate)

        to_gate = to_gate.sum((0, 2)).to(gate.dtype)
        return to_query, to_key, to_value, to_memory_query, to_memory_key, *to_ahead, to_gate, to_before, to_states, None


def _sums_by_document(to_sinks: Tensor, layout: GridLayout) -> Tensor:
    """What all segments owe to the sinks, `[batch, kv_heads, segments, …]`, at their document's first segment."""
    if layout.source is None:
        return to_sinks.sum(2, keepdim=True)
    first = torch.arange(layout.segments, device=to_sinks.device)[:, None]
    member = (layout.document[:, None, :-1] == first).to(to_sinks.dtype)
    return (member.unsqueeze(1) @ to_sinks.flatten(3)).unflatten(-1, to_sinks.shape[3:])
