"""The linear rule by kernels of our own, forward and backward, behind one autograd function.

A layer reads its inputs two or three times: scores, features and what was read never leave the chip. Training keeps what
the window found, one number a token and head, and the states of the segments, and computes the rest again.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from ..layout.base import GridLayout
from ..state import Attended, AttentionCall
from . import backward, forward
from .parts import INTERPRETED, Constants, Known, Rows, Seeing, Window
from .rotary import signed_sines

# By kernel: tokens at a time, warps and stages of the pipeline, the fastest of eight on an H100; and a program's share
KERNELS: dict[str, tuple[Any, dict[str, int], str]] = {
    "turn": (forward.turn_kernel, {"BM": 32, "num_warps": 4, "num_stages": 2}, "BM"),
    "write": (forward.write_kernel, {"BN": 64, "num_warps": 4, "num_stages": 3}, "segment"),
    "scan": (forward.scan_kernel, {"BLOCK": 64, "num_warps": 2}, "BLOCK"),
    "attend": (forward.attend_kernel, {"BM": 64, "BN": 64, "num_warps": 4, "num_stages": 3}, "BM"),
    "queries": (backward.queries_kernel, {"BM": 64, "BN": 64, "num_warps": 4, "num_stages": 3}, "BM"),
    "states": (backward.states_kernel, {"BM": 32, "num_warps": 4, "num_stages": 2}, "segment"),
    "scan_back": (backward.scan_back_kernel, {"BLOCK": 64, "num_warps": 2}, "BLOCK"),
    "sinks": (backward.sinks_kernel, {"BM": 64, "num_warps": 4, "num_stages": 2}, "segment"),
    "keys": (backward.keys_kernel, {"BM": 64, "BN": 64, "num_warps": 4, "num_stages": 1}, "BN"),
}


class Launcher:
    """Gives every kernel what it knows of a call beside its tensors."""

    def __init__(self, call: AttentionCall, query: Tensor, key: Tensor, value: Tensor):
        softmax, layout = call.softmax, call.layout
        self.layout: GridLayout = layout
        self.itemsize = query.itemsize
        self.recorded = torch.is_grad_enabled()  # within the autograd function nobody can tell
        tensors = (layout.source, layout.skipped, layout.document, layout.left, *(softmax.rotary or (None, None)))
        self.known = Known(
            *(x if x is None else x.contiguous() for x in tensors), heads=query.shape[1], kv_heads=key.shape[1],
            length=layout.segment_length, scale=softmax.scaling_of(query), eps=call.rule.eps,
        )  # fmt: skip
        # The interpreter's products of 16 bits are wrong
        short = {} if INTERPRETED else {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
        self.constants = Constants(
            D=query.shape[3], E=value.shape[3], W=layout.local_segments, SINKS=layout.sink_tokens,
            SINK_TILE=triton.next_power_of_2(max(16, layout.sink_tokens)),
            SIGNED=None if softmax.rotary is None else signed_sines(softmax), EXP=call.rule.feature_map == "exp",
            DTYPE=short.get(query.dtype, tl.float32), BM=0, BN=0,
        )  # fmt: skip
        # The segment that the next token falls into, `[batch]`, whose state is that after the call; `None`: it is not wanted
        self.last = layout.tokens_seen // layout.segment_length + layout.document[:, -1] if call.return_state else None

    def tiles(self, name: str) -> tuple[dict[str, int], int]:
        """Of a kernel: no more tokens than a segment has, and than fit on the chip in this width; and how many there are."""
        _, tiles, of = KERNELS[name]
        width, value_width = self.constants.D, self.constants.E
        if of == "BLOCK":
            return tiles, triton.cdiv(width * value_width + width, tiles[of])
        most = triton.next_power_of_2(max(16, self.layout.slots))
        if max(width, value_width) * self.itemsize > 128:
            most = min(most, 32)
        if name == "queries" and max(width, value_width) > 64:
            tiles = tiles | {"num_warps": 8}  # with 4, too little of what it works on fits into registers
        tiles = {part: min(size, most) if part[0] == "B" else size for part, size in tiles.items()}
        return tiles, self.layout.segments * (1 if of == "segment" else triton.cdiv(self.layout.slots, tiles[of]))

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
    layout, softmax, state, log_weight = call.layout, call.softmax, call.state, call.tokens.log_weight
    kind, dtype = call.tokens.query.device.type, call.tokens.query.dtype
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else dtype
    query, key, value = (tensor.to(dtype) for tensor in call.tokens[:3])
    if layout.carried:
        key, value = (_with_window(layout, *pair) for pair in ((key, state.local_key), (value, state.local_value)))
        if log_weight is not None and state.local_log_weight is not None:
            log_weight = _with_window(layout, log_weight, state.local_log_weight)
    memory_query, memory_key = None, None if log_weight is None else key.float() + log_weight.float()
    if softmax.query_weight is not None:
        memory_query, query = query, query @ softmax.query_weight.to(dtype)
    sink_key = sink_value = None
    if layout.sink_tokens and layout.begun:  # they may be in the state's window, which the grid does not hold
        pairs = (call.tokens.key, state.local_key), (call.tokens.value, state.local_value)
        sink_key, sink_value = (layout.sinks(*pair).permute(0, 3, 1, 2, 4).to(dtype) for pair in pairs)
        sink_key = softmax.compared_keys(sink_key, slice(0, layout.sink_tokens))
        sink_key, sink_value = sink_key.flatten(2, 3), sink_value.flatten(2, 3)
    tensors = (query, key, value, memory_query, memory_key, sink_key, sink_value)
    tensors = [x if x is None or x.stride(-1) == 1 else x.contiguous() for x in tensors]
    before = [x.float().contiguous() if layout.begun else None for x in (state.memory, state.normaliser)]
    with torch.cuda.device_of(query):  # else Triton takes the current one
        output, *after = Linear.apply(*tensors, call.gate, *before, Launcher(call, query, key, value))
    output = output.to(call.tokens.value.dtype)
    if not call.return_state:
        return output, None, None
    state = state.map_windows(lambda window, new: layout.next_window(new, window), call.tokens)
    return output, state.after(layout, memory=after[0], normaliser=after[1]), None


def _with_window(layout: GridLayout, new: Tensor, window: Tensor) -> Tensor:
    """Rows of the grid: what it holds of the window, and the call's tokens, `[batch, heads, rows, dim]`."""
    begin = layout.carried_to - layout.carried
    return torch.cat([window[:, :, begin : layout.carried_to].to(new.dtype), new], 2)


def _rows(x: Tensor | None) -> Rows | None:
    return None if x is None else Rows(x, *x.stride()[:3])


def _parts_of(state: Tensor | None, width: int) -> tuple[Any, Any]:
    """Memory `[…, D, E]` and normaliser `[…, D]` of states `[…, D · E + D]`; of `None` twice `None`."""
    if state is None:
        return None, None
    memory, normaliser = state.split([state.shape[-1] - width, width], -1)
    return memory.unflatten(-1, (width, -1)), normaliser


class Linear(Function):
    """The linear rule, sinks and window, by the formulas of forward.py and backward.py. Arguments: queries, keys and values
    (these two of all rows of the grid); queries and keys of the memory, or `None`: the same; the sinks' turned keys and
    values, `[batch, kv_heads, groups · sinks, …]`, where they are apart; the gate; memory and normaliser before the call, or
    `None`: empty; the [`Launcher`]."""

    @staticmethod
    def forward(ctx, query, key, value, memory_query, memory_key, sink_key, sink_value, gate, memory, normaliser, launcher):
        (batch, heads, tokens, width), (_, kv_heads, _, value_width) = query.shape, value.shape
        new, layout = functools.partial(query.new_empty, dtype=torch.float32), launcher.layout
        states = new(batch, kv_heads, layout.segments + 1, width * value_width + width)
        wrote = torch.empty_like(states[:, :, :-1])
        launcher.launch("write", _rows(key if memory_key is None else memory_key), _rows(value), _rows(wrote))
        launcher.launch("scan", _rows(wrote), _rows(states), (memory, normaliser))
        del wrote
        turned_key = launcher.turned(key, 0, 0)
        make = torch.empty if layout.source is None else torch.zeros  # padding is zero
        output = make(batch, tokens, heads, value_width, dtype=value.dtype, device=value.device).transpose(1, 2)
        save = launcher.recorded and any(ctx.needs_input_grad)
        found, log_sum = (torch.empty_like(output), new(batch, heads, tokens)) if save else (None, None)
        window = Window(*map(_rows, (turned_key, value, sink_key, sink_value)))
        mq = _rows(query if memory_query is None else memory_query)
        launcher.launch("attend", _rows(query), mq, window, _rows(output), _rows(found), log_sum, _rows(states), gate)
        ctx.launcher = launcher
        ctx.save_for_backward(
            query, key, value, memory_query, memory_key, sink_key, sink_value, gate, turned_key, found, log_sum, states
        )
        ctx.set_materialize_grads(False)
        if launcher.last is None:
            return output, None, None
        after = states[torch.arange(batch, device=query.device), :, launcher.last]
        return output, *(part.contiguous() for part in _parts_of(after, width))

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient, *to_after):
        query, key, value, memory_query, memory_key, *others = ctx.saved_tensors
        sink_key, sink_value, gate, turned_key, found, log_sum, states = others
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
        window = Window(*map(_rows, (turned_key, value, sink_key, sink_value)))
        along, inverse, to_mass = new(3, batch, heads, tokens)
        to_gate = new(batch, heads, launcher.tiles("queries")[1])
        results = (along, inverse, to_mass, _rows(to_query), _rows(to_memory_query), to_gate)
        launcher.launch("queries", q, mq, window, g, _rows(found), log_sum, *results, _rows(states), gate)
        to_states, to_wrote = map(_rows, new(2, batch, kv_heads, layout.segments, size))
        to_before = new(batch, kv_heads, size) if any(ctx.needs_input_grad[8:10]) else None
        to_after = tuple(x if x is None else x.contiguous() for x in to_after)
        launcher.launch("states", to_states, mq, g, inverse, to_mass)
        launcher.launch("scan_back", to_states, to_wrote, launcher.last, to_after, to_before)

        first_place = layout.sink_tokens + layout.local_segments * layout.segment_length
        seeing = Seeing(_rows(launcher.turned(query, first_place, layout.carried)), g, log_sum, along)
        of_sinks = to_sinks = (None, None)
        if layout.sink_tokens:
            widths = [width, value_width]
            owed = new(batch, kv_heads, layout.segments, layout.sink_tokens, sum(widths))
            launcher.launch("sinks", *map(_rows, owed.flatten(2, 3).split(widths, -1)), window, seeing, gate)
            if sink_key is None or layout.source is None:
                owed = _sums_by_document(owed, layout)
            parts = owed.flatten(2, 3).split(widths, -1)
            if sink_key is None:  # they are among the keys
                of_sinks = tuple(map(_rows, parts))
            else:
                to_sinks = tuple(part.to(query.dtype) for part in parts)
        launcher.launch("keys", k, mk, v, seeing, *map(_rows, (to_key, to_memory_key, to_value)), to_wrote, *of_sinks, gate)

        to_gate, of_memory = to_gate.sum((0, 2)).to(gate.dtype), _parts_of(to_before, width)
        return to_query, to_key, to_value, to_memory_query, to_memory_key, *to_sinks, to_gate, *of_memory, None


def _sums_by_document(to_sinks: Tensor, layout: GridLayout) -> Tensor:
    """What all segments owe to the sinks, `[batch, kv_heads, segments, …]`, at their document's first segment."""
    if layout.source is None:
        return to_sinks.sum(2, keepdim=True)
    first = torch.arange(layout.segments, device=to_sinks.device)[:, None]
    member = (layout.document[:, None, :-1] == first).to(to_sinks.dtype)
    return (member.unsqueeze(1) @ to_sinks.flatten(3)).unflatten(-1, to_sinks.shape[3:])
