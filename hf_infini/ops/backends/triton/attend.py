"""Attention by kernels of our own, forward and backward, behind one autograd function.

A layer reads its inputs two or three times: scores, features and what was read never leave the
chip. Training keeps what the window found, one number a token and head, and the states of the
segments, and computes the rest again. Plain torch chooses what is kept. Kernels read chosen tokens
where they are, among the *source* rows: what the state's window has ahead of segments, if any, and
then the rows of the grid.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from ...keeping.choose import add_received, choose_leaving
from ...layout.grid import GridLayout
from ...positions import rotate
from ...state import Attended, AttentionCall, Tokens, row_numbers
from ..grid import compared_window, group_size, kept_before, state_after
from . import backward, forward
from .parts import INTERPRETED, Constants, Known, Rows, Seeing, Window

# By kernel: tokens at a time, warps and stages (of those without kept tokens the fastest of eight
# on an H100), and a program's share
KERNELS: dict[str, tuple[Any, dict[str, int], str]] = {
    "turn": (forward.turn_kernel, {"BM": 32, "num_warps": 4, "num_stages": 2}, "BM"),
    "write": (forward.write_kernel, {"BN": 64, "num_warps": 4, "num_stages": 3}, "segment"),
    "scan": (forward.scan_kernel, {"BLOCK": 64, "num_warps": 2}, "BLOCK"),
    "attend": (forward.attend_kernel, {"BM": 64, "BN": 64, "num_warps": 4, "num_stages": 3}, "BM"),
    "queries": (
        backward.queries_kernel,
        {"BM": 64, "BN": 64, "num_warps": 4, "num_stages": 3},
        "BM",
    ),
    "states": (backward.states_kernel, {"BM": 32, "num_warps": 4, "num_stages": 2}, "segment"),
    "scan_back": (backward.scan_back_kernel, {"BLOCK": 64, "num_warps": 2}, "BLOCK"),
    "ahead": (backward.ahead_kernel, {"BM": 64, "num_warps": 4, "num_stages": 2}, "ahead"),
    "evicted": (backward.evicted_kernel, {"BN": 64, "num_warps": 4, "num_stages": 2}, "BN"),
    "keys": (backward.keys_kernel, {"BM": 64, "BN": 64, "num_warps": 4, "num_stages": 1}, "BN"),
}


class Launcher:
    """Gives every kernel what it knows of a call beside its tensors."""

    def __init__(self, call: AttentionCall, query: Tensor, key: Tensor, value: Tensor):
        softmax, layout = call.softmax, call.layout
        rule: Any = call.rule  # kernels are given calls with a memory
        self.recorded = torch.is_grad_enabled()  # within the autograd function nobody can tell
        # source rows before those of the grid
        self.layout, self.first = layout, layout.window.ahead if layout.begun else 0
        tensors = (
            layout.source,
            layout.skipped,
            layout.document,
            layout.left,
            *(softmax.rotary or (None, None)),
        )
        self.known = Known(
            *(x if x is None else x.contiguous() for x in tensors),
            heads=query.shape[1],
            kv_heads=key.shape[1],
            length=layout.window.segment_length,
            scale=softmax.scaling_of(query),
            eps=rule.eps,
        )
        # The interpreter's products of 16 bits are wrong
        short = {} if INTERPRETED else {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
        self.wide = max(query.shape[3], value.shape[3]) * query.itemsize > 128
        self.ahead = layout.window.sink_tokens + (
            layout.window.kept_tokens if layout.most_kept else 0
        )
        self.constants = Constants(
            D=query.shape[3],
            E=value.shape[3],
            W=layout.window.local_segments,
            SINKS=layout.window.sink_tokens,
            AHEAD=self.ahead
            and min(32 if self.wide else 64, triton.next_power_of_2(max(16, self.ahead))),
            SIGNED=None if softmax.rotary is None else softmax.turn is rotate,
            EXP=rule.feature_map == "exp",
            DTYPE=short.get(query.dtype, tl.float32),
            BM=0,
            BN=0,
        )
        # where the states after the call are, those of the next tokens' segments, if they are
        # wanted
        self.last: Any = None
        if call.return_state:
            segment = layout.tokens_seen // layout.window.segment_length + layout.document[:, -1]
            self.last = torch.arange(len(segment), device=segment.device), slice(None), segment

    def tiles(self, name: str) -> tuple[dict[str, int], int]:
        """Of a kernel: no more tokens than a segment has, and than fit on the chip in this width;
        and how many there are."""
        _, tiles, of = KERNELS[name]
        width, value_width = self.constants.D, self.constants.E
        if of == "BLOCK":
            return tiles, triton.cdiv(width * value_width + width, tiles[of])
        # also of fewer slots: it is compiled in
        most = triton.next_power_of_2(max(16, self.layout.window.segment_length))
        if self.wide:
            most = min(most, 32)
        if name in ("queries", "evicted") and max(width, value_width) > 64:
            # with 4, too little of what it works on fits into registers
            tiles = tiles | {"num_warps": 8}
        tiles = {part: min(size, most) if part[0] == "B" else size for part, size in tiles.items()}
        count = {"segment": 1, "ahead": triton.cdiv(self.ahead, max(1, self.constants.AHEAD))}
        return tiles, self.layout.segments * (
            count[of] if of in count else triton.cdiv(self.layout.slots, tiles[of])
        )

    def launch(self, name: str, *arguments: Any, **compiled_in: Any) -> None:
        """Runs a kernel for all heads and rows of the first of its arguments."""
        (tiles, count), (batch, heads), layout = (
            self.tiles(name),
            arguments[0].data.shape[:2],
            self.layout,
        )
        blocks = {part: tiles[part] for part in ("BM", "BN") if part in tiles}
        options = {part: size for part, size in tiles.items() if part not in blocks}
        constants = self.constants._replace(**blocks)
        kept = self.ahead - layout.window.sink_tokens
        changing = (
            layout.carried + layout.tokens,
            layout.carried,
            layout.segments,
            layout.slots,
            kept,
        )
        KERNELS[name][0][count, heads, batch](
            *arguments, self.known, *changing, C=constants, **compiled_in, **options
        )

    def window(
        self, turned_key: Tensor, key: Tensor, value: Tensor, ahead: Tensor | None
    ) -> Window:
        """Keys and values: of the source."""
        source = (None, None) if ahead is None else (_rows(key), _rows(value))
        return Window(_rows(turned_key), _rows(value[:, :, self.first :]), ahead, *source)

    def turned(self, x: Tensor, first_place: int, shift: int) -> Tensor:
        """x `[batch, heads, rows, width]` turned by its slots; shift: rows before those of x."""
        if self.constants.SIGNED is None:
            return x
        turned = torch.empty_like(x)
        self.launch("turn", _rows(x), _rows(turned), shift, first_place)
        return turned


def run(call: AttentionCall) -> Attended:
    """As [`attend_grid`], for a call that fits."""
    layout, state, query, before = call.layout, call.state, call.query, None
    kept, scores = kept_before(call)
    kind, after = query.device.type, None
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype
    source = [
        _source(layout, *pair) for pair in zip(call.tokens[:3], state.windows(), strict=False)
    ]
    query, key, value = (_readable(part.to(dtype)) for part in (query, *source[:2]))
    memory_key = None if source[2] is None else _readable(key.float() + source[2].float())
    if layout.begun:
        before = torch.cat([state.memory.flatten(2), state.normaliser], 2)
    with torch.cuda.device_of(query):  # else Triton takes the current one
        launcher = Launcher(call, query, key, value)
        ahead, evicted, kept = _chosen(call, kept, scores, launcher)
        output, last = Attend.apply(
            query, key, value, memory_key, ahead, evicted, call.gate, before, launcher
        )
    if last is not None:
        after = (
            last[..., : -key.shape[3]].unflatten(2, (key.shape[3], -1)),
            last[..., -key.shape[3] :],
        )
        if kept is not None:
            index = kept.key[..., 0].masked_fill(kept.position[..., 0] < 0, 0)
            rows = row_numbers(index, key.shape[2])
            found: Any = [
                x if x is None else x.flatten(0, 2)[rows].unflatten(0, index.shape) for x in source
            ]
            kept = kept._replace(key=found[0], value=found[1], log_weight=found[2])
    return (
        output.to(call.tokens.value.dtype),
        state_after(call, kept, scores, after) if call.return_state else None,
        None,
    )


def _source(layout: GridLayout, new: Any, window: Any) -> Any:
    """The source rows, `[batch, heads, rows, dim]`, or `None`."""
    if new is None or not layout.begun:
        return new
    begin = layout.carried_to - layout.carried
    # in the wider dtype
    return torch.cat(
        [window[:, :, : layout.window.ahead], window[:, :, begin : layout.carried_to], new], 2
    )


@torch.no_grad()
def _chosen(
    call: AttentionCall, kept: Tokens | None, scores: Any, launcher: Launcher
) -> tuple[Tensor | None, Tensor | None, Tokens | None]:
    """`ahead` of a [`Window`]; what the memory takes in instead of segments, `[batch, kv_heads,
    segments, slots]`; and what is kept after the call, whose keys are numbers of source rows. Both
    are `None` where nothing is kept. `kept`, `scores`: [`kept_before`]."""
    layout, state, key, chosen = call.layout, call.state, call.tokens.key, []
    first, ahead, before = launcher.first, launcher.ahead, layout.carried_to - layout.carried
    if kept is None and not (layout.begun and ahead):  # sinks are among the keys
        return None, None, None
    found = key.new_full((*key.shape[:2], layout.segments, ahead), -1, dtype=torch.int32)
    if layout.window.sink_tokens:
        rows = torch.where(
            layout.sink_rows < before, layout.sink_rows, layout.sink_rows - before + first
        )
        found[..., : layout.window.sink_tokens] = rows.unsqueeze(1)
    if kept is None:
        return found, None, None
    rows = (
        torch.arange(layout.segments * layout.slots, device=key.device)
        if layout.source is None
        else layout.source
    )
    rows = layout.delay((rows + first).view(-1, layout.segments, layout.slots))
    rows = rows[:, :, None, :, None].expand(layout.batch, -1, key.shape[1], -1, -1)
    places = torch.arange(layout.window.sink_tokens, layout.window.ahead, device=key.device)
    places = places.view(-1, 1).expand(*key.shape[:2], -1, -1)
    kept = Tokens(places, None, None, *kept[3:])
    grids = (
        (layout.to_grid(call.query, None).transpose(2, 3), layout.windows(key, state.local_key))
        if call.keep_score.receiving is not None
        else None
    )
    size = group_size(layout, key)
    for begin in range(0, layout.segments, size):
        of = slice(begin, end := min(begin + size, layout.segments))
        if grids is not None:
            compared = compared_window(
                grids[0][:, of], grids[1][:, of], layout, call.softmax, begin, end
            )
            add_received(call, scores, compared, begin, end)
        leaving = rows[:, of], None, None
        seen, kept, evicted = choose_leaving(call, kept, scores, leaving, begin, end)
        chosen.append((seen, evicted))
    seen, evicted = (
        torch.cat([part.key.masked_fill(part.position < 0, -1) for part in parts], 1)[
            ..., 0
        ].transpose(1, 2)
        for parts in zip(*chosen, strict=True)
    )
    if layout.most_kept:
        found[..., layout.window.sink_tokens :] = seen
    return found if ahead else None, evicted.int().contiguous(), kept


def _readable(x: Tensor) -> Tensor:
    """x, whose numbers of a row are side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _rows(x: Tensor | None) -> Rows | None:
    return None if x is None else Rows(x, *x.stride()[:3])


class Attend(Function):
    """Window, memory and mixture, by the formulas of forward.py and backward.py, and the state
    after the call, or `None`. Arguments: queries; of the source, keys, values, and keys of the
    memory, or `None`: the same; what [`_chosen`] gives; the gate; the state before the call, or
    `None`: empty; the [`Launcher`]."""

    @staticmethod
    def forward(ctx, query, key, value, memory_key, ahead, evicted, gate, before, launcher):
        (batch, heads, tokens, width), (_, kv_heads, _, value_width) = query.shape, value.shape
        new, layout = functools.partial(query.new_empty, dtype=torch.float32), launcher.layout
        states = new(batch, kv_heads, layout.segments + 1, width * value_width + width)
        wrote, of = torch.empty_like(states[:, :, :-1]), launcher.first if evicted is None else 0
        written = (
            _rows(part[:, :, of:]) for part in (key if memory_key is None else memory_key, value)
        )
        launcher.launch("write", *written, evicted, _rows(wrote))
        states[:, :, 0] = 0 if before is None else before
        # from what was written to what first reads it
        delay = layout.window.local_segments + 1 if evicted is None else 1
        launcher.launch("scan", _rows(wrote), _rows(states), DELAY=delay)
        del wrote
        turned_key = launcher.turned(key[:, :, launcher.first :], 0, 0)
        window = launcher.window(turned_key, key, value, ahead)
        make = torch.empty if layout.source is None else torch.zeros  # padding is zero
        output = make(
            batch, tokens, heads, value_width, dtype=value.dtype, device=value.device
        ).transpose(1, 2)
        save = launcher.recorded and any(ctx.needs_input_grad)
        found, log_sum = (
            (torch.empty_like(output), new(batch, heads, tokens)) if save else (None, None)
        )
        launcher.launch(
            "attend",
            _rows(query),
            window,
            _rows(output),
            _rows(found),
            log_sum,
            _rows(states),
            gate,
        )
        ctx.launcher, ctx.delay = launcher, delay
        ctx.save_for_backward(
            query, key, value, memory_key, ahead, evicted, gate, turned_key, found, log_sum, states
        )
        ctx.set_materialize_grads(False)
        return output, None if launcher.last is None else states[launcher.last]

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient, to_last):
        """What is owed to each argument of `forward`; `to_last`: to the state after the call, or
        `None`."""
        query, key, value, memory_key, ahead, evicted, gate, *rest = ctx.saved_tensors
        turned_key, found, log_sum, states = rest
        launcher, layout, first = ctx.launcher, ctx.launcher.layout, ctx.launcher.first
        (batch, heads, tokens, width), (_, kv_heads, count, value_width) = query.shape, value.shape
        new = functools.partial(query.new_empty, dtype=torch.float32)
        make = torch.empty_like if layout.source is None else torch.zeros_like  # padding is zero
        to_query, to_key, to_value = make(query), make(key), make(value)
        to_memory_key = None if memory_key is None else torch.zeros_like(memory_key)
        memory_key = key if memory_key is None else memory_key
        gradient = _readable(torch.zeros_like(found) if gradient is None else gradient)

        q, g, window = _rows(query), _rows(gradient), launcher.window(turned_key, key, value, ahead)
        along, inverse, to_mass = new(3, batch, heads, tokens)
        to_gate = new(batch, heads, launcher.tiles("queries")[1])
        of_queries = q, window, g, _rows(found), log_sum, along, inverse, to_mass, _rows(to_query)
        launcher.launch("queries", *of_queries, to_gate, _rows(states), gate)
        to_before, to_wrote = _to_states(ctx, states, to_last, q, g, inverse, to_mass)

        # What is owed to rows, keys and values side by side, beside what the queries of their
        # windows owe
        widths: list[int] = [width, value_width]
        owed: Any = None
        if ahead is not None or evicted is not None:
            owed = new(batch, kv_heads, count, sum(widths)).zero_()
        if evicted is not None:
            to_mk, to_v = owed.split(widths, -1)
            to_mk = to_mk if to_memory_key is None else to_memory_key
            of_rows = map(_rows, (to_mk, to_v))
            launcher.launch("evicted", _rows(memory_key), _rows(value), evicted, *of_rows, to_wrote)
            to_wrote = None
        first_place = launcher.ahead + layout.window.local_segments * layout.window.segment_length
        turned_query = launcher.turned(query, first_place, layout.carried)
        seeing = Seeing(_rows(turned_query), g, log_sum, along)
        if launcher.ahead:
            of_ahead = new(batch, kv_heads, layout.segments, launcher.ahead, sum(widths))
            of_parts = map(_rows, of_ahead.flatten(2, 3).split(widths, -1))
            launcher.launch("ahead", *of_parts, window, seeing, gate)
            if ahead is None:
                owed = _sums_by_document(of_ahead, layout).flatten(2, 3)
            else:  # to places without a row zero is owed
                index = row_numbers(ahead.flatten(2), count)
                owed.flatten(0, 2).index_add_(0, index, of_ahead.flatten(0, 3))
        owing = to_key, None if evicted is not None else to_memory_key, to_value
        k, mk, v, to_k, to_mk, to_v = (
            _rows(x if x is None else x[:, :, first:]) for x in (key, memory_key, value, *owing)
        )
        of_sinks = ahead is None and launcher.ahead > 0
        beside: Any = (None, None)
        if owed is not None:
            beside = map(_rows, owed[:, :, 0 if of_sinks else first :].split(widths, -1))
        of_keys = k, mk, v, seeing, to_k, to_mk, to_v, to_wrote, *beside, gate
        launcher.launch("keys", *of_keys, OF_SINKS=of_sinks)
        if first:  # the grid has none of them
            of_first = (0, 0) if owed is None else owed[:, :, :first].split(widths, -1)
            to_key[:, :, :first], to_value[:, :, :first] = of_first

        to_gate = to_gate.sum((0, 2)).to(gate.dtype)
        return to_query, to_key, to_value, to_memory_key, None, None, to_gate, to_before, None


def _to_states(ctx, states: Tensor, to_last: Tensor | None, *owing) -> tuple[Tensor | None, Any]:
    """What is owed to the state before the call (`None`: nobody asks), and, as [`Rows`], to what
    each segment wrote; `owing`: the other arguments of the kernel."""
    launcher, to_states = ctx.launcher, torch.empty_like(states)
    launcher.launch("states", _rows(to_states), *owing)
    to_states[:, :, -1] = 0
    if to_last is not None:
        to_states[launcher.last] += to_last
    to_wrote = _rows(torch.empty_like(to_states[:, :, 1:]))
    launcher.launch("scan_back", _rows(to_states), to_wrote, DELAY=ctx.delay)
    return to_states[:, :, 0] if ctx.needs_input_grad[7] else None, to_wrote


def _sums_by_document(to_sinks: Tensor, layout: GridLayout) -> Tensor:
    """What all segments owe to the sinks, `[batch, kv_heads, segments, …]`, at their document's
    first segment."""
    if layout.source is None:
        return to_sinks.sum(2, keepdim=True)
    first = torch.arange(layout.segments, device=to_sinks.device)[:, None]
    member = (layout.document[:, None, :-1] == first).to(to_sinks.dtype)
    return (member.unsqueeze(1) @ to_sinks.flatten(3)).unflatten(-1, to_sinks.shape[3:])
