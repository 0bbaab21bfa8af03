"""Warnings where a model is trained and the gates of its memory stay as they are, in any kind of loop."""

import functools
import warnings
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .memory_layer import gates_of

# Adam moves a gate by about the learning rate in a step: with less than this, by less than 1 in a thousand steps
SLOW = 1e-3
_trained_gates: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()  # by their id
_with_still_gates: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # models of which it was said
_rates_at_first: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # of gates, by optimiser; None: nothing more to see


def listen(event: str, model: Any = None, *_) -> None:
    """One of the listeners of [`tell`]. It warns at a call in training, if something is trained and no gate, and at the
    first steps of any optimiser that has gates with a rate below [`SLOW`]."""
    if event != "called" or not (model.training and torch.is_grad_enabled()):
        return
    gates = [parameter for gate in gates_of(model).values() for parameter in gate.parameters()]
    if trained := {id(parameter): parameter for parameter in gates if parameter.requires_grad}:
        _trained_gates.update(trained)
        _watch_optimisers()
    elif gates and model not in _with_still_gates and any(parameter.requires_grad for parameter in model.parameters()):
        _with_still_gates.add(model)
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
            "hf_infini.training.parameter_groups(model, …): optimizers=(torch.optim.AdamW(groups), None) for a Trainer.",
            stacklevel=3,
        )
