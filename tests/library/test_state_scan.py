"""The scan of the states in groups, as a GPU does it, against the loop from block to block."""

import pytest
import torch
from torch.nn import functional as F

from cases import assert_same_gradients
from hf_infini.ops.rules import memory_rule, scan
from hf_infini.ops.rules.scan import DeltaScan

FLOAT64 = 1e-12  # of numbers of about 1, in another order
WAYS = {"loop": 0, "groups": 2**20}  # numbers in a state, up to which blocks are scanned in groups


def factors(blocks, packed=False, width=4):
    """The arguments of the scan, of maps that keep a state of about 1 in size."""
    torch.manual_seed(blocks)

    def normal(*shape):
        return torch.randn(*shape, dtype=torch.float64)

    key = F.normalize(normal(2, blocks, 3, 2, width), dim=-1)
    continues = torch.rand(2, blocks) < 0.8 if packed else None
    return (
        0.4 * key.mT @ normal(2, blocks, 3, 2, 5),
        0.4 * key.mT @ key,
        normal(2, 3, width, 5),
        continues,
    )


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("blocks", [1, 19, 33])
def test_groups_find_the_same_states_and_derivatives(blocks, packed, monkeypatch):
    arguments = factors(blocks, packed)
    leaves = [part for part in arguments if part is not None and part.is_floating_point()]
    results = []
    for most in WAYS.values():
        monkeypatch.setitem(scan.GROUPED_STATE, "cpu", most)
        for leaf in leaves:
            leaf.requires_grad_()
        memories, last = DeltaScan.apply(*arguments)
        first = torch.autograd.grad(
            memories.sin().sum() + last.cos().sum(), leaves, create_graph=True
        )
        second = torch.autograd.grad(sum(gradient.square().sum() for gradient in first), leaves)
        results.append((memories, last, first, second))
    (memories, last, first, second), (*wanted, wanted_first, wanted_second) = results[1], results[0]
    torch.testing.assert_close((memories, last), tuple(wanted), rtol=FLOAT64, atol=FLOAT64)
    assert_same_gradients(first, wanted_first, FLOAT64)
    assert_same_gradients(second, wanted_second, FLOAT64)


def test_thousands_of_roundings_do_not_add_up(monkeypatch):
    """Of the delta rule, whose map comes ever nearer to the identity: only changes are
    multiplied."""
    torch.manual_seed(0)
    key, value = (
        torch.randn(1, 4000, 1, 4, 16).abs().double(),
        torch.randn(1, 4000, 1, 4, 5).double(),
    )
    results = []
    for way, dtype in (("loop", torch.float64), ("loop", torch.float32), ("groups", torch.float32)):
        monkeypatch.setitem(scan.GROUPED_STATE, "cpu", WAYS[way])
        leaves = [part.to(dtype).requires_grad_() for part in (key, value)]
        empty = torch.zeros(1, 1, 16, 5, dtype=dtype), torch.zeros(1, 1, 16, dtype=dtype)
        _, (last, _) = memory_rule("delta").states((*leaves, None), *empty)
        results.append([last, *torch.autograd.grad(last.sum(), leaves)])
    wanted, *found = results
    pairs = [pair for tensors in found for pair in zip(tensors, wanted, strict=True)]
    errors = [float((one.double() - other).abs().max() / other.abs().max()) for one, other in pairs]
    # Measured: at most 2.2e-6; with products of whole states instead of changes, 5.8e-6 by the loop
    # and 1.7e-4 in groups
    assert max(errors) < 4e-6


@pytest.mark.parametrize("way", WAYS)
def test_a_backward_pass_within_autocast_rounds_no_state(way, monkeypatch):
    """Rounded to bfloat16 at each of 1,000 blocks, the gradient of the first would be another."""
    monkeypatch.setitem(scan.GROUPED_STATE, "cpu", WAYS[way])
    target, factor, incoming, _ = factors(1000)
    leaves, results = [part.float().requires_grad_() for part in (target, factor / 1000)], []
    for autocast in (False, True):
        memories, last = DeltaScan.apply(*leaves, incoming.float(), None)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            results.append(torch.autograd.grad(memories[:, -1].sum() + last.sum(), leaves))
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("way", WAYS)
def test_what_is_no_number_stays_in_its_document(way, monkeypatch):
    monkeypatch.setitem(scan.GROUPED_STATE, "cpu", WAYS[way])
    target, factor, incoming, continues = factors(33, packed=True)
    continues[:] = True
    continues[:, 16] = False
    target[:, 3] = float("nan")
    memories, last = DeltaScan.apply(target, factor, incoming, continues)
    assert (
        bool(memories[:, 4:17].isnan().any())
        and bool(memories[:, 17:].isfinite().all())
        and bool(last.isfinite().all())
    )
