"""What a model is given to be inspected: texts, ids or tensors by name, made the same form and checked."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ...ops.checks import check_shapes


def model_inputs(inputs, tokenizer, position_ids: Tensor | None) -> dict[str, Tensor]:
    """`input_ids` `[batch, tokens]` and, where there are any, `attention_mask` and `position_ids`."""
    if isinstance(inputs, str):
        inputs = [inputs]
    if isinstance(inputs, Tensor):
        given = {"input_ids": inputs}
    elif isinstance(inputs, Mapping):
        given = dict(inputs)
        unknown = set(given) - {"input_ids", "attention_mask", "position_ids"}
        if unknown or "input_ids" not in given:
            raise ValueError(f"inputs by name are input_ids, attention_mask and position_ids; got {', '.join(given)}.")
    elif isinstance(inputs, Sequence) and inputs and all(isinstance(text, str) for text in inputs):
        given = _encode(list(inputs), tokenizer)
    else:
        raise ValueError(
            f"inputs must be text, texts, ids [batch, tokens] or a dict of tensors; got {type(inputs).__name__}."
        )
    if position_ids is not None:
        given["position_ids"] = position_ids
    ids = given["input_ids"]
    if ids.dim() != 2 or ids.is_floating_point() or ids.is_complex() or not ids.numel():
        raise ValueError(
            f"token ids must be whole numbers [batch, tokens], one or more; got {list(ids.shape)}, {ids.dtype}."
        )
    mask, (batch, tokens) = given.get("attention_mask"), ids.shape
    check_shapes(batch, tokens, mask, None, given.get("position_ids"))
    if mask is not None and "position_ids" not in given and not bool(mask.all()):
        given["position_ids"] = (mask.long().cumsum(-1) - 1).clamp(min=0)
    return given


def _encode(texts: list[str], tokenizer) -> dict[str, Tensor]:
    """Ids of the texts, padded to the longest on the tokenizer's side, with a mask where anything was padded."""
    if tokenizer is None:
        raise ValueError("texts need the model's tokenizer: inspect_attention(model, text, tokenizer).")
    rows = [torch.tensor(row, dtype=torch.long) for row in tokenizer(texts, add_special_tokens=False)["input_ids"]]
    if not all(map(len, rows)):
        raise ValueError("every text needs a token; one of them is empty.")
    options = {"batch_first": True, "padding_side": tokenizer.padding_side}
    # Padding is masked, so that any id will do where a tokenizer has none for it
    ids = torch.nn.utils.rnn.pad_sequence(rows, padding_value=tokenizer.pad_token_id or 0, **options)
    if len(set(map(len, rows))) == 1:
        return {"input_ids": ids}
    return {"input_ids": ids, "attention_mask": torch.nn.utils.rnn.pad_sequence(list(map(torch.ones_like, rows)), **options)}


def check_positions(base, given: dict) -> None:
    """Plain GPT-2 answers a position that it does not have with an index error; the other models say what is wrong."""
    positions = given.get("position_ids")
    furthest = given["input_ids"].shape[1] - 1 if positions is None else int(positions.max())
    if base.config.model_type == "gpt2" and furthest >= base.config.n_positions:
        raise ValueError(
            f"position {furthest} is beyond this model's {base.config.n_positions} learned positions (n_positions): "
            "shorten the input."
        )
