"""Makes the layout of a call ([`Layout`]), once per forward.

What a layout looks like depends on the data where rows are padded, packed or of different lengths. Outside of a graph the
values are read back from the device, and the layout is no larger than it must be. Inside of one (torch.compile,
torch.export) nothing can be read back: there the sizes are upper bounds that follow from the shapes of the arguments.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..checks import bool_mask, check_kinds, check_shapes, check_window
from ..state import InfiniState
from ..tensors import pad
from .base import GridLayout, IndexedLayout, LayoutInputs, PlainLayout
from .step import StepLayout, step_layout

SegmentLayout = StepLayout | GridLayout
UNBOUNDED = (
    "position_ids can begin any number of documents, and the layout of their segments is made outside of the graph. "
    "Say with max_documents how many a row holds at most, or leave position_ids out."
)


@check_kinds
def segment_layout(
    batch: int,
    tokens: int,
    segment_length: int,
    local_segments: int = 0,
    sink_tokens: int = 0,
    kept_tokens: int = 0,
    *,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    memory_mask: Tensor | None = None,
    state: InfiniState | None = None,
    max_documents: int | None = None,
    device: torch.device | None = None,
) -> SegmentLayout:
    """Lays out a call of `[batch, tokens]`.

    Args:
        attention_mask: `[batch, tokens]`, 1 = real, 0 = padding; `None`: all are real.
        memory_mask: `[batch, tokens]`, 0 = the token is attended to locally but not written into the memory; `None`: all are
            written.
        position_ids: `[batch, tokens]` (or `[1, tokens]`); a real token whose position is not beyond that of the real token
            before it starts a new document. `None`: none does.
        state: the state that the call continues, or `None`.
        max_documents: how many documents a row of the call holds at most, the continued one counted in. The sizes then
            follow only from the arguments' shapes; a row with more raises a RuntimeError (on a GPU, a device-side
            assertion).

    On an accelerator this waits for the device a few times, however many layers share the layout. With `max_documents` it
    does not, and neither in a graph of torch.compile or torch.export; there, positions without `max_documents` could begin
    any number of documents, and the layout is made outside of the graph.

    Raises:
        ValueError: masks or positions of another shape; a mask with other values than 0 and 1; as many sinks as a segment
            has tokens.
        RuntimeError: a mask with other values than 0 and 1, where no values are read back from the device.
    """
    window = (segment_length, local_segments, sink_tokens, kept_tokens)
    check_window(*window)
    compiling = torch.compiler.is_compiling()
    check_shapes(batch, tokens, attention_mask, memory_mask, position_ids)
    read_back = not compiling and max_documents is None
    real = bool_mask("attention_mask", attention_mask, read_back)
    memory_mask = bool_mask("memory_mask", memory_mask, read_back)
    restart = None
    if position_ids is not None:
        position_ids = position_ids.expand(batch, tokens)
        restart = restarts(position_ids, real, state)
    if max_documents is not None:
        _check_documents(restart, max_documents)
    call = LayoutInputs(batch, tokens, *window, real, position_ids, restart, memory_mask, state, device)
    if read_back:
        return _smallest_layout(call)
    if tokens == 1 and state is not None:
        return step_layout(call, state)
    if max_documents is not None or position_ids is None:
        return _bounded_layout(call, max_documents or 1)
    if torch.compiler.is_exporting():
        raise ValueError(UNBOUNDED)
    return _layout_outside_graph(call)


def _smallest_layout(call: LayoutInputs) -> SegmentLayout:
    """Whose form and sizes follow from values that are read back from the device."""
    call, state = _without_idle_masks(call), call.state
    if call.tokens == 1 and state is not None:
        return step_layout(call, state, read_back=True)
    call, seen, in_memory = call._replace(read_back=True), [0] * call.batch, [0] * call.batch
    if state is not None:
        seen, in_memory = torch.stack([state.tokens_seen, state.memory_tokens]).tolist()
    if call.real is None and call.restart is None and len(set(seen)) == 1:
        return _with_memory(_plain_layout(call, seen[0], memory_in_use=all(in_memory)), call)
    carried = (call.local_segments + 1) * call.segment_length if any(seen) else 0
    return _with_memory(_indexed_layout(call, torch.tensor(seen, device=call.device), carried), call)


def _without_idle_masks(call: LayoutInputs) -> LayoutInputs:
    """The call without the masks that change nothing. The device is asked for all of them at once."""
    idle = {name: mask.all() for name in ("real", "memory_mask") if (mask := getattr(call, name)) is not None}
    if call.restart is not None:
        idle["restart"] = ~call.restart.any()
    answers = torch.stack(list(idle.values())).tolist() if idle else ()
    changed: dict[str, Any] = {name: None for name, answer in zip(idle, answers, strict=True) if answer}
    return call._replace(**changed)


_layout_outside_graph = torch.compiler.disable(_smallest_layout, reason=UNBOUNDED)


def _check_documents(restart: Tensor | None, most: int) -> None:
    """Refuses rows that hold more documents than `max_documents` says."""
    if most < 1:
        raise ValueError(f"max_documents must be ≥ 1, the document of a row's first token counted in; got {most}.")
    if restart is not None:
        torch._assert_async(
            (restart.sum(1) < most).all(),
            f"position_ids begin more than the {most} documents in a row that max_documents allows.",
        )


def _bounded_layout(call: LayoutInputs, max_documents: int) -> GridLayout:
    """A layout that any arguments fit into which begin at most `max_documents` documents in a row."""
    tokens, length, state = call.tokens, call.segment_length, call.state
    if state is None and call.real is None and max_documents == 1:
        return _with_memory(_plain_layout(call, 0, memory_in_use=False), call)
    documents = 1 if max_documents == 1 else min(max_documents, tokens + 1)
    if state is None:
        carried, seen = 0, torch.zeros(call.batch, dtype=torch.long, device=call.device)
        # A document of n tokens takes 1 + (n − 1) // L segments, of which one is there without any token
        segments = documents + (tokens - documents) // length
        slots = length if tokens >= length else tokens
    else:
        carried, seen = (call.local_segments + 1) * length, state.tokens_seen
        # The continued one may fill its segment with its first new token
        segments = call.local_segments + documents + (tokens + length - documents) // length
        slots = length
    return _with_memory(_indexed_layout(call, seen, carried, (segments, slots, documents > 1)), call)


def _with_memory(layout: GridLayout, call: LayoutInputs) -> GridLayout:
    """The layout that knows which tokens of the call and of the state's window the memory skips, and how many it holds."""
    state, device = call.state, layout.tokens_seen.device
    window = None if state is None else state.local_skipped
    if call.memory_mask is not None or window is not None:
        new = torch.zeros(call.batch, call.tokens, dtype=torch.bool, device=device)
        new = new if call.memory_mask is None else ~call.memory_mask
        if window is None:
            window = torch.zeros(call.batch, layout.places, dtype=torch.bool, device=device)
        new, window = (skipped[:, None, :, None] for skipped in (new, window))
        next_skipped = layout.next_window(new, window)[:, 0, :, 0]
        layout = replace(layout, skipped=layout.to_grid(new, window)[..., 0, 0], next_skipped=next_skipped)
    before = torch.zeros(call.batch, dtype=torch.long, device=device) if state is None else state.tokens_left()
    left = _left(layout, before.unsqueeze(1))
    # Its strides are those of a new tensor, for torch.cond compares them
    after = (left[:, -1] - call.kept_tokens).clamp(min=0).clone(memory_format=torch.contiguous_format)
    most_kept = call.kept_tokens
    if most_kept and call.read_back:  # short rows do not attend to empty places
        most_kept = min(most_kept, int(left[:, :-1].max()))
    return replace(layout, left=left, memory_tokens=after, most_kept=most_kept)


def _left(layout: GridLayout, before: Tensor) -> Tensor:
    """[`GridLayout.left`]; `before` `[batch, 1]`: before the call."""
    written, places = layout.written(), torch.arange(layout.segments + 1, device=before.device)
    if written is None:
        total = places.unsqueeze(0) * layout.slots
    else:
        total = pad(written.sum(-1), (1, 0)).cumsum(1)
    # The delayed segment that takes in a document's first
    first = (layout.document + layout.local_segments).clamp(min=0).minimum(places)
    continued = layout.document == layout.document[:, :1]
    return total - total.gather(1, first) + continued * before


def _plain_layout(call: LayoutInputs, seen: int, memory_in_use: bool) -> PlainLayout:
    """`seen`: tokens of every row's document before this call."""
    length = call.segment_length
    first = max(0, seen // length - call.local_segments)
    carried = seen - first * length
    total = carried + call.tokens
    segments = -(-total // length)
    before = torch.full((call.batch,), -1, device=call.device) if call.state is None else call.state.last_position
    return PlainLayout(
        batch=call.batch,
        tokens=call.tokens,
        segment_length=length,
        local_segments=call.local_segments,
        sink_tokens=call.sink_tokens,
        kept_tokens=call.kept_tokens,
        segments=segments,
        slots=length if total >= length else total,
        carried=carried,
        first=first,
        seen=seen,
        memory_in_use=memory_in_use,
        document=torch.full((1, segments + 1), -first, device=call.device),
        positions=torch.arange(seen, seen + call.tokens, device=call.device).unsqueeze(0),
        tokens_seen=torch.full((call.batch,), seen + call.tokens, device=call.device),
        last_position=before + call.tokens if call.position_ids is None else call.position_ids[:, -1].to(torch.long),
    )


def restarts(position_ids: Tensor, real: Tensor | None, state: InfiniState | None) -> Tensor:
    """Which real tokens start a new document, `[batch, tokens]` bool."""
    columns = torch.arange(position_ids.shape[1], device=position_ids.device).expand_as(position_ids)
    latest = columns if real is None else torch.where(real, columns, -1).cummax(1).values
    latest = F.pad(latest[:, :-1], (1, 0), value=-1)  # the last real token before each
    before = position_ids.gather(1, latest.clamp(min=0))
    if state is None:
        goes_back = (position_ids <= before) & (latest >= 0)
    else:
        before = torch.where(latest >= 0, before, state.last_position.unsqueeze(1))
        goes_back = (position_ids <= before) & ((latest >= 0) | (state.tokens_seen > 0).unsqueeze(1))
    return goes_back if real is None else goes_back & real


def _indexed_layout(
    call: LayoutInputs,
    seen: Tensor,
    carried: int,
    sizes: tuple[int, int, bool] | None = None,
) -> IndexedLayout:
    """
    Args:
        seen: `[batch]`, tokens of each row's document before it.
        carried: as in [`GridLayout`].
        sizes: segments, slots and whether the rows are packed; `None`: as the arguments need, read back from the device.
    """
    batch, tokens, segment_length, local_segments, sinks, kept, real, position_ids, restart, _, state, device, _ = call
    real = torch.ones(batch, tokens, dtype=torch.bool, device=device) if real is None else real
    restart = torch.zeros(batch, tokens, dtype=torch.bool, device=device) if restart is None else restart
    base = local_segments if carried else 0  # grid segment that the next token of a continued document falls into
    begin = seen.unsqueeze(1)

    counted = real.cumsum(1)
    counted_at_restart = torch.where(restart, counted, 0).cummax(1).values
    number = torch.where(counted_at_restart > 0, counted - counted_at_restart, begin + counted - 1)  # in the document
    slot = number % segment_length
    opens = real & (slot == 0) & ((number != begin) | (counted_at_restart > 0))
    segment = base + opens.cumsum(1)
    if sizes is None:
        limits = torch.stack([segment.amax(), torch.where(real, slot, 0).amax(), restart.any().long()]).tolist()
        sizes = (limits[0] + 1, segment_length if carried else limits[1] + 1, bool(limits[2]))
    segments, slots, packed = sizes

    target = torch.where(real, segment * slots + slot, -1)
    columns = torch.arange(tokens, device=device).expand(batch, tokens) + carried
    spare = segments * slots  # an extra slot that takes the padding, cut off again
    source = torch.full((batch, spare + 1), -1, device=device)
    source = source.scatter(1, torch.where(real, target, spare), columns)[:, :spare].contiguous()
    if carried:
        places = torch.arange(carried, device=device).expand(batch, carried)
        token = (begin // segment_length - base) * segment_length + places
        filled = (token >= 0) & (token < begin)
        source[:, :carried] = torch.where(filled, places, source[:, :carried])

    marks = torch.full((batch, segments + 2), torch.iinfo(torch.long).min, device=device)
    marks[:, :1] = base - begin // segment_length
    marks = marks.scatter_reduce(1, torch.where(restart, segment, segments + 1), segment, "amax")
    document = marks[:, :-1].cummax(1).values

    ended = torch.where(restart.any(1), counted[:, -1] - counted_at_restart[:, -1] + 1, begin[:, 0] + counted[:, -1])
    places = torch.arange((local_segments + 1) * segment_length, device=device)
    token = (ended // segment_length - local_segments).unsqueeze(1) * segment_length + places
    place = (token // segment_length + document[:, -1:]) * slots + token % segment_length
    stays = (token >= 0) & (token < ended.unsqueeze(1))
    ahead = sinks + kept if carried else 0  # the window's sinks and kept tokens come before what is in the grid
    window = torch.where(stays, source.gather(1, place.clamp(0, spare - 1)) + ahead, -1)
    window = F.pad(window, (kept, 0), value=-1)
    if sinks:
        token = torch.arange(sinks, device=device).expand(batch, sinks)
        row = source.gather(1, (document[:, -1:] * slots + token).clamp(0, spare - 1))
        row = torch.where((document[:, -1:] < 0) | (row < carried), token, row + ahead)
        window = torch.cat([torch.where(token < ended.unsqueeze(1), row, -1), window], 1)

    if position_ids is None:
        before = torch.full((batch,), -1, device=device) if state is None else state.last_position
        last_position = before + counted[:, -1]
    else:
        before = -1 if state is None else state.last_position
        latest = torch.where(real, torch.arange(tokens, device=device), -1).amax(1)
        last_position = position_ids.gather(1, latest.clamp(min=0).unsqueeze(1)).squeeze(1)
        last_position = torch.where(latest >= 0, last_position, before)
    return IndexedLayout(
        batch=batch,
        tokens=tokens,
        segment_length=segment_length,
        local_segments=local_segments,
        sink_tokens=sinks,
        kept_tokens=kept,
        segments=segments,
        slots=slots,
        carried=carried,
        positions=torch.where(real, number, 0),
        tokens_seen=ended,
        last_position=last_position,
        source=source,
        target=target,
        document=document,
        window=window,
        packed=packed,
        real=real,
        restart=restart,
    )
