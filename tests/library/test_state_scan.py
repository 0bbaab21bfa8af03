"""The scan of the states in groups, as a GPU does it, against the loop from block to block."""

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from cases import assert_same_gradients
from hf_infini import memory_gradients
from hf_infini.memory_gradients import DeltaScan

FLOAT64 = 1e-12  # of numbers of about 1, in another order


def factors(blocks, thin, fades, packed, tokens=2, width=4):
    """The arguments of the scan, of maps that keep a state of about 1 in size."""
    torch.manual_seed(blocks)

    def normal(*shape):
        return torch.randn(*shape, dtype=torch.float64)

    lead = (2, blocks, 3)
    key = F.normalize(normal(*lead, tokens, width), dim=-1)
    left, right = 0.4 * key.mT, key
    target = normal(*lead, tokens, 5)
    if not thin:
        left, right, target = None, torch.eye(width, dtype=torch.float64) - left @ right, left @ target
    kept = torch.rand(*lead, dtype=torch.float64) if fades else None
    continues = torch.rand(2, blocks) < 0.8 if packed else None
    start = normal(3, width, 5) if packed else None
    return target, left, right, kept, normal(2, 3, width, 5), continues, start


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("thin", "fades"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("blocks", [1, 8, 19, 33])
def test_groups_find_the_same_states_and_derivatives(blocks, thin, fades, packed, monkeypatch):
    arguments = factors(blocks, thin, fades, packed)
    leaves = [part for part in arguments if part is not None and part.is_floating_point()]
    results = []
    for most in (0, 2**20):
        monkeypatch.setitem(memory_gradients.GROUPED_STATE, "cpu", most)
        for leaf in leaves:
            leaf.requires_grad_()
        memories, last = DeltaScan.apply(*arguments)
        first = torch.autograd.grad(memories.sin().sum() + last.cos().sum(), leaves, create_graph=True)
        second = torch.autograd.grad(sum(gradient.square().sum() for gradient in first), leaves)
        results.append((memories, last, first, second))
    (memories, last, first, second), (*wanted, wanted_first, wanted_second) = results[1], results[0]
    torch.testing.assert_close((memories, last), tuple(wanted), rtol=FLOAT64, atol=FLOAT64)
    assert_same_gradients(first, wanted_first, FLOAT64)
    assert_same_gradients(second, wanted_second, FLOAT64)


class CountedOperations(TorchDispatchMode):
    """Operations that compute, each of which has to be told to a GPU."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += not (func.is_view or "view" in func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("thin", [False, True])
def test_groups_need_fewer_operations_than_there_are_blocks(thin, monkeypatch):
    counts = []
    for most in (0, 2**20):
        monkeypatch.setitem(memory_gradients.GROUPED_STATE, "cpu", most)
        target, left, right, kept, incoming, *_ = factors(1000, thin, thin, False)
        with CountedOperations() as counted:
            memories, last = DeltaScan.apply(target.requires_grad_(), left, right, kept, incoming, None, None)
            (memories.sum() + last.sum()).backward()
        counts.append(counted.count)
    # There and back, two loops over 22 blocks and one over 46 groups: 209, thin 400. Block after block: 5,007 and 11,014
    assert counts[1] < 1000 < counts[0]
