"""An attention layer's memory, in any model: its parameters, and one call from the layer's input to the heads' output."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init

from .attention import attend
from .cache import StatesOfCall
from .convolution import short_convolution
from .memory import MemoryRule
from .positions import rotation
from .segments import SegmentLayout, segment_layout
from .state import InfiniState, Projections
from .window import Softmax

# What `MemoryLayerMixin.add_memory_parameters` makes
PARAMETERS = ("gate", "start_memory", "start_normaliser", "memory_conv", "memory_write", "query_map", "key_map")
PARAMETERS += ("memory_rates", "memory_rates_bias")
# Normaliser of a learned start before training: softplus(0.5413) = 1, the value of σ at a key of zeros.
LEARNED_NORMALISER = 0.5413
NOISE = 1e-10  # the study's start
# Logits of β and α before training: β = 1/2; α = 0.999994, of which 16,384 tokens leave 90 %, and which still has a gradient
RATES = (0.0, 12.0)


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

    They are found by what their layer can do: classes differ where a model came with its own code, or where PEFT has wrapped
    the gate.
    """
    layers = {name: module for name, module in model.named_modules() if hasattr(type(module), "attend_with_memory")}
    return {f"{name}.gate": gate for name, layer in layers.items() for own, gate in layer.named_children() if own == "gate"}


@dataclass(frozen=True)
class LayerCall:
    """One call of a layer with a memory.

    Attributes:
        hidden_states: `[batch, tokens, width]`, the input of the projections: with the short convolution, if there is one.
        layout: of the tokens.
        state: what the call continues; `None`: it begins.
        states: of the model's call, to which the layer gives its next state; `None`: nobody wants it.
        recent: what the convolution needs of these tokens in the next call.
        outside_model: whether the layer is called outside of a model, and brings the cache up to date itself.
    """

    hidden_states: Tensor
    layout: SegmentLayout
    state: InfiniState | None
    states: StatesOfCall | None
    recent: Tensor | None
    outside_model: bool


def rope_tables(
    window: tuple[int, int, int], width: int, like: Tensor, theta: float = 10_000.0
) -> tuple[Tensor, Tensor]:
    """The [`rotation`] of the places of a window (`segment_length`, `local_segments`, `sink_tokens`), for heads of `width`
    numbers with the dtype and device of `like`."""
    segment_length, local_segments, sink_tokens = window
    places = torch.arange(sink_tokens + (local_segments + 1) * segment_length, device=like.device)
    return rotation(places, width, like.dtype, theta)


class MemoryLayerMixin(nn.Module):
    """A layer's memory; comes before the attention's class, whose forward calls `begin`, its own projections, and
    `attend_with_memory`.

    The class has `config` (with [`MemoryOptions`]) and `head_counts`. New are `gate`, a [`Gate`]; with
    `memory_init="learned"` also `start_memory` `[kv_heads, head_dim, head_dim]` and `start_normaliser`
    `[kv_heads, head_dim]` (the logarithmic size: z_0 is its softplus); with `"noise"` a buffer `start_normaliser` (z_0
    itself); with `memory_conv` the convolution's weights `memory_conv` `[taps, width]`; with `memory_write="learned"` the
    logarithm of a token's weight in the memory, per head, `memory_write` `[kv_heads, width]`; with `feature_map="learned"`
    what queries and keys are multiplied by before the exponential, `query_map` `[heads, head_dim, head_dim]` and `key_map`
    `[kv_heads, head_dim, head_dim]`; with `update_rule="gated_delta"` what the layer's input is multiplied by, and what is
    added, for the logits of β and α, `memory_rates` `[kv_heads, 2, width]` and `memory_rates_bias` `[kv_heads, 2]`, and no
    `start_normaliser`.
    """

    config: Any
    layer_idx: Any  # a number, which only a cache needs
    num_heads: int
    head_dim: int
    gate: Gate

    @property
    def head_counts(self) -> tuple[int, int, int]:
        """Query heads, key/value heads, and the width of one."""
        return self.num_heads, self.num_heads, self.head_dim

    @property
    def rule(self) -> MemoryRule:
        """How the memory is written, read and mixed in."""
        feature_map, query_map, key_map = self.config.feature_map, None, None
        if feature_map == "learned":
            feature_map, query_map, key_map = "exp", self.query_map, self.key_map
        rule, denominator = self.config.update_rule, self.config.denominator
        return MemoryRule(rule, feature_map, denominator, query_map=query_map, key_map=key_map)

    def add_memory_parameters(self, width: int, **options) -> None:
        """Makes the parameters, uninitialised. `width`: of the layer's input; options: their `device` and `dtype`."""
        query_heads, heads, size = self.head_counts
        gated = self.config.update_rule == "gated_delta"
        self.gate = Gate(query_heads, **options).train(self.training)
        if self.config.memory_init == "learned":
            self.start_memory = nn.Parameter(torch.empty(heads, size, size, **options))
            if not gated:
                self.start_normaliser = nn.Parameter(torch.empty(heads, size, **options))
        elif self.config.memory_init == "noise":
            self.register_buffer("start_normaliser", torch.empty(heads, size, **options))
        if self.config.memory_conv:
            self.memory_conv = nn.Parameter(torch.empty(self.config.memory_conv, width, **options))
        if self.config.memory_write == "learned":
            self.memory_write = nn.Parameter(torch.empty(heads, width, **options))
        if gated:
            self.memory_rates = nn.Parameter(torch.empty(heads, 2, width, **options))
            self.memory_rates_bias = nn.Parameter(torch.empty(heads, 2, **options))
        if self.config.feature_map == "learned":
            self.query_map = nn.Parameter(torch.empty(query_heads, size, size, **options))
            self.key_map = nn.Parameter(torch.empty(heads, size, size, **options))

    def drop_memory_parameters(self) -> None:
        """Drops what `add_memory_parameters` made, whatever it has learned; the attention's own weights stay."""
        for name in PARAMETERS:
            if hasattr(self, name):
                delattr(self, name)

    @torch.no_grad()
    def init_memory_parameters(self) -> None:
        init.constant_(self.gate.weight, self.config.gate_init)
        if self.config.memory_init == "learned":
            init.zeros_(self.start_memory)
            if hasattr(self, "start_normaliser"):
                init.constant_(self.start_normaliser, LEARNED_NORMALISER)
        elif self.config.memory_init == "noise":
            init.uniform_(self.start_normaliser, 0.0, NOISE)
        if self.config.memory_conv:
            init.zeros_(self.memory_conv)
        if self.config.memory_write == "learned":
            init.zeros_(self.memory_write)
        if hasattr(self, "memory_rates"):
            init.zeros_(self.memory_rates)
            init.copy_(self.memory_rates_bias, torch.tensor(RATES).expand_as(self.memory_rates_bias))
        if self.config.feature_map == "learned":
            for weight in (self.query_map, self.key_map):
                init.copy_(weight, torch.eye(weight.shape[-1]).expand_as(weight))

    def start(self) -> dict[str, Tensor]:
        """M_0 and z_0 as [`InfiniState.initial`] takes them; empty for a memory that starts empty."""
        if self.config.memory_init == "learned":
            if hasattr(self, "start_normaliser"):
                normaliser = F.softplus(self.start_normaliser.float())
            else:
                normaliser = self.start_memory.new_empty(len(self.start_memory), 0)
            return {"start_memory": self.start_memory, "start_normaliser": normaliser}
        if self.config.memory_init == "noise":
            empty = self.start_normaliser.new_zeros(*self.start_normaliser.shape, self.start_normaliser.shape[1])
            return {"start_memory": empty, "start_normaliser": self.start_normaliser}
        return {}

    def begin(
        self,
        hidden_states: Tensor,
        *,
        layout: SegmentLayout | None = None,
        states: StatesOfCall | None = None,
        cache=None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> LayerCall:
        """
        Args:
            hidden_states: `[batch, tokens, width]`, the layer's input.
            layout: what the model made for all layers; without it, one is made from `attention_mask` and `position_ids`,
                `[batch, tokens]` each, which are not looked at otherwise.
            states: the [`StatesOfCall`] of the model, from which the layer takes its own; `None`: those of
                `cache`, an [`InfiniCache`], for a layer that is called outside of a model.
        """
        outside_model = states is None and cache is not None
        states = cache.states() if outside_model else states
        state = None if states is None else states.before(self.layer_idx)
        if layout is None:
            given = {"attention_mask": attention_mask, "position_ids": position_ids, "state": state}
            shape = hidden_states.shape[:2]
            layout = segment_layout(*shape, *self.config.window, device=hidden_states.device, **given)
        recent, taps = None if state is None else state.recent_inputs, self.config.memory_conv
        if taps:
            if recent is None:
                recent = hidden_states.new_zeros(hidden_states.shape[0], taps - 1, hidden_states.shape[2])
            recent = recent if states is None else states.inputs_before(hidden_states, recent)
            added, recent = short_convolution(hidden_states, self.memory_conv, layout, recent)
            hidden_states = hidden_states + added
        return LayerCall(hidden_states, layout, state, states, recent, outside_model)

    def log_weight(self, call: LayerCall) -> Tensor | None:
        """The logarithm of what each token weighs in the memory, `[batch, heads, tokens, 1]`; `None`: all weigh 1. For the
        gated delta rule log β and log α, `[batch, heads, tokens, 2]`."""
        if hasattr(self, "memory_rates"):
            logits = F.linear(call.hidden_states, self.memory_rates.flatten(0, 1), self.memory_rates_bias.flatten())
            return F.logsigmoid(logits).unflatten(-1, (-1, 2)).transpose(1, 2)
        if self.config.memory_write == "equal":
            return None
        return F.linear(call.hidden_states, self.memory_write).transpose(1, 2).unsqueeze(-1)

    def attend_with_memory(
        self, call: LayerCall, query: Tensor, key: Tensor, value: Tensor, softmax: Softmax, return_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        """The heads' output `[batch, heads, tokens, head_dim]` and, if asked for, the local weights, as [`attend`] has them.

        Args:
            query, key, value: the projections of `call.hidden_states`, `[batch, heads, tokens, head_dim]`, un-rotated.
        """
        tokens, state, states = Projections(query, key, value, self.log_weight(call)), call.state, call.states
        if state is None:
            window = (call.layout.segment_length, call.layout.local_segments, call.layout.sink_tokens)
            weights = 0 if tokens.log_weight is None else tokens.log_weight.shape[-1]
            options = {"log_weights": weights, "normalised": self.rule.normalised}
            state = InfiniState.initial(key, value, *window, **options, **self.start())
        state = state if states is None else states.continued(state, tokens, call.layout, self.rule)
        output, after, weights = attend(
            tokens,
            self.gate(),
            call.layout,
            self.rule,
            softmax,
            state,
            return_state=states is not None,
            return_weights=return_weights,
            in_place=states is not None and states.may_overwrite(self.layer_idx),
        )
        if states is not None and after is not None:
            states.leave(self.layer_idx, replace(after, recent_inputs=call.recent))
            if call.outside_model:
                states.advance_layers(call.hidden_states.shape[1])
        return output, weights if return_weights else None
