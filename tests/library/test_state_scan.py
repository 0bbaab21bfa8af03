"""The scan of the states in groups, as a GPU does it, against the loop from block to block."""

import pytest
import torch
from torch.nn import functional as F

from cases import assert_same_gradients
from hf_infini.ops.rules import memory_rule, scan
from hf_infini.ops.rules.scan import DeltaScan

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
        left, right, target = None, left @ right, left @ target
    growth = -torch.rand(*lead, dtype=torch.float64) if fades else None
    continues = torch.rand(2, blocks) < 0.8 if packed else None
    start = normal(3, width, 5) if packed else None
    return target, left, right, growth, normal(2, 3, width, 5), continues, start


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("thin", "fades"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("blocks", [1, 19, 33])
def test_groups_find_the_same_states_and_derivatives(blocks, thin, fades, packed, monkeypatch):
    arguments = factors(blocks, thin, fades, packed)
    leaves = [part for part in arguments if part is not None and part.is_floating_point()]
    results = []
    for most in (0, 2**20):
        monkeypatch.setitem(scan.GROUPED_STATE, "cpu", most)
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


def scanned(arguments, most, monkeypatch, autocast=False):
    """States and gradients of the last, by the loop (`most` 0) or in groups; the backward pass within autocast or not."""
    monkeypatch.setitem(scan.GROUPED_STATE, "cpu", most)
    leaves = [part.detach().requires_grad_() for part in arguments[:3] if part is not None]
    target, *others = leaves
    left, right = others if len(others) == 2 else (None, *others)
    memories, last = DeltaScan.apply(target, left, right, None, *arguments[4:])
    total = memories[:, -1].sum() + last.sum()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        return [memories, last, *torch.autograd.grad(total, leaves)]


def furthest(found, wanted):
    """The largest difference between tensors, each as a share of its largest number."""
    pairs = zip(found, wanted, strict=True)
    return max(float((one.double() - other).abs().max() / other.abs().max()) for one, other in pairs)


def test_thousands_of_roundings_do_not_add_up(monkeypatch):
    """Of the delta rule, whose map comes ever nearer to the identity: only changes are multiplied."""
    torch.manual_seed(0)
    key, value = torch.randn(1, 4000, 1, 4, 16).abs().double(), torch.randn(1, 4000, 1, 4, 5).double()
    results = []
    for most, dtype in ((0, torch.float64), (0, torch.float32), (2**20, torch.float32)):
        monkeypatch.setitem(scan.GROUPED_STATE, "cpu", most)
        leaves = [part.to(dtype).requires_grad_() for part in (key, value)]
        empty = torch.zeros(1, 1, 16, 5, dtype=dtype), torch.zeros(1, 1, 16, dtype=dtype)
        _, (last, _) = memory_rule("delta").states((*leaves, None), *empty)
        results.append([last, *torch.autograd.grad(last.sum(), leaves)])
    wanted, *found = results
    errors = [furthest(tensors, wanted) for tensors in found]
    # Measured: at most 2.2e-6; with products of whole states instead of changes, 5.8e-6 by the loop and 1.7e-4 in groups
    assert max(errors) < 4e-6


@pytest.mark.parametrize("most", [0, 2**20], ids=["loop", "groups"])
@pytest.mark.parametrize("thin", [False, True])
def test_a_backward_pass_within_autocast_rounds_no_state(thin, most, monkeypatch):
    """Rounded to bfloat16 at each of 1,000 blocks, the gradient of the first would be another."""
    arguments = [part if part is None else part.float() for part in factors(1000, thin, False, False)]
    arguments[2] = arguments[2] / 1000
    wanted, found = (scanned(arguments, most, monkeypatch, autocast) for autocast in (False, True))
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def test_what_is_no_number_stays_in_its_document(monkeypatch):
    monkeypatch.setitem(scan.GROUPED_STATE, "cpu", 2**20)
    target, left, right, growth, incoming, continues, start = factors(33, True, True, True)
    continues[:] = True
    continues[:, 16] = False
    target[:, 3] = float("nan")
    memories, last = DeltaScan.apply(target, left, right, growth, incoming, continues, start)
    assert bool(memories[:, 4:17].isnan().any()) and bool(memories[:, 17:].isfinite().all()) and bool(last.isfinite().all())
