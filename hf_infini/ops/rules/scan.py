"""M_{n+1} = (1 + f_n) M_n + A_n (T_n − B_n M_n), block after block: the scan of the rules that are affine in the memory.

Shapes: `B` batch, `N` blocks (segments, or chunks of them), `K` key/value heads, `D` head dimension, `E` value dimension.
"""

import math

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

GROUPED_STATE = {"cpu": 0, "cuda": 2**18}  # numbers in a batch's state, up to which blocks are scanned in groups


class DeltaScan(Function):
    """M_{n+1} = (1 + f_n) M_n + A_n (T_n − B_n M_n), block after block ([`_scan`]);

    with g_n the gradient of M_n and c_n = A_nᵀ g_{n+1}:  g_n += (1 + f_n) g_{n+1} − B_nᵀ c_n,
    g_T_n = c_n,  g_B_n = −c_n M_nᵀ,  g_A_n = g_{n+1} (T_n − B_n M_n)ᵀ,  g_f_n = Σ g_{n+1} M_n.

    Only changes are multiplied: a product of the whole state would round it once more at every block. The scan backwards
    touches the states' gradient only; what is owed to A, B and T is worked out for all blocks at once.

    Args:
        target: T; left: A, `None`: the identity; right: B. `[B, N, K, …]` each; growth: f, `[B, N, K]`, `None`: zero.
        incoming: M_0, `[B, K, D, E]`.
        continues: `[B, N]` bool: where it is False, M begins again as `start` `[K, D, E]` behind the block; `None`: nowhere.

    Returns M before each block, `[B, N, K, D, E]`, and after the last.
    """

    @staticmethod
    def forward(ctx, target, left, right, growth, incoming, continues, start):
        memories, last = _scan(_next_state, incoming, target, (left, right, growth, continues), start)
        ctx.save_for_backward(target, left, right, growth, continues, memories)
        return memories, last

    @staticmethod
    def backward(ctx, memories_gradient, gradient):
        target, left, right, growth, continues, memories = ctx.saved_tensors
        with torch.autocast(gradient.device.type, enabled=False):  # which would round the gradient at every block
            maps = left, right, growth, continues
            to_state, to_incoming = _scan(_gradient_before, gradient, memories_gradient, maps, backwards=True)
            to_start = None
            if continues is not None:
                arriving, to_state = to_state, to_state * continues[..., None, None, None]
                to_start = (arriving - to_state).sum((0, 1))
            to_target = to_state if left is None else left.transpose(-1, -2) @ to_state
            to_right = (to_target @ memories.transpose(-1, -2)).neg_()
            to_left = None if left is None else to_state @ (target - right @ memories).transpose(-1, -2)
            to_growth = None if growth is None else (to_state * memories).sum((-2, -1))
        return to_target, to_left, to_right, to_growth, to_incoming, None, to_start


def _next_state(memory, target, left, right, growth, continues, start):
    """M_{n+1} of [`DeltaScan`]."""
    change = _add_product(target, right, memory, -1)
    grown = memory if growth is None else torch.addcmul(memory, memory, growth[..., None, None])
    memory = grown + change if left is None else _add_product(grown, left, change)
    return memory if continues is None else torch.where(continues[:, None, None, None], memory, start)


def _gradient_before(gradient, owed, left, right, growth, continues, start):
    """g_n of [`DeltaScan`] from g_{n+1} and what the caller owes to M_n."""
    if continues is not None:
        gradient = gradient * continues[:, None, None, None]
    to_change = gradient if left is None else left.transpose(-1, -2) @ gradient
    owed = owed if growth is None else torch.addcmul(owed, gradient, growth[..., None, None])
    return gradient + _add_product(owed, right.transpose(-1, -2), to_change, -1)


def _add_product(base: Tensor, left: Tensor, right: Tensor, sign: int = 1) -> Tensor:
    """base ± left right, `[B, K, …]` each, as one operation."""
    parts = (part.flatten(0, 1) for part in (base, left, right))
    return torch.baddbmm(*parts, alpha=sign).unflatten(0, base.shape[:2])


def _scan(step, state, added, maps, start=None, *, backwards=False):
    """x_{n+1} = step(x_n, …), affine in x_n: x before each block, `[B, N, K, D, E]`, and after the last.

    A GPU spends a loop over small states waiting for kernels to be launched. There the blocks are scanned in groups, all
    groups at once: first from zero and from the columns of the identity, which gives each group's map; then a loop over the
    maps finds the state before each group; from these the groups are scanned once more.

    Args:
        step: [`_next_state`] or [`_gradient_before`], without a `start`.
        state: x_0, `[B, K, D, E]`; added: `[B, N, K, …, E]`, what is new in each block.
        maps: `[B, N, …]` each or `None`, what else `step` takes of each block, `continues` last; start: as in [`DeltaScan`].
        backwards: begin with the last block.
    """

    def scan(state, added, start, kept=None):
        for block in range(len(added))[:: -1 if backwards else 1]:
            if kept is not None:
                kept.append(state)
            state = step(state, added[block], *(part if part is None else part[block] for part in maps), start)
        return state

    def stacked(states):
        return torch.stack(states[::-1] if backwards else states, 1)

    before: list[Tensor] = []
    rows, blocks = added.shape[:2]
    size = _group_size(blocks, state)
    if size == 1:
        maps = [part if part is None else part.transpose(0, 1) for part in maps]
        last = scan(state, added.transpose(0, 1), start, before)
        return stacked(before), last
    groups = blocks // size + 1
    more = groups * size - blocks  # at least one block of zeros, which is scanned last, and begins with the last state

    def in_groups(part):  # `[size, B · groups, …]`, contiguous for what is computed at a time
        part = F.pad(part, (0, 0) * (part.dim() - 2) + ((more, 0) if backwards else (0, more)))
        return part.unflatten(1, (groups, size)).flatten(0, 1).transpose(0, 1).contiguous()

    added, maps = in_groups(added), [part if part is None else in_groups(part) for part in maps]
    height, width = state.shape[-2:]
    unit = torch.eye(height, width + height, dtype=state.dtype, device=state.device).roll(width, 1)
    wide = None if start is None else F.pad(start, (0, height))
    changed = scan(unit.expand(added.shape[1], state.shape[1], -1, -1), F.pad(added, (0, height)), wide) - unit
    offset, factor = changed.unflatten(0, (rows, -1)).transpose(0, 1).contiguous().split((width, height), -1)
    through = None if maps[-1] is None else maps[-1].all(0).view(rows, groups, 1, 1, 1)
    for group in range(groups)[:: -1 if backwards else 1]:
        before.append(state)
        if through is not None:  # nothing that a document ends with, not even NaN, reaches the next
            state = torch.where(through[:, group], state, 0)
        state = state + _add_product(offset[group], factor[group], state)
    first, before = stacked(before).flatten(0, 1), []
    scan(first, added, start, before)
    states = stacked(before).unflatten(0, (rows, -1)).flatten(1, 2)
    last = states[:, more - 1 if backwards else blocks].clone()  # a view would keep all states in memory
    return states[:, more:] if backwards else states[:, :blocks], last


def _group_size(blocks: int, state: Tensor) -> int:
    """Blocks in a group, so that the loops are shortest; 1: none."""
    if torch.compiler.is_compiling() or state.numel() > GROUPED_STATE.get(state.device.type, GROUPED_STATE["cuda"]):
        return 1
    return max(1, math.isqrt(blocks // 2))
