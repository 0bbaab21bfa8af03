"""An attention layer's memory, in any model, and the swap of a decoder's own attention, whose
forward runs with position embeddings that turn nothing. The registered attention function gets its
queries, keys and values (projected, normed, un-rotated): the memory takes them as they are, and the
window turns them by its own places with the model's own function.
"""

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle
from transformers import AttentionInterface
from transformers import initialization as init
from transformers.cache_utils import Cache

from ..compat.execution_device import device_of
from ..compat.swap_class import swap_class
from ..ops.backends import attend
from ..ops.convolution import short_convolution
from ..ops.equations import MemoryRule, ScoreOptions, window_attention
from ..ops.keeping import SCORES
from ..ops.keeping.score import TokenScore
from ..ops.rules import RULES, rule_of
from ..ops.state import AttentionCall, InfiniState, Tokens
from ..options import Window, key_heads

# What `MemoryLayerMixin.add_memory_parameters` makes
PARAMETERS = ("gate", "memory_conv", "memory_write")
PARAMETERS += tuple({name: None for score in SCORES.values() for name in score.learns})
PARAMETERS += tuple(name for rule in RULES.values() for name in rule.parameters(1, 1))
# The copies that travel with models have other module names, and register their own function
INTERFACE = f"infini_attention of {__name__}"
TEST_TOKENS = 12  # with which a swapped layer is compared with its own attention

# Takes query, key and value, `[batch, heads, tokens, head_dim]`, un-rotated, and how they are
# compared; gives the heads' output, `[batch, heads, tokens, head_dim]`, and the local weights, or
# `None`
Attend = Callable[[Tensor, Tensor, Tensor, ScoreOptions], tuple[Tensor, Tensor | None]]


class SharedInputs(NamedTuple):
    """What the layers of one call of a model share."""

    # By window, [`segment_layout`]; `None`: all are in one window, from its second place on, and
    # there is no memory
    layouts: Any
    cache: Cache | None  # [`InfiniCache.for_call`]
    # tables of a window's places, by the type of layer (`None`: one for all)
    rotary: dict[str | None, tuple[Tensor, ...]]
    return_weights: bool = False  # whether the layers return their local weights
    # gives the layers what other processes have read before this one (context parallelism)
    exchange: Any = None
    # of positions that are scaled by the length of a text: [`InfiniModelMixin.far_tables`]
    far_rotary: Any = {}


class Gate(nn.Module):
    """The gate of a layer (equation 5): `weight` `[heads]`, the logits β, uninitialised. It is a
    module, so that PEFT's `modules_to_save=["gate"]` can put a wrapper in its place, whose forward
    gives the logits of the active adapter."""

    def __init__(self, heads: int, **options):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads, **options))

    def forward(self) -> Tensor:
        """β, `[heads]`."""
        return self.weight


def memory_layers(model: nn.Module) -> dict[str, Any]:
    """The layers with a memory in a model, by name; found by a method: classes differ where a model
    came with its code."""
    return {
        name: module
        for name, module in model.named_modules()
        if hasattr(type(module), "add_memory_parameters")
    }


def gates_of(model: nn.Module) -> dict[str, Any]:
    """The gates of a model, perhaps wrapped by PEFT, by the name of their module,
    `transformer.h.0.attn.gate`."""
    return {
        f"{name}.gate": layer.gate
        for name, layer in memory_layers(model).items()
        if hasattr(layer, "gate")
    }


class MemoryLayerMixin(nn.Module):
    """A layer's memory; comes before the attention's class, whose forward calls `begin`, its own
    projections, and the function that `begin` gave. New are `gate` and the parameters that
    `first_values` lists."""

    options: Any  # the model's configuration, with [`MemoryOptions`]
    layer_idx: Any  # a number, which only a cache needs
    head_counts: tuple[int, int, int]  # query heads, key/value heads, and the width of one
    gate: Gate
    memory_conv: Tensor  # weights of the convolution, `[taps, width]`
    memory_write: Tensor  # times the input: the logarithm of a token's weight, `[kv_heads, width]`
    # times the input: a token's score, `[kv_heads, width]`; set it, for a choice has no gradient
    keep_weight: Tensor
    passage_keep_weight: Tensor  # likewise, of a second score

    @property
    def window(self) -> Window:
        """What its softmax sees."""
        return self.options.window_of(self.layer_idx)

    @functools.cached_property
    def rule(self) -> MemoryRule | None:
        """How its memory is written; `None`: it has none."""
        return rule_of(self.options)

    @property
    def keep_score(self) -> TokenScore:
        return SCORES[self.options.keep_score]

    @property
    def keep_weights(self) -> dict[str, Tensor]:
        """The parameters of a learned score, `[kv_heads, width]` each, by name."""
        names = self.keep_score.learns if self.options.kept_tokens else ()
        return {name: getattr(self, name) for name in names}

    def first_values(self, width: int) -> dict[str, Tensor]:
        """The first value of each parameter beside the gate, by its name; `width`: of the layer's
        input."""
        config, heads = self.options, self.head_counts[1]
        values: dict[str, Tensor] = {}
        if config.memory_conv:
            values["memory_conv"] = torch.zeros(config.memory_conv, width)
        if config.memory_write == "learned":
            values["memory_write"] = torch.zeros(heads, width)
        if config.kept_tokens:
            values |= {name: torch.zeros(heads, width) for name in self.keep_score.learns}
        return values if self.rule is None else values | self.rule.parameters(heads, width)

    def add_memory_parameters(self, width: int, **options) -> None:
        """Makes the parameters, uninitialised. `width`: of the layer's input; options: their
        `device` and `dtype`."""
        if self.rule is not None:
            self.gate = Gate(self.head_counts[0], **options).train(self.training)
        for name, value in self.first_values(width).items():
            setattr(
                self,
                name,
                nn.Parameter(
                    torch.empty(value.shape, **options),
                    requires_grad=name not in self.keep_score.learns,
                ),
            )

    @torch.no_grad()
    def init_memory_parameters(self) -> None:
        if self.rule is not None:
            init.constant_(self.gate.weight, self.options.gate_init)
        for name, value in self.first_values(1).items():  # the same for all numbers of the input
            init.copy_(getattr(self, name), value.expand_as(getattr(self, name)))
        for weight in self.keep_weights.values():
            weight.requires_grad_(False)  # which loading does not keep

    def begin(self, hidden_states: Tensor, infini: SharedInputs) -> tuple[Tensor, Attend]:
        """The input of the projections, `[batch, tokens, width]`: `hidden_states`, perhaps with the
        short convolution. And the function that attends with what they give, and leaves the layer's
        next state. `infini`: what the layers of the call share."""
        layout, exchange = infini.layouts[self.window], infini.exchange
        rule, score = self.rule, self.keep_score
        cached: Any = None if infini.cache is None else infini.cache.layers[self.layer_idx]
        state = None if cached is None else cached.state
        recent, taps = None if state is None else state.recent_inputs, self.options.memory_conv
        if taps:
            if recent is None:
                recent = hidden_states.new_zeros(
                    hidden_states.shape[0], taps - 1, hidden_states.shape[2]
                )
            if exchange is not None:
                [recent] = exchange.received((self.layer_idx, "inputs"), [recent], hidden_states)
            added, recent = short_convolution(hidden_states, self.memory_conv, layout, recent)
            hidden_states = hidden_states + added
            if exchange is not None:
                hidden_states = exchange.passed_on(
                    (self.layer_idx, "inputs"), hidden_states, [recent]
                )

        def attend_with_memory(query: Tensor, key: Tensor, value: Tensor, options: ScoreOptions):
            tokens = Tokens(
                key, value, self.log_weight(hidden_states), self.learned_score(hidden_states)
            )
            before = state
            if before is None:
                weighted = tokens.log_weight is not None
                before = InfiniState.initial(
                    key, value, *layout.window, rule=rule, weighted=weighted, scores=score.count
                )
            if exchange is not None:
                before = exchange.received_state(self.layer_idx, before, tokens)
            gate = None if rule is None else self.gate()
            wanted: dict[str, Any] = {
                "return_state": cached is not None,
                "in_place": not torch.is_grad_enabled(),
            }
            wanted |= {"layer": self.layer_idx, "inputs": hidden_states}
            output, after, weights = attend(
                AttentionCall(query, tokens, gate, layout, rule, options, before, score, **wanted)
            )
            if exchange is not None:
                output = exchange.passed_on_state(self.layer_idx, output, after)
            if cached is not None and after is not None:
                cached.left.append(after.having(recent_inputs=recent))
                if cached.read is not None:
                    cached.read.append((key, value))
            return output, weights if infini.return_weights else None

        return hidden_states, attend_with_memory

    def learned_score(self, hidden_states: Tensor) -> Tensor | None:
        """What the layer has learned of which tokens are kept, `[batch, kv_heads, tokens,
        learned]`, in float32; `None`: nothing. `hidden_states`: the input of its projections."""
        weights = self.keep_weights
        if not (weights and self.window.kept_tokens):
            return None
        return self.keep_score.of_inputs(hidden_states, **weights)

    def log_weight(self, hidden_states: Tensor) -> Tensor | None:
        """The log weight of each token, or its log rates, `[batch, kv_heads, tokens, rates]`;
        `None`: all weigh 1. `hidden_states`: the input of the projections, `[batch, tokens,
        width]`."""
        if self.rule is None:
            return None
        if own := {name: getattr(self, name) for name in self.rule.parameters(1, 1)}:
            return self.rule.log_rates(hidden_states, **own)
        if self.options.memory_write == "equal":
            return None
        return F.linear(hidden_states, self.memory_write).transpose(1, 2).unsqueeze(-1)


def infini_attention_function(
    module,
    query,
    key,
    value,
    attention_mask,
    dropout=0.0,
    *,
    attend: Attend,
    scaling=None,
    softcap=None,
    **others,
):
    """The registered attention function: what `attend` gives, its output as `[batch, tokens, heads,
    head_dim]`. Libraries that wrap all attention functions (kvpress) give the dropout by its place,
    which is that of transformers' own. `query`, `key`, `value`: `[batch, heads or kv_heads, tokens,
    head_dim]`, un-rotated; `dropout`, `scaling`, `softcap`: as of [`ScoreOptions`]; the calling
    `module`, `attention_mask` and `others`: not needed, as `attend` knows what is visible."""
    output, weights = attend(query, key, value, ScoreOptions(scaling, dropout, softcap=softcap))
    return output.transpose(1, 2), weights


AttentionInterface.register(INTERFACE, infini_attention_function)


def pass_on(layer, args: tuple, keywords: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """A pre-hook of a decoder `layer` that passes no keywords on to its attention, which is given
    `infini` as its mask. `args`, `keywords`: of the layer's call; returned for its forward."""
    return args, keywords | {"attention_mask": keywords.get("infini")}


class InfiniAttentionMixin(MemoryLayerMixin):
    """Segmented attention with a memory; comes before a decoder's own attention class, whose
    parameters stay as they are."""

    own_class: type  # the attention class that comes after this one
    argument_names: Sequence[str]  # of its forward, from the second on
    cache_argument: str  # which of them is the cache
    turning_function: Any = None  # turns a query and a key by rotary positions
    hook: RemovableHandle  # of [`pass_on`], where the decoder layer needs it

    def swap_in(
        self, config, tables: dict[str | None, tuple[Tensor, ...]], dtype: torch.dtype
    ) -> None:
        """Gives the layer its memory; `config`: of the model; `tables`:
        [`InfiniModelMixin.rotary_tables`]; `dtype`: where weights are quantized. ValueError where
        its forward fails."""
        self.options, self.config = config, copy.copy(config)
        # by which the own forward chooses its attention function
        self.config._attn_implementation = INTERFACE
        self.head_counts = config.num_attention_heads, *key_heads(config)[:2]
        self.rotary_type = (
            None if None in tables or not tables else config.layer_types[self.layer_idx]
        )
        options = {"device": device_of(self), "dtype": self._weight_dtype(dtype)}
        with one_refusal(self):
            self.turns_states = bool(tables) and self._turns_states(
                tables[self.rotary_type], **options
            )
        self.add_memory_parameters(config.hidden_size, **options)
        self.init_memory_parameters()

    def _weight_dtype(self, default: torch.dtype) -> torch.dtype:
        """That of the projections; `default`: where they are quantized."""
        matrices = (weight for weight in self.parameters() if weight.dim() > 1)
        return next((each.dtype for each in matrices if each.is_floating_point()), default)

    def swap_out(self) -> None:
        """Makes it a layer of the own class again."""
        self.config = self.options
        if hasattr(self, "hook"):
            self.hook.remove()
        added = ("hook", "options", "rule", "head_counts", "rotary_type", "turns_states")
        for name in (*PARAMETERS, *added):
            if hasattr(self, name):  # not all options add all of them
                delattr(self, name)
        swap_class(self, self.own_class)

    def _turns_states(self, tables: tuple[Tensor, ...], **options) -> bool:
        """Whether queries depend on the position embeddings: some models have layers without
        positions."""
        with torch.enable_grad(), in_evaluation(self):
            tables = tuple(
                table[None, :1].detach().to(options["device"], copy=True).requires_grad_()
                for table in tables
            )
            given: dict[str, Any] = dict.fromkeys(self.argument_names)
            if "position_embeddings" in given:
                given["position_embeddings"] = own_form(tables)
            found: list[Tensor] = []

            def attend(query: Tensor, *others):
                found.append(query)  # weights of 8 bits after it may have no gradient
                return query, None

            super().forward(
                torch.ones(1, 1, self.config.hidden_size, **options), attend=attend, **given
            )
            gradients = found[0].requires_grad and torch.autograd.grad(
                found[0].sum(), tables[0], allow_unused=True
            )
            return bool(gradients) and gradients[0] is not None

    @torch.no_grad()
    def check_swapped(self, tables: dict[str | None, tuple[Tensor, ...]]) -> None:
        """Compares attention inside one window, without a memory, with the own class's on random
        input: ValueError where they differ, or its forward fails. `tables`:
        [`InfiniModelMixin.rotary_tables`] of one place more than [`TEST_TOKENS`], in float32."""
        with one_refusal(self), in_float32(self), in_evaluation(self):
            difference, size = self._difference(
                tables.get(self.rotary_type) if self.turning_function else None
            )
        # Rounding in another order; and weights of few bits may round what they are multiplied by
        quantized = any(
            type(weight) is not nn.Parameter or not weight.is_floating_point()
            for weight in self.parameters()
        )
        # without parameters
        quantized |= any(type(part).__module__.startswith("torch.ao.") for part in self.modules())
        if not difference <= size * (0.03 if quantized else 1e-4):
            raise ValueError(
                f"layer {self.layer_idx}, a {self.own_class.__name__}, cannot be given a memory: "
                f"inside one window it would differ by {difference:.2g} from its own attention, "
                f"whose outputs reach {size:.2g}. What it does beside softmax attention over "
                "rotary positions is not known here."
            )

    def _difference(self, tables: tuple[Tensor, ...] | None) -> tuple[float, float]:
        """The largest difference on random input, and the largest number of the own class's
        output."""
        dtype = torch.promote_types(self._weight_dtype(torch.float32), torch.float32)
        like = torch.empty(0, device=device_of(self), dtype=dtype)
        tables = None if tables is None else tuple(table.to(like.device) for table in tables)
        shape = 1, TEST_TOKENS, self.config.hidden_size
        hidden_states = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(like)
        mask = like.new_full((TEST_TOKENS, TEST_TOKENS), torch.finfo(like.dtype).min).triu(1)[
            None, None
        ]
        given: dict[str, Any] = {"attention_mask": mask}
        if tables is not None and "position_embeddings" in self.argument_names:
            given["position_embeddings"] = own_form(
                tuple(table[None, :TEST_TOKENS] for table in tables)
            )
        self.config._attn_implementation = self.options._attn_implementation
        try:
            wanted = super().forward(hidden_states, **given)[0]
        finally:
            self.config._attn_implementation = INTERFACE
        in_one_window = SharedInputs(
            None, None, {} if tables is None else {self.rotary_type: tables}
        )
        found = type(self).forward(self, hidden_states, infini=in_one_window)[0]
        return float((found - wanted).abs().max()), float(wanted.abs().max())

    def forward(self, hidden_states: Tensor, *args, infini: SharedInputs | None = None, **kwargs):
        """As the own forward, of `hidden_states` `[batch, tokens, width]`; `infini`: what the base
        model made for all layers. The output is `[batch, tokens, width]`, and, with
        `output_attentions` or the eager implementation, the local weights `[batch, heads, tokens,
        places]`, with the places of its `window`: column `c` is place `c` of the query's, in which
        the sinks come first and the query's own segment last. Padding has zeros."""
        given: dict[str, Any] = dict(zip(self.argument_names, args, strict=False)) | kwargs
        # of a layer that drops keywords
        infini = given.get("attention_mask") if infini is None else infini
        if infini is None:
            raise ValueError(
                f"a {type(self).__name__} needs what its model makes for all layers: "
                "call the model."
            )
        tables, attend = infini.rotary.get(self.rotary_type), self._attend_in_one_window
        if infini.layouts is not None:
            hidden_states, attend = self.begin(hidden_states, infini)
        attend_turned = self.turning(attend, infini)
        if tables is not None and "position_embeddings" in self.argument_names:
            # with them, the own forward turns nothing
            ones, *sines = (table[None, :1] for table in tables)
            given["position_embeddings"] = own_form(
                (torch.ones_like(ones), *map(torch.zeros_like, sines))
            )
        # The cache tells how many columns came before (Llama 4 asks), and keeps nothing of keys and
        # values: `attend` does
        given |= {
            "attention_mask": None,
            self.cache_argument: infini.cache,
            "attend": attend_turned,
        }
        return super().forward(hidden_states, **given)

    def turning(self, attend: Attend, infini: SharedInputs) -> Attend:
        """`attend`, which turns queries and keys by their places in the window; `infini`: what the
        layers of the call share."""
        # of a GPT-2, whose own attention turns nothing
        how: dict[str, Any] = {"rotary": infini.rotary.get(self.rotary_type)}
        if self.turning_function is not None:
            how |= {"turn": self.turn, "far_rotary": infini.far_rotary.get(self.rotary_type)}
            if not self.turns_states:
                how["rotary"] = None

        def attend_turned(query: Tensor, key: Tensor, value: Tensor, options: ScoreOptions):
            return attend(
                query, key, value, replace(options, written_out=infini.return_weights, **how)
            )

        return attend_turned

    def _attend_in_one_window(
        self, query: Tensor, key: Tensor, value: Tensor, options: ScoreOptions
    ) -> tuple[Tensor, None]:
        """An [`Attend`]: softmax attention inside one window, from its second place on, without a
        memory."""
        if (found := (query.shape[1], key.shape[1], value.shape[3])) != self.head_counts:
            raise ValueError(
                f"layer {self.layer_idx}, a {self.own_class.__name__}, cannot be given a memory: "
                f"its query heads, key/value heads and their width are {found}, and its "
                f"configuration says {self.head_counts}."
            )
        places = slice(1, 1 + query.shape[2])
        query, key = options.compared(query, places), options.compared(key, places)
        query, key, value = (part[:, None] for part in (query, key, value))  # one segment
        return window_attention(query, key, value, None, options)[0][:, 0], None

    def turn(self, states: Tensor, *places: Tensor) -> Tensor:
        """Queries or keys, `states` `[…, tokens, head_dim]`, turned by the model's own function;
        `places`: their rows of the tables, `[tokens, width]` or `[batch, 1, tokens, width]`; of a
        head's numbers only so many are turned."""
        rows = [row[None] if row.dim() == 2 else row.squeeze(1) for row in places]
        flat = states if states.dim() == 4 else states.reshape(-1, 1, *states.shape[-2:])
        if rows[0].is_complex():  # Llama 4: heads after tokens
            turned, _ = self.turning_function(
                flat.transpose(1, 2), flat.transpose(1, 2)[:, :, :1], *rows
            )
            return turned.transpose(1, 2).reshape(states.shape)
        width = rows[0].shape[-1]
        front, rest = flat[..., :width], flat[..., width:]
        turned, _ = self.turning_function(front, front[:, :0], *rows)
        return torch.cat([turned, rest], -1).reshape(states.shape)


@contextlib.contextmanager
def one_refusal(layer: InfiniAttentionMixin) -> Iterator[None]:
    """Within it, what a layer's forward raises of its own, where it is called otherwise than its
    model calls it, is a ValueError that says so."""
    try:
        yield
    except (ValueError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(
            f"layer {layer.layer_idx}, a {layer.own_class.__name__}, cannot be given a memory: its "
            f"forward fails where it is compared with its own attention: {reason:.200}"
        ) from error


@contextlib.contextmanager
def in_float32(module: nn.Module) -> Iterator[None]:
    """Within it, plain parameters of a `module` of 16 bits, which would round large scores by
    more than 1, are in float32."""
    plain = [parameter for parameter in module.parameters() if type(parameter) is nn.Parameter]
    short = [
        parameter
        for parameter in plain
        if parameter.is_floating_point() and parameter.itemsize == 2
    ]
    kept = [parameter.data for parameter in short]
    try:
        for parameter in short:
            parameter.data = parameter.data.float()
        yield
    finally:
        for parameter, data in zip(short, kept, strict=True):
            parameter.data = data


def own_form(tables: tuple[Tensor, ...]) -> tuple[Tensor, ...] | Tensor:
    """Position embeddings, `tables`, as an own forward takes them: cosines and sines, or complex
    numbers."""
    return tables if len(tables) > 1 else tables[0]


@contextlib.contextmanager
def in_evaluation(module: nn.Module) -> Iterator[None]:
    """Within it, a `module` is in evaluation mode, but for bitsandbytes: on some CPUs weights of
    4 bits would lose gradients for good."""
    modes = {part: part.training for part in module.modules()}
    try:
        for part in modes:
            part.training = type(part).__module__.startswith("bitsandbytes.")
        yield
    finally:
        for part, mode in modes.items():
            part.training = mode
