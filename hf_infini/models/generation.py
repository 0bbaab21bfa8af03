"""What `generate` does with a memory: its cache, the masks of what it has read, and its steps by
torch.compile."""

import copy
import functools
import threading
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers.masking_utils import create_masks_for_generate
from transformers.utils import logging

from ..cache.cache import InfiniCache
from ..cache.step_cache import StepCache
from ..compat.cache_name import CACHE
from ..compat.hub_code import ModelBase
from .base import warn_of_unfitted_score
from .structure import decoder_of

logger = logging.get_logger(__name__)
# Those of a step that may be compiled; any other is for a plain call
STEP_INPUTS = {"input_ids", "attention_mask", "use_cache", "logits_to_keep", "return_dict", CACHE}
step_caches: WeakKeyDictionary[torch.nn.Module, StepCache] = WeakKeyDictionary()  # of models


class MemoryGenerationMixin(ModelBase):
    """Gives `generate` an [`InfiniCache`] for a model with infini layers, and compares a given one
    with the ids; comes before `GenerationMixin` and `PreTrainedModel`, of which it overrides
    methods."""

    def __getstate__(self) -> dict:
        """Without the compiled call, which is the original's also in a copy."""
        state: Any = super().__getstate__()
        return {name: value for name, value in state.items() if name != "_compiled_call"}

    def _prepare_model_inputs(self, inputs, bos_token_id, model_kwargs):
        ids, name, model_kwargs = super()._prepare_model_inputs(inputs, bos_token_id, model_kwargs)
        cache, mask = model_kwargs.get(CACHE), model_kwargs.get("attention_mask")
        # as cache.attention_mask(mask) says
        all_new = mask is not None and mask.shape[1] > ids.shape[1]
        if isinstance(cache, InfiniCache) and ids.dim() == 2 and not all_new:  # 3: embeddings
            cache.check_ids(ids)
        return ids, name, model_kwargs

    def init_continuous_batching(self, *args, **kwargs):
        """Every way into continuous batching goes through this one; refused before it allocates
        pages of keys and values."""
        raise ValueError(
            "continuous batching keeps keys and values in pages, which the attention of a "
            f"{type(self).__name__} does not read. Use generate() with a left-padded batch of "
            "prompts."
        )

    def _prepare_position_ids_for_generation(self, inputs_tensor, model_kwargs):
        """None for a memory: the cache counts the tokens of its documents, and only a user's
        positions begin new ones."""
        if self.config.infini_layers:
            return None
        return super()._prepare_position_ids_for_generation(inputs_tensor, model_kwargs)

    def _get_stopping_criteria(self, *args, **kwargs):
        criteria, config = super()._get_stopping_criteria(*args, **kwargs), self.config
        if (
            len(config.infini_layers) == config.num_hidden_layers
            and getattr(config, "position_encoding", "") != "learned"
        ):
            for criterion in criteria:
                if hasattr(criterion, "max_position_embeddings"):
                    # no reminder of an end that these positions do not have
                    criterion.max_position_embeddings = None
        return criteria

    def _prepare_cache_for_generation(
        self, generation_config, model_kwargs, *args, **kwargs
    ) -> Any:
        warn_of_unfitted_score(decoder_of(self), generation_config.max_length)
        asked = generation_config.cache_implementation
        if self.config.infini_layers and asked not in (None, "dynamic"):
            raise ValueError(
                f"cache_implementation={asked!r} is not for a model with a compressive memory: it "
                "makes its own cache, already of constant size. Leave cache_implementation out."
            )
        if (
            self.config.infini_layers
            and model_kwargs.get(CACHE) is None
            and generation_config.use_cache is not False
        ):
            model_kwargs[CACHE] = InfiniCache(self.config)
        else:
            super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)
        if self.config.infini_layers and self._valid_auto_compile_criteria(
            model_kwargs, generation_config
        ):
            learned = getattr(self.config, "position_encoding", "") == "learned"
            length = model_kwargs[CACHE].get_seq_length() + generation_config.max_length  # at most
            reasons = {
                "beams": generation_config.num_beams > 1,
                "position_ids": model_kwargs.get("position_ids") is not None,
                "layers without a memory": len(self.config.infini_layers)
                < self.config.num_hidden_layers,
                "layers on several devices": len(set(getattr(self, "hf_device_map", {}).values()))
                > 1,
                "a text that may exceed n_positions": learned and length > self.config.n_positions,
                "outputs of layers": generation_config.output_attentions
                or generation_config.output_hidden_states,
                "another thread than the main one": threading.current_thread()
                is not threading.main_thread(),
            }
            if found := [reason for reason, holds in reasons.items() if holds]:
                logger.warning_once(
                    "generate() runs its steps without torch.compile, because of "
                    f"{', '.join(found)}."
                )
                generation_config.disable_compile = True

    def _prefill(self, input_ids, generation_config, *args, **kwargs):
        """As usual. Prompts are not compiled: no two of their chunks have the same layout."""
        if self.config.infini_layers:
            generation_config = copy.copy(generation_config)
            generation_config.disable_compile = True
        return super()._prefill(input_ids, generation_config, *args, **kwargs)

    def _sample(self, *args, **kwargs):
        try:
            return super()._sample(*args, **kwargs)
        finally:
            if self in step_caches:
                step_caches[self].release(kwargs.get(CACHE))

    def create_masks_for_generate(self, **given):
        return (
            given["attention_mask"]
            if isinstance(given[CACHE], InfiniCache)
            else create_masks_for_generate(**given)
        )

    def get_compiled_call(self, compile_config):
        """The call that `generate` repeats, compiled as `compile_config`, of transformers, says.
        Only a step is compiled: one new token, real in every row, in the main thread, to which CUDA
        graphs belong. Its outputs are overwritten by the next one's."""
        compiled, memories = (
            super().get_compiled_call(compile_config),
            len(self.config.infini_layers),
        )
        if not memories or compiled == self.__call__:
            return compiled
        if memories < self.config.num_hidden_layers:
            return self.__call__
        own = step_caches.get(self)
        if own is None or not own.is_for(self.config):
            own = step_caches[self] = StepCache(self.config)
        return functools.partial(self._step, compiled, own)

    @torch.no_grad()
    def _step(self, compiled, own, **inputs):
        cache, ids, mask = inputs.get(CACHE), inputs.get("input_ids"), inputs.get("attention_mask")
        others = {name for name, value in inputs.items() if value is not None} - STEP_INPUTS
        compiles = cache is not None and ids is not None and ids.shape[1] == 1 and not others
        compiles = compiles and inputs.get("return_dict") is not False
        # a new token of padding is in masks of width 1
        compiles = compiles and (mask is None or mask.shape[1] > 1)
        if (
            not compiles
            or threading.current_thread() is not threading.main_thread()
            or not own.begin_step(cache)
        ):
            return self.__call__(**inputs)
        inputs.pop("attention_mask", None)  # of what has been read, which the cache knows
        output = compiled(**inputs | {CACHE: own})
        own.end_step(cache)
        output[CACHE] = cache
        return output
