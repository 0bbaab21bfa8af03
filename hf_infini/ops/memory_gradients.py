"""The gradients of the memory's functions that are written by hand; memory.py has the functions.

What autograd would keep or copy for them takes longer, where memory is slower than arithmetic, than the products: together
with blocks of contiguous matrices they made a layer a third faster on a CPU in bfloat16. Second derivatives go through these
gradients: whatever depends on the inputs is there an input or an output of the function, never a result on the way, which
would count as constant.

g is the gradient of the output, `g_x` that of x. Shapes as in memory.py: `B` batch, `N` blocks of segments, `K` key/value
heads, `P` tokens in a block, `R` queries that read a block's state, `D` head dimension, `E` value dimension.
"""

import math

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from .tensors import pad

EXP_LIMIT = 30.0
GROUPED_STATE = {"cpu": 0, "cuda": 2**18}  # numbers in a batch's state, up to which blocks are scanned in groups


class EluFeatures(Function):
    """σ(x) = ELU(x) + 1;  g_x = g · min(σ(x), 1), for σ'(x) is e^x = σ(x) below zero and 1 above.

    From its own result, so that the exponential function, by far the dearest operation of the memory on a CPU, is computed
    once.
    """

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        features = F.elu(x).add_(1)
        ctx.save_for_backward(features)
        return features

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        (features,) = ctx.saved_tensors
        return features.clamp(max=1).mul_(gradient)


class ExpFeatures(Function):
    """σ(x) = e^min(x, 30);  g_x = g · σ(x), and 0 beyond the limit. From its own result, as [`EluFeatures`]."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        features = x.clamp(max=EXP_LIMIT).exp_()
        ctx.save_for_backward(x, features)
        return features

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        x, features = ctx.saved_tensors
        return (gradient * features).masked_fill_(x > EXP_LIMIT, 0)


class UnitLength(Function):
    """y = r c with c = x − 1 and r = 1 / √(|c|² + ε), of vectors in the last dimension;  g_x = r (g − (y·g + r g_r) y).

    Returns y and r, which is an output for the second derivative only.
    """

    @staticmethod
    def forward(ctx, x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        unit = x - 1
        inverse = unit.square().sum(-1, keepdim=True).add_(eps).rsqrt_()
        unit *= inverse
        ctx.save_for_backward(unit, inverse)
        ctx.set_materialize_grads(False)
        return unit, inverse

    @staticmethod
    def backward(ctx, gradient, inverse_gradient):
        unit, inverse = ctx.saved_tensors
        gradient = torch.zeros_like(unit) if gradient is None else gradient
        along = (unit * gradient).sum(-1, keepdim=True)
        if inverse_gradient is not None:
            along = along + inverse * inverse_gradient
        return torch.addcmul(gradient, unit, along, value=-1) * inverse, None


class Read(Function):
    """A = n / (m + ε), n = σ(q) M + C V, m = σ(q) z + Σ C, with C = σ(q) σ(K)ᵀ of the visible tokens of the same block;

    g_n = g / (m + ε),  g_m += −g_n · A,  g_σ(q) = g_n Mᵀ + g_m zᵀ,  g_M = σ(q)ᵀ g_n,  g_z = σ(q)ᵀ g_m,
    g_C = g_n Vᵀ + g_m where visible,  g_σ(q) += g_C σ(K),  g_σ(K) = g_Cᵀ σ(q),  g_V = Cᵀ g_n.

    Returns A, m and C (`None` without `visible`), which is an output for the second derivative only.
    """

    @staticmethod
    def forward(ctx, features, memory, normaliser, eps, key_features, value, visible):
        read = features @ memory
        mass = features @ normaliser.unsqueeze(-1)
        products = None
        if visible is not None:
            products = (features @ key_features.transpose(-1, -2)).mul_(visible)
            read += products @ value
            mass += products.sum(-1, keepdim=True)
        inverse = (mass + eps).reciprocal_()
        read *= inverse
        ctx.save_for_backward(features, memory, normaliser, read, mass, key_features, value, visible, products)
        ctx.eps = eps
        ctx.set_materialize_grads(False)
        return read, mass, products

    @staticmethod
    def backward(ctx, read_gradient, mass_gradient, products_gradient):
        features, memory, normaliser, read, mass, key_features, value, visible, products = ctx.saved_tensors
        read_gradient = torch.zeros_like(read) if read_gradient is None else read_gradient
        to_numerator = read_gradient * (mass + ctx.eps).reciprocal()
        to_mass = (to_numerator * read).sum(-1, keepdim=True).neg()
        if mass_gradient is not None:
            to_mass = to_mass + mass_gradient
        to_features = (to_numerator @ memory.transpose(-1, -2)).addcmul_(to_mass, normaliser.unsqueeze(-2))
        to_memory = features.transpose(-1, -2) @ to_numerator
        to_normaliser = (to_mass.transpose(-1, -2) @ features).squeeze(-2)
        to_keys = to_value = None
        if visible is not None:
            to_products = to_numerator @ value.transpose(-1, -2) + to_mass
            if products_gradient is not None:  # of a second derivative
                to_products = to_products + products_gradient
            to_products = to_products * visible
            to_features = to_features + to_products @ key_features
            to_keys = to_products.transpose(-1, -2) @ features
            to_value = products.transpose(-1, -2) @ to_numerator
        return to_features, to_memory, to_normaliser, None, to_keys, to_value, None


class Mix(Function):
    """A = (1 − s) L + s R;  g_L = (1 − s) g,  g_R = s g,  g_s = Σ g (R − L)."""

    @staticmethod
    def forward(ctx, local, read, share):
        ctx.save_for_backward(local, read, share)
        return torch.lerp(local.to(read.dtype), read, share.expand_as(read)).to(local.dtype)

    @staticmethod
    def backward(ctx, gradient):
        local, read, share = ctx.saved_tensors
        # It comes from the grid, with the tokens before the heads, and every product of blocks would copy it again
        gradient = gradient.to(read.dtype, memory_format=torch.contiguous_format)
        to_read = gradient * share
        to_share = (read - local).mul_(gradient).sum_to_size(share.shape)
        return (gradient - to_read).to(local.dtype), to_read, to_share


class RunningSum(Function):
    """S_n = S_0 + Σ_{j<n} W_j for every block and after the last;  g_W_j = Σ_{n>j} g_n, the same sum from the other end.

    A CPU adds whole states many times faster than it sums along a dimension that is not the last.

    Args:
        written: W, `[B, N, …]`; incoming: S_0, `[B, …]`.
        backwards: begin with the last block.
    """

    @staticmethod
    def forward(ctx, written, incoming, backwards):
        ctx.backwards = backwards
        first, *others = range(written.shape[1])[:: -1 if backwards else 1]
        sums = torch.empty_like(written)
        sums[:, first] = incoming
        last = first
        for block in others:
            torch.add(sums[:, last], written[:, last], out=sums[:, block])
            last = block
        return sums, sums[:, last] + written[:, last]

    @staticmethod
    def backward(ctx, gradient, last_gradient):
        return *RunningSum.apply(gradient, last_gradient, not ctx.backwards), None


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
        part = pad(part, (0, 0) * (part.dim() - 2) + ((more, 0) if backwards else (0, more)))
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
