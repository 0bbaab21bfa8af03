"""What `generate` does with a memory: its cache, and the masks of what it has read."""

from ..cache.cache import InfiniCache
from ..compat.cache_name import CACHE
from ..compat.hub_code import ModelBase


class MemoryGenerationMixin(ModelBase):
    """Gives `generate` an [`InfiniCache`] for a model with infini layers, and compares a given one with the ids; comes
    before `GenerationMixin`."""

    def _prepare_model_inputs(self, inputs, bos_token_id, model_kwargs):
        ids, name, model_kwargs = super()._prepare_model_inputs(inputs, bos_token_id, model_kwargs)
        cache, mask = model_kwargs.get(CACHE), model_kwargs.get("attention_mask")
        all_new = mask is not None and mask.shape[1] > ids.shape[1]  # as cache.attention_mask(mask) says
        if isinstance(cache, InfiniCache) and ids.dim() == 2 and not all_new:  # 3: embeddings
            cache.check_ids(ids)
        return ids, name, model_kwargs

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

    def _get_stopping_criteria(self, *args, **kwargs):
        criteria, config = super()._get_stopping_criteria(*args, **kwargs), self.config
        if len(config.infini_layers) == config.num_hidden_layers and getattr(config, "position_encoding", "") != "learned":
            for criterion in criteria:
                if hasattr(criterion, "max_position_embeddings"):
                    criterion.max_position_embeddings = None  # no reminder of an end that these positions do not have
        return criteria

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, *args, **kwargs):
        asked = generation_config.cache_implementation
        if self.config.infini_layers and asked not in (None, "dynamic"):
            raise ValueError(
                f"cache_implementation={asked!r} is not for a model with a compressive memory: it makes its own cache, "
                "already of constant size. Leave cache_implementation out."
            )
        if self.config.infini_layers and model_kwargs.get(CACHE) is None and generation_config.use_cache is not False:
            model_kwargs[CACHE] = InfiniCache(self.config)
            return None
        return super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)
