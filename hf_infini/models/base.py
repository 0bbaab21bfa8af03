"""Infini-attention in a decoder of transformers: mixins that come before its own base model and heads.

No model code is copied. The layers are swapped in place ([`InfiniAttentionMixin`]); the base model makes what they share
once for a call, [`SharedInputs`], and passes it down as a keyword.
"""

import functools
import inspect
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.utils import logging

from ..cache.cache import InfiniCache, InfiniLayer, PendingStates, check_rows
from ..compat.cache_name import CACHE, OTHER_NAME, with_one_name
from ..compat.execution_device import device_of
from ..compat.hub_code import ModelBase
from ..compat.swap_class import swap_class
from ..layers.gates import watch_gates
from ..layers.memory_layer import TEST_TOKENS, InfiniAttentionMixin, KeywordlessLayerMixin, LayerConfig, SharedInputs
from ..ops.checks import bool_mask, check_kinds
from ..ops.layout.base import Layout
from ..ops.layout.build import segment_layout
from ..ops.state import InfiniState
from ..options import layer_kinds
from .checkpoints import check_loaded
from .masks import kept_layers_masks
from .peft import AdaptedModelMixin, meet_peft
from .structure import decoder_layers, decoder_of

logger = logging.get_logger(__name__)


class WholeModelMixin(AdaptedModelMixin):
    """Loads whole checkpoints only, and has all modules initialised; comes before `PreTrainedModel`."""

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, output_loading_info=False, **kwargs):
        """As usual.

        Raises:
            ValueError: as [`check_loaded`]; a head may be missing that the checkpoint was not saved with.
        """
        loaded: Any = super().from_pretrained(pretrained_model_name_or_path, *args, output_loading_info=True, **kwargs)
        model, info = loaded
        if not getattr(model, "_hf_peft_config_loaded", False):  # then the information is on the adapter
            saved_as = {str(name).removeprefix("Infini") for name in model.config.architectures or ()}
            new_head = type(model).__name__.removeprefix("Infini") not in saved_as
            check_loaded(pretrained_model_name_or_path, model, info, new_head)
        return (model, info) if output_loading_info else model

    def _initialize_weights(self, module, is_custom_code: bool = False):
        """As usual, but also for classes outside of transformers `_init_weights` is called for every module. There it passes
        over modules whose own parameters are all initialised, and takes one without any (GPT-2's MLP) for such: the scaled
        start of the projections inside would be lost. What was loaded is safe, as `_init_weights` writes only through
        `transformers.initialization`."""
        super()._initialize_weights(module, False)


class InfiniPreTrainedMixin(WholeModelMixin):
    """What base models and heads share; comes before the own class of either."""

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
                f"a {type(self).__name__} needs the options of its memory, and this {type(config).__name__} has none: give "
                "segment_length=… (tokens in a segment), such as 256."
            )
        super().__init__(config, *args, **kwargs)
        self.add_memory()

    def add_memory(self) -> None:
        """Gives the layers that the configuration names their memory, in place, if they do not have it."""
        base: Any = decoder_of(self)  # is made an InfiniModelMixin
        if not isinstance(base, InfiniModelMixin):
            swap_class(base, self.class_with_memory(type(base)))
        meet_peft(base.config.model_type)  # of experts PEFT looks for the type before it asks for `to_dict()`
        base.set_positions()
        layers, config = decoder_layers(base), LayerConfig(base.config)
        for layer, _ in layers if base.layers_drop_keywords else ():  # all: FSDP and others look for layers by one class
            if not isinstance(layer, KeywordlessLayerMixin):
                swap_class(layer, self.class_with_memory(type(layer)))
        for number in base.config.infini_layers:
            attention: Any = layers[number][1]  # is made an InfiniAttentionMixin
            if not isinstance(attention, InfiniAttentionMixin):
                swap_class(attention, self.class_with_memory(type(attention)))
                attention.swap_in(config, base.rotary_tables(1), base.dtype)

    @classmethod
    def from_pretrained(cls, *args, **kwargs):
        """As usual. The checkpoint may also be that of the own class, with the options of the memory by name; its layers are
        then compared with what they compute there.

        Raises:
            ValueError: a layer computes something else with its memory empty; or weights of the own class stay on disk.
        """
        loaded = super().from_pretrained(*args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded  # with output_loading_info
        if (given := model.config.__dict__.pop("_from_other_type", None)) is not None:
            model._base_is_plain = True
            if "disk" in getattr(model, "hf_device_map", {}).values():
                raise ValueError(
                    "device_map leaves weights on disk, and those of the memory are not in a plain checkpoint: load it once "
                    "without, save it with save_pretrained, and give the device_map when you load that."
                )
            model.check_layers()
            model.advise(given)
        return loaded

    def advise(self, given: Collection[str]) -> None:
        """Says, once, which options of the paper cost a pretrained model much, unless they are among those that were
        `given`."""
        advice = {
            "sink_tokens": "sink_tokens=4 (a window without the first tokens costs 0.5 to 1.5 nats a token)",
            "gate_init": "gate_init=-4.0 (an open gate mixes in half of an untrained memory)",
        }
        wanted = [text for option, text in advice.items() if option not in given]
        if self.name_or_path and wanted:
            logger.warning_once(
                f"A pretrained model that gets a memory begins better with {' and '.join(wanted)}. Give these options, with "
                "any values, and this is not said."
            )

    def check_layers(self) -> None:
        """[`InfiniAttentionMixin.check_swapped`] for every layer with a memory; not on a meta device."""
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
    """A base model whose layers have a memory; comes before its own class, after [`InfiniPreTrainedMixin`]."""

    argument_names: Sequence[str]  # of the own forward, in order
    takes_masks_by_type: bool  # whether that takes a mask for each type of layer, by name
    turns_by_layer_type: bool  # whether its position embeddings are made for a type of layer, by name
    layers_drop_keywords: bool  # whether its layers pass no keywords on to their attention

    def forward(self, *args, max_documents: int | None = None, memory_mask: Tensor | None = None, **kwargs):
        """As the own forward, with the same shapes, and these differences:

        Args:
            cache: an [`InfiniCache`] (`past_key_values` is its old name); made if `use_cache` is set and none is given.
                Gradients go through it from call to call, also with gradient checkpointing, unless some layers keep their
                own attention.
            use_cache: `None`: as the configuration says, but not in training with gradient checkpointing.
            attention_mask: `[batch, tokens]` or `[batch, past + tokens]`, 1 = real. A padded token is in no segment and no
                memory, wherever it is in the row.
            position_ids: `[batch, tokens]`; where they go back, a new document begins with an empty memory. Without them a
                row's real tokens are counted.
            max_documents: how many documents a row holds at most, so that packed rows compile into one graph:
                [`segment_layout`].
            memory_mask: `[batch, tokens]` of this call, 0 = the token is seen inside the window but not written into the
                memory. With `mask_special_tokens`, special tokens are left out as well if input_ids are given.

        Raises:
            ValueError: a cache or mask of another kind; `output_attentions` where layers with their own attention compute no
                weights.
        """
        given = dict(zip(self.argument_names, args, strict=False)) | kwargs
        given = with_one_name(given, CACHE) if OTHER_NAME in given else given
        ids, positions, use_cache = given.get("input_ids"), given.get("position_ids"), given.get("use_cache")
        tokens = check_inputs(ids, given.get("inputs_embeds"))
        weights = given.get("output_attentions")
        weights = bool(self.config.output_attentions if weights is None else weights)
        self._check_weights(weights)
        masks = {"attention_mask": given.get("attention_mask"), "position_ids": positions, "memory_mask": memory_mask}
        infini, cache, use_cache = begin_call(self, ids, tokens, given.get(CACHE), use_cache, max_documents, **masks)
        layout, states = infini.layout, infini.states
        given["position_ids"] = self.own_positions(layout, positions, cache)
        tables = self.rotary_tables(self.config.places, device=tokens.device)
        weights = weights or self.config._attn_implementation == "eager"
        infini = infini._replace(rotary=tables, return_weights=weights)
        mask = self._masks(layout, cache, states)
        given |= {"attention_mask": mask, CACHE: cache, "use_cache": use_cache, "infini": infini}
        output = super().forward(**given)
        if cache is not None and states is not None:
            cache.advance(states, ids, layout, tokens.shape[1])
            if use_cache and not isinstance(output, tuple):  # the own forward drops it in training with checkpoints
                setattr(output, CACHE, cache)
        return output

    def set_positions(self) -> None:
        """Changes what the own model has of positions, where the configuration says so."""

    def own_positions(self, layout: Layout, position_ids: Tensor | None, cache: InfiniCache | None) -> Tensor:
        """The positions that the own forward is given: layers without a memory see them."""
        return counted_positions(layout, cache) if position_ids is None else position_ids

    def rotary_tables(
        self, places: int, dtype: torch.dtype | None = None, device: torch.device | None = None
    ) -> dict[str | None, tuple[Tensor, ...]]:
        """The position embeddings of so many places, `[places, width]` each (one, if they are complex numbers), by the type
        of layer where that matters; empty for a model without rotary positions. `dtype`, `device`: `None` for the model's.
        """
        rotary = getattr(self, "rotary_emb", None)
        if rotary is None:
            return {}
        device = device_of(self.get_input_embeddings()) if device is None else device
        given = (torch.empty(1, 1, 1, device=device, dtype=dtype or self.dtype), torch.arange(places, device=device)[None])
        kinds: list[str | None] = [None]
        if self.turns_by_layer_type:
            kinds = sorted({self.config.layer_types[layer] for layer in self.config.infini_layers})
        found = {kind: rotary(*given) if kind is None else rotary(*given, kind) for kind in kinds}
        return {k: (t[0],) if isinstance(t, Tensor) else tuple(table[0] for table in t) for k, t in found.items()}

    def _masks(self, layout: Layout, cache: InfiniCache | None, states: PendingStates | None):
        """The masks of the layers with their own attention, as the own forward takes them ready-made. Types of which no such
        layer is left get a mask of one number, so that nobody makes one that grows with the text."""
        kinds = layer_kinds(self.config)
        masks: Any = dict.fromkeys(kinds, torch.ones(1, 1, 1, 1, dtype=torch.bool, device=layout.positions.device))
        if len(self.config.infini_layers) < len(kinds):
            masks |= kept_layers_masks(self.config, layout, cache, states, self.dtype, self.needs_a_mask())
        return masks if self.takes_masks_by_type else next(iter(masks.values()))

    def needs_a_mask(self) -> bool:
        """Whether the own forward may not be left to find out that everything before a token is visible."""
        return False

    def _check_weights(self, wanted: bool) -> None:
        kept = self.config.num_hidden_layers - len(self.config.infini_layers)
        if wanted and kept and self.config._attn_implementation != "eager":
            raise ValueError(
                f"output_attentions=True needs the eager implementation for this model's {kept} layers of full "
                f"attention: {self.config._attn_implementation} computes no weights there. Load the model with "
                "attn_implementation='eager', or call model.set_attn_implementation('eager')."
            )


def with_arguments_of(own, forward):
    """A mixin's `forward` with the `own` one's signature and what the mixins add to it: others ask it what a model takes."""
    signature, added = inspect.signature(own), inspect.signature(InfiniModelMixin.forward).parameters.values()
    named = [*signature.parameters.values(), *(argument for argument in added if argument.kind is argument.KEYWORD_ONLY)]

    @functools.wraps(forward)
    def with_arguments(self, *args, **kwargs):
        return forward(self, *args, **kwargs)

    vars(with_arguments)["__signature__"] = signature.replace(parameters=sorted(named, key=lambda argument: argument.kind))
    return with_arguments


@check_kinds
def check_inputs(input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
    """The one of the two that is given, or a ValueError unless there is one, with a token in it."""
    if (input_ids is None) == (inputs_embeds is None):
        raise ValueError("give exactly one of input_ids and inputs_embeds.")
    given: Any = inputs_embeds if input_ids is None else input_ids
    shape = list(given.shape[:2])
    if not torch.compiler.is_compiling() and 0 in shape:
        raise ValueError(f"the input must be [batch, tokens] with a row and a token at least; got {shape}.")
    if given.dim() != 3 if input_ids is None else given.dim() != 2 or given.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            "input_ids must be whole numbers, [batch, tokens], and inputs_embeds [batch, tokens, width]; got "
            f"{list(given.shape)}, {given.dtype}."
        )
    return given


@check_kinds
def memory_mask_of(config, input_ids: Tensor | None, given: Tensor, memory_mask: Tensor | None) -> Tensor | None:
    """Which tokens of a call are written into a memory, `[batch, tokens]` bool: those of the mask (`None`: all), without the
    configuration's special tokens where there are ids to know them by; `None`: all are. `given`: ids or embeddings.

    Raises:
        ValueError: `memory_mask` is of another shape.
    """
    batch, tokens = given.shape[:2]
    if memory_mask is not None and tuple(memory_mask.shape) != (batch, tokens):
        raise ValueError(
            f"memory_mask must be [batch, tokens] = [{batch}, {tokens}], 1 for tokens that are written into the memory; got "
            f"{list(memory_mask.shape)}. It covers the tokens of one call: for generate(), read the text with "
            f"model(ids, memory_mask=…, {CACHE}=cache) and go on from the cache."
        )
    memory_mask = bool_mask("memory_mask", memory_mask, read_back=not torch.compiler.is_compiling())
    ids = set()
    for special in (config.bos_token_id, config.eos_token_id, config.pad_token_id):
        ids |= set() if special is None else set(special) if isinstance(special, (list, tuple)) else {special}
    if not config.mask_special_tokens or not ids:
        return memory_mask
    if input_ids is None:
        if memory_mask is None and not torch.compiler.is_compiling():
            logger.warning_once(
                "inputs_embeds do not tell which tokens are special: mask_special_tokens does nothing, and all of them are "
                "written into the memory. Say with memory_mask, [batch, tokens], which are to be."
            )
        return memory_mask
    # One comparison for each: a tensor of the ids would wait for the device
    ordinary = torch.stack([input_ids != special for special in sorted(ids)]).all(0)
    return ordinary if memory_mask is None else ordinary & memory_mask


def check_cache(given) -> None:
    """Refuses caches that a model with infini layers cannot continue.

    Raises:
        ValueError: `given` is neither `None` nor an [`InfiniCache`] of this copy of the code.
    """
    if given is None or isinstance(given, InfiniCache):
        return
    if type(given).__name__ == InfiniCache.__name__:
        raise ValueError(
            f"{CACHE} is an InfiniCache of another copy of the code, {type(given).__module__}: leave it out with "
            f"use_cache=True, or make it by the model's class, sys.modules[{InfiniCache.__module__!r}].InfiniCache. Import "
            "hf_infini before a model is loaded from the Hub, and there is only one copy."
        )
    raise ValueError(
        f"{CACHE} must be an InfiniCache, got {type(given).__name__}: a memory does not fit into other caches. "
        "Leave it out with use_cache=True, or pass InfiniCache(model.config)."
    )


def memory_cache(model, given, use_cache: bool | None, batch: int) -> InfiniCache | None:
    """The [`InfiniCache`] of one call of `batch` rows of a model with infini layers, or `None`: the given one, checked, or a
    new one.

    Raises:
        ValueError: `given` is a cache of another kind, of other layers or of another number of rows, the call is to be
            exported, or gradient checkpointing would run layers a second time that keep keys and values.
    """
    if use_cache and torch.compiler.is_exporting():
        raise ValueError("torch.export cannot hold the cache of a memory: pass use_cache=False among the example inputs.")
    check_cache(given)
    wanted = [layer in model.config.infini_layers for layer in range(model.config.num_hidden_layers)]
    if given is not None and [isinstance(layer, InfiniLayer) for layer in given.layers] != wanted:
        raise ValueError(
            f"{CACHE} is the cache of a model with other layers: this one has {len(wanted)}, with memory "
            f"in {model.config.infini_layers}. Pass InfiniCache(model.config)."
        )
    state = None if given is None else given.first_state()
    if state is not None:
        check_rows("this call", batch, len(state.tokens_seen))
    if given is not None:
        given.drop_unfinished()
    cache = InfiniCache(model.config) if use_cache and given is None else given
    if cache is not None and checkpoints_gradients(model):
        functions = (getattr(module, "_gradient_checkpointing_func", None) for module in model.modules())
        if not all(wanted):
            refuse_checkpoints(model, "layers of full attention would append their keys and values twice")
        if any(getattr(function, "keywords", {}).get("use_reentrant") for function in functions):
            remedy = 'gradient_checkpointing_enable({"use_reentrant": False})'
            refuse_checkpoints(model, f"use_reentrant=True cuts the gradient through the memory, and {remedy} does not")
    return cache


def checkpoints_gradients(model) -> bool:
    """Whether blocks of the model are run a second time in the backward pass of this call."""
    if not (torch.is_grad_enabled() and model.training):
        return False
    return any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


def refuse_checkpoints(model, reason: str) -> None:
    """ValueError with the `reason` why layers with a cache cannot run again, where gradient checkpointing has them do so."""
    if checkpoints_gradients(model):
        raise ValueError(
            f"gradient checkpointing in training does not go with this cache: {reason}. Pass use_cache=False and no "
            f"{CACHE}, or call gradient_checkpointing_disable()."
        )


@check_kinds
def begin_call(
    model, ids, given: Tensor, cache, use_cache: bool | None, max_documents: int | None, **masks: Tensor | None
) -> tuple[SharedInputs, InfiniCache | None, bool]:
    """What the layers of a model's call share; the call's cache; and whether it is among the outputs.

    Args:
        ids: of the tokens, or `None`; given: these, or the embeddings `[batch, tokens, width]`.
        masks: as [`segment_layout`] takes them, but the attention mask may also cover the past.

    Raises:
        ValueError: the cache, the mask or the positions do not go on from what the cache has read.
    """
    watch_gates(model)
    batch, tokens = given.shape[:2]
    if use_cache is None:
        use_cache = model.config.use_cache and not checkpoints_gradients(model)
    cache = memory_cache(model, cache, use_cache, batch)
    masks["memory_mask"] = memory_mask_of(model.config, ids, given, masks["memory_mask"])
    masks["attention_mask"] = mask_of_call(masks["attention_mask"], batch, tokens, cache)
    state, states = (None, None) if cache is None else (cache.first_state(), cache.pending_states())
    check_continuation(masks["position_ids"], masks["attention_mask"], state)
    if states is not None and states.exchange is not None:
        state = states.exchange.begin(batch, tokens, given.device, masks)
    options = {"state": state, "max_documents": max_documents, "device": given.device}
    layout = segment_layout(batch, tokens, *model.config.window, **masks, **options)
    return SharedInputs(layout, states, {}), cache, use_cache


@check_kinds
def mask_of_call(attention_mask: Tensor | None, batch: int, tokens: int, cache: InfiniCache | None) -> Tensor | None:
    """The part of the mask that covers this call's tokens: `generate` passes it for the past as well, which is compared with
    what the cache has read.

    Raises:
        ValueError: a mask of another shape, or another past.
    """
    if attention_mask is None:
        return None
    past = 0 if cache is None else cache.get_seq_length()
    widths = (tokens, past + tokens)
    if attention_mask.dim() != 2 or attention_mask.shape[0] != batch or attention_mask.shape[1] not in widths:
        raise ValueError(
            f"attention_mask must be [batch, tokens] = [{batch}, {tokens}] or [{batch}, {past + tokens}] (this call's "
            f"tokens, or those of the {past} before as well), 1 for real tokens; got {list(attention_mask.shape)}."
        )
    if cache is not None and past and attention_mask.shape[1] != tokens:
        cache.text.check_past(attention_mask[:, :past])
    return attention_mask[:, -tokens:]


@check_kinds
def check_continuation(
    position_ids: Tensor | None, attention_mask: Tensor | None, state: InfiniState | None
) -> None:
    """Refuses positions that neither continue from the state nor begin a new document with a 0.

    Args:
        position_ids: `[batch or 1, tokens]` of this call, or `None`; attention_mask: `[batch, tokens]` of it, or `None`.

    Raises:
        ValueError: there is a row of such positions.
        RuntimeError: there is one, in a graph of torch.compile.
    """
    if position_ids is None or state is None:
        return
    positions = position_ids.expand(len(state.tokens_seen), -1)
    real = torch.ones_like(positions) if attention_mask is None else attention_mask.long()
    position = positions.gather(1, real.argmax(1, keepdim=True)).squeeze(1)  # of the first real token
    wrong = real.any(1) & (state.tokens_seen > 0) & (position <= state.last_position) & (position != 0)
    if torch.compiler.is_compiling():
        torch._assert_async(~wrong.any(), "position_ids go back into what the cache has read, but not to 0.")
    elif wrong.any():
        row = int(wrong.nonzero()[0])
        last = int(state.last_position[row])
        raise ValueError(
            f"position_ids of row {row} go on with {int(position[row])}, but the cache has read up to position {last}: give "
            f"{last + 1} to go on, 0 to begin a new document, or leave position_ids out, and the tokens are counted."
        )


def counted_positions(layout: Layout, cache: InfiniCache | None) -> Tensor:
    """`[batch or 1, tokens]`: positions that continue from the last one, for a call without positions. Positions given in
    earlier calls may have gaps."""
    state = None if cache is None else cache.first_state()
    if state is None:
        return layout.positions
    return layout.positions + (state.last_position + 1 - state.tokens_seen).unsqueeze(1)


def check_positions(positions, limit: int, kind: str, remedy: str) -> None:
    """Refuses positions beyond a table of `limit` rows; in a graph of torch.compile the check is part of the graph.

    Raises:
        ValueError: there is one; the message has its number, the `kind` of positions and the remedy.
        RuntimeError: there is one, in a graph.
    """
    if torch.compiler.is_compiling():
        message = f"a position is beyond this model's {limit} {kind} positions (n_positions). {remedy}"
        torch._assert_async((positions < limit).all(), message)
        return
    furthest = int(positions.max())
    if furthest >= limit:
        raise ValueError(f"position {furthest} is beyond this model's {limit} {kind} positions (n_positions). {remedy}")
