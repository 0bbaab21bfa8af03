"""What the model families share: initialisation of every module, and caches and masks of layers with a memory."""

import torch
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.utils import logging

from .cache import InfiniCache, InfiniLayer
from .cache_name import CACHE
from .checkpoints import CheckedLoadingMixin
from .checks import bool_mask
from .configuration_common import layer_kinds
from .generation import check_cache
from .layout import Layout
from .lookups import tell
from .read_text import check_rows
from .segments import SegmentLayout, segment_layout
from .state import InfiniState

logger = logging.get_logger(__name__)


class InitializationMixin(CheckedLoadingMixin):
    """Loads whole checkpoints only, and has `_init_weights` called for every module; comes before `PreTrainedModel`.

    For classes outside of transformers, it passes over modules whose own parameters are all initialised, and takes a module
    without any (GPT-2's MLP) for one: the scaled start of the projections inside would be lost. What was loaded is safe
    without that, because `_init_weights` writes only through `transformers.initialization`.
    """

    def _initialize_weights(self, module, is_custom_code: bool = False):
        super()._initialize_weights(module, False)

    def __setattr__(self, name, value):
        super().__setattr__(name, value)
        if name == "peft_config":
            tell("adapted", self)

    def save_pretrained(self, *args, **kwargs):
        super().save_pretrained(*args, **kwargs)
        tell("saved", self, *args)


def memory_cache(model, given, use_cache: bool | None, batch: int) -> InfiniCache | None:
    """The [`InfiniCache`] of one call of `batch` rows of a model with infini layers, or `None`: the given one, checked, or a
    new one.

    Raises:
        ValueError: `given` is a cache of another kind, of other layers or of another number of rows, the call is to be
            exported, or gradient checkpointing would run layers a second time that keep keys and values.
    """
    if not torch.compiler.is_compiling():
        tell("called", model)
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
        has_full_attention = not all(wanted)
        functions = (getattr(module, "_gradient_checkpointing_func", None) for module in model.modules())
        reentrant = any(getattr(function, "keywords", {}).get("use_reentrant") for function in functions)
        if has_full_attention or reentrant:
            reason = (
                "layers of full attention would append their keys and values twice"
                if has_full_attention
                else "use_reentrant=True cuts the gradient through the memory"
            )
            remedy = "" if has_full_attention else ', call gradient_checkpointing_enable({"use_reentrant": False})'
            raise ValueError(
                f"gradient checkpointing in training does not go with this cache: {reason}. Pass use_cache=False and no "
                f"{CACHE}{remedy}, or call gradient_checkpointing_disable()."
            )
    return cache


def key_value_cache(model, given, use_cache: bool | None) -> Cache | None:
    """The cache of one call of a model without memory, or `None`: the given one, checked, or a new one.

    Raises:
        ValueError: `given` is no cache of keys and values, or keeps fewer of them than this model's heads see; or gradient
            checkpointing would run layers a second time.
    """
    config = model.config
    cache = DynamicCache(config=config) if use_cache and given is None else given
    remedy = "Leave it out with use_cache=True, or pass DynamicCache(config=model.config)."
    if cache is not None and (not isinstance(cache, Cache) or isinstance(cache, InfiniCache)):
        raise ValueError(
            f"{CACHE} must be a transformers cache of keys and values, got {type(given).__name__}: this model has "
            f"no memory. {remedy}"
        )
    for layer in () if cache is None else cache.layers:
        kept = getattr(layer, "sliding_window", None)
        if kept is not None and (config.sliding_window is None or kept < config.sliding_window):
            seen = "everything before" if config.sliding_window is None else f"{config.sliding_window} tokens"
            raise ValueError(f"this cache keeps a window of {kept} tokens, and this model's tokens see {seen}. {remedy}")
    if cache is not None and checkpoints_gradients(model):
        raise ValueError(
            "gradient checkpointing in training does not go with a cache: layers would append their keys and values twice. "
            f"Pass use_cache=False and no {CACHE}, or call gradient_checkpointing_disable()."
        )
    return cache


def checkpoints_gradients(model) -> bool:
    """Whether blocks of the model are run a second time in the backward pass of this call."""
    if not (torch.is_grad_enabled() and model.training):
        return False
    return any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


def counted_positions(layout: Layout, cache: InfiniCache | None) -> Tensor:
    """`[batch or 1, tokens]`: positions that continue from the last one, for a call without positions. Positions given in
    earlier calls may have gaps."""
    state = None if cache is None else cache.first_state()
    if state is None:
        return layout.positions
    return layout.positions + (state.last_position + 1 - state.tokens_seen).unsqueeze(1)


def check_inputs(input_ids, inputs_embeds) -> Tensor:
    """The one of the two that is given, or a ValueError unless there is one, with a token in it."""
    if (input_ids is None) == (inputs_embeds is None):
        raise ValueError("give exactly one of input_ids and inputs_embeds.")
    given = inputs_embeds if input_ids is None else input_ids
    shape = list(given.shape[:2])
    if not torch.compiler.is_compiling() and 0 in shape:
        raise ValueError(f"the input must be [batch, tokens] with a row and a token at least; got {shape}.")
    return given


def mask_of_call(attention_mask, batch: int, tokens: int, cache: InfiniCache | None):
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


def layout_of_call(
    config, embeddings: Tensor, attention_mask, position_ids, memory_mask, cache: InfiniCache | None, max_documents
) -> SegmentLayout:
    """The [`segment_layout`] of a model's call with these `embeddings` `[batch, tokens, width]`, once for all layers; of the
    mask, only the columns of this call may be given, or those of the past as well.

    Raises:
        ValueError: the mask or the positions do not go on from what the cache has read.
    """
    batch, tokens = embeddings.shape[:2]
    attention_mask = mask_of_call(attention_mask, batch, tokens, cache)
    check_continuation(position_ids, attention_mask, None if cache is None else cache.first_state())
    masks = {"attention_mask": attention_mask, "position_ids": position_ids, "memory_mask": memory_mask}
    state = None if cache is None else cache.state_of_call(batch, tokens, embeddings.device, **masks)
    options = {"state": state, "max_documents": max_documents, "device": embeddings.device}
    return segment_layout(batch, tokens, *config.window, **masks, **options)


def check_continuation(position_ids, attention_mask, state: InfiniState | None) -> None:
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
            f"model(ids, memory_mask=…, {CACHE}=cache) and go on from the cache."
        )
    given = bool_mask("memory_mask", given, read_back=not torch.compiler.is_compiling())
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


def full_attention_mask(
    layout: Layout, tokens: int, past: int, documents: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """The mask of the layers that keep full attention: causal, inside the document, without padding.

    Args:
        layout: of the new `tokens`; `past` columns came before.
        documents: `[batch, past]`, number of each past column's document, −1 for padding; `None`: all one document.

    Returns:
        `[batch or 1, 1, tokens, past + tokens]` bool, True = visible, or `None` where the kernel's own causal mask says the
        same; and the documents with the new columns.
    """
    device = layout.tokens_seen.device
    real, restart = layout.real, layout.restart
    columns = torch.arange(past + tokens, device=device)
    causal = columns <= torch.arange(past, past + tokens, device=device)[:, None]
    if documents is None and real is None:
        return (None if past == 0 or tokens == 1 else causal[None, None]), None
    batch = layout.tokens_seen.shape[0]
    old = torch.zeros(batch, past, dtype=torch.long, device=device) if documents is None else documents
    current = old.amax(1, keepdim=True).clamp(min=0) if past else old.new_zeros(batch, 1)
    new = current.expand(batch, tokens) if restart is None else current + restart.cumsum(1)
    new = new if real is None else torch.where(real, new, -1)
    documents = torch.cat([old, new], 1)
    mask = causal & (new.unsqueeze(2) == documents.unsqueeze(1))
    # Padding sees itself, because a row of the softmax needs something to see.
    own = columns == torch.arange(past, past + tokens, device=device)[:, None]
    return (mask | own).unsqueeze(1), documents


def kept_layers_masks(
    config, layout: Layout, cache: InfiniCache | None, states, dtype: torch.dtype
) -> dict[str, Tensor | None]:
    """The masks of the layers without a memory, by the type of layer: `[batch or 1, 1, tokens, keys]`, in the form that the
    model's attention implementation takes. Types of which no such layer is left get a mask of one number, so that nobody
    makes one that grows with the text.

    Args:
        states: of the call; they get the documents of its columns.
        dtype: of masks that are added to scores.
    """
    tokens, device = layout.positions.shape[1], layout.tokens_seen.device
    kinds = layer_kinds(config)
    kept = {kind for layer, kind in enumerate(kinds) if layer not in config.infini_layers}
    masks: dict[str, Tensor | None] = dict.fromkeys(kinds, torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device))
    if not kept:
        return masks
    past = 0 if cache is None else cache.get_seq_length()
    full, documents = full_attention_mask(layout, tokens, past, None if states is None else states.documents)
    if states is not None:
        states.documents = documents
    for kind in kept:
        mask = full
        if kind != "full_attention":
            columns = torch.arange(past + tokens, device=device)
            numbers = columns if documents is None else _numbers(documents)
            query, key = numbers[..., past:, None], numbers[..., None, :]
            if kind == "sliding_attention":
                near = columns[past:, None] - columns < config.sliding_window
            else:
                near = query // config.attention_chunk_size == key // config.attention_chunk_size
            mask = (columns <= columns[past:, None]) & near if mask is None else mask & near
            layer = next(layer for layer, other in enumerate(kinds) if other == kind and layer not in config.infini_layers)
            if cache is not None:
                keys, offset = cache.get_mask_sizes(tokens, layer)
                mask = mask[..., offset : offset + keys]
            mask = mask[None, None] if mask.dim() == 2 else mask
        masks[kind] = mask
    if config._attn_implementation != "eager":
        return masks
    for kind in kept:
        mask = masks[kind]
        if mask is None:
            mask = torch.ones(tokens, past + tokens, dtype=torch.bool, device=device).tril(past)[None, None]
        masks[kind] = torch.zeros(mask.shape, dtype=dtype, device=device).masked_fill(~mask, torch.finfo(dtype).min)
    return masks


def _numbers(documents: Tensor) -> Tensor:
    """`[batch, 1, columns]`: the number of each column's token within its document; `documents`: `[batch, columns]`, −1 for
    padding."""
    real = documents >= 0
    counted = real.cumsum(1)
    begins = real & (documents != torch.nn.functional.pad(documents.cummax(1).values[:, :-1], (1, 0), value=-1))
    return (counted - torch.where(begins, counted, 0).cummax(1).values).unsqueeze(1)
