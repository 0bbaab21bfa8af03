"""What ranks that share a row exchange, with exact gradients: [`AllGather`] and [`Exchange`]; and which token is where in a
call, for all its layers: [`Shard`].

A collective's gradient is a collective, too, so every rank must come to it, in the same order.

Shapes: `R` ranks, `B` rows, `T` tokens of a rank's shard.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from ...ops.convolution import short_convolution
from ...ops.layout.build import bool_mask, restarts, segment_layout
from ...ops.state import InfiniState
from ...options import places_of


class Exchange(NamedTuple):
    """Which tokens go from which rank to which, and which come from before the call.

    Attributes:
        places: that each row of a rank has for what it receives.
        old: `[B, places]`, from which place of before the call each comes; −1: none of it does. `None`: nothing does.
        sent: `[tokens sent]`, which of the `B · T` tokens of this shard, by the rank that wants them; sent_counts: for each.
        received: `[tokens received]`, to which of the `B · places` they go, by the rank that has them; received_counts.
    """

    places: int
    old: Tensor | None
    sent: Tensor
    sent_counts: list[int]
    received: Tensor
    received_counts: list[int]

    @classmethod
    def of(cls, numbers: Tensor, tokens: int, group) -> "Exchange | None":
        """
        Args:
            numbers: `[B, places]`, what this rank wants in each place: n + 1 for column n of the whole row, −p − 1 for place
                p of before the call, 0 for nothing.
            tokens: T.

        Returns `None` where nobody wants any.
        """
        if not numbers.numel():
            return None
        rank, every = distributed.get_rank(group), gather(numbers, group)
        if not every.any():
            return None
        old, wanted = (-1 - numbers).clamp(min=-1), (every - 1).clamp(min=-1)
        owner = wanted.div(tokens, rounding_mode="floor")  # −1 for none
        ranks = torch.arange(len(wanted), device=wanted.device)
        counts = (owner.unsqueeze(-1) == ranks).sum((1, 2)).tolist()  # by who wants them, by who has them
        reader, row, place = (owner == rank).nonzero(as_tuple=True)
        sent = row * tokens + wanted[reader, row, place] - rank * tokens
        of_own = owner[rank].flatten()
        received = of_own.argsort(stable=True)[int((of_own < 0).sum()) :]
        kept = old if bool((old >= 0).any()) else None
        return cls(wanted.shape[2], kept, sent, [of_reader[rank] for of_reader in counts], received, counts[rank])

    def before(self, new: Tensor, old: Tensor, group) -> Tensor:
        """`[B, places, width]` of the new `[B, T, width]` of all ranks, and of what this one has of before the call, `[B,
        places before, width]`; zero where nothing is wanted."""
        sent = new.flatten(0, 1)[self.sent]
        received = AllToAll.apply(sent, self.sent_counts, self.received_counts, group)
        found = new.new_zeros(new.shape[0] * self.places, new.shape[2]).index_copy(0, self.received, received)
        found = found.view(-1, self.places, new.shape[2])
        if self.old is None:
            return found
        kept = old.gather(1, self.old.clamp(min=0).unsqueeze(2).expand(-1, -1, old.shape[2]))
        return found + kept.masked_fill((self.old < 0).unsqueeze(2), 0)


def gather(own: Tensor, group) -> Tensor:
    """`own` of every rank, `[R, …]`; without a gradient."""
    return AllGather.apply(own.detach(), group)


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


class AllToAll(Function):
    """The rows `[received, width]` that all ranks have sent to this one, of whose `[sent, width]` each gets so many; their
    gradients go back."""

    @staticmethod
    def forward(ctx, rows: Tensor, sent_counts: list[int], received_counts: list[int], group) -> Tensor:
        ctx.back = (received_counts, sent_counts, group)
        received = rows.new_empty(sum(received_counts), rows.shape[1])
        distributed.all_to_all_single(received, rows.contiguous(), received_counts, sent_counts, group)
        return received

    @staticmethod
    def backward(ctx, gradient: Tensor):
        return AllToAll.apply(gradient, *ctx.back), None, None, None


class Shard(NamedTuple):
    """What is known of a call for all its layers.

    Attributes:
        tokens: T; state: that its layout continues, with empty windows; `None` for the first rank.
        kept: `[R, B]` bool, whether a row's document goes on through the whole of each rank's shard.
        skips: whether any token of the rows, or of the window before them, is kept out of the memory.
        window, recent: the [`Exchange`] of the windows and of the convolution's inputs; `None`: nothing is exchanged.
    """

    tokens: int
    state: InfiniState | None
    kept: Tensor
    skips: bool
    window: Exchange | None
    recent: Exchange | None

    @classmethod
    def of_call(
        cls,
        group,
        batch: int,
        tokens: int,
        device: torch.device,
        masks: dict[str, Tensor | None],
        window: tuple[int, int, int, int],
        taps: int,
        past: InfiniState | None,
    ) -> "Shard":
        """
        Args:
            group: the ranks; batch, tokens: of a shard; masks: of this one, as [`segment_layout`] takes them.
            window: of [`MemoryOptions`]; taps: of the convolution, 0 without one.
            past: what the whole rows continue.
        """
        rank, size = distributed.get_rank(group), distributed.get_world_size(group)
        whole: dict[str, Any] = dict.fromkeys(masks)
        for name, mask in masks.items():
            if mask is not None:
                kind = torch.int32 if name == "position_ids" else torch.uint8
                own: Any = mask if name == "position_ids" else bool_mask(name, mask, True)
                found = gather(own.expand(batch, tokens).to(kind), group).transpose(0, 1).flatten(1)
                whole[name] = found.to(torch.int64 if name == "position_ids" else torch.bool)
        kept = torch.ones(size, batch, dtype=torch.bool, device=device)
        if whole["position_ids"] is not None:
            begins = restarts(whole["position_ids"], whole["attention_mask"], past)
            kept = ~begins.unflatten(1, (size, tokens)).any(2).T
        # What the next state would take of each column is found by giving it the columns' numbers
        state, counts = past, (places_of(*window), max(taps - 1, 0))
        old = [-torch.arange(1, count + 1, dtype=torch.float64, device=device) for count in counts]
        found = [(number if past is not None else number * 0).expand(batch, -1) for number in old]
        if rank:
            cut: dict[str, Any] = {name: None if mask is None else mask[:, : rank * tokens] for name, mask in whole.items()}
            layout: Any = segment_layout(batch, rank * tokens, *window, **cut, state=past, device=device)
            numbers = torch.arange(1, rank * tokens + 1, dtype=torch.float64, device=device)
            numbers = numbers.expand(batch, 1, -1).unsqueeze(3)
            found[0] = layout.next_window(numbers, found[0][:, None, :, None])[:, 0, :, 0]
            if taps > 1:
                weight = numbers.new_zeros(taps, 1)
                found[1] = short_convolution(numbers[:, 0], weight, layout, found[1].unsqueeze(2))[1][..., 0]
            nothing = numbers.new_zeros(batch, 1, 0, 1)
            before = InfiniState.initial(nothing, nothing, *window) if past is None else past
            state = before.after(layout)
        skips = past is not None and past.local_skipped is not None
        skips = skips or (whole["memory_mask"] is not None and not bool(whole["memory_mask"].all()))
        return cls(tokens, state, kept, skips, *(Exchange.of(part.long(), tokens, group) for part in found))
