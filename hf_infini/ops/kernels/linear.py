"""The linear rule by kernels of our own, forward and backward, behind one autograd function.

Against plain torch, which reads and writes each intermediate result, a layer reads its inputs two or three times: scores,
features and what was read never leave the chip. Beside the output, training keeps what the window found, one number a token
and head, and the states of the segments, and computes the rest again.
"""

from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from ..layout.base import GridLayout
from ..memory import mapped
from ..state import Attended, AttentionCall
from ..window import ScoreOptions
from . import backward, forward
from .parts import INTERPRETED
from .rotary import halves_of

# Tokens at a time, warps and stages of the software pipeline, by kernel: the fastest of eight measured on an H100
TILES: dict[str, dict[str, int]] = {
    "turn": {"BT": 32, "num_warps": 4, "num_stages": 2},
    "write": {"BT": 64, "num_warps": 4, "num_stages": 3},
    "attend": {"BM": 64, "BN": 64, "num_warps": 4, "num_stages": 3},
    "queries": {"BM": 64, "BN": 64, "num_warps": 4, "num_stages": 3},
    "states": {"BM": 32, "num_warps": 4, "num_stages": 2},
    "sinks": {"BM": 64, "num_warps": 4, "num_stages": 2},
    "keys": {"BM": 64, "BN": 64, "num_warps": 4, "num_stages": 1},
}
SCAN = {"BLOCK": 64, "num_warps": 2}


class Grid(NamedTuple):
    """What the kernels know of a call beside its tensors.

    Attributes:
        layout: of the call. rotary: cosines, sines, and whether the first half of these is negative; or `None`.
        exp, scale, eps: feature map, factor of the scores, ε.
        apart: whether the sinks may be in the state's window, which the grid does not hold.
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
    apart: bool
    continued: bool
    started: bool
    last: Tensor | None
    dtype: torch.dtype

    def values(self, query: Tensor, key: Tensor, value: Tensor) -> dict[str, Any]:
        """What is the same for all kernels, by the names of their arguments. The interpreter's products of 16 bits are
        wrong."""
        layout, short = self.layout, {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}.get(self.dtype)
        (_, heads, tokens, width), kv_heads, value_width = query.shape, key.shape[1], value.shape[3]
        document, indexed = layout.document, layout.source is not None
        source, held = None if layout.source is None else layout.source.contiguous(), layout.left
        cos, sin, signed = self.rotary or (None, None, False)
        sinks, exact = layout.sink_tokens, "ieee" if INTERPRETED else "tf32x3"
        return {
            "source": source, "held": held, "held_b": None if held is None else held.stride(0),
            "skipped": None if layout.skipped is None else layout.skipped.contiguous(),
            "document": document, "document_b": document.stride(0) if document.shape[0] > 1 else 0,
            "cos": cos, "sin": sin,
            "heads": heads, "kv_heads": kv_heads, "count": layout.carried + tokens, "carried": layout.carried,
            "segments": layout.segments, "width": layout.slots, "length": layout.segment_length,
            "of_memory": width * value_width, "size": width * value_width + width, "scale": self.scale, "eps": self.eps,
            "D": width, "E": value_width, "W": layout.local_segments, "SINKS": sinks,
            "SINK_TILE": _power_of_two(max(16, sinks)), "APART": self.apart, "INDEXED": indexed,
            "SKIPPING": layout.skipped is not None, "ROTARY": cos is not None,
            "SIGNED": signed, "EXP": self.exp, "STARTED": self.started, "CONTINUED": self.continued,
            "DTYPE": short or tl.float32, "PRECISION": exact, "SPLIT": short is not None, "EXACT": exact,
        } | ({"DTYPE": tl.float32, "SPLIT": False} if INTERPRETED else {})  # fmt: skip

    def tiles(self, name: str, *tensors: Tensor) -> dict[str, int]:
        """Of a kernel: no more tokens than a segment has, and than fit on the chip in these tensors' width."""
        most, tiles = _power_of_two(max(16, self.layout.slots)), TILES[name]
        if max(tensor.shape[-1] * tensor.itemsize for tensor in tensors) > 128:
            most = min(most, 32)
        if name == "queries" and max(tensor.shape[-1] for tensor in tensors) > 64:
            tiles = tiles | {"num_warps": 8}  # with 4, too little of what it works on fits into registers
        return {part: min(size, most) if part[0] == "B" else size for part, size in tiles.items()}

    def turned(self, values: dict[str, Any], x: Tensor, first_place: int, shift: int) -> Tensor:
        """x `[batch, heads, tokens, width]` turned by its slots; shift: rows before those of x."""
        if self.rotary is None:
            return x
        batch, heads, tokens, _ = x.shape
        turned, tiles = _rows_like(x, tokens, x.dtype), self.tiles("turn", x)
        grid = (self.layout.segments * _ceil(self.layout.slots, tiles["BT"]), heads, batch)
        own = {"turned": turned, "heads": heads, "count": shift + tokens, "shift": shift, "first_place": first_place}
        launch(forward.turn_kernel, grid, values | _named(x=x) | own, tiles)
        return turned


def launch(kernel: Any, grid: tuple[int, int, int], values: dict[str, Any], tiles: dict[str, int]) -> None:
    """Runs a kernel with those of the values that it has arguments for."""
    values = values | tiles
    options = {name: size for name, size in tiles.items() if name[0] != "B"}
    kernel[grid](*[values[name] for name in kernel.arg_names], **options)


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
        if log_weight is not None and state.local_log_weight is not None:
            log_weight = _with_window(layout, log_weight, state.local_log_weight)
    memory_key = None
    if rule.key_map is not None or log_weight is not None:
        memory_key = mapped(key.float(), rule.key_map)
        memory_key = memory_key if log_weight is None else memory_key + log_weight.float()
    softmax, started = call.softmax, state.start_memory is not None
    if softmax.query_weight is not None:
        memory_query = query if memory_query is None else memory_query
        query = query @ softmax.query_weight.to(dtype)
    apart = layout.begun
    sinks = (None, None)
    if layout.sink_tokens and apart:
        pairs = (call.tokens.key, state.local_key), (call.tokens.value, state.local_value)
        sink_key, sink_value = (layout.sinks(*pair).permute(0, 3, 1, 2, 4).to(dtype) for pair in pairs)
        sink_key = softmax.compared_keys(sink_key, slice(0, layout.sink_tokens))
        sinks = (sink_key.contiguous(), sink_value.contiguous())
    rotary = None if softmax.rotary is None else _tables(softmax)
    scale = softmax.scaling_of(query)
    grid = Grid(layout, rotary, rule.feature_map == "exp", scale, rule.eps, apart, apart or started, started, last, dtype)
    start = state.start() if started else (None, None)
    before = (state.memory, state.normaliser) if grid.continued else (None, None)
    if (memory_query is None) != (memory_key is None):  # one of the two is mapped: both are arguments of their own
        memory_query, memory_key = query if memory_query is None else memory_query, key if memory_key is None else memory_key
    inputs = (query, key, value, memory_query, memory_key, *sinks, call.gate, *before, *start)
    with torch.cuda.device_of(query):  # else Triton takes the current one
        output, *after = Linear.apply(*inputs, grid)
    output = output.to(call.tokens.value.dtype)
    if not call.return_state:
        return output, None, None
    state = state.map_windows(lambda window, new: layout.next_window(new, window), call.tokens)
    return output, state.after(layout, memory=after[0], normaliser=after[1]), None


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def _power_of_two(n: int) -> int:
    """The next one from n on."""
    return 1 << (n - 1).bit_length()


def _dtype(call: AttentionCall) -> torch.dtype:
    kind = call.tokens.query.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else call.tokens.query.dtype


def _tables(softmax: ScoreOptions) -> tuple[Tensor, Tensor, bool]:
    tables: Any = softmax.rotary
    cos, sin = (table.contiguous() for table in tables)
    return cos, sin, halves_of(softmax) == "signed"


def _last_segment(layout: GridLayout) -> Tensor:
    """`[batch]`: the segment of the grid that the next token falls into, whose state is that after the call."""
    return (layout.tokens_seen // layout.segment_length + layout.document[:, -1]).contiguous()


def _with_window(layout: GridLayout, new: Tensor, window: Tensor) -> Tensor:
    """Rows of the grid: what it holds of the window, and the call's tokens, `[batch, heads, rows, dim]`."""
    begin = layout.carried_to - layout.carried
    return torch.cat([window[:, :, begin : layout.carried_to].to(new.dtype), new], 2)


def _rows_like(x: Tensor, tokens: int, dtype: torch.dtype, zeros: bool = False) -> Tensor:
    """`[batch, heads, tokens, width]` of x, the heads after the tokens in the memory of the machine."""
    make = torch.zeros if zeros else torch.empty
    return make(x.shape[0], tokens, x.shape[1], x.shape[3], dtype=dtype, device=x.device).transpose(1, 2)


def _named(**tensors: Tensor | None) -> dict[str, Any]:
    """Tensors and their strides, by the names of the kernels' arguments."""
    values: dict[str, Any] = dict(tensors)
    for name, tensor in tensors.items():
        if tensor is not None:
            values |= zip((f"{name}_b", f"{name}_h", f"{name}_t"), tensor.stride(), strict=False)
    return values


class Linear(Function):
    """The linear rule, sinks and window; forward.py and backward.py have the formulas.

    Arguments: queries, keys, values (keys and values of all rows of the grid); queries and keys of the memory, or `None`:
    the same; the sinks' turned keys and values, where they are apart; the gate; memory and normaliser before the call; start
    memory and normaliser; the [`Grid`].
    """

    @staticmethod
    def forward(ctx, query, key, value, memory_query, memory_key, sink_key, sink_value, gate, *before_and_grid):
        *before, grid = before_and_grid
        query, key, value = (t if t.stride(-1) == 1 else t.contiguous() for t in (query, key, value))
        own_query, own_key = (None if t is None else t.contiguous() for t in (memory_query, memory_key))
        memory, normaliser, start, start_mass = (None if t is None else t.float().contiguous() for t in before)
        batch, heads, tokens, width = query.shape
        kv_heads, segments, size = key.shape[1], grid.layout.segments, width * value.shape[3] + width
        values = grid.values(query, key, value)
        values |= _named(q=query, v=value, mq=query, mk=key)
        if own_query is not None:
            values |= _named(mq=own_query, mk=own_key)
        values |= {"sink_k": sink_key, "sink_v": sink_value, "sink_groups": 1 if sink_key is None else sink_key.shape[2]}
        values |= {"memory": memory, "normaliser": normaliser, "start": start, "start_mass": start_mass, "gate": gate}
        states = query.new_empty(batch, kv_heads, segments + 1, size, dtype=torch.float32)
        values |= {"states": states, "wrote": torch.empty_like(states[:, :, :segments])}
        launch(forward.write_kernel, (segments, kv_heads, batch), values, grid.tiles("write", value))
        launch(forward.scan_kernel, (_ceil(size, SCAN["BLOCK"]), kv_heads, batch), values, SCAN)
        del values["wrote"]
        turned_key = grid.turned(values, key, 0, 0)
        output = _rows_like(value[:, :1].expand(-1, heads, -1, -1), tokens, value.dtype, zeros=values["INDEXED"])
        save = any(ctx.needs_input_grad)
        found = torch.empty_like(output) if save else None
        log_sum = query.new_empty(batch, heads, tokens, dtype=torch.float32) if save else None
        values |= _named(tk=turned_key) | {"out": output, "found": found, "log_sum": log_sum, "SAVE": save}
        tiles = grid.tiles("attend", query, value)
        launch(forward.attend_kernel, (segments * _ceil(grid.layout.slots, tiles["BM"]), heads, batch), values, tiles)
        turned_key = None if grid.rotary is None else turned_key
        ctx.grid = grid
        ctx.save_for_backward(
            query, key, value, own_query, own_key, sink_key, sink_value, gate, turned_key, found, log_sum, states
        )
        ctx.set_materialize_grads(False)
        if grid.last is None:
            return output, None, None
        after = states[torch.arange(batch, device=query.device), :, grid.last]
        after, after_mass = after.split([size - width, width], -1)
        return output, after.unflatten(-1, (width, -1)).contiguous(), after_mass.contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient, to_after, to_after_mass):
        query, key, value, own_query, own_key, *others = ctx.saved_tensors
        sink_key, sink_value, gate, turned_key, found, log_sum, states = others
        grid, apart, layout = ctx.grid, own_query is not None, ctx.grid.layout
        batch, heads, tokens, width = query.shape
        kv_heads, segments, size = key.shape[1], layout.segments, width * value.shape[3] + width
        of_segments, rows = (segments, kv_heads, batch), layout.carried + tokens

        def new(*shape: int) -> Tensor:
            return query.new_empty(*shape, dtype=torch.float32)

        gradient = torch.zeros_like(found) if gradient is None else gradient
        gradient = gradient if gradient.stride(-1) == 1 else gradient.contiguous()
        values = grid.values(query, key, value)
        values |= _named(q=query, k=key, v=value, g=gradient, tk=key if turned_key is None else turned_key)
        values |= _named(mq=own_query if apart else query, mk=own_key if apart else key)
        groups = 1 if sink_key is None else sink_key.shape[2]
        values |= {"sink_k": sink_key, "sink_v": sink_value, "sink_groups": groups, "gate": gate, "states": states}
        zeros = values["INDEXED"]  # for padding
        to_query = _rows_like(query, tokens, query.dtype, zeros)
        to_key, to_value = (_rows_like(t, rows, t.dtype, zeros) for t in (key, value))
        to_own_query = _rows_like(query, tokens, own_query.dtype, zeros) if apart else None
        to_own_key = _rows_like(key, rows, own_key.dtype, zeros) if apart else None
        values |= {"to_q": to_query, "to_k": to_key, "to_v": to_value, "to_mq": to_own_query, "to_mk": to_own_key}
        values |= {"MAPPED": apart, "found": found, "log_sum": log_sum}
        values |= zip(("along", "inverse", "to_mass"), new(3, batch, heads, tokens), strict=True)
        tiles = grid.tiles("queries", query, value)
        blocks = segments * _ceil(layout.slots, tiles["BM"])
        to_gate = new(batch, heads, blocks)
        launch(backward.queries_kernel, (blocks, heads, batch), values | {"to_gate": to_gate}, tiles)

        has_last = to_after is not None or to_after_mass is not None
        if has_last:
            to_after = new(batch, kv_heads, size - width).zero_() if to_after is None else to_after.contiguous()
            to_after_mass = new(batch, kv_heads, width).zero_() if to_after_mass is None else to_after_mass.contiguous()
        to_memory = new(batch, kv_heads, width, value.shape[3]) if grid.continued else None
        to_normaliser = new(batch, kv_heads, width) if grid.continued else None
        to_start = new(batch, kv_heads, size) if grid.started else None
        values |= {"to_states": new(batch, kv_heads, segments, size), "to_wrote": new(batch, kv_heads, segments, size)}
        values |= {"last": grid.last, "LAST": has_last, "to_last_memory": to_after, "to_last_normaliser": to_after_mass}
        values |= {"to_memory": to_memory, "to_normaliser": to_normaliser, "to_start": to_start}
        launch(backward.states_kernel, of_segments, values, grid.tiles("states", query, value))
        launch(backward.scan_back_kernel, (_ceil(size, SCAN["BLOCK"]), kv_heads, batch), values, SCAN)

        first_place = layout.sink_tokens + layout.local_segments * layout.segment_length
        values |= _named(tq=grid.turned(values, query, first_place, layout.carried))
        to_sinks = None
        if layout.sink_tokens:
            to_sinks = new(batch, kv_heads, segments, layout.sink_tokens, width + value.shape[3])
            launch(backward.sinks_kernel, of_segments, values | {"to_sinks": to_sinks}, grid.tiles("sinks", query, value))
            if not grid.apart or groups == 1:
                to_sinks = _sums_by_document(to_sinks, layout)
            values["sink_groups"] = to_sinks.shape[2]
        values["to_sinks"] = to_sinks
        tiles = grid.tiles("keys", query, value)
        launch(backward.keys_kernel, (segments * _ceil(layout.slots, tiles["BN"]), kv_heads, batch), values, tiles)

        of_sinks = of_start = (None, None)
        if to_sinks is not None and grid.apart:
            of_sinks = tuple(part.to(query.dtype) for part in to_sinks.split([width, value.shape[3]], -1))
        if to_start is not None:
            of_start, of_start_mass = to_start.sum(0).split([size - width, width], -1)
            of_start = (of_start.unflatten(-1, (width, -1)), of_start_mass)
        to_gate = to_gate.sum((0, 2)).to(gate.dtype)
        own = (to_own_query, to_own_key)
        return to_query, to_key, to_value, *own, *of_sinks, to_gate, to_memory, to_normaliser, *of_start, None


def _sums_by_document(to_sinks: Tensor, layout: GridLayout) -> Tensor:
    """What all segments owe to their document's sinks, `[batch, kv_heads, segments, …]`, at the document's first segment; of
    a plain layout at the only one."""
    if layout.source is None:
        return to_sinks.sum(2, keepdim=True)
    first = torch.arange(layout.segments, device=to_sinks.device)[:, None]
    member = (layout.document[:, None, :-1] == first).to(to_sinks.dtype)
    return (member.unsqueeze(1) @ to_sinks.flatten(3)).unflatten(-1, to_sinks.shape[3:])
