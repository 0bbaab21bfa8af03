"""What the model families share: initialisation of every module, code on the Hub, and caches and masks of layers with a
memory."""

import torch
from transformers.dynamic_module_utils import custom_object_save
from transformers.utils import logging

from .cache import InfiniCache, InfiniLayer

logger = logging.get_logger(__name__)


class InitializationMixin:
    """Has `_init_weights` called for every module; stands before `PreTrainedModel`.

    For classes outside of transformers, it passes over modules whose own parameters are all initialised, and takes a module
    without any (GPT-2's MLP) for one: the scaled start of the projections inside would be lost. What was loaded is safe
    without that, because `_init_weights` writes through `transformers.initialization` alone.
    """

    def _initialize_weights(self, module, is_custom_code: bool = False):
        super()._initialize_weights(module, False)


class HubCodeMixin:
    """Saves a model's code beside its weights, so that it loads where this package is not installed; stands before
    `PreTrainedModel`. It acts in the classes that [`carry_code`] names, not in their subclasses, but for those that torch
    makes of them to shard a model (FSDP2).
    """

    auto_entries: dict[str, str] = {}

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        cls._auto_class, cls.auto_entries = None, {}  # what defines a subclass is another file

    def save_pretrained(self, save_directory, is_main_process: bool = True, *args, **kwargs):
        defined = type(self)
        while defined.__module__.startswith("torch."):
            defined = next(base for base in defined.__bases__ if issubclass(base, HubCodeMixin))
        if defined.auto_entries:
            # transformers adds the class that is saved alone: a language model is to load as a base model, too
            self.config.auto_map = {**(getattr(self.config, "auto_map", None) or {}), **defined.auto_entries}
        result = super().save_pretrained(save_directory, is_main_process, *args, **kwargs)
        if defined is not type(self) and defined.auto_entries and is_main_process:
            custom_object_save(defined.__new__(defined), save_directory)  # copies the files that define the object's class
        return result


def carry_code(**classes: type[HubCodeMixin]) -> None:
    """Has models saved with the module that defines them and all that it imports with one dot (20 files or so).

    The module itself calls it: the saved copy has no package whose `__init__` could.

    Args:
        classes: the model classes of the module, by the name of the Auto class that loads them.
    """
    entries = {auto_class: f"{cls.__module__.rpartition('.')[2]}.{cls.__name__}" for auto_class, cls in classes.items()}
    for auto_class, cls in classes.items():
        cls.register_for_auto_class(auto_class)
        cls.auto_entries = entries


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

    def init_continuous_batching(self, *args, **kwargs):
        """Every way into continuous batching goes through this one; refused before it allocates pages of keys and values."""
        raise ValueError(
            f"continuous batching keeps keys and values in pages, which the attention of a {type(self).__name__} does not "
            "read. Use generate() with a left-padded batch of prompts."
        )

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
        ValueError: `given` is a cache of another kind or of other layers, or the call is to be exported.
    """
    if use_cache and torch.compiler.is_exporting():
        raise ValueError("torch.export cannot hold the cache of a memory: pass use_cache=False among the example inputs.")
    if given is not None and not isinstance(given, InfiniCache):
        raise ValueError(
            f"past_key_values must be an InfiniCache, got {type(given).__name__}: a memory does not fit into other caches. "
            "Leave it out with use_cache=True, or pass InfiniCache(model.config)."
        )
    wanted = [layer in config.infini_layers for layer in range(config.n_layer)]
    if given is not None and [isinstance(layer, InfiniLayer) for layer in given.layers] != wanted:
        raise ValueError(
            f"past_key_values is the cache of a model with other layers: this one has {config.n_layer}, with memory in "
            f"{config.infini_layers}. Pass InfiniCache(model.config)."
        )
    return InfiniCache(config) if use_cache and given is None else given


def check_inputs(input_ids, inputs_embeds) -> None:
    """Raises a ValueError unless one of the two is given, with a token in it."""
    if (input_ids is None) == (inputs_embeds is None):
        raise ValueError("give exactly one of input_ids and inputs_embeds.")
    shape = list((inputs_embeds if input_ids is None else input_ids).shape[:2])
    if not torch.compiler.is_compiling() and 0 in shape:
        raise ValueError(f"the input must be [batch, tokens] with a row and a token at least; got {shape}.")


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


def memory_mask_of(config, input_ids, inputs_embeds, given=None):
    """Which tokens of a call are written into a memory, `[batch, tokens]` bool: those that `given` names (`None`: all),
    without the configuration's special tokens where there are ids to know them by; `None`: all are.

    Raises:
        ValueError: `given` is of another shape, or the model has no memory.
    """
    if not config.infini_layers:
        if given is not None:
            raise ValueError("memory_mask says what is written into a memory, and this model has none: leave it out.")
        return None
    batch, tokens = (inputs_embeds if input_ids is None else input_ids).shape[:2]
    if given is not None and tuple(given.shape) != (batch, tokens):
        raise ValueError(
            f"memory_mask must be [batch, tokens] = [{batch}, {tokens}], 1 for tokens that are written into the memory; got "
            f"{list(given.shape)}. It covers the tokens of one call: for generate(), read the text with "
            "model(ids, memory_mask=…, past_key_values=cache) and go on from the cache."
        )
    given = None if given is None else given.to(torch.bool)
    ids = set()
    for special in (config.bos_token_id, config.eos_token_id, config.pad_token_id):
        ids |= set() if special is None else set(special) if isinstance(special, (list, tuple)) else {special}
    if not config.mask_special_tokens or not ids:
        return given
    if input_ids is None:
        if given is None and not torch.compiler.is_compiling():
            logger.warning_once(
                "inputs_embeds do not tell which tokens are special: mask_special_tokens does nothing, and all of them are "
                "written into the memory. Say with memory_mask, [batch, tokens], which are to be."
            )
        return given
    ordinary = ~torch.isin(input_ids, torch.tensor(sorted(ids), device=input_ids.device))
    return ordinary if given is None else ordinary & given
