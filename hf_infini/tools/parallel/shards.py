"""Exact context parallelism: the row of one text is cut at segment borders, and rank r of R computes only the tokens of its
shard.

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
windows, and adds what the ranks before it gave those that it shares with them. Then all gather the K best tokens of each
rank, and each knows what is kept before its shard, and what it evicts.

A layer gathers kv_heads · (d² + d) float32 numbers from each rank, with a delta rule twice as many, and kv_heads · K kept
keys and values, however long the text.
What a collective's backward sums are the gradients of all ranks that have read a rank's part: the gradient is exact.

Which token is where is found once for all layers of a call: masks and positions of all shards are gathered, and each
rank lays out what comes before its shard as one call would.

Shapes: `R` ranks, `B` rows, `T` tokens of a shard, `P` places of a window, `K` key/value heads, `D` head dimension, `E`
value dimension.
"""

import copy
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import transformers
from torch import Tensor, distributed
from torch.nn import functional as F
from transformers import PreTrainedConfig

from ...cache.cache import InfiniCache, PendingStates
from ...compat.cache_name import CACHE
from ...ops.attention import GROUP_ELEMENTS
from ...ops.checks import bool_mask, check_kinds, check_shapes
from ...ops.kept import Kept, KeptInGrid, choose, first_scores, shares, with_sinks_before
from ...ops.layout.base import GridLayout, pad
from ...ops.memory import MemoryRule
from ...ops.state import WINDOWS, InfiniState, Projections
from ...ops.window import ScoreOptions
from ...options import check_number
from .exchange import AllGather, Shard, gather

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
    rank, size = distributed.get_rank(group), distributed.get_world_size(group)
    shapes = {name: list(part.shape) for name, part in batch.items()}
    text: Any = batch.get("input_ids", batch.get("inputs_embeds"))
    if text is None or any(shape[:2] != list(text.shape[:2]) for shape in shapes.values()):
        raise ValueError(f"the batch must have input_ids or inputs_embeds, and all parts [rows, tokens, …]; got {shapes}.")
    check_shards(config, text.shape[1], size)
    real = bool_mask("attention_mask", batch.get("attention_mask"), True)
    parts = dict(batch)
    if "labels" in batch:
        parts["shift_labels"] = F.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    shards = {name: part.chunk(size, 1)[rank].contiguous() for name, part in parts.items()}
    cache = ShardCache(config, group, past)
    cache.rows = hashlib.sha256(text.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()).hexdigest()
    cache.note_text(batch.get("input_ids"), real, text.shape[0], text.shape[1], text.device)
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
        config, group, past: as in [`shard_rows`].

    Raises:
        ValueError: layers of the model have no memory. In a call: the ranks' models, versions, rows or shards do not fit
            together (on every rank).
    """

    @check_kinds
    def __init__(
        self, config: PreTrainedConfig, group: distributed.ProcessGroup | None = None, past: InfiniCache | None = None
    ):
        check_shards(config)
        super().__init__(config)
        self.group, self.past = group, InfiniCache(config) if past is None else past
        self.text = dict(self.past.text)
        self.shard: Any = None  # a [`Shard`] from the call on
        self.rows: str | None = None  # a hash of the whole rows
        self.rank, self.size = distributed.get_rank(group), distributed.get_world_size(group)

    def whole(self) -> InfiniCache:
        """What one process has after the whole rows, on every rank; all of them call this, after a call of the model without
        gradients. To save, to generate from, or as the `past` of more rows.

        Raises:
            ValueError: there was no such call.
        """
        if not self.is_initialized:
            raise ValueError("nothing is known of the whole rows: call the model under torch.no_grad() with it first.")
        cache, last = InfiniCache(self._config), distributed.get_process_group_ranks(self.group)[-1]
        layers: Any = zip(cache.layers, self.layers, strict=True)
        for layer, own in layers:
            state = own.state
            if self.shard.skips and state.local_skipped is None:  # as it may be on some of the ranks only
                state = replace(state, local_skipped=torch.zeros_like(state.local_key[:, 0, :, 0], dtype=torch.bool))
            state = state.map_rows(lambda tensor: tensor.detach().clone(memory_format=torch.contiguous_format))
            for name, tensor in state.tensors().items():
                if not name.startswith("start_"):  # of the model's weights, which all have
                    distributed.broadcast(tensor, last, self.group)
            layer.advance(state, self.past.get_seq_length() + self.size * self.shard.tokens)
        cache.text = dict(self.text)
        return cache

    def pending_states(self) -> "ShardStates":
        return ShardStates(self)

    @property
    def state(self) -> InfiniState | None:
        if self.shard is None:  # shard_rows has compared the whole rows with the past
            return None if self.rank else self.past.state
        return self.shard.state

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns of the rows before this shard."""
        return self.past.get_seq_length() + (0 if self.shard is None else self.rank * self.shard.tokens)

    def advance(self, states: PendingStates, input_ids: Tensor | None, layout, tokens: int) -> None:
        """Keeps for `whole` what the call has left."""
        if not torch.is_grad_enabled():
            self.advance_layers(states, tokens)

    def check_agreement(self, batch: int, tokens: int, device: torch.device, masks: dict[str, Tensor | None]) -> None:
        """ValueError on every rank unless all call the same model on shards of the same shape."""
        from ... import __version__

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


class ShardStates(PendingStates):
    """The states that the layers of one call continue, and their [`PendingStates.exchange`]."""

    def __init__(self, cache: ShardCache):
        super().__init__(cache)
        self.cache, self.exchange = cache, self
        past: Any = cache.past.layers
        self.before = {number: layer.state for number, layer in enumerate(past)}  # a layer makes its start otherwise

    def begin(self, batch: int, tokens: int, device: torch.device, masks: dict[str, Tensor | None]) -> InfiniState | None:
        """The state that the layout of a call of `[batch, tokens]` continues; `masks` as [`segment_layout`] takes them."""
        cache = self.cache
        if cache.shard is not None:
            raise ValueError("a ShardCache is for one call: make one for each, as shard_rows does.")
        if torch.compiler.is_compiling():
            raise ValueError("the ranks' exchange cannot be compiled: call the model without torch.compile.")
        check_shapes(batch, tokens, *(masks[name] for name in ("attention_mask", "memory_mask", "position_ids")))
        cache.check_agreement(batch, tokens, device, masks)
        length = cache.window[0]
        if tokens < 2 or tokens % length:
            raise ValueError(
                f"a shard must be whole segments of {length} tokens, and 2 tokens at least; these are {tokens}. shard_rows "
                "cuts rows so."
            )
        options = (cache.window, cache._config.memory_conv, cache.past.state)
        cache.shard = Shard.of_call(cache.group, batch, tokens, device, masks, *options)
        self.columns = cache.get_seq_length()
        return cache.shard.state

    def received_inputs(self, inputs: Tensor, recent: Tensor) -> Tensor:
        """What a short convolution needs of the tokens before these `inputs`; `recent`: what the layer's state has."""
        recents = self.cache.shard.recent
        return recent if recents is None else recents.before(inputs, recent, self.cache.group)

    def received(
        self, state: InfiniState, tokens: Projections, layout: GridLayout, rule: MemoryRule, softmax: ScoreOptions
    ) -> tuple[InfiniState, Projections]:
        """The state that these tokens of a layer continue, and the tokens, with the scores that decide which are kept;
        `state`: the one that the layer knows of."""
        shard, before, heads = self.cache.shard, self.cache.shard.state, tokens.key.shape[1]
        if before is not None:
            names = ("tokens_seen", "last_position", "memory_tokens", "local_skipped")
            state = replace(state, **{name: getattr(before, name) for name in names})
            if self.cache.rank and state.local_score is not None and state.kept_position is not None:  # those of the past
                score, position = torch.zeros_like(state.local_score), torch.full_like(state.kept_position, -1)
                state = replace(state, local_score=score, kept_position=position)
        # Every rank must come to a collective's gradient, also where nothing depends on what it has received: these sums of
        # no numbers are 0, and have one
        reached = state.memory.flatten()[:0].sum() + state.normaliser.flatten()[:0].sum()
        if shard.window is not None:
            new, old = tokens[1:4], state.windows()[:3]
            rows, window = (joined(part).transpose(1, 2).flatten(2) for part in (new, old))
            received = shard.window.before(rows, window, self.cache.group)
            reached = reached + received.flatten()[:0].sum()
            parts: Any = zip(parted(received.unflatten(2, (heads, -1)).transpose(1, 2), new), new, old, strict=True)
            parts = (None if new is None else w.to(torch.promote_types(new.dtype, old.dtype)) for w, new, old in parts)
            windows: Any = dict(zip(WINDOWS, parts, strict=False))
            state = replace(state, **windows)
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
            keeping.kept, reached = self._kept(before, keeping.kept, rule, reached)
            state = keeping.kept.into(state, layout)
            *leaving, _, number = keeping.choose_all(leaving)
            taken_in = number[..., 0] >= 0
        with torch.autocast(tokens.key.device.type, enabled=False):
            memory, normaliser = self._memory(state, (*leaving, taken_in), layout, rule, reached)
        return replace(state, memory=memory, normaliser=normaliser), tokens

    @torch.no_grad()
    def _scored(
        self, tokens: Projections, state: InfiniState, layout: GridLayout, rule: MemoryRule, softmax: ScoreOptions
    ) -> tuple[Projections, InfiniState]:
        """The tokens, and the state's window, with what they have received from the queries of all ranks up to this one."""
        tokens = tokens._replace(score=first_scores(rule.keep_score, tokens.key, tokens.score))
        keeping, window = KeptInGrid(tokens, layout, rule, state), self.cache.shard.window
        if keeping.sees:
            see_all(keeping, tokens, state, layout, softmax)
        tokens, state = keeping.scored(tokens, state)
        if window is not None:
            scores: Any = (tokens.score, state.local_score)
            state = replace(state, local_score=window.sums(*scores, self.cache.group))
        return tokens, state

    def _kept(self, before: Kept, own: Kept, rule: MemoryRule, reached: Tensor) -> tuple[Kept, Tensor]:
        """What the ranks before this one keep: the best of all are among the best of each, which all ranks gather; `before`:
        what the first rank keeps before its tokens; `own`: what this rank keeps of its own."""
        cache = self.cache
        every = AllGather.apply(joined(own[:3]) + reached, cache.group)
        facts = gather(torch.cat([own.score.double(), own.position.double()], -1), cache.group)
        reached = reached + every.flatten()[:0].sum()
        if cache.rank == 0:
            return before, reached
        key, value, log_weight = parted(every, own[:3])
        found = Kept(key, value, log_weight, facts[..., :-1].to(own.score), facts[..., -1:].long())
        rows = before.map(lambda old, new: torch.cat([old, new.movedim(0, 2).flatten(2, 3)], 2), found)  # of all ranks
        # A document goes on from rank to rank until another begins
        document = F.pad((~cache.shard.goes_on).T.cumsum(1), (1, 0))
        there, written = before.position[:, 0, :, 0] >= 0, (found.position[:, :, 0, :, 0] >= 0).transpose(0, 1)
        places = shares(rule.keep_score, there.shape[1])
        best, _ = choose(rows.score, there, written, places, (document[:, 1:], document))
        return rows.taken(best[:, cache.rank : cache.rank + 1]).map(lambda part: part.squeeze(1)), reached

    def _memory(
        self, state: InfiniState, leaving: Sequence[Any], layout: GridLayout, rule: MemoryRule, reached: Tensor
    ) -> tuple[Tensor, Tensor]:
        """M and z that the ranks before this one leave, `[B, K, D, E]` and `[B, K, D]`; `leaving`: keys, values, log
        weights of what leaves the window here, `[B, N, K, C, …]`, and which of it the memory takes in, `[B or 1, N, K or 1,
        C]` bool."""
        cache, goes_on = self.cache, self.cache.shard.goes_on.to(state.memory.dtype)
        memory, normaliser, (start_memory, start_normaliser) = state.memory, state.normaliser, state.start()
        *parts, mask = leaving
        wide: Any = (None if part is None else part.to(memory.dtype) for part in parts)
        key, value, log_weight = wide
        own_features, _, log_rates = rule.written(key, value, log_weight, mask.unsqueeze(-1))
        continues = layout.continues(0, layout.segments)
        begins = 1 - goes_on[cache.rank, :, None, None]
        features = own_features
        if continues is not None:  # of the row's last document only
            writing, reading = layout.documents(0, layout.segments)
            features = features * (writing == reading[:, -1:])[..., None, None, None]
        sums = features.sum((1, 3)) + begins * start_normaliser if rule.normalised else normaliser
        if rule.additive:
            products = torch.einsum("bnkce,bnkcd->bked", value, features) + begins.unsqueeze(3) * start_memory.mT
            sums = torch.cat([products, sums.unsqueeze(2)], 2)  # what is summed, [B, K, E + 1, D]
            memory = self._chained(torch.cat([memory.mT, normaliser.unsqueeze(2)], 2), sums + reached, goes_on)
            return memory[:, :, :-1].mT, memory[:, :, -1]
        if rule.normalised:
            normaliser = self._chained(normaliser, sums + reached, goes_on)
        width = value.shape[-1]
        eye = torch.eye(key.shape[-1], dtype=memory.dtype, device=memory.device)
        of_start, first = F.pad(start_memory, (0, len(eye))), F.pad(eye, (width, 0)).expand(*memory.shape[:2], -1, -1)
        written = own_features, F.pad(value, (0, len(eye))), log_rates
        _, (maps, _) = rule.states(written, first, normaliser, (of_start, start_normaliser), continues)
        maps = AllGather.apply(maps + reached, cache.group)
        memory = memory + maps[:0].sum()
        for added, kept_of in (part.split([width, len(eye)], -1) for part in maps[: cache.rank]):
            memory = kept_of @ memory + added
        return memory, normaliser

    def _chained(self, first: Tensor, own: Tensor, goes_on: Tensor) -> Tensor:
        """x_r of x_{j+1} = goes_on_j x_j + own_j, from `first` on, `[B, …]`."""
        parts = AllGather.apply(own, self.cache.group)
        x = first + parts[:0].sum()
        for part, keep in zip(parts[: self.cache.rank], goes_on, strict=False):
            x = x * keep.view(-1, *(1,) * (x.dim() - 1)) + part
        return x


def joined(parts: Sequence[Tensor | None]) -> Tensor:
    """Those that there are, along the last dimension."""
    return torch.cat([part for part in parts if part is not None], -1)


def parted(whole: Tensor, like: Sequence[Tensor | None]) -> Any:
    """The parts again, as wide as these; `None` where they are."""
    parts = whole.split([0 if part is None else part.shape[-1] for part in like], -1)
    return (None if old is None else part for part, old in zip(parts, like, strict=True))


def see_all(
    keeping: KeptInGrid, tokens: Projections, state: InfiniState, layout: GridLayout, softmax: ScoreOptions
) -> None:
    """Adds what the tokens receive from all queries of a call, which attention does on its way."""
    local = layout.local_segments
    queries, keys = layout.to_grid(tokens.query, None), layout.to_grid(tokens.key, state.local_key)
    first = layout.sinks(tokens.key, state.local_key).expand(-1, layout.segments, -1, -1, -1)
    keys, weights = pad(keys, (0,) * 6 + (local, 0)), queries[:, :1, :, :, 0].numel() * layout.places
    size = max(1, GROUP_ELEMENTS.get(keys.device.type, GROUP_ELEMENTS["cuda"]) // weights)
    for begin in range(0, layout.segments, size):
        end = min(begin + size, layout.segments)
        windows = [first[:, begin:end], *(keys[:, begin + shift : end + shift] for shift in range(local + 1))]
        query, key = (part.transpose(2, 3) for part in (queries[:, begin:end], torch.cat(windows, 2)))
        kept = layout.left[:, begin:end].clamp(max=layout.kept_tokens)
        compared = with_sinks_before(softmax.compared_keys(key, layout.key_places()), key, layout, kept, softmax)
        query = softmax.compared_queries(query, layout.query_places)
        keeping.see(query, compared, layout.window_mask(begin, end), begin, end, softmax)
