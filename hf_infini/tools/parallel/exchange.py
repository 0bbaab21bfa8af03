"""What ranks that share a row exchange, with exact gradients: [`AllGather`] and [`Exchange`]; and which token is where in a
call, for all its layers: [`Shard`].

A collective's gradient is a collective, too, so every rank must come to it, in the same order.

Shapes: `R` ranks, `B` rows, `T` tokens of a rank's shard.
"""

from dataclasses import replace
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
        numbers: `[R, B, places]`, what each rank wants in its places, as [`Exchange.of`] takes it.
        sent: `[tokens sent]`, which of the `B · T` tokens of this shard, by the rank that wants them; sent_counts: for each.
        received: `[tokens received]`, to which of the `B · places` they go, by the rank that has them; received_counts.
    """

    numbers: Tensor
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
        wanted = (every - 1).clamp(min=-1)
        owner = wanted.div(tokens, rounding_mode="floor")  # −1 for none
        ranks = torch.arange(len(wanted), device=wanted.device)
        counts = (owner.unsqueeze(-1) == ranks).sum((1, 2)).tolist()  # by who wants them, by who has them
        reader, row, place = (owner == rank).nonzero(as_tuple=True)
        sent = row * tokens + wanted[reader, row, place] - rank * tokens
        of_own = owner[rank].flatten()
        received = of_own.argsort(stable=True)[int((of_own < 0).sum()) :]
        return cls(every, sent, [of_reader[rank] for of_reader in counts], received, counts[rank])

    def before(self, new: Tensor, old: Tensor, group) -> Tensor:
        """`[B, places, width]` of the new `[B, T, width]` of all ranks, and of what this one has of before the call, `[B,
        places before, width]`; zero where nothing is wanted."""
        place = (-1 - self.numbers[distributed.get_rank(group)]).unsqueeze(2)
        kept = old.gather(1, place.clamp(min=0).expand(-1, -1, old.shape[2])).masked_fill(place < 0, 0)
        sent = new.flatten(0, 1)[self.sent]
        received = AllToAll.apply(sent, self.sent_counts, self.received_counts, group)
        return new.new_zeros(kept.shape).flatten(0, 1).index_copy(0, self.received, received).view_as(kept) + kept

    @torch.no_grad()
    def sums(self, own: Tensor, found: Tensor, group) -> Tensor:
        """`[B, K, places, width]`: what all ranks up to this one have for the tokens in its places.

        Args:
            own: `[B, K, T, width]`, what this one has for its own tokens; found: `[B, K, places, width]`, for those in its
                places, a token that is there twice but once.
        """
        (size, _, places), rank = self.numbers.shape, distributed.get_rank(group)
        index = (self.numbers + places)[:, :, None, :, None].expand(-1, *found.shape)  # 0 … P − 1: before the call; P: none
        sums = own.new_zeros(*own.shape[:2], places + 1 + size * own.shape[2], own.shape[3])
        sums[:, :, places + 1 :].unflatten(2, (size, -1))[:, :, rank] = own
        sums.scatter_add_(2, index[rank], found)[:, :, places] = 0
        parts = [sums.gather(2, of_reader) * (reader >= rank) for reader, of_reader in enumerate(index)]
        total = torch.empty_like(parts[0])
        distributed.reduce_scatter(total, parts, group=group)
        return total


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
        goes_on: `[R, B]` bool, whether a row's document goes on through the whole of each rank's shard.
        skips: whether any token of the rows, or of the window before them, is kept out of the memory.
        window, recent: the [`Exchange`] of the windows and of the convolution's inputs; `None`: nothing is exchanged.
    """

    tokens: int
    state: InfiniState | None
    goes_on: Tensor
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
                own: Any = mask.long() if name == "position_ids" else bool_mask(name, mask, True)
                whole[name] = gather(own.expand(batch, tokens), group).transpose(0, 1).flatten(1)
        goes_on = torch.ones(size, batch, dtype=torch.bool, device=device)
        if whole["position_ids"] is not None:
            begins = restarts(whole["position_ids"], whole["attention_mask"], past)
            goes_on = ~begins.unflatten(1, (size, tokens)).any(2).T
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
            if kept_tokens := window[3]:  # as many as are kept, wherever they are from
                filled = torch.arange(kept_tokens, device=device) >= kept_tokens - layout.left[:, -1:]
                state = replace(state, kept_position=filled.long()[:, None] - 1)
        skips = past is not None and past.local_skipped is not None
        skips = skips or (whole["memory_mask"] is not None and not bool(whole["memory_mask"].all()))
        return cls(tokens, state, goes_on, skips, *(Exchange.of(part.long(), tokens, group) for part in found))
