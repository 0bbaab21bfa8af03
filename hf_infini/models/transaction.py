"""A change of a model is whole or none: after any error, also Ctrl-C, the model is as it was."""

import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedConfig

from ..layers.memory_layer import memory_layers

Change = TypeVar("Change", bound=Callable)


def unchanged_on_error(change: Change) -> Change:
    """Decorator of a function, `change`, that changes the model which is its first argument,
    `model`: where it raises anything, the model gets back its classes, modules, tensors, hooks,
    flags and configurations. A function and no `with`, between whose last line and end Ctrl-C may
    come."""

    @functools.wraps(change)
    def whole(model, *args, **kwargs):
        before = _Snapshot(model) if isinstance(model, nn.Module) else None
        try:
            return change(model, *args, **kwargs)
        except BaseException:
            if before is not None:
                before.restore()
            raise

    result: Any = whole
    return result


class _Snapshot:
    """What a change of a `model` may touch, by references: of weights only the small ones of
    memories, which are written in place, are copied."""

    def __init__(self, model: nn.Module):
        modules = {
            part: None
            for module in model.modules()
            for held in (module, *vars(module).values())  # and what is set aside: GPT-2's positions
            if isinstance(held, nn.Module)
            for part in held.modules()
        }
        parameters = {
            parameter: None for module in modules for parameter in module.parameters(recurse=False)
        }
        self.classes = [(module, type(module)) for module in modules]
        owners = {id(owner): owner for module in modules for owner in _owners(module)}
        holders = [vars(owner) for owner in owners.values()]
        containers = [
            part
            for holder in holders
            for part in (holder, *holder.values())
            if isinstance(part, (dict, list, set))
        ]
        self.contents = [(part, part.copy()) for part in containers]
        self.tensors = [(each, each.data, each.requires_grad, each.grad) for each in parameters]
        self.copies = [
            (parameter, parameter.detach().clone())
            for layer in memory_layers(model).values()
            for parameter in layer.parameters(recurse=False)
        ]

    @torch.no_grad()
    def restore(self) -> None:
        for module, own in self.classes:
            module.__class__ = own
        for part, content in self.contents:
            if isinstance(part, list):
                part[:] = content
            else:
                part.clear()
                part.update(content)
        for parameter, data, requires_grad, grad in self.tensors:
            if (parameter.dtype, parameter.device) != (data.dtype, data.device):
                parameter.data = data
            if parameter.requires_grad != requires_grad:
                parameter.requires_grad_(requires_grad)
            if parameter.grad is not grad:
                parameter.grad = grad
        for parameter, copied in self.copies:
            parameter.copy_(copied)


def _owners(module: nn.Module) -> Iterator[Any]:
    """A module, its configurations, and the hooks that accelerate has put on it: what has
    attributes that may be set."""
    yield module
    yield from (value for value in vars(module).values() if isinstance(value, PreTrainedConfig))
    hook = vars(module).get("_hf_hook")
    yield from () if hook is None else (hook, *getattr(hook, "hooks", ()))
