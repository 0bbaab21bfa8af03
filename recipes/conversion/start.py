"""What a conversion goes on from: the adapter of an earlier one."""

import hashlib
from pathlib import Path

from torch import Tensor
from transformers.utils import cached_file

from cli import UserError
from hf_infini import load_adapter
from hf_infini.layers.memory_layer import PARAMETERS
from hf_infini.models.adapter import LORA, LORA_WEIGHTS, RECORD, WEIGHTS, read_record
from hf_infini.models.structure import attention_layers, decoder_of
from support.stages import read_json

CLOSED = -1000.0  # the gate of a layer that has its window only: its sigmoid is 0
FREE = "segment_length"  # the option of a memory on which no parameter depends


def options_of(path: str) -> dict:
    """The options of [`hf_infini.patch_model`] with which an adapter was saved; UserError where it is missing or damaged."""
    try:
        return read_record(path)["options"]
    except (OSError, ValueError) as error:
        raise UserError(f"--start: {error}") from error


def load_start(model, path: str):
    """The plain model with an adapter; UserError where it is of another model or damaged."""
    try:
        return load_adapter(model, path)
    except (OSError, ValueError) as error:
        raise UserError(f"--start: {error}") from error


def lora_of(path: str) -> dict:
    """PEFT's configuration of an adapter's LoRA; empty where it has none."""
    file = cached_file(path, LORA, _raise_exceptions_for_missing_entries=False)
    return {} if file is None else read_json(Path(file))


def fingerprint_of(path: str) -> str:
    """A hash of an adapter's files: another one under the same path has another."""
    digest = hashlib.sha256()
    for name in (RECORD, WEIGHTS, LORA, LORA_WEIGHTS):
        file = cached_file(path, name, _raise_exceptions_for_missing_entries=False)
        digest.update(b"" if file is None else Path(file).read_bytes())
    return digest.hexdigest()[:16]


def learned_parameters(model) -> list[Tensor]:
    """Those of the memories and of the LoRA."""
    named = model.named_parameters()
    return [tensor for name, tensor in named if "lora_" in name or not set(PARAMETERS).isdisjoint(name.split("."))]


def open_layers(model) -> list[int]:
    """Numbers of the layers whose memory is read."""
    layers = attention_layers(decoder_of(model))
    return [number for number in model.config.infini_layers if (layers[number].gate.weight > CLOSED).any()]
