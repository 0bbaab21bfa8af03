"""Kept tokens in the attention function: of what has left the window, the best stay visible, and
the memory has the rest."""

import pytest

from cases import assert_equals_reference, keeping_case, random_cuts, state_before
from hf_infini import infini_attention


@pytest.mark.parametrize("seed", range(100))
def test_equals_the_reference_however_the_call_is_cut(seed):
    """Outputs, states and gradients: one call, chunks, single steps; after other tokens, or from
    the start."""
    case = keeping_case(seed)
    cuts = random_cuts(seed, case.query.shape[2])
    assert_equals_reference(
        case, infini_attention, 1e-9, cuts, None if seed % 3 else state_before(case)
    )
