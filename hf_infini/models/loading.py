"""A language model and its tokenizer from any folder: whole, and fitting each other, or a ValueError of one line."""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ..ops.checks import check_kinds
from .checkpoints import REMEDY, check_loaded, one_line


@check_kinds
def load_causal_lm(path: str | Path, **options) -> PreTrainedModel:
    """The causal language model of a folder or Hub name, with all of its weights: none is random but those of a memory that
    `options` add.

    Args:
        path: where the model is. Its code is not run, unless `trust_remote_code=True` is given.
        options: those of `AutoModelForCausalLM.from_pretrained`.

    Raises:
        ValueError: there is no such model, a file of it is damaged, or weights and configuration do not fit.
    """
    options = {"trust_remote_code": False} | options
    try:
        model, info = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True, **options)
        check_loaded(path, model, info)
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:  # nobody knows what all of transformers raises for what a file may hold
        raise _as_value_error(path, "model", error) from error
    return model


@check_kinds
def load_tokenizer(path: str | Path, model: PreTrainedModel | None = None, **options) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder or Hub name.

    Args:
        path: where the tokenizer is. Its code is not run, unless `trust_remote_code=True` is given.
        model: that is to read its ids. If its configuration has a `tokenizer_sha256`, [`fingerprint`] must give the same.
        options: those of `AutoTokenizer.from_pretrained`.

    Raises:
        ValueError: there is none, a file of it is damaged, or it is the tokenizer of another model.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, **{"trust_remote_code": False} | options)
    except Exception as error:  # those of its library have no class of their own
        raise _as_value_error(path, "tokenizer", error) from error
    # Without files, transformers makes one of special tokens only
    if tokenizer is None or len(tokenizer) <= len(tokenizer.all_special_ids):
        raise ValueError(f"{path} has no tokenizer: files are missing. Save it there, as it was when the model was trained.")
    if model is not None:
        _check_fit(path, tokenizer, model)
    return tokenizer


def _check_fit(path, tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> None:
    remedy = "Save the tokenizer there that the model was trained with."
    embeddings: Any = model.get_input_embeddings()
    rows = embeddings.weight.shape[0]
    if len(tokenizer) > rows:
        sizes = f"has {len(tokenizer)} tokens, and the model {rows}"
        raise ValueError(f"the tokenizer of {path} {sizes}: it is another's. {remedy}")
    recorded = getattr(model.config, "tokenizer_sha256", None)
    if recorded is not None and recorded != fingerprint(tokenizer):
        raise ValueError(
            f"the tokenizer of {path} is not the model's: its tokens have other ids than tokenizer_sha256 in config.json "
            f"says. {remedy}"
        )


def fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """The SHA-256 of a tokenizer's tokens and their ids; what tells tokenizers of the same size apart."""
    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()


def _as_value_error(path, what: str, error: Exception) -> ValueError:
    reason = one_line(error)
    if isinstance(error, (OSError, ValueError)) and str(path) in reason:
        return ValueError(reason)
    name = "" if isinstance(error, (OSError, ValueError)) else f"{type(error).__name__}: "
    return ValueError(f"the {what} of {path} cannot be loaded: {name}{reason} {REMEDY}.")
