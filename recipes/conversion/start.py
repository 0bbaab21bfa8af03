"""What a conversion goes on from: the adapter of an earlier one, or the mean of several.

The mean of adapters of which one began with the other, or all with the same, can keep what each has learned ("model soups",
Wortsman et al. 2022, arXiv 2203.05482).
"""

from collections.abc import Sequence

import torch

from cli import UserError
from hf_infini import load_adapter
from hf_infini.families import attention_layers, decoder_of
from hf_infini.memory_adapter import read_record, restore_adapter
from hf_infini.memory_layer import PARAMETERS

CLOSED = -1000.0  # the gate of a layer that has its window only: its sigmoid is 0
FREE = "segment_length"  # the option of a memory on which no parameter depends


def options_of(paths: Sequence[str]) -> dict:
    """The options of [`hf_infini.patch_model`] with which these adapters were saved, the first one's `FREE`.

    Raises UserError where one is missing or damaged, or they differ in more than that."""
    try:
        first, *others = [read_record(path) for path in paths]
    except ValueError as error:
        raise UserError(f"--start: {error}") from error
    for path, record in zip(paths[1:], others, strict=True):
        if record["model"] != first["model"]:
            raise UserError(f"--start: {path} and {paths[0]} belong to different models: only adapters of one have a mean")
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
        learned = [
            parameter
            for name, parameter in model.named_parameters()
            if "lora_" in name or not set(PARAMETERS).isdisjoint(name.split("."))
        ]
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
    except ValueError as error:
        raise UserError(f"--start: {error}") from error
    return model


def open_layers(model) -> list[int]:
    """Numbers of the layers whose memory is read."""
    layers = attention_layers(decoder_of(model))
    return [number for number in model.config.infini_layers if (layers[number].gate.weight > CLOSED).any()]
