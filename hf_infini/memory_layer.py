"""The parameters of an attention layer's memory, in any model: gate, start, short convolution, weights of tokens."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init

from .convolution import short_convolution
from .memory import MemoryRule

# Normaliser of a learned start before training: softplus(0.5413) = 1, the value of σ at a key of zeros.
LEARNED_NORMALISER = 0.5413
NOISE = 1e-10  # the study's start


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


def gates_of(model: nn.Module) -> dict[str, nn.Module]:
    """The gates of a model by the name of their module, `transformer.h.0.attn.gate`, in the order of the layers.

    They are found by name: classes differ where a model came with its own code, or where PEFT has wrapped the gate.
    """
    return {name: module for name, module in model.named_modules() if name.endswith(".attn.gate")}


class MemoryLayerMixin:
    """The parameters of a layer's memory, and what they do to its inputs; comes before the attention's class.

    The class has `config` (with [`MemoryOptions`]), `num_heads` and `head_dim`. New are `gate`, a [`Gate`]; with
    `memory_init="learned"` also `start_memory` `[heads, head_dim, head_dim]` and `start_normaliser` `[heads, head_dim]`
    (the logarithmic size: z_0 is its softplus); with `"noise"` a buffer `start_normaliser` (z_0 itself); with
    `memory_conv` the convolution's weights `memory_conv` `[taps, width]`; with `memory_write="learned"` the logarithm of a
    token's weight in the memory, per head, `memory_write` `[heads, width]`.
    """

    @property
    def rule(self) -> MemoryRule:
        """How the memory is written, read and mixed in."""
        return MemoryRule(self.config.update_rule, self.config.feature_map, self.config.denominator)

    def add_memory_parameters(self, width: int, **options) -> None:
        """Makes the parameters, uninitialised. `width`: of the layer's input; options: their `device` and `dtype`."""
        heads, size = self.num_heads, self.head_dim
        self.gate = Gate(heads, **options)
        if self.config.memory_init == "learned":
            self.start_memory = nn.Parameter(torch.empty(heads, size, size, **options))
            self.start_normaliser = nn.Parameter(torch.empty(heads, size, **options))
        elif self.config.memory_init == "noise":
            self.register_buffer("start_normaliser", torch.empty(heads, size, **options))
        if self.config.memory_conv:
            self.memory_conv = nn.Parameter(torch.empty(self.config.memory_conv, width, **options))
        if self.config.memory_write == "learned":
            self.memory_write = nn.Parameter(torch.empty(heads, width, **options))

    def drop_memory_parameters(self) -> None:
        """Drops what `add_memory_parameters` made, whatever it has learned; the attention's own weights stay."""
        for name in ("gate", "start_memory", "start_normaliser", "memory_conv", "memory_write"):
            if hasattr(self, name):
                delattr(self, name)

    @torch.no_grad()
    def init_memory_parameters(self) -> None:
        init.constant_(self.gate.weight, self.config.gate_init)
        if self.config.memory_init == "learned":
            init.zeros_(self.start_memory)
            init.constant_(self.start_normaliser, LEARNED_NORMALISER)
        elif self.config.memory_init == "noise":
            init.uniform_(self.start_normaliser, 0.0, NOISE)
        if self.config.memory_conv:
            init.zeros_(self.memory_conv)
        if self.config.memory_write == "learned":
            init.zeros_(self.memory_write)

    def start(self) -> dict[str, Tensor]:
        """M_0 and z_0 as [`InfiniState.initial`] takes them; empty for a memory that starts empty."""
        if self.config.memory_init == "learned":
            return {"start_memory": self.start_memory, "start_normaliser": F.softplus(self.start_normaliser.float())}
        if self.config.memory_init == "noise":
            empty = self.start_normaliser.new_zeros(self.num_heads, self.head_dim, self.head_dim)
            return {"start_memory": empty, "start_normaliser": self.start_normaliser}
        return {}

    def convolved(self, hidden_states: Tensor, layout, recent: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The input `[batch, tokens, width]` of the projections, plus the short convolution if there is one; and what the
        convolution needs of these tokens in the next call (`recent`, `None` before the first)."""
        taps = self.config.memory_conv
        if not taps:
            return hidden_states, recent
        if recent is None:
            recent = hidden_states.new_zeros(hidden_states.shape[0], taps - 1, hidden_states.shape[2])
        added, recent = short_convolution(hidden_states, self.memory_conv, layout, recent)
        return hidden_states + added, recent

    def weighted(self, memory_key: Tensor, hidden_states: Tensor) -> Tensor:
        """The memory's keys `[batch, heads, tokens, head_dim]`, to which the learned weight of each token is added; it is
        computed from the input of the projections: e^(k + w) = e^w e^k."""
        return memory_key + F.linear(hidden_states, self.memory_write).transpose(1, 2).unsqueeze(-1)
