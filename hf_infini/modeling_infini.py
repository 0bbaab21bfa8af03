"""Infini-attention in a decoder of transformers: mixins that come before its own base model and heads.

No model code is copied. The layers are swapped in place ([`InfiniAttentionMixin`]); the base model makes the layout of a
call once, and passes it down with the layers' states as a keyword.
"""

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.utils import logging

from .cache import InfiniCache, StatesOfCall
from .cache_name import CACHE, with_one_name
from .hooks import device_of
from .hub_code import ModelBase
from .layout import Layout
from .lookups import enter_weights
from .modeling_common import (
    InitializationMixin,
    check_inputs,
    checkpoints_gradients,
    counted_positions,
    kept_layers_masks,
    layout_of_call,
    memory_cache,
    memory_mask_of,
)
from .modeling_infini_layer import TEST_TOKENS, InfiniAttentionMixin, ModelCall

logger = logging.get_logger(__name__)


class InfiniPreTrainedMixin(InitializationMixin):
    """What base models and heads share; comes before the own class of either."""

    own_class: type[Any]  # the class that comes after this one

    _supports_flash_attn = False
    _supports_flex_attn = False
    _supports_attention_backend = False
    _can_compile_fullgraph = False
    _is_stateful = True  # a memory cannot be cropped, so assisted decoding is refused

    def __init__(self, config, *args, **kwargs):
        from .families import add_memory

        if not hasattr(config, "infini_layers"):
            raise ValueError(
                f"a {type(self).__name__} needs the options of its memory, and this {type(config).__name__} has none: give "
                "segment_length=… (tokens in a segment), such as 256."
            )
        super().__init__(config, *args, **kwargs)
        add_memory(self)

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)  # of a copy, or of a model that another process has pickled
        self.enter_weights()

    def enter_weights(self) -> None:
        """[`lookups.enter_weights`] of this model's type and class."""
        enter_weights(self.own_class.config_class.model_type, self.config.model_type)
        enter_weights(self.own_class.__name__, f"Infini{self.own_class.__name__}")

    # transformers reads these two from the file of a class, and this one's layers and experts are those of the own class

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        return cls.own_class._can_set_attn_implementation()

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return cls.own_class._can_set_experts_implementation()

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
        from .families import decoder_of

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
        given = with_one_name(dict(zip(self.argument_names, args, strict=False)) | kwargs, CACHE)
        ids, embeddings = given.get("input_ids"), given.get("inputs_embeds")
        tokens = check_inputs(ids, embeddings)
        weights = given.get("output_attentions")
        weights = bool(self.config.output_attentions if weights is None else weights)
        self._check_weights(weights)
        memory_mask = memory_mask_of(self.config, ids, embeddings, memory_mask)
        use_cache = given.get("use_cache")
        if use_cache is None:
            use_cache = self.config.use_cache and not checkpoints_gradients(self)
        cache = memory_cache(self, given.get(CACHE), use_cache, tokens.shape[0])
        states = None if cache is None else cache.states()
        masks = (given.get("attention_mask"), given.get("position_ids"), memory_mask)
        layout = layout_of_call(self.config, tokens, *masks, cache, max_documents)
        given["position_ids"] = self.own_positions(layout, masks[1], cache)
        segment_length, local_segments, sink_tokens = self.config.window
        tables = self.rotary_tables(sink_tokens + (local_segments + 1) * segment_length)
        call = ModelCall(layout, states, 0 if cache is None else cache.get_seq_length(), tables, weights)
        mask: Any = self._masks(layout, cache, states)
        if self.layers_drop_keywords:
            mask.infini = call
        given |= {"attention_mask": mask, CACHE: cache, "use_cache": use_cache, "infini": call}
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

    def rotary_tables(self, places: int, dtype: torch.dtype | None = None) -> dict[str | None, tuple[Tensor, ...]]:
        """The position embeddings of so many places, `[places, width]` each (one, if they are complex numbers), by the type
        of layer where that matters; empty for a model without rotary positions. `dtype`: `None` for the model's."""
        rotary = getattr(self, "rotary_emb", None)
        if rotary is None:
            return {}
        device = device_of(self.get_input_embeddings())
        given = (torch.empty(1, 1, 1, device=device, dtype=dtype or self.dtype), torch.arange(places, device=device)[None])
        kinds: list[str | None] = [None]
        if self.turns_by_layer_type:
            kinds = sorted({self.config.layer_types[layer] for layer in self.config.infini_layers})
        found = {kind: rotary(*given) if kind is None else rotary(*given, kind) for kind in kinds}
        return {k: (t[0],) if isinstance(t, Tensor) else tuple(table[0] for table in t) for k, t in found.items()}

    def _masks(self, layout: Layout, cache: InfiniCache | None, states: StatesOfCall | None):
        """The masks of the layers with their own attention, as the own forward takes them ready-made."""
        masks = kept_layers_masks(self.config, layout, cache, states, self.dtype)
        if self.takes_masks_by_type:
            return masks
        mask = next(iter(masks.values()))
        if mask is None and self.needs_a_mask():
            tokens, past = layout.positions.shape[1], 0 if cache is None else cache.get_seq_length()
            ones = torch.ones(tokens, past + tokens, dtype=torch.bool, device=layout.positions.device)
            mask = ones.tril(past)[None, None]
        return mask

    def needs_a_mask(self) -> bool:
        """Whether the own forward may not be left to find out that everything before a token is visible."""
        return self.layers_drop_keywords

    def _check_weights(self, wanted: bool) -> None:
        kept = self.config.num_hidden_layers - len(self.config.infini_layers)
        if wanted and kept and self.config._attn_implementation != "eager":
            raise ValueError(
                f"output_attentions=True needs the eager implementation for this model's {kept} layers of full "
                f"attention: {self.config._attn_implementation} computes no weights there. Load the model with "
                "attn_implementation='eager', or call model.set_attn_implementation('eager')."
            )
