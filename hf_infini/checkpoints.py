"""Whether a checkpoint is whole, and that of its configuration: one that is damaged or incomplete is never used.

transformers starts what a file lacks at random, passes over what it has too much, and takes any numbers.
"""

import json
import math
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from .hub_code import ModelBase

HUB_OPTIONS = {"cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder", "trust_remote_code"}
REMEDY = "Get the file again, or save the model again"
SUMMED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class CheckedLoadingMixin(ModelBase):
    """Loads whole checkpoints only; comes before `PreTrainedModel`."""

    config_class: type[PreTrainedConfig]

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path, *args, ignore_mismatched_sizes=False, output_loading_info=False, **kwargs
    ):
        """As usual. What the checkpoint's own configuration does not have is initialised, such as the memory of a plain
        model's layers, or another head.

        Raises:
            ValueError: a file is damaged; tensors are missing that the checkpoint's configuration has, or the other way
                round; they have other shapes, unless they may; or they hold NaN or infinity.
        """
        path, checkpoint = pretrained_model_name_or_path, None
        if path is not None and kwargs.get("state_dict") is None and kwargs.get("gguf_file") is None:
            # Files are read here, no code
            hub = {name: kwargs[name] for name in HUB_OPTIONS & (kwargs.keys() - {"trust_remote_code"})}
            with suppress(OSError):  # no config.json: transformers says so, or finds an adapter's model
                checkpoint = Checkpoint(path, cls._of_values, kwargs.get("config"), **hub)
        ignored = ignore_mismatched_sizes or checkpoint is not None  # the check below names them
        options = {"ignore_mismatched_sizes": ignored, "output_loading_info": True}
        loaded: Any = super().from_pretrained(path, *args, **options, **kwargs)  # declared as the model only
        model, info = loaded
        if checkpoint is not None:
            checkpoint.check(model, info, ignore_mismatched_sizes)
        return (model, info) if output_loading_info else model

    @classmethod
    def _of_values(cls, values: dict) -> PreTrainedModel:
        """The model of a configuration's values, in this class or, where they are those of a plain model, in its own."""
        if values.get("model_type", cls.config_class.model_type) != cls.config_class.model_type:
            cls = getattr(cls, "own_class", cls)
        return cls(cls.config_class.from_dict(dict(values)))


class Checkpoint:
    """What the files and the configuration of a folder or Hub name say of a model, before it is made.

    Args:
        path: where it is.
        make: gives the model of a configuration's values, a dictionary.
        config: where the folder has no config.json.
        hub: options of `from_pretrained` that say where the path is.

    Attributes:
        described: names of the tensors that the configuration describes.
        architectures: names of the classes that the checkpoint was saved from, without "Infini".

    Raises:
        ValueError: a file is damaged, or the configuration describes a far larger model than the files hold.
        OSError: there is no configuration.
    """

    def __init__(self, path, make, config: PreTrainedConfig | None = None, **hub):
        self.path = path
        size = check_files(Path(path, hub.get("subfolder", "")))
        try:
            values, _ = PreTrainedConfig.get_config_dict(path, **hub)
        except OSError:
            if not isinstance(config, PreTrainedConfig):
                raise
            values = config.to_dict()
        try:
            with torch.device("meta"):
                model = make(values)
        except ValueError as error:
            if str(path) in str(error):
                raise
            raise ValueError(f"no model can be made of the config.json of {path}: {one_line(error)}") from error
        self.base = f"{model.base_model_prefix}."
        self.described = {name.removeprefix(self.base) for name in model.state_dict()}
        self.architectures = {str(name).removeprefix("Infini") for name in values.get("architectures") or ()}
        wanted = sum(parameter.numel() for parameter in model.parameters())
        if size is not None and wanted > 2 * size:  # before the memory for it is asked for
            raise ValueError(
                f"the weights of {path} are incomplete: they hold {size:,} numbers, and its config.json describes a "
                f"{type(model).__name__} of {wanted:,}. {REMEDY} and its config.json together."
            )

    def check(self, model: PreTrainedModel, info: dict, ignore_mismatched_sizes: bool) -> None:
        """ValueError unless what was loaded, with transformers' `info` on it, is what the configuration describes."""
        for name, found, wanted in sorted(info["mismatched_keys"]) if not ignore_mismatched_sizes else ():
            raise ValueError(
                f"the weights of {self.path} do not fit: {name} is {list(found)} in the file and {list(wanted)} in the "
                f"model that config.json and the options given describe. {REMEDY} and its config.json together, or pass "
                "ignore_mismatched_sizes=True to have what does not fit initialised."
            )
        if not getattr(model, "_hf_peft_config_loaded", False):  # then the information is on the adapter
            self._check_names(model, info["missing_keys"], info["unexpected_keys"])
        if wrong := not_finite(model):
            raise ValueError(
                f"the weights of {self.path} hold NaN or infinity in {len(wrong)} tensors, such as {wrong[0]}: they are "
                f"damaged, or of a training that diverged. {REMEDY} from an earlier checkpoint."
            )

    def _check_names(self, model: PreTrainedModel, missing: set[str], unexpected: set[str]) -> None:
        if type(model).__name__.removeprefix("Infini") not in self.architectures:  # its head may be new
            missing = {name for name in missing if name.startswith(self.base) or model.base_model is model}
        lacking = sorted({name.removeprefix(self.base) for name in missing} & self.described)
        if lacking:
            raise ValueError(
                f"the weights of {self.path} are incomplete: {_some(lacking)} not there, and would be random. {REMEDY} and "
                "its config.json together."
            )
        numbered = {_without_numbers(name) for name in self.described if _without_numbers(name) != name}
        others = {name.removeprefix(self.base) for name in unexpected} - self.described
        surplus = sorted(name for name in others if _without_numbers(name) in numbered)
        if surplus:
            raise ValueError(
                f"the weights of {self.path} are of a larger model than its config.json describes: {_some(surplus)} left "
                f"over. {REMEDY} and its config.json together."
            )


def check_files(folder: Path) -> int | None:
    """How many numbers the weights in a model's folder are; `None` where it cannot be known (quantised, or not here).

    Raises:
        ValueError: a file is damaged; the message names it. Missing ones are passed over, transformers says what it needs.
    """
    names = [name for name in ("config.json", "generation_config.json") if (folder / name).is_file()]
    quantised = "quantization_config" in {name: read_json(folder / name) for name in names}.get("config.json", {})
    files = set(folder.glob("model*.safetensors"))
    for index in folder.glob("*.index.json"):
        found = read_json(index)
        shards = found.get("weight_map")
        if not isinstance(found.get("metadata"), dict) or not isinstance(shards, dict) or not shards:
            raise ValueError(f"{index} is no index of shards: it has no metadata and weight_map. {REMEDY}.")
        files |= {folder / str(shard) for shard in shards.values()}
    numbers = 0
    for file in sorted(files):
        if not file.is_file():
            raise ValueError(f"{file} is not there, and the index beside it says that weights are in it. {REMEDY}.")
        if file.suffix == ".safetensors":
            numbers += _numbers_in(file, quantised)
    return numbers if files and not quantised and all(file.suffix == ".safetensors" for file in files) else None


def read_json(file: Path) -> dict:
    """The object in a JSON file.

    Raises:
        ValueError: the file is damaged, or holds something else, NaN or Infinity; the message names it.
    """

    def refuse(constant: str):
        raise ValueError(f"{constant} is no JSON")

    try:
        found = json.loads(file.read_text(encoding="utf-8"), parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is damaged or no JSON file ({error}). {REMEDY}.") from error
    if not isinstance(found, dict):
        raise ValueError(f"{file} is damaged: it holds a {type(found).__name__} and not an object. {REMEDY}.")
    return found


def _numbers_in(file: Path, quantised: bool) -> int:
    try:
        with safe_open(file, framework="pt") as opened:
            metadata = opened.metadata()
            tensors = {name: opened.get_slice(name) for name in opened.keys()}
            kinds = {name: (tensor.get_dtype(), tensor.get_shape()) for name, tensor in tensors.items()}
    except SafetensorError as error:
        raise ValueError(f"{file} is damaged or no safetensors file ({one_line(error)}). {REMEDY}.") from error
    for name, (dtype, _) in kinds.items() if not quantised else ():
        if name.endswith("weight") and dtype.startswith(("I", "U", "BOOL")):
            raise ValueError(f"{file} is damaged: {name} is {dtype} and must be of floating point. {REMEDY}.")
    if (metadata or {}).get("format") not in ("pt", "tf", "flax", "mlx"):
        raise ValueError(f"{file} holds no weights of a model: it does not say its format, as save_pretrained has it.")
    return sum(math.prod(shape) for _, shape in kinds.values())


def not_finite(model: PreTrainedModel) -> list[str]:
    """The names of the tensors that hold NaN or infinity; without those that are sharded, quantised or not here."""
    found = []
    for name, tensor in model.state_dict().items():
        if type(tensor) is Tensor and tensor.dtype in SUMMED and not tensor.is_meta:
            # A sum is finite only if all numbers are, and costs half; it may also be too large
            if not tensor.sum().isfinite() and not tensor.isfinite().all():
                found.append(name)
    return found


def _without_numbers(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)


def _some(names: list[str]) -> str:
    """Names as the subject of a sentence."""
    return f"{names[0]} is" if len(names) == 1 else f"{len(names)} tensors, such as {names[0]}, are"


def one_line(error: Exception) -> str:
    """What an error says, in one line."""
    return " ".join(str(error).split())
