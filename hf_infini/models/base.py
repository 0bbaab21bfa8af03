"""Infini-attention in a decoder of transformers: mixins that come before its own base model and
heads.

The layers are swapped in place ([`InfiniAttentionMixin`]); the base model makes what they share
once for a call, [`SharedInputs`], and passes it down as a keyword.
"""

import functools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from ..cache.cache import InfiniCache
from ..compat.cache_name import CACHE, OTHER_NAME, with_one_name
from ..compat.execution_device import device_of
from ..compat.hub_code import HubCodeMixin, ModelBase
from ..compat.peft_saving import warn_of_unsaved, weights_are_saved, with_saving
from ..compat.swap_class import swap_class
from ..layers.memory_layer import (
    TEST_TOKENS,
    InfiniAttentionMixin,
    SharedInputs,
    memory_layers,
    pass_on,
)
from ..ops.keeping import SCORES
from ..ops.layout.grid import segment_layout
from ..ops.state import Layout, check_shapes
from ..options import first_layers, layer_kinds
from .masks import kept_layers_masks
from .structure import decoder_layers, decoder_of

# Base models whose learned score was looked at, and warned of if need be
score_is_known: WeakSet[torch.nn.Module] = WeakSet()


HELD = "_is_held"  # the attribute of a cache while a call with it can be undone


def cache_as_it_was(forward: Callable) -> Callable:
    """Decorator of a model's `forward`, after whose errors, also Ctrl-C, the cache among its
    arguments is as it was, and the call can be repeated. Not in a graph of torch.compile, which
    sets attributes at its end."""

    @functools.wraps(forward)
    def whole(self, *args, **kwargs):
        given = () if torch.compiler.is_compiling() else (*args, *kwargs.values())
        cache = next((each for each in given if isinstance(each, InfiniCache)), None)
        if cache is None or HELD in vars(cache):  # of the base model inside a head
            return forward(self, *args, **kwargs)
        # by references: what a step writes in place is written again when it is repeated
        held = [(vars(part), vars(part).copy()) for part in (cache, *cache.layers)]
        try:
            vars(cache)[HELD] = True
            output = forward(self, *args, **kwargs)
            del vars(cache)[HELD]
            return output
        except BaseException:
            for now, before in held:
                now.clear()
                now.update(before)
            raise

    return whole


class SavedModelMixin(HubCodeMixin, ModelBase):
    """Has a model saved with its code, and all its modules initialised; comes before
    `PreTrainedModel`."""

    def save_pretrained(
        self, save_directory, is_main_process: bool = True, *args, save_code: bool = False, **kwargs
    ):
        """As usual.

        Args:
            save_directory: a folder, which is made if need be.
            is_main_process: whether this process writes; the others of a training do not.
            save_code: whether the model's code is written beside it, so that it loads
                where hf_infini is not installed. What is pushed has its code, and so has
                what was loaded by its code.
        """
        warn_of_unfitted_score(decoder_of(self))
        if save_code and is_main_process:
            self.config.save_pretrained(save_directory, save_code=True)  # then the folder has it
        super().save_pretrained(save_directory, is_main_process, *args, **kwargs)
        if is_main_process:
            weights_are_saved(self, save_directory)

    def _upload_modified_files(self, working_dir, *args, **kwargs):
        weights_are_saved(self, working_dir)  # with push_to_hub=True before the end of saving
        return super()._upload_modified_files(working_dir, *args, **kwargs)

    @classmethod
    def from_pretrained(cls, *args, **kwargs):
        loaded = super().from_pretrained(*args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded  # with output_loading_info
        if "_from_other_type" not in model.config.__dict__:  # else as patched: it is fitted next
            warn_of_unfitted_score(decoder_of(model))
        return loaded

    def _initialize_weights(self, module, is_custom_code: bool = False):
        """As for transformers' own classes: else `_init_weights` passes over modules without
        parameters (GPT-2's MLP)."""
        super()._initialize_weights(module, False)


class InfiniPreTrainedMixin(SavedModelMixin):
    """What base models and heads share; comes before the own class of either. `config`: one with
    [`MemoryOptions`]."""

    own_class: type[Any]  # the class that comes after this one
    class_with_memory: Callable[[type], type]  # of an own class, as families.py makes it

    _supports_flash_attn = False
    _supports_flex_attn = False
    _supports_attention_backend = False
    _can_compile_fullgraph = False
    _is_stateful = True  # a memory cannot be cropped, so assisted decoding is refused

    def __init__(self, config, *args, **kwargs):
        if not hasattr(config, "infini_layers"):
            raise ValueError(
                f"a {type(self).__name__} needs segments: give segment_length=…, in "
                "tokens, such as 256."
            )
        super().__init__(config, *args, **kwargs)
        self.add_memory()

    def add_memory(self) -> None:
        """Gives the layers that the configuration names their memory, in place, if they do not have
        it."""
        base: Any = decoder_of(self)  # is made an InfiniModelMixin
        if not isinstance(base, InfiniModelMixin):
            swap_class(base, self.class_with_memory(type(base)))
        base.set_positions()
        layers = decoder_layers(base)
        for number in base.config.infini_layers:
            layer, attention = layers[number]
            if not isinstance(attention, InfiniAttentionMixin):
                swap_class(attention, self.class_with_memory(type(attention)))
                attention.swap_in(base.config, base.rotary_tables(1), base.dtype)
                if base.layers_drop_keywords:
                    attention.hook = layer.register_forward_pre_hook(pass_on, with_kwargs=True)

    def __setattr__(self, name: str, value) -> None:
        """As usual; by `peft_config`, which PEFT sets, an adapter is put on a model of this name,
        perhaps the plain one."""
        super().__setattr__(name, value)
        if name == "peft_config" and hasattr(self, "_base_is_plain"):
            for adapter, config in value.items():
                value[adapter] = with_saving(config, warn_of_unsaved)

    @classmethod
    def from_pretrained(cls, *args, **kwargs):
        """As usual. The checkpoint may also be that of the own class, with the options of the
        memory by name; ValueError where a layer then computes something else with its memory
        empty."""
        loaded = super().from_pretrained(*args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded  # with output_loading_info
        if model.config.__dict__.pop("_from_other_type", False):
            model._base_is_plain = True
            model.check_layers()
        return loaded

    def check_layers(self) -> None:
        """[`InfiniAttentionMixin.check_swapped`] for every layer with a memory; not on a meta
        device."""
        base: Any = decoder_of(self)
        if device_of(base.get_input_embeddings()).type == "meta":
            return
        tables = base.rotary_tables(TEST_TOKENS + 1, torch.promote_types(base.dtype, torch.float32))
        for module in base.modules():
            if isinstance(module, InfiniAttentionMixin):
                module.check_swapped(tables)

    @torch.no_grad()
    def _init_weights(self, module):
        super()._init_weights(module)
        if isinstance(module, InfiniAttentionMixin):
            module.init_memory_parameters()


class InfiniModelMixin(ModelBase):
    """A base model whose layers have a memory; comes before its own class, after
    [`InfiniPreTrainedMixin`]."""

    argument_names: Sequence[str]  # of the own forward, in order
    takes_masks_by_type: bool  # whether that takes a mask for each type of layer, by name
    # whether its position embeddings are made for a type of layer, by name
    turns_by_layer_type: bool
    layers_drop_keywords: bool  # whether its layers pass no keywords on to their attention

    def forward(self, *args, memory_mask: Tensor | None = None, **kwargs):
        """As the own forward, with the same shapes; ValueError for a cache or mask of another kind.
        What differs:

        Args:
            cache: an [`InfiniCache`] (`past_key_values` is its old name); made if `use_cache` is
                set and none is given. Gradients go through it from call to call, also with gradient
                checkpointing (`use_reentrant=False`), which layers with their own attention do
                without a cache.
            use_cache: `None`: as the configuration says, but not in training.
            attention_mask: `[batch, tokens]` or `[batch, past + tokens]`, 1 = real; padding is in
                no segment and no memory.
            position_ids: `[batch, tokens]`; where they go back, a new document begins with an empty
                memory. `None`: counted.
            memory_mask: `[batch, tokens]` of this call, 0 = the token is seen inside the window but
                not written into the memory. With `mask_special_tokens`, special ones among
                input_ids are left out as well.
        """
        given = dict(zip(self.argument_names, args, strict=False)) | kwargs
        given = with_one_name(given, CACHE) if OTHER_NAME in given else given
        ids, positions, use_cache = (
            given.get("input_ids"),
            given.get("position_ids"),
            given.get("use_cache"),
        )
        tokens = tokens_of(ids, given.get("inputs_embeds"))
        masks = {
            "attention_mask": given.get("attention_mask"),
            "position_ids": positions,
            "memory_mask": memory_mask,
        }
        places = self.config.places
        tables = self.rotary_tables(places, device=tokens.device)
        call = given.get(CACHE), use_cache, given.get("output_attentions")
        infini, cache, use_cache = begin_call(self, ids, tokens, tables, *call, **masks)
        infini = infini._replace(far_rotary=self.far_tables(places, tokens.device))
        layout = infini.layouts[self.config.window]
        given["position_ids"] = self.own_positions(layout, positions, cache)
        mask = self._masks(layout, cache)
        given |= {"attention_mask": mask, CACHE: cache, "use_cache": use_cache, "infini": infini}
        output = super().forward(**given)
        if cache is not None and infini.cache is not None:
            cache.advance(infini.cache, ids, tokens.shape[1])
            # the own forward drops it in training with checkpoints
            if use_cache and not isinstance(output, tuple):
                setattr(output, CACHE, cache)
        return output

    def set_positions(self) -> None:
        """Changes what the own model has of positions, where the configuration says so."""

    def own_positions(
        self, layout: Layout, position_ids: Tensor | None, cache: InfiniCache | None
    ) -> Tensor:
        """The positions that the own forward is given, for layers without a memory see them:
        `position_ids` `[batch, tokens]`, or, if they are `None`, those of the `layout` that
        go on from the `cache`."""
        return counted_positions(layout, cache) if position_ids is None else position_ids

    def rotary_tables(
        self, places: int, dtype: torch.dtype | None = None, device: torch.device | None = None
    ) -> dict[str | None, tuple[Tensor, ...]]:
        """The position embeddings of so many places, `[places, width]` each (one, if they are
        complex numbers), by the type of layer where that matters; empty without rotary positions.
        `dtype`, `device`: `None` for the model's."""
        found = {}
        for kind in self._kinds_of_positions():
            limit = scaled_beyond(self.rotary_emb, kind)
            # Only distances count: positions that end before a text is long enough to scale them
            first = 0 if limit is None else min(0, limit - 1 - places)
            found[kind] = self._turned_by(range(first, first + places), kind, dtype, device)
        return found

    def far_tables(
        self, places: int, device: torch.device
    ) -> dict[str | None, tuple[tuple[Tensor, ...], int]]:
        """Of positions that are scaled by the length of a text: the tables of so many places in
        texts of more tokens than the returned number, by the type of layer. Empty where so many
        places have no such positions: then those of short texts serve all. `device`: of the
        tables."""
        limits = {kind: scaled_beyond(self.rotary_emb, kind) for kind in self._kinds_of_positions()}
        return {
            kind: (self._turned_by(range(places), kind, None, device), limit)
            for kind, limit in limits.items()
            if limit is not None and places > limit
        }

    def _kinds_of_positions(self) -> list[str | None]:
        """The types of layers with rotary positions of their own; `[None]`: all are alike."""
        if getattr(self, "rotary_emb", None) is None:
            return []
        if not self.turns_by_layer_type:
            return [None]
        return sorted({self.config.layer_types[layer] for layer in self.config.infini_layers})

    def _turned_by(
        self,
        numbers: range,
        kind: str | None,
        dtype: torch.dtype | None,
        device: torch.device | None,
    ) -> tuple[Tensor, ...]:
        """The position embeddings of these positions, as in [`InfiniModelMixin.rotary_tables`]."""
        device = device_of(self.get_input_embeddings()) if device is None else device
        like = torch.empty(1, 1, 1, device=device, dtype=dtype or self.dtype)
        positions = torch.arange(numbers.start, numbers.stop, device=device)[None]
        found = self.rotary_emb(like, positions, *([] if kind is None else [kind]))
        return (found[0],) if isinstance(found, Tensor) else tuple(table[0] for table in found)

    def _masks(self, layout: Layout, cache: InfiniCache | None):
        """The masks of the layers with their own attention, as the own forward takes them
        ready-made. Where no such layer is left it is of one number, so that nobody makes one that
        grows with the text."""
        kinds = layer_kinds(self.config)
        masks: Any = dict.fromkeys(
            kinds, torch.ones(1, 1, 1, 1, dtype=torch.bool, device=layout.positions.device)
        )
        if len(self.config.infini_layers) < len(kinds):
            # GPT-2 would take positions that begin again in each segment for documents
            written_out = getattr(self.config, "position_encoding", None) == "segment"
            masks |= kept_layers_masks(self.config, layout, cache, self.dtype, written_out)
        return masks if self.takes_masks_by_type else next(iter(masks.values()))


def scaled_beyond(rotary: Any, kind: str | None) -> int | None:
    """Tokens of a text up to which a model's rotary positions, of a type of layer, `kind`
    (`None`: of all), are as they are, and beyond which they are scaled by its length
    (longrope, dynamic); `None`: its length does not count. `rotary`: the module that makes
    them."""
    scaling: Any = getattr(rotary, "rope_type", "default")
    scaling = scaling if kind is None else scaling[kind]
    if "dynamic" in scaling:
        return rotary.original_max_seq_len
    if scaling != "longrope":
        return None
    parameters = rotary.config.rope_parameters
    parameters = parameters if kind is None else parameters[kind]
    return parameters["original_max_position_embeddings"]


def with_signature(own: Callable, forward: Callable) -> Callable:
    """A mixin's `forward` that shows the `own` one's signature, by which others choose what they
    pass to a model."""
    return functools.wraps(own)(lambda *args, **kwargs: forward(*args, **kwargs))


def tokens_of(input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
    """`input_ids` `[batch, tokens]` or `inputs_embeds` `[batch, tokens, width]`, the one of the
    two that is given, or a ValueError."""
    given = inputs_embeds if input_ids is None else input_ids
    if given is None or (input_ids is not None and inputs_embeds is not None):
        raise ValueError("give exactly one of input_ids and inputs_embeds.")
    return given


def memory_mask_of(config, input_ids: Tensor | None, memory_mask: Tensor | None) -> Tensor | None:
    """Which tokens `[batch, tokens]` a memory takes in: those of `memory_mask` that are not
    special, as `config` says, by their `input_ids`; `None`: all."""
    ids = set()
    for special in (config.bos_token_id, config.eos_token_id, config.pad_token_id):
        ids |= (
            set()
            if special is None
            else set(special)
            if isinstance(special, (list, tuple))
            else {special}
        )
    if not config.mask_special_tokens or not ids or input_ids is None:
        return memory_mask
    # One comparison for each: a tensor of the ids would wait for the device
    ordinary = torch.stack([input_ids != special for special in sorted(ids)]).all(0)
    return ordinary if memory_mask is None else ordinary * memory_mask


def begin_call(
    model,
    ids,
    inputs: Tensor,
    rotary: dict,
    cache,
    use_cache: bool | None,
    output_attentions: bool | None,
    **masks,
) -> tuple[SharedInputs, InfiniCache | None, bool]:
    """What the layers of a model's call share; the call's cache; and whether it is among the
    outputs. ValueError where `cache` or mask do not go on from what was read. `model`: the base
    model; `ids`: `[batch, tokens]`, or `None` where there are embeddings only; `inputs`: the ids,
    or the embeddings `[batch, tokens, width]`; `rotary`: the tables, as of [`SharedInputs`];
    `use_cache`, `output_attentions`: `None` is as the configuration says, but no cache in training;
    `masks`: as [`segment_layout`] takes them, but the attention mask may also cover the past."""
    batch, tokens = inputs.shape[:2]
    if use_cache is None:
        use_cache = model.config.use_cache and not model.training
    if cache is not None and not isinstance(cache, InfiniCache):  # of this copy of the code
        raise ValueError(
            f"{CACHE} must be an InfiniCache of {InfiniCache.__module__}, and this "
            f"{type(cache).__name__} is of {type(cache).__module__}: leave it out with "
            "use_cache=True, or pass InfiniCache(model.config)."
        )
    if cache is None:
        cache = InfiniCache(model.config) if use_cache else None
    elif not torch.compiler.is_compiling():  # a graph would be one for each number of columns
        cache.check_finished()
    if cache is not None and not torch.compiler.is_compiling():
        cache.check_model(model)
    if (
        cache is not None
        and cache.state is not None
        and batch != (rows := len(cache.state.tokens_seen))
    ):
        raise ValueError(
            f"this call has {batch} rows and the cache {rows}: repeat the cache's rows with "
            "batch_repeat_interleave, or choose among them with batch_select_indices."
        )
    check_shapes(batch, tokens, None, masks["memory_mask"], None)
    masks["memory_mask"] = memory_mask_of(model.config, ids, masks["memory_mask"])
    masks["attention_mask"] = mask_of_call(masks["attention_mask"], batch, tokens, cache)
    exchange = None if cache is None else cache.exchange()
    if exchange is not None:
        exchange.begin(batch, tokens, inputs.device, masks)
    read = masks["attention_mask"], masks["memory_mask"]
    of_call = None if cache is None else cache.for_call(*read)
    masks |= {
        "device": inputs.device,
        "completes_segments": cache is None or cache.completes_segments,
    }
    layouts = {}
    for window, layer in first_layers(model.config.windows).items():
        state = None if cache is None else cache.state_before(layer)
        layouts[window] = segment_layout(batch, tokens, window, **masks, state=state)
    keeps = model.config.kept_tokens and not torch.compiler.is_compiling()
    if keeps and model not in score_is_known:
        past = 0 if cache is None else cache.get_seq_length()
        warn_of_unfitted_score(model, past + tokens)
    weights = model.config.output_attentions if output_attentions is None else output_attentions
    weights = bool(weights) or model.config._attn_implementation == "eager"
    return SharedInputs(layouts, of_call, rotary, weights, exchange), cache, use_cache


def warn_of_unfitted_score(base, tokens: float = math.inf) -> None:
    """Warns, once for a base model, where its learned `keep_score` is as it was made, zero
    everywhere. `tokens`: of a text; where none of them leaves the window, the score decides
    nothing."""
    config = base.config
    if base in score_is_known:
        return
    if not getattr(config, "kept_tokens", 0):
        return
    if tokens <= config.window.places - config.window.kept_tokens:
        return
    score_is_known.add(base)
    weights = [layer.keep_weights for layer in memory_layers(base).values()]
    learned = weights[0] if weights else {}
    unfitted = [
        name
        for name in learned
        if not any(each[name].is_meta or bool(each[name].any()) for each in weights)
    ]
    if unfitted:
        warnings.warn(
            f"keep_score={config.keep_score!r} is learned, and was not fitted yet: zero in all "
            f"layers ({' and '.join(unfitted)}), so that the earliest tokens fill its places, "
            f"whatever they say. Call hf_infini.{call_of_fit(config.keep_score)}, or put a fitted "
            "adapter on the plain model with hf_infini.load_adapter(model, path).",
            stacklevel=3,
        )


def call_of_fit(keep_score: str) -> str:
    """How a learned `keep_score` is fitted, for an error that says so."""
    both = len(SCORES[keep_score].learns) > 1
    return f"fit_keep_score(model, rows{', passages=passages' if both else ''})"


def mask_of_call(
    attention_mask: Tensor | None, batch: int, tokens: int, cache: InfiniCache | None
) -> Tensor | None:
    """The part of `attention_mask`, `[batch, tokens]` or `[batch, past + tokens]`, that covers
    this call's tokens, without the past that `generate` passes as well. `cache`: what has
    read the past. ValueError for another shape, or a past that the cache has not read."""
    if attention_mask is None:
        return None
    past = 0 if cache is None else cache.get_seq_length()
    widths = (tokens, past + tokens)
    if (
        attention_mask.dim() != 2
        or attention_mask.shape[0] != batch
        or attention_mask.shape[1] not in widths
    ):
        raise ValueError(
            f"attention_mask must be [batch, tokens] = [{batch}, {tokens}], or [{batch}, "
            f"{past + tokens}] with the tokens before; got {list(attention_mask.shape)}."
        )
    if cache is not None and past and attention_mask.shape[1] != tokens:
        cache.check_past(attention_mask[:, :past])
    return attention_mask[:, -tokens:]


def counted_positions(layout: Layout, cache: InfiniCache | None) -> Tensor:
    """`[batch or 1, tokens]`: the positions of a call with this `layout` that continue from the
    last one in the `cache`, as those of earlier calls may have gaps."""
    state = None if cache is None else cache.state
    if state is None:
        return layout.positions
    return layout.positions + (state.last_position + 1 - state.tokens_seen).unsqueeze(1)


def check_positions(positions: Tensor, limit: int, remedy: str, counted: bool) -> None:
    """ValueError (RuntimeError in a graph) for positions `[batch, tokens]` beyond an embedding
    of `limit` rows. `remedy`: what the message says helps; `counted`: from 0 on, so that
    nothing is read where there are no more than the limit."""
    if counted and positions.shape[1] <= limit:
        return
    if torch.compiler.is_compiling():
        torch._assert_async(
            (positions < limit).all(),
            f"a position is beyond this model's {limit} learned positions",
        )
    elif (furthest := int(positions.max())) >= limit:
        raise ValueError(
            f"position {furthest} is beyond this model's {limit} learned positions (n_positions). "
            f"For texts of any length {remedy} with another position_encoding; or shorten the "
            "input."
        )
