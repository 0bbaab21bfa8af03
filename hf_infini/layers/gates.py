"""The gates of a model's memories (equation 5), and a word where a training would leave them as they are."""

import functools
import warnings
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

# Adam moves a gate by about the learning rate in a step: with less than this, by less than 1 in a thousand steps
SLOW = 1e-3
_trained_gates: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()  # by their id
_looked_at: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # models that were called in training
_rates_at_first: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # of gates, by optimiser; None: nothing more to see


class Gate(nn.Module):
    """The gate of a layer (equation 5): `weight` `[heads]`, the logits β; sigmoid(β) is the memory's share of a head's
    output. Made uninitialised.

    It is a module whose forward returns the logits, so that other libraries can replace it: PEFT's
    `modules_to_save=["gate"]` puts a wrapper in its place, whose forward gives the logits of the active adapter.

    Args:
        heads: of the layer.
        options: `device` and `dtype` of the logits.
    """

    def __init__(self, heads: int, **options):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads, **options))

    def forward(self) -> Tensor:
        """β, `[heads]`."""
        return self.weight


def memory_layers(model: nn.Module) -> dict[str, Any]:
    """The layers with a memory in a model, by name. They are found by what they can do: classes differ where a model came
    with its own code."""
    return {name: module for name, module in model.named_modules() if hasattr(type(module), "add_memory_parameters")}


def gates_of(model: nn.Module) -> dict[str, Any]:
    """The gates of a model by the name of their module, `transformer.h.0.attn.gate`, in the order of the layers; PEFT may
    have wrapped them."""
    return {f"{name}.gate": layer.gate for name, layer in memory_layers(model).items() if hasattr(layer, "gate")}


def watch_gates(model: nn.Module) -> None:
    """Warns that a model is trained and its gates stay as they are: at a call in training, if something is trained and no
    gate, and at the first steps of any optimiser that has gates with a rate below [`SLOW`]."""
    if torch.compiler.is_compiling() or model in _looked_at or not (model.training and torch.is_grad_enabled()):
        return
    gates = [parameter for gate in gates_of(model).values() for parameter in gate.parameters()]
    if trained := {id(parameter): parameter for parameter in gates if parameter.requires_grad}:
        _looked_at.add(model)
        _trained_gates.update(trained)
        _watch_optimisers()
    elif gates and any(parameter.requires_grad for parameter in model.parameters()):
        _looked_at.add(model)
        warnings.warn(
            "this model is trained, and the gates of its memory are not: they stay as they are, and with them the memory's "
            "share. For LoRA, hf_infini.lora_config(model, …) makes a configuration with which they are trained.",
            stacklevel=3,
        )


@functools.cache
def _watch_optimisers() -> None:
    register_optimizer_step_pre_hook(_check_rates)


def _check_rates(optimizer: torch.optim.Optimizer, *_) -> None:
    first = _rates_at_first.get(optimizer, ())
    if first is None:
        return
    groups = [group for group in optimizer.param_groups if any(id(each) in _trained_gates for each in group["params"])]
    planned = [group.get("max_lr", group.get("initial_lr")) for group in groups]  # by a scheduler, which may begin with less
    rates = [group["lr"] if rate is None else rate for group, rate in zip(groups, planned, strict=True)]
    rates = [float(rate) for rate in rates if rate is not None]  # Adafactor finds its own
    by_loop = None in planned  # which may set the rates before each step, and begin with less, too
    _rates_at_first[optimizer] = rates if by_loop and first == () else None
    if rates and min(rates) < SLOW and (not by_loop or rates == first):
        warnings.warn(
            f"{type(optimizer).__name__} gives the gates of a memory the learning rate {min(rates):.1g}: they hardly move, "
            "and the memory stays as unused as it is. Give them about 0.01 and no weight decay, as in the groups of "
            "hf_infini.tools.training.parameter_groups(model, …), with optimizers=(torch.optim.AdamW(groups), None) for a "
            "Trainer.",
            stacklevel=3,
        )
