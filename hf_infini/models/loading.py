"""A language model and its tokenizer from any folder: whole, and fitting each other."""

import hashlib
import json
from pathlib import Path
from typing import Any

from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ..layers.memory_layer import PARAMETERS, memory_layers


def load_causal_lm(path: str | Path, **options) -> PreTrainedModel:
    """The causal language model of a folder or Hub name, with the options and errors of
    `from_pretrained`. Its code is not run, unless `trust_remote_code=True` is given. ValueError
    where weights other than those of a memory are missing."""
    options = {"trust_remote_code": False, "output_loading_info": True} | options
    model, info = AutoModelForCausalLM.from_pretrained(path, **options)
    new = tuple(f"{layer}.{name}" for layer in memory_layers(model) for name in PARAMETERS)
    missing = sorted(name for name in info["missing_keys"] if not name.startswith(new))
    if missing:  # transformers randomly initialises them
        raise ValueError(
            f"the weights of {path} are incomplete: {len(missing)} tensors, such as "
            f"{missing[0]}, are missing."
        )
    return model


def load_tokenizer(
    path: str | Path, model: PreTrainedModel | None = None, **options
) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder or Hub name, with the options and errors of `from_pretrained`. Its
    code is not run, unless `trust_remote_code=True` is given. ValueError where there is none, or
    where it is not that of the `model` that is to read its ids: if the configuration has a
    `tokenizer_sha256`, [`fingerprint`] must give the same."""
    tokenizer = AutoTokenizer.from_pretrained(path, **{"trust_remote_code": False} | options)
    # that transformers makes without files
    if tokenizer is None or len(tokenizer) <= len(tokenizer.all_special_ids):
        raise ValueError(
            f"{path} has no tokenizer: files are missing. Save it there, as it was "
            "when the model was trained."
        )
    if model is not None:
        embeddings: Any = model.get_input_embeddings()
        rows, recorded = len(embeddings.weight), getattr(model.config, "tokenizer_sha256", None)
        if len(tokenizer) > rows or recorded not in (None, fingerprint(tokenizer)):
            raise ValueError(
                f"the tokenizer of {path} is not the model's: it has {len(tokenizer)} tokens, the "
                f"model {rows}, or their ids are others than tokenizer_sha256 in config.json "
                "says. Save the one that the model was trained with."
            )
    return tokenizer


def fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """The SHA-256 of a tokenizer's tokens and their ids; what tells tokenizers of the same size
    apart."""
    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()
