"""What PEFT does not do by itself with a memory: its parameters are trained and saved beside a LoRA.

PEFT is not imported, but met where somebody has imported it. Needed as long as it copies and saves modules only, and has no
hook for what belongs to a model (0.19).
"""

import functools
import importlib
import inspect
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..compat.class_lookups import PREFIX
from ..compat.hub_code import ModelBase
from ..compat.peft_layers import inside_of
from ..layers.gates import look_again
from ..layers.memory_layer import memory_layers, memory_parameters
from .adapter_files import LORA_WEIGHTS, write_memory

TABLES = ("peft.utils.constants", "peft.utils.transformers_weight_conversion")


def meet_peft(infini: str) -> None:
    """Where PEFT has been imported, has it choose and name the modules of an adapter as in a model of the own type, and
    completes what it saves; `infini`: the model type."""
    if "peft" in sys.modules:
        constants, weights = map(importlib.import_module, TABLES)
        found = [table for name, table in vars(constants).items() if name.startswith("TRANSFORMERS_MODELS_TO_")]
        own = infini.removeprefix(PREFIX)
        for table in (*found, weights._MODEL_TO_CONVERSION_PATTERN):
            if own in table:
                table[infini] = table[own]
        _complete_what_is_saved()


class AdaptedModelMixin(ModelBase):
    """A model whose memory is trained and saved with adapters of PEFT; comes before `PreTrainedModel`."""

    def __setattr__(self, name: str, value) -> None:
        super().__setattr__(name, value)
        if name == "peft_config":  # PEFT's last step; all but the adapter is frozen
            look_again()
            for config in value.values():
                for own, parameter in () if config.inference_mode else _uncopied(self, config).items():
                    parameter.requires_grad_(not own.endswith(".keep_weight"))  # a choice has no gradient

    def save_pretrained(self, save_directory, is_main_process: bool = True, *args, **kwargs):
        """As usual; of a model with adapters of PEFT only these are saved."""
        super().save_pretrained(save_directory, is_main_process, *args, **kwargs)
        if is_main_process and getattr(self, "_hf_peft_config_loaded", False):
            _complete(self, Path(save_directory), self.peft_config[self.active_adapters()[0]], self.state_dict())


def _uncopied(model: nn.Module, config, trained: bool = False) -> dict[str, nn.Parameter]:
    """The parameters of memories, by their full names, that an adapter has in its `modules_to_save` and PEFT does not copy,
    because they are no modules; with `trained`, also those that are trained without being named."""
    ends = tuple(f".{name}" for name in getattr(config, "modules_to_save", None) or ())
    found = {name: parameter for name, parameter in memory_parameters(model).items() if "modules_to_save" not in name}
    return {name: found[name] for name in found if name.endswith(ends) or (trained and found[name].requires_grad)}


def _complete(model: nn.Module, folder: Path, config, state: Mapping[str, Tensor]) -> None:
    """Adds to an adapter that was just saved what PEFT does not save: what else it has trained of a memory; PEFT loads it,
    as anything in its file that is named as a parameter of the model. If the plain model was patched after loading, also the
    memory: PEFT would load the plain model that it names. `state`: of the model."""
    prefix = "base_model.model." if isinstance(model, PreTrainedModel) else ""
    if own := _uncopied(model, config, trained=True):
        file = folder / LORA_WEIGHTS
        saved = load(file.read_bytes()) | {prefix + name: state[name].detach().contiguous() for name in own}
        save_file(saved, file, metadata={"format": "pt"})
    if getattr(inside_of(model), "_base_is_plain", False):
        write_memory(model, folder, state)


@functools.cache
def _complete_what_is_saved() -> None:
    """Has PEFT's `save_pretrained` end with [`_complete`]: it has no hook for what belongs to the model."""
    peft_model: Any = sys.modules["peft"].PeftModel  # an import would have all who load a model by its code install PEFT
    save = peft_model.save_pretrained

    @functools.wraps(save)
    def save_pretrained(self, save_directory, *args, **kwargs):
        given = inspect.signature(save).bind(self, save_directory, *args, **kwargs)
        given.apply_defaults()
        options = given.arguments | given.arguments["kwargs"]
        has_memory = bool(memory_layers(self))
        if has_memory and not options["safe_serialization"]:
            raise ValueError("an adapter beside a memory is saved as safetensors only: leave safe_serialization=False out.")
        save(self, save_directory, *args, **kwargs)
        for name in (options["selected_adapters"] or self.peft_config) if options["is_main_process"] else ():
            folder = Path(save_directory, "" if name == "default" else name)
            state = self.state_dict() | (options.get("state_dict") or {})  # gathered from all processes; perhaps a part
            _complete(self, folder, self.peft_config[name], state)

    peft_model.save_pretrained = save_pretrained
