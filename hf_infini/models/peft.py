"""What PEFT does not do by itself with a memory: its parameters are trained and saved beside a LoRA.

PEFT is imported only for an adapter that is made or saved. Needed as long as PEFT copies and saves modules only, and has no
hook for what belongs to a model (0.19).
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..layers.memory_layer import memory_layers, memory_parameters

LORA, LORA_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # PEFT's names
# What else is done once PEFT has saved an adapter in a folder, given also the model and its state
AFTER_SAVING: list[Callable[[nn.Module, Path, Mapping[str, Tensor]], None]] = []
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


def complete(model: nn.Module, folder: Path, config, state: Mapping[str, Tensor]) -> None:
    """Adds to an adapter that was just saved what PEFT does not save: what else it has trained of a memory; PEFT loads it,
    as anything in its file that is named as a parameter of the model. `state`: of the model."""
    prefix = "base_model.model." if isinstance(model, PreTrainedModel) else ""
    if own := _uncopied(model, config, trained=True):
        file = folder / LORA_WEIGHTS
        saved = load(file.read_bytes()) | {prefix + name: state[name].detach().contiguous() for name in own}
        save_file(saved, file, metadata={"format": "pt"})
    for function in AFTER_SAVING:
        function(model, folder, state)


@functools.cache
def follow_peft() -> None:
    """Has PEFT's `save_pretrained` end with [`complete`]: it has no hook for what belongs to the model."""
    from peft import PeftModel

    save = PeftModel.save_pretrained

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
            complete(self, folder, self.peft_config[name], state)

    PeftModel.save_pretrained = save_pretrained


def listen(event: str, model: Any = None, folder="") -> None:
    """One of the listeners of [`tell`]."""
    if event == "peft":
        follow_peft()
    elif event == "adapted":  # and all but the adapter is frozen
        for config in model.peft_config.values():
            for parameter in () if config.inference_mode else _uncopied(model, config).values():
                parameter.requires_grad_(True)
    elif event == "saved":
        complete(model, Path(folder), model.peft_config[model.active_adapters()[0]], model.state_dict())
