"""Layouts for graphs, whose sizes do not depend on the data: they hold what they promise. test_attention.py compares what is
computed with them, test_compile.py compiles models that use them."""

import pytest
import torch
import torch._inductor.config

from cases import plain_case, random_state
from hf_infini.ops.layout.build import segment_layout


@pytest.mark.parametrize(("length", "kept"), [(1, 1), (2, 0), (5, 1)])
def test_the_bound_holds_all_that_it_promises(length, kept):
    """Documents of lengths that need most segments, 1 + a multiple of L, and of one token, after any part of a segment."""
    for lengths in ([length + 1] * 3, [1] * 7, [2 * length + 1, 1, 1], [1, 3 * length + 1]):
        positions = torch.cat([torch.arange(n) for n in lengths])[None]
        tokens = positions.shape[1]
        layout = segment_layout(1, tokens, length, kept, position_ids=positions, max_documents=len(lengths))
        assert int(layout.target.max()) < layout.segments * layout.slots
        for seen in range(2 * length + 1):
            case = plain_case(batch=1, tokens=1, segment_length=length, local_segments=kept)
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
        return segment_layout(3, 30, 8, 1, attention_mask=attention_mask, memory_mask=memory_mask).written

    torch._dynamo.reset()
    with torch._inductor.config.patch({"cpp.simdlen": 256}):
        compiled = torch.compile(written, fullgraph=True)(attention_mask, memory_mask)
    assert torch.equal(compiled, written(attention_mask, memory_mask))
