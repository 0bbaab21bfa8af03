"""What the model families share: initialisation of every module, and caches and masks of layers with a memory."""

import torch

from .cache import InfiniCache


class InitializationMixin:
    """Has `_init_weights` called for every module; stands before `PreTrainedModel`.

    For classes outside of transformers, it passes over modules whose own parameters are all initialised, and takes a module
    without any (GPT-2's MLP) for one: the scaled start of the projections inside would be lost. What was loaded is safe
    without that, because `_init_weights` writes through `transformers.initialization` alone.
    """

    def _initialize_weights(self, module, is_custom_code: bool = False):
        super()._initialize_weights(module, False)


class MemoryGenerationMixin:
    """Gives `generate` an [`InfiniCache`] for a model with infini layers, and the mask that says which ids a cache from
    before has not read; stands before `GenerationMixin`."""

    def _prepare_model_inputs(self, inputs, bos_token_id, model_kwargs):
        ids, name, model_kwargs = super()._prepare_model_inputs(inputs, bos_token_id, model_kwargs)
        mask = model_kwargs.get("attention_mask")
        if mask is not None:
            model_kwargs = {**model_kwargs, "attention_mask": self._mask_of_cache(ids, mask, model_kwargs)}
        return ids, name, model_kwargs

    def _prepare_attention_mask_for_generation(self, inputs_tensor, generation_config, model_kwargs):
        mask = super()._prepare_attention_mask_for_generation(inputs_tensor, generation_config, model_kwargs)
        return self._mask_of_cache(inputs_tensor, mask, model_kwargs)

    def _mask_of_cache(self, input_ids, attention_mask, model_kwargs):
        cache = model_kwargs.get("past_key_values")
        if isinstance(cache, InfiniCache) and input_ids.dim() == attention_mask.dim() == 2:  # 3: embeddings
            return cache.mask_of_ids(input_ids, attention_mask)
        return attention_mask

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, *args, **kwargs):
        if not self.config.infini_layers:
            return super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)
        asked = generation_config.cache_implementation
        if asked not in (None, "dynamic"):
            raise ValueError(
                f"cache_implementation={asked!r} is not for a model with a compressive memory: it makes its own cache, "
                "already of constant size. Leave cache_implementation out."
            )
        if model_kwargs.get("past_key_values") is None and generation_config.use_cache is not False:
            model_kwargs["past_key_values"] = InfiniCache(self.config)
            return None
        return super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)


def memory_cache(config, given, use_cache: bool | None):
    """The [`InfiniCache`] of one call of a model with infini layers, or `None`: the given one, checked, or a new one.

    Raises:
        ValueError: `given` is a cache of another kind, or the call is to be exported.
    """
    if use_cache and torch.compiler.is_exporting():
        raise ValueError("torch.export cannot hold the cache of a memory: pass use_cache=False among the example inputs.")
    if given is not None and not isinstance(given, InfiniCache):
        raise ValueError(
            f"past_key_values must be an InfiniCache, got {type(given).__name__}: a memory does not fit into other caches. "
            "Leave it out with use_cache=True, or pass InfiniCache(model.config)."
        )
    return InfiniCache(config) if use_cache and given is None else given


def columns_of_call(attention_mask, tokens: int, past: int):
    """The part of the mask that covers this call's tokens: `generate` passes it for the past as well."""
    if attention_mask is None:
        return None
    if attention_mask.dim() != 2 or attention_mask.shape[1] not in (tokens, past + tokens):
        raise ValueError(
            f"attention_mask must be [batch, {tokens}] or [batch, {past + tokens}] (this call's tokens, or those of the "
            f"{past} before as well), 1 for real tokens; got {list(attention_mask.shape)}."
        )
    return attention_mask[:, -tokens:]


def check_positions(positions, limit: int, kind: str, remedy: str) -> None:
    """Refuses positions beyond a table of `limit` rows; in a graph of torch.compile the check is part of the graph.

    Raises:
        ValueError: there is one; the message has its number, the `kind` of positions and the remedy.
        RuntimeError: likewise, in a graph.
    """
    if torch.compiler.is_compiling():
        message = f"a position is beyond this model's {limit} {kind} positions (n_positions). {remedy}"
        torch._assert_async((positions < limit).all(), message)
        return
    furthest = int(positions.max())
    if furthest >= limit:
        raise ValueError(f"position {furthest} is beyond this model's {limit} {kind} positions (n_positions). {remedy}")


def memory_mask_of(config, input_ids):
    """`[batch, tokens]` bool, False for the configuration's special tokens, which are not written into a memory; `None`
    where there are none to look for."""
    if not config.mask_special_tokens or input_ids is None:
        return None
    ids = set()
    for given in (config.bos_token_id, config.eos_token_id, config.pad_token_id):
        ids |= set() if given is None else set(given) if isinstance(given, (list, tuple)) else {given}
    return ~torch.isin(input_ids, torch.tensor(sorted(ids), device=input_ids.device)) if ids else None
