"""What a training of a model with a memory needs: parameter groups, and the values of its gates."""

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ..layers.memory_layer import gates_of, memory_layers


def parameter_groups(
    model: torch.nn.Module,
    learning_rate: float,
    gate_learning_rate: float | None,
    weight_decay: float,
) -> list[dict]:
    """The optimiser's parameter groups: matrices; without decay, vectors and an attention
    layer's parameters beside its projections; and gates with a separate rate, without decay,
    which would pull them back to sigmoid = 0.5. Gates of fewer than 32 bits become float32,
    in place, unless FSDP has sharded them: in bfloat16 a step of 0.01 from −4 is lost.

    Args:
        model: with a memory, or without.
        learning_rate: of all parameters but the gates.
        gate_learning_rate: of the gates; `None`: the optimiser's own.
        weight_decay: of matrices.
    """
    groups: dict[str, dict[str, Any]] = {
        "matrices": {"params": [], "lr": learning_rate, "weight_decay": weight_decay},
        "vectors": {"params": [], "lr": learning_rate, "weight_decay": 0.0},
        "gates": {"params": [], "lr": gate_learning_rate, "weight_decay": 0.0},
    }
    gates = {parameter for gate in gates_of(model).values() for parameter in gate.parameters()}
    own = {
        parameter
        for layer in memory_layers(model).values()
        for parameter in layer.parameters(recurse=False)
    }
    for parameter in model.parameters():
        if parameter in gates:
            kind = "gates"
            # FSDP wants one dtype
            if parameter.dtype.itemsize < 4 and not isinstance(parameter, DTensor):
                parameter.data = parameter.data.float()
        elif parameter.ndim < 2 or parameter in own:
            # biases, layer norms, and what an attention layer owns beside its projections
            kind = "vectors"
        else:
            kind = "matrices"
        groups[kind]["params"].append(parameter)
    return [{"name": name, **group} for name, group in groups.items() if group["params"]]


def gate_values(model: torch.nn.Module) -> dict[str, list[float]]:
    """sigmoid(gate) of each head of a `model`, by layer: the share of the memory in that head's
    output; empty without gates."""
    found = {}
    for name, gate in gates_of(model).items():
        logits = gate().detach()
        # from all processes, which all come here
        logits = logits.full_tensor() if isinstance(logits, DTensor) else logits
        layer = [part for part in name.split(".") if part.isdigit()][-1]
        found[layer] = [round(value, 5) for value in torch.sigmoid(logits.float()).tolist()]
    return found
