"""Layouts for graphs, whose sizes do not depend on the data, mostly run without compiling: the naive reference's numbers.

tests/test_compile.py compiles models that use them.
"""

import pytest
import torch
import torch._inductor.config

from cases import assert_equals_reference, random_case, random_cuts, random_state
from hf_infini import infini_attention
from hf_infini.ops.layout.build import restarts, segment_layout

# In float64 two orders of adding differ by about 1e-15 a step: what is left would be a mistake.
FLOAT64 = 1e-9


def bounded_attention(*tensors, state=None, position_ids=None, **options):
    """`infini_attention` that reads no sizes back from the device."""
    documents = 1
    if position_ids is not None:
        documents += int(restarts(position_ids, options.get("attention_mask"), state).sum(1).max())
    return infini_attention(*tensors, state=state, position_ids=position_ids, max_documents=documents, **options)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(500, 560))
def test_equals_the_naive_reference_however_it_is_cut(seed):
    case = random_case(seed, dtype=torch.float64)
    tokens = case.query.shape[2]
    cuts = range(1, tokens) if seed % 3 == 0 else random_cuts(seed, tokens)
    assert_equals_reference(case, bounded_attention, FLOAT64, cuts, random_state(case, seed) if seed % 2 else None)


@pytest.mark.parametrize("length", [1, 2, 5, 8])
@pytest.mark.parametrize("kept", [0, 1])
def test_the_bound_holds_all_that_it_promises(length, kept):
    """Documents of lengths that need most segments, 1 + a multiple of L, and of one token, after any part of a segment."""
    for lengths in ([length + 1] * 3, [1] * 7, [2 * length + 1, 1, 1], [1, 3 * length + 1]):
        positions = torch.cat([torch.arange(n) for n in lengths])[None]
        tokens = positions.shape[1]
        layout = segment_layout(1, tokens, length, kept, position_ids=positions, max_documents=len(lengths))
        assert int(layout.target.max()) < layout.segments * layout.slots
        for seen in range(2 * length + 1):
            case = random_case(0, segment_length=length, local_segments=kept)
            case.query, case.key, case.value = (torch.zeros(1, 1, 1, 2) for _ in range(3))
            state = random_state(case, 0)
            state.tokens_seen.fill_(seen)
            for first in (0, 5):  # a document begins at once, or the old one goes on
                state.last_position.fill_(9 if first == 0 else -1)
                options = {"position_ids": positions + first, "state": state, "max_documents": len(lengths) + (first == 0)}
                layout = segment_layout(1, tokens, length, kept, **options)
                needed = segment_layout(1, tokens, length, kept, position_ids=positions + first, state=state)
                assert getattr(needed, "segments", 0) <= layout.segments
                assert int(layout.target.max()) < layout.segments * layout.slots


def test_more_documents_than_were_promised_are_an_error():
    positions = torch.tensor([[0, 1, 2, 3, 4, 5], [0, 1, 0, 1, 0, 1]])
    segment_layout(2, 6, 4, position_ids=positions, max_documents=3)
    with pytest.raises(RuntimeError, match="more than the 2 documents"):
        segment_layout(2, 6, 4, position_ids=positions, max_documents=2)
    with pytest.raises(ValueError, match="max_documents must be ≥ 1"):
        segment_layout(2, 6, 4, max_documents=0)


@pytest.mark.slow
def test_padded_masks_compile_for_avx2():
    """Of booleans that it pads, torch.compile wrote C++ that is none; other machines are made to write for AVX2."""
    attention_mask, memory_mask = torch.ones(3, 30, dtype=torch.long), torch.arange(90).view(3, 30) % 7 != 0
    attention_mask[0, :7] = attention_mask[1, 20:] = 0

    def written(attention_mask, memory_mask):
        return segment_layout(3, 30, 8, 1, attention_mask=attention_mask, memory_mask=memory_mask).written()

    torch._dynamo.reset()
    with torch._inductor.config.patch({"cpp.simdlen": 256}):
        compiled = torch.compile(written, fullgraph=True)(attention_mask, memory_mask)
    assert torch.equal(compiled, written(attention_mask, memory_mask))
