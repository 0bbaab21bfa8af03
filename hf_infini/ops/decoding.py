"""One more token for every row, the step that `generate` repeats: equations 2 to 5 on the window itself instead of a grid.

A step writes its key and value into the row's next slot of the window and attends to the window and the memory; a row whose
segment is full then writes the oldest segment of its window into the memory, and moves the window one segment on.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from .layout.base import Layout, LayoutInputs
from .memory import memory_weight
from .rules import MemoryRule
from .state import InfiniState, Projections
from .tensors import pad
from .window import ScoreOptions, softmax_weights


@dataclass(frozen=True, kw_only=True)
class StepLayout(Layout):
    """Where the one new token of each row goes, each at its own place in its window.

    Attributes:
        rows: numbers of the rows whose token is no padding; slots: for each of them, the window's place of its token. A row
            whose token is a sink comes twice: the token has a second place among the sinks.
        place: `[batch, 1]`, the place of each row's query in its window.
        begin, end: the part of the window that any row sees.
        visible: `[batch, 1, 1, end - begin]` bool, what each row sees of it; `None`: all of it.
        filled: `[batch, 1, 1]` bool, whether the memory holds any token of the row's document.
        completing: rows whose segment is complete with this token; those of them that push a segment out of the window into
            the memory are `compressing`. Both are lists of row numbers.
        skipped: `[batch, S + (w + 1) * L]` bool, which tokens of the window, this one among them, `memory_mask` keeps out of
            the memory; `None`: none.
        kept_out: `[batch, L]` bool, which tokens of the window's oldest segment the memory does not take in: skipped ones,
            and sinks; `None`: it takes in all.
    """

    rows: Tensor
    slots: Tensor
    place: Tensor
    begin: int
    end: int
    visible: Tensor | None
    filled: Tensor
    completing: list[int]
    compressing: list[int]
    skipped: Tensor | None = None
    kept_out: Tensor | None = None

    def opened(self, state: InfiniState) -> InfiniState:
        """The state that the rows' tokens continue: no row begins a document here."""
        return state

    def put(self, window: Tensor, new: Tensor, in_place: bool) -> Tensor:
        """The window, `[batch, heads, places, dim]`, with the new tokens `[batch, heads, 1, dim]` in their slots;
        `in_place`: written into the given one where that may be."""
        # The window of an initial state is one zero seen many times; one made in inference mode may be written only there.
        in_place = in_place and window.is_contiguous() and (torch.is_inference_mode_enabled() or not window.is_inference())
        window = window if in_place else window.clone(memory_format=torch.contiguous_format)
        new = new[:, :, 0] if self.real is None and len(self.rows) == len(new) else new[self.rows, :, 0]
        window[self.rows, :, self.slots] = new.to(window.dtype)
        return window

    def shift(self, window: Tensor) -> Tensor:
        """Moves the window, `[batch, heads, places, dim]`, of the rows that completed a segment one segment on."""
        if not self.completing:
            return window
        if len(self.completing) == len(window):
            return self._moved(window)
        rows = torch.tensor(self.completing, device=window.device)
        return window.index_copy(0, rows, self._moved(window[rows]))

    def _moved(self, window: Tensor) -> Tensor:
        segments = pad(window[:, :, self.sink_tokens + self.segment_length :], (0, 0, 0, self.segment_length))
        return torch.cat([window[:, :, : self.sink_tokens], segments], 2) if self.sink_tokens else segments

    def oldest(self, window: Tensor) -> Tensor:
        """The oldest segment of the window, `[batch, heads, L, dim]`."""
        return window[:, :, self.sink_tokens : self.sink_tokens + self.segment_length]

    def compress(self, rule: MemoryRule, state: InfiniState) -> tuple[Tensor, Tensor]:
        """Memory and normaliser with the oldest segment of the state's windows, in the rows that lose one."""
        memory, normaliser, kept_out = state.memory, state.normaliser, self.kept_out
        if not self.compressing:
            return memory, normaliser
        leaving = [None if window is None else self.oldest(window) for window in state.windows()]
        if len(self.compressing) == len(memory):
            return _written(rule, leaving, kept_out, memory, normaliser)
        rows = torch.tensor(self.compressing, device=memory.device)
        leaving = [None if part is None else part[rows] for part in leaving]
        new = _written(rule, leaving, None if kept_out is None else kept_out[rows], memory[rows], normaliser[rows])
        return memory.index_copy(0, rows, new[0]), normaliser.index_copy(0, rows, new[1])


@dataclass(frozen=True, kw_only=True)
class GraphStepLayout(StepLayout):
    """The step in a graph of torch.compile, where nothing can be read back from the device: one graph does for every token.

    The numbers of [`StepLayout`] are tensors here, and rows may also be padding or begin a document.

    Attributes:
        completing, compressing: `[batch]` bool. begin, end: all of the window; visible always says what is seen.
        here: `[batch, 1, places, 1]` bool, the place that the row's token takes, and that among the sinks; none for padding.
    """

    completing: Tensor
    compressing: Tensor
    here: Tensor

    def opened(self, state: InfiniState) -> InfiniState:
        """The state with an empty window, and the memory that documents start from, in the rows that begin one."""
        if self.restart is None:
            return state
        begins = self.restart[:, :, None, None]
        start_memory, start_normaliser = state.start()
        return replace(
            state.map_windows(lambda window: window.masked_fill(begins, 0)),
            memory=torch.where(begins, start_memory, state.memory),
            normaliser=torch.where(begins[..., 0], start_normaliser, state.normaliser),
        )

    def put(self, window: Tensor, new: Tensor, in_place: bool) -> Tensor:
        return torch.where(self.here, new.to(window.dtype), window)

    def shift(self, window: Tensor) -> Tensor:
        return torch.where(self.completing[:, None, None, None], self._moved(window), window)

    def compress(self, rule: MemoryRule, state: InfiniState) -> tuple[Tensor, Tensor]:
        """Computed for all rows, as they are not known, and only in those calls in which one of them needs it."""
        kept_out, leaving = self.kept_out, [self.oldest(window) for window in state.windows() if window is not None]
        if kept_out is None:
            kept_out = torch.zeros(leaving[0].shape[0], self.segment_length, dtype=torch.bool, device=leaving[0].device)

        def compress(kept_out, rows, memory, normaliser, *leaving):
            new = _written(rule, (*leaving, None)[:3], kept_out, memory, normaliser)
            memory = torch.where(rows[:, None, None, None], new[0], memory)
            return memory, torch.where(rows[:, None, None], new[1], normaliser)

        def keep(kept_out, rows, memory, normaliser, *leaving):
            return memory.clone(), normaliser.clone()

        anyone = self.compressing.any()
        operands = (kept_out, self.compressing, state.memory, state.normaliser, *leaving)
        if torch.compiler.is_compiling():
            return torch.cond(anyone, compress, keep, operands)
        return (compress if anyone else keep)(*operands)


def attend_step(
    tokens: Projections,
    gate: Tensor,
    layout: StepLayout,
    rule: MemoryRule,
    softmax: ScoreOptions,
    state: InfiniState,
    in_place: bool,
) -> tuple[Tensor, InfiniState, Tensor | None]:
    """[`attend`] for one token per row, which returns the weights wherever they are written out."""
    kv_heads, width = tokens.key.shape[1], tokens.key.shape[3]
    state = layout.opened(state).map_windows(lambda window, new: layout.put(window, new, in_place), tokens)
    keys, values, _ = state.windows()

    query = softmax.compared_queries(tokens.query, layout.place)
    seen = slice(layout.begin, layout.end)
    seen_keys, seen_values = softmax.compared_keys(keys[:, :, seen], seen), values[:, :, seen]
    heads_per_key = tokens.query.shape[1] // kv_heads
    weights = log_sum = None
    if softmax.written_out or softmax.softcap or rule.shared:
        seen_keys, seen_values = (tensor.repeat_interleave(heads_per_key, 1) for tensor in (seen_keys, seen_values))
        weights, log_sum = softmax_weights(query, seen_keys, layout.visible, softmax, values.dtype, rule.shared)
        if layout.real is not None:
            weights = weights.masked_fill(~layout.real[:, :, None, None], 0)
        weights = F.pad(weights, (layout.begin, keys.shape[2] - layout.end))  # as they are returned: in the output's graph
        output = weights[..., seen] @ seen_values
    else:
        options = {"dropout_p": softmax.dropout, "scale": softmax.scaling, "enable_gqa": heads_per_key > 1}
        output = F.scaled_dot_product_attention(query, seen_keys, seen_values, layout.visible, **options)

    dtype = state.memory.dtype
    with torch.autocast(keys.device.type, enabled=False):
        queries = rule.query_features(tokens.query.to(dtype))
        queries = queries.unflatten(1, (kv_heads, heads_per_key)).squeeze(3)  # [B, K, R, D]
        found = rule.read(queries.unsqueeze(1), state.memory.unsqueeze(1), state.normaliser.unsqueeze(1))
        read, mass = (tensor.flatten(1, 3).unsqueeze(2) for tensor in found)  # [B, H, 1, E or 1]
        log_sum = None if log_sum is None else log_sum.unsqueeze(-1)
        share = memory_weight(gate.to(dtype)[None, :, None, None], mass, log_sum, width, rule.eps)
        if state.start_memory is None:
            share = share * layout.filled.unsqueeze(-1)
        output = torch.lerp(output.to(dtype), read, share.expand_as(read)).to(output.dtype)
        memory, normaliser = layout.compress(rule, state)
    if layout.real is not None:
        output = output.masked_fill(~layout.real[:, :, None, None], 0)
    state = state.map_windows(layout.shift).after(layout, memory=memory, normaliser=normaliser)
    return output, state, weights


def _written(rule: MemoryRule, leaving, kept_out, memory, normaliser) -> tuple[Tensor, Tensor]:
    """Memory and normaliser after a segment: its keys, values and log weights `[batch, kv_heads, L, dim]`, `kept_out`
    `[batch, L]`."""
    keys, values, log_weights = leaving
    keys, values = (part.to(memory.dtype).unsqueeze(1) for part in (keys, values))  # [B, 1, K, L, dim]
    log_weights = None if log_weights is None else log_weights.unsqueeze(1)
    taken_in = None if kept_out is None else ~kept_out[:, None, None, :, None]
    states = rule.states(rule.written(keys, values, log_weights, taken_in), memory, normaliser)
    return states.last_memory, states.last_normaliser


def step_layout(call: LayoutInputs, state: InfiniState, seen: list[int]) -> StepLayout:
    """The layout of one token per row that goes on with the row's document, or is padding; `seen` is `state.tokens_seen` as
    a list."""
    real, length, local, batch = call.real, call.segment_length, call.local_segments, call.batch
    sinks, device = call.sink_tokens, state.tokens_seen.device
    rows = list(range(batch)) if real is None else real[:, 0].nonzero()[:, 0].tolist()
    slots = [sinks + local * length + count % length for count in seen]
    # Sinks are seen when the document's first segment has left the window
    begins = [0 if count // length > local else sinks + (local - count // length) * length for count in seen]
    begin, end = min(begins), max(slots) + 1
    slot = torch.tensor(slots, device=device)
    visible = None
    if len(set(seen)) > 1:
        places = torch.arange(begin, end, device=device)
        visible = (places >= torch.tensor(begins, device=device)[:, None]) & (places <= slot[:, None])
        visible = visible[:, None, None]
    completing = [row for row in rows if (seen[row] + 1) % length == 0]
    compressing = [row for row in completing if seen[row] // length >= local]
    new_sinks = [row for row in rows if seen[row] < sinks]
    written = torch.tensor([slots[row] for row in rows] + [seen[row] for row in new_sinks], dtype=torch.long, device=device)
    rows = torch.tensor(rows + new_sinks, dtype=torch.long, device=device)
    skipped = kept_out = None
    if call.memory_mask is not None or state.local_skipped is not None:
        if state.local_skipped is None:
            skipped = torch.zeros(batch, sinks + (local + 1) * length, dtype=torch.bool, device=device)
        else:
            skipped = state.local_skipped.clone()
        new = torch.zeros_like(rows, dtype=torch.bool) if call.memory_mask is None else ~call.memory_mask[rows, 0]
        skipped[rows, written] = new
    memory_tokens = state.memory_tokens
    if compressing:
        compress = torch.tensor([row in compressing for row in range(batch)], device=device)
        first = [count // length == local for count in seen]
        kept_out = _kept_out(call, skipped, torch.tensor(first, device=device) if sinks and any(first) else None)
        memory_tokens = _after_compressing(memory_tokens, compress, kept_out, length)
    layout = StepLayout(
        segment_length=length,
        local_segments=local,
        sink_tokens=sinks,
        rows=rows,
        slots=written,
        place=slot.unsqueeze(1),
        begin=begin,
        end=end,
        visible=visible,
        filled=(state.memory_tokens > 0)[:, None, None],
        completing=completing,
        compressing=compressing,
        positions=state.tokens_seen.unsqueeze(1),
        tokens_seen=state.tokens_seen + (1 if real is None else real[:, 0].long()),
        last_position=_last_position(call, state.last_position),
        memory_tokens=memory_tokens,
        skipped=skipped,
        kept_out=kept_out,
        real=real,
    )
    return _with_next_skipped(layout)


def graph_step_layout(call: LayoutInputs, state: InfiniState, restart: Tensor | None) -> StepLayout:
    """The layout of one token per row for a graph; `restart` as in [`Layout`]."""
    real, length, local = call.real, call.segment_length, call.local_segments
    seen, in_memory = state.tokens_seen, state.memory_tokens
    given = real if restart is None else restart
    if given is not None:  # whoever reads one of them reads both
        real = torch.ones_like(given) if real is None else real
        restart = torch.zeros_like(given) if restart is None else restart
        seen, in_memory = (count.masked_fill(restart[:, 0], 0) for count in (seen, in_memory))
    sinks = call.sink_tokens
    segment, slot = seen // length, sinks + local * length + seen % length
    places = torch.arange(sinks + (local + 1) * length, device=seen.device)
    here = (places == slot[:, None]) | ((places == seen[:, None]) & (places < sinks))
    first = torch.where(segment > local, 0, sinks + (local - segment) * length)
    visible = (places >= first[:, None]) & (places <= slot[:, None])
    after = seen + 1
    completing = after % length == 0
    if real is not None:
        here, completing = here & real, completing & real[:, 0]
        after = torch.where(real[:, 0], after, seen)
    compressing = completing & (segment >= local)
    skipped = None
    if call.memory_mask is not None or state.local_skipped is not None:
        skipped = torch.zeros_like(here) if state.local_skipped is None else state.local_skipped
        if restart is not None:
            skipped = skipped.masked_fill(restart, False)
        new = torch.zeros_like(here) if call.memory_mask is None else ~call.memory_mask.expand_as(here)
        skipped = torch.where(here, new, skipped)
    kept_out = _kept_out(call, skipped, segment == local if sinks else None)
    layout = GraphStepLayout(
        segment_length=length,
        local_segments=local,
        sink_tokens=sinks,
        rows=torch.arange(len(seen), device=seen.device),
        slots=slot,
        place=slot.unsqueeze(1),
        begin=0,
        end=len(places),
        visible=visible[:, None, None],
        filled=(in_memory > 0)[:, None, None],
        completing=completing,
        compressing=compressing,
        positions=seen.unsqueeze(1),
        tokens_seen=after,
        last_position=_last_position(call, state.last_position),
        memory_tokens=_after_compressing(in_memory, compressing, kept_out, length),
        skipped=skipped,
        kept_out=kept_out,
        here=here[:, None, :, None],
        real=real,
        restart=restart,
    )
    return _with_next_skipped(layout)


def _last_position(call: LayoutInputs, before: Tensor) -> Tensor:
    """`[batch]`, after the step."""
    positions, real = call.position_ids, call.real
    after = before + 1 if positions is None else positions[:, 0].long()
    return after if real is None else torch.where(real[:, 0], after, before)


def _kept_out(call: LayoutInputs, skipped: Tensor | None, first: Tensor | None) -> Tensor | None:
    """[`StepLayout.kept_out`]; `first` `[batch]` bool: whether the oldest segment of the window is the document's first;
    `None`: in no row."""
    length, sinks = call.segment_length, call.sink_tokens
    kept_out = None if skipped is None else skipped[:, sinks : sinks + length]
    if first is None:
        return kept_out
    of_sinks = first[:, None] & (torch.arange(length, device=first.device) < sinks)
    return of_sinks if kept_out is None else kept_out | of_sinks


def _after_compressing(before: Tensor, compressing: Tensor, kept_out: Tensor | None, length: int) -> Tensor:
    """`[batch]`: how many tokens the memory holds, `before` of them already, when the rows that are `compressing` `[batch]`
    bool have written the oldest segment of their window, but for what is [`StepLayout.kept_out`]."""
    return before + compressing * (length if kept_out is None else (~kept_out).sum(1))


def _with_next_skipped(layout: StepLayout) -> StepLayout:
    if layout.skipped is None:
        return layout
    return replace(layout, next_skipped=layout.shift(layout.skipped[:, None, :, None])[:, 0, :, 0])
