"""Adapters of PEFT beside a memory: what PEFT, which looks at modules only, does not train or save of it."""

import functools
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from .memory_layer import PARAMETERS

LORA, LORA_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # PEFT's names
TASKS = {"CausalLM": "CAUSAL_LM", "LMHeadModel": "CAUSAL_LM", "SequenceClassification": "SEQ_CLS"}
TASKS |= {"TokenClassification": "TOKEN_CLS", "QuestionAnswering": "QUESTION_ANS"}


def lora_config(model, **options):
    """PEFT's `LoraConfig` for a model with a memory, whose parameters are trained and saved beside the LoRA.

    Their names are in `modules_to_save`. PEFT copies the gates, which are modules. The other parameters of a memory are
    trained in place, and act also where the adapter is disabled.

    Args:
        model: one with a memory.
        options: those of `LoraConfig`, such as `r=16`; your `modules_to_save` are added to the memory's.

    Raises:
        ValueError: the model has no memory.
    """
    from peft import LoraConfig

    found = memory_parameters(model) if isinstance(model, nn.Module) else {}
    if not found:
        raise ValueError(f"a {type(model).__name__} has no memory to train beside a LoRA: patch_model() it first.")
    paths = (name.partition(".original_module")[0].removesuffix(".weight").split(".") for name in found)
    names = dict.fromkeys(".".join(path[-2:]) for path in paths if "modules_to_save" not in path)
    task = next((task for ending, task in TASKS.items() if type(model).__name__.endswith(ending)), None)
    own: dict[str, Any] = {"task_type": task, "modules_to_save": [*names, *(options.pop("modules_to_save", None) or ())]}
    return LoraConfig(**own | options)


def _uncopied(model: nn.Module, config, trained: bool = False) -> dict[str, nn.Parameter]:
    """The parameters of memories, by their full names, that an adapter has in its `modules_to_save` and PEFT does not copy,
    because they are no modules; with `trained`, also those that are trained without being named."""
    ends = tuple(f".{name}" for name in getattr(config, "modules_to_save", None) or ())
    found = {name: parameter for name, parameter in memory_parameters(model).items() if "modules_to_save" not in name}
    return {name: found[name] for name in found if name.endswith(ends) or (trained and found[name].requires_grad)}


def _complete(model: nn.Module, folder: Path, config, state: Mapping[str, Tensor]) -> None:
    """Adds to an adapter that was just saved what PEFT does not save, with `state` that of the model: what else was trained
    of a memory, which PEFT loads as anything in its file that is named as a parameter of the model; and all of the memory
    where the model was patched, for the plain one that PEFT names would be loaded as it is."""
    from .memory_adapter import inside_of, write_memory

    prefix = "base_model.model." if isinstance(model, PreTrainedModel) else ""
    if own := _uncopied(model, config, trained=True):
        file = folder / LORA_WEIGHTS
        saved = load(file.read_bytes()) | {prefix + name: state[name].detach().contiguous() for name in own}
        save_file(saved, file, metadata={"format": "pt"})
    if getattr(inside_of(model), "_base_is_plain", False):
        write_memory(model, folder, state)


@functools.cache
def _follow_saving() -> None:
    """Has PEFT's `save_pretrained` end with [`_complete`]: it has no hook for what belongs to the model."""
    from peft import PeftModel

    save = PeftModel.save_pretrained

    @functools.wraps(save)
    def save_pretrained(self, save_directory, *args, **kwargs):
        given = inspect.signature(save).bind(self, save_directory, *args, **kwargs)
        given.apply_defaults()
        options = given.arguments | given.arguments["kwargs"]
        has_memory = any(hasattr(type(module), "attend_with_memory") for module in self.modules())
        if has_memory and not options["safe_serialization"]:
            raise ValueError("an adapter beside a memory is saved as safetensors only: leave safe_serialization=False out.")
        save(self, save_directory, *args, **kwargs)
        for name in (options["selected_adapters"] or self.peft_config) if options["is_main_process"] else ():
            folder = Path(save_directory, "" if name == "default" else name)
            _complete(self, folder, self.peft_config[name], options.get("state_dict") or self.state_dict())

    PeftModel.save_pretrained = save_pretrained


def listen(event: str, model: Any = None, folder="", is_main_process: bool = True, *_) -> None:
    """One of the listeners of [`tell`]."""
    if event == "peft":
        _follow_saving()
    elif event == "adapted":  # and all but the adapter is frozen
        for config in model.peft_config.values():
            for parameter in () if config.inference_mode else _uncopied(model, config).values():
                parameter.requires_grad_(True)
    elif event == "saved" and getattr(model, "_hf_peft_config_loaded", False) and is_main_process:
        _complete(model, Path(folder), model.peft_config[model.active_adapters()[0]], model.state_dict())


def memory_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """All of [`PARAMETERS`] in a model, by their full names."""
    layers = {name: module for name, module in model.named_modules() if hasattr(type(module), "attend_with_memory")}
    return {
        f"{name}.{own}": parameter
        for name, layer in layers.items()
        for own, parameter in layer.named_parameters()
        if own.partition(".")[0] in PARAMETERS
    }
