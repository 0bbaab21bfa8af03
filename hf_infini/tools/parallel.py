"""One text over several devices: exact context parallelism for a window and a memory. The row of a text is cut at segment
borders, and rank r of R computes only the tokens of its shard.

A shard is a chunk that continues a state, which is what the ranks before it leave. Per layer, rank r gets of it

    the window                 the (un-rotated) keys, values and log weights of the tokens that its first tokens see, and the
                               sinks, from the ranks that have them: for the most part from rank r − 1
    the convolution's inputs   the last taps − 1 of its document, likewise
    the kept tokens            the best of what each rank before it has found best among what left the window there
    the memory                 M_r = A_{r−1} M_{r−1} + B_{r−1},  z_r = a_{r−1} z_{r−1} + b_{r−1},  from M_0, z_0

Rank j makes A_j, B_j, a_j, b_j of what leaves the window on it, and all ranks gather them:

    linear rule                B = Σ σ(k)ᵀ v,  b = Σ σ(k),  A = a = 1; where a document begins on the rank, A = a = 0, and
                               B and b are its start and what it has written
    delta rule                 b and a likewise; with z_j known, the rule is affine in M, and its loop over segments gives
                               [B | A] from [0 | I], with values [V | 0]
    gated delta rule           the same without z

Which tokens are kept follows from their scores alone. So each rank first finds what its queries give the tokens of its
windows; from rank to rank goes what the window's tokens have received so far. Then all gather the K best tokens of each
rank, and each knows what is kept before its shard, and what it evicts.

A layer gathers kv_heads · (d² + d) float32 numbers from each rank, with a delta rule twice as many, and kv_heads · K kept
keys and values, however long the text. All but the scores goes through one collective, [`AllToAll`]. What its backward
sums are the gradients of all ranks that have read a rank's part: the gradient is exact.

Which token is where is found once for all layers of a call: every rank is given the whole rows, and lays out what comes
before its shard as one call would.

Shapes: `R` ranks, `B` rows, `T` tokens of a shard, `P` places of a window, `K` key/value heads, `D` head dimension, `E`
value dimension.
"""

import copy
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import transformers
from torch import Tensor, distributed
from torch.autograd import Function
from torch.nn import functional as F
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache

from ..cache.cache import InfiniCache
from ..compat.cache_name import CACHE
from ..models.base import memory_mask_of
from ..ops.attention import GROUP_ELEMENTS
from ..ops.checks import bool_mask, check_kinds
from ..ops.convolution import short_convolution
from ..ops.kept import Kept, KeptInGrid, choose, first_scores, shares, with_sinks_before
from ..ops.layout.base import GridLayout
from ..ops.layout.build import restarts, segment_layout
from ..ops.memory import MemoryRule, running_sum
from ..ops.state import InfiniState, Projections
from ..ops.window import ScoreOptions
from ..options import check_number, places_of

# What loading or saving writes into a configuration, perhaps on one rank only
SAVED = ("_name_or_path", "architectures", "auto_map", "dtype", "transformers_version")


@check_kinds
def shard_rows(
    batch: Mapping[str, Tensor],
    config: PreTrainedConfig,
    group: distributed.ProcessGroup | None = None,
    past: InfiniCache | None = None,
) -> dict[str, Any]:
    """This rank's share of whole rows, as arguments of the model: `model(**shard_rows(batch, model.config, group)).loss`.

    Every rank of the group passes the same rows. The loss is the rank's own: with `num_items_in_batch`, the count of labels
    that are not −100 in the whole rows without their first column, the losses of all ranks add up to that of one process, as
    do the gradients. Without it, a rank divides by the count of its own labels.

    Args:
        batch: `input_ids`, or `inputs_embeds` `[B, tokens, width]`, and, as the model takes them, `attention_mask`,
            `position_ids`, `memory_mask` and `labels` (−100: not predicted), `[B, tokens]` each.
        config: of the model, every layer of which has a memory.
        group: the ranks that share the rows, in the order of their shards; `None`: all.
        past: what the rows go on from, the same on every rank, such as [`ShardCache.whole`] of the call before; it gets no
            gradient and is not changed. `None`: they begin.

    Returns:
        The shards of what is in the batch, `[B, tokens / R, …]`; `shift_labels`, for a label may be on the next rank;
        `cache` (before transformers 5.24 `past_key_values`), the [`ShardCache`] of this one call; and `use_cache` False.

    Raises:
        ValueError: the rows cannot be cut into one shard for each rank at segment borders, do not go on from `past`, or some
            layers of the model have no memory; on every rank.
    """
    shapes = {name: list(part.shape) for name, part in batch.items()}
    text: Any = batch.get("input_ids", batch.get("inputs_embeds"))
    if text is None or any(shape[:2] != list(text.shape[:2]) for shape in shapes.values()):
        raise ValueError(f"the batch must have input_ids or inputs_embeds, and all parts [rows, tokens, …]; got {shapes}.")
    cache, parts = ShardCache(config, batch, group, past), dict(batch)
    if "labels" in batch:
        parts["shift_labels"] = F.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    shards = {name: part.chunk(cache.size, 1)[cache.rank].contiguous() for name, part in parts.items()}
    return shards | {CACHE: cache, "use_cache": False}


@check_kinds
def read_rows(
    model, batch: Mapping[str, Tensor], past: InfiniCache | None = None, group: distributed.ProcessGroup | None = None
) -> tuple[list[tuple[int, Any]], InfiniCache]:
    """Rows of any length, read over the ranks: what no longer makes a segment for each of them is read on all. Without
    gradients.

    Args:
        model: with a memory in every layer; batch, past, group: as in [`shard_rows`].

    Returns:
        The model's outputs of this rank, `(first column, output)` each: together, those of all ranks are of every column
        once; and the cache of the whole rows, on every rank.

    Raises:
        ValueError: as [`shard_rows`], on every rank.
    """
    text: Any = batch.get("input_ids", batch.get("inputs_embeds"))
    rank, size, tokens = distributed.get_rank(group), distributed.get_world_size(group), text.shape[1]
    check_shards(model.config)
    shared, outputs = tokens - tokens % (size * model.config.window[0]), []
    cache = InfiniCache(model.config) if past is None else copy.copy(past)
    with torch.no_grad():
        if shared:
            share = shard_rows({name: part[:, :shared] for name, part in batch.items()}, model.config, group, cache)
            outputs.append((rank * (shared // size), model(**share)))
            cache = share[CACHE].whole()
        if shared < tokens:
            rest = {name: part[:, shared:] for name, part in batch.items()}
            output = model(**rest, use_cache=True, **{CACHE: cache})
            outputs += [(shared, output)] if rank == 0 else []
    return outputs, cache


@check_kinds
def check_shards(config: PreTrainedConfig, tokens: int | None = None, size: int = 1) -> None:
    """ValueError unless all layers of a model have a memory and rows of so many tokens (`None`: any) can be cut into `size`
    shards."""
    for name, count in (("tokens", tokens), ("size", size)):
        check_number(name, count, {"at_least": 1})
    kept = sorted({*range(config.num_hidden_layers)} - {*getattr(config, "infini_layers", ())})
    if kept:
        raise ValueError(
            f"layers {kept} of this model have no memory: their attention would need the keys and values of all ranks, "
            "which are not exchanged here. Give every layer a memory, or do not cut the rows."
        )
    length = config.window[0]
    if tokens is not None and tokens % (size * length):
        fewer = f", fewer than the {size} ranks" if tokens < size * length else ""
        raise ValueError(
            f"rows of {tokens} tokens are {tokens / length:g} segments of {length}{fewer}, and {size} ranks need the same "
            f"number of whole segments each: use fewer ranks, or rows of a multiple of {size} * {length} = {size * length} "
            "tokens."
        )


class ShardCache(InfiniCache):
    """What the ranks before this one leave: the `past_key_values` of one call of a model on one shard, made by
    [`shard_rows`]. Only [`ShardCache.whole`] can be continued.

    Args:
        config, batch, group, past: as in [`shard_rows`].

    Raises:
        ValueError: as [`shard_rows`]. In a call: the ranks' models, versions, rows or shards do not fit together (on every
            rank).
    """

    goes_on: Tensor  # `[R, B]` bool, whether a row's document goes on through the whole of each rank's shard
    fetch_window: Any = None  # a [`route`] for the windows, from the call on
    fetch_recent: Any = None  # and for the convolution's inputs
    reached: Tensor  # the sum of no numbers of the last exchange in a layer: see `_exchanged`

    def __init__(self, config: PreTrainedConfig, batch: Mapping[str, Tensor], group, past: InfiniCache | None):
        self.group, self.rank, self.size = group, distributed.get_rank(group), distributed.get_world_size(group)
        ids = batch.get("input_ids")
        text: Any = batch.get("inputs_embeds") if ids is None else ids
        rows, columns = text.shape[:2]
        check_shards(config, columns, self.size)
        super().__init__(config)
        self.past = InfiniCache(config) if past is None else past
        self.before = None if self.rank else self.past.state  # what the layout of the call continues
        self.layout_before: Any = None  # of all columns before this shard, from the call on
        self.shape = (rows, columns // self.size)  # of a shard
        layers: Any = zip(self.layers, self.past.layers, strict=True)
        for layer, known in layers:
            layer.state, layer.columns = known.state, known.columns + self.rank * self.shape[1]
        self.masks = {name: bool_mask(name, batch.get(name), True) for name in ("attention_mask", "memory_mask")}
        self.masks["memory_mask"] = memory_mask_of(config, ids, self.masks["memory_mask"])
        self.masks["position_ids"] = batch.get("position_ids")
        self.text = dict(self.past.text)
        self.note_text(text.new_full((rows, columns), -2, dtype=torch.long) if ids is None else ids)
        numbers = text.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        self.rows = hashlib.sha256(numbers).hexdigest()

    def whole(self) -> InfiniCache:
        """What one process has after the whole rows, on every rank; all of them call this, after a call of the model without
        gradients. To save, to generate from, or as the `past` of more rows.

        Raises:
            ValueError: there was no such call.
        """
        if not self.is_initialized:
            raise ValueError("nothing is known of the whole rows: call the model under torch.no_grad() with it first.")
        cache, columns = InfiniCache(self._config), self.past.get_seq_length() + self.size * self.shape[1]
        own: Any = self.layers
        last: Any = [[layer.state.map(lambda part: part.detach().cpu().clone()) for layer in own]]
        distributed.broadcast_object_list(last, group=self.group, group_src=self.size - 1)
        layers: Any = zip(cache.layers, last[0], own, strict=True)
        for layer, state, before in layers:
            layer.advance(state.map(lambda part, like=before.state.memory: part.to(like.device)), columns)
        cache.text = dict(self.text)
        return cache

    @property
    def state(self) -> InfiniState | None:
        return self.before

    def exchange(self) -> "ShardCache":
        return self

    def advance(self, of_call: Cache, input_ids: Tensor | None, tokens: int) -> None:
        """Keeps for `whole` what the call has left."""
        if not torch.is_grad_enabled():
            self.advance_layers(of_call, tokens)

    # --- what [`SharedInputs.exchange`] does for the layers ----------------------------------------------------------------

    def begin(self, batch: int, tokens: int, device: torch.device, masks: dict[str, Tensor | None]) -> None:
        """Finds the state that the layout of a call of `[batch, tokens]` continues; `masks` as [`segment_layout`] takes
        them."""
        if self.fetch_window is not None:
            raise ValueError("a ShardCache is for one call: make one for each, as shard_rows does.")
        if torch.compiler.is_compiling():
            raise ValueError("the ranks' exchange cannot be compiled: call the model without torch.compile.")
        self.check_agreement(batch, tokens, device, masks)
        if (batch, tokens) != self.shape or tokens < 2:
            raise ValueError(
                f"a shard must be [rows, tokens] = {list(self.shape)}, as shard_rows has made it, and have 2 tokens at "
                f"least; got {[batch, tokens]}."
            )
        past, columns, real = self.past.state, self.rank * tokens, self.masks["attention_mask"]
        self.goes_on = torch.ones(self.size, batch, dtype=torch.bool, device=device)
        if (position_ids := self.masks["position_ids"]) is not None:
            self.goes_on = ~restarts(position_ids, real, past).unflatten(1, (self.size, tokens)).any(2).T

        # Rank 0 has all that it needs
        places, taps = places_of(*self.window), self._config.memory_conv
        wanted, old_places = torch.arange(places, device=device).expand(batch, -1), places
        if self.rank:
            cut: dict[str, Any] = {name: None if mask is None else mask[:, :columns] for name, mask in self.masks.items()}
            layout: Any = segment_layout(batch, columns, *self.window, **cut, state=past, device=device)
            wanted, old_places = layout.window, layout.carried_to
            nothing = torch.zeros(batch, 1, 0, 1, device=device)
            before = InfiniState.initial(nothing, nothing, *self.window) if past is None else past
            self.layout_before = layout
            # To the next layout, all that has left the window is in the memory
            self.before = replace(before.after(layout), memory_tokens=layout.left[:, -1], kept_position=None)
        self.fetch_window = route(wanted, old_places, tokens, self.group)
        if taps > 1:  # what the next state would take of each input is found by giving it the inputs' numbers
            numbers = torch.arange(taps - 1 + columns, dtype=torch.float64, device=device).expand(batch, -1).unsqueeze(2)
            recent, inputs = numbers.split([taps - 1, columns], 1)
            if self.rank:
                recent = short_convolution(inputs + 1, inputs.new_zeros(taps, 1), self.layout_before, recent + 1)[1] - 1
            self.fetch_recent = route(recent[..., 0].long(), taps - 1, tokens, self.group)

    def check_agreement(self, batch: int, tokens: int, device: torch.device, masks: dict[str, Tensor | None]) -> None:
        """ValueError on every rank unless all call the same model on shards of the same shape."""
        from .. import __version__

        autocast = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
        facts = {"batch": batch, "tokens": tokens, "sha256 of whole rows": self.rows, "autocast": str(autocast)}
        facts |= {"columns before": self.past.get_seq_length()} | {name: mask is not None for name, mask in masks.items()}
        facts |= {"hf_infini": __version__, "torch": torch.__version__, "transformers": transformers.__version__}
        facts |= {name: value for name, value in self._config.to_dict().items() if name not in SAVED}
        every = [facts] * self.size
        distributed.all_gather_object(every, facts, self.group)
        found = {name: [of_rank.get(name) for of_rank in every] for of_rank in every for name in of_rank}
        different = {name: values for name, values in found.items() if any(value != values[0] for value in values)}
        if different:
            raise ValueError(f"the ranks that share a row differ, listed by rank: {different}. Start all with the same.")

    def received_inputs(self, inputs: Tensor, recent: Tensor) -> Tensor:
        """What a short convolution needs of the tokens before these `inputs`; `recent`: what the layer's state has."""
        return recent if self.fetch_recent is None else self.fetch_recent(inputs, recent)

    def received(
        self, state: InfiniState, tokens: Projections, layout: GridLayout, rule: MemoryRule, softmax: ScoreOptions
    ) -> tuple[InfiniState, Projections]:
        """The state that these tokens of a layer continue, and the tokens, with the scores that decide which are kept;
        `state`: the one that the layer knows of."""
        self.reached = tokens.key.new_zeros(())
        state = state if self.layout_before is None else state.after(self.layout_before)

        def fetch(window: Tensor, new: Tensor | None) -> Tensor:
            if new is None:  # scores come later
                return window
            return self._exchanged(self.fetch_window, new.transpose(1, 2), window.transpose(1, 2)).transpose(1, 2)

        state = state.map_windows(fetch, tokens._replace(score=None))
        if layout.kept_tokens:
            tokens, state = self._scored(tokens, state, layout, rule, softmax)
        new_and_old = zip(tokens[1:4], state.windows()[:3], strict=True)
        grids = (None if new is None else layout.delay(layout.to_grid(new, old)) for new, old in new_and_old)
        leaving: Any = [None if grid is None else grid.transpose(2, 3) for grid in grids]
        taken_in = layout.written[:, :, None]
        if layout.kept_tokens:
            keeping = KeptInGrid(tokens, layout, rule, state)
            before = keeping.kept
            keeping.choose_all(leaving)
            keeping.kept = self._kept(before, keeping.kept, rule)
            state = keeping.kept.into(state, layout)
            *leaving, _, number = keeping.choose_all(leaving)
            taken_in = number[..., 0] >= 0
        with torch.autocast(tokens.key.device.type, enabled=False):
            memory, normaliser = self._memory(state, (*leaving, taken_in), layout, rule)
            return replace(state, memory=memory + self.reached, normaliser=normaliser), tokens

    def _exchanged(self, exchange: Callable[..., Tensor], own: Tensor, *others: Any) -> Tensor:
        """What an exchange gives for this rank's own part. A gradient is a collective, too, to which every rank must come,
        in the same order, also where nothing depends on what it has received. So each exchange depends on the one before,
        and the layer's memory on the last: by a sum of no numbers, which is 0."""
        if not own.requires_grad:
            return exchange(own, *others)
        found = exchange(own + self.reached, *others)
        self.reached = found.flatten()[:0].sum()
        return found

    @torch.no_grad()
    def _scored(
        self, tokens: Projections, state: InfiniState, layout: GridLayout, rule: MemoryRule, softmax: ScoreOptions
    ) -> tuple[Projections, InfiniState]:
        """The tokens, and the state's window, with what they have received from the queries of all ranks up to this one."""
        tokens = tokens._replace(score=first_scores(rule.keep_score, tokens.key, tokens.score))
        known: Any = (state.local_score, state.kept_position)
        if self.rank:  # it has none of the past
            score, position = torch.zeros_like(known[0]), torch.full_like(known[1], -1)
            state = replace(state, local_score=score, kept_position=position)
        keeping = KeptInGrid(tokens, layout, rule, state)
        if keeping.sees:
            see_all(keeping, tokens, state, layout, softmax)
        tokens, state = keeping.scored(tokens, state)
        found: Any = (tokens.score, state.local_score)
        new, score = found
        if self.rank:
            before = torch.empty_like(score, memory_format=torch.contiguous_format)
            distributed.recv(before, group=self.group, group_src=self.rank - 1)
            score = score + before
        if self.rank + 1 < self.size:
            distributed.send(layout.next_window(new, score).contiguous(), group=self.group, group_dst=self.rank + 1)
        return tokens, replace(state, local_score=score)

    def _kept(self, before: Kept, own: Kept, rule: MemoryRule) -> Kept:
        """What the ranks before this one keep: the best of all are among the best of each, which all ranks gather; `before`:
        what the first rank keeps before its tokens; `own`: what this rank keeps of its own."""
        found = own.map(lambda part: self._exchanged(gather, part, self.group).movedim(0, 2))  # [B, K, R, places, …]
        # A document goes on from rank to rank until another begins
        document = F.pad((~self.goes_on).T.cumsum(1), (1, 0))
        rows = before.map(lambda old, new: torch.cat([old, new.flatten(2, 3)], 2), found)
        there, written = before.position[:, 0, :, 0] >= 0, found.position[:, 0, :, :, 0] >= 0
        best, _ = choose(rows.score, there, written, shares(rule.keep_score, there.shape[1]), (document[:, 1:], document))
        return rows.taken(best[:, self.rank : self.rank + 1]).map(lambda part: part.squeeze(1))

    def _memory(
        self, state: InfiniState, leaving: Sequence[Any], layout: GridLayout, rule: MemoryRule
    ) -> tuple[Tensor, Tensor]:
        """M and z that the ranks before this one leave, `[B, K, D, E]` and `[B, K, D]`; `leaving`: keys, values, log
        weights of what leaves the window here, `[B, N, K, C, …]`, and which of it the memory takes in, `[B or 1, N, K or 1,
        C]` bool."""
        memory, normaliser, start = state.memory, state.normaliser, state.start()
        *parts, mask = leaving
        wide: Any = (None if part is None else part.to(memory.dtype) for part in parts)
        key, value, log_weight = wide
        written = rule.written(key, value, log_weight, mask.unsqueeze(-1))
        features, _, log_rates = written
        continues = layout.continues(0, layout.segments)
        if rule.normalised:
            own = running_sum(features.sum(-2), torch.zeros_like(normaliser), continues, start[1])[1]
            normaliser = self._chained(normaliser, own)
        if rule.additive:
            own = rule.states(written, torch.zeros_like(memory), normaliser, start, continues)[1][0]
            return self._chained(memory, own), normaliser
        width, height = value.shape[-1], key.shape[-1]
        eye = torch.eye(height, dtype=memory.dtype, device=memory.device).expand(*memory.shape[:2], -1, -1)
        written = features, F.pad(value, (0, height)), log_rates
        start = F.pad(start[0], (0, height)), start[1]
        _, (own, _) = rule.states(written, F.pad(eye, (width, 0)), normaliser, start, continues)
        for part in self._exchanged(gather, own, self.group)[: self.rank]:
            memory = part[..., width:] @ memory + part[..., :width]
        return memory, normaliser

    def _chained(self, first: Tensor, own: Tensor) -> Tensor:
        """x_r of x_{j+1} = goes_on_j x_j + own_j, from `first` on, `[B, …]`."""
        x = first
        parts = self._exchanged(gather, own, self.group)[: self.rank]
        for part, goes_on in zip(parts, self.goes_on, strict=False):
            x = x * goes_on.view(-1, *(1,) * (x.dim() - 1)) + part
        return x


def route(wanted: Tensor, old_places: int, tokens: int, group) -> Callable[[Tensor, Tensor], Tensor]:
    """A function that fetches what a rank wants from the ranks that have it: of what each has of its shard, `[B, T, …]`, and
    of before the call, `[B, old places, …]`, it makes `[B, places, …]`; zero where nothing is wanted.

    Args:
        wanted: `[B, places]`, what this rank wants in each place: of its old places, so many, and then the columns of the
            whole row, the number; −1 for nothing.
        tokens: T.
    """
    rank, (batch, places) = distributed.get_rank(group), wanted.shape
    columns = gather(torch.where(wanted < old_places, -1, wanted - old_places), group)
    owner = columns.div(tokens, rounding_mode="floor")  # −1 for none
    reader, row, column = (owner == rank).nonzero(as_tuple=True)
    sent = row * tokens + columns[reader, row, column] - rank * tokens  # of the B · T tokens, by who wants them
    own = owner[rank].flatten()
    received = own.argsort(stable=True)[int((own < 0).sum()) :]  # the places, by who has their tokens
    counts = [ranks.bincount(minlength=len(owner)).tolist() for ranks in (reader, own[received])]
    # Where to find what is wanted: among the old places, then what is received, and then there is a zero
    begin = batch * places
    index = torch.arange(batch, device=wanted.device).unsqueeze(1) * places + wanted
    index = torch.where(wanted < 0, begin + len(received), index).flatten()
    index[received] = begin + torch.arange(len(received), device=index.device)

    def fetch(new: Tensor, old: Tensor) -> Tensor:
        arrived = AllToAll.apply(new.flatten(0, 1)[sent], *counts, group)
        rows = torch.cat([old.flatten(0, 1), arrived, arrived.new_zeros(1, *arrived.shape[1:])])
        return rows.index_select(0, index).unflatten(0, wanted.shape)

    return fetch


class AllToAll(Function):
    """The rows `[received, …]` that all ranks have sent to this one, of whose `[sent, …]` each gets so many; their gradients
    go back."""

    @staticmethod
    def forward(ctx, rows: Tensor, sent_counts: list[int], received_counts: list[int], group) -> Tensor:
        ctx.back = (received_counts, sent_counts, group)
        received = rows.new_empty(sum(received_counts), *rows.shape[1:])
        distributed.all_to_all_single(received, rows.contiguous(), received_counts, sent_counts, group)
        return received

    @staticmethod
    def backward(ctx, gradient: Tensor):
        return AllToAll.apply(gradient, *ctx.back), None, None, None


def gather(own: Tensor, group) -> Tensor:
    """`own` of every rank, `[R, …]`."""
    ones = [1] * distributed.get_world_size(group)
    return AllToAll.apply(own.expand(len(ones), *own.shape), ones, ones, group)


def see_all(
    keeping: KeptInGrid, tokens: Projections, state: InfiniState, layout: GridLayout, softmax: ScoreOptions
) -> None:
    """Adds what the tokens receive from all queries of a call, which attention does on its way."""
    queries, keys = layout.to_grid(tokens.query, None).transpose(2, 3), layout.windows(tokens.key, state.local_key)
    weights = queries[:, :1, ..., 0].numel() * layout.places
    size = max(1, GROUP_ELEMENTS.get(keys.device.type, GROUP_ELEMENTS["cuda"]) // weights)
    for begin in range(0, layout.segments, size):
        end = min(begin + size, layout.segments)
        query, key = queries[:, begin:end], keys[:, begin:end]
        kept = layout.left[:, begin:end].clamp(max=layout.kept_tokens)
        compared = with_sinks_before(softmax.compared_keys(key, layout.key_places()), key, layout, kept, softmax)
        query = softmax.compared_queries(query, layout.query_places)
        keeping.see(query, compared, layout.window_mask(begin, end), begin, end, softmax)
