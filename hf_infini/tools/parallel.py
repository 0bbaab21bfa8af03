"""One text over several devices: exact context parallelism in training, for a window and a memory.
The row of a text is cut into shards, and rank r of R computes only the tokens of its own.

In each layer a rank takes the state from the rank before it, computes its tokens as any call with a
cache does, and passes the state after them on: a relay, as that of LASP (arXiv 2404.02882). The
state is of constant size, however long the text. The backward pass goes the other way, with the
gradients of the states. All ranks compute at the same time but at both ends.
"""

import hashlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor, distributed
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache

from ..cache.cache import InfiniCache
from ..compat.cache_name import CACHE
from ..models.base import memory_mask_of
from ..ops.layout.grid import segment_layout
from ..ops.state import OF_LAYER, InfiniState, Tokens, bool_mask
from ..options import Window, check_number, first_layers

# What loading or saving writes into a configuration, perhaps on one rank only
SAVED = ("_name_or_path", "architectures", "auto_map", "dtype", "transformers_version")


def shard_rows(
    batch: Mapping[str, Tensor],
    config: PreTrainedConfig,
    group: distributed.ProcessGroup | None = None,
) -> dict[str, Any]:
    """This rank's share of whole rows, as arguments of the model: `model(**shard_rows(batch,
    model.config, group)).loss`.

    Every rank of the group passes the same rows. The loss is the rank's own: with
    `num_items_in_batch`, the count of labels that are not −100 in the whole rows without their
    first column, the losses of all ranks add up to that of one process, as do the gradients.
    Without it, a rank divides by the count of its own labels.

    Args:
        batch: `input_ids`, or `inputs_embeds` `[B, tokens, width]`, and, as the model takes them,
            `attention_mask`, `position_ids`, `memory_mask` and `labels` (−100: not predicted), `[B,
            tokens]` each.
        config: of the model, every layer of which has a memory.
        group: the ranks that share the rows, in the order of their shards; `None`: all.

    Returns:
        The shards of what is in the batch, about `[B, tokens / R, …]`; `shift_labels`, for a label
        may be on the next rank; `cache` (before transformers 5.24 `past_key_values`), the
        [`ShardCache`] of this one call; and `use_cache` False.

    Raises:
        ValueError: on every rank: the rows have fewer than 2 tokens for each, or some layers of the
            model have no memory.
    """
    shapes = {name: list(part.shape) for name, part in batch.items()}
    text: Any = batch.get("input_ids", batch.get("inputs_embeds"))
    if text is None or any(shape[:2] != list(text.shape[:2]) for shape in shapes.values()):
        raise ValueError(
            "the batch must have input_ids or inputs_embeds, and all parts [rows, "
            f"tokens, …]; got {shapes}."
        )
    cache, parts = ShardCache(config, batch, group), dict(batch)
    if "labels" in batch:
        parts["shift_labels"] = F.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    shards = {name: part[:, cache.first : cache.end].contiguous() for name, part in parts.items()}
    return shards | {CACHE: cache, "use_cache": False}


def check_shards(config: PreTrainedConfig, tokens: int | None = None, size: int = 1) -> None:
    """ValueError unless all layers of a model with this `config` have a memory and rows of so
    many tokens (`None`: any) can be cut into `size` shards."""
    for name, count in (("tokens", tokens), ("size", size)):
        check_number(name, count, {"at_least": 1})
    kept = sorted({*range(config.num_hidden_layers)} - {*getattr(config, "infini_layers", ())})
    if kept:
        raise ValueError(
            f"layers {kept} of this model have no memory: their attention would need the keys and "
            "values of all ranks, which are not exchanged here. Give every layer a memory, or do "
            "not cut the rows."
        )
    if tokens is not None and tokens < 2 * size:
        raise ValueError(
            f"rows of {tokens} tokens are too short for {size} shards of 2 at least: "
            "use fewer ranks."
        )


class ShardCache(InfiniCache):
    """What the ranks before this one leave: the cache of one call of a model on one shard, made by
    [`shard_rows`], whose errors it has. In a call, ValueError on every rank where they differ in
    model, versions or rows, or a shard does not fit. `config`, `batch`, `group`: as of
    [`shard_rows`]."""

    def __init__(self, config: PreTrainedConfig, batch: Mapping[str, Tensor], group):
        self.group, self.rank, self.size = (
            group,
            distributed.get_rank(group),
            distributed.get_world_size(group),
        )
        ids = batch.get("input_ids")
        text: Any = batch.get("inputs_embeds") if ids is None else ids
        rows, self.columns = text.shape[:2]
        check_shards(config, self.columns, self.size)
        super().__init__(config)
        self.first, self.end = (
            self.columns * rank // self.size for rank in (self.rank, self.rank + 1)
        )
        # By window, from the call on: the layout of all columns before this shard, and the state
        # that the call's continues
        self.layouts_before: dict[Window, Any] = {}
        self.before: dict[Window, InfiniState] = {}
        self.shape = (rows, self.end - self.first)
        for layer in self.layers:
            layer.columns = self.first
        self.masks = {
            name: bool_mask(name, batch.get(name), True)
            for name in ("attention_mask", "memory_mask")
        }
        self.masks["memory_mask"] = memory_mask_of(config, ids, self.masks["memory_mask"])
        self.masks["position_ids"] = batch.get("position_ids")
        numbers = text.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        self.rows = hashlib.sha256(numbers).hexdigest()
        # By what is passed on: of which the gradient is exchanged, if it requires one; what has
        # come; and what has gone
        self.anchors: dict[Hashable, Tensor] = {}
        self.arrived: dict[Hashable, list[Tensor]] = {}
        self.sent: set[Hashable] = set()

    @property
    def state(self) -> InfiniState | None:
        return self.state_before(next(iter(self.windows)))

    def state_before(self, layer: int) -> InfiniState | None:
        return self.before.get(self.windows[layer])

    def exchange(self) -> "ShardCache":
        return self

    def advance(self, of_call: Cache, input_ids: Tensor | None, tokens: int) -> None:
        """Nothing goes on from it: `of_call`, `input_ids` and `tokens` are left."""

    def begin(
        self, batch: int, tokens: int, device: torch.device, masks: dict[str, Tensor | None]
    ) -> None:
        """Finds the state that the layout of a call of `[batch, tokens]` on a `device` continues;
        `masks`: as of [`segment_layout`], by name."""
        if self.anchors:
            raise ValueError("a ShardCache is for one call: make one for each, as shard_rows does.")
        if torch.compiler.is_compiling():
            raise ValueError(
                "the ranks' exchange cannot be compiled: call the model without torch.compile."
            )
        self.check_agreement(batch, device, masks)
        if (batch, tokens) != self.shape:
            raise ValueError(
                f"a shard must be [rows, tokens] = {list(self.shape)}, as shard_rows has made it."
            )
        if self.rank:
            columns, nothing = self.first, torch.zeros(batch, 1, 0, 1, device=device)
            cut: dict[str, Any] = {
                name: None if mask is None else mask[:, :columns]
                for name, mask in self.masks.items()
            }
            for window in first_layers(self.windows):
                layout: Any = segment_layout(batch, columns, window, **cut, device=device)
                self.layouts_before[window], before = (
                    layout,
                    InfiniState.initial(nothing, nothing, *window).after(layout),
                )
                # To the next layout, all that has left the window is in the memory
                self.before[window] = before.having(
                    memory_tokens=layout.left[:, -1], kept_position=None
                )

    def check_agreement(
        self, batch: int, device: torch.device, masks: dict[str, Tensor | None]
    ) -> None:
        """ValueError on every rank unless all call the same model on shards of the same rows.
        `batch`, `device`, `masks`: as of [`ShardCache.begin`]."""
        from .. import __version__

        autocast = (
            torch.get_autocast_dtype(device.type)
            if torch.is_autocast_enabled(device.type)
            else None
        )
        facts = {"batch": batch, "sha256 of whole rows": self.rows, "autocast": str(autocast)}
        facts |= {name: mask is not None for name, mask in masks.items()}
        facts |= {
            "hf_infini": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        }
        facts |= {
            name: value for name, value in self._config.to_dict().items() if name not in SAVED
        }
        every = [facts] * self.size
        distributed.all_gather_object(every, facts, self.group)
        found = {
            name: [of_rank.get(name) for of_rank in every] for of_rank in every for name in of_rank
        }
        different = {
            name: values
            for name, values in found.items()
            if any(value != values[0] for value in values)
        }
        if different:
            raise ValueError(
                f"the ranks that share a row differ, listed by rank: {different}. "
                "Start all with the same."
            )

    def received_state(self, layer: int, state: InfiniState, tokens: Tokens) -> InfiniState:
        """The state that these tokens of a layer continue; `state`: the one that it knows of."""

        def as_after(window: Tensor, new: Tensor | None) -> Tensor:  # a call of such tokens
            return (
                window if new is None else window.to(torch.promote_types(window.dtype, new.dtype))
            )

        state = state.map_windows(as_after, tokens._replace(score=None))
        state = state.after(self.layouts_before[self.windows[layer]]) if self.rank else state
        own = state.tensors(OF_LAYER)
        parts = self.received((layer, "state"), [*own.values()], *tokens)
        return state.having(**dict(zip(own, parts, strict=True)))

    def passed_on_state(self, layer: int, output: Tensor, state: InfiniState) -> Tensor:
        """The `output` of a layer's attention, after which its state is this."""
        return self.passed_on((layer, "state"), output, [*state.tensors(OF_LAYER).values()])

    def received(
        self, name: Hashable, parts: Sequence[Tensor], *sources: Tensor | None
    ) -> Sequence[Tensor]:
        """What the rank before has passed on by this name, in the place of such `parts`; the same
        again where a layer runs again. Gradients go back to it if one of the `sources`, the same on
        all ranks, has one."""
        needed = torch.is_grad_enabled() and any(
            source is not None and source.requires_grad for source in sources
        )
        self.anchors[name] = torch.zeros((), device=parts[0].device, requires_grad=needed)
        if not self.rank:
            return parts
        if name not in self.arrived:
            self.arrived[name] = [
                torch.empty_like(part, memory_format=torch.contiguous_format) for part in parts
            ]
            transfer(distributed.irecv, self.arrived[name], self.rank - 1, self.group)
        parts = self.arrived[name]
        return Received.apply(self, self.anchors[name], *parts) if needed else parts

    def passed_on(self, name: Hashable, output: Tensor, parts: Sequence[Tensor]) -> Tensor:
        """The `output`, once these `parts` are with the rank after this one, by this `name`. Its
        backward pass gets their gradients first, so that all ranks come to each exchange in the
        same order."""
        if self.rank + 1 == self.size:
            return output
        if name not in self.sent:
            self.sent.add(name)
            transfer(distributed.isend, parts, self.rank + 1, self.group)
        anchor = self.anchors[name]
        return PassedOn.apply(self, anchor, output, *parts) if anchor.requires_grad else output


class Received(Function):
    """The `parts` that have arrived from the rank before, to which their `gradients` go back.
    `cache`: of this rank; `anchor`: a number that requires a gradient, so that there is a backward
    pass."""

    @staticmethod
    def forward(ctx, cache: ShardCache, anchor: Tensor, *parts: Tensor):
        ctx.cache = cache
        return tuple(part.view_as(part) for part in parts)

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients: Tensor):
        floats = [gradient for gradient in gradients if gradient.is_floating_point()]
        transfer(distributed.isend, floats, ctx.cache.rank - 1, ctx.cache.group)
        return None, None, *(None for _ in gradients)


class PassedOn(Function):
    """The `output`, with its `gradient`, beside these `parts`, whose gradients come from the rank
    after this one. `cache`, `anchor`: as of [`Received`]."""

    @staticmethod
    def forward(ctx, cache: ShardCache, anchor: Tensor, output: Tensor, *parts: Tensor):
        ctx.cache, ctx.parts = cache, [part.detach() for part in parts]
        return output.view_as(output)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor):
        found = [
            torch.empty_like(part, memory_format=torch.contiguous_format) for part in ctx.parts
        ]
        floats = [part for part in found if part.is_floating_point()]
        transfer(distributed.irecv, floats, ctx.cache.rank + 1, ctx.cache.group)
        return None, None, gradient, *(part if part.is_floating_point() else None for part in found)


def transfer(operation: Callable, parts: Sequence[Tensor], rank: int, group) -> None:
    """Sends these tensors, `parts`, to a `rank` of the `group` (`None`: of all), or receives them
    from it; `operation`: `distributed.isend` or `irecv`."""
    parts = [part.contiguous() for part in parts if part.numel()]
    operations = [
        distributed.P2POp(operation, part, group=group, group_peer=rank) for part in parts
    ]
    for work in distributed.batch_isend_irecv(operations) if operations else ():
        work.wait()
