"""What a conversion goes on from: the adapter of an earlier one, or the mean of several.

The mean of adapters of which one began with the other, or all with the same, can keep what each has learned ("model soups",
Wortsman et al. 2022, arXiv 2203.05482).
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers.utils import cached_file

from cli import UserError
from hf_infini import load_adapter
from hf_infini.layers.memory_layer import PARAMETERS
from hf_infini.models.adapter import LORA, LORA_WEIGHTS, RECORD, WEIGHTS, read_record, restore_adapter
from hf_infini.models.structure import attention_layers, decoder_of
from support.stages import read_json

CLOSED = -1000.0  # the gate of a layer that has its window only: its sigmoid is 0
FREE = "segment_length"  # the option of a memory on which no parameter depends


def options_of(paths: Sequence[str]) -> dict:
    """The options of [`hf_infini.patch_model`] with which these adapters were saved, the first one's `FREE`.

    Raises UserError where one is missing or damaged, or they differ in more than that."""
    try:
        first, *others = [read_record(path) for path in paths]
        loras = [{name: lora_of(path).get(name) for name in ("r", "lora_alpha")} for path in paths]
    except (OSError, ValueError) as error:
        raise UserError(f"--start: {error}") from error
    for path, record, lora in zip(paths[1:], others, loras[1:], strict=True):
        if record["model"] != first["model"]:
            raise UserError(f"--start: {path} and {paths[0]} belong to different models: only adapters of one have a mean")
        if lora != loras[0]:
            raise UserError(f"--start: the LoRA of {path} is {lora}, and that of {paths[0]} {loras[0]}: they have no mean")
        for name in first["options"] | record["options"]:
            value, wanted = (each["options"].get(name) for each in (record, first))
            if name != FREE and value != wanted:
                raise UserError(
                    f"--start: {path} has {name}={value!r} and {paths[0]} {wanted!r}: only adapters with the same options "
                    "have a mean"
                )
    return first["options"]


def load_start(model, paths: Sequence[str]):
    """The plain model with the adapter of the first path, whose numbers are the means of all adapters'.

    Raises UserError where an adapter is of another model, damaged, or has other parameters than the first."""
    first, *others = paths
    try:
        model = load_adapter(model, first)
        learned = learned_parameters(model)
        layers = open_layers(model)
        for count, path in enumerate(others, 2):
            means = [parameter.detach().clone() for parameter in learned]
            restore_adapter(model, path)
            own = open_layers(model)
            if own != layers:
                raise ValueError(f"{path} has memories in the layers {own}, and {first} in {layers}: they have no mean")
            with torch.no_grad():
                for parameter, mean in zip(learned, means, strict=True):
                    parameter.copy_(torch.lerp(mean, parameter, 1 / count))
    except (OSError, ValueError) as error:
        raise UserError(f"--start: {error}") from error
    return model


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
