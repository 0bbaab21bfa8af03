"""A decoder's attention layer with a memory: [`InfiniAttentionMixin`], which comes before the own attention class.

The layer's own forward runs with position embeddings that turn nothing and without a cache, and hands its queries, keys and
values (projected, normed, un-rotated) to an attention function that is registered here: the memory takes them as they are,
and the window turns them by its own places ([`Rotary`]) with the model's own function. So a position is never larger than a
window, however long the text.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from .cache import StatesOfCall
from .cache_name import CACHE, with_one_name
from .hooks import become, device_of
from .memory_layer import LayerCall, MemoryLayerMixin
from .positions import Rotary
from .segments import SegmentLayout
from .window import Softmax, window_attention

# The copies that travel with models have other module names, and register their own function
INTERFACE = f"infini_attention of {__name__}"
TEST_TOKENS = 12  # with which a swapped layer is compared with its own attention


class ModelCall(NamedTuple):
    """What the layers of one call share.

    Attributes:
        layout: of the tokens; states: of the layers, or `None` without a cache; columns: that came before this call.
        rotary: the tables of a window's places, by the type of layer (`None`: one for all); empty without rotary positions.
        return_weights: whether the layers are asked for their local weights.
    """

    layout: SegmentLayout
    states: StatesOfCall | None
    columns: int
    rotary: dict[str | None, tuple[Tensor, ...]]
    return_weights: bool = False


class Told(NamedTuple):
    """What a layer tells its attention function: its call (`None`: attend inside one window, without a memory; a list: put
    there what you are given), how states are turned, and [`ModelCall.return_weights`]."""

    call: LayerCall | list | None
    rotary: Rotary | None
    return_weights: bool = False


class LayerConfig:
    """A model's configuration as its layers with a memory see it: always the same, but for the attention function."""

    _attn_implementation = INTERFACE

    def __init__(self, of_model):
        self.of_model = of_model

    def __getattr__(self, name: str):
        if name == "of_model":  # while a copy is made
            raise AttributeError(name)
        return getattr(self.of_model, name)


class PastColumns:
    """Stands in for the cache inside a layer's own forward: keeps nothing, and tells how many columns came before."""

    def __init__(self, columns: int):
        self.columns = columns

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.columns

    def update(self, key: Tensor, value: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        return key, value


def infini_attention_function(module, query, key, value, attention_mask, *, scaling=None, dropout=0.0, **given):
    """The registered attention function: `[batch, heads, tokens, head_dim]` un-rotated to `[batch, tokens, heads, head_dim]`
    and the weights, or `None`."""
    told = given["told"]
    eager = module.config.of_model._attn_implementation == "eager"
    written_out = eager or told.return_weights
    upcast = eager and getattr(module, "reorder_and_upcast_attn", False)
    softmax = Softmax(scaling, dropout, written_out, upcast, given.get("softcap"), told.rotary)
    if isinstance(told.call, list):
        told.call.append((query, key, value, softmax))
        return query.transpose(1, 2), None
    if told.call is None:
        if (found := (query.shape[1], key.shape[1], value.shape[3])) != module.head_counts:
            raise ValueError(
                f"layer {module.layer_idx}, a {module.own_class.__name__}, cannot be given a memory: its query heads, "
                f"key/value heads and their width are {found}, and its configuration says {module.head_counts}."
            )
        places = slice(1, 1 + query.shape[2])
        query, key = softmax.compared_queries(query, places), softmax.compared_keys(key, places)
        query, key, value = (part[:, None, :, None] for part in (query, key, value))  # one segment of one block
        output, weights = window_attention(query, key, value, None, softmax)[0][:, 0, :, 0], None
    else:
        output, weights = module.attend_with_memory(told.call, query, key, value, softmax, written_out)
    return output.transpose(1, 2), weights


AttentionInterface.register(INTERFACE, infini_attention_function)


class InfiniAttentionMixin(MemoryLayerMixin):
    """Segmented attention with a memory; comes before a decoder's own attention class, whose parameters stay as they are.
    [`MemoryLayerMixin`] describes the new ones."""

    own_class: type  # the attention class that comes after this one
    argument_names: Sequence[str]  # of its forward, from the second on
    cache_argument: str  # which of them is the cache
    turning_function: Any = None  # turns a query and a key by rotary positions

    def swap_in(self, config: LayerConfig, tables: dict[str | None, tuple[Tensor, ...]], dtype: torch.dtype) -> None:
        """Gives the layer its memory; `tables`: the model's [`InfiniModelMixin.rotary_tables`]; `dtype`: the model's, for a
        layer whose weights are quantized and its biases in any type."""
        self.config = config
        self.rotary_type = None if None in tables or not tables else config.layer_types[self.layer_idx]
        weights = (weight.dtype for weight in self.parameters() if weight.dim() > 1 and weight.is_floating_point())
        options = {"device": device_of(self), "dtype": next(weights, dtype)}
        self.turns_states = bool(tables) and self._turns_states(tables[self.rotary_type], **options)
        self.add_memory_parameters(config.hidden_size, **options)
        self.init_memory_parameters()

    def swap_out(self) -> None:
        """Makes it a layer of the own class again, whatever its memory has learned."""
        self.drop_memory_parameters()
        self.config = self.config.of_model
        for name in ("rotary_type", "turns_states"):
            self.__dict__.pop(name, None)  # not there where the memory could not be added
        become(self, self.own_class)

    @property
    def head_counts(self) -> tuple[int, int, int]:
        """Query heads, key/value heads, and the width of one."""
        heads = self.config.num_attention_heads
        width = getattr(self, "head_dim", None) or getattr(self, "head_size", None) or self.config.hidden_size // heads
        return heads, getattr(self.config, "num_key_value_heads", None) or heads, width

    def _turns_states(self, tables: tuple[Tensor, ...], **options) -> bool:
        """Whether queries depend on the position embeddings: some models have layers without positions; `options`: the
        `device` and `dtype` of the layer."""
        with torch.enable_grad(), in_evaluation(self):
            tables = tuple(table[:1].detach().to(options["device"], copy=True).requires_grad_() for table in tables)
            hidden_states = torch.ones(1, 1, self.config.hidden_size, **options)
            found: list[tuple[Tensor, Tensor, Tensor, Softmax]] = []
            given = dict.fromkeys(self.argument_names) | {"told": Told(found, None)}
            if "position_embeddings" in given:
                given["position_embeddings"] = tables if len(tables) > 1 else tables[0]
            super().forward(hidden_states, **given)
            query = found[0][0]  # not the output, through whose weights of 8 bits there may be no gradient
            return query.requires_grad and torch.autograd.grad(query.sum(), tables[0], allow_unused=True)[0] is not None

    def projections(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor, Softmax]:
        """Queries, keys and values of `[batch, tokens, width]`, `[batch, heads, tokens, head_dim]` each, un-rotated, and how
        its windows are computed outside of a model."""
        found: list[tuple[Tensor, Tensor, Tensor, Softmax]] = []
        told = Told(found, self.window_rotary(None, hidden_states))
        super().forward(hidden_states, told=told, **dict.fromkeys(self.argument_names))
        return found[0]

    def in_one_window(self, hidden_states: Tensor, position_embeddings, rotary: Rotary | None) -> Tensor:
        """The output of softmax attention inside one window, without a memory, from its second place on;
        `position_embeddings` as the own forward takes them, `rotary` turns what comes out of it."""
        given = dict.fromkeys(self.argument_names) | {"told": Told(None, rotary)}
        if "position_embeddings" in given:
            given["position_embeddings"] = position_embeddings
        return super().forward(hidden_states, **given)[0]

    @torch.no_grad()
    def check_swapped(self, tables: dict[str | None, tuple[Tensor, ...]]) -> None:
        """Compares attention inside one window, without a memory, with the own class's on random input.

        Args:
            tables: the model's [`InfiniModelMixin.rotary_tables`] of one place more than [`TEST_TOKENS`], in float32.

        Raises:
            ValueError: they differ.
        """
        with in_float32(self), in_evaluation(self):
            difference, size = self._difference(tables.get(self.rotary_type))
        # Rounding in another order: a few units in the last place of sums of some hundred products. Weights of few bits may
        # round what they are multiplied by
        quantized = any(type(weight) is not nn.Parameter or not weight.is_floating_point() for weight in self.parameters())
        quantized |= any(type(part).__module__.startswith("torch.ao.") for part in self.modules())  # without parameters
        if not difference <= size * (0.03 if quantized else 1e-4):
            raise ValueError(
                f"layer {self.layer_idx}, a {self.own_class.__name__}, cannot be given a memory: inside one window it would "
                f"differ by {difference:.2g} from its own attention, whose outputs reach {size:.2g}. What it does beside "
                "softmax attention over rotary positions is not known here."
            )

    def _difference(self, tables: tuple[Tensor, ...] | None) -> tuple[float, float]:
        """The largest difference on random input, and the largest number of the own class's output."""
        like = torch.empty(0, device=device_of(self), dtype=torch.promote_types(self.gate.weight.dtype, torch.float32))
        tables = None if tables is None else tuple(table.to(like.device) for table in tables)
        shape = 1, TEST_TOKENS, self.config.hidden_size
        hidden_states = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(like)
        mask = like.new_full((TEST_TOKENS, TEST_TOKENS), torch.finfo(like.dtype).min).triu(1)[None, None]
        given: dict[str, Any] = {"attention_mask": mask}
        neutral_ones = None
        if tables is not None and "position_embeddings" in self.argument_names:
            embeddings, neutral_ones = tuple(table[None, :TEST_TOKENS] for table in tables), neutral(tables)
            given["position_embeddings"] = embeddings if len(embeddings) > 1 else embeddings[0]
        config, self.config = self.config, self.config.of_model
        try:
            wanted = super().forward(hidden_states, **given)[0]
        finally:
            self.config = config
        rotary = Rotary(tables, self.turn) if tables is not None and self.turns_states else None
        found = self.in_one_window(hidden_states, neutral_ones, rotary)
        return float((found - wanted).abs().max()), float(wanted.abs().max())

    def forward(self, hidden_states: Tensor, *args, infini: ModelCall | None = None, **kwargs):
        """As the own forward, and

        Args:
            infini: what the base model made for all layers. Without it the layer is called outside of a model, which works
                for models without rotary positions: then the layout is made from `attention_mask` and `position_ids`,
                `[batch, tokens]` each, and a cache is brought up to date.

        Returns:
            The output `[batch, tokens, width]`, and, with `output_attentions` or the eager implementation, the local weights
            `[batch, heads, tokens, sink_tokens + (local_segments + 1) * segment_length]`: column `c` is place `c` of the
            query's window, in which the sinks come first and the query's own segment last. Padding has zeros.
        """
        given = dict(zip(self.argument_names, args, strict=False)) | kwargs
        given = with_one_name(given, CACHE)
        infini = getattr(given.get("attention_mask"), "infini", infini)
        if given.get("encoder_hidden_states") is not None:
            raise ValueError(f"a {type(self).__name__} is causal self-attention; cross-attention is not supported.")
        cache = given.pop(self.cache_argument, None)
        tables = None if infini is None else infini.rotary.get(self.rotary_type)
        rotary = self.window_rotary(tables, hidden_states)
        if infini is None:
            masks = {name: given.get(name) for name in ("attention_mask", "position_ids")}
            call = self.begin(hidden_states, cache=cache, **masks)
            columns, weights = 0 if cache is None else cache.get_seq_length(), bool(given.get("output_attentions"))
        else:
            call = self.begin(hidden_states, layout=infini.layout, states=infini.states)
            columns, weights = infini.columns, infini.return_weights
        told = Told(call, rotary, weights)
        if tables is not None and "position_embeddings" in self.argument_names:
            given["position_embeddings"] = neutral(tables)
        given |= {"attention_mask": None, self.cache_argument: PastColumns(columns), "told": told}
        return super().forward(call.hidden_states, **given)

    def window_rotary(self, tables: tuple[Tensor, ...] | None, like: Tensor) -> Rotary | None:
        """How queries and keys are turned, of the model's tables (`None` outside of a model); `None`: not at all."""
        if tables is None and "position_embeddings" in self.argument_names:
            raise ValueError(
                f"a {type(self).__name__} needs what its model makes for all layers: call the model. (Layers that take no "
                "keywords, those of stablelm and nemotron, must be on one device.)"
            )
        return Rotary(tables, self.turn) if tables is not None and self.turns_states else None

    def turn(self, states: Tensor, *places: Tensor) -> Tensor:
        """States `[…, tokens, head_dim]` turned by the model's own function; `places`: their rows of the tables,
        `[tokens, width]` or `[batch, 1, tokens, width]`; of a head's numbers only so many are turned."""
        rows = [row[None] if row.dim() == 2 else row.squeeze(1) for row in places]
        flat = states if states.dim() == 4 else states.reshape(-1, 1, *states.shape[-2:])
        if rows[0].is_complex():  # Llama 4: heads after tokens
            turned, _ = self.turning_function(flat.transpose(1, 2), flat.transpose(1, 2)[:, :, :0], *rows)
            return turned.transpose(1, 2).reshape(states.shape)
        width = rows[0].shape[-1]
        front, rest = flat[..., :width], flat[..., width:]
        turned, _ = self.turning_function(front, front[:, :0], *rows)
        return torch.cat([turned, rest], -1).reshape(states.shape)


@contextlib.contextmanager
def in_float32(module: nn.Module) -> Iterator[None]:
    """Within it, a module's parameters of 16 bits are in float32; those of quantized weights stay. Where scores are large,
    16 bits round them by more than 1, and softmax gives something else for every order of the sums."""
    plain = [parameter for parameter in module.parameters() if type(parameter) is nn.Parameter]
    short = [parameter for parameter in plain if parameter.is_floating_point() and parameter.itemsize == 2]
    kept = [parameter.data for parameter in short]
    try:
        for parameter in short:
            parameter.data = parameter.data.float()
        yield
    finally:
        for parameter, data in zip(short, kept, strict=True):
            parameter.data = data


@contextlib.contextmanager
def in_evaluation(module: nn.Module) -> Iterator[None]:
    """Within it, a module is in evaluation mode, but for the layers of bitsandbytes: on some CPUs that mode brings weights
    of 4 bits into a form that has no gradients, for good."""
    modes = {part: part.training for part in module.modules()}
    try:
        for part in modes:
            part.training = type(part).__module__.startswith("bitsandbytes.")
        yield
    finally:
        for part, mode in modes.items():
            part.training = mode


def neutral(tables: tuple[Tensor, ...]) -> tuple[Tensor, ...] | Tensor:
    """Position embeddings `[1, 1, width]` that turn nothing, in the form of a window's tables."""
    if len(tables) == 1:  # complex numbers
        return torch.ones_like(tables[0][None, :1])
    cos, sin = tables
    return torch.ones_like(cos[None, :1]), torch.zeros_like(sin[None, :1])
