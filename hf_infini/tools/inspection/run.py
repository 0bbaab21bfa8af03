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
from ...ops.checks import check_kinds, check_shapes
from ...options import context_limit, layer_kinds
from .heads import DIMENSIONS, Inspection, LayerInspection, NamedTensor, Prediction
from .labels import token_texts
from .parts import caught_parts

INPUTS = ("input_ids", "attention_mask", "position_ids")
LIKELIEST = 5


@torch.no_grad()
@check_kinds
def inspect_attention(
    model,
    inputs: str | Sequence[str] | Tensor | Mapping[str, Tensor],
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    position_ids: Tensor | None = None,
    layers: Sequence[int] | None = None,
) -> Inspection:
    """Runs a model once, in evaluation mode and without a cache, and returns what every head of it did. The model is left as
    it was.

    Args:
        model: a decoder that [`hf_infini.patch_model`] takes, with a memory (in all layers or some) or without, or a
            `causal_mha` model; with any head or none; PEFT's wrapper around one.
        inputs: a text or several (these need the tokenizer, which adds no special tokens, and are padded on its side), token
            ids `[batch, tokens]`, or what the model takes by name: `input_ids` with `attention_mask` `[batch, tokens]`
            (1 = real) and `position_ids`, where needed.
        tokenizer: makes the labels readable; without it they are the ids.
        position_ids: `[batch, tokens]`; where they go back to 0, a new document begins (packed rows). By default, the real
            tokens of a padded row are counted; else it is left to the model.
        layers: numbers of the layers to keep; `None`: all. A layer takes 12 · batch · heads · tokens² bytes and more.

    Raises:
        ValueError: a model of another kind, no such layer, or inputs that do not fit.
    """
    if hasattr(model, "get_base_model"):  # PEFT's wrapper
        model = model.get_base_model()
    base, attentions = _attention_modules(model)
    wanted = list(range(len(attentions))) if layers is None else sorted(set(layers))
    if not set(wanted) <= set(range(len(attentions))):
        raise ValueError(f"layers must be numbers from 0 to {len(attentions) - 1}; got {wanted}.")
    given = _model_inputs(inputs, tokenizer, position_ids, context_limit(base.config))
    ids, mask = given["input_ids"].cpu(), given.get("attention_mask")
    real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.cpu().bool()
    given = {name: tensor.to(device_of(base.get_input_embeddings())) for name, tensor in given.items()}
    has_head = model.get_output_embeddings() is not None
    watched = {number: attention for number in wanted if (attention := attentions[number]) is not None}
    with in_evaluation(model), caught_parts(base.config, watched) as parts:
        output = (model if has_head else base)(**given, use_cache=False)
    found = {number: _layer_inspection(number, parts.get(number), base.config, real) for number in wanted}
    texts = [token_texts(tokenizer, row[kept].tolist()) for row, kept in zip(ids, real, strict=True)]
    predictions = _predictions(output.logits, ids, real, tokenizer) if has_head else None
    name = Path(base.config.name_or_path or "").name or type(model).__name__
    return Inspection(ids, real, texts, found, name, predictions)


def _attention_modules(model) -> tuple[PreTrainedModel, list[nn.Module | None]]:
    """The stack of blocks inside the model, without its head, and the attention of each; `None` for a block without."""
    base = getattr(model, "transformer", model)
    if isinstance(base, CausalMHAModel):
        return base, [getattr(block, "attn", None) for block in base.h]
    try:
        base = decoder_of(model)
        return base, [*attention_layers(base)]
    except (AttributeError, ValueError) as error:
        raise ValueError(
            f"cannot inspect a {type(model).__name__}: give a decoder that patch_model takes, or a causal_mha model."
        ) from error


def _model_inputs(inputs, tokenizer, position_ids: Tensor | None, limit: int | None) -> dict[str, Tensor]:
    """`input_ids` `[batch, tokens]` and, where there are any, `attention_mask` and `position_ids`; `limit`: how many
    positions the model has learned."""
    if isinstance(inputs, Tensor):
        given = {"input_ids": inputs}
    elif isinstance(inputs, Mapping):
        given = dict(inputs)
    else:
        given = _encode([inputs] if isinstance(inputs, str) else inputs, tokenizer)
    if not {"input_ids"} <= set(given) <= set(INPUTS):
        raise ValueError(f"inputs by name are {', '.join(INPUTS)}; got {', '.join(given)}.")
    if position_ids is not None:
        given["position_ids"] = position_ids
    ids, mask = given["input_ids"], given.get("attention_mask")
    if ids.dim() != 2 or ids.is_floating_point() or not ids.numel():
        raise ValueError(
            f"token ids must be whole numbers [batch, tokens], one or more; got {list(ids.shape)}, {ids.dtype}."
        )
    check_shapes(ids.shape[0], ids.shape[1], mask, None, given.get("position_ids"))
    if mask is not None and not mask.bool().any(1).all():
        raise ValueError("every row needs a token, and the attention_mask of one has zeros only.")
    if mask is not None and "position_ids" not in given and not bool(mask.all()):
        given["position_ids"] = (mask.long().cumsum(-1) - 1).clamp(min=0)
    furthest = int(given["position_ids"].max()) if "position_ids" in given else ids.shape[1] - 1
    if limit is not None and furthest >= limit:
        raise ValueError(f"position {furthest} is beyond this model's {limit} learned positions: shorten the input.")
    return given


def _encode(texts: Sequence[str], tokenizer) -> dict[str, Tensor]:
    """Ids of the texts, padded to the longest on the tokenizer's side, with a mask where anything was padded."""
    if tokenizer is None:
        raise ValueError("texts need the model's tokenizer: inspect_attention(model, text, tokenizer).")
    rows = [torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=torch.long) for text in texts]
    if not rows or not all(map(len, rows)):
        raise ValueError("give a text or several, and a token in each; one of them is empty.")
    options = {"batch_first": True, "padding_side": tokenizer.padding_side}
    # Padding is masked, so that any id will do where a tokenizer has none for it
    ids = nn.utils.rnn.pad_sequence(rows, padding_value=tokenizer.pad_token_id or 0, **options)
    if len(set(map(len, rows))) == 1:
        return {"input_ids": ids}
    return {"input_ids": ids, "attention_mask": nn.utils.rnn.pad_sequence([*map(torch.ones_like, rows)], **options)}


def _layer_inspection(number: int, parts: dict[str, Tensor] | None, config, real: Tensor) -> LayerInspection:
    """The named parts of a layer; what padding (`real` `[batch, tokens]` False) did is left out: it sees nothing, and its
    weights and heads are 0."""
    if parts is None:
        return LayerInspection(number, "none")
    named, padding = {}, ~real[:, None, :, None]
    for name, tensor in parts.items():
        if tensor.is_floating_point():
            tensor = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
        if name in ("scores", "weights", "heads"):
            tensor = tensor.masked_fill(padding, float("-inf") if name == "scores" else 0)
        named[name] = NamedTensor(tensor, DIMENSIONS[name])
    kind = "global" if layer_kinds(config)[number] == "full_attention" else "local"
    if config.model_type == "causal_mha":
        kind = config.attention
    return LayerInspection(number, "infini" if "gate" in parts else kind, named)


def _predictions(logits: Tensor, ids: Tensor, real: Tensor, tokenizer) -> list[list[Prediction]]:
    """For each row, a prediction after each of its real tokens; `logits`: `[batch, tokens, vocabulary]`."""
    found = []
    for row, tokens, kept in zip(logits.cpu(), ids, real, strict=True):
        tokens, likely = tokens[kept], row[kept].float().softmax(-1)
        best = likely.topk(min(LIKELIEST, likely.shape[-1]))
        following = [*likely[:-1].gather(1, tokens[1:, None]).flatten().tolist(), None]
        places = [token_texts(tokenizer, numbers) for numbers in best.indices.tolist()]
        rows = zip(places, best.values.tolist(), following, strict=True)
        found.append([Prediction(list(zip(texts, values, strict=True)), after) for texts, values, after in rows])
    return found
