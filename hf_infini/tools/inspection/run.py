"""Runs a model once and collects what its heads did."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...compat.execution_device import device_of
from ...layers.memory_layer import in_evaluation
from ...models.scratch.modeling import CausalMHAModel
from ...models.structure import attention_layers, decoder_of
from ...ops.checks import check_kinds
from ...options import layer_kinds
from .heads import Inspection, LayerInspection
from .labels import token_texts
from .parts import caught_parts


@torch.no_grad()
@check_kinds
def inspect_attention(
    model,
    inputs: str | Tensor | Mapping[str, Tensor],
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    layers: Sequence[int] | None = None,
) -> Inspection:
    """Runs a model once, in evaluation mode and without a cache, and returns what every head of it did. The model is left as
    it was.

    Args:
        model: a decoder that [`hf_infini.patch_model`] takes, with a memory (in all layers or some) or without, or a
            `causal_mha` model; with any head or none; PEFT's wrapper around one.
        inputs: a text (which needs the tokenizer, and no special tokens are added), token ids `[batch, tokens]` without
            padding, or what the model takes by name: `input_ids` with `position_ids` `[batch, tokens]`; where these go back
            to 0, a new document begins (packed rows).
        tokenizer: makes the labels readable; without it they are the ids.
        layers: numbers of the layers to keep; `None`: all. A layer takes 12 · batch · heads · tokens² bytes and more.

    Raises:
        ValueError: a model of another kind, no such layer, a text without a tokenizer, or padded rows.
    """
    base, attentions = _attention_modules(model)
    wanted = list(range(len(attentions))) if layers is None else sorted(set(layers))
    if not set(wanted) <= set(range(len(attentions))):
        raise ValueError(f"layers must be numbers from 0 to {len(attentions) - 1}; got {wanted}.")
    given = _model_inputs(inputs, tokenizer)
    given = {name: tensor.to(device_of(base.get_input_embeddings())) for name, tensor in given.items()}
    watched = {number: attention for number in wanted if (attention := attentions[number]) is not None}
    with in_evaluation(base), caught_parts(base.config, watched) as parts:
        base(**given, use_cache=False)
    found = {number: _layer_inspection(number, parts.get(number), base.config) for number in wanted}
    ids = given["input_ids"].cpu()
    texts = [token_texts(tokenizer, row) for row in ids.tolist()]
    return Inspection(ids, texts, found, Path(base.config.name_or_path or type(base).__name__).name)


def _attention_modules(model) -> tuple[PreTrainedModel, list[nn.Module | None]]:
    """The stack of blocks inside the model, without its head, and the attention of each; `None` for a block without."""
    base = next((module for module in model.modules() if isinstance(module, CausalMHAModel)), None)
    if base is not None:
        return base, [getattr(block, "attn", None) for block in base.h]
    base = decoder_of(model)
    return base, [*attention_layers(base)]


def _model_inputs(inputs, tokenizer) -> dict[str, Tensor]:
    """`input_ids` `[batch, tokens]` and perhaps `position_ids`."""
    if isinstance(inputs, str):
        if tokenizer is None:
            raise ValueError("a text needs the model's tokenizer: inspect_attention(model, text, tokenizer).")
        inputs = tokenizer(inputs, add_special_tokens=False, return_tensors="pt")
    given = {"input_ids": inputs} if isinstance(inputs, Tensor) else inputs
    if "attention_mask" in given and not bool(given["attention_mask"].all()):
        raise ValueError("only rows without padding can be inspected: give texts of different lengths one after the other.")
    return {name: given[name] for name in ("input_ids", "position_ids") if name in given}


def _layer_inspection(number: int, parts: dict[str, Tensor] | None, config) -> LayerInspection:
    if parts is None:
        return LayerInspection(number, "none")
    kind = "global" if layer_kinds(config)[number] == "full_attention" else "local"
    if config.model_type == "causal_mha":
        kind = config.attention
    return LayerInspection(number, "infini" if "gate" in parts else kind, parts)
