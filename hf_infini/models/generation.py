"""What `generate` does with a memory: its cache, the masks of what it has read, and the padding after finished rows."""

import functools
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import GenerationMixin, StoppingCriteriaList
from transformers.generation import GenerationMode

from ..cache.cache import InfiniCache
from ..compat.cache_name import CACHE
from .base import check_cache

if TYPE_CHECKING:  # what the mixin comes before; it has no base when the code runs
    from transformers._typing import GenerativePreTrainedModel

    class GenerativeBase(GenerationMixin, GenerativePreTrainedModel): ...

else:
    GenerativeBase = object


class MemoryGenerationMixin(GenerativeBase):
    """Gives `generate` an [`InfiniCache`] for a model with infini layers, compares a given one with the ids, and keeps the
    padding after finished rows out of the memory; comes before `GenerationMixin`."""

    def _prepare_model_inputs(self, inputs, bos_token_id, model_kwargs):
        ids, name, model_kwargs = super()._prepare_model_inputs(inputs, bos_token_id, model_kwargs)
        self._check_cache(ids, model_kwargs.get("attention_mask"), model_kwargs)
        return ids, name, model_kwargs

    def _prepare_attention_mask_for_generation(self, inputs_tensor, generation_config, model_kwargs):
        mask = super()._prepare_attention_mask_for_generation(inputs_tensor, generation_config, model_kwargs)
        self._check_cache(inputs_tensor, mask, model_kwargs)
        return mask

    def _check_cache(self, input_ids, attention_mask, model_kwargs) -> None:
        cache = model_kwargs.get(CACHE)
        if self.config.infini_layers:
            check_cache(cache)
        if isinstance(cache, InfiniCache) and attention_mask is not None and input_ids.dim() == 2:  # 3: embeddings
            cache.check_ids(input_ids, attention_mask)

    def init_continuous_batching(self, *args, **kwargs):
        """Every way into continuous batching goes through this one; refused before it allocates pages of keys and values."""
        raise ValueError(
            f"continuous batching keeps keys and values in pages, which the attention of a {type(self).__name__} does not "
            "read. Use generate() with a left-padded batch of prompts."
        )

    def _prepare_position_ids_for_generation(self, inputs_tensor, model_kwargs):
        """None for a memory: the cache counts the tokens of its documents, and only a user's positions begin new ones."""
        if self.config.infini_layers:
            return None
        return super()._prepare_position_ids_for_generation(inputs_tensor, model_kwargs)

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, generation_mode, *args, **kwargs):
        if not self.config.infini_layers:
            return super()._prepare_cache_for_generation(
                generation_config, model_kwargs, generation_mode, *args, **kwargs
            )
        asked = generation_config.cache_implementation
        if asked not in (None, "dynamic"):
            raise ValueError(
                f"cache_implementation={asked!r} is not for a model with a compressive memory: it makes its own cache, "
                "already of constant size. Leave cache_implementation out."
            )
        if generation_mode in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):  # a running beam has not ended
            generation_config._finished_rows = model_kwargs["finished_rows"] = FinishedRows()
        if model_kwargs.get(CACHE) is None and generation_config.use_cache is not False:
            model_kwargs[CACHE] = InfiniCache(self.config)
            return None
        return super()._prepare_cache_for_generation(generation_config, model_kwargs, generation_mode, *args, **kwargs)

    def _get_stopping_criteria(self, generation_config, *args, **kwargs):
        criteria = super()._get_stopping_criteria(generation_config, *args, **kwargs)
        config = self.config
        if len(config.infini_layers) == config.num_hidden_layers and getattr(config, "position_encoding", "") != "learned":
            for criterion in criteria:
                if hasattr(criterion, "max_position_embeddings"):
                    criterion.max_position_embeddings = None  # no reminder of an end that these positions do not have
        finished = getattr(generation_config, "_finished_rows", None)
        if finished is None or not any(hasattr(criterion, "eos_token_id") for criterion in criteria):
            return criteria  # without an end-of-text token nothing is padded
        finished.extend(criteria)
        return finished

    def _update_model_kwargs_for_generation(self, outputs, model_kwargs, is_encoder_decoder=False, num_new_tokens=1):
        model_kwargs = super()._update_model_kwargs_for_generation(
            outputs, model_kwargs, is_encoder_decoder, num_new_tokens
        )
        finished, cache = model_kwargs.get("finished_rows"), model_kwargs.get(CACHE)
        if finished is not None and finished.rows is not None and cache is not None:
            mask = model_kwargs.get("attention_mask")
            if mask is None:  # transformers leaves out a mask of ones
                mask = finished.rows.new_ones(len(finished.rows), cache.get_seq_length() + num_new_tokens, dtype=torch.long)
            mask[:, -num_new_tokens:] *= ~finished.rows[:, None]
            model_kwargs["attention_mask"] = mask
        return model_kwargs

    @functools.wraps(GenerationMixin.prepare_inputs_for_generation)  # generate() looks for inputs_embeds in the signature
    def prepare_inputs_for_generation(self, *args, finished_rows=None, **kwargs):
        return super().prepare_inputs_for_generation(*args, **kwargs)


class FinishedRows(StoppingCriteriaList):
    """The criteria of `generate`, and which rows have met one: what it appends to these is padding.

    Attributes:
        rows: `[batch]` bool; `None` while no row is finished.
    """

    rows: Tensor | None = None

    def __call__(self, input_ids, scores, **kwargs):
        done = super().__call__(input_ids, scores, **kwargs)
        if done.any():
            self.rows = done if self.rows is None else self.rows | done
        return done
