"""The segment layout: which token of a call lies in which segment and slot, built once per forward and shared by the layers.

What a layout looks like depends on the data where rows are padded, packed or of different lengths. Outside of a graph the
device is asked, and the layout is no larger than it must be. Inside of one (torch.compile, torch.export) nothing can be
asked: there the sizes are upper bounds that follow from the shapes of the arguments.
"""

import functools
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from .gather import pad
from .grid import SegmentLayout
from .state import InfiniState
from .steps import StepLayout, step_layout, tensor_step

UNBOUNDED = (
    "position_ids can begin any number of documents, and the layout of their segments is made outside of the graph. "
    "Say with max_documents how many a row holds at most, or leave position_ids out."
)


def segment_layout(
    batch: int,
    tokens: int,
    segment_length: int,
    local_segments: int = 0,
    *,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    memory_mask: Tensor | None = None,
    state: InfiniState | None = None,
    max_documents: int | None = None,
    device: torch.device | None = None,
) -> SegmentLayout | StepLayout:
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
        ValueError: a mask with other values than 0 and 1; where the device is not to be asked, a RuntimeError.
    """
    compiling = torch.compiler.is_compiling()
    ask = not compiling and max_documents is None
    real = bool_mask("attention_mask", attention_mask, ask)
    memory_mask = bool_mask("memory_mask", memory_mask, ask)
    if compiling and tokens == 1 and state is not None:
        restart = None if position_ids is None else restarts(position_ids.expand(batch, 1), real, state)
        return tensor_step(state, real, restart, position_ids, memory_mask, segment_length, local_segments)
    if max_documents is not None or (compiling and position_ids is None):
        bound = 1 if max_documents is None else max_documents
        make = functools.partial(_bounded_layout, max_documents=bound)
    elif torch.compiler.is_exporting():
        raise ValueError(UNBOUNDED)
    else:
        make = _layout_outside if compiling else _asked_layout
    return make(batch, tokens, segment_length, local_segments, real, position_ids, memory_mask, state, device)


def _asked_layout(
    batch, tokens, segment_length, local_segments, real, position_ids, memory_mask, state, device
) -> SegmentLayout | StepLayout:
    """The smallest layout, whose form and sizes follow from what the device says of the arguments."""
    seen, held = [[0] * batch] * 2 if state is None else torch.stack([state.tokens_seen, state.memory_tokens]).tolist()
    restart = None
    questions = []  # asked of the device all at once
    if memory_mask is not None:
        questions.append(memory_mask.all())
    if real is not None:
        questions.append(~real.all())
    if position_ids is not None:
        position_ids = position_ids.expand(batch, tokens)
        restart = restarts(position_ids, real, state)
        questions.append(restart.any())
    answers = torch.stack(questions).tolist() if questions else []
    if memory_mask is not None and answers.pop(0):
        memory_mask = None
    if real is not None and not answers.pop(0):
        real = None
    restarting = position_ids is not None and answers.pop(0)
    if tokens == 1 and not restarting and state is not None:
        return step_layout(state, seen, real, position_ids, memory_mask, segment_length, local_segments)
    if real is not None or restarting or len(set(seen)) > 1:
        shape = (batch, tokens)
        real = torch.ones(shape, dtype=torch.bool, device=device) if real is None else real
        restart = torch.zeros(shape, dtype=torch.bool, device=device) if restart is None else restart
        carried = (local_segments + 1) * segment_length if any(seen) else 0
        begin = torch.tensor(seen, device=device)
        layout = _indexed_layout(real, restart, position_ids, segment_length, local_segments, state, begin, carried)
    else:
        layout = _plain_layout(batch, tokens, position_ids, segment_length, local_segments, state, seen[0], device)
        layout = replace(layout, holding=all(held))
    return _with_memory(layout, memory_mask, state)


def bool_mask(name: str, mask: Tensor | None, ask: bool) -> Tensor | None:
    """A mask of 0 and 1 as bool; ask: whether the device may be asked for its values now."""
    if mask is None or mask.dtype == torch.bool:
        return mask
    wrong = ((mask != 0) & (mask != 1)).any()
    if mask.is_floating_point():  # nothing but zeros: what is added to scores has them where nothing is masked
        wrong = wrong | ~(mask == 1).any()
    message = (
        f"{name} must hold 1 for tokens that count and 0 for those that do not; this one of dtype {mask.dtype} has other "
        "values. A mask that is added to scores (0 and -inf) is not taken: pass mask == 0."
    )
    if not ask:
        torch._assert_async(~wrong, message)
    elif wrong:
        raise ValueError(message)
    return mask.to(torch.bool)


_layout_outside = torch.compiler.disable(_asked_layout, reason=UNBOUNDED)


def _bounded_layout(
    batch, tokens, segment_length, local_segments, real, position_ids, memory_mask, state, device, max_documents
) -> SegmentLayout:
    """A layout that any arguments fit into which begin at most `max_documents` documents in a row."""
    if max_documents < 1:
        raise ValueError(f"max_documents must be ≥ 1, the document of a row's first token counted in; got {max_documents}.")
    shape = (batch, tokens)
    restart = None
    if position_ids is not None:
        position_ids = position_ids.expand(shape)
        restart = restarts(position_ids, real, state)
        torch._assert_async(
            (restart.sum(1) < max_documents).all(),
            f"position_ids begin more than the {max_documents} documents in a row that max_documents allows.",
        )
    if state is None and real is None and max_documents == 1:
        layout = _plain_layout(batch, tokens, position_ids, segment_length, local_segments, state, 0, device)
        return _with_memory(layout, memory_mask, state)
    real = torch.ones(shape, dtype=torch.bool, device=device) if real is None else real
    restart = torch.zeros(shape, dtype=torch.bool, device=device) if restart is None else restart
    documents = 1 if max_documents == 1 else min(max_documents, tokens + 1)
    if state is None:
        carried, seen = 0, torch.zeros(batch, dtype=torch.long, device=device)
        # A document of n tokens takes 1 + (n − 1) // L segments, of which one is there without any token
        segments = documents + (tokens - documents) // segment_length
        slots = segment_length if tokens >= segment_length else tokens
    else:
        carried, seen = (local_segments + 1) * segment_length, state.tokens_seen
        # The continued one may fill its segment with its first new token
        segments = local_segments + documents + (tokens + segment_length - documents) // segment_length
        slots = segment_length
    layout = _indexed_layout(
        real, restart, position_ids, segment_length, local_segments, state, seen, carried, (segments, slots, documents > 1)
    )
    return _with_memory(layout, memory_mask, state)


def _with_memory(layout: SegmentLayout, memory_mask: Tensor | None, state: InfiniState | None) -> SegmentLayout:
    """The layout that knows which tokens of the call and of the state's window are kept out of the memory, and how many the
    memory holds."""
    window = None if state is None else state.local_skipped
    device = layout.tokens_seen.device
    if memory_mask is not None or window is not None:
        new = torch.zeros(layout.batch, layout.tokens, dtype=torch.bool, device=device)
        new = new if memory_mask is None else ~memory_mask
        if window is None:
            slots = (layout.local_segments + 1) * layout.segment_length
            window = torch.zeros(layout.batch, slots, dtype=torch.bool, device=device)
        new, window = (skipped[:, None, :, None] for skipped in (new, window))
        layout = replace(layout, skipped=layout.to_grid(new, window)[..., 0, 0], kept_out=(new, window))
    before = torch.zeros(layout.batch, dtype=torch.long, device=device) if state is None else state.memory_tokens
    return replace(layout, held=_held(layout, before.unsqueeze(1)))


def _held(layout: SegmentLayout, before: Tensor) -> Tensor:
    """[`SegmentLayout.held`]; `before` `[batch, 1]`: what the memory of each row held before the call."""
    written, steps = layout.written(), torch.arange(layout.segments + 1, device=before.device)
    if written is None:
        total = steps.unsqueeze(0) * layout.slots
    else:
        total = pad(written.sum(-1), (1, 0)).cumsum(1)
    if layout.document is None:
        return before + total
    first = (layout.document + layout.local_segments).clamp(min=0).minimum(steps)  # step that takes in a document's first
    continued = layout.document == layout.document[:, :1]
    return total - total.gather(1, first) + continued * before


def _plain_layout(batch, tokens, position_ids, segment_length, local_segments, state, begin, device) -> SegmentLayout:
    first = max(0, begin // segment_length - local_segments)
    carried = begin - first * segment_length
    total = carried + tokens
    before = torch.full((batch,), -1, device=device) if state is None else state.last_position
    return SegmentLayout(
        batch=batch,
        tokens=tokens,
        segment_length=segment_length,
        local_segments=local_segments,
        segments=-(-total // segment_length),
        slots=segment_length if total >= segment_length else total,
        carried=carried,
        first=first,
        seen=begin,
        positions=torch.arange(begin, begin + tokens, device=device).unsqueeze(0),
        tokens_seen=torch.full((batch,), begin + tokens, device=device),
        last_position=before + tokens if position_ids is None else position_ids[:, -1].to(torch.long),
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
    real, restart, position_ids, segment_length, local_segments, state, seen, carried, sizes=None
) -> SegmentLayout:
    """`seen [batch]`: tokens of each row's document before this call; `sizes`: segments, slots and whether the rows are
    packed; `None`: as the arguments need, asked of the device."""
    (batch, tokens), device = real.shape, real.device
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
    source = source.scatter(1, torch.where(real, target, spare), columns)[:, :spare]
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
    kept = (token >= 0) & (token < ended.unsqueeze(1))
    window = torch.where(kept, source.gather(1, place.clamp(0, spare - 1)), -1)

    if position_ids is None:
        before = torch.full((batch,), -1, device=device) if state is None else state.last_position
        last_position = before + counted[:, -1]
    else:
        before = -1 if state is None else state.last_position
        latest = torch.where(real, torch.arange(tokens, device=device), -1).amax(1)
        last_position = position_ids.gather(1, latest.clamp(min=0).unsqueeze(1)).squeeze(1)
        last_position = torch.where(latest >= 0, last_position, before)
    return SegmentLayout(
        batch=batch,
        tokens=tokens,
        segment_length=segment_length,
        local_segments=local_segments,
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
