"""The linear rule by kernels of our own, forward and backward, behind one autograd function.

Against plain torch, which reads and writes each intermediate result, a layer reads its inputs two or three times: scores,
features and what was read never leave the chip. Beside the output, training keeps what the window found, one number a token
and head, and the states of the segments, and computes the rest again.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from ..backends import Attended, AttentionCall
from ..layout.base import GridLayout, IndexedLayout, PlainLayout
from ..rules.base import mapped
from ..window import Rotary
from . import backward, forward
from .parts import INTERPRETED
from .rotary import halves_of

SCAN = {"BLOCK": 128, "num_warps": 1}
# Tokens at a time, warps and stages of the software pipeline, by kernel: measured on an H100
TILES: dict[str, dict[str, int]] = {
    "turn": {"BT": 64, "num_warps": 4},
    "write": {"BT": 64, "num_warps": 4, "num_stages": 2},
    "attend": {"BM": 64, "BN": 64, "num_warps": 4, "num_stages": 2},
    "queries": {"BM": 64, "BN": 64, "num_warps": 4, "num_stages": 2},
    "states": {"BM": 64, "num_warps": 4, "num_stages": 2},
    "sinks": {"BM": 64, "num_warps": 4, "num_stages": 2},
    "keys": {"BM": 64, "BN": 64, "num_warps": 4, "num_stages": 2},
}


class Grid(NamedTuple):
    """What the kernels know of a call beside its tensors.

    Attributes:
        layout: of the call. rotary: cosines, sines, and whether the first half of these is negative; or `None`.
        exp, scale, eps: feature map, factor of the scores, ε.
        continued: whether the state before the call is another than that of a new document.
        started: whether a new document has a memory.
        last: segment of the next token, `[batch]`; `None`: the state after the call is not wanted.
        dtype: of the window's products.
    """

    layout: GridLayout
    rotary: tuple[Tensor, Tensor, bool] | None
    exp: bool
    scale: float
    eps: float
    continued: bool
    started: bool
    last: Tensor | None
    dtype: torch.dtype

    @property
    def count(self) -> int:
        """Rows of keys: the window's and the call's."""
        return self.layout.carried + self.layout.tokens

    def tiles(self, kernel: str, *tensors: Tensor) -> dict[str, int]:
        """Of a kernel: no more tokens than a segment has, and than fit on the chip in these tensors' width."""
        tiles = TILES[kernel]
        fits = max(16, triton.next_power_of_2(self.layout.slots))
        if max(t.shape[-1] * t.itemsize for t in tensors) > 128:
            fits = min(fits, 32)
        return tiles | {name: min(size, fits) for name, size in tiles.items() if name.startswith("B")}

    def constants(self) -> dict[str, Any]:
        return {"INDEXED": isinstance(self.layout, IndexedLayout), "STARTED": self.started, "EXP": self.exp}

    def products(self) -> dict[str, Any]:
        """How the memory's products are computed."""
        short = self.dtype != torch.float32
        return {"SPLIT": short and not INTERPRETED, "EXACT": "ieee" if INTERPRETED else "tf32x3"}

    def scores(self) -> dict[str, Any]:
        """How the window's products are: the interpreter's of 16 bits are wrong."""
        dtype = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}.get(self.dtype, tl.float32)
        return {"DTYPE": tl.float32 if INTERPRETED else dtype, "PRECISION": "ieee" if INTERPRETED else "tf32x3"}

    def turned(self, x: Tensor, first_place: int, shift: int) -> Tensor:
        """x `[batch, heads, tokens, width]` turned by its slots; shift: rows before those of x."""
        if self.rotary is None:
            return x
        cos, sin, signed = self.rotary
        batch, heads, tokens, width = x.shape
        layout, turned = self.layout, _rows_like(x, tokens, x.dtype)
        tiles = self.tiles("turn", x)
        forward.turn_kernel[layout.segments * triton.cdiv(layout.slots, tiles["BT"]), heads, batch](
            x, turned, _source(layout), cos, sin, *x.stride()[:3], heads, shift + tokens, shift, first_place,
            layout.segments, layout.slots, D=width, SIGNED=signed, INDEXED=isinstance(layout, IndexedLayout), **tiles,
        )  # fmt: skip
        return turned


def run(call: AttentionCall) -> Attended:
    """As [`attend`] of ops/attention.py, for a call that fits."""
    layout, rule, state = call.layout, call.rule, call.state
    dtype = _dtype(call)
    query, key, value = (tensor.to(dtype) for tensor in call.tokens[:3])
    log_weight = call.tokens.log_weight
    last = _last_segment(layout) if call.return_state else None
    memory_query = None if rule.query_map is None else mapped(query.float(), rule.query_map)
    if layout.carried:
        key, value = (_with_window(layout, *pair) for pair in ((key, state.local_key), (value, state.local_value)))
        log_weight = None if log_weight is None else _with_window(layout, log_weight, state.local_log_weight)
    memory_key = None
    if rule.key_map is not None or log_weight is not None:
        memory_key = mapped(key.float(), rule.key_map)
        memory_key = memory_key if log_weight is None else memory_key + log_weight.float()
    softmax, started = call.softmax, state.start_memory is not None
    if softmax.query_weight is not None:
        memory_query = query if memory_query is None else memory_query
        query = query @ softmax.query_weight.to(dtype)
    sinks = (None, None)
    if layout.sink_tokens:
        sink_key = _sinks(layout, key, state.local_key)
        if softmax.rotary is not None:
            sink_key = softmax.rotary(sink_key, slice(0, layout.sink_tokens))
        sinks = (sink_key.contiguous(), _sinks(layout, value, state.local_value).contiguous())
    rotary = None if softmax.rotary is None else _tables(softmax.rotary)
    continued = started or bool(layout.carried or (isinstance(layout, PlainLayout) and layout.seen))
    scale = softmax.scaling_of(query)
    grid = Grid(layout, rotary, rule.feature_map == "exp", scale, rule.eps, continued, started, last, dtype)
    start = state.start() if started else (None, None)
    before = (state.memory, state.normaliser) if grid.continued else (None, None)
    if (memory_query is None) != (memory_key is None):  # one of the two is mapped: both are arguments of their own
        memory_query, memory_key = query if memory_query is None else memory_query, key if memory_key is None else memory_key
    output, *after = Linear.apply(query, key, value, memory_query, memory_key, *sinks, call.gate, *before, *start, grid)
    output = output.to(call.tokens.value.dtype)
    if not call.return_state:
        return Attended(output, None, None)
    state = state.map_windows(lambda window, new: layout.next_window(new, window), call.tokens)
    return Attended(output, state.after(layout, memory=after[0], normaliser=after[1]), None)


def _dtype(call: AttentionCall) -> torch.dtype:
    kind = call.tokens.query.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else call.tokens.query.dtype


def _tables(rotary: Rotary) -> tuple[Tensor, Tensor, bool]:
    cos, sin = (table.contiguous() for table in rotary.tables)
    return cos, sin, halves_of(rotary) == "signed"


def _source(layout: GridLayout) -> Tensor | None:
    return layout.source.contiguous() if isinstance(layout, IndexedLayout) else None


def _last_segment(layout: GridLayout) -> Tensor:
    """`[batch]`: the segment of the grid that the next token falls into, whose state is that after the call."""
    return (layout.tokens_seen // layout.segment_length + layout.document[:, -1]).contiguous()


def _with_window(layout: GridLayout, new: Tensor, window: Tensor | None) -> Tensor:
    """Rows of the grid: what it holds of the window, and the call's tokens, `[batch, heads, rows, dim]`."""
    begin = layout.sink_tokens
    if isinstance(layout, PlainLayout):
        begin += (layout.local_segments - layout.seen // layout.segment_length + layout.first) * layout.segment_length
    return torch.cat([window[:, :, begin : begin + layout.carried].to(new.dtype), new], 2)


def _sinks(layout: GridLayout, rows: Tensor, window: Tensor) -> Tensor:
    """The sinks of every segment, or of all, `[batch, heads, segments or 1, sinks, dim]`. rows: those of the grid."""
    count = layout.sink_tokens
    if isinstance(layout, PlainLayout):
        if layout.first or layout.seen >= count:
            return window[:, :, None, :count].to(rows.dtype)
        front = rows[:, :, :count]  # the grid begins with the document
        return torch.nn.functional.pad(front, (0, 0, 0, count - front.shape[2])).unsqueeze(2)
    document, source = layout.document[:, :-1], layout.source
    slots = torch.arange(count, device=rows.device)
    at = document.clamp(min=0).unsqueeze(-1) * layout.slots + slots
    row = source.gather(1, at.clamp(max=source.shape[1] - 1).flatten(1)).unflatten(1, at.shape[1:])
    there = (row >= 0) & (slots < layout.slots)
    batch = torch.arange(layout.batch, device=rows.device)[:, None, None]
    # Advanced indices, whose gradient is summed in a fixed order
    front = (rows.transpose(1, 2)[batch, row.clamp(min=0)] * there[..., None, None]).permute(0, 3, 1, 2, 4)
    if not layout.carried:
        return front
    known = (document < 0).unsqueeze(-1) | (there & (row < layout.carried))
    return torch.where(known[:, None, :, :, None], window[:, :, None, :count].to(rows.dtype), front)


def _rows_like(x: Tensor, tokens: int, dtype: torch.dtype, zeros: bool = False) -> Tensor:
    """`[batch, heads, tokens, width]` of x, the heads after the tokens in the memory of the machine."""
    make = torch.zeros if zeros else torch.empty
    return make(x.shape[0], tokens, x.shape[1], x.shape[3], dtype=dtype, device=x.device).transpose(1, 2)


def _strides(*tensors: Tensor) -> list[int]:
    return [stride for tensor in tensors for stride in tensor.stride()[:3]]


def _document(layout: GridLayout) -> tuple[Tensor, int]:
    """The layout's `document`, and the stride of its rows."""
    return layout.document, layout.document.stride(0) if layout.document.shape[0] > 1 else 0


class Linear(Function):
    """The linear rule, sinks and window; forward.py and backward.py have the formulas.

    Arguments: queries, keys, values (keys and values of all rows of the grid); queries and keys of the memory, or `None`:
    the same; the sinks' turned keys and values; the gate; memory and normaliser before the call; start memory and normaliser;
    the [`Grid`].
    """

    @staticmethod
    def forward(
        ctx, query, key, value, memory_query, memory_key, sink_key, sink_value, gate, memory, normaliser, start, start_mass, grid
    ):
        layout, mapped_apart = grid.layout, memory_query is not None
        query, key, value = (t if t.stride(-1) == 1 else t.contiguous() for t in (query, key, value))
        memory_query, memory_key = (memory_query.contiguous(), memory_key.contiguous()) if mapped_apart else (query, key)
        memory, normaliser, start, start_mass = (
            None if t is None else t.float().contiguous() for t in (memory, normaliser, start, start_mass)
        )
        (batch, heads, tokens, width), kv_heads, value_width = query.shape, key.shape[1], value.shape[3]
        segments, slots, local, sinks = layout.segments, layout.slots, layout.local_segments, layout.sink_tokens
        size = width * value_width + width
        document, document_b = _document(layout)
        skipped = None if layout.skipped is None else layout.skipped.contiguous()
        source, held = _source(layout), layout.memory_tokens_before
        new = query.new_empty
        wrote = new(batch, kv_heads, segments, size, dtype=torch.float32)
        states = new(batch, kv_heads, segments + 1, size, dtype=torch.float32)
        widths = {"D": width, "E": value_width, "SINKS": sinks}
        constants, products = grid.constants(), grid.products()
        forward.write_kernel[segments, kv_heads, batch](
            memory_key, value, wrote, source, skipped, document, *_strides(memory_key, value), document_b, kv_heads,
            grid.count, segments, slots, **widths, INDEXED=constants["INDEXED"], SKIPPING=skipped is not None, EXP=grid.exp,
            **products, **grid.tiles("write", value),
        )  # fmt: skip
        forward.scan_kernel[triton.cdiv(size, SCAN["BLOCK"]), kv_heads, batch](
            wrote, states, memory, normaliser, start, start_mass, document, document_b, segments, kv_heads,
            width * value_width, size, W=local, CONTINUED=grid.continued, STARTED=grid.started, **SCAN,
        )  # fmt: skip
        del wrote
        turned_key = grid.turned(key, 0, 0)
        output = _rows_like(value[:, :1].expand(-1, heads, -1, -1), tokens, value.dtype, zeros=constants["INDEXED"])
        save = any(ctx.needs_input_grad)
        found = torch.empty_like(output) if save else None
        log_sum = new(batch, heads, tokens, dtype=torch.float32) if save else None
        cos, sin, signed = grid.rotary or (None, None, False)
        groups = 1 if sink_key is None else sink_key.shape[2]
        tiles = grid.tiles("attend", query, value)
        forward.attend_kernel[segments * triton.cdiv(slots, tiles["BM"]), heads, batch](
            query, memory_query, turned_key, value, sink_key, sink_value, output, found, log_sum, states, gate, source, document,
            held, cos, sin, *_strides(query, memory_query, turned_key, value), document_b, held.stride(0), heads, kv_heads,
            grid.count, layout.carried, segments, slots, layout.segment_length, groups, grid.scale, grid.eps, **widths, W=local,
            SINK_TILE=_sink_tile(sinks), ROTARY=cos is not None, SIGNED=signed, SAVE=save, **constants, **grid.scores(),
            **products, **tiles,
        )  # fmt: skip
        after = after_mass = None
        if grid.last is not None:
            after = states[torch.arange(batch, device=query.device), :, grid.last]
            after, after_mass = after[..., : width * value_width].unflatten(-1, (width, value_width)), after[..., -width:]
            after, after_mass = after.contiguous(), after_mass.contiguous()
        ctx.save_for_backward(
            query, key, value, memory_query if mapped_apart else None, memory_key if mapped_apart else None, sink_key, sink_value,
            gate, turned_key if cos is not None else None, found, log_sum, states,
        )  # fmt: skip
        ctx.grid = grid
        ctx.set_materialize_grads(False)
        return output, after, after_mass

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient, to_after, to_after_mass):
        query, key, value, memory_query, memory_key, sink_key, sink_value, gate, turned_key, found, log_sum, states = (
            ctx.saved_tensors
        )
        grid, apart = ctx.grid, memory_query is not None
        layout = grid.layout
        memory_query, memory_key = (memory_query, memory_key) if apart else (query, key)
        turned_key = key if turned_key is None else turned_key
        (batch, heads, tokens, width), kv_heads, value_width = query.shape, key.shape[1], value.shape[3]
        segments, slots, local, sinks = layout.segments, layout.slots, layout.local_segments, layout.sink_tokens
        size, of_memory = width * value_width + width, width * value_width
        gradient = torch.zeros_like(found) if gradient is None else gradient
        gradient = gradient if gradient.stride(-1) == 1 else gradient.contiguous()
        document, document_b = _document(layout)
        skipped = None if layout.skipped is None else layout.skipped.contiguous()
        source, held = _source(layout), layout.memory_tokens_before
        cos, sin, signed = grid.rotary or (None, None, False)
        groups = 1 if sink_key is None else sink_key.shape[2]
        constants, products, scores = grid.constants(), grid.products(), grid.scores()
        widths = {"D": width, "E": value_width}
        turning = {"ROTARY": cos is not None, "SIGNED": signed}
        window = {"W": local, "SINKS": sinks}

        def new(*shape):
            return query.new_empty(*shape, dtype=torch.float32)

        zeros = constants["INDEXED"]  # for padding
        to_query = _rows_like(query, tokens, query.dtype, zeros)
        to_key, to_value = (_rows_like(t, grid.count, t.dtype, zeros) for t in (key, value))
        to_memory_query = _rows_like(query, tokens, memory_query.dtype, zeros) if apart else None
        to_memory_key = _rows_like(key, grid.count, memory_key.dtype, zeros) if apart else None
        along, inverse, to_mass = new(3, batch, heads, tokens)
        tiles = grid.tiles("queries", query, value)
        blocks = segments * triton.cdiv(slots, tiles["BM"])
        to_gate = new(batch, heads, blocks)
        backward.queries_kernel[blocks, heads, batch](
            query, memory_query, turned_key, value, sink_key, sink_value, gradient, found, log_sum, along, inverse, to_mass,
            to_query, to_memory_query, to_gate, states, gate, source, document, held, cos, sin,
            *_strides(query, memory_query, turned_key, value, gradient), document_b, held.stride(0), heads, kv_heads,
            grid.count, layout.carried, segments, slots, layout.segment_length, groups, grid.scale, grid.eps, **widths, **window,
            SINK_TILE=_sink_tile(sinks), MAPPED=apart, **turning, **constants, **scores, **products, **tiles,
        )  # fmt: skip
        to_states, to_wrote = new(batch, kv_heads, segments, size), new(batch, kv_heads, segments, size)
        backward.states_kernel[segments, kv_heads, batch](
            memory_query, gradient, inverse, to_mass, to_states, source, held, *_strides(memory_query, gradient), held.stride(0),
            heads, kv_heads, grid.count, layout.carried, segments, slots, **widths, **constants, **products,
            **grid.tiles("states", query, value),
        )  # fmt: skip
        has_last = to_after is not None or to_after_mass is not None
        if has_last:
            to_after = new(batch, kv_heads, of_memory).zero_() if to_after is None else to_after.contiguous()
            to_after_mass = new(batch, kv_heads, width).zero_() if to_after_mass is None else to_after_mass.contiguous()
        to_memory = to_normaliser = to_start = None
        if grid.continued:
            to_memory, to_normaliser = new(batch, kv_heads, width, value_width), new(batch, kv_heads, width)
        if grid.started:
            to_start = new(batch, kv_heads, size)
        backward.scan_back_kernel[triton.cdiv(size, SCAN["BLOCK"]), kv_heads, batch](
            to_states, to_wrote, grid.last, to_after, to_after_mass, to_memory, to_normaliser, to_start, document, document_b,
            segments, kv_heads, of_memory, size, W=local, LAST=has_last, CONTINUED=grid.continued, STARTED=grid.started, **SCAN,
        )  # fmt: skip
        del to_states
        turned_query = grid.turned(query, sinks + local * layout.segment_length, layout.carried)
        to_sinks = None
        if sinks:
            to_sinks = new(batch, kv_heads, segments, sinks, width + value_width)
            backward.sinks_kernel[segments, kv_heads, batch](
                turned_query, sink_key, sink_value, gradient, log_sum, along, to_sinks, gate, source, document, held,
                *_strides(turned_query, gradient), document_b, held.stride(0), heads, kv_heads, grid.count, layout.carried,
                segments, slots, groups, grid.scale, **widths, **window, SINK_TILE=_sink_tile(sinks),
                INDEXED=constants["INDEXED"], STARTED=grid.started, **scores, **grid.tiles("sinks", query, value),
            )  # fmt: skip
            to_sinks = to_sinks.sum(2, keepdim=True) if groups == 1 else to_sinks
        tiles = grid.tiles("keys", query, value)
        backward.keys_kernel[segments * triton.cdiv(slots, tiles["BN"]), kv_heads, batch](
            turned_query, key, memory_key, value, gradient, log_sum, along, to_key, to_memory_key, to_value, to_wrote, gate,
            source, document, held, skipped, cos, sin, *_strides(turned_query, key, memory_key, value, gradient), document_b,
            held.stride(0), heads, kv_heads, grid.count, layout.carried, segments, slots, layout.segment_length, grid.scale,
            **widths, **window, SKIPPING=skipped is not None, MAPPED=apart, **turning, **constants, **scores, **products, **tiles,
        )  # fmt: skip
        of_sinks = (None, None)
        if to_sinks is not None:
            of_sinks = tuple(part.to(query.dtype) for part in to_sinks.split([width, value_width], -1))
        of_start = (None, None)
        if to_start is not None:
            to_start = to_start.sum(0)
            of_start = (to_start[:, :of_memory].unflatten(-1, (width, value_width)), to_start[:, of_memory:])
        to_gate = to_gate.sum((0, 2)).to(gate.dtype)
        return (
            to_query, to_key, to_value, to_memory_query, to_memory_key, *of_sinks, to_gate, to_memory, to_normaliser, *of_start,
            None,
        )  # fmt: skip


def _sink_tile(sinks: int) -> int:
    return max(16, triton.next_power_of_2(max(1, sinks)))
