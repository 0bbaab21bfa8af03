"""Whether what was loaded is whole.

transformers randomly initialises missing tensors, passes over unexpected ones, and takes any numbers.
"""

import json
import math
import re
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..layers.memory_layer import PARAMETERS, memory_layers

REMEDY = "Get the file again, or save the model again"
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def check_loaded(path, model: PreTrainedModel, info: dict, new_head: bool = False) -> None:
    """Refuses a model that is not what its configuration describes. Of a memory, a parameter may be missing in all layers (a
    plain model's, or of an option that is new) and then begins as the options say; others may be left over.

    Args:
        path: where it was loaded from.
        info: what transformers says of the loading (`output_loading_info`).
        new_head: whether what is outside of the base model may be missing.

    Raises:
        ValueError: tensors of the file are missing, are those of a larger model, or hold NaN or infinity.
    """
    base = f"{model.base_model_prefix}."
    layers = memory_layers(model).items()
    memory = {f"{name}.{own}" for name, layer in layers for own in layer.state_dict() if own.partition(".")[0] in PARAMETERS}
    present = {name.rpartition(".")[2] for name in memory - set(info["missing_keys"])}
    new = {name for name in memory if name.rpartition(".")[2] not in present}
    missing = sorted(set(info["missing_keys"]) - new)
    if new_head and model.base_model is not model:
        missing = [name for name in missing if name.startswith(base)]
    missing = [name.removeprefix(base) for name in missing]
    if missing:
        raise ValueError(
            f"the weights of {path} are incomplete: {_some(missing)} not there, and would be random. {REMEDY} and its "
            "config.json together."
        )
    names = {name.removeprefix(base) for name in model.state_dict().keys() - memory}
    numbered = {_without_numbers(name) for name in names if _without_numbers(name) != name}
    unexpected = {name.removeprefix(base) for name in info["unexpected_keys"]} - names
    surplus = sorted(name for name in unexpected if _without_numbers(name) in numbered)
    if surplus:
        raise ValueError(
            f"the weights of {path} are of a larger model than its config.json describes: {_some(surplus)} left over. "
            f"{REMEDY} and its config.json together."
        )
    # A sum is finite only if all numbers are, and costs half; it may also be too large
    plain = {n: t for n, t in model.state_dict().items() if type(t) is Tensor and t.dtype in FLOATS and not t.is_meta}
    wrong = [name for name, tensor in plain.items() if not tensor.sum().isfinite() and not tensor.isfinite().all()]
    if wrong:
        raise ValueError(
            f"the weights of {path} hold NaN or infinity in {len(wrong)} tensors, such as {wrong[0]}: they are damaged, or "
            f"of a training that diverged. {REMEDY} from an earlier checkpoint."
        )


def read_json(file: Path) -> dict:
    """The object in a JSON file.

    Raises:
        ValueError: the file is damaged, or holds something else, NaN, Infinity or a number too large for a float; the
            message names it.
    """

    def finite(number: str) -> float:
        if not math.isfinite(float(number)):
            raise ValueError(f"{number} is no JSON")
        return float(number)

    try:
        found = json.loads(file.read_text(encoding="utf-8"), parse_constant=finite, parse_float=finite)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is damaged or no JSON file ({error}). {REMEDY}.") from error
    if not isinstance(found, dict):
        raise ValueError(f"{file} is damaged: it holds a {type(found).__name__} and not an object. {REMEDY}.")
    return found


def _without_numbers(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)


def _some(names: list[str]) -> str:
    """Names as the subject of a sentence."""
    return f"{names[0]} is" if len(names) == 1 else f"{len(names)} tensors, such as {names[0]}, are"


def one_line(error: Exception) -> str:
    """What an error says, in one line."""
    return " ".join(str(error).split())
