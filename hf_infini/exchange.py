"""What ranks that share a row exchange, with exact gradients: [`AllGather`] and [`Exchange`].

Shapes: `R` ranks, `B` rows, `T` tokens of a rank's shard.
"""

from typing import NamedTuple

import torch
from torch import Tensor, distributed
from torch.autograd import Function
from torch.autograd.function import once_differentiable


class Exchange(NamedTuple):
    """Which tokens go from which rank to which.

    Attributes:
        places: that each row of a rank has for what it receives.
        sent: `[tokens sent]`, which of the `B · T` tokens of this shard, by the rank that wants them; sent_counts: for each.
        received: `[tokens received]`, to which of the `B · places` they go, by the rank that has them; received_counts.
    """

    places: int
    sent: Tensor
    sent_counts: list[int]
    received: Tensor
    received_counts: list[int]

    @classmethod
    def of(cls, wanted: Tensor, rank: int, tokens: int) -> "Exchange | None":
        """
        Args:
            wanted: `[R, B, places]`, the column of the whole row that each rank wants in each place; −1: none.
            rank: this one; tokens: T.

        Returns `None` where nobody wants any.
        """
        owner = wanted.div(tokens, rounding_mode="floor")  # −1 for none
        ranks = torch.arange(len(wanted), device=wanted.device)
        counts = (owner.unsqueeze(-1) == ranks).sum((1, 2)).tolist()  # by who wants them, by who has them
        if not any(map(sum, counts)):
            return None
        reader, row, place = (owner == rank).nonzero(as_tuple=True)
        sent = row * tokens + wanted[reader, row, place] - rank * tokens
        of_own = owner[rank].flatten()
        received = of_own.argsort(stable=True)[int((of_own < 0).sum()) :]
        return cls(wanted.shape[2], sent, [of_reader[rank] for of_reader in counts], received, counts[rank])


class AllGather(Function):
    """`own` `[…]` of every rank, `[R, …]`; g_own is the sum of what all ranks have for it."""

    @staticmethod
    def forward(ctx, own: Tensor, group) -> Tensor:
        ctx.group = group
        every = own.new_empty(distributed.get_world_size(group), *own.shape)
        distributed.all_gather([*every], own.contiguous(), group)
        return every

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor):
        own = gradient.new_empty(gradient.shape[1:])
        distributed.reduce_scatter(own, [*gradient.contiguous()], group=ctx.group)
        return own, None


class Exchanged(Function):
    """Of the `[B, T, width]` of all ranks what this one wants, `[B, places, width]`, zero where it wants none; the gradient
    of a token is the sum of what all ranks have for it."""

    @staticmethod
    def forward(ctx, rows: Tensor, exchange: Exchange, group) -> Tensor:
        ctx.shape, ctx.exchange, ctx.group = rows.shape, exchange, group
        sent = rows.flatten(0, 1)[exchange.sent]
        received = sent.new_empty(len(exchange.received), rows.shape[2])
        distributed.all_to_all_single(received, sent, exchange.received_counts, exchange.sent_counts, group)
        found = rows.new_zeros(rows.shape[0] * exchange.places, rows.shape[2])
        return found.index_copy_(0, exchange.received, received).view(-1, exchange.places, rows.shape[2])

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor):
        exchange = ctx.exchange
        received = gradient.flatten(0, 1)[exchange.received]
        sent = received.new_empty(len(exchange.sent), ctx.shape[2])
        distributed.all_to_all_single(sent, received, exchange.sent_counts, exchange.received_counts, ctx.group)
        rows = gradient.new_zeros(ctx.shape[0] * ctx.shape[1], ctx.shape[2])
        return rows.index_add_(0, exchange.sent, sent).view(ctx.shape), None, None
