"""How much memory the cache of a model takes, from its configuration alone."""

from typing import Any, NamedTuple

import torch
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedConfig

from ..cache.archive_files import archive_bytes
from ..cache.files import cache_bytes, dtype_of
from ..models.families import infini_class, infini_config
from ..models.patching import convert_config
from ..models.structure import attention_layers, decoder_of
from ..ops.checks import check_types
from ..options import check_number, key_heads, layer_kinds


class Estimate(NamedTuple):
    """Bytes that the cache of one sequence takes: `plain`, of the model with its own attention;
    `infini`, of constant size; and `archive`, that an archive takes on the disk or in host
    memory."""

    plain: int
    infini: int
    archive: int


class Weights(NamedTuple):
    """Bytes of a model's weights: `plain`, in the configuration's dtype; `four_bits`, with the
    matrices between embedding and head in 4 bits, in blocks of 64 numbers; `eight_bits`, with these
    in 8 (bitsandbytes)."""

    plain: int
    four_bits: int
    eight_bits: int


FOUR_BITS = 1 / 2 + 4 / 64  # bytes of a number: a float32 scale for each block


@check_types
def weight_bytes(config: PreTrainedConfig) -> Weights:
    """The bytes of the weights of a causal language model of this `config`; nothing is loaded."""
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config.get_text_config(decoder=True))
    size = dtype_of(config).itemsize
    head = model.get_output_embeddings()
    packed = [
        module.weight if type(module).__name__ == "Linear" else module.weight.T
        for module in model.modules()
        if type(module).__name__ in ("Linear", "Conv1D") and module is not head
    ]
    count = sum(weight.numel() for weight in model.parameters())
    inside = sum(weight.numel() for weight in packed)
    rows = sum(weight.shape[0] for weight in packed)  # of 8 bits, each with a float32 scale
    other = (count - inside) * size
    return Weights(count * size, int(other + inside * FOUR_BITS), other + inside + 4 * rows)


@check_types
def estimate(
    config: PreTrainedConfig,
    tokens: int,
    *,
    cache_tokens: int | None = None,
    archive: bool | str = True,
    **options,
) -> Estimate:
    """The bytes of the cache after so many tokens of one sequence, in the configuration's dtype.

    Args:
        config: of a plain model, or of one with a memory, which takes no options.
        tokens: of the sequence, at least 1.
        cache_tokens, options: as of [`patch_model`].
        archive: whether what is read is archived; "int8": in 8 bits, as of [`InfiniCache`].

    Raises:
        ValueError: options that no memory has, or of a model that has them already; or a model that
            cannot have a memory.
    """
    check_number("tokens", tokens, {"at_least": 1})
    if not hasattr(config, "infini_layers"):
        config = config.get_text_config(decoder=True)
        with_memory = infini_config(type(config))
        with torch.device("meta"):  # its modules, without weights: an encoder has others
            base = decoder_of(AutoModel.from_config(config))
        for attention in attention_layers(base):
            infini_class(type(attention))
        config = convert_config(config, with_memory, cache_tokens, **options)
    elif options or cache_tokens is not None:
        raise ValueError(
            f"this {type(config).__name__} has the options of its memory: leave out "
            f"{', '.join([*options] or ['cache_tokens'])}."
        )
    dtype = dtype_of(config)
    heads, *widths = key_heads(config)
    window = (
        getattr(config, "sliding_window", None)
        or getattr(config, "attention_chunk_size", None)
        or tokens
    )
    # With the token of the next call, what is held of a sliding window is the window
    held = [
        tokens if kind == "full_attention" else min(tokens, window - 1)
        for kind in layer_kinds(config)
    ]
    of_layers = [heads * sum(widths) * count * dtype.itemsize for count in held]
    kept = sum(
        of_layer for layer, of_layer in enumerate(of_layers) if layer not in config.infini_layers
    )
    beside = archive_bytes(config, tokens, archive)
    return Estimate(sum(of_layers), kept + cache_bytes(config), beside)
