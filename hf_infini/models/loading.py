"""A language model and its tokenizer from any folder, also of a GGUF: whole, and fitting each
other."""

import hashlib
import importlib.util
import json
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ..cache.files import dtype_of
from ..layers.memory_layer import PARAMETERS, gates_of, memory_layers

GGUF = ".gguf"
# How a tokenizer reads text in which nothing is a special token
PLAIN_TEXT: dict[str, Any] = {
    "add_special_tokens": False,
    "split_special_tokens": True,
    "verbose": False,
}


def find_folder(path: str | Path, what: str = "folder") -> Path | None:
    """The folder or file of a path, or `None` where it is a name on the Hub. FileNotFoundError,
    which calls it `what`, where it is neither: what begins as a path does, can be no name on the
    Hub, or would be in a folder that is there."""
    name, place = str(path), Path(path).expanduser()
    if name and place.exists():
        return place
    parent = place.parent
    try:
        validate_repo_id(name)
        begun = name.startswith(("/", ".", "~")) or (parent != Path() and parent.exists())
    except HFValidationError:
        begun = True
    if begun:
        raise FileNotFoundError(
            f"no such {what}: {name or repr(name)}"
            + ("" if place.is_absolute() else f" (in {Path.cwd()})")
            + ("" if parent.exists() else f"; there is no {parent} either")
        )
    return None


def model_files(path: str | Path) -> dict[str, Any]:
    """What `from_pretrained` takes for a folder, a name on the Hub, a GGUF file, or a folder
    that has one and no other weights. FileNotFoundError as [`find_folder`]; ValueError where
    a folder has several, and ModuleNotFoundError where what reads them is not installed.
    `path`: any of them."""
    place = find_folder(path, "model folder")
    if place is None:
        return {"pretrained_model_name_or_path": str(path)}
    if place.is_dir():
        found = sorted(place.glob(f"*{GGUF}"))
        if not found or any(place.glob("*.safetensors")) or any(place.glob("*.bin")):
            return {"pretrained_model_name_or_path": str(place)}
        if len(found) > 1:
            names = ", ".join(file.name for file in found)
            raise ValueError(f"{path} has several GGUF files: name one of {names} as the model.")
        [place] = found
    if place.suffix.lower() != GGUF:
        raise ValueError(
            f"{path} is a file: give the folder of a model, which has its config.json, or a GGUF "
            "file."
        )
    if importlib.util.find_spec("gguf") is None:
        raise ModuleNotFoundError(
            f"{path} is a GGUF file, which the package gguf reads: pip install gguf", name="gguf"
        )
    return {"pretrained_model_name_or_path": str(place.parent), "gguf_file": place.name}


def load_config(path: str | Path) -> PreTrainedConfig:
    """The configuration of a model; errors as of [`model_files`] and `from_pretrained`. `path`:
    as of [`model_files`]."""
    return AutoConfig.from_pretrained(**model_files(path), trust_remote_code=False)


def load_causal_lm(path: str | Path, **options) -> PreTrainedModel:
    """The causal language model of a folder, a Hub name or a GGUF file ([`model_files`]), with
    the options and errors of `from_pretrained`. Its code is not run, unless
    `trust_remote_code=True` is given. The weights of a GGUF become plain ones, in float32 if
    no other `dtype` is given. ValueError where weights have other shapes than the
    configuration says, or are not finite, or others than those of a memory are missing.
    `path`: as of [`model_files`]."""
    options = {"trust_remote_code": False, "output_loading_info": True} | options
    options = {"ignore_mismatched_sizes": True} | options  # its error says which in a log only
    files = model_files(path)
    model, info = AutoModelForCausalLM.from_pretrained(**files, **options)
    if "gguf_file" in files:  # the weights are plain numbers now, and are saved as such
        model.hf_quantizer = None
        vars(model.config).pop("quantization_config", None)
    for name, found, wanted in sorted(info["mismatched_keys"]):
        raise ValueError(
            f"the weights of {path} are not those of the configuration: {name} is {[*found]}, and "
            f"must be {[*wanted]}. Use a config.json that was saved with the weights."
        )
    new = tuple(f"{layer}.{name}" for layer in memory_layers(model) for name in PARAMETERS)
    missing = sorted(name for name in info["missing_keys"] if not name.startswith(new))
    if missing:  # transformers randomly initialises them
        raise ValueError(
            f"the weights of {path} are incomplete: {len(missing)} tensors, such as "
            f"{missing[0]}, are missing."
        )
    return with_finite_weights(model, path)


def few_bits(path: str | Path, bits: int, dtype: str, device: torch.device | str) -> dict[str, Any]:
    """Options of [`load_causal_lm`] with which bitsandbytes brings the matrices of a plain model,
    but for embedding and head, into few bits while they are loaded.

    Args:
        path: as of [`model_files`].
        bits: of a weight: 4 (NF4, in blocks of 64) or 8 (LLM.int8).
        dtype: of all else, by its name; `"auto"`: that of the model's configuration.
        device: where the weights are brought.

    Raises:
        ModuleNotFoundError: bitsandbytes, or accelerate, is not installed.
        ValueError: a GGUF file, or a model whose weights are quantized already.
    """
    for name in ("bitsandbytes", "accelerate"):
        if importlib.util.find_spec(name) is None:
            needed = "which bring weights into few bits: pip install bitsandbytes accelerate"
            raise ModuleNotFoundError(
                f"there is no {name} of the two packages, {needed}", name=name
            )
    if "gguf_file" in model_files(path):
        raise ValueError(
            f"{path} is a GGUF file, which is read into plain weights: give the model's own folder "
            f"or name for weights of {bits} bits, or leave --load-in-{bits}bit out."
        )
    config = load_config(path)
    if (own := getattr(config, "quantization_config", None)) is not None:
        kind = own.get("quant_method") if isinstance(own, dict) else own.quant_method
        raise ValueError(
            f"the weights of {path} are quantized already ({getattr(kind, 'value', kind)}), and "
            f"are loaded as they are: leave --load-in-{bits}bit out."
        )
    computed = dtype_of(config) if dtype == "auto" else getattr(torch, dtype)
    four = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": computed} if bits == 4 else {}
    how = BitsAndBytesConfig(**{f"load_in_{bits}bit": True}, **four)
    return {"quantization_config": how, "device_map": {"": device}}


def with_finite_weights(model, path: str | Path):
    """The model, whose weights came from `path`; ValueError where one is NaN or infinite: what it
    computes would mean nothing. A gate may be −∞, which closes it for good. Of weights that are no
    plain numbers, quantized or elsewhere, nothing is known."""
    gates = {id(parameter) for gate in gates_of(model).values() for parameter in gate.parameters()}
    for name, parameter in model.named_parameters():
        weight = parameter.data
        plain = type(weight) is Tensor and weight.is_floating_point() and weight.itemsize > 1
        if not plain or weight.is_meta or not weight.numel():
            continue
        low, high = weight.aminmax()  # both NaN where there is one
        closed = id(parameter) in gates and high < torch.inf
        if not (low.isfinite() and high.isfinite() or closed):
            raise ValueError(
                f"the weights of {path} are damaged, or their training diverged: {name} has "
                "numbers that are not finite. Use another copy, or an earlier checkpoint."
            )
    return model


def load_tokenizer(
    path: str | Path, model: PreTrainedModel | None = None, **options
) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder, Hub name or GGUF file ([`model_files`]), with the options and
    errors of `from_pretrained`. Its code is not run, unless `trust_remote_code=True` is
    given. ValueError where there is none, or where it is not that of the `model` that is to
    read its ids: if the configuration has a `tokenizer_sha256`, [`fingerprint`] must give the
    same. `path`: as of [`model_files`]."""
    options = {"trust_remote_code": False} | options
    tokenizer = AutoTokenizer.from_pretrained(**model_files(path), **options)
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


def opening(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The ids that a `tokenizer` puts in front of every text, such as Gemma's `<bos>`, without
    which such a model is at a loss; of most none."""
    ids = tokenizer("", verbose=False)["input_ids"]
    return ids[:1] if ids[:1] == [tokenizer.bos_token_id] else []


def fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """The SHA-256 of a tokenizer's tokens and their ids; what tells tokenizers of the same size
    apart."""
    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()
