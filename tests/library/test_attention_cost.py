"""What the attention costs, in bytes that do not depend on the machine: both grow with the length
alone."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import hf_infini.ops.backends.grid
from hf_infini import infini_attention


class CountedBytes(TorchDispatchMode):
    """Adds up the bytes that operations write."""

    total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if torch.is_tensor(tensor) and not func.is_view:
                self.total += tensor.numel() * tensor.element_size()
        return result


def costs(tokens, length, width=8, documents=1, **options) -> tuple[int, float]:
    """Bytes that the passes write, and what is kept from the forward to the backward pass, in units
    of one of q, k, v."""
    leaves = [torch.randn(1, 2, tokens, width, requires_grad=True) for _ in range(3)]
    if documents > 1:
        options["position_ids"] = (torch.arange(tokens) % (tokens // documents))[None]
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with CountedBytes() as counter:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = infini_attention(*leaves, torch.zeros(2), length, **options)
        output.sum().backward()
    return counter.total, sum(kept.values()) / (leaves[0].numel() * leaves[0].element_size())


@pytest.mark.parametrize(
    ("rule", "local_segments"), [("linear", 0), ("delta", 1), ("gated_delta", 0)]
)
def test_backward_is_linear_in_the_length(rule, local_segments, monkeypatch):
    """Slicing inside a loop would write a full-length gradient for each segment, and quadruple at
    twice the length."""
    monkeypatch.setitem(hf_infini.ops.backends.grid.GROUP_ELEMENTS, "cpu", 2**10)
    options = {"update_rule": rule, "local_segments": local_segments}
    once, twice = (costs(tokens, 8, **options)[0] for tokens in (1024, 2048))
    assert twice / once < 2.05  # twice the tokens, and a state at the border of one more group


@pytest.mark.parametrize(("documents", "most"), [(1, 13), (3, 15)])
def test_what_is_kept_for_the_backward_pass(documents, most):
    """q, k and v with the heads first, σ(q), σ(k), the read and the local output (7), and a state
    for each segment, here as many numbers as 4 of q's 16 tokens are (4; more for packed documents).
    A quadratic mask would add 160. Measured: 12.1 and 12.7."""
    assert 7 < costs(40_000, 16, 64, documents)[1] < most
