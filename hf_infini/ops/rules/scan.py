"""The scan of the rules that are affine in the memory. Shapes as in equations.py; `N` blocks:
segments, or chunks of them."""

import math

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

# numbers in a batch's state, up to which blocks are scanned in groups
GROUPED_STATE = {"cpu": 0, "cuda": 2**18}


class DeltaScan(Function):
    """M_{n+1} = M_n + T_n − B_n M_n, block after block;

    with g_n the gradient of M_n:  g_n += g_{n+1} − B_nᵀ g_{n+1},  g_T_n = g_{n+1},  g_B_n =
    −g_{n+1} M_nᵀ.

    Only changes are multiplied: a product of the whole state would round it once more at every
    block. It gives M before each block, `[B, N, K, D, E]`, and after the last, `[B, K, D, E]`;
    `memories_gradient` and `gradient` are theirs. `target`: T, `[B, N, K, D, E]`; `factor`: B, `[B,
    N, K, D, D]`; `incoming`: M_0, `[B, K, D, E]`; `continues`: as of [`MemoryRule.states`].
    """

    @staticmethod
    def forward(ctx, target, factor, incoming, continues):
        before = (
            None
            if continues is None
            else torch.cat([torch.ones_like(continues[:, :1]), continues[:, :-1]], 1)
        )
        memories, last = _scan(incoming, target, factor, before)
        if before is not None:
            memories, last = _zero_unless(before, memories), _zero_unless(continues[:, -1], last)
        ctx.save_for_backward(factor, continues, memories)
        return memories, last

    @staticmethod
    def backward(ctx, memories_gradient, gradient):
        factor, continues, memories = ctx.saved_tensors
        # which would round the gradient at every block
        with torch.autocast(gradient.device.type, enabled=False):
            keeps = None if continues is None else continues.flip(1)
            to_state, to_incoming = _scan(
                gradient, memories_gradient.flip(1), factor.mT.flip(1), keeps
            )
            to_state = to_state.flip(1)
            to_state = to_state if continues is None else _zero_unless(continues, to_state)
            to_factor = (to_state @ memories.mT).neg_()
        return to_state, to_factor, to_incoming, None


def _zero_unless(keeps: Tensor, states: Tensor) -> Tensor:
    """States `[…, K, D, E]`, zero, also where they are NaN, where `keeps` `[…]` is False."""
    return states.masked_fill(~keeps[..., None, None, None], 0)


def _scan(
    state: Tensor, added: Tensor, factor: Tensor, keeps: Tensor | None
) -> tuple[Tensor, Tensor]:
    """x before each block, `[B, N, K, D, E]`, and after the last, of x ← x + added − factor x in
    each. Where `keeps` `[B, N]` is False the block reads zero instead of its x.

    On a GPU, where a loop over small states waits for kernels to be launched, blocks are scanned in
    groups, all groups at once: first from zero and from the columns of the identity, which gives
    each group's map; then a loop over the maps finds the state before each group; from these the
    groups are scanned once more.
    """
    (rows, blocks), (height, width) = added.shape[:2], state.shape[-2:]
    size = 1
    if not torch.compiler.is_compiling() and state.numel() <= GROUPED_STATE.get(
        state.device.type, GROUPED_STATE["cuda"]
    ):
        size = max(1, math.isqrt(blocks // 2))  # with which the loops are shortest
    if size == 1:
        return _loop(state, added, factor, keeps)
    # the last has at least one block of zeros, which begins with the last state
    groups = blocks // size + 1

    def in_groups(part):
        part = F.pad(part, (0, 0) * (part.dim() - 2) + (0, groups * size - blocks))
        return part.unflatten(1, (groups, size)).flatten(0, 1)

    added, factor, keeps = (
        in_groups(added),
        in_groups(factor),
        keeps if keeps is None else in_groups(keeps),
    )
    unit = torch.eye(height, width + height, dtype=state.dtype, device=state.device).roll(width, 1)
    _, after = _loop(
        unit.expand(len(added), state.shape[1], -1, -1), F.pad(added, (0, height)), factor, keeps
    )
    changed, minus_factor = (after - unit).unflatten(0, (rows, groups)).split((width, height), -1)
    # Nothing that a document ends with, not even NaN, reaches the next
    first, _ = _loop(
        state, changed, -minus_factor, None if keeps is None else keeps.all(1).view(rows, groups)
    )
    states, _ = _loop(first.flatten(0, 1), added, factor, keeps)
    states = states.unflatten(0, (rows, groups)).flatten(1, 2)
    return states[:, :blocks], states[:, blocks].clone()  # a view would keep all states in memory


def _loop(
    state: Tensor, added: Tensor, factor: Tensor, keeps: Tensor | None
) -> tuple[Tensor, Tensor]:
    """[`_scan`], block by block."""
    before = []
    blocks = (part.transpose(0, 1).flatten(1, 2).unbind(0) for part in (added, factor))
    for number, (new, matrix) in enumerate(zip(*blocks, strict=True)):
        before.append(state)
        state = state if keeps is None else _zero_unless(keeps[:, number], state)
        state = state + torch.baddbmm(new, matrix, state.flatten(0, 1), alpha=-1).view_as(state)
    return torch.stack(before, 1), state
