"""The gate of an attention layer with a memory: one logit β a head, in a module of its own (equation 5).

A module, and called for its logits, because that is what other libraries can take hold of: PEFT's `modules_to_save=["gate"]`
puts a wrapper in its place, whose forward gives the logits of the adapter that is active.
"""

import torch
from torch import Tensor, nn


class Gate(nn.Module):
    """`weight` `[heads]`: the logits β; sigmoid(β) is the memory's share of a head's output. Made uninitialised.

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


def gates_of(model: nn.Module) -> dict[str, nn.Module]:
    """The gates of a model by the name of their module, `transformer.h.0.attn.gate`, in the order of the layers.

    They are found by name: classes differ where a model came with its own code, or where PEFT has wrapped the gate.
    """
    return {name: module for name, module in model.named_modules() if name.endswith(".attn.gate")}
