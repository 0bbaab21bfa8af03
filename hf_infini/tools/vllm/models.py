"""vLLM's own models with a memory in their attention.

A model is vLLM's, with its projections, norms and loading. Its attention layers call two parts that
are ours: rotary positions that turn nothing, and an attention whose state is a page. What a layer's
memory computes it gets from the layer of the patched model of transformers, which is made without
weights; the two share the parameters of the memory.
"""

import copy
import functools
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModel
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.models import ModelRegistry
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

from ...cache.cache import InfiniCache
from ...layers.memory_layer import PARAMETERS, InfiniAttentionMixin, SharedInputs
from ...models.base import memory_mask_of
from ...models.structure import attention_layers
from ...ops.equations import ScoreOptions
from ...ops.layout.grid import segment_layout
from ...ops.state import InfiniState
from ...options import first_layers
from .pages import Page, pages_of, places


@dataclass
class Group:
    """Requests of one forward pass that are computed in one call: they have as many new tokens, and
    all or none have tokens before."""

    index: Tensor  # `[requests, tokens]`: where the tokens are among those of the pass
    fresh: bool  # whether there are no tokens before
    pages: dict[int, Tensor | slice]  # of the requests, by layer
    infini: Any = None  # [`SharedInputs`] of the call
    # of layers that were read for the layouts, by their numbers
    states: dict[int, InfiniState] = field(default_factory=dict)

    def state_of(self, layer: "PagedAttention") -> InfiniState | None:
        """What the requests have in a layer; `None`: nothing yet."""
        if self.fresh:
            return None
        number = layer.layer_idx
        state = self.states.pop(number, None)
        return layer.page.read(layer.kv_cache, self.pages[number]) if state is None else state


class Pass:
    """What the layers of a model share in one forward pass."""

    def __init__(self, config: Any, rotary: dict, far_rotary: dict):
        """`config`: of the model; `rotary`, `far_rotary`: as of [`SharedInputs`]."""
        self.config, self.rotary, self.far_rotary = config, rotary, far_rotary
        self.layers: dict[int, PagedAttention] = {}
        self.groups: list[Group] = []

    def begin(self, input_ids: Tensor | None) -> None:
        """Sorts the requests of the pass, whose tokens are `input_ids` `[tokens]`, into groups."""
        self.groups = []
        metadata: Any = get_forward_context().attn_metadata
        if metadata is None:  # vLLM measures memory
            return
        of_layers = {number: metadata[layer.prefix] for number, layer in self.layers.items()}
        # layers whose pages are managed together share theirs
        different = {id(each): each for each in of_layers.values()}
        tables = {key: each.state_indices_tensor.tolist() for key, each in different.items()}
        first = next(iter(different.values()))
        starts, lengths = first.query_start_loc.tolist(), first.seq_lens.tolist()
        device = first.query_start_loc.device
        found: dict[tuple[int, bool], list[int]] = {}
        for row in range(first.num_decodes + first.num_prefills):
            tokens = starts[row + 1] - starts[row]
            found.setdefault((tokens, tokens == lengths[row]), []).append(row)
        for (tokens, fresh), rows in found.items():
            begins = torch.tensor([starts[row] for row in rows], device=device)
            index = begins[:, None] + torch.arange(tokens, device=device)
            # a single token is written into its state in place
            pages = {
                key: places([table[row] for row in rows], tokens == 1, device)
                for key, table in tables.items()
            }
            of_group = {number: pages[id(each)] for number, each in of_layers.items()}
            group = Group(index, fresh, of_group)
            self._lay_out(group, None if input_ids is None else input_ids[index])
            self.groups.append(group)

    def _lay_out(self, group: Group, input_ids: Tensor | None) -> None:
        firsts = first_layers(self.config.windows)
        group.states = states = {
            layer: state
            for layer in firsts.values()
            if (state := group.state_of(self.layers[layer])) is not None
        }
        mask = memory_mask_of(self.config, input_ids, None)
        requests, tokens = group.index.shape
        layouts = {
            window: segment_layout(
                requests,
                tokens,
                window,
                memory_mask=mask,
                state=states.get(layer),
                device=group.index.device,
            )
            for window, layer in firsts.items()
        }
        cache = InfiniCache(self.config).for_call(None, None)
        group.infini = SharedInputs(layouts, cache, self.rotary, far_rotary=self.far_rotary)


class PagedAttention(MambaBase):
    """Comes before the class of an attention layer of vLLM, which projects, norms and calls
    `rotary_emb` and `attn`."""

    memory: InfiniAttentionMixin  # the layer of transformers' model, without projections
    layer_idx: int
    prefix: str  # its name among vLLM's layers with a cache
    page: Page
    page_bytes: int  # of all layers
    shared: Pass
    options: ScoreOptions
    calls: list  # of the running pass: groups, and what attends

    def get_state_shape(self):
        return self.page.shapes

    def get_state_dtype(self):
        return self.page.dtypes

    @property
    def mamba_type(self):
        return MambaAttentionBackendEnum.LINEAR

    def get_kv_cache_spec(self, vllm_config: VllmConfig):
        """vLLM's, with pages that are as large in all layers; `vllm_config`: its settings."""
        spec: Any = super().get_kv_cache_spec(vllm_config)
        return replace(spec, page_size_padded=max(self.page_bytes, spec.page_size_padded or 0))

    def forward(self, positions: Tensor, hidden_states: Tensor):
        """As vLLM's own, of `positions` `[tokens]` and `hidden_states` `[tokens, width]` of all
        requests."""
        self.calls, before = [], hidden_states
        for group in self.shared.groups:
            cached = group.infini.cache.layers[self.layer_idx]
            cached.state = group.state_of(self)
            inputs, attend = self.memory.begin(before[group.index], group.infini)
            if self.memory.options.memory_conv:
                hidden_states = hidden_states.clone() if hidden_states is before else hidden_states
                hidden_states[group.index] = inputs
            self.calls.append((group, cached, self.memory.turning(attend, group.infini)))
        return super().forward(positions, hidden_states)

    def rotary_emb(self, positions: Tensor, query: Tensor, key: Tensor):
        """`query` and `key` as they are: the window turns them by its own places, and not by
        `positions`."""
        return query, key

    def attn(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """What the heads give, `[tokens, heads · width]`, of `query`, `key` and `value`, which are
        alike, un-rotated; the next states go into the pages."""
        output, width = torch.zeros_like(query), self.memory.head_counts[2]
        for group, cached, attend in self.calls:
            given = (
                part[group.index].unflatten(-1, (-1, width)).transpose(1, 2)
                for part in (query, key, value)
            )
            heads, _ = attend(*given, self.options)
            output[group.index] = heads.transpose(1, 2).flatten(2)
            self.page.write(self.kv_cache, group.pages[self.layer_idx], cached.left[0])
        return output


class InfiniModel(nn.Module):
    """Comes before the class of a model of vLLM."""

    has_inner_state = True
    is_hybrid = True
    shared: Pass

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        """As vLLM's own: `vllm_config` has its settings, and `prefix` is the model's name."""
        given: Any = {"vllm_config": vllm_config, "prefix": prefix}
        super().__init__(**given)
        vars(self)["shared"] = give_memory(self, vllm_config)

    def forward(self, input_ids: Tensor | None, *args, **kwargs):
        """As vLLM's own, of `input_ids` `[tokens]` of all requests."""
        self.shared.begin(input_ids)
        return super().forward(input_ids, *args, **kwargs)

    @classmethod
    def _widest(cls, vllm_config: VllmConfig) -> Page:
        model: Any = vllm_config.model_config
        found = pages_of(model.hf_config, model.dtype)
        return max(found.values(), key=lambda page: page.nbytes)

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: VllmConfig):
        """Of the widest page; `vllm_config`: the settings of vLLM."""
        return cls._widest(vllm_config).shapes

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: VllmConfig):
        """Of the widest page; `vllm_config`: the settings of vLLM."""
        return cls._widest(vllm_config).dtypes


def give_memory(model: nn.Module, vllm_config: VllmConfig) -> Pass:
    """Gives layers of a `model` of vLLM their memory, in place; what they share. `vllm_config`: the
    settings of vLLM."""
    settings: Any = vllm_config.model_config
    config, dtype = copy.deepcopy(settings.hf_config), settings.dtype
    device = next(model.parameters()).device
    with torch.device("meta"):
        base: Any = AutoModel.from_config(config, dtype=dtype)
    with device:  # its tables are numbers
        base.rotary_emb = type(base.rotary_emb)(base.config)
    tables = (
        base.rotary_tables(config.places, dtype, device),
        base.far_tables(config.places, device),
    )
    shared, found = Pass(base.config, *tables), pages_of(config, dtype)
    memories: Any = attention_layers(base)
    page_bytes = max(page.nbytes for page in found.values())
    for number, page in found.items():
        layer: Any = model.get_submodule(f"model.layers.{number}")
        memory = without_projections(memories[number]).to_empty(device=device)
        more = {"page": page, "page_bytes": page_bytes, "shared": shared, "layer_idx": number}
        layer.self_attn = paged(layer.self_attn, memory, **more)
        shared.layers[number] = layer.self_attn
        registered = vllm_config.compilation_config.static_forward_context
        registered[layer.self_attn.prefix] = layer.self_attn
    return shared


def without_projections(memory: InfiniAttentionMixin) -> InfiniAttentionMixin:
    """The layer `memory` of transformers with the parameters of its memory only."""
    for name in [*memory._modules]:
        if name not in PARAMETERS:
            delattr(memory, name)
    return memory


def paged(own: Any, memory: InfiniAttentionMixin, **more) -> PagedAttention:
    """An `own` attention layer of vLLM that keeps its state in pages; `memory`: what computes it,
    whose parameters it gets; `more`: attributes. Its class cannot be swapped in place, for the
    layouts of the two objects differ."""
    kind: Any = paged_class(type(own))
    attention = kind.__new__(kind)
    vars(attention).update(vars(own))
    plain = attention._modules.pop("attn")
    del attention.rotary_emb
    options = ScoreOptions(plain.impl.scale, softcap=plain.impl.logits_soft_cap or None)
    more |= {"memory": memory, "prefix": plain.layer_name, "options": options}
    vars(attention).update(more, kv_cache=(), calls=[])  # and no parts of it
    for name in PARAMETERS:
        if hasattr(memory, name):
            setattr(attention, name, getattr(memory, name))
    return attention


@functools.cache
def paged_class(own: type) -> type:
    """The class with a memory of an attention layer of vLLM, whose `own` class this is."""
    return type(f"Paged{own.__name__}", (PagedAttention, own), {"__module__": __name__})


@functools.cache
def model_class(own: str) -> type:
    """The class with memories of the model that vLLM has by the name `own`."""
    found = ModelRegistry.models[own].load_model_cls()
    return type(f"Infini{own}", (InfiniModel, found), {"__module__": __name__})


def __getattr__(name: str) -> type:
    """A model by its name, as the entry `architectures` of a saved one's configuration has it."""
    if name.removeprefix("Infini") in ModelRegistry.models and name.startswith("Infini"):
        return model_class(name.removeprefix("Infini"))
    raise AttributeError(f"module {__name__} has no {name}.")
