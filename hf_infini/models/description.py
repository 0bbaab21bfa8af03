"""What tells one plain model from another, whatever dtype it was loaded in, cheaply: a few rows of
its weights are read. Of the same model with quantized or fine-tuned weights it says that they
differ a little."""

import hashlib
import re
import warnings
from collections.abc import Iterator, Mapping

import torch
from torch import nn

from ..compat.class_lookups import PREFIX
from ..layers.memory_layer import PARAMETERS
from .structure import decoder_layers, decoder_of, inside_of

# Entries of [`describe`], and their types; the last is missing where an earlier version wrote them
DESCRIPTION = {"model_type": str, "layers": int, "heads": int, "width": int}
DESCRIPTION |= {"weights": str, "signs": str, "layer_signs": dict}
SIGNS = 512  # of the embedding
LAYER_SIGNS, LAYER_ROWS = 32, 16  # of each matrix of a layer: sums of parts of so many rows
PIECE = f"[0-9a-f]{{{LAYER_SIGNS // 4}}}|-"  # of a layer, in hexadecimal
# Which share of signs may differ: of models that differ, half do; and what nobody needs to know
MOST, LITTLE = 0.3, 0.01


def describe(model) -> dict:
    """The type and sizes of a model; a hash of its first weights in bfloat16; and signs of sums of
    these and of the matrices of its layers, most of which are the same where weights are quantized.
    ValueError for a model that is no decoder, or has no weights yet."""
    inside = inside_of(model)
    layer_signs = _layer_signs(inside)
    weight = next(inside.get_input_embeddings().parameters())  # before those of PEFT
    if weight.device.type == "meta":
        raise ValueError("this model is on the meta device, and has no weights: load them first.")
    rows = weight[:1024].detach().to("cpu", torch.bfloat16).contiguous()
    sums = rows.float().flatten()[: rows.numel() // SIGNS * SIGNS].view(SIGNS, -1).sum(1)
    return {
        "model_type": inside.config.model_type.removeprefix(PREFIX),
        "layers": inside.config.num_hidden_layers,
        "heads": inside.config.num_attention_heads,
        "width": inside.config.hidden_size,
        "weights": hashlib.sha256(rows[:64].view(torch.uint8).numpy().tobytes()).hexdigest()[:16],
        "signs": "".join("1" if positive else "0" for positive in (sums > 0).tolist()),
        "layer_signs": layer_signs,
    }


def has_signs(description: Mapping) -> bool:
    """Whether the signs of a description that was read are as [`describe`] gives them."""
    of_layers = [*description.get("layer_signs", {}).values()]
    return bool(re.fullmatch(f"[01]{{{SIGNS}}}", description["signs"])) and all(
        type(text) is str
        and len(pieces := text.split(" ")) == description["layers"]
        and all(re.fullmatch(PIECE, piece) for piece in pieces)
        for text in of_layers
    )


def check_same(path, found: Mapping, wanted: Mapping) -> None:
    """ValueError where a model is `found` to be another than the `wanted` one of an adapter; a
    warning where weights differ a little. Both as of [`describe`]; `path`: of the adapter."""
    start = f"the adapter of {path} was trained with another model:"
    sizes = [name for name in found if name not in ("weights", "signs", "layer_signs")]
    if different := [name for name in sizes if found[name] != wanted[name]]:
        names = "; ".join(f"{name} is {found[name]!r}, not {wanted[name]!r}" for name in different)
        raise ValueError(f"{start} {names}.")
    same = found["weights"] == wanted["weights"]
    bits = int(found["signs"], 2) ^ int(wanted["signs"], 2)
    counts = {"the embedding": (0 if same else bits.bit_count(), SIGNS)}
    counts |= _layer_counts(found["layer_signs"], wanted.get("layer_signs", {}))
    others = [name for name, (different, of) in counts.items() if different > MOST * of]
    if others:
        more = f" and {len(others) - 3} more" if len(others) > 3 else ""
        raise ValueError(f"{start} its weights are others, those of {', '.join(others[:3])}{more}.")
    share = sum(different for different, _ in counts.values()) / sum(
        of for _, of in counts.values()
    )
    if not same or share > LITTLE:
        warnings.warn(
            f"the weights differ a little from those that the adapter of {path} was trained with "
            f"({share:.0%} of the signs that are compared), as those of a quantized or fine-tuned "
            "model do: nothing was measured with these.",
            stacklevel=3,
        )


@torch.no_grad()
def _layer_signs(model) -> dict[str, str]:
    """Of each matrix of the layers, by its name in them: for each layer the signs of sums of parts
    of some rows, in hexadecimal; "-" where it has none, or one of another form, as quantized."""
    layers = [layer for layer, _ in decoder_layers(decoder_of(model))]
    found: dict[str, list[str]] = {}
    for number, layer in enumerate(layers):
        for name, weight in _own_parameters(layer):
            plain = type(weight) is nn.Parameter and weight.is_floating_point()
            here = weight.numel() and weight.device.type != "meta"  # and not offloaded
            if not plain or not here or weight.dim() < 2 or weight.itemsize < 2:
                continue
            rows = weight.flatten(0, -2)
            some = torch.linspace(0, len(rows) - 1, min(LAYER_ROWS, len(rows))).long()
            # exact sums, of numbers that every dtype comes to
            numbers = rows[some.to(rows.device)].to("cpu", torch.bfloat16).double().flatten()
            sums = torch.stack([part.sum() for part in numbers.tensor_split(LAYER_SIGNS)])
            bits = "".join("1" if positive else "0" for positive in (sums > 0).tolist())
            of_layers = found.setdefault(name, ["-"] * len(layers))
            of_layers[number] = f"{int(bits, 2):0{LAYER_SIGNS // 4}x}"
    return {name: " ".join(of_layers) for name, of_layers in found.items()}


def _own_parameters(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters of a plain model's module, by their names in it: without those of a memory and
    of PEFT, which wraps a module and has it as `base_layer` or `original_module`."""
    for name in ("base_layer", "original_module"):
        module = getattr(module, name, module)
    own = PARAMETERS if hasattr(type(module), "add_memory_parameters") else ()
    for name, parameter in module.named_parameters(recurse=False):
        if name not in own:
            yield path + name, parameter
    for name, child in module.named_children():
        if name not in own:
            yield from _own_parameters(child, f"{path}{name}.")


def _layer_counts(found: Mapping, wanted: Mapping) -> dict[str, tuple[int, int]]:
    """How many signs of matrices that both have differ, of how many, by layer and by name."""
    counts: dict[str, tuple[int, int]] = {}
    for name in sorted(found.keys() & wanted.keys()):
        for number, sides in enumerate(zip(found[name].split(), wanted[name].split(), strict=True)):
            if "-" not in sides:
                bits = int(sides[0], 16) ^ int(sides[1], 16)
                for group in (f"layer {number}", f"{name} of all layers"):
                    different, of = counts.get(group, (0, 0))
                    counts[group] = different + bits.bit_count(), of + LAYER_SIGNS
    return counts
